# SPDX-License-Identifier: Apache-2.0
"""One rank goes wrong; the group still takes one decision per step and writes the right tokens.

Every fault is run with each protocol, and once more without any as the control: there the ranks
must be seen to part, otherwise the test would pass whatever the sync does.
"""

import pytest
from launcher import Ending, Launcher
from toy_target import continuation

REQUESTS, TOKENS, PROMPT_TOKENS = 60, 40, 3
FAULTS = {
    "drift 1e-6": {"fault": {"kind": "perturb", "size": 1e-6, "every": 1}, "grid": 8},
    "drift 1e-4": {"fault": {"kind": "perturb", "size": 1e-4, "every": 1}, "grid": 8},
    "drift 1e-3": {"fault": {"kind": "perturb", "size": 1e-3, "every": 1}},
    "drift 1e-2": {"fault": {"kind": "perturb", "size": 1e-2, "every": 1}},
    "no confidences": {"fault": {"kind": "missing"}},
    "NaN": {"fault": {"kind": "nan"}},
    "late copy": {"fault": {"kind": "late"}},
    "flipped draft": {"fault": {"kind": "flip"}},
    "other cost table": {"fault": {"kind": "cost"}},
}
# A rank that waits for its copies has nothing to be late with, so the control polls instead.
CONTROL = {"late copy": {"polling": True}}


def simulate(ranks: Launcher, world: int, **spec: object) -> list[Ending]:
    run = {"slots": 16, "requests": REQUESTS, "tokens": TOKENS, **spec}
    return ranks.run(world, "simulate", limit_s=60.0, spec=run)


def divergences(endings: list[Ending]) -> int:
    """Steps that were not the same on all ranks."""
    by_rank = [ending.result["decisions"] for ending in endings]
    return sum(any(step != steps[0] for step in steps[1:]) for steps in zip(*by_rank, strict=True))


def check(endings: list[Ending]) -> None:
    """All ranks took the same steps, and the target's own tokens were written."""
    for ending in endings:
        assert (ending.how, ending.error) == ("exit 0", None), ending.log
        assert ending.result["unfinished"] == 0
        assert ending.result["shape_mismatches"] == 0
    assert divergences(endings) == 0
    decisions = endings[0].result["decisions"]
    assert sum(budget is not None for _, budget, *_ in decisions) > len(decisions) / 2
    expected = {str(r): continuation(r, PROMPT_TOKENS, TOKENS) for r in range(REQUESTS)}
    assert endings[0].result["written"] == expected


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("protocol", ["inputs", "outputs"])
@pytest.mark.parametrize("name", FAULTS)
def test_the_group_takes_one_decision(ranks: Launcher, name: str, protocol: str, mode: str) -> None:
    check(simulate(ranks, 2, protocol=protocol, mode=mode, lagged=mode == "device", **FAULTS[name]))


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("name", FAULTS)
def test_control_without_sync(ranks: Launcher, name: str, mode: str) -> None:
    spec = FAULTS[name] | CONTROL.get(name, {})
    endings = simulate(ranks, 2, protocol="off", mode=mode, lagged=mode == "device", **spec)
    assert all(ending.error is None for ending in endings), endings[0].log
    assert divergences(endings) > 0


@pytest.mark.parametrize("protocol", ["inputs", "outputs"])
@pytest.mark.parametrize("name", ["drift 1e-3", "no confidences", "NaN", "flipped draft"])
def test_four_ranks(ranks: Launcher, name: str, protocol: str) -> None:
    spec = FAULTS[name]
    check(simulate(ranks, 4, protocol=protocol, **{**spec, "fault": spec["fault"] | {"rank": 3}}))


@pytest.mark.parametrize("protocol", ["inputs", "outputs"])
def test_rank_0_may_be_the_odd_one(ranks: Launcher, protocol: str) -> None:
    for name in ("no confidences", "NaN", "flipped draft"):
        fault = FAULTS[name]["fault"] | {"rank": 0}
        check(simulate(ranks, 2, protocol=protocol, fault=fault))


def test_a_thousand_steps(ranks: Launcher) -> None:
    endings = simulate(
        ranks, 2, requests=500, protocol="inputs", interval=50, **FAULTS["drift 1e-3"]
    )
    assert [ending.error for ending in endings] == [None, None], endings[0].log
    assert endings[0].result["steps"] == 1000
    assert divergences(endings) == 0
    assert endings[1].result["counter"]["plan"] > 1000


def test_plans_of_rank_0_hold_against_a_polling_relay(ranks: Launcher) -> None:
    check(simulate(ranks, 2, protocol="outputs", polling=True, **FAULTS["late copy"]))


