# SPDX-License-Identifier: Apache-2.0
"""The LM head, run once for every number of rows that traffic may bring.

Trimmed and mixed steps have any number of logit rows, and the library picks a matrix kernel by that
number: 28 steps of 256 requests on an H200 used more than ten different ones. CUDA may load a
kernel when it is first launched, and wait for the device before it does, which would cost a step
its overlap with the next. Some steps took longer by as much; that this is why has not been shown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

STEP = 8
"""Tiles of the library's kernels are multiples of so many rows."""
_COPIES = 4
"""Logits at a time that have to fit: those of the shard, the gathered ones, and room for both."""

logger = logging.getLogger("vllm.dspark")


def warm_head_of(runner: Any) -> None:
    """Warm the LM head of a runner that has captured its model; every rank calls this.

    Left out where an LM head needs more than hidden states (LoRA maps rows to adapters), and
    without full graphs.
    """
    hidden_states = getattr(runner.cudagraph_manager, "hidden_states", None)
    if hidden_states is None or runner.lora_config is not None:
        return
    wanted = runner.max_num_reqs * runner.decode_query_len
    warm_head(
        runner.model.compute_logits,
        hidden_states.new_zeros(wanted, hidden_states.shape[1]),
        _fewest_of_group,
    )


@torch.inference_mode()
def warm_head(
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    fewest: Callable[[int], int],
) -> int:
    """Run the head for as many rows as fit, 8 fewer, and so on; returns how many those were.

    The largest number comes first, so that the others find room in what it leaves to the allocator.

    Args:
        compute_logits: LM head, ``[rows, hidden]`` to logits; collective under tensor parallelism.
        hidden_states: ``[most rows, hidden]``, any values.
        fewest: the smallest of the numbers that the ranks of the group bring.
    """
    start = time.perf_counter()
    one = compute_logits(hidden_states[:1])
    room = _free_bytes(one.device) // (_COPIES * one.shape[-1] * one.element_size())
    rows = fewest(min(len(hidden_states), room)) // STEP * STEP
    for count in range(rows, 0, -STEP):
        compute_logits(hidden_states[:count])
    seconds = time.perf_counter() - start
    logger.info("DSpark ran the LM head for up to %d rows in %.1f s", rows, seconds)
    return rows


def _free_bytes(device: torch.device) -> int:
    """Memory of the device that the allocator holds unused or may still take."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def _fewest_of_group(count: int) -> int:
    """The smallest ``count`` of the tensor-parallel group: one that did not take part in a product
    would leave the others waiting for its logits.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return count
    counts = torch.tensor([count])
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(counts)
