# SPDX-License-Identifier: Apache-2.0
"""Cost curves keep their cliffs, and the terms of the model add up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import cases

from vllm_dspark.core import CostModel, ExecMode
from vllm_dspark.core.cost_model import Curve, CurveRule


def staircase():
    """Tiers 4, 8, 16 with a cliff down, then two points above the limit."""
    return Curve(np.array([4, 8, 16, 32, 64]), np.array([1.0, 3.0, 2.0, 10.0, 14.0]), limit=16)


def test_up_to_the_limit_a_size_costs_what_its_tier_costs():
    cost = staircase().at(np.array([1, 4, 5, 8, 9, 16]))
    assert cost.tolist() == [1.0, 1.0, 3.0, 3.0, 2.0, 2.0]


def test_above_the_limit_cost_is_linear_and_never_blended_with_the_last_tier():
    curve = staircase()
    np.testing.assert_allclose(curve.at(np.array([32, 48, 64, 96])), [10.0, 12.0, 14.0, 18.0])
    # 17 lies between tier 16 (2 ms) and point 32 (10 ms): the line above decides, not the tier.
    assert curve.at(np.array([17]))[0] == pytest.approx(10.0 - 15 * 0.125)


def test_losing_the_graph_never_looks_like_a_gain():
    curve = Curve(np.array([16, 32, 48]), np.array([9.0, 10.0, 30.0]), limit=16)
    assert curve.at(np.array([17]))[0] == 9.0
    cheaper = Curve(np.array([16, 32, 48]), np.array([9.0, 5.0, 6.0]), limit=16)
    assert cheaper.at(np.array([17]))[0] == pytest.approx(5.0)
    assert cheaper.at(np.array([48]))[0] == 6.0


@given(seed=st.integers(0, 2**32 - 1), tiers=st.integers(0, 4), above=st.integers(0, 3))
def test_curves_agree_with_a_loop(seed, tiers, above):
    for rng in cases(seed):
        points = np.sort(rng.choice(np.arange(1, 60), tiers + above + 1, replace=False))
        ms = rng.uniform(0.0, 5.0, len(points))
        limit = int(points[tiers - 1]) if tiers else 0
        curve = Curve(points, ms, limit)
        size = int(rng.integers(1, 70))
        low = [(s, m) for s, m in zip(points.tolist(), ms, strict=True) if s <= limit]
        high = [(s, m) for s, m in zip(points.tolist(), ms, strict=True) if s > limit]
        got = float(curve.at(size))
        if size <= limit:
            assert got == next(m for s, m in low if s >= size)
            continue
        if any(s == size for s, _ in high):
            assert got == pytest.approx(dict(high)[size])
            continue
        inside = [p for p in zip(high, high[1:], strict=False) if p[0][0] < size < p[1][0]]
        if inside:
            (s0, m0), (s1, m1) = inside[0]
            assert got == pytest.approx(m0 + (m1 - m0) * (size - s0) / (s1 - s0))
        elif size > high[-1][0] and len(high) > 1:
            slope = max((high[-1][1] - high[-2][1]) / (high[-1][0] - high[-2][0]), 0.0)
            assert got == pytest.approx(high[-1][1] + slope * (size - high[-1][0]))
        elif size < high[0][0]:
            assert got <= high[0][1] + 1e-12


def test_the_rules_of_foreign_tables():
    sizes, ms = np.array([10, 20]), np.array([1.0, 3.0])
    asked = np.array([5, 10, 15, 20, 99])
    previous = Curve(sizes, ms, rule=CurveRule.PREVIOUS)
    assert previous.at(asked).tolist() == [1.0, 1.0, 1.0, 3.0, 3.0]
    linear = Curve(sizes, ms, rule=CurveRule.LINEAR)
    assert linear.at(asked).tolist() == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_sizes_past_the_table_are_computed():
    curve = Curve(np.array([1, 2]), np.array([1.0, 2.0]), limit=0)
    assert float(curve.at(2_000_000)) == pytest.approx(2_000_000.0)


def test_a_single_point_is_flat():
    assert Curve(np.array([8]), np.array([2.0])).at(np.array([1, 8, 100])).tolist() == [2.0] * 3


def test_the_terms_add_up():
    model = CostModel(
        {ExecMode.FULL: staircase()},
        draft=Curve(np.array([1, 8]), np.array([0.5, 0.9])),
        draft_width=7,
        draft_slot_ms=0.1,
        requests=Curve(np.array([1, 9]), np.array([0.0, 0.8]), rule=CurveRule.LINEAR),
        context_token_ms=1e-3,
        logit_row_ms=1e-2,
        request_ms=0.5,
    )
    cost = model.step_ms(np.array([4, 8]), 5, 1000, np.array([4, 8]), ExecMode.FULL)
    np.testing.assert_allclose(cost, [1.0 + 2.5 + 1.0 + 0.4 + 0.04, 3.0 + 2.5 + 1.0 + 0.4 + 0.08])
    assert model.draft_ms(3) == pytest.approx(0.9)
    assert model.draft_ms(3, width=5) == pytest.approx(0.7)
    assert model.draft_ms(0) == 0.0


def test_a_mode_that_was_not_measured_reads_the_next_slower_one():
    piecewise, eager = (Curve(np.array([8]), np.array([x])) for x in (2.0, 3.0))
    model = CostModel({ExecMode.PIECEWISE: piecewise, ExecMode.EAGER: eager})
    assert model.verify_curve(ExecMode.FULL) is piecewise
    only_full = CostModel({ExecMode.FULL: piecewise})
    assert only_full.verify_curve(ExecMode.EAGER) is piecewise


def test_cells_name_the_point_that_prices_a_size():
    curve = staircase()
    assert [curve.cell_of(s) for s in (3, 4, 5, 16, 17, 32, 40)] == [4, 4, 8, 16, 32, 32, 32]
    # Past the limit the nearest of several; never a point with a graph, however near.
    tail = Curve(np.array([16, 24, 48, 96]), np.array([1.0, 2.0, 3.0, 4.0]), limit=16)
    assert [tail.cell_of(s) for s in (12, 17, 35, 37, 80, 500)] == [16, 24, 24, 48, 96, 96]
    assert Curve(np.array([16]), np.array([1.0])).cell_of(17) is None
    linear = Curve(np.array([8, 16]), np.array([1.0, 2.0]), rule=CurveRule.LINEAR)
    assert [linear.cell_of(s) for s in (8, 9, 17)] == [8, None, None]


@pytest.mark.parametrize(
    ("sizes", "ms", "message"),
    [
        ([], [], "as many sizes"),
        ([1, 2], [1.0], "as many sizes"),
        ([2, 1], [1.0, 1.0], "ascend"),
        ([1, 1], [1.0, 1.0], "ascend"),
        ([1], [float("nan")], "finite"),
        ([1], [-1.0], "finite"),
    ],
)
def test_invalid_curves_are_refused(sizes, ms, message):
    with pytest.raises(ValueError, match=message):
        Curve(np.array(sizes), np.array(ms))


def test_a_model_needs_a_verify_curve():
    with pytest.raises(ValueError, match="at least one"):
        CostModel({})
