# SPDX-License-Identifier: Apache-2.0
"""Attention of large batches without splits.

FlashAttention 3 cuts the context of a request into splits where a batch has too few tiles for the
GPU, and combines them in a second kernel. A CUDA graph has to hold that choice, so vLLM allows up
to 32 splits in every graph: the second kernel then runs in every layer, also where nothing was
split. On an H200 it took 0.86 ms of a step of 45 ms with 256 requests, and vLLM PR #35899 found
that it costs more than splits gain unless contexts are long. Outside graphs FlashAttention does not
split once its tiles fill the GPU, and so it is here.

Invariant: the answer depends on the slots for requests that a graph has, which are the same when it
is captured and when it is replayed. It may be replayed with fewer requests. In decode steps they
are no fewer than a block for each: a smaller graph would hold them. In mixed steps a prompt may
fill the graph, which is why contexts are bounded as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from vllm_dspark import compat

_WAVES = 2
"""Tiles per processor, at least: fewer leave processors idle in the last wave."""
_LENGTH_PER_SLOT = 16
"""Without splits, one processor per KV head reads the longest context."""


def needs_no_splits(
    slots: int, block: int, kv_heads: int, processors: int, max_model_len: int
) -> bool:
    """Whether the batches of a graph fill the GPU, and no context keeps the others waiting.

    Args:
        slots: requests that the graph holds; a batch has at least one for every ``block`` of them.
        block: most tokens of a request in a decode step.
        kv_heads: of this rank.
        processors: streaming multiprocessors of the GPU.
        max_model_len: tokens of the longest context that is served.
    """
    requests = slots // block
    return requests * kv_heads >= _WAVES * processors and max_model_len <= _LENGTH_PER_SLOT * slots


def limit_splits(attn_groups: Iterable[Iterable[Any]], vllm_config: Any) -> None:
    """Let FlashAttention builders of these groups plan large batches without splits.

    A limit that the operator has chosen (`flash_attn_max_num_splits_for_cuda_graph`) stays.
    """
    config = vllm_config.attention_config
    option = "flash_attn_max_num_splits_for_cuda_graph"
    if getattr(config, option, None) != getattr(type(config), option, None):
        return
    if not compat.present(compat.FLASH_BUILD):
        return
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    for group in itertools.chain.from_iterable(attn_groups):
        for builder in group.metadata_builders:
            if not isinstance(builder, FlashAttentionMetadataBuilder):
                continue
            # Without FlashAttention 3 there is no such limit; ranks that share a context combine.
            if builder.max_num_splits > 1 and builder.dcp_world_size == 1:
                block = vllm_config.speculative_config.num_speculative_tokens + 1
                _limit(builder, block, vllm_config.model_config.max_model_len)


def _limit(builder: Any, block: int, max_model_len: int) -> None:
    processors = torch.cuda.get_device_properties(builder.device).multi_processor_count
    original = builder.build

    @functools.wraps(original)
    def build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        usual = builder.max_num_splits
        slots = common_attn_metadata.num_reqs
        if needs_no_splits(slots, block, builder.num_heads_kv, processors, max_model_len):
            builder.max_num_splits = 1
        try:
            return original(common_prefix_len, common_attn_metadata, *args, **kwargs)
        finally:
            builder.max_num_splits = usual

    builder.build = build
