# SPDX-License-Identifier: Apache-2.0
"""Exact enumeration: which schedules leave the target's distribution alone (DSpark paper, appendix
A).

Two requests, two drafts each, two tokens. Every joint draft outcome is weighted with its
probability, the schedule under test fixes how many drafts of each request are verified, and the law
of request 0's first two output tokens is compared with the target's. The package supplies
allocation, calibration of the live ranking and the (misused) search; Algorithm 1 is written out
here, since no mode offers it.
"""

from itertools import product

import numpy as np
import pytest

from vllm_dspark.core import (
    CostModel,
    ExecMode,
    Planner,
    PolicyConfig,
    StepInput,
)
from vllm_dspark.core.allocation import allocate
from vllm_dspark.core.cost_model import Curve

INSTANCES = 120


class Request:
    """Target, draft and confidence as functions of the prefix."""

    def __init__(self, rng):
        self.p1, self.q1 = rng.dirichlet([1, 1]), rng.dirichlet([1, 1])
        self.p2, self.q2 = rng.dirichlet([1, 1], 2), rng.dirichlet([1, 1], 2)
        self.c1, self.c2 = rng.random(), rng.random(2)

    def draft_probability(self, x1, x2):
        return self.q1[x1] * self.q2[x1, x2]

    def confidence(self, x1):
        """A head that sees the prefix only: slot 2 knows x1, never x2."""
        return [self.c1, self.c2[x1]]

    def target_law(self):
        return self.p1[:, None] * self.p2

    def output_law(self, x1, x2, verified):
        """Law `[2, 2]` of the first two output tokens, given the drafts and the verified length."""
        law = np.zeros((2, 2))
        if verified == 0:
            return self.target_law()
        accept1 = min(1.0, self.p1[x1] / self.q1[x1])
        residual = np.maximum(self.p1 - self.q1, 0.0)
        if accept1 < 1.0:
            first = residual / residual.sum()
            law += (1.0 - accept1) * first[:, None] * self.p2
        if verified == 1:
            law[x1] += accept1 * self.p2[x1]
            return law
        accept2 = min(1.0, self.p2[x1, x2] / self.q2[x1, x2])
        law[x1, x2] += accept1 * accept2
        if accept2 < 1.0:
            residual = np.maximum(self.p2[x1] - self.q2[x1], 0.0)
            law[x1] += accept1 * (1.0 - accept2) * residual / residual.sum()
        return law


def output_law(requests, schedule):
    """Law of request 0 under `schedule(confidence [2, 2]) -> verified lengths`."""
    law = np.zeros((2, 2))
    for x in product(range(2), repeat=4):
        weight = requests[0].draft_probability(*x[:2]) * requests[1].draft_probability(*x[2:])
        confidence = np.array([requests[0].confidence(x[0]), requests[1].confidence(x[2])])
        lens = schedule(confidence)
        law += weight * requests[0].output_law(x[0], x[1], lens[0])
    return law


def live_top(budget):
    def schedule(confidence):
        return allocate(np.cumprod(confidence, axis=1), np.full(len(confidence), 2), budget)

    return schedule


def algorithm_1(sps):
    """The paper's synchronous scheduler: admit along the ranking, stop at the first non-gain."""

    def schedule(confidence):
        survival = np.cumprod(confidence, axis=1)
        slots = sorted((-survival[r, j], j, r) for r, j in np.ndindex(survival.shape))
        lens = [0] * len(survival)
        tokens, tau = len(survival), float(len(survival))
        best = tau * sps[tokens]
        for negative, position, request in slots:
            tokens, tau = tokens + 1, tau - negative
            if tau * sps[tokens] <= best:
                break
            best = tau * sps[tokens]
            lens[request] = position + 1
        return lens

    return schedule


