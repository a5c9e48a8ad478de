# SPDX-License-Identifier: Apache-2.0
"""Host time by part: work and waiting are told apart, and failures count too."""

import time

import pytest

from vllm_dspark.engine.host_time import HostTime, timed


class Clock:
    """Stands for `time.perf_counter`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Step:
    """Works for 2 s, waits for 5 s inside, and works for 1 s more."""

    def __init__(self, clock: Clock, reported: list[tuple[str, float]]) -> None:
        self.clock = clock
        self.host_time = HostTime(lambda part, seconds: reported.append((part, seconds)))

    @timed("plan")
    def run(self, answer: int, fails: bool = False) -> int:
        self.clock.now += 2.0
        with self.host_time.waiting():
            self.clock.now += 5.0
            if fails:
                raise RuntimeError
        self.clock.now += 1.0
        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_waiting_is_no_work(clock: Clock) -> None:
    reported: list[tuple[str, float]] = []
    step = Step(clock, reported)
    assert step.run(7) == 7
    assert step.run(answer=8) == 8
    assert reported == [("wait", 5.0), ("plan", 3.0)] * 2


def test_a_step_that_fails_is_counted(clock: Clock) -> None:
    reported: list[tuple[str, float]] = []
    with pytest.raises(RuntimeError):
        Step(clock, reported).run(7, fails=True)
    assert reported == [("wait", 5.0), ("plan", 2.0)]
