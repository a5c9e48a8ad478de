# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens are the same in every verify mode at every budget, and the counts agree.

One engine per mode; the budget pin moves while it runs.
"""

from collections.abc import Iterator

import pytest
from engines import (
    COMPARED_TOKENS,
    CPU_MODES,
    GAMMA,
    STEADY,
    Engine,
    assert_same_tokens,
    demo_prompts,
    plain_greedy,
)

pytestmark = pytest.mark.slow

PINS: list[int | float | None] = [None, 0, 1, 0.5]
PROMPTS = 8
COUNTERS = ("scheduled", "admitted", "trimmed", "accepted")

Counts = dict[str, int]


@pytest.fixture(scope="module", params=CPU_MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(mode: str) -> Iterator[Engine]:
    with Engine({"strict": True, **STEADY, **CPU_MODES[mode]}) as running:
        yield running


@pytest.fixture(scope="module")
def counted() -> dict[tuple[str, int | float | None], Counts]:
    """What every mode counted at every pin; filled by the tests below, in file order."""
    return {}


@pytest.mark.parametrize("pin", PINS)
def test_same_tokens(
    engine: Engine,
    mode: str,
    pin: int | float | None,
    counted: dict[tuple[str, int | float | None], Counts],
) -> None:
    assert engine.mode() == mode
    engine.pin(pin)
    with engine.counting() as increments:
        got = engine.greedy(demo_prompts(PROMPTS), COMPARED_TOKENS)
    assert_same_tokens(plain_greedy()[:PROMPTS], got)
    counts = {name: int(increments[f"vllm:dspark_draft_tokens_{name}_total"]) for name in COUNTERS}
    counted[mode, pin] = counts
    assert counts["scheduled"] == counts["admitted"] + counts["trimmed"]
    assert counts["accepted"] <= counts["admitted"]
    if mode == "static" or pin is None:
        assert counts["trimmed"] == 0
        assert counts["accepted"] > counts["scheduled"] / GAMMA
    elif pin == 0:
        assert counts["admitted"] == counts["accepted"] == 0
    else:
        assert counts["trimmed"] > 0
        # One draft buys no length for all requests of a uniform step.
        assert (counts["accepted"] > 0) is not (mode == "uniform" and pin == 1)


def test_capping_and_trimming_are_the_same_decision(
    counted: dict[tuple[str, int | float | None], Counts],
) -> None:
    """Committing only a window of everything verified, and verifying only the window."""
    wanted = {(mode, pin) for mode in ("cap-accept", "host") for pin in PINS}
    if not wanted <= set(counted):
        pytest.fail("needs the runs of test_same_tokens in the same session")
    for pin in PINS:
        assert counted["cap-accept", pin] == counted["host", pin], f"budget_pin={pin}"


def test_confidence_buys_more_than_an_even_split(
    counted: dict[tuple[str, int | float | None], Counts],
) -> None:
    """At half the drafts, the ragged split accepts a larger share of what it verifies."""
    ragged, even = counted["host", 0.5], counted["uniform", 0.5]
    assert ragged["accepted"] / ragged["admitted"] > even["accepted"] / even["admitted"] * 0.98


def test_switched_off_the_host_drafts_and_verifies_alone() -> None:
    with Engine({"no such": "option"}, environment={"VLLM_DSPARK_ENABLED": "0"}) as engine:
        assert engine.pieces() == {
            "drafts": "vllm.v1.worker.gpu.spec_decode.dspark.speculator",
            "verifies": "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        }
        got = engine.greedy(demo_prompts(2), COMPARED_TOKENS)
    assert_same_tokens(plain_greedy()[:2], got)


def test_switched_on_the_plugin_does() -> None:
    with Engine({"strict": True, "verify": "static", "metrics": False}) as engine:
        assert engine.pieces() == {
            "drafts": "vllm_dspark.engine.proposer",
            "verifies": "vllm_dspark.engine.verifier",
        }
        got = engine.greedy(demo_prompts(2), COMPARED_TOKENS)
    assert_same_tokens(plain_greedy()[:2], got)
