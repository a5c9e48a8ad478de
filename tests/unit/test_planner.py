# SPDX-License-Identifier: Apache-2.0
"""The planner's rules one by one: reasons, doubt, bounds, hysteresis, modes."""

import numpy as np
import pytest

from vllm_dspark.core import (
    CalibrationTable,
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

GAMMA = 4
SIZES = np.arange(1, 200)


def linear_cost(base=1.0, slope=0.1, **terms):
    return CostModel({ExecMode.FULL: Curve(SIZES, base + slope * SIZES)}, **terms)


def make_step(confidence, **changes):
    confidence = np.asarray(confidence, np.float32)
    requests = len(confidence)
    values = {
        "samples": np.ones(requests, bool),
        "draft_lens": np.full(requests, confidence.shape[1]),
        "base_tokens": requests,
        "confidence": confidence,
        **changes,
    }
    return StepInput(**values)


def planner(policy=None, cost=None, **options):
    return Planner(policy or PolicyConfig(), GAMMA, cost=cost or linear_cost(), **options)


MIXED = [[0.95, 0.9, 0.9, 0.9], [0.3, 0.2, 0.1, 0.1], [0.5, 0.5, 0.5, 0.5]]


def test_trimming_follows_the_confidences():
    plan = planner().plan(make_step(MIXED))
    assert plan.reason is PlanReason.TRIMMED
    assert plan.admitted.tolist() == [4, 0, 1]
    assert plan.verify_lens.tolist() == [5, 1, 2]
    assert plan.budget == plan.verified_drafts == 5
    assert plan.predicted_gain > 0.0
    assert plan.uniform_k is None


def test_a_flat_cost_verifies_everything():
    plan = planner(cost=linear_cost(slope=0.0)).plan(make_step(MIXED))
    assert (plan.budget, plan.reason, plan.uniform_k) == (None, PlanReason.FULL_BEST, GAMMA)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"confidence": None}, PlanReason.NO_CONFIDENCE),
        ({"trim_mode": None}, PlanReason.MODE_UNAVAILABLE),
        ({"row_state": np.full(3, RowDoubt.FRESH)}, PlanReason.ALL_DOUBTFUL),
        ({"draft_lens": np.zeros(3, int)}, PlanReason.NO_DRAFTS),
    ],
)
def test_every_doubt_about_the_step_verifies_everything(change, reason):
    step = make_step(MIXED)
    for name, value in change.items():
        setattr(step, name, value)
    plan = planner().plan(step)
    assert (plan.budget, plan.reason) == (None, reason)
    assert plan.admitted.tolist() == step.draft_lens.tolist()


def test_without_a_cost_model_everything_is_verified_and_the_reason_says_so():
    plan = Planner(PolicyConfig(), GAMMA).plan(make_step(MIXED))
    assert (plan.budget, plan.reason) == (None, PlanReason.NO_COST_MODEL)
    assert plan.predicted_step_ms is None


def test_a_static_policy_never_searches():
    plan = planner(PolicyConfig(search=SearchMode.STATIC)).plan(make_step(MIXED))
    assert (plan.budget, plan.reason) == (None, PlanReason.STATIC)


def test_one_nan_costs_its_own_row_and_nothing_else():
    """Native vLLM's whole budget falls from 208 to 1 on one NaN."""
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.8, 1.0, (64, GAMMA))
    poisoned = confidence.copy()
    poisoned[7, 1] = np.nan
    clean = planner().plan(make_step(confidence))
    plan = planner().plan(make_step(poisoned))
    assert plan.doubts == {RowDoubt.NON_FINITE: 1}
    assert plan.admitted[7] == GAMMA
    others = np.arange(64) != 7
    assert clean.admitted[others].sum() - plan.admitted[others].sum() <= GAMMA
    fresh = make_step(confidence, row_state=np.where(others, 0, RowDoubt.FRESH))
    assert planner().plan(fresh).admitted.tolist() == plan.admitted.tolist()


def test_doubtful_rows_do_not_take_the_budget_of_others():
    alone = planner().plan(make_step(MIXED)).admitted.tolist()
    step = make_step([*MIXED, [0.5] * GAMMA], row_state=np.array([0, 0, 0, RowDoubt.STALE]))
    plan = planner(cost=linear_cost(base=1.0)).plan(step)
    assert plan.admitted[3] == GAMMA
    assert sum(plan.admitted[:3]) >= sum(alone) - 1


