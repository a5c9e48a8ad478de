# SPDX-License-Identifier: Apache-2.0
"""Fitting: cliffs exact, linear terms told apart, outliers harmless."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dspark.core import ExecMode, TierLadder
from vllm_dspark.core.cost_fit import StepSample, fit_cost_model

LADDERS = {ExecMode.FULL: TierLadder([8, 16, 32])}
TIER_MS = {8: 4.0, 16: 9.0, 32: 6.5}


def make_samples(rng, context=2e-4, rows=3e-3, requests=0.02, noise=0.0):
    samples = []
    for _ in range(200):
        tokens = int(rng.integers(1, 33))
        tier = next(t for t in TIER_MS if t >= tokens)
        batch, kv = int(rng.integers(1, tokens + 1)), int(rng.integers(0, 20_000))
        logit_rows = int(rng.integers(batch, tokens + 1))
        width = int(rng.choice([5, 7]))
        verify = TIER_MS[tier] + context * kv + rows * logit_rows + requests * batch
        draft = 0.4 + 0.01 * batch + 0.05 * (width - 7)
        samples.append(
            StepSample(
                tokens=tokens,
                requests=batch,
                verify_ms=verify + noise * float(rng.normal()),
                draft_ms=draft,
                context_tokens=kv,
                logit_rows=logit_rows,
                draft_width=width,
            )
        )
    return samples


@given(seed=st.integers(0, 2**32 - 1))
def test_noiseless_samples_give_every_term_back(seed):
    rng = np.random.default_rng(seed)
    context, rows, requests = rng.uniform(0, (1e-3, 1e-2, 0.1))
    model = fit_cost_model(make_samples(rng, context, rows, requests), LADDERS, 7)
    curve = model.verify[ExecMode.FULL]
    for size, ms in zip(curve.sizes.tolist(), curve.ms, strict=True):
        assert ms == pytest.approx(TIER_MS[size], rel=1e-6)
    assert model.context_token_ms == pytest.approx(context, rel=1e-6, abs=1e-12)
    assert model.logit_row_ms == pytest.approx(rows, rel=1e-6, abs=1e-12)
    assert model.request_ms == pytest.approx(requests, rel=1e-6, abs=1e-12)


def test_the_draft_is_split_into_requests_and_width():
    model = fit_cost_model(make_samples(np.random.default_rng(0)), LADDERS, 7)
    assert model.draft_slot_ms == pytest.approx(0.05)
    assert model.draft_ms(4) == pytest.approx(0.44)
    assert model.draft_ms(4, width=5) == pytest.approx(0.34)


def test_cliffs_survive_noise_and_outliers():
    rng = np.random.default_rng(1)
    samples = make_samples(rng, noise=0.05)
    samples += [StepSample(8, 4, 80.0, None, 1000, 4)] * 3
    curve = fit_cost_model(samples, LADDERS, 7).verify[ExecMode.FULL]
    # The tier at 16 stays dearer than the one at 32: no monotone envelope.
    assert curve.at(16) > curve.at(32) > curve.at(8)
    np.testing.assert_allclose(curve.ms, [4.0, 9.0, 6.5], atol=0.6)


def test_a_term_that_never_varies_inside_a_cell_stays_in_the_cell():
    samples = [StepSample(t, 4, TIER_MS[t] + 1.0, None, 1000, 4) for t in TIER_MS for _ in range(3)]
    model = fit_cost_model(samples, LADDERS, 7)
    assert (model.context_token_ms, model.logit_row_ms, model.request_ms) == (0.0, 0.0, 0.0)
    assert model.verify[ExecMode.FULL].ms.tolist() == [5.0, 10.0, 7.5]
    assert model.draft is None


def test_a_negative_term_is_dropped():
    rng = np.random.default_rng(2)
    samples = make_samples(rng, context=0.0, rows=-0.05, requests=0.0)
    model = fit_cost_model(samples, LADDERS, 7)
    assert min(model.context_token_ms, model.logit_row_ms, model.request_ms) == 0.0


def test_above_its_ladder_a_mode_borrows_eager_points():
    samples = [
        StepSample(32, 8, 6.5),
        StepSample(64, 8, 20.0, mode=ExecMode.EAGER),
        StepSample(128, 8, 30.0, mode=ExecMode.EAGER),
        StepSample(16, 8, 18.0, mode=ExecMode.EAGER),
    ]
    full = fit_cost_model(samples, LADDERS, 7).verify[ExecMode.FULL]
    assert full.at(np.array([32, 64, 96])).tolist() == [6.5, 20.0, 25.0]
    assert full.sizes.tolist() == [32, 64, 128]


def test_samples_are_padded_to_their_tier():
    model = fit_cost_model([StepSample(5, 2, 4.0), StepSample(7, 2, 4.2)], LADDERS, 7)
    assert model.verify[ExecMode.FULL].sizes.tolist() == [8]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(bad):
    with pytest.raises(ValueError, match="verify_ms"):
        fit_cost_model([StepSample(8, 4, bad)], LADDERS, 7)


def test_nothing_to_fit_is_refused():
    with pytest.raises(ValueError, match="no sample"):
        fit_cost_model([StepSample(8, 4, None, 1.0)], LADDERS, 7)
