# SPDX-License-Identifier: Apache-2.0
"""Verify blocks attended by a kernel with tiles of their size, prompts by FlashAttention.

FlashAttention 3 computes tiles of 64 to 192 rows, of which a verify block fills some twenty. Where
requests alone fill the GPU (`attention_splits.needs_no_splits`), blocks go through
`kernels.verify_attention`; requests that ask more than a block, which the host's order puts last,
still go through the host's implementation, from the first of them on.

Invariant: what is launched depends on shapes that are the same when a graph is captured and when it
is replayed. Where prompts begin is found on the device, once per forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

from vllm_dspark import compat
from vllm_dspark.engine.attention_splits import needs_no_splits
from vllm_dspark.kernels.verify_attention import Tiles, find_prompts, verify_attention


def attend_blocks(layers: Iterable[Any], vllm_config: Any, block: int) -> int:
    """Put the kernel before FlashAttention in those of the ``layers`` that it can serve.

    Args:
        layers: attention layers of the target.
        vllm_config: the host's configuration.
        block: queries of a verify block, the anchor included.

    Returns:
        How many layers were changed.
    """
    changed = 0
    for layer in layers:
        if _can_serve(layer.impl):
            processors = torch.cuda.get_device_properties(
                torch.cuda.current_device()
            ).multi_processor_count
            limits = (processors, vllm_config.model_config.max_model_len)
            layer.impl.forward = _before(layer.impl, block, *limits)
            changed += 1
    return changed


def _can_serve(impl: Any) -> bool:
    """Plain causal attention over a 16-bit cache, with heads that fill a tile."""
    if not compat.present(compat.FLASH_BUILD):
        return False
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    ratio, size = impl.num_queries_per_kv, impl.head_size
    return (
        type(impl) is FlashAttentionImpl
        and impl.vllm_flash_attn_version == 3
        and impl.attn_type == "decoder"
        and impl.kv_cache_dtype in ("auto", "bfloat16", "float16")
        and impl.sliding_window == (-1, -1)
        and impl.alibi_slopes is None
        and impl.sinks is None
        and not impl.logits_soft_cap
        and impl.dcp_world_size == 1
        and not impl.batch_invariant_enabled
        and ratio & (ratio - 1) == 0
        and size in (64, 128, 256)
    )


def _before(impl: Any, block: int, processors: int, max_model_len: int) -> Any:
    original = impl.forward
    # A tile holds a whole block, and at least the 16 rows of a matrix product.
    queries = max(1 << (block - 1).bit_length(), 16 // impl.num_queries_per_kv)
    tiles = Tiles(queries=queries)

    @functools.wraps(original)
    def forward(
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        others = (layer, query, key, value, kv_cache)
        if not _fits(attn_metadata, impl.num_kv_heads, processors, max_model_len, args, kwargs):
            return original(*others, attn_metadata, output, *args, **kwargs)
        first, rest = _prompts(attn_metadata, block)
        tokens = attn_metadata.num_actual_tokens
        keys, values = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
        verify_attention(
            query[:tokens],
            keys,
            values,
            output,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            first,
            impl.scale,
            tiles,
        )
        if attn_metadata.max_query_len > block:
            prompts = dataclasses.replace(
                attn_metadata, query_start_loc=rest, scheduler_metadata=None, max_num_splits=1
            )
            original(*others, prompts, output, *args, **kwargs)
        return output

    return forward


def _fits(
    metadata: Any,
    kv_heads: int,
    processors: int,
    max_model_len: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Whether a call of the host is plain attention of a batch that fills the GPU."""
    if metadata is None or metadata.causal is not True or any(args):
        return False
    if any(value is not None for value in kwargs.values()):
        return False
    if metadata.mm_prefix_query_range_tensor is not None or metadata.rswa_prefix_lens is not None:
        return False
    requests = metadata.seq_lens.shape[0]
    return needs_no_splits(requests, kv_heads, processors, max_model_len)


def _prompts(metadata: Any, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`find_prompts` of a step; the first layer asks, the others read its answer."""
    found = getattr(metadata, "dspark_prompts", None)
    if found is None:
        found = metadata.dspark_prompts = find_prompts(metadata.query_start_loc, block)
    return found
