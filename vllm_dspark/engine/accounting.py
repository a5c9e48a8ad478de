# SPDX-License-Identifier: Apache-2.0
"""Turns decisions and their outcomes into metrics and step records.

Counts are taken once per step, when both the decision and what it committed are known. Requests
that commit nothing in a step (a prefill that goes on) are not counted.
"""

from __future__ import annotations

import multiprocessing.util
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from vllm_dspark import metrics_export
from vllm_dspark.alarms import AlarmLog
from vllm_dspark.config import DSparkConfig
from vllm_dspark.core.cost_io import Fingerprint, cost_to_dict
from vllm_dspark.core.planner import Planner
from vllm_dspark.engine.decision import StepDecision
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.planner import LAG_STEPS
from vllm_dspark.metrics import MetricsWriter
from vllm_dspark.records import RecordAnswerer, RecordRing, RecordSaver, StepRecord

_ALARM_INTERVAL_S = 30.0
_ANSWER_INTERVAL_S = 0.5


class Accounting:
    """Observer of one rank; only rank 0 counts decisions, see ``MetricsWriter``.

    Args:
        writer: counters of this process.
        mode: verify mode, as a label.
        core: whose calibration says what a confidence is worth.
        ring: step records, None if they are off.
    """

    def __init__(
        self, writer: MetricsWriter, mode: VerifyMode, core: Planner, ring: RecordRing | None
    ) -> None:
        self._writer = writer
        self._core = core
        compact = mode in (VerifyMode.HOST, VerifyMode.DEVICE)
        self._label = "compact" if compact else str(mode)
        self._ring = ring

    def __call__(self, decision: StepDecision, accepted: np.ndarray) -> None:
        plan, writer, rows = decision.plan, self._writer, decision.samples
        graph = decision.graph_tokens or 0
        label = self._label
        writer.observe_plan(
            mode=label,
            reason=str(plan.reason),
            scheduled_tokens=int(decision.eligible.sum()),
            budget_tokens=-1 if plan.budget is None else plan.budget,
            tier_tokens=graph,
            padded_tokens=max(graph - decision.num_tokens, 0),
            graph_miss=decision.graph_miss,
            bypass=decision.running_drafts == 0 and bool(decision.eligible.any()),
        )
        for doubt, count in plan.doubts.items():
            writer.observe_doubt(doubt.name.lower(), count)
        assert decision.admitted is not None, "settled"
        wanted = self._ring is not None or writer.wants_survivals
        survivals = self._survivals(decision) if wanted else None
        writer.observe_accept(
            decision.eligible[rows], decision.admitted[rows], accepted[rows], survivals
        )
        if plan.predicted_step_ms is not None and decision.measured_ms is not None:
            writer.observe_timing(plan.predicted_step_ms / 1e3, decision.measured_ms / 1e3)
        if self._ring is not None:
            start = time.perf_counter()
            self._ring.add(self._record(decision, label, accepted, survivals))
            writer.observe_overhead("records", time.perf_counter() - start)

    def _survivals(self, decision: StepDecision) -> np.ndarray:
        """Survivals ``[num_sampling, gamma]`` of the verified block as the policy sees them."""
        assert decision.predicted is not None, "settled"
        rows, regimes = decision.samples, decision.regimes
        regimes = regimes if isinstance(regimes, int) else regimes[rows]
        calibrated = self._core.calibration.apply(decision.predicted[rows].T, regimes)
        return np.cumprod(calibrated, axis=0).T

    def _record(
        self,
        decision: StepDecision,
        label: str,
        accepted: np.ndarray,
        survivals: np.ndarray | None,
    ) -> StepRecord:
        rows, plan = decision.samples, decision.plan
        assert decision.admitted is not None and decision.predicted is not None
        return StepRecord(
            step=decision.step,
            time_s=decision.time_s,
            num_reqs=len(rows),
            num_sampling=int(np.count_nonzero(rows)),
            base_tokens=int(decision.base_lens.sum()),
            scheduled=decision.eligible[rows],
            budget=-1 if plan.budget is None else plan.budget,
            lag_steps=LAG_STEPS,
            mode=label,
            reason=str(plan.reason),
            tier_tokens=decision.graph_tokens or 0,
            verify_lens=decision.admitted[rows] + 1,
            survivals=survivals,
            accepted=accepted[rows],
            predicted_ms=plan.predicted_step_ms,
            measured_ms=decision.measured_ms,
            request_ids=[decision.req_ids[i] for i in np.flatnonzero(rows)],
            confidence=decision.predicted[rows],
            regimes=np.broadcast_to(decision.regimes, rows.shape)[rows],
        )


def start_accounting(
    config: DSparkConfig,
    vllm_config: Any,
    mode: VerifyMode,
    writer: MetricsWriter,
    core: Planner,
    fingerprint: Fingerprint,
) -> Accounting:
    """Accounting with alarms and records as the options ask for; rank 0 keeps the records."""
    decides = writer.tp_rank == 0
    if writer.enabled and decides:
        log = AlarmLog()
        writer.every(_ALARM_INTERVAL_S, lambda: log(writer.snapshot()))
    if not config.records or not decides:
        return Accounting(writer, mode, core, None)
    ring = RecordRing(
        config.records,
        {
            "gamma": core.gamma,
            "model": vllm_config.model_config.model,
            "draft_model": vllm_config.speculative_config.model,
            "mode": str(mode),
            "engine": writer.engine_index,
            "fingerprint": asdict(fingerprint),
        },
        lambda: {"cost": None if core.cost is None else cost_to_dict(core.cost, fingerprint)},
    )
    directory = metrics_export.private_dir()
    if directory is not None and writer.enabled:
        answerer = RecordAnswerer(ring, directory, writer.engine_index)
        writer.every(_ANSWER_INTERVAL_S, answerer.poll)
    if config.records_path is not None:
        saver = RecordSaver(ring, config.records_path)
        if writer.enabled:
            writer.every(_ANSWER_INTERVAL_S, saver.poll)
        # atexit does not run in forked workers; multiprocessing's own finalizers do.
        multiprocessing.util.Finalize(None, saver.save, exitpriority=9)
    return Accounting(writer, mode, core, ring)
