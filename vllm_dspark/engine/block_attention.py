# SPDX-License-Identifier: Apache-2.0
"""Verify blocks attended by a kernel with tiles of their size, prompts by FlashAttention.

FlashAttention 3 computes tiles of 64 to 192 rows, of which a verify block fills some twenty. Blocks
go through `kernels.verify_attention`; from the first request on that asks more, which the host's
order puts last, the batch still goes through the host's implementation.

Invariant: what is launched depends on shapes that are the same when a graph is captured and when it
is replayed. Where prompts begin, and how far contexts are split, is found on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

from vllm_dspark import compat
from vllm_dspark.kernels.verify_attention import (
    Scratch,
    Splits,
    Tiles,
    from_prompts_on,
    verify_attention,
)

_WAVES = 2
"""Tiles per processor from which on only contexts that would keep the others waiting are split."""
_CHUNK, _LONG_CHUNK = 256, 4096
"""Tokens of a split in batches that leave processors idle, and in those that do not."""
_MOST_SPLITS = 32
_SCRATCH_BYTES = 1 << 27
"""The largest graphs get four splits of it, with 64 heads of 64 or 32 of 128."""


def attend_blocks(layers: Iterable[Any], vllm_config: Any, block: int) -> int:
    """Put the kernel before FlashAttention in those of the ``layers`` that it can serve.

    Args:
        layers: attention layers of the target.
        vllm_config: the host's configuration.
        block: queries of a verify block, the anchor included.

    Returns:
        How many layers were changed.
    """
    scheduler = vllm_config.scheduler_config
    served = [layer.impl for layer in layers if _can_serve(layer.impl)]
    scratches: dict[tuple[int, int, int], Scratch] = {}
    for impl in served:
        kind = (impl.num_heads, impl.num_kv_heads, impl.head_size)
        if kind not in scratches:
            tiles = scheduler.max_num_batched_tokens + scheduler.max_num_seqs
            scratches[kind] = Scratch(
                max(_SCRATCH_BYTES // (4 * impl.head_size), impl.num_heads * tiles),
                tiles * impl.num_kv_heads,
                impl.head_size,
                torch.device("cuda", torch.cuda.current_device()),
            )
        impl.forward = _before(impl, block, scratches[kind], _processors())
    return len(served)


def _processors() -> int:
    device = torch.cuda.current_device()
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_plan(
    tokens: int, slots: int, block: int, heads: int, kv_heads: int, processors: int, rows: int
) -> Splits:
    """How contexts of a batch are split, the same for all batches of a graph.

    Args:
        tokens: of the batch, padding included.
        slots: requests that the graph holds; a batch has at least one for every ``block`` of them.
        block: most tokens of a request in a decode step.
        heads: query heads of this rank.
        kv_heads: of this rank.
        processors: streaming multiprocessors of the GPU.
        rows: of the scratch.
    """
    fills = slots // block * kv_heads >= _WAVES * processors
    most = min(_MOST_SPLITS, rows // (tokens * heads))
    return Splits(max(most, 1), _LONG_CHUNK if fills else _CHUNK)


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


def _before(impl: Any, block: int, scratch: Scratch, processors: int) -> Any:
    original = impl.forward
    # A tile holds a whole block, and at least the 16 rows of a matrix product.
    queries = max(1 << (block - 1).bit_length(), 16 // impl.num_queries_per_kv)
    tiles, heads = Tiles(queries=queries), (impl.num_heads, impl.num_kv_heads)

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
        if not _is_plain(attn_metadata, args, kwargs):
            return original(*others, attn_metadata, output, *args, **kwargs)
        tokens, slots = attn_metadata.num_actual_tokens, attn_metadata.seq_lens.shape[0]
        keys, values = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
        verify_attention(
            query[:tokens],
            keys,
            values,
            output,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            impl.scale,
            block,
            tiles,
            split_plan(tokens, slots, block, *heads, processors, scratch.rows),
            scratch,
        )
        if attn_metadata.max_query_len > block:
            # Planned anew, since the host has planned for the whole batch.
            prompts = dataclasses.replace(
                attn_metadata,
                query_start_loc=from_prompts_on(attn_metadata.query_start_loc, block),
                scheduler_metadata=None,
            )
            original(*others, prompts, output, *args, **kwargs)
        return output

    return forward


def _is_plain(metadata: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host asks for causal attention and nothing else."""
    return (
        metadata is not None
        and metadata.causal is True
        and all(value is None for value in (*args, *kwargs.values()))
        and metadata.mm_prefix_query_range_tensor is None
        and metadata.rswa_prefix_lens is None
    )
