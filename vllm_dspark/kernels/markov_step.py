# SPDX-License-Identifier: Apache-2.0
"""Vanilla Markov head (arXiv 2607.05147, eq. 5-6) over the whole vocabulary in one pass a position.

Position k of a block is drawn from ``base_logits[:, k] + W2 @ W1[previous token]``. Done with
library calls, that is a gather, a matrix product, an addition, an argmax and copies, most of them
a pass over ``[num_reqs, vocab]``. Here every program owns a block of rows of W2, reads it once, and
walks over tiles of requests: gather, product, addition and the choice of the best token of its
block stay in registers.

* ``draft_greedy`` drafts a block with ``width + 2`` launches. Programs meet in one 64-bit maximum
  per request, whose bits hold the logit above the inverted token id: the result does not depend on
  the order of the programs, and ties give the lowest id, as ``argmax`` does. The next position's
  programs read the previous token out of that maximum themselves. NaN counts as minus infinity.
* ``markov_logits`` writes the logits of one position for a sampler that needs all of them.

Sums are float32 and are not rounded before they are compared. The host rounds bias and sum to the
model's dtype, so tokens may differ from its loop's where logits nearly tie. Drafts are verified
anyhow, and the cached logits of probabilistic drafting are those that were sampled from.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_RANK = 512
"""Largest head that fits: a block of W2 stays in shared memory while requests pass by."""

_FEW_REQS = 16
VARIANT_BATCHES = (1, _FEW_REQS + 1)
"""Batch sizes that between them meet every variant of ``launch_options``."""

_CELL_BLOCK = 256


@dataclass(frozen=True)
class LaunchOptions:
    """Shape of a launch; every distinct value is a compiled variant."""

    block_vocab: int
    """Rows of W2 per program."""
    tile_reqs: int
    """Requests per step of a program's loop, at least 16 (the smallest matrix product)."""
    num_warps: int
    num_stages: int
    overlap: bool = False
    """Launch a position's programs while those of the position before still run (programmatic
    dependent launch, compute capability 9.0): they read W2 and then wait."""

    def shared_bytes(self, rank: int, element_bytes: int) -> int:
        """Shared memory of a program, rounded up: its rows of W2, and tiles in flight of W1's rows
        and of base logits, which may be float32 whatever the weights are.
        """
        row = triton.next_power_of_2(rank) * element_bytes
        tile = self.tile_reqs * (row + self.block_vocab * 4)
        return self.block_vocab * row + self.num_stages * tile


