# SPDX-License-Identifier: Apache-2.0
"""Survivals and the rule for doubtful rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import PALETTES, cases, random_confidence, survival_rows

from vllm_dspark.core.survival import (
    RowDoubt,
    RunningSurvival,
    assess_rows,
    count_doubts,
    survival,
)


@given(
    seed=st.integers(0, 2**32 - 1),
    requests=st.integers(1, 6),
    gamma=st.integers(1, 8),
    palette=st.sampled_from(sorted(PALETTES)),
)
def test_survival_is_the_running_product_of_scheduled_slots(seed, requests, gamma, palette):
    for rng in cases(seed):
        confidence = random_confidence(rng, palette, requests, gamma)
        lens = rng.integers(0, gamma + 1, requests)
        table, codes = survival(confidence, lens)
        assert not codes.any()
        for row, values in zip(table, survival_rows(confidence, lens), strict=True):
            assert row[: len(values)].tolist() == values
            assert not row[len(values) :].any()
        assert (np.diff(table, axis=1) <= 0.0).all()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.nan, RowDoubt.NON_FINITE),
        (np.inf, RowDoubt.NON_FINITE),
        (-np.inf, RowDoubt.NON_FINITE),
        (1.0001, RowDoubt.OUT_OF_RANGE),
        (-1e-6, RowDoubt.OUT_OF_RANGE),
    ],
)
def test_a_bad_value_condemns_its_row_only(value, reason):
    confidence = np.full((3, 4), 0.5, np.float32)
    confidence[1, 2] = value
    prior = np.array([0.9, 0.8, 0.7, 0.6])
    table, codes = survival(confidence, prior=prior)
    assert codes.tolist() == [0, reason, 0]
    np.testing.assert_array_equal(table[1], prior)
    np.testing.assert_allclose(table[[0, 2]], [[0.5, 0.25, 0.125, 0.0625]] * 2)


def test_garbage_past_the_scheduled_drafts_is_not_evidence():
    confidence = np.array([[0.5, np.nan, 7.0]], np.float32)
    table, codes = survival(confidence, np.array([1]))
    assert codes.tolist() == [RowDoubt.TRUSTED]
    np.testing.assert_array_equal(table, [[0.5, 0.0, 0.0]])


def test_the_edges_of_the_range_are_trusted():
    assert assess_rows(np.array([[0.0, 1.0]], np.float32), np.array([2])) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("value", "trusted"),
    [
        (1.0, True),
        (0.0, True),
        (-0.0, True),
        (1e-45, True),
        (float(np.nextafter(np.float32(1), np.float32(2))), False),
        (-1e-45, False),
        (float("nan"), False),
        (float("-inf"), False),
        (3e38, False),
    ],
)
def test_the_range_is_checked_exactly_in_both_float_types(dtype, value, trusted):
    confidence = np.array([[0.5, value], [0.5, 0.5]], dtype)
    codes = assess_rows(confidence, np.array([2, 2]))
    assert (codes is None) == trusted


def test_wide_batches_multiply_to_the_same_bits():
    confidence = np.random.default_rng(0).random((600, 5)).astype(np.float32)
    narrow = np.concatenate([survival(part)[0] for part in np.split(confidence, 6)])
    np.testing.assert_array_equal(survival(confidence)[0], narrow)


def test_what_the_caller_knows_wins_over_the_values():
    confidence = np.array([[0.5], [np.nan], [0.5], [0.5]], np.float32)
    state = np.array([RowDoubt.FRESH, RowDoubt.STALE, 99, 0], np.int8)
    codes = assess_rows(confidence, np.ones(4, int), state)
    assert codes.tolist() == [RowDoubt.FRESH, RowDoubt.STALE, RowDoubt.STALE, RowDoubt.TRUSTED]
    assert count_doubts(codes) == {RowDoubt.FRESH: 1, RowDoubt.STALE: 2}


def test_a_row_without_drafts_is_never_doubtful():
    confidence = np.array([[np.nan], [0.5]], np.float32)
    assert assess_rows(confidence, np.array([0, 1]), np.array([RowDoubt.FRESH, 0])) is None


def test_running_means_start_from_evidence_and_then_move_slowly():
    running = RunningSurvival(2, start_confidence=0.5, rate=0.1)
    np.testing.assert_allclose(running.mean, [0.5, 0.25])
    running.update(np.array([1.8, 1.2]), 2)
    np.testing.assert_allclose(running.mean, [0.9, 0.6])
    running.update(np.array([0.8, 0.6]), 2)
    np.testing.assert_allclose(running.mean, [0.85, 0.57])
    running.update(np.zeros(2), 0)
    np.testing.assert_allclose(running.mean, [0.85, 0.57])


def test_running_means_never_rise_along_positions():
    running = RunningSurvival(3)
    # Only one row reaches the last position, and it is a confident one.
    running.update(np.array([2.0, 0.9, 0.9]), np.array([10.0, 9.0, 1.0]))
    assert (np.diff(running.mean) <= 0.0).all()


def test_a_position_without_evidence_keeps_its_mean():
    running = RunningSurvival(2, start_confidence=0.5)
    running.update(np.array([0.9, 0.0]), np.array([1.0, 0.0]))
    np.testing.assert_allclose(running.mean, [0.9, 0.25])


def test_every_step_counts_until_all_positions_were_seen_then_one_in_eight():
    running = RunningSurvival(2)
    assert [running.due() for _ in range(3)] == [True] * 3
    running.update(np.array([0.9, 0.0]), np.array([1.0, 0.0]))
    assert running.due()
    running.update(np.array([0.9, 0.8]), 1)
    assert sum(running.due() for _ in range(80)) == 10
