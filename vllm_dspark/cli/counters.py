# SPDX-License-Identifier: Apache-2.0
"""Speculation counters of a running server, read from the text of its `/metrics`.

vLLM's own counters know what was scheduled and accepted, the plugin's what was scheduled, verified
and trimmed; a step enters the plugin's when the next one runs, so the two may be a step apart.
Without the plugin's, every scheduled draft was verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from vllm_dspark.metrics_snapshot import PREFIX

HOST_PREFIX = "vllm:spec_decode_num_"
PLUGIN_PREFIX = PREFIX + "draft_tokens_"

# The plugin publishes its counters about every half second.
SETTLE_S = 1.2
SETTLE_LIMIT_S = 12.0


@dataclass(frozen=True)
class Counters:
    """Totals since the server started, or the difference of two such readings.

    Attributes:
        blocks: verified blocks, one per request and step.
        scheduled: draft tokens that were proposed to the target.
        verified: draft tokens that the target ran.
        trimmed: draft tokens that were proposed but not verified.
        accepted: draft tokens that were committed.
        from_plugin: whether the plugin counted `scheduled`, `verified` and `trimmed`.
    """

    blocks: int
    scheduled: int
    verified: int
    trimmed: int
    accepted: int
    from_plugin: bool

    @classmethod
    def parse(cls, text: str) -> Counters:
        """Counters in Prometheus text, summed over labels; all zero without speculation."""
        totals = _totals(text)
        drafts = totals.get(f"{HOST_PREFIX}draft_tokens_total", 0)
        scheduled, verified, trimmed = drafts, drafts, 0
        from_plugin = f"{PLUGIN_PREFIX}scheduled_total" in totals
        if from_plugin:
            scheduled, verified, trimmed = (
                totals.get(f"{PLUGIN_PREFIX}{name}_total", 0)
                for name in ("scheduled", "admitted", "trimmed")
            )
        return cls(
            blocks=totals.get(f"{HOST_PREFIX}drafts_total", 0),
            scheduled=scheduled,
            verified=verified,
            trimmed=trimmed,
            accepted=totals.get(f"{HOST_PREFIX}accepted_tokens_total", 0),
            from_plugin=from_plugin,
        )

    def since(self, earlier: Counters) -> Counters:
        """What was counted between two readings of the same server."""
        return Counters(
            blocks=self.blocks - earlier.blocks,
            scheduled=self.scheduled - earlier.scheduled,
            verified=self.verified - earlier.verified,
            trimmed=self.trimmed - earlier.trimmed,
            accepted=self.accepted - earlier.accepted,
            from_plugin=self.from_plugin,
        )

    @property
    def accept_len(self) -> float:
        """Tokens committed per block, bonus token included; 1.0 without speculation."""
        return 1.0 + self.accepted / self.blocks if self.blocks else 1.0


def settled(read_metrics: Callable[[], str]) -> Counters:
    """Counters of a server without running requests, read until they stand still."""
    begin = time.monotonic()
    last = Counters.parse(read_metrics())
    while time.monotonic() - begin < SETTLE_LIMIT_S:
        time.sleep(SETTLE_S)
        now = Counters.parse(read_metrics())
        if now == last:
            break
        last = now
    return last


def _totals(text: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith((HOST_PREFIX, PLUGIN_PREFIX)):
                totals[sample.name] = totals.get(sample.name, 0) + int(sample.value)
    return totals