def launch_options(
    num_reqs: int,
    rank: int = 256,
    element_bytes: int = 2,
    shared_limit: int = 232_448,
    overlap: bool = False,
) -> LaunchOptions:
    """Options for a batch; few variants, so that all of them are compiled at start-up.

    Few requests: reading W2 is all there is to do, and many small programs keep the most loads in
    flight. Many: every program gathers all of W1's rows from the L2 cache, so it should own many
    rows of W2. One stage throughout: in a pipelined loop the compiler writes W2 to shared memory
    anew for every tile.

    Args:
        shared_limit: shared memory in bytes that a program may have, by default an H100's.
        overlap: whether the device can launch programs before those that they wait for have ended.
    """
    tile_reqs, num_warps = (16, 4) if num_reqs <= _FEW_REQS else (64, 8)
    options = LaunchOptions(128, tile_reqs, num_warps, num_stages=1, overlap=overlap)
    if element_bytes > 2:
        # Products of float32 run without tensor cores, with operands in registers.
        options = replace(options, block_vocab=32, tile_reqs=16)
    while options.block_vocab > 16 and options.shared_bytes(rank, element_bytes) > shared_limit:
        options = replace(options, block_vocab=options.block_vocab // 2)
    return options


@functools.cache
def _device_limits(device: torch.device) -> dict[str, Any]:
    """Arguments of `launch_options` that a GPU decides."""
    found = torch.cuda.get_device_properties(device)
    return {
        "shared_limit": int(found.shared_memory_per_block_optin),
        "overlap": found.major >= 9,
    }


@triton.jit
def _decode(key):
    """Token id in a cell: the inverted low 32 bits."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF).to(tl.int64)


@triton.jit
def _encode(logit, token):
    """Cell of a candidate: an order-preserving image of the logit above the inverted id."""
    # Minus zero equals zero, but its bits sort below.
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.uint32, bitcast=True)
    sign = bits >> 31
    ordered = bits ^ (sign * 0x7FFFFFFF + 0x80000000)
    return (ordered.to(tl.uint64) << 32) | (0xFFFFFFFF - token.to(tl.uint64))


@triton.jit
def _to_target(token, draft_to_target_ptr, mask):
    """Target ids of draft ids; rows outside ``mask`` hold target ids already."""
    if draft_to_target_ptr is not None:
        token += tl.load(draft_to_target_ptr + token, mask=mask, other=0)
    return token


@triton.jit
def _logits_tile(
    previous,
    rows,
    rows_in,
    vocab_ids,
    vocab_in,
    w1_ptr,
    w2_tile,
    base_ptr,
    base_stride,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Float32 logits ``[TILE_REQS, BLOCK_VOCAB]`` of the requests ``rows``."""
    cols = tl.arange(0, BLOCK_RANK)
    inside = rows_in[:, None] & vocab_in[None, :]
    base = tl.load(
        base_ptr + rows.to(tl.int64)[:, None] * base_stride + vocab_ids[None, :],
        mask=inside,
        other=0.0,
    )
    embed = tl.load(
        w1_ptr + previous.to(tl.int64)[:, None] * RANK + cols[None, :],
        mask=rows_in[:, None] & (cols < RANK)[None, :],
        other=0.0,
    )
    # "ieee": float32 weights are multiplied as float32. It says nothing about 16-bit ones.
    bias = tl.dot(embed, tl.trans(w2_tile), input_precision="ieee")
    return base.to(tl.float32) + bias


@triton.jit
def _load_w2(w2_ptr, vocab_ids, vocab_in, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr):
    """This program's rows of W2, ``[BLOCK_VOCAB, BLOCK_RANK]``."""
    cols = tl.arange(0, BLOCK_RANK)
    return tl.load(
        w2_ptr + vocab_ids.to(tl.int64)[:, None] * RANK + cols[None, :],
        mask=vocab_in[:, None] & (cols < RANK)[None, :],
        other=0.0,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_cells"])
def _start_kernel(
    input_ids_ptr, anchor_idx_ptr, cells_ptr, num_reqs, num_cells, BLOCK: tl.constexpr
):
    """Row 0 of the cells holds the anchors, the others are below every candidate."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_anchor = cell < num_reqs
    index = tl.load(anchor_idx_ptr + cell, mask=is_anchor, other=0)
    anchor = tl.load(input_ids_ptr + index, mask=is_anchor, other=0).to(tl.uint64)
    key = tl.where(is_anchor, 0xFFFFFFFF - anchor, tl.zeros_like(anchor))
    tl.store(cells_ptr + cell, key, mask=cell < num_cells)


# Batch size and position change from launch to launch; other sizes are a model's constants.
@triton.jit(do_not_specialize=["num_reqs", "position"])
def _greedy_kernel(
    cells_ptr,  # [width + 1, num_reqs] uint64; row k is read, row k + 1 is raised
    w1_ptr,  # [vocab_in, RANK]
    w2_ptr,  # [>= vocab, RANK]
    base_ptr,  # [num_reqs, width, vocab]
    draft_to_target_ptr,  # [vocab] int64 offsets, or None
    base_stride_req,
    base_stride_position,
    vocab,
    num_reqs,
    position,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    TILE_REQS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Every other position walks back, so that it starts with what the L2 cache still holds.
    block = tl.program_id(0)
    block = tl.where(position % 2 == 1, tl.num_programs(0) - 1 - block, block)
    vocab_ids = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    vocab_in = vocab_ids < vocab
    if OVERLAP:
        gdc_launch_dependents()
    w2_tile = _load_w2(w2_ptr, vocab_ids, vocab_in, RANK, BLOCK_RANK)
    if OVERLAP:
        # What came before has written the cells; W2 never changes.
        gdc_wait()
    base_ptr += position.to(tl.int64) * base_stride_position
    read_ptr = cells_ptr + position.to(tl.int64) * num_reqs
    for start in range(0, num_reqs, TILE_REQS):
        rows = start + tl.arange(0, TILE_REQS)
        rows_in = rows < num_reqs
        token = _decode(tl.load(read_ptr + rows, mask=rows_in, other=0xFFFFFFFF))
        previous = _to_target(token, draft_to_target_ptr, rows_in & (position > 0))
        logits = _logits_tile(
            previous,
            rows,
            rows_in,
            vocab_ids,
            vocab_in,
            w1_ptr,
            w2_tile,
            base_ptr,
            base_stride_req,
            RANK,
            BLOCK_RANK,
        )
        logits = tl.where(vocab_in[None, :] & (logits == logits), logits, float("-inf"))
        best = tl.max(logits, axis=1)
        # Padding of the vocabulary lies behind all real ids, so it never is the lowest.
        ties = tl.where(logits == best[:, None], vocab_ids[None, :], vocab)
        key = _encode(best, tl.min(ties, axis=1))
        tl.atomic_max(read_ptr + num_reqs + rows, key, mask=rows_in, sem="relaxed")


@triton.jit(do_not_specialize=["num_reqs", "width"])
def _finish_kernel(
    cells_ptr,  # [width + 1, num_reqs] uint64
    draft_to_target_ptr,
    tokens_ptr,  # [num_reqs, >= width] int64, out
    previous_ptr,  # [num_reqs, width] int64, out
    tokens_stride,
    num_reqs,
    width,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_reqs * width
    row, position = slot // width, slot % width
    read_ptr = cells_ptr + position.to(tl.int64) * num_reqs + row
    before = _decode(tl.load(read_ptr, mask=inside, other=0xFFFFFFFF))
    before = _to_target(before, draft_to_target_ptr, inside & (position > 0))
    drawn = _decode(tl.load(read_ptr + num_reqs, mask=inside, other=0xFFFFFFFF))
    drawn = _to_target(drawn, draft_to_target_ptr, inside)
    tl.store(previous_ptr + slot, before, mask=inside)
    tl.store(tokens_ptr + row.to(tl.int64) * tokens_stride + position, drawn, mask=inside)


@triton.jit(do_not_specialize=["num_reqs"])
def _logits_kernel(
    previous_ptr,  # [num_reqs]
    w1_ptr,
    w2_ptr,
    base_ptr,  # [num_reqs, vocab]
    out_ptr,  # [num_reqs, vocab], out
    base_stride,
    out_stride,
    vocab,
    num_reqs,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    TILE_REQS: tl.constexpr,
):
    vocab_ids = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    vocab_in = vocab_ids < vocab
    w2_tile = _load_w2(w2_ptr, vocab_ids, vocab_in, RANK, BLOCK_RANK)
    for start in range(0, num_reqs, TILE_REQS):
        rows = start + tl.arange(0, TILE_REQS)
        rows_in = rows < num_reqs
        previous = tl.load(previous_ptr + rows, mask=rows_in, other=0)
        logits = _logits_tile(
            previous,
            rows,
            rows_in,
            vocab_ids,
            vocab_in,
            w1_ptr,
            w2_tile,
            base_ptr,
            base_stride,
            RANK,
            BLOCK_RANK,
        )
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * out_stride + vocab_ids[None, :],
            logits.to(out_ptr.dtype.element_ty),
            mask=rows_in[:, None] & vocab_in[None, :],
        )


def draft_greedy(
    w1: torch.Tensor,
    w2: torch.Tensor,
    base_logits: torch.Tensor,
    input_ids: torch.Tensor,
    anchor_idx: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_to_target: torch.Tensor | None = None,
    options: LaunchOptions | None = None,
) -> torch.Tensor:
    """Draft a block by taking the best token of every position.

    Args:
        w1: ``[vocab_in, rank]``, contiguous, embedding of the previous token (a target id).
        w2: ``[rows, rank]`` of the same dtype, contiguous; rows past ``vocab`` are padding.
        base_logits: ``[num_reqs, width, vocab]`` of any float dtype; its last dimension is dense.
        input_ids: token ids, of which ``anchor_idx`` ``[num_reqs]`` names each request's anchor.
        draft_tokens: ``[num_reqs, width]`` int64, filled with target ids; its rows may be strided.
        draft_to_target: ``[vocab]`` int64, what to add to a draft id to get the target's.
        options: shape of the launches, chosen from the batch if None.

    Returns:
        The token before each position, ``[num_reqs, width]`` int64 target ids: the anchor, then
        the drafts but the last.

    Raises:
        ValueError: an operand that the kernels cannot read.
    """
    _check(w1, w2, base_logits)
    num_reqs, width, vocab = base_logits.shape
    device = base_logits.device
    cells = torch.empty(width + 1, num_reqs, dtype=torch.uint64, device=device)
    previous = torch.empty(num_reqs, width, dtype=torch.int64, device=device)
    _start_kernel[(triton.cdiv(cells.numel(), _CELL_BLOCK),)](
        input_ids, anchor_idx, cells, num_reqs, cells.numel(), BLOCK=_CELL_BLOCK
    )
    options = options or _chosen_options(w2, num_reqs)
    grid, shape = _shape(w2, vocab, options)
    for position in range(width):
        _greedy_kernel[grid](
            cells,
            w1,
            w2,
            base_logits,
            draft_to_target,
            base_logits.stride(0),
            base_logits.stride(1),
            vocab,
            num_reqs,
            position,
            OVERLAP=options.overlap,
            launch_pdl=options.overlap,
            **shape,
        )
    _finish_kernel[(triton.cdiv(previous.numel(), _CELL_BLOCK),)](
        cells,
        draft_to_target,
        draft_tokens,
        previous,
        draft_tokens.stride(0),
        num_reqs,
        width,
        BLOCK=_CELL_BLOCK,
    )
    return previous


def markov_logits(
    previous: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    base_logits: torch.Tensor,
    out: torch.Tensor,
    options: LaunchOptions | None = None,
) -> torch.Tensor:
    """Logits of one position, ``base_logits + W1[previous] @ W2^T``, in one launch.

    Args:
        previous: ``[num_reqs]`` integer target ids.
        w1, w2, options: as for ``draft_greedy``.
        base_logits: ``[num_reqs, vocab]``; its last dimension is dense.
        out: ``[num_reqs, vocab]`` of any float dtype, filled and returned.

    Raises:
        ValueError: an operand that the kernel cannot read.
    """
    _check(w1, w2, base_logits)
    num_reqs, vocab = base_logits.shape
    grid, shape = _shape(w2, vocab, options or _chosen_options(w2, num_reqs))
    _logits_kernel[grid](
        previous,
        w1,
        w2,
        base_logits,
        out,
        base_logits.stride(0),
        out.stride(0),
        vocab,
        num_reqs,
        **shape,
    )
    return out


def _check(w1: torch.Tensor, w2: torch.Tensor, base_logits: torch.Tensor) -> None:
    vocab, rank = base_logits.shape[-1], w2.shape[1]
    if w1.dtype != w2.dtype or w1.shape[1] != rank or w2.shape[0] < vocab:
        raise ValueError(
            f"W1 {w1.dtype} {tuple(w1.shape)} and W2 {w2.dtype} {tuple(w2.shape)}: expected one "
            f"dtype and rank, and {vocab} rows of W2"
        )
    if rank > MAX_RANK:
        raise ValueError(f"Markov rank {rank}: expected at most {MAX_RANK}")
    if not (w1.is_contiguous() and w2.is_contiguous() and base_logits.stride(-1) == 1):
        raise ValueError("W1 and W2 must be contiguous, and base logits dense in the vocabulary")


def _chosen_options(w2: torch.Tensor, num_reqs: int) -> LaunchOptions:
    limits = _device_limits(w2.device) if w2.is_cuda else {}
    return launch_options(num_reqs, w2.shape[1], w2.element_size(), **limits)


def _shape(
    w2: torch.Tensor, vocab: int, options: LaunchOptions
) -> tuple[tuple[int], dict[str, int]]:
    """Grid and keyword arguments of a launch over the vocabulary."""
    rank = w2.shape[1]
    return (triton.cdiv(vocab, options.block_vocab),), {
        "RANK": rank,
        "BLOCK_RANK": max(triton.next_power_of_2(rank), 16),
        "BLOCK_VOCAB": options.block_vocab,
        "TILE_REQS": options.tile_reqs,
        "num_warps": options.num_warps,
        "num_stages": options.num_stages,
    }


def markov_logits_reference(
    previous: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, base_logits: torch.Tensor
) -> torch.Tensor:
    """Float32 logits ``[num_reqs, vocab]`` of one position, unrounded."""
    bias = w1[previous].float() @ w2[: base_logits.shape[-1]].float().T
    return base_logits.float() + bias


def draft_greedy_reference(
    w1: torch.Tensor,
    w2: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    draft_to_target: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts and the tokens before them, ``[num_reqs, width]`` int64, from the definition."""
    token = anchors.long()
    drawn, before = [], []
    for position in range(base_logits.shape[1]):
        before.append(token)
        logits = markov_logits_reference(token, w1, w2, base_logits[:, position])
        token = torch.where(logits.isnan(), -torch.inf, logits).argmax(dim=-1)
        if draft_to_target is not None:
            token = token + draft_to_target[token]
        drawn.append(token)
    return torch.stack(drawn, 1), torch.stack(before, 1)