def search_on(sps, confidence_used=None):
    """The package's global search, on live confidences unless others are given."""
    sizes = np.arange(1, len(sps))
    cost = CostModel({ExecMode.FULL: Curve(sizes, 1.0 / np.array(sps[1:]))})
    policy = PolicyConfig(min_gain=0.0, hysteresis=0.0)

    def schedule(confidence):
        used = confidence if confidence_used is None else confidence_used
        requests = len(confidence)
        step = StepInput(
            samples=np.ones(requests, bool),
            draft_lens=np.full(requests, 2),
            base_tokens=requests,
            confidence=used.astype(np.float32),
        )
        plan = Planner(policy, 2, cost=cost).plan(step)
        survival = np.cumprod(confidence, axis=1)
        return allocate(survival, step.draft_lens, plan.verified_drafts)

    return schedule


def jagged(rng):
    """Steps per second for 0..6 tokens, falling with cliffs."""
    return np.concatenate([[2.0], np.cumprod(rng.choice([0.98, 0.9, 0.7], 6))])


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4])
def test_live_ranking_under_an_exogenous_budget_is_lossless(budget):
    rng = np.random.default_rng(budget)
    for _ in range(INSTANCES):
        requests = [Request(rng), Request(rng)]
        law = output_law(requests, live_top(budget))
        np.testing.assert_allclose(law, requests[0].target_law(), rtol=0, atol=1e-12)


def test_live_ranking_is_lossless_among_ties():
    """Saturated confidences: every survival is exactly 1 or 0."""
    rng = np.random.default_rng(5)
    for _ in range(INSTANCES):
        requests = [Request(rng), Request(rng)]
        for request in requests:
            request.c1, request.c2 = 1.0, rng.choice([0.0, 1.0], 2)
        for budget in (1, 2, 3):
            law = output_law(requests, live_top(budget))
            np.testing.assert_allclose(law, requests[0].target_law(), rtol=0, atol=1e-12)


def test_algorithm_1_with_its_early_stop_is_lossless():
    rng = np.random.default_rng(6)
    for _ in range(INSTANCES):
        requests = [Request(rng), Request(rng)]
        law = output_law(requests, algorithm_1(jagged(rng)))
        np.testing.assert_allclose(law, requests[0].target_law(), rtol=0, atol=1e-12)


def test_the_search_on_older_confidences_is_lossless():
    rng = np.random.default_rng(7)
    for _ in range(INSTANCES // 4):
        requests = [Request(rng), Request(rng)]
        schedule = search_on(jagged(rng), confidence_used=rng.random((2, 2)))
        law = output_law(requests, schedule)
        np.testing.assert_allclose(law, requests[0].target_law(), rtol=0, atol=1e-12)


def test_the_search_on_live_confidences_is_not():
    rng = np.random.default_rng(10)
    worst = 0.0
    for _ in range(INSTANCES // 2):
        requests = [Request(rng), Request(rng)]
        law = output_law(requests, search_on(jagged(rng)))
        worst = max(worst, float(np.abs(law - requests[0].target_law()).max()))
    assert worst > 0.1


def appendix_a(schedule):
    """First-token law of the paper's counterexample: one request, two drafts."""
    request = Request(np.random.default_rng(0))
    request.p1, request.q1 = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    request.p2 = request.q2 = np.full((2, 2), 0.5)
    law = np.zeros((2, 2))
    for x1, x2 in product(range(2), repeat=2):
        confidence = np.array([[0.8, 0.9 if x1 == 0 else 0.0]])
        lens = schedule(confidence)
        law += request.draft_probability(x1, x2) * request.output_law(x1, x2, lens[0])
    return law.sum(axis=1)


APPENDIX_A_SPS = [0.0, 1.0, 0.5, 0.45]


def test_appendix_a_search_on_live_confidences_turns_70_into_85_percent():
    np.testing.assert_allclose(appendix_a(search_on(APPENDIX_A_SPS)), [0.85, 0.15], atol=1e-12)


def test_appendix_a_lossless_schedules_keep_70_percent():
    lagged = search_on(APPENDIX_A_SPS, confidence_used=np.array([[0.8, 0.9]]))
    for schedule in (algorithm_1(APPENDIX_A_SPS), live_top(1), lagged):
        np.testing.assert_allclose(appendix_a(schedule), [0.7, 0.3], atol=1e-12)
