# SPDX-License-Identifier: Apache-2.0
"""Traces and their replay under other policies."""

import json

import numpy as np
import pytest

from vllm_dspark.core import (
    CostModel,
    ExecMode,
    Planner,
    PolicyConfig,
    SearchMode,
    TierLadder,
)
from vllm_dspark.core.cost_model import Curve
from vllm_dspark.core.replay import replay
from vllm_dspark.core.trace import Trace, parse_trace

TIERS = list(range(8, 513, 8))
REQUESTS = 32


def make_planner(gamma=7, slope=0.05, **policy):
    sizes = np.array(TIERS)
    cost = CostModel({ExecMode.FULL: Curve(sizes, 4.0 + slope * sizes)})
    return Planner(PolicyConfig(**policy), gamma, {ExecMode.FULL: TierLadder(TIERS)}, cost)


def test_verifying_everything_reproduces_the_recorded_accept_length(demo_trace):
    result = replay(demo_trace, make_planner(search=SearchMode.STATIC), REQUESTS)
    blocks = demo_trace.streams(REQUESTS).ravel()
    assert result.accept_length == pytest.approx(1.0 + demo_trace.accepted[blocks].mean())
    assert (result.drafts_per_request, result.trimmed_steps) == (7.0, 0)
    assert result.steps == len(demo_trace.accepted) // REQUESTS


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_spending_by_live_confidence_beats_spending_evenly(demo_trace, width):
    pin = width * REQUESTS
    even = replay(demo_trace, make_planner(search=SearchMode.UNIFORM, pin=pin), REQUESTS)
    ragged = replay(demo_trace, make_planner(pin=pin), REQUESTS, live_membership=True)
    assert even.drafts_per_request == ragged.drafts_per_request == width
    assert 1.05 < ragged.accept_length / even.accept_length < 1.25


def test_the_search_predicts_a_gain_over_fixed_widths_and_its_tau_is_near(demo_trace):
    searched = replay(demo_trace, make_planner(), REQUESTS, live_membership=True)
    full = replay(demo_trace, make_planner(search=SearchMode.STATIC), REQUESTS)
    assert searched.trimmed_steps > 0
    assert searched.gain_over(full) > 0.1
    assert searched.predicted_accept_length == pytest.approx(searched.accept_length, rel=0.2)
    for width in range(8):
        policy = make_planner(search=SearchMode.UNIFORM, pin=width * REQUESTS)
        fixed = replay(demo_trace, policy, REQUESTS)
        fixed_ms = float(policy.cost.step_ms(np.array([REQUESTS * (width + 1)]), REQUESTS)[0])
        assert searched.tokens_per_s > 1000.0 * REQUESTS * fixed.accept_length / fixed_ms


def test_dearer_tokens_verify_less(demo_trace):
    drafts = [
        replay(demo_trace, make_planner(slope=s), REQUESTS).drafts_per_request
        for s in (0.001, 0.02, 0.1)
    ]
    assert drafts == sorted(drafts, reverse=True)
    assert drafts[0] > drafts[-1]


def test_without_a_cost_model_speed_is_unknown(demo_trace):
    result = replay(demo_trace, Planner(PolicyConfig(), 7), REQUESTS)
    assert np.isnan([result.tokens_per_s, result.step_ms]).all()
    assert result.drafts_per_request == 7.0


def test_censored_blocks_are_completed_by_expectation():
    trace = Trace(np.full((2, 2), 0.5, np.float32), np.array([1, 0]), np.array([1, 1]), None)
    result = replay(trace, Planner(PolicyConfig(), 2), 1)
    assert result.censored == 1
    assert result.accept_length == pytest.approx((1 + 1.5 + 1 + 0) / 2)


def test_a_trace_line_needs_its_fields():
    good = {"confidence": [0.5, 0.5], "accepted": 1}
    trace = parse_trace([json.dumps(good), "", json.dumps({**good, "verified": 1, "step_ms": 3})])
    assert trace.verified.tolist() == [2, 1]
    assert trace.step_ms is None
    timed = parse_trace([json.dumps({**good, "step_ms": 3.5})])
    assert timed.step_ms.tolist() == [3.5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no blocks"),
        (["{"], "line 1"),
        (['{"accepted": 1}'], "line 1.*confidence"),
        (['{"confidence": [0.5], "accepted": 2}'], "do not fit"),
        (
            ['{"confidence": [0.5], "accepted": 1}', '{"confidence": [0.5, 1], "accepted": 1}'],
            "line 2",
        ),
    ],
)
def test_bad_traces_are_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        parse_trace(lines)


def test_replay_refuses_what_does_not_fit(demo_trace):
    with pytest.raises(ValueError, match="gamma=7"):
        replay(demo_trace, make_planner(gamma=3), REQUESTS)
    with pytest.raises(ValueError, match="cannot make"):
        replay(demo_trace, make_planner(), 10**6)
