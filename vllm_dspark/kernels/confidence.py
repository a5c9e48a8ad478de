# SPDX-License-Identifier: Apache-2.0
"""Confidence head (arXiv 2607.05147) of a whole batch in one launch.

``sigmoid(w . [hidden; W1[previous token]] + b)`` per drafted token. Done with library calls, the
rows are concatenated, converted to float32 and multiplied, each a pass over them; here each row is
read once, the Markov embedding straight from its table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _dot(row_ptr, weight_ptr, size, BLOCK: tl.constexpr):
    """Float32 dot product of two vectors of ``size`` numbers."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        row = tl.load(row_ptr + cols, mask=cols < size, other=0.0).to(tl.float32)
        total += row * tl.load(weight_ptr + cols, mask=cols < size, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _confidence_kernel(
    hidden_ptr,  # [num_rows, hidden_size]
    table_ptr,  # [vocab_in, rank], or None
    previous_ptr,  # [num_rows] integers, or None
    weight_ptr,  # [hidden_size + rank] float32
    bias_ptr,  # [1], or None
    out_ptr,  # [num_rows // width, width] float32, out
    hidden_stride,
    out_stride,
    hidden_size,
    width,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    score = _dot(hidden_ptr + wide * hidden_stride, weight_ptr, hidden_size, BLOCK)
    if table_ptr is not None:
        token = tl.load(previous_ptr + row).to(tl.int64)
        score += _dot(table_ptr + token * RANK, weight_ptr + hidden_size, RANK, BLOCK_RANK)
    if bias_ptr is not None:
        score += tl.load(bias_ptr).to(tl.float32)
    probability = 1.0 / (1.0 + tl.exp(-score))
    tl.store(out_ptr + (wide // width) * out_stride + wide % width, probability)


def confidence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    table: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
) -> torch.Tensor:
    """Acceptance probability of every drafted token.

    Args:
        hidden: ``[num_reqs * width, hidden_size]`` of any float dtype, ordered by request, then
            position; its last dimension is dense.
        weight: ``[1, hidden_size + rank]`` float32, contiguous; ``[1, hidden_size]`` without a
            table.
        bias: ``[1]``, or None.
        out: ``[num_reqs, width]`` float32, filled and returned; its rows may be strided.
        table: ``[vocab_in, rank]``, contiguous, if the head reads Markov embeddings.
        previous: ``[num_reqs, width]`` integer ids, contiguous: the rows of the table to read.

    Raises:
        ValueError: the weight does not fit, or an operand is not dense.
    """
    rank = table.shape[1] if table is not None else 0
    num_rows, hidden_size = hidden.shape
    if weight.shape != (1, hidden_size + rank) or weight.dtype != torch.float32:
        raise ValueError(
            f"confidence weight {weight.dtype} {tuple(weight.shape)}: expected torch.float32 "
            f"(1, {hidden_size + rank})"
        )
    if hidden.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("hidden states, weight and output must be dense in their last dimension")
    _confidence_kernel[(num_rows,)](
        hidden,
        table,
        previous,
        weight,
        bias,
        out,
        hidden.stride(0),
        out.stride(0),
        hidden_size,
        out.shape[1],
        RANK=rank,
        BLOCK=min(triton.next_power_of_2(hidden_size), _BLOCK),
        BLOCK_RANK=max(triton.next_power_of_2(rank), 1),
    )
    return out


def confidence_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    width: int,
    table: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
) -> torch.Tensor:
    """Probabilities ``[num_reqs, width]`` float32, from the definition."""
    evidence = hidden.float()
    if table is not None and previous is not None:
        evidence = torch.cat([evidence, table[previous.flatten()].float()], dim=1)
    score = evidence @ weight[0]
    return torch.sigmoid(score if bias is None else score + bias.float()).view(-1, width)
