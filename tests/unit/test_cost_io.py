# SPDX-License-Identifier: Apache-2.0
"""Cost files: round trips, refusal on another deployment, and foreign tables."""

import json
from dataclasses import replace

import numpy as np
import pytest

from vllm_dspark.core import CostModel, ExecMode
from vllm_dspark.core.cost_io import (
    Fingerprint,
    FingerprintMismatch,
    cost_from_dict,
    cost_to_dict,
    load_cost,
    save_cost,
)
from vllm_dspark.core.cost_model import Curve, CurveRule
from vllm_dspark.core.foreign_cost import sglang_1d_to_dict, sglang_2d_to_dict

HERE = Fingerprint("H200", "demo", 2, (8, 16, 32), 7, "bfloat16")
SIZES = np.arange(1, 120)


def make_model():
    return CostModel(
        {
            ExecMode.FULL: Curve(
                np.array([8, 16, 32, 64, 96]), np.array([2.0, 5.0, 4.0, 9.0, 11.0]), limit=32
            ),
            ExecMode.EAGER: Curve(np.array([1, 64]), np.array([3.0, 12.0]), limit=0),
        },
        draft=Curve(np.array([1, 8]), np.array([0.5, 0.8])),
        draft_width=7,
        draft_slot_ms=0.01,
        requests=Curve(np.array([1, 8]), np.array([0.0, 0.2]), rule=CurveRule.LINEAR),
        context_token_ms=1e-5,
        logit_row_ms=1e-3,
        request_ms=0.02,
        ragged_ms=0.1,
    )


def same_costs(a, b):
    for mode in ExecMode:
        one, two = (m.step_ms(SIZES, 4, 5000, SIZES, mode) for m in (a, b))
        np.testing.assert_array_equal(one, two)
    assert a.draft_ms(5, 3) == b.draft_ms(5, 3)
    assert a.ragged_ms == b.ragged_ms


def test_a_saved_table_loads_back_bit_for_bit(tmp_path):
    path = tmp_path / "cost.json"
    save_cost(make_model(), HERE, path)
    same_costs(load_cost(path, HERE), make_model())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gpu": "B300"}, "gpu"),
        ({"model": "other"}, "model"),
        ({"tp": 4}, "tp"),
        ({"graph_ladder": (8, 16)}, "graph_ladder"),
        ({"gamma": 5}, "gamma"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_a_table_of_another_deployment_is_refused_by_field(tmp_path, change, field):
    path = tmp_path / "cost.json"
    save_cost(make_model(), HERE, path)
    with pytest.raises(FingerprintMismatch, match=f"{field}="):
        load_cost(path, replace(HERE, **change))


def test_a_table_without_the_fingerprint_is_refused_unless_only_inspected():
    data = cost_to_dict(make_model(), HERE)
    del data["fingerprint"]
    same_costs(cost_from_dict(data), make_model())
    with pytest.raises(ValueError, match="fingerprint"):
        cost_from_dict(data, HERE)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("verify",), 3, "verify"),
        (("verify", "turbo"), {}, "turbo"),
        (("verify", "full", "rule"), "spline", "rule='spline'"),
        (("verify", "full", "ms"), [1.0, "x"], "ms"),
        (("verify", "full", "sizes"), [3, 2, 1, 5, 6], "ascend"),
        (("logit_row_ms",), None, "logit_row_ms=None"),
        (("format",), "other", "unknown fields"),
    ],
)
def test_invalid_fields_are_named(path, value, message):
    data = json.loads(json.dumps(cost_to_dict(make_model(), HERE)))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        cost_from_dict(data, HERE)


def test_an_unreadable_file_is_named(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"cost\.json"):
        load_cost(path)


def test_sglang_1d_is_a_floor_lookup_of_rates():
    model = cost_from_dict(
        {
            "sample_batch_tokens": [8, 16],
            "sample_steps_per_sec": [500.0, 250.0],
            "max_batch_tokens": 32,
        }
    )
    cost = model.step_ms(np.array([1, 8, 15, 16, 99]), 4)
    assert cost.tolist() == [2.0, 2.0, 2.0, 4.0, 4.0]
    assert model.draft_ms(4) == 0.0


def test_sglang_2d_is_additive_and_linear():
    model = cost_from_dict(
        {
            "bias_seconds": 0.001,
            "bs_probes": [1, 5],
            "alpha_seconds": [0.0, 0.002],
            "m_probes": [10, 20],
            "theta_seconds": [0.003, 0.005],
        }
    )
    assert model.step_ms(np.array([15]), 3)[0] == pytest.approx(1.0 + 1.0 + 4.0)
    assert model.step_ms(np.array([99]), 99)[0] == pytest.approx(1.0 + 2.0 + 5.0)


def test_tensorrt_llm_is_linear_between_its_points():
    model = cost_from_dict({"token_counts": [8, 16], "step_time_ms": [2.0, 4.0]})
    assert model.step_ms(np.array([4, 12, 99]), 1).tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"token_counts": [8]}, "step_time_ms"),
        ({"token_counts": [8], "step_time_ms": [0.0]}, "step_time_ms"),
        ({"sample_batch_tokens": [8], "sample_steps_per_sec": [0.0]}, "sample_steps_per_sec"),
        ({"sample_batch_tokens": [16, 8], "sample_steps_per_sec": [1.0, 1.0]}, "ascend"),
        (
            {
                "sample_batch_tokens": [16],
                "sample_steps_per_sec": [1.0],
                "max_batch_tokens": 8,
            },
            "max_batch_tokens",
        ),
        ({"bias_seconds": 0.0}, "bias_seconds"),
        ({"bias_seconds": True}, "bias_seconds"),
        ({"bias_seconds": 1.0, "alpha_seconds": [1.0]}, "theta_seconds"),
    ],
)
def test_invalid_foreign_tables_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        cost_from_dict(data)


def test_sglang_1d_keeps_the_staircase_through_a_round_trip():
    model = replace(make_model(), logit_row_ms=0.0, context_token_ms=0.0)
    back = cost_from_dict(sglang_1d_to_dict(model, max_batch_tokens=96, requests=4))
    below = np.arange(1, 33)
    expected = model.step_ms(below, 4) + model.draft_ms(4)
    np.testing.assert_allclose(back.step_ms(below, 4), expected, rtol=1e-12)


def test_sglang_2d_keeps_staircase_lines_and_requests_through_a_round_trip():
    model = make_model()
    data = sglang_2d_to_dict(model, 96, request_probes=[1, 4, 8], context_per_request=100)
    assert data["bias_seconds"] > 0.0
    back = cost_from_dict(data)
    probes = np.array([1, 8, 9, 16, 17, 32, 64, 80, 96])
    for requests in (1, 4, 8):
        expected = model.step_ms(probes, requests, 100 * requests, probes) + model.draft_ms(
            requests
        )
        np.testing.assert_allclose(back.step_ms(probes, requests), expected, rtol=1e-9)
