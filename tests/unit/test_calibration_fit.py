# SPDX-License-Identifier: Apache-2.0
"""Fitting: STS, scale + bias on conditional labels, and the online calibrator."""

import numpy as np
import pytest

from vllm_dspark.core.calibration import CalibrationTable, logit
from vllm_dspark.core.platt import OnlineCalibrator, conditional_labels, fit_scale_bias
from vllm_dspark.core.reliability import expected_calibration_error
from vllm_dspark.core.sts import fit_sts

GAMMA = 4


def simulate(rng, blocks, scale=1.0, bias=0.0, gamma=GAMMA):
    """Head confidences and accepts whose true chance is sigmoid(scale * logit(c) + bias)."""
    confidence = rng.uniform(0.3, 0.98, (blocks, gamma)).astype(np.float32)
    chance = 1 / (1 + np.exp(-(scale * logit(confidence) + bias)))
    hits = rng.random((blocks, gamma)) < chance
    return confidence, np.cumprod(hits, axis=1).sum(axis=1)


def mean_ece(table, confidence, accepted):
    survival = np.cumprod(table.apply(confidence.T, 0), axis=0).T
    return np.mean(
        [expected_calibration_error(survival[:, k], accepted > k) for k in range(survival.shape[1])]
    )


def test_conditional_labels_count_what_was_really_decided():
    label, known = conditional_labels(3, np.array([0, 1, 3, 2]), np.array([3, 3, 3, 2]))
    assert known.tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
        [True, True, False],
    ]
    assert label[known].tolist() == [False, True, False, True, True, True, True, True]


def test_scale_and_bias_are_recovered():
    rng = np.random.default_rng(0)
    confidence, accepted = simulate(rng, 20_000, scale=0.6, bias=-0.5)
    label, known = conditional_labels(GAMMA, accepted, np.full(len(accepted), GAMMA))
    scale, bias = fit_scale_bias(logit(confidence), label, known)
    np.testing.assert_allclose(scale[:2], 0.6, atol=0.08)
    np.testing.assert_allclose(bias[:2], -0.5, atol=0.08)


def test_trimming_does_not_bias_the_fit():
    """Short windows are chosen by the confidences, and the conditional labels do not mind."""
    rng = np.random.default_rng(1)
    confidence, accepted = simulate(rng, 20_000, scale=0.6, bias=-0.5)
    verified = np.where(confidence[:, 0] > 0.7, GAMMA, 1)
    label, known = conditional_labels(GAMMA, np.minimum(accepted, verified), verified)
    scale, bias = fit_scale_bias(logit(confidence), label, known)
    np.testing.assert_allclose(scale[:2], 0.6, atol=0.1)
    np.testing.assert_allclose(bias[:2], -0.5, atol=0.12)


def test_a_reversed_slot_gets_scale_0_and_the_base_rate():
    rng = np.random.default_rng(2)
    confidence, accepted = simulate(rng, 4000, scale=-1.0, bias=0.3)
    label, known = conditional_labels(GAMMA, accepted, np.full(len(accepted), GAMMA))
    scale, bias = fit_scale_bias(logit(confidence), label, known)
    assert scale[0] == 0.0
    assert 1 / (1 + np.exp(-bias[0])) == pytest.approx((accepted > 0).mean(), abs=0.01)
    CalibrationTable.identity(GAMMA).with_regimes({0: (scale, bias)}, 1)


