# SPDX-License-Identifier: Apache-2.0
"""Cost tables of other engines, read into a `CostModel`; SGLang's are also written.

| table | told by | meaning |
|---|---|---|
| SGLang 1-D | `sample_batch_tokens` | steps/s of the whole step, probe at or below, flat outside |
| SGLang 2-D | `bias_seconds` | bias + alpha(requests) + theta(tokens), straight lines, flat outside
| | TensorRT-LLM | `token_counts` | ms of the whole step, straight lines, flat outside |

Whole-step times contain drafting, so models read from them have no draft term.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_dspark.core.arrays import Float64Array, IntArray
from vllm_dspark.core.cost_model import CostModel, Curve, CurveRule
from vllm_dspark.core.json_fields import number, numbers
from vllm_dspark.core.tiers import ExecMode

_MARKS = ("bias_seconds", "sample_batch_tokens", "token_counts")


def is_foreign(data: Mapping[str, Any]) -> bool:
    """Whether a parsed file is one of the tables above."""
    return any(mark in data for mark in _MARKS)


def foreign_cost_from_dict(data: Mapping[str, Any]) -> CostModel:
    """Read a foreign table.

    Raises:
        ValueError: naming the field that is missing or invalid.
    """
    if "bias_seconds" in data:
        return _sglang_2d(data)
    if "sample_batch_tokens" in data:
        return _sglang_1d(data)
    return _tensorrt_llm(data)


def _sglang_1d(data: Mapping[str, Any]) -> CostModel:
    tokens = numbers(data.get("sample_batch_tokens"), "sample_batch_tokens")
    rates = numbers(data.get("sample_steps_per_sec"), "sample_steps_per_sec")
    if not (rates > 0.0).all():
        raise ValueError("sample_steps_per_sec: must be positive")
    largest = number(data.get("max_batch_tokens", tokens[-1]), "max_batch_tokens")
    if largest < tokens[-1]:
        raise ValueError(f"max_batch_tokens={largest:g}: below the last probe {tokens[-1]:g}")
    curve = Curve(tokens.astype(np.int64), 1000.0 / rates, rule=CurveRule.PREVIOUS)
    return CostModel({ExecMode.FULL: curve})


def _sglang_2d(data: Mapping[str, Any]) -> CostModel:
    bias = number(data.get("bias_seconds"), "bias_seconds")
    if not bias > 0.0:
        raise ValueError(f"bias_seconds={bias!r}: must be positive")
    alpha = numbers(data.get("alpha_seconds"), "alpha_seconds")
    theta = numbers(data.get("theta_seconds"), "theta_seconds")
    requests = numbers(data.get("bs_probes"), "bs_probes").astype(np.int64)
    tokens = numbers(data.get("m_probes"), "m_probes").astype(np.int64)
    return CostModel(
        {ExecMode.FULL: Curve(tokens, 1000.0 * theta, rule=CurveRule.LINEAR)},
        requests=Curve(requests, 1000.0 * (alpha + bias), rule=CurveRule.LINEAR),
    )


def _tensorrt_llm(data: Mapping[str, Any]) -> CostModel:
    tokens = numbers(data.get("token_counts"), "token_counts").astype(np.int64)
    times = numbers(data.get("step_time_ms"), "step_time_ms")
    if not (times > 0.0).all():
        raise ValueError("step_time_ms: must be positive")
    return CostModel({ExecMode.FULL: Curve(tokens, times, rule=CurveRule.LINEAR)})


def sglang_1d_to_dict(
    model: CostModel, max_batch_tokens: int, requests: int, mode: ExecMode = ExecMode.FULL
) -> dict[str, Any]:
    """SGLang's 1-D table at one request count, drafting included.

    Its lookup takes the probe at or below, ours the tier at or above, so probes sit one token past
    each tier: staircases survive exactly; above the limit the slope becomes steps.
    """
    curve = model.verify_curve(mode)
    probes = _shelf_starts(curve, max_batch_tokens)
    cost = _without_context(model, probes, requests, mode) + model.draft_ms(requests)
    return {
        "sample_batch_tokens": [int(x) for x in probes],
        "sample_steps_per_sec": [float(x) for x in 1000.0 / cost],
        "max_batch_tokens": max_batch_tokens,
    }


def sglang_2d_to_dict(
    model: CostModel,
    max_batch_tokens: int,
    request_probes: Sequence[int],
    context_per_request: int = 0,
    mode: ExecMode = ExecMode.FULL,
) -> dict[str, Any]:
    """SGLang's additive table. A shelf becomes two equal points, so cliffs survive; logit rows are
    counted as one per token, context as `context_per_request`."""
    curve = model.verify_curve(mode)
    starts = _shelf_starts(curve, max_batch_tokens)
    ends = np.concatenate([starts[1:] - 1, [max_batch_tokens]])
    probes = np.unique(np.concatenate([starts, ends]))
    theta = curve.at(probes) + model.logit_row_ms * probes
    # The format wants a positive bias; only the sum has a meaning.
    bias = float(theta.min()) / 2.0
    alpha = [
        model.draft_ms(r)
        + model.request_ms * r
        + model.context_token_ms * context_per_request * r
        + (float(model.requests.at(r)) if model.requests is not None else 0.0)
        for r in request_probes
    ]
    return {
        "bias_seconds": bias / 1000.0,
        "bs_probes": [int(r) for r in request_probes],
        "alpha_seconds": [a / 1000.0 for a in alpha],
        "m_probes": [int(x) for x in probes],
        "theta_seconds": [float(x) for x in (theta - bias) / 1000.0],
    }


def _shelf_starts(curve: Curve, max_tokens: int) -> IntArray:
    starts = np.concatenate([[1], curve.sizes + 1])
    if curve.limit is not None:
        # Above the limit there are no shelves: the measured points themselves are the probes.
        starts = np.concatenate(
            [starts[starts <= curve.limit + 1], curve.sizes[curve.sizes > curve.limit + 1]]
        )
    return np.unique(starts[starts <= max_tokens]).astype(np.int64)


def _without_context(
    model: CostModel, tokens: IntArray, requests: int, mode: ExecMode
) -> Float64Array:
    return model.step_ms(tokens, requests, 0, tokens, mode)
