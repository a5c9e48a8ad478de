# SPDX-License-Identifier: Apache-2.0
"""Verify blocks attended by a kernel with tiles of their size, prompts by FlashAttention.

FlashAttention 3 computes tiles of 64 to 192 rows, of which a verify block fills some twenty. Blocks
go through `kernels.verify_attention` where that was measured to be faster
(`benchmarks/verify_attention.py`); from the first request on that asks more, which the host's order
puts last, the batch still goes through the host's implementation.

Invariant: what is launched depends on shapes that are the same when a graph is captured and when it
is replayed. Where prompts begin, and how far contexts are split, is found on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_dspark import compat
from vllm_dspark.kernels.verify_attention import (
    Scratch,
    Splits,
    Tiles,
    from_prompts_on,
    verify_attention,
)

logger = logging.getLogger("vllm.dspark")

_TILES_PER_PROCESSOR = 4
"""With fewer requests an H200 gained nothing, and lost with long contexts."""
_FASTER_SIZE = 64
"""Heads of 128 fill FlashAttention's tiles better: there it was as fast, or faster."""
_MOST_SPLITS = 4
"""Programs of splits that a batch does not need cost it time as well."""
_SCRATCH_BYTES = 1 << 27


def attend_blocks(vllm_config: Any, target_layer_names: Iterable[str], always: bool) -> int:
    """Put the kernel before FlashAttention in those layers of the target that it can serve.

    Args:
        vllm_config: the host's configuration.
        target_layer_names: attention layers of the target, others among them.
        always: also where the kernel was not measured to be faster.

    Returns:
        How many layers were changed.
    """
    layers = vllm_config.compilation_config.static_forward_context
    impls = [getattr(layers.get(name), "impl", None) for name in target_layer_names]
    served = [impl for impl in impls if _can_serve(impl, always)]
    scratches: dict[tuple[int, ...], Scratch | None] = {}
    for impl in served:
        limits = _limits(vllm_config, 1 if always else _least_slots(impl))
        kind = (impl.num_heads, impl.num_kv_heads, impl.head_size)
        if kind not in scratches:
            scratches[kind] = _scratch(impl, limits)
            _compile(impl, limits, scratches[kind], vllm_config)
        impl.forward = _before(impl, limits, scratches[kind])
    if served:
        logger.info("DSpark attends blocks itself in %d of %d layers", len(served), len(impls))
    return len(served)


@dataclass(frozen=True)
class Limits:
    """What bounds all batches, and the batches that go through the kernel.

    Args:
        block: queries of a verify block.
        num_reqs: of a batch, at most.
        model_len: tokens of a context, at most.
        least_slots: for requests, of a batch that goes through the kernel.
    """

    block: int
    num_reqs: int
    model_len: int
    least_slots: int


def _limits(vllm_config: Any, least_slots: int) -> Limits:
    return Limits(
        vllm_config.speculative_config.num_speculative_tokens + 1,
        vllm_config.scheduler_config.max_num_seqs,
        vllm_config.model_config.max_model_len,
        least_slots,
    )


def _least_slots(impl: Any) -> int:
    """Slots whose requests fill the GPU; the host picks graphs with few empty ones."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    tiles = _TILES_PER_PROCESSOR * int(properties.multi_processor_count)
    return int(triton.cdiv(tiles, impl.num_kv_heads))


def _scratch(impl: Any, limits: Limits) -> Scratch | None:
    """Room for splits; None where no context is long enough."""
    if limits.model_len <= Splits().chunk:
        return None
    return Scratch(
        _SCRATCH_BYTES // (4 * impl.head_size),
        limits.num_reqs * impl.num_kv_heads,
        impl.head_size,
        torch.device("cuda", torch.cuda.current_device()),
    )


def split_plan(rows: int, model_len: int, scratch: Scratch | None) -> Splits:
    """How contexts may be split in all batches of a graph.

    Args:
        rows: query heads of all its tokens, padding included.
        model_len: tokens of a context, at most.
        scratch: where splits leave their sums.
    """
    room = 1 if scratch is None else scratch.rows // rows
    most = min(_MOST_SPLITS, triton.cdiv(model_len, Splits().chunk), room)
    return Splits(max(most, 1))


def _can_serve(impl: Any, always: bool) -> bool:
    """Plain causal attention over a 16-bit cache, with heads that fill a tile."""
    if not compat.present(compat.FLASH_FORWARD):
        return False
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    if type(impl) is not FlashAttentionImpl:
        return False
    ratio, size = impl.num_queries_per_kv, impl.head_size
    return (
        impl.vllm_flash_attn_version == 3
        and impl.attn_type == "decoder"
        and impl.kv_cache_dtype in ("auto", "bfloat16", "float16")
        and impl.sliding_window == (-1, -1)
        and impl.alibi_slopes is None
        and impl.sinks is None
        and not impl.logits_soft_cap
        and impl.dcp_world_size == 1
        and not impl.batch_invariant_enabled
        and ratio & (ratio - 1) == 0
        and (size == _FASTER_SIZE or (always and size in (32, 128, 256)))
    )


def _tiles(impl: Any, block: int) -> Tiles:
    """A tile holds a whole block, and at least the 16 rows of a matrix product."""
    return Tiles(queries=max(triton.next_power_of_2(block), 16 // impl.num_queries_per_kv))


def _compile(impl: Any, limits: Limits, scratch: Scratch | None, vllm_config: Any) -> None:
    """Launch the kernels once, since batches without a graph would compile them in traffic."""
    heads, kv_heads, size = impl.num_heads, impl.num_kv_heads, impl.head_size
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = vllm_config.model_config.dtype
    page = vllm_config.cache_config.block_size
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    queries = torch.zeros(1, heads, size, dtype=dtype, device=device)
    cache = torch.zeros(1, page, kv_heads, 2 * size, dtype=dtype, device=device)
    verify_attention(
        queries,
        *cache.split(size, dim=-1),
        torch.empty_like(queries),
        starts,
        starts[1:].clone(),
        starts.new_zeros(1, 1),
        impl.scale,
        limits.block,
        _tiles(impl, limits.block),
        Splits(),
        scratch,
    )
    from_prompts_on(starts, limits.block, limits.num_reqs)


def _before(impl: Any, limits: Limits, scratch: Scratch | None) -> Any:
    original, block = impl.forward, limits.block
    tiles = _tiles(impl, block)

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
        plain = _is_plain(attn_metadata, args, kwargs)
        if not plain or len(attn_metadata.seq_lens) < limits.least_slots:
            return original(*others, attn_metadata, output, *args, **kwargs)
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
            impl.scale,
            block,
            tiles,
            split_plan(tokens * impl.num_heads, limits.model_len, scratch),
            scratch,
        )
        if attn_metadata.max_query_len > block:
            starts = from_prompts_on(attn_metadata.query_start_loc, block, limits.num_reqs)
            # Planned anew, since the host has planned for the whole batch.
            prompts = dataclasses.replace(
                attn_metadata, query_start_loc=starts, scheduler_metadata=None
            )
            original(*others, prompts, output, *args, **kwargs)
        return output

    return forward


def _is_plain(metadata: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host asks for causal attention and nothing else."""
    return (
        metadata is not None
        and metadata.causal is True
        and not metadata.use_cascade
        and all(value is None for value in (*args, *kwargs.values()))
        and metadata.mm_prefix_query_range_tensor is None
        and metadata.rswa_prefix_lens is None
    )
