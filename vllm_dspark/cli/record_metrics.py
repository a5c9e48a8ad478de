# SPDX-License-Identifier: Apache-2.0
"""Records as the counters that the server would have published for them.

The same `MetricsWriter` that serves `/metrics` counts them, so a report from records and one from
metrics mean the same thing by every name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dspark.cli.costs import step_tokens
from vllm_dspark.metrics import MetricsWriter
from vllm_dspark.metrics_snapshot import Snapshot
from vllm_dspark.records import StepRecord


def snapshot_of(
    records: Sequence[StepRecord], gamma: int, *, reliability_every: int = 1
) -> Snapshot:
    """Counters of the settled steps of `records`.

    Doubt, disagreements, sync and accept paths are not recorded, so their series are absent.
    """
    writer = MetricsWriter(0, 0, gamma, directory="", reliability_every=reliability_every)
    try:
        for record in records:
            _observe(writer, record)
        return writer.snapshot()
    finally:
        writer.close()


def _observe(writer: MetricsWriter, record: StepRecord) -> None:
    tokens, scheduled = step_tokens(record), int(record.scheduled.sum())
    writer.observe_plan(
        mode=record.mode,
        reason=record.reason,
        scheduled_tokens=scheduled,
        budget_tokens=record.budget,
        tier_tokens=record.tier_tokens,
        padded_tokens=max(record.tier_tokens - tokens, 0),
        bypass=tokens == record.base_tokens and scheduled > 0,
    )
    if record.accepted is not None and record.verify_lens is not None:
        admitted = np.asarray(record.verify_lens) - 1
        writer.observe_accept(record.scheduled, admitted, record.accepted, record.survivals)
    if record.predicted_ms is not None and record.measured_ms is not None:
        writer.observe_timing(record.predicted_ms / 1e3, record.measured_ms / 1e3)
