# SPDX-License-Identifier: Apache-2.0
"""Turns decisions and their outcomes into metrics and step records.

A step is counted once both the decision and what it committed are known. Requests that commit
nothing in a step (a prefill that goes on) are not counted.
"""

from __future__ import annotations

import multiprocessing.util
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_dspark import metrics_export
from vllm_dspark.alarms import AlarmLog
from vllm_dspark.config import DSparkConfig
from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.cost_io import Fingerprint, cost_to_dict
from vllm_dspark.core.planner import Planner
from vllm_dspark.engine.decision import StepDecision
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.planner import LAG_STEPS
from vllm_dspark.metrics import MetricsWriter
from vllm_dspark.records import RecordAnswerer, RecordRing, RecordSaver, StepRecord

_ALARM_INTERVAL_S = 30.0
_ANSWER_INTERVAL_S = 0.5
_COUNTED_TOGETHER = 32


class Accounting:
    """Observer of one rank; only rank 0 counts decisions, see ``MetricsWriter``.

    Outcomes are counted some steps at a time, and whenever counters are about to be read: array
    operations on many steps take hardly longer than those on one, and hosts are short of time where
    steps are short.

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
        self._waiting: deque[_Settled] = deque()
        self._counting = threading.Lock()
        writer.before_publishing(self.count)

    def __call__(self, decision: StepDecision, accepted: np.ndarray) -> None:
        settled = _Settled(decision, accepted, self._core.calibration)
        if self._writer.decides:
            self._waiting.append(settled)
            self._writer.touch()
            if len(self._waiting) >= _COUNTED_TOGETHER:
                self.count()
        if self._ring is not None:
            start = time.perf_counter()
            self._ring.add(_record(settled, self._label))
            self._writer.observe_overhead("records", time.perf_counter() - start)

    def count(self) -> None:
        """Count what has settled since the last call; any thread may call."""
        # Steps are counted in order, so that the same ones are sampled in every run.
        with self._counting:
            steps = [self._waiting.popleft() for _ in range(len(self._waiting))]
            for step in steps:
                self._count_decision(step.decision)
            self._writer.observe_accepts(
                [step.lengths for step in steps], lambda number: steps[number].survivals
            )

    def _count_decision(self, decision: StepDecision) -> None:
        plan, writer = decision.plan, self._writer
        graph = decision.graph_tokens or 0
        scheduled = int(decision.eligible.sum())
        writer.observe_plan(
            mode=self._label,
            reason=str(plan.reason),
            scheduled_tokens=scheduled,
            budget_tokens=-1 if plan.budget is None else plan.budget,
            tier_tokens=graph,
            padded_tokens=max(graph - decision.num_tokens, 0),
            graph_miss=decision.graph_miss,
            bypass=decision.running_drafts == 0 and scheduled > 0,
        )
        for doubt, count in plan.doubts.items():
            writer.observe_doubt(doubt.name.lower(), count)
        if plan.predicted_step_ms is not None and decision.measured_ms is not None:
            writer.observe_timing(plan.predicted_step_ms / 1e3, decision.measured_ms / 1e3)


@dataclass(frozen=True, slots=True)
class _Settled:
    """A decision and its outcome."""

    decision: StepDecision
    accepted: np.ndarray
    """``[num_reqs]`` accepted drafts."""
    calibration: CalibrationTable
    """What the policy went by when the step settled."""

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scheduled, admitted and accepted drafts ``[num_sampling]``."""
        decision = self.decision
        assert decision.admitted is not None, "settled"
        if decision.samples.all():
            return decision.eligible, decision.admitted, self.accepted
        rows = decision.samples
        return decision.eligible[rows], decision.admitted[rows], self.accepted[rows]

    @property
    def survivals(self) -> np.ndarray:
        """Survivals ``[num_sampling, gamma]`` of the verified block as the policy sees them."""
        decision = self.decision
        assert decision.predicted is not None, "settled"
        rows, regimes = decision.samples, decision.regimes
        regimes = regimes if isinstance(regimes, int) else regimes[rows]
        calibrated = self.calibration.apply(decision.predicted[rows].T, regimes)
        return np.cumprod(calibrated, axis=0).T


def _record(settled: _Settled, label: str) -> StepRecord:
    decision = settled.decision
    rows, plan = decision.samples, decision.plan
    scheduled, admitted, accepted = settled.lengths
    assert decision.predicted is not None, "settled"
    return StepRecord(
        step=decision.step,
        time_s=decision.time_s,
        num_reqs=len(rows),
        num_sampling=int(np.count_nonzero(rows)),
        base_tokens=decision.base_tokens,
        scheduled=scheduled,
        budget=-1 if plan.budget is None else plan.budget,
        lag_steps=LAG_STEPS,
        mode=label,
        reason=str(plan.reason),
        tier_tokens=decision.graph_tokens or 0,
        verify_lens=admitted + 1,
        survivals=settled.survivals,
        accepted=accepted,
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
