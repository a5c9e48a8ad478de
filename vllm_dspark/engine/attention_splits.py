# SPDX-License-Identifier: Apache-2.0
"""Attention of large batches without splits.

FlashAttention 3 cuts the context of a request into splits where a batch has too few tiles for the
GPU, and combines them in a second kernel. A CUDA graph has to hold that choice, so vLLM allows up
to 32 splits in every graph: the second kernel then runs in every layer, also where nothing was
split. On an H200 it took 0.86 ms of a step of 45 ms with 256 requests, and vLLM PR #35899 found
that it costs more than splits gain unless contexts are long. Outside graphs FlashAttention does not
split once its tiles fill the GPU; the same rule is applied here to the requests of a graph.

Invariant: the answer for a graph depends on its requests alone, which are the same at capture and
at replay.
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
_LENGTH_PER_REQUEST = 64
"""The longest request is read by one processor per KV head then. With this many tokens or fewer for
each request of the batch it does not outlast the others by much, whatever they hold."""


def needs_no_splits(requests: int, kv_heads: int, processors: int, max_model_len: int) -> bool:
    """Whether a batch fills the GPU, and cannot hold a context that would keep the others waiting.

    Args:
        requests: of the batch, padding included.
        kv_heads: of this rank.
        processors: streaming multiprocessors of the GPU.
        max_model_len: tokens of the longest context that is served.
    """
    fills = requests * kv_heads >= _WAVES * processors
    return fills and max_model_len <= _LENGTH_PER_REQUEST * requests


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
                _limit(builder, vllm_config.model_config.max_model_len)


def _limit(builder: Any, max_model_len: int) -> None:
    processors = torch.cuda.get_device_properties(builder.device).multi_processor_count
    original = builder.build

    @functools.wraps(original)
    def build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        usual = builder.max_num_splits
        requests = common_attn_metadata.num_reqs
        if needs_no_splits(requests, builder.num_heads_kv, processors, max_model_len):
            builder.max_num_splits = 1
        try:
            return original(common_prefix_len, common_attn_metadata, *args, **kwargs)
        finally:
            builder.max_num_splits = usual

    builder.build = build
