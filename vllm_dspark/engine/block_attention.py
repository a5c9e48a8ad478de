# SPDX-License-Identifier: Apache-2.0
"""Verify blocks attended by a kernel with tiles of their size, prompts by FlashAttention.

FlashAttention 3 computes tiles of 64 to 192 rows, of which a verify block fills some twenty. Blocks
go through `kernels.verify_attention` where that was measured to be faster
(`benchmarks/verify_attention.py`); from the first request on that asks more, which the host's order
puts last, the batch still goes through the host's implementation. Every server compares both
before it starts to serve, and leaves attention to the host if they differ.

Invariant: what is launched depends on shapes that are the same when a graph is captured and when it
is replayed. Where prompts begin, and how far contexts are split, is found on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_dspark import compat
from vllm_dspark.config import ConfigError
from vllm_dspark.engine.attention_check import disagreement
from vllm_dspark.kernels.verify_attention import (
    Scratch,
    Splits,
    Tiles,
    from_prompts_on,
    verify_attention,
)

logger = logging.getLogger("vllm.dspark")

_LEAST_TILES, _MANY_TILES = 3, 8
"""Per processor. With fewer, an H200 gained nothing and lost with long contexts; with many, only a
context that would keep the others waiting is split.
"""
_CHUNK, _LONG_CHUNK = 512, 4096
"""Tokens of a split, with few tiles and with many."""
_FASTER_SIZE = 64
"""Heads of 128 fill FlashAttention's tiles better: there it was as fast, or faster."""
_MOST_SPLITS = 4
"""Programs of splits that a batch does not need cost it time as well."""
_MOST_ROWS = 128
"""Of a tile, queries times heads: what a program's registers hold."""
_SCRATCH_BYTES = 1 << 27


@dataclass(frozen=True)
class Limits:
    """What bounds all batches, and the batches that go through the kernel.

    Args:
        block: queries of a verify block.
        num_reqs: of a batch, at most.
        model_len: tokens of a context, at most.
        least_slots: for requests, of a batch that goes through the kernel.
        many_slots: which fill the GPU without splits.
    """

    block: int
    num_reqs: int
    model_len: int
    least_slots: int
    many_slots: int


def attend_blocks(vllm_config: Any, target_layer_names: Iterable[str], always: bool) -> int:
    """Put the kernel before FlashAttention in those layers of the target that it can serve.

    Args:
        vllm_config: the host's configuration.
        target_layer_names: attention layers of the target, others among them.
        always: also where the kernel was not measured to be faster.

    Returns:
        How many layers were changed.

    Raises:
        ConfigError: the kernel was asked for (``always``) and does not compute what the host does.
    """
    changed = 0
    for layers in _kinds(vllm_config, target_layer_names, always):
        impl = layers[0].impl
        limits = _limits(vllm_config, impl)
        scratch = _scratch(impl, limits, vllm_config.device_config.device)
        all_batches = dataclasses.replace(limits, least_slots=1)
        limits = all_batches if always else limits
        why = disagreement(
            layers[0], _before(impl, all_batches, scratch), limits.block, vllm_config
        )
        if why and always:
            raise ConfigError(f"dspark.block_attention = 'on' cannot run: {why}")
        if why:
            logger.warning("DSpark leaves %d layers to FlashAttention: %s", len(layers), why)
            continue
        for layer in layers:
            layer.impl.forward = _before(layer.impl, limits, scratch)
        changed += len(layers)
    if changed:
        logger.info("DSpark attends verify blocks in %d layers", changed)
    return changed


def _kinds(vllm_config: Any, names: Iterable[str], always: bool) -> list[list[Any]]:
    """Layers that can be served, those of one shape together."""
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        # Two halves of a batch run at a time, and would share what splits leave.
        return []
    if not (compat.present(compat.FLASH_FORWARD) and compat.present(compat.FLASH_METADATA)):
        return []
    layers = vllm_config.compilation_config.static_forward_context
    kinds = defaultdict(list)
    for layer in (layers[name] for name in names if name in layers):
        impl = getattr(layer, "impl", None)
        if _can_serve(impl, always):
            kinds[impl.num_heads, impl.num_kv_heads, impl.head_size].append(layer)
    return list(kinds.values())


def _can_serve(impl: Any, always: bool) -> bool:
    """Plain causal attention over a 16-bit cache, with heads that fill a tile."""
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
        and impl.total_cp_world_size == 1
        and not impl.batch_invariant_enabled
        and ratio & (ratio - 1) == 0
        and ratio <= _MOST_ROWS
        and (size == _FASTER_SIZE or (always and size in (32, 128, 256)))
    )


def _limits(vllm_config: Any, impl: Any) -> Limits:
    """The host picks graphs with few empty slots, so slots stand for requests."""
    processors = _processors()

    def slots(tiles: int) -> int:
        return int(triton.cdiv(tiles * processors, impl.num_kv_heads))

    return Limits(
        vllm_config.speculative_config.num_speculative_tokens + 1,
        vllm_config.scheduler_config.max_num_seqs,
        vllm_config.model_config.max_model_len,
        slots(_LEAST_TILES),
        slots(_MANY_TILES),
    )


def _processors() -> int:
    """Streaming multiprocessors of this process's GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.multi_processor_count)


def _tiles(impl: Any, block: int) -> Tiles:
    """A tile holds a whole block if that is few enough rows, and the 16 of a matrix product."""
    ratio = impl.num_queries_per_kv
    return Tiles(queries=min(max(triton.next_power_of_2(block), 16 // ratio), _MOST_ROWS // ratio))


def _scratch(impl: Any, limits: Limits, device: torch.device) -> Scratch | None:
    """Room for splits; None where no context is long enough."""
    if limits.model_len <= _CHUNK:
        return None
    queries = _tiles(impl, limits.block).queries
    return Scratch(
        _SCRATCH_BYTES // (4 * impl.head_size),
        limits.num_reqs * impl.num_kv_heads * triton.cdiv(limits.block, queries),
        impl.head_size,
        device,
    )


def split_plan(slots: int, rows: int, limits: Limits, scratch: Scratch | None) -> Splits:
    """How contexts may be split in all batches of a graph.

    Args:
        slots: for requests.
        rows: query heads of all tokens, padding included.
        limits: of all batches.
        scratch: where splits leave their sums.
    """
    chunk = _CHUNK if slots < limits.many_slots else _LONG_CHUNK
    room = 1 if scratch is None else scratch.rows // rows
    most = min(_MOST_SPLITS, triton.cdiv(limits.model_len, chunk), room)
    return Splits(max(most, 1), chunk)


def _before(impl: Any, limits: Limits, scratch: Scratch | None) -> Any:
    original, block, tiles = impl.forward, limits.block, _tiles(impl, limits.block)
    # Combining splits costs every step more than splitting short contexts gains.
    long_prompts = limits.model_len > _LONG_CHUNK

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
        tokens, slots = attn_metadata.num_actual_tokens, len(attn_metadata.seq_lens)
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
            split_plan(slots, tokens * impl.num_heads, limits, scratch),
            scratch,
        )
        if attn_metadata.max_query_len > block:
            # Planned anew, since the host has planned for the whole batch.
            prompts = dataclasses.replace(
                attn_metadata,
                query_start_loc=from_prompts_on(
                    attn_metadata.query_start_loc, block, limits.num_reqs
                ),
                scheduler_metadata=None,
                max_num_splits=attn_metadata.max_num_splits if long_prompts else 1,
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
