# SPDX-License-Identifier: Apache-2.0
"""Right context keys where vLLM's RMSNorm kernel has no per-layer weights.

A DSpark draft normalises the context keys of all its layers with one kernel call, whose weight has
a row per layer (`DFlashQwen3Model._normalize_context_k`). vLLM's CPU kernel takes the first row for
every layer: all draft layers but the first then attend to wrongly scaled keys, nothing fails, and
the accepted length drops. Here one call per layer does the same work.

The fault is found by asking the kernel, not by version: once it honours the rows, vLLM's own method
stays in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops as ops


@functools.cache
def cpu_norm_honours_rows() -> bool:
    """Whether `ops.rms_norm` on the CPU applies row i of a 2-D weight to block i of its input."""
    ones = torch.ones(2, 1, 1, 8)
    weight = torch.tensor([[1.0], [2.0]]).expand(2, 8).contiguous()
    out = torch.empty_like(ones)
    ops.rms_norm(out, ones, weight, 1e-6)
    return bool(out[1].mean() > 1.5)


def mend_context_key_norm(backbone: Any) -> bool:
    """Give `backbone` (a `DFlashQwen3Model`) a per-layer method if it needs one; True if it did."""
    on_cpu = backbone.hidden_norm.weight.device.type == "cpu"
    if not on_cpu or cpu_norm_honours_rows():
        return False
    original = backbone._normalize_context_k
    backbone._normalize_context_k = functools.partial(_normalize_each_layer, backbone, original)
    return True


def _normalize_each_layer(
    backbone: Any, original: Callable[[torch.Tensor], torch.Tensor], all_k: torch.Tensor
) -> torch.Tensor:
    """`[layers, num_context, kv_heads, head_dim]`; returns the same shape, normed.

    The original is right for a single layer, so it is called once for each.
    """
    weights = backbone._k_norm_weights
    normed = []
    try:
        for layer in range(len(weights)):
            backbone._k_norm_weights = weights[layer : layer + 1]
            normed.append(original(all_k[layer : layer + 1]))
    finally:
        backbone._k_norm_weights = weights
    return torch.cat(normed)
