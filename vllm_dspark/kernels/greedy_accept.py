# SPDX-License-Identifier: Apache-2.0
"""Greedy verification straight from the logits: two launches, no full-vocabulary copy.

The rule is the host's (``rejection_sample`` and ``get_num_sampled_and_rejected`` at temperature
zero): a draft is accepted while it equals the target's argmax, the token after the last accepted
one is the target's own, a placeholder is never accepted, and a request whose prompt is still being
read commits nothing. Equal logits go to the lowest token id; a NaN never wins.

Logits are read once, in their own dtype. Nothing is written but the outputs and two small tables
``[rows, blocks of the vocabulary]``, so both launches can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_VOCAB_BLOCK = 8192


class Accepted(NamedTuple):
    """Outcome of a verification; rows are requests in batch order."""

    sampled: torch.Tensor
    """``[num_reqs, gamma + 1]`` int64 token ids; -1 after the last one of a row."""
    num_sampled: torch.Tensor
    """``[num_reqs]`` int32 tokens to commit."""
    num_rejected: torch.Tensor
    """``[num_reqs]`` int32 logit rows that commit nothing."""


# The batch changes from step to step; a specialised variant would compile in traffic.
@triton.jit(
    do_not_specialize=["num_reqs", "num_columns", "num_blocks"],
    do_not_specialize_on_alignment=["cu_num_logits_ptr"],
)
def _block_argmax_kernel(
    block_max_ptr,  # [rows, num_blocks] float32, out
    block_argmax_ptr,  # [rows, num_blocks] int32, out
    logits_ptr,  # [rows, >= num_columns]
    logits_stride,
    cu_num_logits_ptr,  # [num_reqs + 1] int32
    num_reqs,
    num_columns,
    num_blocks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    # A captured launch has more rows than the batch.
    if row >= tl.load(cu_num_logits_ptr + num_reqs):
        return
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits_ptr + row * logits_stride + columns,
        mask=columns < num_columns,
        other=float("-inf"),
    ).to(tl.float32)
    values = tl.where(values != values, float("-inf"), values)
    tl.store(block_max_ptr + row * num_blocks + block, tl.max(values, axis=0))
    best = block * BLOCK + tl.argmax(values, axis=0)
    tl.store(block_argmax_ptr + row * num_blocks + block, best.to(tl.int32))


# Views of the batch begin anywhere in the host's buffers: alignment is no part of a variant.
@triton.jit(
    do_not_specialize=["num_blocks"],
    do_not_specialize_on_alignment=[
        *("input_ids_ptr", "positions_ptr", "logits_indices_ptr", "cu_num_logits_ptr"),
        *("idx_mapping_ptr", "seq_lens_ptr", "prefill_len_ptr"),
    ],
)
def _accept_kernel(
    sampled_ptr,  # [num_reqs, width] int64, out
    num_sampled_ptr,  # [num_reqs] int32, out
    num_rejected_ptr,  # [num_reqs] int32, out
    block_max_ptr,  # [rows, num_blocks] float32
    block_argmax_ptr,  # [rows, num_blocks] int32
    input_ids_ptr,  # [num_tokens] int32
    positions_ptr,  # [num_tokens] int64
    logits_indices_ptr,  # [rows] int64
    cu_num_logits_ptr,  # [num_reqs + 1] int32
    idx_mapping_ptr,  # [num_reqs] int64
    seq_lens_ptr,  # [num_reqs] int32
    prefill_len_ptr,  # [max_num_reqs] int32, by request slot
    num_blocks,
    width,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    req = tl.program_id(0)
    start = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    count = tl.load(cu_num_logits_ptr + req + 1).to(tl.int64) - start
    prefill_len = tl.load(prefill_len_ptr + tl.load(idx_mapping_ptr + req))
    in_prompt = tl.load(seq_lens_ptr + req) < prefill_len

    slots = tl.arange(0, BLOCK_SLOTS)
    blocks = tl.arange(0, BLOCK_BLOCKS)
    here = slots < count
    maxima = tl.load(
        block_max_ptr + (start + slots)[:, None] * num_blocks + blocks[None, :],
        mask=here[:, None] & (blocks[None, :] < num_blocks),
        other=float("-inf"),
    )
    best_block = tl.argmax(maxima, axis=1)
    argmax = tl.load(
        block_argmax_ptr + (start + slots) * num_blocks + best_block, mask=here, other=0
    )

    # The draft that a row verifies is the input token of the next row.
    verifies = slots + 1 < count
    token = tl.load(logits_indices_ptr + start + slots + 1, mask=verifies, other=0)
    draft = tl.load(input_ids_ptr + token, mask=verifies, other=-1)
    position = tl.load(positions_ptr + token, mask=verifies, other=0)
    # Drafts of a step that starts inside the prompt are placeholders.
    drafted = verifies & (position - (slots + 1) >= prefill_len)
    accepts = drafted & (argmax == draft)
    accepted = tl.min(tl.where(accepts, BLOCK_SLOTS, slots), axis=0)

    commits = (count > 0) & (in_prompt == 0)
    num_sampled = tl.where(commits, accepted + 1, 0)
    tl.store(num_sampled_ptr + req, num_sampled)
    tl.store(num_rejected_ptr + req, tl.where(commits, count - num_sampled, 0).to(tl.int32))
    token_ids = tl.where(here & (slots <= accepted), argmax, -1).to(tl.int64)
    tl.store(sampled_ptr + req * width + slots, token_ids, mask=slots < width)


def greedy_accept(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    out: Accepted,
    num_columns: int | None = None,
) -> None:
    """Verify a batch of greedy requests.

    Args:
        logits: ``[rows, vocabulary]``, any float dtype; rows past the last request are ignored.
        input_ids: ``[num_tokens]`` int32 of the step.
        positions: ``[num_tokens]`` int64 of the step.
        logits_indices: ``[rows]`` int64 token of every logit row.
        cu_num_logits: ``[num_reqs + 1]`` int32 offsets; equal neighbours are padding requests.
        idx_mapping: ``[num_reqs]`` int64 request slots.
        seq_lens: ``[num_reqs]`` int32, this step's tokens included.
        prefill_len: ``[max_num_reqs]`` int32 by request slot.
        out: where the outcome goes, ``num_reqs`` rows.
        num_columns: leading logits that count, all by default.
    """
    rows, num_reqs, width = logits.shape[0], out.sampled.shape[0], out.sampled.shape[1]
    columns = logits.shape[1] if num_columns is None else min(num_columns, logits.shape[1])
    num_blocks = triton.cdiv(columns, _VOCAB_BLOCK)
    block_max = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    block_argmax = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    _block_argmax_kernel[(rows, num_blocks)](
        block_max,
        block_argmax,
        logits,
        logits.stride(0),
        cu_num_logits,
        num_reqs,
        columns,
        num_blocks,
        BLOCK=_VOCAB_BLOCK,
        num_warps=8,
    )
    _accept_kernel[(num_reqs,)](
        out.sampled,
        out.num_sampled,
        out.num_rejected,
        block_max,
        block_argmax,
        input_ids,
        positions,
        logits_indices,
        cu_num_logits,
        idx_mapping,
        seq_lens,
        prefill_len,
        num_blocks,
        width,
        BLOCK_SLOTS=triton.next_power_of_2(width),
        BLOCK_BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )


def greedy_accept_reference(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    gamma: int,
) -> Accepted:
    """The same, one request after the other; arguments as for ``greedy_accept``."""
    values = logits.float()
    argmax = torch.where(values.isnan(), -torch.inf, values).argmax(dim=1)
    num_reqs = len(cu_num_logits) - 1
    sampled = torch.full((num_reqs, gamma + 1), -1, dtype=torch.int64)
    num_sampled = torch.zeros(num_reqs, dtype=torch.int32)
    num_rejected = torch.zeros(num_reqs, dtype=torch.int32)
    for req, slot in enumerate(idx_mapping.tolist()):
        start, end = cu_num_logits[req : req + 2].tolist()
        accepted = 0
        for row in range(start, end):
            sampled[req, row - start] = argmax[row]
            token = logits_indices[row + 1] if row + 1 < end else None
            if token is None or input_ids[token] != argmax[row]:
                break
            if positions[token] - (row + 1 - start) < prefill_len[slot]:
                break
            accepted += 1
        if start < end and seq_lens[req] >= prefill_len[slot]:
            num_sampled[req] = accepted + 1
            num_rejected[req] = end - start - accepted - 1
    return Accepted(sampled, num_sampled, num_rejected)
