# SPDX-License-Identifier: Apache-2.0
"""Cost models from the steps being served."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_dspark.core.cost_model import CostModel, Curve
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.policy import PolicyConfig
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.engine.cost_learning import (
    EXCHANGE_STEPS,
    FIRST_FIT_STEPS,
    CostLearning,
    fit_line,
    spread,
)


def decision(tokens: int, measured_ms: float | None, mode: ExecMode = ExecMode.EAGER):
    return SimpleNamespace(
        measured_ms=measured_ms,
        num_tokens=tokens,
        graph_tokens=tokens if mode is ExecMode.FULL else None,
        req_ids=["a", "b"],
        samples=np.ones(2, dtype=bool),
        running_drafts=tokens - 2,
        context_tokens=0,
        exec_mode=mode,
        draft_width=7,
    )


def noisy_steps(rng: np.random.Generator, count: int) -> np.ndarray:
    tokens = rng.integers(2, 64, count)
    ms = 20.0 + 0.5 * tokens + rng.normal(0.0, 0.5, count)
    ms[:: count // 8] *= 10.0
    return np.stack([tokens, ms], axis=1)


def test_line_is_found_in_noise_and_outliers() -> None:
    model = fit_line(noisy_steps(np.random.default_rng(0), 64))
    assert model is not None
    found = model.step_ms(np.array([10, 50]), 1, mode=ExecMode.EAGER)
    assert found == pytest.approx([25.0, 45.0], rel=0.1)


def test_steps_of_one_size_give_no_line() -> None:
    assert fit_line(np.array([[8, 1.0], [8, 2.0]])) is None


def test_cost_never_falls_to_zero() -> None:
    steep = np.array([[2, 1.0], [2, 1.0], [40, 100.0], [40, 100.0]])
    model = fit_line(steep)
    assert model is not None
    assert model.step_ms(np.array([1]), 1, mode=ExecMode.EAGER)[0] > 0.0


def test_first_model_is_fitted_and_shared_once_enough_steps_are_seen() -> None:
    core = Planner(PolicyConfig(), 7)
    shared = []

    def share(value):
        shared.append(value)
        return value

    learning = CostLearning(core, share)
    for tokens, ms in noisy_steps(np.random.default_rng(1), FIRST_FIT_STEPS - 1):
        learning(decision(int(tokens), float(ms)), np.zeros(2))
    assert core.cost is None and not shared
    learning(decision(30, 35.0), np.zeros(2))
    assert core.cost is shared[0] is not None


def test_every_rank_calls_share_on_the_same_steps_whatever_it_measured() -> None:
    calls = []
    for measured in (None, 30.0):
        core, steps = Planner(PolicyConfig(), 7), []
        learning = CostLearning(core, lambda value, steps=steps: steps.append(len(steps)) or None)
        for step in range(EXCHANGE_STEPS + 1):
            learning(decision(10 + step % 20, measured), np.zeros(2))
        calls.append(len(steps))
    assert calls[0] == calls[1] == 2


def test_a_rank_that_measured_nothing_still_takes_what_is_shared() -> None:
    """Ranks must exchange the same kind of thing, whatever each of them could measure."""
    fitted = fit_line(noisy_steps(np.random.default_rng(2), 64))
    core = Planner(PolicyConfig(), 7)
    learning = CostLearning(core, lambda value: fitted)
    for _ in range(EXCHANGE_STEPS):
        learning(decision(10, None), np.zeros(2))
    assert core.cost is fitted


def test_profiled_model_is_corrected_where_steps_take_longer() -> None:
    core = Planner(PolicyConfig(), 7)
    base = CostModel({ExecMode.FULL: Curve(np.array([8, 16, 32]), np.array([5.0, 6.0, 8.0]))})
    core.adopt(cost=base)
    learning = CostLearning(core, lambda value: value)
    for _ in range(EXCHANGE_STEPS):
        learning(decision(16, 9.0, ExecMode.FULL), np.zeros(2))
    corrected = core.cost.step_ms(np.array([8, 16, 32]), 2)
    assert corrected[1] == pytest.approx(9.0, rel=0.02)
    assert corrected == pytest.approx([7.5, 9.0, 12.0], rel=0.02), "unseen sizes follow the median"


def test_spread_keeps_what_was_seen() -> None:
    model = CostModel({ExecMode.FULL: Curve(np.array([8, 16]), np.array([5.0, 6.0]))})
    assert spread({("full", 8): 2.0}, model) == {("full", 8): 2.0, ("full", 16): 2.0}
    assert spread({}, model) == {}