def test_without_evidence_the_head_is_left_alone():
    scale, bias = fit_scale_bias(np.zeros((5, 2)), np.zeros((5, 2), bool), np.zeros((5, 2), bool))
    assert (scale.tolist(), bias.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_one_sided_evidence_stays_finite():
    z = np.full((500, 1), 3.0)
    known = np.ones((500, 1), bool)
    scale, bias = fit_scale_bias(z, np.zeros((500, 1), bool), known)
    assert np.isfinite([*scale, *bias]).all()
    assert 1 / (1 + np.exp(-(scale[0] * 3.0 + bias[0]))) < 0.1


def test_temperature_scaling_repairs_overconfidence():
    rng = np.random.default_rng(3)
    fit = fit_sts(*simulate(rng, 20_000, scale=0.5))
    np.testing.assert_allclose(fit.temperatures[:2], 2.0, rtol=0.15)
    assert (fit.ece_after[:3] < fit.ece_before[:3] / 2).all()


def test_an_honest_head_keeps_temperature_1():
    rng = np.random.default_rng(4)
    fit = fit_sts(*simulate(rng, 40_000), tolerance=5e-3)
    np.testing.assert_allclose(fit.temperatures, 1.0, rtol=0.1)


def test_temperature_alone_cannot_cross_one_half_but_scale_and_bias_can():
    """Greedy drafting under a sampling target: confident slots are mostly rejected."""
    rng = np.random.default_rng(5)
    confidence, accepted = simulate(rng, 20_000, scale=0.3, bias=-1.5)
    sts = CalibrationTable.from_temperatures(list(fit_sts(confidence, accepted).temperatures))
    online = OnlineCalibrator(GAMMA, window=20_000)
    online.observe(confidence, accepted, np.full(len(accepted), GAMMA))
    affine = online.refit(CalibrationTable.identity(GAMMA))
    fresh = simulate(rng, 20_000, scale=0.3, bias=-1.5)
    raw_ece, sts_ece, affine_ece = (
        mean_ece(t, *fresh) for t in (CalibrationTable.identity(GAMMA), sts, affine)
    )
    assert affine_ece < 0.02 < sts_ece / 2
    assert sts_ece < raw_ece


@pytest.mark.parametrize(
    ("confidence", "accepted", "options", "message"),
    [
        (np.zeros((0, 2)), np.zeros(0), {}, "confidence"),
        (np.ones((3, 2)), np.zeros(2), {}, "accepted 2"),
        (np.ones((3, 2)), np.zeros(3), {"grid": [0.0]}, "positive"),
    ],
)
def test_sts_refuses_what_it_cannot_fit(confidence, accepted, options, message):
    with pytest.raises(ValueError, match=message):
        fit_sts(confidence, accepted, **options)


def test_online_regimes_are_kept_apart_and_sparse_ones_left_alone():
    rng = np.random.default_rng(6)
    honest, humble = simulate(rng, 3000), simulate(rng, 3000, bias=-1.5)
    online = OnlineCalibrator(GAMMA, min_blocks=100)
    verified = np.full(3000, GAMMA)
    online.observe(*honest, verified, regimes=0)
    online.observe(*humble, verified, regimes=3)
    online.observe(honest[0][:50], honest[1][:50], verified[:50], regimes=5)
    table = online.refit(CalibrationTable.identity(GAMMA))
    assert table.version == 1
    assert table.bias[0, 0] == pytest.approx(0.0, abs=0.25)
    assert table.bias[3, 0] == pytest.approx(-1.5, abs=0.3)
    assert (table.scale[5] == 1.0).all()


def test_online_forgets_the_past():
    rng = np.random.default_rng(7)
    online = OnlineCalibrator(GAMMA, window=1000)
    for bias in (2.0, -1.0):
        confidence, accepted = simulate(rng, 1500, bias=bias)
        online.observe(confidence, accepted, np.full(1500, GAMMA))
    assert online.refit(CalibrationTable.identity(GAMMA)).bias[0, 0] < -0.5


def test_online_ignores_what_is_not_a_probability_and_what_was_not_verified():
    online = OnlineCalibrator(2, min_blocks=1)
    confidence = np.array([[np.nan, 0.5], [0.5, np.nan], [0.5, 0.5]], np.float32)
    online.observe(confidence, np.array([1, 1, 0]), np.array([2, 1, 0]))
    assert online.ignored == 1
    assert online.refit(CalibrationTable.identity(2)).version == 1
    empty = OnlineCalibrator(2)
    table = CalibrationTable.identity(2)
    assert empty.refit(table) is table


def test_the_demo_head_gets_more_reliable_on_held_out_blocks(demo_trace):
    rng = np.random.default_rng(0)
    order = rng.permutation(len(demo_trace.accepted))
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    online = OnlineCalibrator(demo_trace.gamma)
    online.observe(
        demo_trace.confidence[train], demo_trace.accepted[train], demo_trace.verified[train]
    )
    identity = CalibrationTable.identity(demo_trace.gamma)
    held_out = demo_trace.confidence[test], demo_trace.accepted[test]
    assert mean_ece(online.refit(identity), *held_out) < mean_ece(identity, *held_out)
