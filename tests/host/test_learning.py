# SPDX-License-Identifier: Apache-2.0
"""Calibration from the steps that are served: when it is refitted, and from which blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.platt import OnlineCalibrator
from vllm_dspark.core.policy import PolicyConfig
from vllm_dspark.engine import learning
from vllm_dspark.engine.learning import REFIT_STEPS, OnlineLearning

GAMMA = 4


def steps(requests: int, seed: int = 0) -> list[tuple[Any, np.ndarray]]:
    """Settled steps up to a refit; drafts are accepted half as often as their confidence says. One
    request of each step reads its prompt, one has no block that is known.
    """
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(REFIT_STEPS):
        confidence = rng.uniform(0.4, 1.0, (requests, GAMMA)).astype(np.float32)
        accepted = (rng.random((requests, GAMMA)) < confidence / 2).cumprod(axis=1).sum(axis=1)
        samples = np.arange(requests) != 0
        confidence[1] = np.nan
        decision = SimpleNamespace(
            predicted=confidence,
            admitted=np.full(requests, GAMMA),
            samples=samples,
            regimes=0 if requests % 2 else np.arange(requests) % 2,
        )
        made.append((decision, accepted))
    return made


def refitted(made: list[tuple[Any, np.ndarray]]) -> CalibrationTable:
    """What the calibrator alone makes of the rows that count."""
    calibrator = OnlineCalibrator(GAMMA, window=learning._WINDOW_BLOCKS)
    for decision, accepted in made:
        rows = slice(2, None)
        regimes = np.broadcast_to(decision.regimes, len(accepted))[rows]
        calibrator.observe(
            decision.predicted[rows], accepted[rows], decision.admitted[rows], regimes
        )
    return calibrator.refit(CalibrationTable.identity(GAMMA))


@pytest.mark.parametrize("requests", [3, 6, 40])
def test_the_recent_blocks_are_fitted_after_so_many_steps(requests: int) -> None:
    core = Planner(PolicyConfig(), GAMMA)
    learn, made = OnlineLearning(core), steps(requests)
    untouched = core.calibration
    for step in made[:-1]:
        learn(*step)
        assert core.calibration is untouched
    learn(*made[-1])
    expected = refitted(made)
    assert core.calibration.version == expected.version > untouched.version
    np.testing.assert_allclose(core.calibration.scale, expected.scale, rtol=1e-12)
    np.testing.assert_allclose(core.calibration.bias, expected.bias, rtol=1e-12)
    # The last slot is rarely reached.
    applied = core.calibration.apply(np.full((GAMMA, 1), 0.8, np.float32), 0)
    assert (applied[: GAMMA - 1] < 0.6).all()


def test_no_more_is_kept_than_a_refit_may_need() -> None:
    learn = OnlineLearning(Planner(PolicyConfig(), GAMMA))
    for step in steps(40)[:-1]:
        learn(*step)
        assert learn._blocks == sum(len(accepted) for _, accepted in learn._waiting)
        assert learn._blocks < learning._KEPT_BLOCKS + 40
    assert learn._blocks >= learning._KEPT_BLOCKS
