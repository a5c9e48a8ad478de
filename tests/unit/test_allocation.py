# SPDX-License-Identifier: Apache-2.0
"""Top-b under the total order, against a sort over all slots and against every possible split."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import PALETTES, admitted_by_sort, cases, random_confidence, survival_rows

from vllm_dspark.core.allocation import admit, allocate, even_split, fill, slot_keys

shapes = {
    "seed": st.integers(0, 2**32 - 1),
    "requests": st.integers(1, 7),
    "gamma": st.integers(1, 7),
    "palette": st.sampled_from(sorted(PALETTES)),
}


def make(rng, requests, gamma, palette):
    confidence = random_confidence(rng, palette, requests, gamma)
    lens = rng.integers(0, gamma + 1, requests)
    doubtful = rng.random(requests) < rng.choice([0.0, 0.3])
    survival = np.cumprod(confidence.astype(rng.choice([np.float32, np.float64])), axis=1)
    budget = int(rng.integers(-1, requests * gamma + 2))
    return survival, lens, budget, doubtful


@given(**shapes)
def test_allocation_equals_the_sort_over_all_slots(seed, **shape):
    for rng in cases(seed):
        survival, lens, budget, doubtful = make(rng, **shape)
        rows = [row[:n].tolist() for row, n in zip(survival, lens, strict=True)]
        expected = admitted_by_sort(rows, budget, set(np.flatnonzero(doubtful).tolist()))
        got = allocate(survival, lens, budget, doubtful)
        assert got.dtype == np.int32
        assert got.tolist() == expected
        assert got.sum() == min(max(budget, 0), lens.sum())


@given(
    seed=shapes["seed"],
    requests=st.integers(1, 3),
    gamma=st.integers(1, 3),
    palette=shapes["palette"],
)
def test_no_other_split_of_the_budget_expects_more(seed, requests, gamma, palette):
    for rng in cases(seed):
        survival, lens, budget, _ = make(rng, requests, gamma, palette)
        budget = min(max(budget, 0), int(lens.sum()))
        gain = np.concatenate([np.zeros((requests, 1)), np.cumsum(survival, axis=1)], axis=1)
        table = gain.tolist()
        best = max(
            sum(row[n] for row, n in zip(table, split, strict=True))
            for split in product(*(range(n + 1) for n in lens))
            if sum(split) == budget
        )
        got = allocate(survival, lens, budget)
        # Keys are float32, so two survivals that round alike may swap.
        assert gain[np.arange(requests), got].sum() == pytest.approx(best, rel=1e-6)


@given(**shapes)
def test_filling_is_allocating_the_sum(seed, **shape):
    for rng in cases(seed):
        survival, lens, budget, doubtful = make(rng, **shape)
        spare = int(rng.integers(0, 6))
        first = allocate(survival, lens, budget, doubtful)
        filled = fill(survival, lens, first, spare, doubtful)
        again = allocate(survival, lens, int(first.sum()) + spare, doubtful)
        assert filled.tolist() == again.tolist()
        assert (filled >= first).all()


@given(**shapes)
def test_a_known_threshold_changes_nothing(seed, **shape):
    for rng in cases(seed):
        survival, lens, _, doubtful = make(rng, **shape)
        if not lens.any():
            lens[0] = 1
        budget = int(rng.integers(1, lens.sum() + 1))
        keys = slot_keys(survival.T, lens, doubtful)
        threshold = np.sort(keys, axis=None)[::-1][budget - 1]
        assert admit(keys, budget, threshold).tolist() == admit(keys, budget).tolist()


def test_ties_go_to_the_earlier_position_then_to_the_earlier_request():
    survival = np.ones((3, 2))
    lens = np.full(3, 2)
    assert allocate(survival, lens, 2).tolist() == [1, 1, 0]
    assert allocate(survival, lens, 4).tolist() == [2, 1, 1]


def test_doubtful_rows_get_their_full_block_first():
    survival = np.array([[0.9, 0.8], [0.1, 0.0], [0.95, 0.9]])
    doubtful = np.array([False, True, False])
    assert allocate(survival, np.full(3, 2), 3, doubtful).tolist() == [0, 2, 1]
    assert allocate(survival, np.full(3, 2), 1, doubtful).tolist() == [0, 1, 0]


def test_a_nan_row_is_doubtful_and_does_not_disturb_the_others():
    survival = np.array([[0.9, 0.8], [0.5, np.nan], [0.7, 0.6]])
    assert allocate(survival, np.full(3, 2), 4).tolist() == [2, 2, 0]
    assert allocate(survival, np.array([2, 1, 2]), 2).tolist() == [2, 0, 0]


def test_a_rising_row_is_read_as_its_running_minimum():
    survival = np.array([[0.2, 0.9], [0.3, 0.1]])
    assert allocate(survival, np.full(2, 2), 2).tolist() == [1, 1]


def test_negative_zero_ties_with_zero():
    survival = np.array([[-0.0], [0.0]], np.float32)
    assert allocate(survival, np.ones(2, int), 1).tolist() == [1, 0]


def test_float64_values_that_round_alike_are_ties():
    survival = np.array([[0.5], [0.5 + 1e-12]])
    assert allocate(survival, np.ones(2, int), 1).tolist() == [1, 0]


def test_shapes_must_match():
    with pytest.raises(ValueError, match="draft_lens"):
        allocate(np.ones((2, 3)), np.ones(3, int), 1)


def test_survival_rows_of_the_oracle_are_products():
    assert survival_rows(np.array([[0.5, 0.5]]), [2]) == [[0.5, 0.25]]


@given(**shapes)
def test_an_even_split_is_an_allocation_of_equal_survivals(seed, **shape):
    for rng in cases(seed):
        _, lens, budget, _ = make(rng, **shape)
        got = even_split(lens, budget, shape["gamma"])
        assert got.dtype == np.int32
        assert got.tolist() == allocate(np.ones((len(lens), shape["gamma"])), lens, budget).tolist()
