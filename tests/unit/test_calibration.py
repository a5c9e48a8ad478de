# SPDX-License-Identifier: Apache-2.0
"""Applying calibration, and its files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import cases

from vllm_dspark.core.calibration import (
    NUM_REGIMES,
    REGIME_NAMES,
    CalibrationTable,
    DraftMethod,
    regime_of,
)
from vllm_dspark.core.calibration_io import (
    calibration_from_dict,
    calibration_to_dict,
    load_calibration,
    save_calibration,
)


@given(seed=st.integers(0, 2**32 - 1), gamma=st.integers(1, 7), requests=st.integers(1, 6))
def test_calibrated_confidences_stay_inside_0_1_and_keep_the_order_of_a_slot(seed, gamma, requests):
    for rng in cases(seed):
        shape = (NUM_REGIMES, gamma)
        scale = rng.choice([0.0, 0.5, 1.0, 40.0], shape)
        table = CalibrationTable(scale, rng.normal(0, 5, shape))
        confidence = rng.choice([0.0, 1e-30, 0.2, 0.5, 0.99, 1.0], (gamma, requests))
        regime = int(rng.integers(NUM_REGIMES))
        out = table.apply(confidence.astype(np.float32), regime)
        assert out.dtype == np.float32
        assert ((out > 0.0) & (out < 1.0)).all()
        order = np.argsort(confidence, axis=1, kind="stable")
        assert (np.diff(np.take_along_axis(out, order, axis=1), axis=1) >= 0.0).all()


@given(seed=st.integers(0, 2**32 - 1), gamma=st.integers(1, 7), requests=st.integers(1, 6))
def test_calibration_is_the_logistic_of_the_scaled_logit(seed, gamma, requests):
    for rng in cases(seed):
        shape = (NUM_REGIMES, gamma)
        table = CalibrationTable(rng.uniform(0.1, 2.0, shape), rng.normal(0, 1, shape))
        confidence = rng.uniform(0.01, 0.99, (gamma, requests)).astype(np.float32)
        regimes = rng.integers(0, NUM_REGIMES, requests)
        z = np.log(confidence.astype(np.float64) / (1 - confidence.astype(np.float64)))
        w, b = table.scale.T[:, regimes], table.bias.T[:, regimes]
        expected = 1 / (1 + np.exp(-(w * z + b)))
        # Lifting the odds off zero costs up to scale * 2**-23 / c.
        np.testing.assert_allclose(table.apply(confidence, regimes), expected, rtol=5e-5)


def test_identity_returns_the_confidences_bit_for_bit():
    confidence = np.array([[0.0, 0.25, 1.0]], np.float32)
    assert CalibrationTable.identity(1).apply(confidence, 3).tolist() == confidence.tolist()


def test_temperatures_scale_the_log_odds():
    table = CalibrationTable.from_temperatures([2.0])
    odds = 0.9 / 0.1
    expected = np.sqrt(odds) / (1 + np.sqrt(odds))
    assert table.apply(np.array([[0.9]], np.float32), 0)[0, 0] == pytest.approx(expected, rel=1e-5)


def test_regimes_tell_draft_methods_and_temperatures_apart():
    temperatures = [0.0, 0.3, 0.7, 1.0, 1.5]
    greedy = regime_of(DraftMethod.GREEDY, np.array(temperatures))
    drawn = regime_of(DraftMethod.PROBABILISTIC, np.array(temperatures))
    assert sorted([*greedy, *drawn]) == list(range(NUM_REGIMES))
    assert len(set(REGIME_NAMES)) == NUM_REGIMES
    assert int(regime_of(DraftMethod.GREEDY, float("nan"))) == greedy[-1]


@pytest.mark.parametrize(
    ("scale", "bias", "message"),
    [
        (np.ones((NUM_REGIMES, 2)), np.zeros((NUM_REGIMES, 3)), "must both be"),
        (np.ones((1, 2)), np.zeros((1, 2)), "must both be"),
        (np.full((NUM_REGIMES, 2), -1.0), np.zeros((NUM_REGIMES, 2)), "scale >= 0"),
        (np.ones((NUM_REGIMES, 2)), np.full((NUM_REGIMES, 2), np.nan), "finite"),
    ],
)
def test_invalid_tables_are_refused(scale, bias, message):
    with pytest.raises(ValueError, match=message):
        CalibrationTable(scale, bias)


def make_table():
    rows = {1: (np.array([0.5, 0.75]), np.array([-1.0, 0.125]))}
    return CalibrationTable.identity(2).with_regimes(rows, version=4)


def test_files_round_trip(tmp_path):
    path = tmp_path / "calibration.json"
    save_calibration(make_table(), path)
    back = load_calibration(path, 2)
    assert back.version == 4
    np.testing.assert_array_equal(back.scale, make_table().scale)
    np.testing.assert_array_equal(back.bias, make_table().bias)
    assert list(json.loads(path.read_text())["regimes"]) == [REGIME_NAMES[1]]


@pytest.mark.parametrize("key", ["temperatures", "sts_temperatures"])
def test_both_spellings_of_sts_tables_are_read(key):
    table = calibration_from_dict({key: [2.0, 0.5]}, 2)
    assert table.scale[:, 0].tolist() == [0.5] * NUM_REGIMES
    assert table.scale[:, 1].tolist() == [2.0] * NUM_REGIMES
    assert not table.bias.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": [1.0]}, "2 values"),
        ({"temperatures": [1.0, 0.0]}, "positive"),
        ({"temperatures": [1.0, True]}, "list of numbers"),
        ({"temperatures": [1.0, 1.0], "sts_temperatures": [1.0, 1.0]}, "keep one"),
        ({"gamma": 3}, "gamma=3"),
        ({"format": "other"}, "not a calibration"),
        ({"regimes": {"warm": {}}}, "regime 'warm'"),
        ({"regimes": {REGIME_NAMES[0]: {"scale": [1.0, 1.0]}}}, "bias"),
    ],
)
def test_invalid_files_are_refused(tmp_path, change, message):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**calibration_to_dict(make_table()), **change}))
    with pytest.raises(ValueError, match=message):
        load_calibration(path, 2)
