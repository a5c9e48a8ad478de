# SPDX-License-Identifier: Apache-2.0
"""Live correction: averaged, guarded, and adopted by version only."""

import numpy as np
import pytest

from vllm_dspark.core import CostModel, ExecMode
from vllm_dspark.core.cost_model import Curve
from vllm_dspark.core.live_cost import LiveCost

FULL = ExecMode.FULL


def make_live(**options):
    base = CostModel({FULL: Curve(np.array([8, 16]), np.array([2.0, 4.0]))}, request_ms=0.5)
    return LiveCost(base, **options)


def observe(live, tokens, ratio, count=1):
    """A step whose verify term takes `ratio` of the base, plus 1 ms of other terms."""
    results = []
    for _ in range(count):
        measured = float(live._base.verify_curve(FULL).at(tokens)) * ratio + 1.0
        results.append(live.observe(FULL, tokens, 1.0, measured))
    return results


def test_nothing_changes_before_a_version_is_adopted():
    live = make_live()
    observe(live, 8, 1.5, 50)
    assert live.model.verify_curve(FULL).at(8) == 2.0
    version, corrections = live.payload()
    assert (version, live.version) == (1, 0)
    assert live.adopt(version, corrections)
    assert live.model.verify_curve(FULL).at(8) == pytest.approx(3.0)
    assert live.model.verify_curve(FULL).at(16) == 4.0
    assert live.model.request_ms == 0.5


def test_steps_past_the_graphs_correct_the_costs_past_the_graphs():
    curve = Curve(np.array([8, 16, 32, 64]), np.array([2.0, 4.0, 9.0, 17.0]), limit=16)
    live = LiveCost(CostModel({FULL: curve}, request_ms=0.5))
    observe(live, 30, 1.5, 40)
    observe(live, 70, 1.2, 40)
    assert live.adopt(*live.payload())
    corrected = live.model.verify_curve(FULL)
    assert corrected.at(32) == pytest.approx(9.0 * 1.5)
    assert corrected.at(64) == pytest.approx(17.0 * 1.2)
    assert (corrected.at(8), corrected.at(16)) == (2.0, 4.0)


def test_only_newer_versions_are_adopted():
    live = make_live()
    assert live.adopt(3, {("full", 8): 1.5})
    assert not live.adopt(3, {("full", 8): 9.0})
    assert not live.adopt(2, {})
    assert live.model.verify_curve(FULL).at(8) == pytest.approx(3.0)


def test_corrections_are_relative_to_the_base_and_do_not_accumulate():
    live = make_live()
    for _ in range(3):
        observe(live, 8, 1.5, 40)
        live.adopt(*live.payload())
    assert live.model.verify_curve(FULL).at(8) == pytest.approx(3.0)


def test_a_rank_that_observed_something_else_follows_the_payload():
    sender, receiver = make_live(), make_live()
    observe(sender, 8, 1.2, 20)
    observe(receiver, 8, 0.7, 20)
    payload = sender.payload()
    for live in (sender, receiver):
        live.adopt(*payload)
    sizes = np.array([8, 16])
    assert (
        sender.model.verify[FULL].at(sizes).tolist()
        == receiver.model.verify[FULL].at(sizes).tolist()
    )


def test_outliers_are_dropped_until_they_become_the_rule():
    live = make_live(patience=5)
    observe(live, 8, 1.0, 20)
    assert observe(live, 8, 50.0, 2) == [False, False]
    assert live.rejected == 2
    assert live.payload()[1][("full", 8)] == pytest.approx(1.0)
    observe(live, 8, 3.0, 30)
    assert live.payload()[1][("full", 8)] == pytest.approx(3.0)


def test_rare_cells_and_sizes_between_points_are_not_corrected():
    live = make_live(min_observations=8)
    observe(live, 16, 1.5, 7)
    assert live.payload()[1] == {}
    assert not live.observe(FULL, 40, 5.0, 5.0)


@pytest.mark.parametrize("measured", [float("nan"), float("inf"), 0.0, -1.0])
def test_impossible_measurements_are_ignored(measured):
    live = make_live()
    assert not live.observe(FULL, 8, 0.0, measured)
    assert not live.observe(FULL, 8, float("nan"), 2.0)
    assert not live.observe(FULL, 8, 2.0, 2.0)


def test_invalid_corrections_and_options_are_refused():
    with pytest.raises(ValueError, match="positive"):
        make_live().adopt(1, {("full", 8): float("nan")})
    with pytest.raises(ValueError, match=r"rate=0\.0"):
        make_live(rate=0.0)
    with pytest.raises(ValueError, match=r"outlier=1\.0"):
        make_live(outlier=1.0)
