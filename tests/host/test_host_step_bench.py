# SPDX-License-Identifier: Apache-2.0
"""The service of `benchmarks/host_step.py` is one that the planner trims, and turns over."""

from __future__ import annotations

import host_step
import numpy as np
import pytest

GAMMA, REQUESTS = 7, 24


@pytest.fixture
def confidence() -> np.ndarray:
    """Blocks of which many are too poor to verify."""
    drawn = np.random.default_rng(1).uniform(0.05, 0.95, (64, GAMMA))
    return np.sort(drawn.astype(np.float32), axis=1)[:, ::-1].copy()


def test_steps_are_planned_settled_and_timed(confidence: np.ndarray) -> None:
    steps = 2 * host_step.STEPS
    with host_step.no_device():
        service = host_step.Service(confidence, REQUESTS)
        settled = []
        service._planner._observers += (lambda decision, accepted: settled.append(decision),)
        kinds = []
        for _ in range(steps):
            service.step()
            kinds.append(service.decodes)
            assert set(service.seconds) >= set(host_step.PARTS)
    assert len(settled) == steps - 2, "all but the newest ones, in order"
    assert [decision.step for decision in settled] == list(range(steps - 2))
    trimmed = [decision.plan.budget is not None for decision in settled]
    assert any(trimmed)
    assert 0 < sum(kinds) < steps, "some steps read a prompt, some only decode"
    # Every slot has changed hands, and a new owner's first block is verified unseen.
    assert service._named >= 2 * REQUESTS
    assert any(decision.plan.doubts for decision in settled)


def test_figures_of_a_row(confidence: np.ndarray) -> None:
    with host_step.no_device():
        row = host_step.row(confidence, requests=REQUESTS, steps=60)
    parts = [row[f"{part}_us"] for part in host_step.PARTS]
    assert min(parts) > 0 and max(parts) <= row["step_us"]
    assert 0 < row["decode_steps"] < row["steps"] and row["decode_step_us"] > 0
