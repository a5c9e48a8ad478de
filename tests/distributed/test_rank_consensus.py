# SPDX-License-Identifier: Apache-2.0
"""The consensus checker: finds the step, names the ranks, and never waits for ever."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from launcher import Launcher

from vllm_dspark.parallel.consensus import (
    EXIT_CODE,
    HISTORY,
    ConsensusChecker,
    ConsensusError,
    ConsensusOptions,
)
from vllm_dspark.parallel.peer_exchange import PeerError
from vllm_dspark.parallel.step_record import WIDTH, Decision

SLACK_STEPS = 10


class LatePeer:
    """An exchange whose other rank does `late` in its first swap and otherwise equals this one.

    Args:
        differs: changes the rows that the other rank sends in its first swap.
    """

    rank, world_size = 0, 2

    def __init__(
        self,
        late: Callable[[], None],
        differs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._late: Callable[[], None] | None = late
        self._differs = differs

    def swap(self, mine: torch.Tensor) -> torch.Tensor:
        (late, self._late), (differs, self._differs) = (self._late, None), (self._differs, None)
        if late is not None:
            late()
        return torch.stack([mine, mine if differs is None else differs(mine)])


class LaggingPeer:
    """An exchange whose other rank does what this one did, one step per swap."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.steps = 0
        self._rows: list[torch.Tensor] = []

    def swap(self, mine: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)  # this rank could take several steps meanwhile
        rows = mine.view(-1, WIDTH)
        self._rows.extend(rows[1 : 1 + int(rows[0, 0])].clone())
        theirs = torch.zeros_like(rows)
        if self.steps < len(self._rows):
            theirs[0, 0], theirs[1] = 1, self._rows[self.steps]
            self.steps += 1
        return torch.stack([mine, theirs.view(-1)])


@pytest.mark.parametrize("interval", [1, 7, 32])
def test_equal_ranks_are_left_alone(ranks: Launcher, interval: int) -> None:
    for ending in ranks.run(2, "check_decisions", interval=interval, steps=200):
        assert ending.result == {"reached": 200, "counter": {}}


def test_an_idle_group_is_left_alone(ranks: Launcher) -> None:
    """Longer than any rank may be silent; the interval is not full when the pause begins."""
    for ending in ranks.run(2, "check_decisions", interval=7, steps=60, pauses_at=30):
        assert ending.result == {"reached": 60, "counter": {}}, ending.log


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("interval", [1, 7, 32])
def test_a_difference_stops_all_ranks(
    ranks: Launcher, interval: int, world: int, tmp_path: Path
) -> None:
    endings = ranks.run(
        world,
        "check_decisions",
        interval=interval,
        steps=2000,
        differs_at=50,
        folder=str(tmp_path),
    )
    for ending in endings:
        result = ending.result
        assert result["error"] == "ConsensusError", ending.log
        assert (result["step"], result["ranks"]) == (50, [0, world - 1])
        assert "differ in budget" in result["message"]
        assert 50 <= result["reached"] <= 50 + 2 * interval + SLACK_STEPS
        budgets = {r: json.loads(text)["budget"] for r, text in result["values"].items()}
        assert budgets == {str(r): 10 + (r == world - 1) for r in range(world)}
    dumps = sorted(tmp_path.glob("dspark-steps-*.jsonl"))
    assert len(dumps) == world
    records = [json.loads(line) for line in dumps[0].read_text().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "decision"]
    assert 50 in steps and steps == sorted(steps)


def test_a_last_difference_is_found_without_a_full_interval(ranks: Launcher) -> None:
    endings = ranks.run(
        2, "check_decisions", interval=1000, steps=51, differs_at=50, hangs_at=50, limit_s=20.0
    )
    for ending in endings:
        assert ending.how == f"exit {EXIT_CODE}", ending.log
        assert "step 50: ranks 0 and 1" in ending.log
        assert "hangs in its step and cannot raise" in ending.log
        assert "rank_programs.py" in ending.log, "no stacks of the main thread"


@pytest.mark.parametrize("world", [2, 4])
def test_a_silent_rank_is_named(ranks: Launcher, world: int) -> None:
    endings = ranks.run(
        world, "check_decisions", interval=5, steps=400, stays_away_at=100, limit_s=25.0
    )
    for ending in endings[:-1]:
        assert ending.result["error"] == "PeerError", ending.log
        assert f"no answer from rank {world - 1}" in ending.result["message"]
        assert ending.result["ranks"] == [world - 1]


def test_an_audit_counts_by_site(ranks: Launcher) -> None:
    endings = ranks.run(2, "check_decisions", interval=4, steps=100, differs_at=50, stops=False)
    assert endings[0].result == {"reached": 100, "counter": {}}
    assert endings[1].result == {"reached": 100, "counter": {"plan": 1}}


