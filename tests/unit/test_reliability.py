# SPDX-License-Identifier: Apache-2.0
"""Calibration measures against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import cases

from vllm_dspark.core.reliability import (
    brier_score,
    expected_calibration_error,
    known_outcomes,
    reliability,
    roc_auc,
)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12))
def test_measures_agree_with_loops(seed, count):
    for rng in cases(seed):
        predicted = rng.choice([0.0, 0.31, 0.62, 0.99, 1.0], count)
        outcome = rng.random(count) < 0.5
        bins: dict[int, list[float]] = {}
        for p, y in zip(predicted.tolist(), outcome.tolist(), strict=True):
            bins.setdefault(min(int(p * 20), 19), []).append(p - y)
        ece = sum(abs(sum(gaps)) for gaps in bins.values()) / count
        assert expected_calibration_error(predicted, outcome) == pytest.approx(ece)
        assert brier_score(predicted, outcome) == pytest.approx(np.mean((predicted - outcome) ** 2))
        pairs = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for a in predicted[outcome]
            for b in predicted[~outcome]
        ]
        auc = roc_auc(predicted, outcome)
        assert np.isnan(auc) if not pairs else auc == pytest.approx(np.mean(pairs))


def test_trimmed_blocks_hide_only_what_could_not_be_told():
    outcome, known = known_outcomes(3, np.array([1, 2, 0]), np.array([3, 2, 0]))
    assert known.tolist() == [[True, True, True], [True, True, False], [False, False, False]]
    assert outcome[known].tolist() == [True, False, False, True, True]


def test_nothing_to_measure_is_nan():
    rows = reliability(np.ones((2, 1)), np.array([0, 0]), np.array([0, 0]))
    assert rows[0].count == 0
    assert np.isnan([rows[0].ece, rows[0].brier, rows[0].auc, rows[0].observed]).all()


def test_the_demo_trace_has_the_observed_survivals_of_its_read_me(demo_trace):
    survival = np.cumprod(demo_trace.confidence.astype(float), axis=1)
    rows = reliability(survival, demo_trace.accepted)
    observed = [0.780, 0.564, 0.413, 0.301, 0.222, 0.172, 0.144]
    predicted = [0.758, 0.537, 0.367, 0.250, 0.172, 0.124, 0.093]
    np.testing.assert_allclose([r.observed for r in rows], observed, atol=6e-4)
    np.testing.assert_allclose([r.predicted for r in rows], predicted, atol=6e-4)
    ece = {r.position: r.ece for r in rows}
    np.testing.assert_allclose(
        [ece[k] for k in (1, 3, 5, 7)], [0.044, 0.062, 0.050, 0.052], atol=1e-3
    )
    assert all(r.auc > 0.6 for r in rows)
