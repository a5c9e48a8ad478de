# SPDX-License-Identifier: Apache-2.0
"""Padding to graph tiers and the budgets worth evaluating."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import cases, realisable_budgets, tier_of

from vllm_dspark.core.tiers import TierLadder

seeds = st.integers(0, 2**32 - 1)
counts = st.integers(0, 6)


@given(seed=seeds, count=counts)
def test_padding_takes_the_smallest_tier_that_holds_the_step(seed, count):
    for rng in cases(seed):
        tiers = rng.integers(1, 60, count).tolist()
        ladder = TierLadder(tiers)
        totals = rng.integers(1, 80, 5)
        expected = [tier_of(tiers, t) for t in totals.tolist()]
        assert ladder.pad(totals).tolist() == expected
        assert [ladder.pad_one(t) for t in totals.tolist()] == expected


@given(seed=seeds, count=counts)
def test_candidates_are_the_bounds_the_tier_ends_and_all_past_the_ladder(seed, count):
    for rng in cases(seed):
        tiers = rng.integers(1, 60, count).tolist()
        base, low, width = (int(x) for x in rng.integers(0, (41, 21, 41)))
        high = low + width
        budgets, padded = TierLadder(tiers).realisable(base, low, high)
        assert sorted(set(budgets.tolist())) == realisable_budgets(tiers, base, low, high)
        assert (np.diff(budgets) >= 0).all()
        assert padded.tolist() == [tier_of(tiers, base + b) for b in budgets.tolist()]


@given(seed=seeds, count=st.integers(1, 8))
def test_two_dimensional_ladders_take_the_smallest_bucket_that_holds_both(seed, count):
    for rng in cases(seed):
        buckets = [(int(t), int(r)) for t, r in rng.integers(1, (40, 12), (count, 2))]
        tokens, requests = (int(x) for x in rng.integers(1, (50, 14)))
        ladder = TierLadder(buckets)
        fitting = sorted(b for b in buckets if b[0] >= tokens and b[1] >= requests)
        assert ladder.bucket(tokens, requests) == (fitting[0] if fitting else None)
        expected = fitting[0][0] if fitting else tokens
        assert ladder.pad_one(tokens, requests) == expected
        assert ladder.pad(np.array([tokens, tokens]), requests).tolist() == [expected] * 2


def test_an_empty_ladder_pads_nothing():
    ladder = TierLadder()
    assert ladder.limit == 0
    assert ladder.pad(np.array([3, 9])).tolist() == [3, 9]
    assert ladder.realisable(2, 0, 3)[0].tolist() == [0, 1, 2, 3]


def test_too_many_requests_leave_the_ladder():
    ladder = TierLadder([(8, 4), (16, 8)])
    assert ladder.for_requests(9).limit == 0
    assert ladder.pad_one(5, 9) == 5


def test_tiers_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        TierLadder([0, 4])
