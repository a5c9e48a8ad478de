# SPDX-License-Identifier: Apache-2.0
"""A draft is held to what its time earns in the long run, where a step by itself earns less."""

import numpy as np
import pytest

from vllm_dspark.core import CostModel, ExecMode, Planner, PolicyConfig, StepInput
from vllm_dspark.core.budget import Candidates, best
from vllm_dspark.core.cost_model import Curve
from vllm_dspark.core.pace import Pace

GAMMA, REQUESTS = 7, 64
SIZES = np.arange(1, 4000)
LIGHT, HEAVY = 0, 1500
"""Prompt tokens of a step."""


def planner() -> Planner:
    cost = CostModel({ExecMode.FULL: Curve(SIZES, 5.0 + 0.02 * SIZES)})
    return Planner(PolicyConfig(min_gain=0.0, hysteresis=0.0), GAMMA, cost=cost)


def step(prompt_tokens: int) -> StepInput:
    confidence = np.random.default_rng(1).uniform(0.3, 1.0, (REQUESTS, GAMMA)).astype(np.float32)
    return StepInput(
        samples=np.ones(REQUESTS, bool),
        draft_lens=np.full(REQUESTS, GAMMA),
        base_tokens=REQUESTS + prompt_tokens,
        confidence=confidence,
    )


def settled(subject: Planner, prompts: list[int], rounds: int = 40) -> dict[int, list[float]]:
    """Budget, tokens and milliseconds of the last step of each kind, `prompts` being a cycle."""
    found = {}
    for prompt_tokens in prompts * rounds:
        plan = subject.plan(step(prompt_tokens))
        found[prompt_tokens] = [
            plan.verified_drafts,
            plan.predicted_tau,
            plan.predicted_step_ms,
        ]
    return found


def test_heavy_steps_among_light_ones_verify_less_and_the_server_earns_more() -> None:
    prompts = [LIGHT, LIGHT, LIGHT, HEAVY]
    alone = {kind: settled(planner(), [kind], 1)[kind] for kind in prompts}
    together = settled(planner(), prompts)
    assert together[HEAVY][0] < 0.8 * alone[HEAVY][0]
    assert together[LIGHT] == alone[LIGHT]

    def rate(figures: dict[int, list[float]]) -> float:
        totals = np.sum([figures[kind] for kind in prompts], axis=0)
        return totals[1] / totals[2]

    assert rate(together) > rate(alone)
    best_heavy = max(rate({**alone, HEAVY: pinned(HEAVY, budget)}) for budget in range(0, 448, 4))
    # The heavy steps' budget is nearly the best that there is for the sum of all steps.
    assert rate(together) > 0.999 * best_heavy


def pinned(prompt_tokens: int, budget: int) -> list[float]:
    subject = planner()
    subject.policy = PolicyConfig(pin=budget)
    return settled(subject, [prompt_tokens], 1)[prompt_tokens]


def test_equal_steps_are_planned_as_if_there_were_no_past() -> None:
    for kind in (LIGHT, HEAVY):
        assert settled(planner(), [kind], 1) == settled(planner(), [kind], 30)


def test_a_busier_past_holds_a_quiet_step_to_no_more_than_twice_its_own_rate() -> None:
    pace = Pace()
    pace.add(tokens=2000.0, ms=100.0)
    assert pace.worth(own=0.7) == pytest.approx(1.4)
    assert pace.worth(own=15.0) == pytest.approx(20.0)
    assert pace.worth(own=30.0) == 30.0
    assert Pace().worth(own=3.0) == 3.0


def test_a_change_of_load_is_forgotten() -> None:
    pace = Pace()
    for _ in range(200):
        pace.add(tokens=400.0, ms=20.0)
    for _ in range(500):
        pace.add(tokens=4.0, ms=6.0)
    assert pace.worth(own=0.6) == pytest.approx(4 / 6, rel=0.02)


def candidates(tau: list[float], cost_ms: list[float]) -> Candidates:
    taus, costs = np.array(tau), np.array(cost_ms)
    return Candidates(np.arange(len(tau)), np.arange(len(tau)), costs, taus, taus / costs)


def test_a_bound_leaves_only_what_it_allows() -> None:
    found = candidates([4.0, 8.0, 12.0], [4.0, 5.0, 6.0])
    assert best(found, Pace()).index == 2
    assert best(found, Pace(), bound_ms=5.5).index == 1
    assert best(found, Pace(), bound_ms=1.0).index == 0
    rich = Pace(tokens=30.0, ms=10.0)
    # 8 - 3 * 5 is less than 12 - 3 * 6, but out of bounds; 4 - 3 * 4 is less than both.
    assert best(found, rich, bound_ms=5.5).index == 1


def test_the_gain_is_that_of_the_rates_where_the_past_is_no_better() -> None:
    found = candidates([10.0, 12.0], [2.0, 4.0])
    choice = best(found, Pace())
    assert (choice.index, choice.gain) == (0, pytest.approx(5.0 / 3.0 - 1.0))
    assert best(candidates([10.0, 12.0], [2.0, 2.0]), Pace()).gain == 0.0