def test_doubtful_rows_are_worth_the_running_means():
    subject = planner()
    subject.plan(make_step([[0.5] * GAMMA] * 2))
    step = make_step([[0.5] * GAMMA] * 2, row_state=np.array([0, RowDoubt.FRESH]))
    plan = subject.plan(step)
    mean = 0.5 ** np.arange(1, GAMMA + 1)
    trusted = mean[: plan.admitted[0]].sum()
    assert plan.predicted_tau == pytest.approx(2 + mean.sum() + trusted)


def test_a_pin_holds_without_a_cost_model_and_on_a_flat_one():
    policy = PolicyConfig(pin=0.5)
    for subject in (Planner(policy, GAMMA), planner(policy, linear_cost(slope=0.0))):
        plan = subject.plan(make_step(MIXED))
        assert (plan.budget, plan.reason) == (6, PlanReason.PINNED)
        assert plan.admitted.tolist() == [4, 1, 1]


def test_a_cap_holds_against_doubtful_rows_which_share_what_is_left():
    step = make_step(MIXED, row_state=np.array([0, RowDoubt.FRESH, RowDoubt.FRESH]))
    plan = planner(PolicyConfig(cap=5)).plan(step)
    assert plan.admitted.tolist() == [0, 3, 2]


def test_the_host_limit_beats_the_pin():
    plan = planner(PolicyConfig(pin=10)).plan(make_step(MIXED, max_drafts=3))
    assert plan.budget == 3


def test_a_small_gain_is_not_worth_a_trim_and_hysteresis_keeps_the_choice():
    policy = PolicyConfig(min_gain=0.05, hysteresis=0.10)
    subject = planner(policy)
    strong, weak = make_step(MIXED), make_step([[0.9, 0.8, 0.6, 0.5]] * 3)
    gain = planner(PolicyConfig(min_gain=0.0, hysteresis=0.0)).plan(weak).predicted_gain
    assert 0.05 < gain < 0.15
    assert subject.plan(weak).reason is PlanReason.GAIN_TOO_SMALL
    assert subject.plan(strong).reason is PlanReason.TRIMMED
    assert subject.plan(weak).reason is PlanReason.TRIMMED


def test_the_ragged_overhead_is_weighed_against_the_gain():
    cheap, dear = linear_cost(ragged_ms=0.0), linear_cost(ragged_ms=5.0)
    assert planner(cost=cheap).plan(make_step(MIXED)).budget == 5
    assert planner(cost=dear).plan(make_step(MIXED)).budget is None


def test_the_full_step_is_priced_in_its_own_mode():
    cost = CostModel(
        {
            ExecMode.FULL: Curve(SIZES, 1.0 + 0.01 * SIZES),
            ExecMode.EAGER: Curve(SIZES, 3.0 + 0.01 * SIZES, 0),
        }
    )
    trimmed_eagerly = make_step(MIXED, trim_mode=ExecMode.EAGER, full_mode=ExecMode.FULL)
    assert planner(cost=cost).plan(trimmed_eagerly).budget is None
    full_eagerly = make_step(MIXED, trim_mode=ExecMode.FULL, full_mode=ExecMode.EAGER)
    plan = planner(cost=cost).plan(full_eagerly)
    assert plan.reason is PlanReason.TRIMMED
    assert plan.predicted_step_ms < 3.0


def test_budgets_end_on_tiers_and_the_plan_names_the_tier():
    ladder = TierLadder([4, 8, 12, 16])
    plan = planner(ladders={ExecMode.FULL: ladder}).plan(make_step(MIXED))
    assert plan.tier_tokens == 8
    assert plan.budget == 5
    beyond = planner(ladders={ExecMode.FULL: TierLadder([4])}).plan(make_step(MIXED))
    assert beyond.tier_tokens is None


def test_a_new_table_or_ladder_is_used_from_the_next_plan_on():
    subject, step = planner(), make_step(MIXED)
    assert subject.plan(step).budget == 5
    subject.adopt(cost=linear_cost(slope=0.0))
    assert subject.plan(step).budget is None
    subject.adopt(cost=linear_cost())
    subject.ladders[ExecMode.FULL] = TierLadder([7, 15])
    assert (subject.plan(step).budget, subject.plan(step).tier_tokens) == (4, 7)


