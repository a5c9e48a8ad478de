# SPDX-License-Identifier: Apache-2.0
"""Each injected fault trips its own alarm, a healthy server none, and nobody is told too often."""

import logging

import numpy as np
import pytest

from vllm_dspark.alarms import CHECKS, AlarmLog, Alarms, Thresholds
from vllm_dspark.metrics import MetricsWriter
from vllm_dspark.metrics_snapshot import Snapshot

GAMMA = 5
RATES = np.array([0.8, 0.75, 0.7, 0.65, 0.6])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def serve(writer: MetricsWriter, steps: int = 300, rates: np.ndarray = RATES, **fault) -> None:
    """Drive a writer as a server whose drafts survive each position with chance `rates`."""
    rng = np.random.default_rng(7)
    survivals = np.cumprod(fault.get("predicted", rates))
    for _ in range(steps):
        kept = np.cumprod(rng.random((8, GAMMA)) < rates, axis=1)
        full = np.full(8, GAMMA)
        writer.observe_plan(mode="compact", reason="trimmed", graph_miss=fault.get("miss", ""))
        writer.observe_accept(full, full, kept.sum(axis=1), np.tile(survivals, (8, 1)))
        writer.observe_timing(fault.get("predicted_s", 0.0105), 0.010)
        writer.observe_doubt("fresh", 4)
        if "doubt" in fault:
            writer.observe_doubt(*fault["doubt"])


def window(steps: int = 300, rates: np.ndarray = RATES, **fault) -> Snapshot:
    writer = MetricsWriter(0, 0, GAMMA, directory="", reliability_every=1)
    serve(writer, steps, rates, **fault)
    if "disagree" in fault:
        writer.observe_disagreement(fault["disagree"])
    writer.close()
    return writer.snapshot()


SHIFTED = RATES * np.array([1.0, 0.05, 1.0, 1.0, 1.0])
FAULTS = {
    "acceptance": ({"rates": np.full(GAMMA, 0.01)}, ["position 0", "doctor"]),
    "acceptance-collapse": ({"rates": SHIFTED}, ["position 1", "shifted"]),
    "calibration": ({"predicted": np.full(GAMMA, 1.0)}, ["predicted survival 1.00", "calibrate"]),
    "cost-model": ({"predicted_s": 0.007}, ["30% too low", "300 steps"]),
    "graph-misses": ({"miss": "above_largest"}, ["100.0%", "above_largest: 300"]),
    "fallbacks": ({"doubt": ("stale", 2)}, ["25.0%", "stale: 600"]),
    "broken-confidences": ({"doubt": ("non_finite", 1)}, ["300 of 2400", "NaN"]),
    "rank-disagreement": ({"disagree": "budget"}, ["budget: 1"]),
}


def test_every_check_has_a_fault() -> None:
    assert FAULTS.keys() == CHECKS.keys()


def test_healthy_server_is_quiet() -> None:
    alarms = Alarms()
    assert alarms.check(window()) == []
    assert alarms.raised == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_trips_its_alarm_only(name: str) -> None:
    fault, words = FAULTS[name]
    if name in ("acceptance", "acceptance-collapse"):
        fault = {**fault, "predicted": fault["rates"]}
    alarms = Alarms()
    messages = alarms.check(window(**fault))
    assert [message.split(":")[0] for message in messages] == [name]
    assert alarms.raised == [name]
    assert "\n" not in messages[0]
    for word in words:
        assert word in messages[0]


@pytest.mark.parametrize("name", [n for n in FAULTS if n != "rank-disagreement"])
def test_a_window_with_too_little_is_not_judged(name: str) -> None:
    if name == "broken-confidences":  # one broken row is enough; without rows there is none
        assert CHECKS[name]({}, Thresholds()) is None
        return
    fault, _ = FAULTS[name]
    small = window(steps=2, **fault)
    assert CHECKS[name](small, Thresholds()) is None


def test_below_threshold_is_quiet() -> None:
    limits = Thresholds(step_time_bias=0.5, calibration_error=0.9)
    alarms = Alarms(limits)
    assert alarms.check(window(predicted_s=0.007, predicted=np.full(GAMMA, 1.0))) == []


def test_repeats_rearms_and_never_floods() -> None:
    clock = Clock()
    alarms = Alarms(repeat_s=100.0, remind_s=1000.0, clock=clock)
    bad, good = window(steps=120, predicted_s=0.005), window(steps=120)
    almost = window(steps=120, predicted_s=0.0077)  # 23 %: below 25 %, above rearm

    def told(at: float, delta: Snapshot) -> bool:
        clock.now = at
        return bool(alarms.check(delta))

    assert told(0, bad)
    assert not told(150, bad)  # still the same event
    assert not told(300, almost) and alarms.raised == ["cost-model"]
    assert not told(500, bad)  # wavering is not a new one
    assert told(1001, bad)  # reminder
    assert not told(1020, good) and alarms.raised == []
    assert not told(1050, bad)  # a new event, but too soon
    assert not told(1051, good)
    assert told(1200, bad)  # a new event


def test_log_gets_one_line_and_waits_for_enough_steps(caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(0, 0, GAMMA, directory="", reliability_every=1)
    alarms = Alarms(repeat_s=0.0, remind_s=0.0)
    log = AlarmLog(alarms, logging.getLogger("test.dspark"), thresholds=Thresholds(min_drafts=400))
    with caplog.at_level(logging.WARNING, "test.dspark"):
        serve(writer, steps=60, predicted_s=0.005)
        log(writer.snapshot())
        assert caplog.messages == []
        serve(writer, steps=60, predicted_s=0.005)
        log(writer.snapshot())
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("DSpark alarm, cost-model: step times are predicted")
        assert "over 120 steps" in caplog.messages[0]
        serve(writer, steps=150, predicted_s=0.010)  # the window, not the history, is judged
        log(writer.snapshot())
        assert len(caplog.messages) == 1
    writer.close()


def test_alarms_run_on_the_thread_of_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(0, 0, GAMMA, directory="", flush_interval_s=0.01)
    serve(writer, predicted_s=0.005)
    with caplog.at_level(logging.WARNING, "vllm.dspark"):
        log = AlarmLog()
        writer.every(0.01, lambda: log(writer.snapshot()))
        for _ in range(500):
            if caplog.messages:
                break
            writer._stop.wait(0.01)
    writer.close()
    assert [m for m in caplog.messages if "cost-model" in m]
