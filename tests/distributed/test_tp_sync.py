# SPDX-License-Identifier: Apache-2.0
"""The messages of the TP sync, between real processes."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from launcher import Launcher

from vllm_dspark.parallel.sync_sites import SyncSite
from vllm_dspark.parallel.tp_sync import HostPlan, open_tp_sync

LENS = [1, 2, 3, 4]


def test_a_group_of_one_has_no_sync() -> None:
    alone = SimpleNamespace(rank_in_group=0, world_size=1, ranks=[0])
    assert [open_tp_sync(name, alone) for name in ("inputs", "outputs", "audit")] == [None] * 3


def test_an_unknown_protocol_is_named() -> None:
    group = SimpleNamespace(rank_in_group=0, world_size=2, ranks=[0, 1])
    with pytest.raises(ValueError, match="'maybe'"):
        open_tp_sync("maybe", group)


@pytest.mark.parametrize("protocol", ["audit", "off"])
def test_protocols_that_change_nothing_have_no_sync(protocol: str) -> None:
    group = SimpleNamespace(rank_in_group=0, world_size=2, ranks=[0, 1])
    assert open_tp_sync(protocol, group) is None


@pytest.mark.parametrize("budget", [None, 0, 17])
@pytest.mark.parametrize("uniform_k", [None, 0, 3])
@pytest.mark.parametrize("lens", [None, [], [0, 4, 2]])
def test_plans_survive_the_wire(
    budget: int | None, uniform_k: int | None, lens: list[int] | None
) -> None:
    admitted = None if lens is None else np.array(lens, np.int32)
    plan = HostPlan(budget, 17, None, uniform_k, 5, admitted)
    wire = plan.to_wire(3, 3 if lens is None else len(lens))
    assert wire[1] == (-1 if budget is None else budget)
    back = HostPlan.from_wire(wire)
    assert (back.budget, back.uniform_k, back.draft_width) == (budget, uniform_k, 5)
    assert (None if back.admitted is None else back.admitted.tolist()) == lens


@pytest.mark.parametrize("world", [2, 4])
def test_outputs_of_rank_0_count(ranks: Launcher, world: int) -> None:
    """No budget on one rank only, in either direction: everybody enters and gets rank 0's."""
    plans = [
        [[10, LENS]] * (world - 1) + [[None, LENS]],
        [[None, LENS]] * (world - 1) + [[10, LENS]],
        [[10, LENS]] * (world - 1) + [[10, LENS[::-1]]],
        [[0, [0] * 4]] * world,
        [[12, None]] * (world - 1) + [[13, None]],
    ]
    expected = [[10, LENS], [None, LENS], [10, LENS], [0, [0] * 4], [12, None]]
    endings = ranks.run(world, "repeat_outputs", plans=plans)
    for rank, ending in enumerate(endings):
        got, counter = ending.result
        assert got == expected
        assert counter["messages"] == len(plans)
        odd = rank == world - 1
        assert (counter.get("plan", 0), counter.get("lens", 0)) == ((3, 4) if odd else (0, 0))


@pytest.mark.parametrize("missing_on", [0, 1])
def test_inputs_of_rank_0_count(ranks: Launcher, missing_on: int) -> None:
    one, other = (ending.result for ending in ranks.run(2, "repeat_inputs", missing_on=missing_on))
    assert one["bits"] == other["bits"], "NaN or not, the bits are equal"
    known = np.array([[0.5, 0.25], [np.nan, 1.0]], np.float32)
    confidence = np.array(one["bits"], np.int32).view(np.float32)
    np.testing.assert_array_equal(confidence, np.full((2, 2), np.nan) if missing_on == 0 else known)
    assert one["drafts"] == other["drafts"] == [[5, 6], [7, 8]]
    assert other["verified"] == [-1, -1]
    assert other["own_kept"], "the rank's own rows are not written to"
    assert one["counter"] == {"messages": 1}
    assert other["counter"]["draft"] == 1


def test_accepted_tokens_travel_only_where_asked(ranks: Launcher) -> None:
    first = [[[1, 2, 3], [4, 5, 6]], [3, 1], [0, 2]]
    everywhere = ranks.run(2, "accept", sites=[*SyncSite])
    assert [ending.result for ending in everywhere] == [first, first]
    apart = ranks.run(2, "accept", sites=["plan", "lens", "draft"])
    assert apart[0].result == first
    assert apart[1].result == [[[2, 4, 6], [8, 10, 12]], [3, 2], [0, 1]]


@pytest.mark.parametrize(
    ("protocol", "sites", "messages"),
    [
        ("inputs", ["plan", "lens", "draft"], 1),
        ("inputs", ["plan", "lens"], 1),
        ("inputs", ["draft"], 1),
        ("outputs", ["plan", "lens", "draft"], 2),
        ("outputs", ["plan", "lens"], 2),
        ("outputs", ["draft"], 1),
    ],
)
def test_each_site_has_a_switch(
    ranks: Launcher, protocol: str, sites: list[str], messages: int
) -> None:
    """Rank 0's values arrive where the site is on, and nowhere else."""
    one, other = (
        ending.result for ending in ranks.run(2, "switched", protocol=protocol, sites=sites)
    )
    assert one["messages"] == other["messages"] == messages
    for name, site in (("plan", "plan"), ("lens", "lens"), ("drafts", "draft")):
        assert (one[name] == other[name]) == (site in sites), name


def test_ranks_in_different_steps_are_told(ranks: Launcher) -> None:
    endings = ranks.run(2, "off_by_one")
    assert endings[1].error == "SyncError"
    assert "rank 1 is at step 6 and got the plan of step 7" in endings[1].message


def test_a_wait_for_a_message_is_bounded(ranks: Launcher) -> None:
    begin = time.monotonic()
    _, waiting = ranks.run(2, "no_message", limit_s=20.0, timeout_s=1.0)
    assert waiting.error == "SyncError"
    assert "rank 1 got no plan message" in waiting.message
    assert time.monotonic() - begin < 10.0


def test_debug_logs_name_rank_and_step(ranks: Launcher) -> None:
    for rank, ending in enumerate(ranks.run(2, "log_lines")):
        first, second, own, graph = ending.result
        assert first.startswith(
            f"rank={rank} step=4 req=a budget=-1 verify_len=3 survivals=0.81099"
        )
        assert "req=b" in second and "verify_len=1" in second
        assert "slot=7 own_survivals=0.81099" in own
        assert graph == f"rank={rank} step=4 graph_key=16 num_tokens=13 num_reqs=2"