def test_a_step_that_hangs_ends_an_audit_too(ranks: Launcher) -> None:
    endings = ranks.run(
        2, "check_decisions", interval=1000, steps=51, hangs_at=50, stops=False, limit_s=20.0
    )
    for rank, ending in enumerate(endings):
        assert ending.how == f"exit {EXIT_CODE}", ending.log
        assert f"rank {rank} has not left its step for 3 s" in ending.log
        assert "rank_programs.py" in ending.log, "no stacks of the main thread"


def test_a_step_that_hangs_after_an_audit_has_ended(ranks: Launcher) -> None:
    """The last rank goes, which ends the audit; what the others do later is still bounded."""
    staying, _ = ranks.run(
        2,
        "check_decisions",
        interval=5,
        steps=400,
        stays_away_at=100,
        hangs_at=300,
        stops=False,
        limit_s=30.0,
    )
    assert "the audit of the tensor-parallel group has ended" in staying.log
    assert staying.how == f"exit {EXIT_CODE}", staying.log
    assert "rank 0 has not left its step for 3 s" in staying.log


def test_a_rank_does_not_run_ahead_of_a_peer_that_lags() -> None:
    """The other rank answers every swap, but takes one step between two of them."""
    interval, peer = 4, LaggingPeer()
    options = ConsensusOptions(interval, timeout_s=30.0)
    checker = ConsensusChecker(options, peer)
    leads = []
    for step in range(400):
        checker.begin_step()
        checker.decided(Decision(step, 1, None, 16, 4, 1, np.ones(1)))
        leads.append(step - peer.steps)
        checker.end_step()
    checker.close()
    assert interval < max(leads) <= 2 * interval + SLACK_STEPS


def test_a_difference_is_explained_however_late_the_peer() -> None:
    """The step that differs is older than any record kept for the dump, once the peer answers."""
    ran_ahead, interval = threading.Event(), HISTORY

    def late() -> None:
        assert ran_ahead.wait(20.0), "this rank has not run ahead"

    def other_budget(mine: torch.Tensor) -> torch.Tensor:
        return torch.where(mine == 10, 11, mine)

    checker = ConsensusChecker(
        ConsensusOptions(interval, timeout_s=30.0, grace_s=0.05), LatePeer(late, other_budget)
    )
    with pytest.raises(ConsensusError) as caught:
        for step in range(10 * HISTORY):
            checker.begin_step()
            budget = 10 if step == 2 else 5
            checker.decided(Decision(step, budget, None, 16, 4, 3, np.ones(3)))
            checker.end_step()
            if step == interval + HISTORY:
                ran_ahead.set()
    checker.close()
    assert (caught.value.step, caught.value.what) == (2, "budget")
    for text in caught.value.values.values():
        assert json.loads(text)["budget"] == 10


@pytest.mark.parametrize("stops", [True, False])
def test_old_records_are_dropped(stops: bool) -> None:
    """Those that were compared, apart from the last ones for the dump."""
    interval = 4
    options = ConsensusOptions(interval, stops, timeout_s=30.0)
    checker = ConsensusChecker(options, LatePeer(lambda: None))
    for step in range(10 * HISTORY):
        checker.begin_step()
        checker.decided(Decision(step, 1, None, 16, 4, 1, np.ones(1)))
        checker.end_step()
        assert len(checker._history) <= HISTORY + 2 * interval + SLACK_STEPS
    checker.close()
    assert len(checker._history) >= HISTORY


@pytest.mark.parametrize("stops", [True, False])
def test_waiting_for_a_peer_is_no_stall(stops: bool) -> None:
    """A rank that waited for its peer gets a step's full time afterwards, again and again."""
    timeout_s, aborted = 2.0, []

    def late() -> None:
        time.sleep(0.95 * timeout_s if stops else 1.05 * timeout_s)
        if not stops:
            raise PeerError([1], "it is gone")

    options = ConsensusOptions(1, stops, timeout_s, flush_s=0.05, grace_s=0.05)
    checker = ConsensusChecker(options, LatePeer(late), abort=aborted.append)
    waited_s = 0.0
    for step in range(60):
        checker.begin_step()
        begin_s = time.monotonic()
        checker.decided(Decision(step, 1, None, 16, 4, 1, np.ones(1)))
        if time.monotonic() - begin_s > 0.5 * timeout_s:
            waited_s = time.monotonic() - begin_s
            time.sleep(0.3 * timeout_s)
        checker.end_step()
    checker.close()
    assert waited_s > 0, "no step has waited for the peer"
    assert not aborted


def test_an_audit_warns_of_the_first_difference(ranks: Launcher) -> None:
    endings = ranks.run(2, "check_decisions", interval=4, steps=100, differs_at=50, stops=False)
    assert endings[1].log.count("differs from rank 0 in budget of step 50") == 1
    assert "differs from rank 0" not in endings[0].log


@pytest.mark.parametrize("name", ["interval", "timeout_s", "flush_s", "grace_s"])
def test_options_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ConsensusOptions(**{"interval": 1, name: 0})