def test_an_audit_counts_and_changes_nothing(ranks: Launcher) -> None:
    spec = FAULTS["drift 1e-3"]
    audited = simulate(ranks, 2, protocol="audit", **spec)
    unsynced = simulate(ranks, 2, protocol="off", **spec)
    for one, other in zip(audited, unsynced, strict=True):
        assert one.result["decisions"] == other.result["decisions"]
    assert audited[0].result["counter"] == {}
    counted = audited[1].result["counter"]
    different = {
        site: sum(
            a[index] != b[index]
            for a, b in zip(*(ending.result["decisions"] for ending in audited), strict=True)
        )
        for site, index in (("plan", 1), ("lens", 2))
    }
    assert min(different.values()) > 0
    assert counted["lens"] >= 0.9 * different["lens"]
    assert counted["plan"] >= 0.9 * different["plan"]


def test_a_group_without_drift_has_nothing_to_count(ranks: Launcher) -> None:
    endings = simulate(ranks, 2, protocol="audit")
    assert [ending.result["counter"] for ending in endings] == [{}, {}]


@pytest.mark.parametrize("protocol", ["inputs", "outputs"])
def test_messages_per_step(ranks: Launcher, protocol: str) -> None:
    for ending in simulate(ranks, 2, protocol=protocol):
        result = ending.result
        verified = len(result["decisions"])
        expected = result["steps"] if protocol == "inputs" else 2 * verified
        assert result["counter"]["messages"] == expected


@pytest.mark.parametrize("protocol", ["inputs", "outputs"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_dies(ranks: Launcher, protocol: str, world: int) -> None:
    fault = {"kind": "die", "rank": world - 1, "start": 30}
    endings = ranks.run(
        world, "simulate", limit_s=30.0, spec={"protocol": protocol, "fault": fault, "interval": 5}
    )
    assert endings[-1].how == "exit 9"
    for ending in endings[:-1]:
        assert ending.how in ("exit 0", "exit 70"), ending.log
        assert ending.error or ending.how == "exit 70", "went on without the dead rank"


def test_a_rank_hangs_in_a_step(ranks: Launcher) -> None:
    fault = {"kind": "stall", "rank": 1, "start": 30, "every": 1}
    endings = ranks.run(
        2, "simulate", limit_s=25.0, spec={"protocol": "inputs", "fault": fault, "interval": 5}
    )
    assert endings[1].how == "exit 70", endings[1].log
    assert "rank 1 has not left its step for" in endings[1].log
    assert "faults.py" in endings[1].log, "no stack of the place where it hangs"
    assert endings[0].how == "exit 70" or endings[0].error, endings[0].log


@pytest.mark.parametrize("interval", [1, 10])
def test_unsynced_drift_is_reported_with_its_step(ranks: Launcher, interval: int) -> None:
    spec = FAULTS["drift 1e-3"] | {"requests": 200, "slots": 16}
    free = ranks.run(2, "simulate", spec={"protocol": "off", **spec})
    steps = zip(*(ending.result["decisions"] for ending in free), strict=True)
    first = next(a[0] for a, b in steps if a[:6] != b[:6])
    stopped = ranks.run(2, "simulate", spec={"protocol": "off", "interval": interval, **spec})
    # A rank that waits for one that has stopped sees its collective fail; its log has the reason.
    assert "ConsensusError" in [ending.error for ending in stopped], stopped[0].log
    for ending in stopped:
        assert ending.error in ("ConsensusError", "RuntimeError"), ending.log
        assert f"step {first}: ranks 0 and 1" in ending.log


@pytest.mark.parametrize(
    ("kind", "what"), [("retable", "budget"), ("commit", "committed"), ("draft_width", "draft_")]
)
def test_what_inputs_cannot_mend_is_reported(ranks: Launcher, kind: str, what: str) -> None:
    fault = {"kind": kind, "start": 40, "every": 1000}
    endings = ranks.run(
        2, "simulate", spec={"protocol": "inputs", "interval": 4, "slots": 16, "fault": fault}
    )
    assert "ConsensusError" in [ending.error for ending in endings], endings[0].log
    for ending in endings:
        assert what in ending.log


@pytest.mark.parametrize("protocol", ["inputs", "outputs"])
def test_one_tier_for_two_survivals(ranks: Launcher, protocol: str) -> None:
    """A step of 32 requests at survivals of 0.811 and 0.810 (SGLang pull request 31195)."""
    drifted = [0.811, 0.810]
    apart = ranks.run(2, "drifted_step", protocol="off", confidences=drifted)
    assert [ending.result[1] for ending in apart] == [160, 144]
    one, other = ranks.run(2, "drifted_step", protocol=protocol, confidences=drifted)
    assert one.result == other.result == apart[0].result
