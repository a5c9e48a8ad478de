# SPDX-License-Identifier: Apache-2.0
"""The planner against a naive planner, over steps of every shape, and monotonic sanity.

Cases mix ties, saturated and dead confidences, K = 1, rows without drafts, prefill chunks that do
not sample, doubtful rows, tier edges, and totals past the ladder.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    PALETTES,
    admitted_by_sort,
    cases,
    random_confidence,
    realisable_budgets,
    survival_rows,
    tier_of,
)

from vllm_dspark.core import (
    CostModel,
    ExecMode,
    Planner,
    PlanReason,
    PolicyConfig,
    RowDoubt,
    SearchMode,
    StepInput,
    TierLadder,
)
from vllm_dspark.core.cost_model import Curve

EAGER_POLICY = PolicyConfig(min_gain=0.0, hysteresis=0.0, start_confidence=0.5, prior_rate=0.0)
shapes = {
    "seed": st.integers(0, 2**32 - 1),
    "requests": st.integers(1, 6),
    "gamma": st.integers(1, 5),
    "palette": st.sampled_from(sorted(PALETTES)),
}


class Deployment:
    """Random ladder and cost: a staircase with cliffs up and down, steeper lines past it."""

    def __init__(self, rng, slope=None, base=None):
        self.tiers = sorted({int(t) for t in rng.integers(1, 30, rng.integers(0, 5))})
        self.base_ms = float(rng.uniform(0.5, 8.0)) if base is None else base
        self.slope = float(rng.uniform(0.0, 0.6)) if slope is None else slope
        jumps = np.cumsum(rng.choice([0.0, 1.5, -0.4], 64))
        sizes = [*self.tiers, *range(max(self.tiers, default=0) + 1, 64)]
        self.ms = {s: max(self.base_ms + self.slope * s + jumps[s], 0.05) for s in sizes}
        self.row_ms = float(rng.choice([0.0, 0.01]))
        self.draft_ms = float(rng.choice([0.0, 0.8]))
        self.ragged_ms = float(rng.choice([0.0, 0.3]))
        curve = Curve(
            np.array(sizes), np.array([self.ms[s] for s in sizes]), max(self.tiers, default=0)
        )
        self.cost = CostModel(
            {ExecMode.FULL: curve},
            draft=Curve(np.array([1]), np.array([self.draft_ms])),
            logit_row_ms=self.row_ms,
            ragged_ms=self.ragged_ms,
        )
        self.ladders = {ExecMode.FULL: TierLadder(self.tiers)}

    def step_ms(self, tokens, rows, ragged):
        cost = self.ms[tier_of(self.tiers, tokens)] + self.row_ms * rows + self.draft_ms
        return cost + (self.ragged_ms if ragged else 0.0)


def random_step(rng, requests, gamma, palette):
    confidence = random_confidence(rng, palette, requests, gamma)
    confidence[rng.random(confidence.shape) < rng.choice([0.0, 0.1])] = np.nan
    lens = rng.integers(0, gamma + 1, requests) if rng.random() < 0.5 else np.full(requests, gamma)
    prefill = (lens == 0) & (rng.random(requests) < 0.5)
    state = np.where(rng.random(requests) < rng.choice([0.0, 0.3]), RowDoubt.FRESH, 0)
    chunks = int(rng.integers(0, 6)) * int(prefill.sum())
    return StepInput(
        samples=~prefill,
        draft_lens=lens,
        base_tokens=requests + chunks,
        confidence=confidence,
        row_state=state.astype(np.int8),
    )


def naive_rates(step, world, gamma, policy):
    """`{budget: (rate, tau)}` of every realisable budget, doubtful rows, and survival rows."""
    doubtful = set()
    for request, length in enumerate(step.draft_lens):
        values = [float(x) for x in step.confidence[request][: int(length)]]
        bad = any(not math.isfinite(v) or not 0.0 <= v <= 1.0 for v in values)
        if length and (bad or step.row_state[request]):
            doubtful.add(request)
    rows = survival_rows(step.confidence, step.draft_lens)
    for request in doubtful:
        rows[request] = [math.nan] * int(step.draft_lens[request])
    trusted = [len(v) for r, v in enumerate(rows) if r not in doubtful]
    # prior_rate 0: the first evidence is the mean for ever, and this is the first step.
    prior, last = [], math.inf
    for slot in range(gamma):
        seen = [v[slot] for r, v in enumerate(rows) if r not in doubtful and len(v) > slot]
        mean = sum(seen) / len(seen) if seen else policy.start_confidence ** (slot + 1)
        last = min(last, mean)
        prior.append(last)
    assert len(trusted) + len(doubtful) == len(rows)
    doubtful_drafts = sum(int(step.draft_lens[r]) for r in doubtful)
    doubtful_tau = sum(sum(prior[: int(step.draft_lens[r])]) for r in doubtful)
    ranked = sorted(
        (v for r, row in enumerate(rows) if r not in doubtful for v in row), reverse=True
    )
    drafts = sum(int(n) for n in step.draft_lens)
    sampling = int(sum(step.samples))
    rates = {}
    for b in realisable_budgets(world.tiers, step.base_tokens, doubtful_drafts, drafts):
        tau = sampling + doubtful_tau + sum(ranked[: b - doubtful_drafts])
        rates[b] = tau / world.step_ms(step.base_tokens + b, sampling + b, b < drafts), tau
    return rates, doubtful, rows


@given(**shapes)
def test_the_plan_is_the_best_realisable_budget(seed, requests, gamma, palette):
    for rng in cases(seed):
        world = Deployment(rng)
        step = random_step(rng, requests, gamma, palette)
        plan = Planner(EAGER_POLICY, gamma, world.ladders, world.cost).plan(step)
        drafts = int(step.draft_lens.sum())
        if drafts == 0:
            assert plan.reason is PlanReason.NO_DRAFTS
            continue
        rates, doubtful, rows = naive_rates(step, world, gamma, EAGER_POLICY)
        chosen = plan.verified_drafts
        assert (plan.budget is None) == (chosen == drafts)
        if plan.reason is PlanReason.ALL_DOUBTFUL:
            assert len(rates) == 1
        else:
            # float32 ranking keys: equal up to their rounding.
            best = max(rate for rate, _ in rates.values())
            assert rates[chosen][0] == pytest.approx(best, rel=1e-6)
            assert all(r <= best * (1 + 1e-6) for b, (r, _) in rates.items() if b < chosen)
            assert plan.predicted_tau == pytest.approx(rates[chosen][1], rel=1e-6)
        expected = admitted_by_sort(rows, chosen, doubtful)
        assert plan.admitted.tolist() == expected
        assert plan.verify_lens.tolist() == [n + 1 for n in expected]
        assert sum(plan.doubts.values()) == len(doubtful)
        for request in doubtful:
            assert plan.admitted[request] == step.draft_lens[request]


@given(**shapes)
def test_smallest_budget_on_exact_ties(seed, requests, gamma, palette):
    """With confidences of 0 or 1 and integer costs every rate is exact, and so are ties."""
    for rng in cases(seed):
        confidence = rng.choice(np.array([0.0, 1.0], np.float32), (requests, gamma))
        lens = np.full(requests, gamma)
        total = requests * (gamma + 1)
        tiers = sorted({int(t) for t in rng.integers(1, total + 1, 3)} | {total})
        ms = rng.integers(1, 4, len(tiers)).astype(float)
        cost = CostModel({ExecMode.FULL: Curve(np.array(tiers), ms)})
        step = StepInput(np.ones(requests, bool), lens, requests, confidence)
        plan = Planner(EAGER_POLICY, gamma, {ExecMode.FULL: TierLadder(tiers)}, cost).plan(step)
        ranked = sorted(np.cumprod(confidence, axis=1).ravel(), reverse=True)
        price = dict(zip(tiers, ms, strict=True))
        rates = {
            b: (requests + sum(ranked[:b])) / price[tier_of(tiers, requests + b)]
            for b in realisable_budgets(tiers, requests, 0, requests * gamma)
        }
        best = max(rates.values())
        assert plan.verified_drafts == min(b for b, rate in rates.items() if rate == best)


@given(**shapes)
def test_dearer_tokens_never_buy_a_larger_budget(seed, requests, gamma, palette):
    for rng in cases(seed):
        step = random_step(rng, requests, gamma, palette)
        base, fixed = float(rng.uniform(0.5, 5.0)), float(rng.uniform(0.0, 5.0))
        slopes = np.sort(rng.uniform(0.0, 1.0, 3))
        sizes = np.arange(1, 64)

        def budget(slope, base_ms, step=step, sizes=sizes):
            cost = CostModel({ExecMode.FULL: Curve(sizes, base_ms + slope * sizes)})
            return Planner(EAGER_POLICY, gamma, cost=cost).plan(step).verified_drafts

        chosen = [budget(slope, base) for slope in slopes]
        assert chosen == sorted(chosen, reverse=True)
        # A larger fixed cost makes every token relatively cheaper.
        assert budget(slopes[1], base + fixed) >= chosen[1]


@given(**shapes)
def test_floor_cap_pin_and_host_limit_hold_always(seed, requests, gamma, palette):
    for rng in cases(seed):
        world = Deployment(rng)
        step = random_step(rng, requests, gamma, palette)
        drafts = int(step.draft_lens.sum())
        step.max_drafts = int(rng.integers(0, drafts + 2)) if rng.random() < 0.3 else None
        if rng.random() < 0.2:
            step.confidence = None
        if rng.random() < 0.2:
            step.trim_mode = None
        floor, cap = (int(x) for x in np.sort(rng.integers(0, drafts + 1, 2)))
        fraction = float(rng.random())
        options = [
            ({"floor": floor, "cap": cap}, floor, cap),
            ({"cap": fraction}, 0, math.floor(fraction * drafts)),
            ({"pin": fraction}, math.floor(fraction * drafts), math.floor(fraction * drafts)),
            ({"pin": floor}, floor, floor),
        ]
        given_options, low, high = options[rng.integers(len(options))]
        policy = PolicyConfig(
            search=rng.choice([SearchMode.RAGGED, SearchMode.STATIC]), **given_options
        )
        cost = world.cost if rng.random() < 0.7 else None
        plan = Planner(policy, gamma, world.ladders, cost).plan(step)
        if step.max_drafts is not None:
            high = min(high, step.max_drafts)
        assert min(low, high) <= plan.verified_drafts <= high
        assert plan.admitted.sum() == plan.verified_drafts
        assert (plan.admitted <= step.draft_lens).all()


@given(**shapes)
def test_one_width_for_all_is_the_best_width(seed, requests, gamma, palette):
    policy = PolicyConfig(search=SearchMode.UNIFORM, min_gain=0.0, hysteresis=0.0)
    for rng in cases(seed):
        world = Deployment(rng)
        step = random_step(rng, requests, gamma, palette)
        step.confidence = random_confidence(rng, palette, requests, gamma)
        step.row_state = None
        plan = Planner(policy, gamma, world.ladders, world.cost).plan(step)
        if not step.draft_lens.any():
            continue
        rows = survival_rows(step.confidence, step.draft_lens)
        sampling = int(sum(step.samples))
        rates = []
        for k in range(gamma + 1):
            b = sum(min(k, int(n)) for n in step.draft_lens)
            tau = sampling + sum(sum(row[:k]) for row in rows)
            rates.append(tau / world.step_ms(step.base_tokens + b, sampling + b, False))
        widths = {
            k
            for k in range(gamma + 1)
            if plan.admitted.tolist() == [min(k, int(n)) for n in step.draft_lens]
        }
        assert widths
        assert max(rates[k] for k in widths) == pytest.approx(max(rates), rel=1e-9)


@given(**shapes)
def test_equal_inputs_give_equal_plans_on_every_rank(seed, requests, gamma, palette):
    rng = np.random.default_rng(seed)
    world = Deployment(rng)
    ranks = [Planner(PolicyConfig(), gamma, world.ladders, world.cost) for _ in range(2)]
    for case in cases(seed):
        step = random_step(case, requests, gamma, palette)
        first, second = (planner.plan(step) for planner in ranks)
        assert first.admitted.tolist() == second.admitted.tolist()
        for name in ("budget", "tier_tokens", "reason", "predicted_step_ms"):
            assert getattr(first, name) == getattr(second, name)
