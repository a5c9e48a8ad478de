# SPDX-License-Identifier: Apache-2.0
"""Whether attention of ours computes what the host's does, on a small batch before traffic.

The batch has a verify block and, behind it, a prompt, in a cache that is laid out as the host's.
Comparing them compiles the kernels as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

_TOLERANCE = 0.03
"""Of outputs between -1 and 1 that two kernels round to 16 bits, each in its own order."""


@torch.inference_mode()
def disagreement(layer: Any, forward: Callable[..., Any], block: int, vllm_config: Any) -> str:
    """Why ``forward`` cannot take the place of the layer's own; empty if it can.

    Args:
        layer: attention layer of the host, with its implementation.
        forward: called as the implementation's.
        block: queries of a verify block, the anchor included.
        vllm_config: the host's configuration.
    """
    try:
        query, cache, metadata = _batch(layer.impl, block, vllm_config)
        wanted, got = torch.zeros_like(query), torch.zeros_like(query)
        # The cache holds all keys already, so that of the step's own none are read.
        layer.impl.forward(layer, query, None, None, cache, metadata, wanted)
        forward(layer, query, None, None, cache, metadata, got)
    except Exception as error:  # noqa: BLE001 (whatever it is, the host's attention works)
        return f"{type(error).__name__}: {error}"
    worst = float((got.float() - wanted.float()).abs().max())
    return "" if worst <= _TOLERANCE else f"outputs differ by {worst:.3g}"


def _batch(impl: Any, block: int, vllm_config: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """A block and a prompt: queries ``[num_tokens, heads, size]``, cache ``[pages, kv_heads, page,
    2 * size]``, and the host's plan.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    device, dtype = vllm_config.device_config.device, vllm_config.model_config.dtype
    page = vllm_config.cache_config.block_size
    lens, contexts = (block, block + 1), (page + block + 1, block + 1)
    width = max(-(-context // page) for context in contexts)
    generator = torch.Generator(device=device).manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        uniform = torch.rand(*shape, generator=generator, device=device)
        return (uniform * 2 - 1).to(dtype)

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    metadata = FlashAttentionMetadata(
        num_actual_tokens=sum(lens),
        max_query_len=max(lens),
        query_start_loc=integers([0, *itertools.accumulate(lens)]),
        max_seq_len=max(contexts),
        seq_lens=integers(contexts),
        block_table=integers(range(len(lens) * width)).view(len(lens), width),
        slot_mapping=torch.zeros(sum(lens), dtype=torch.int64, device=device),
        max_num_splits=1,
    )
    size, kv_heads = impl.head_size, impl.num_kv_heads
    cache = noise(len(lens) * width, page, kv_heads, 2 * size).transpose(1, 2)
    return noise(sum(lens), impl.num_heads, size), cache, metadata