def test_a_tier_has_to_hold_the_requests_too():
    buckets = {ExecMode.FULL: TierLadder([(6, 2), (8, 4), (15, 4)])}
    plan = planner(ladders=buckets).plan(make_step(MIXED))
    assert (plan.tier_tokens, plan.budget) == (8, 5)


def test_the_step_bound_trims_even_where_the_rate_would_not():
    flat = linear_cost(base=10.0, slope=0.1)
    step = make_step([[0.9] * GAMMA] * 3)
    assert planner(cost=flat).plan(step).budget is None
    plan = planner(PolicyConfig(step_bound_ms=11.0), flat).plan(step)
    assert plan.reason is PlanReason.LATENCY_BOUND
    assert plan.predicted_step_ms <= 11.0
    assert plan.budget == 7
    hopeless = planner(PolicyConfig(step_bound_ms=1.0), flat).plan(step)
    assert hopeless.budget == 0


def test_prefill_chunks_count_as_tokens_but_not_as_expected_output():
    step = make_step(
        [*MIXED, [0.0] * GAMMA],
        samples=np.array([True, True, True, False]),
        draft_lens=np.array([4, 4, 4, 0]),
        base_tokens=3 + 100,
    )
    plan = planner(cost=linear_cost(base=0.0, slope=0.05)).plan(step)
    assert plan.admitted[3] == 0
    assert plan.predicted_tau < 3 + 12
    # The chunk dominates the step, so drafts are almost free beside it.
    assert plan.budget is None or plan.budget > 5


def test_uniform_search_keeps_one_width_and_fresh_rows_follow_it():
    policy = PolicyConfig(search=SearchMode.UNIFORM)
    good_bad = [[0.95, 0.9, 0.1, 0.1]] * 3
    plan = planner(policy).plan(make_step(good_bad, row_state=np.array([0, 0, RowDoubt.FRESH])))
    assert (plan.uniform_k, plan.admitted.tolist()) == (2, [2, 2, 2])
    stale = make_step(good_bad, row_state=np.array([0, 0, RowDoubt.STALE]))
    assert planner(policy).plan(stale).reason is PlanReason.ALL_DOUBTFUL


def test_uniform_search_uses_only_widths_that_have_graphs():
    policy = PolicyConfig(search=SearchMode.UNIFORM)
    step = make_step([[0.95, 0.9, 0.1, 0.1]] * 3)
    widths = {0: TierLadder([3]), 3: TierLadder([12])}
    plan = planner(policy, width_ladders=widths).plan(step)
    assert plan.uniform_k in (0, 3)


def test_a_uniform_pin_takes_the_largest_width_that_fits():
    policy = PolicyConfig(search=SearchMode.UNIFORM, pin=8)
    assert planner(policy).plan(make_step(MIXED)).admitted.tolist() == [2, 2, 2]


def test_lengths_are_left_out_when_the_device_splits_the_budget():
    plan = planner().plan(make_step(MIXED, need_lens=False))
    assert (plan.admitted, plan.verify_lens, plan.budget) == (None, None, 5)


def test_an_empty_step_plans_nothing():
    plan = planner().plan(make_step(np.zeros((0, GAMMA))))
    assert (plan.reason, plan.verified_drafts) == (PlanReason.NO_DRAFTS, 0)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="gamma=4"):
        planner().plan(make_step([[0.5, 0.5]]))
    with pytest.raises(ValueError, match="gamma=0"):
        Planner(PolicyConfig(), 0)
    with pytest.raises(ValueError, match="calibration is for gamma=2"):
        planner(calibration=CalibrationTable.identity(2))


def test_calibration_is_applied_before_the_search():
    raw = CalibrationTable.identity(GAMMA)
    humbler = CalibrationTable(raw.scale, raw.bias - 2.0)
    assert planner(calibration=humbler).plan(make_step(MIXED)).budget < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pin": 1.5}, "pin=1.5"),
        ({"cap": -1}, "cap=-1"),
        ({"floor": True}, "floor=True"),
        ({"min_gain": -0.1}, "min_gain=-0.1"),
        ({"hysteresis": float("nan")}, "hysteresis=nan"),
        ({"step_bound_ms": 0.0}, "step_bound_ms=0.0"),
        ({"search": "best"}, "search='best'"),
    ],
)
def test_invalid_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**options)
