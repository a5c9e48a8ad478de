# SPDX-License-Identifier: Apache-2.0
"""Outcomes that are counted some steps at a time: none is lost, none is counted twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.plan import PlanReason, VerifyPlan
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.engine.accounting import _COUNTED_TOGETHER, Accounting
from vllm_dspark.engine.decision import StepDecision
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.metrics import MetricsWriter
from vllm_dspark.metrics_snapshot import Snapshot, total
from vllm_dspark.records import RecordRing

GAMMA, ROWS = 4, 3
D = "vllm:dspark_"


def decision(step: int) -> StepDecision:
    """Three requests with two drafts each, one of which goes on reading its prompt."""
    plan = VerifyPlan(None, PlanReason.FULL_BEST, 2 * ROWS, None, None, None, 5.0, 4.0)
    lens = np.full(ROWS, 2)
    return StepDecision(
        step=step,
        req_ids=["a", "b", "c"],
        slots=np.arange(ROWS),
        base_lens=np.ones(ROWS, dtype=np.int64),
        base_tokens=ROWS,
        decodes=True,
        draft_lens=lens,
        eligible=lens,
        useful=lens,
        admitted=lens,
        samples=np.array([True, True, False]),
        plan=plan,
        trims=True,
        regimes=0,
        context_tokens=30,
        exec_mode=ExecMode.FULL,
        draft_width=GAMMA,
        time_s=0.0,
        predicted=np.full((ROWS, GAMMA), 0.5, dtype=np.float32),
        measured_ms=6.0,
    )


@pytest.fixture
def writer() -> Iterator[MetricsWriter]:
    writer = MetricsWriter(0, 0, GAMMA, directory="", flush_interval_s=60.0)
    yield writer
    writer.close()


def accounting(writer: MetricsWriter, ring: RecordRing | None = None) -> tuple[Accounting, Any]:
    core = SimpleNamespace(calibration=CalibrationTable.identity(GAMMA))
    return Accounting(writer, VerifyMode.DEVICE, core, ring), core


def counted(snapshot: Snapshot) -> tuple[float, float, float]:
    names = ("steps", "steps_settled", "draft_tokens_accepted")
    steps, settled, accepted = (total(snapshot, f"{D}{name}_total") for name in names)
    return steps, settled, accepted


def settle(account: Accounting, steps: range) -> None:
    for step in steps:
        account(decision(step), np.array([2, 1, 0]))


def test_whoever_reads_counters_sees_every_step(writer: MetricsWriter) -> None:
    account, _ = accounting(writer)
    for steps in (1, 2, _COUNTED_TOGETHER + 5):
        before = counted(writer.snapshot())
        settle(account, range(steps))
        after = counted(writer.snapshot())
        assert np.subtract(after, before).tolist() == [steps, steps, 3 * steps]


def test_steps_are_counted_while_nobody_reads(writer: MetricsWriter) -> None:
    account, _ = accounting(writer)
    settle(account, range(_COUNTED_TOGETHER - 1))
    assert len(account._waiting) == _COUNTED_TOGETHER - 1
    settle(account, range(1))
    assert not account._waiting


def test_steps_that_settle_while_counters_are_read(writer: MetricsWriter) -> None:
    account, _ = accounting(writer)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            writer.snapshot()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    settle(account, range(500))
    done.set()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert counted(writer.snapshot()) == (500, 500, 1500)


def test_survivals_are_those_of_the_calibration_in_use_at_the_time(writer: MetricsWriter) -> None:
    account, core = accounting(writer)
    settle(account, range(3))
    core.calibration = CalibrationTable.identity(GAMMA).with_regimes(
        {0: (np.ones(GAMMA), np.full(GAMMA, 3.0))}, version=1
    )
    settle(account, range(1))
    snapshot = writer.snapshot()
    # The fourth step is the one that the reliability sums look at.
    drafts = total(snapshot, D + "reliability_drafts_total")
    predicted = total(snapshot, D + "reliability_predicted_total")
    raised = 1 / (1 + np.exp(-3.0))
    assert drafts == 4
    assert predicted == pytest.approx(2 * (raised + raised**2), rel=1e-4)


def test_records_are_written_at_once(writer: MetricsWriter) -> None:
    ring = RecordRing(10, {"gamma": GAMMA}, lambda: {})
    account, _ = accounting(writer, ring)
    settle(account, range(2))
    assert len(ring) == 2


def test_ranks_that_do_not_count_keep_nothing() -> None:
    writer = MetricsWriter(0, 1, GAMMA, directory="")
    account, _ = accounting(writer)
    settle(account, range(3))
    assert not account._waiting
    assert counted(writer.snapshot()) == (0, 0, 0)
    writer.close()
