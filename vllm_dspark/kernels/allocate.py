# SPDX-License-Identifier: Apache-2.0
"""Spend a verify budget on the live block: one launch from confidences to batch offsets.

Order and result are those of ``core.allocation``: survival descending, position ascending, request
ascending, compared as float32; a row with a NaN, an infinity or a value outside [0, 1] in a
scheduled slot is served first. Survivals are float64 products rounded to float32, as in the core,
so both agree bit for bit. The admitted drafts sum to the budget exactly, so the batch fits the
graph that the host chose from the budget, whatever the confidences are.

One program does it all: the batch is small, and the cut is found by searching the float's bits (its
order as an integer), which needs no sort and no second launch.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_dspark.core.allocation import allocate as allocate_on_host

_SEARCH_STEPS = 16
"""Each step splits the range of candidate bit patterns in four: 4 ** 16 covers 32 bits."""


@triton.jit
def _ranking_keys(
    confidence_ptr,
    slots,
    lens,
    rows_in,
    num_steps,
    BLOCK_REQS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """Integer keys ``[BLOCK_REQS, BLOCK_STEPS]``, higher is better; -1 marks a slot not drafted."""
    cols = tl.arange(0, BLOCK_STEPS)
    keys = tl.full((BLOCK_REQS, BLOCK_STEPS), -1, dtype=tl.int32)
    survival = tl.full((BLOCK_REQS,), 1.0, dtype=tl.float64)
    doubtful = tl.full((BLOCK_REQS,), 0, dtype=tl.int32)
    for step in tl.static_range(BLOCK_STEPS):
        drafted = rows_in & (step < lens)
        value = tl.load(confidence_ptr + slots * num_steps + step, mask=drafted, other=0.0)
        # A NaN fails both comparisons.
        good = (value >= 0.0) & (value <= 1.0)
        doubtful = tl.where(drafted & (good == 0), 1, doubtful)
        # -0.0 is a good zero, but its bits are not those of the lowest key.
        survival = survival * tl.where(good & (value > 0.0), value, 0.0).to(tl.float64)
        bits = survival.to(tl.float32).to(tl.int32, bitcast=True)
        here = (cols[None, :] == step) & drafted[:, None]
        keys = tl.where(here, bits[:, None], keys)
    served_first = (doubtful[:, None] == 1) & (cols[None, :] < lens[:, None]) & rows_in[:, None]
    return tl.where(served_first, 0x7F800000, keys)


# Batch shape and budget change from step to step, and rows of one upload start wherever the batch
# puts them; a variant specialised for any of it would compile in traffic.
@triton.jit(
    do_not_specialize=["num_reqs", "budget", "num_tokens"],
    do_not_specialize_on_alignment=[
        "confidence_ptr",
        "slots_ptr",
        "draft_lens_ptr",
        "base_lens_ptr",
        "admitted_ptr",
        "query_start_loc_ptr",
        "cu_num_logits_ptr",
    ],
)
def _allocate_kernel(
    confidence_ptr,  # [max_num_reqs, num_steps] float32, by request slot
    slots_ptr,  # [num_reqs] int64
    draft_lens_ptr,  # [num_reqs] int32
    base_lens_ptr,  # [num_reqs] int32, tokens besides drafts
    admitted_ptr,  # [num_reqs] int32, out
    query_start_loc_ptr,  # [max_num_reqs + 1] int32, out
    cu_num_logits_ptr,  # [num_reqs + 1] int32, out
    num_reqs,
    max_num_reqs,
    num_steps,
    budget,
    num_bonus,
    num_tokens,
    BLOCK_REQS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_REQS)
    rows_in = rows < num_reqs
    slots = tl.load(slots_ptr + rows, mask=rows_in, other=0)
    lens = tl.load(draft_lens_ptr + rows, mask=rows_in, other=0)
    base = tl.load(base_lens_ptr + rows, mask=rows_in, other=0)
    keys = _ranking_keys(confidence_ptr, slots, lens, rows_in, num_steps, BLOCK_REQS, BLOCK_STEPS)

    # Largest pattern that at least `budget` keys reach: the budget-th key itself.
    low = tl.full((), 0, dtype=tl.int64)
    span = tl.full((), 4294967296, dtype=tl.int64)
    wide = keys.to(tl.int64)
    for _ in tl.static_range(SEARCH_STEPS):
        span = span // 4
        # Three counts in one reduction; each fits 20 bits.
        packed = (
            (wide >= low + span).to(tl.int64)
            + ((wide >= low + 2 * span).to(tl.int64) << 20)
            + ((wide >= low + 3 * span).to(tl.int64) << 40)
        )
        counts = tl.sum(tl.sum(packed, axis=1), axis=0)
        reached = (
            ((counts & 1048575) >= budget).to(tl.int64)
            + (((counts >> 20) & 1048575) >= budget).to(tl.int64)
            + ((counts >> 40) >= budget).to(tl.int64)
        )
        low = low + reached * span
    above = wide > low
    equal = (wide == low).to(tl.int32)
    left = budget - tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0)
    # Ties by position, then by request.
    per_step = tl.sum(equal, axis=0)
    rank = (tl.cumsum(per_step, axis=0) - per_step)[None, :] + tl.cumsum(equal, axis=0) - equal
    chosen = (above | ((equal == 1) & (rank < left))) & (budget > 0)
    admitted = tl.sum(chosen.to(tl.int32), axis=1)

    tl.store(admitted_ptr + rows, admitted, mask=rows_in)
    tl.store(query_start_loc_ptr, 0)
    tl.store(query_start_loc_ptr + 1 + rows, tl.cumsum(base + admitted, axis=0), mask=rows_in)
    tl.store(cu_num_logits_ptr, 0)
    bonus = tl.where(rows_in, num_bonus, 0)
    tl.store(cu_num_logits_ptr + 1 + rows, tl.cumsum(bonus + admitted, axis=0), mask=rows_in)
    for start in range(0, max_num_reqs, BLOCK_REQS):
        padded = start + rows
        inside = (padded >= num_reqs) & (padded < max_num_reqs)
        tl.store(query_start_loc_ptr + 1 + padded, num_tokens + padded * 0, mask=inside)


def allocate(
    confidence: torch.Tensor,
    slots: torch.Tensor,
    draft_lens: torch.Tensor,
    base_lens: torch.Tensor,
    budget: int,
    num_bonus: int,
    num_tokens: int,
    query_start_loc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Admit the ``budget`` best drafts of the batch and lay the batch out.

    Args:
        confidence: ``[max_num_reqs, gamma]`` float32, live confidences by request slot.
        slots: ``[num_reqs]`` int64 request slots in batch order.
        draft_lens: ``[num_reqs]`` int32 scheduled drafts, 0..gamma.
        base_lens: ``[num_reqs]`` int32 tokens besides drafts.
        budget: drafts to admit, at most ``draft_lens.sum()``.
        num_bonus: logit rows per request besides its drafts.
        num_tokens: tokens of the whole batch, ``base_lens.sum() + budget``.
        query_start_loc: ``[max_num_reqs + 1]`` int32, filled; entries past the batch hold
            ``num_tokens``.

    Returns:
        Admitted drafts ``[num_reqs]`` int32 and logit offsets ``[num_reqs + 1]`` int32.
    """
    num_reqs, (max_num_reqs, gamma) = slots.shape[0], confidence.shape
    admitted = torch.empty(num_reqs, dtype=torch.int32, device=confidence.device)
    cu_num_logits = torch.empty(num_reqs + 1, dtype=torch.int32, device=confidence.device)
    block_reqs = max(triton.next_power_of_2(num_reqs), 16)
    block_steps = triton.next_power_of_2(gamma)
    _allocate_kernel[(1,)](
        confidence,
        slots,
        draft_lens,
        base_lens,
        admitted,
        query_start_loc,
        cu_num_logits,
        num_reqs,
        max_num_reqs,
        gamma,
        budget,
        num_bonus,
        num_tokens,
        BLOCK_REQS=block_reqs,
        BLOCK_STEPS=block_steps,
        SEARCH_STEPS=_SEARCH_STEPS,
        num_warps=min(max(block_reqs * block_steps // 256, 4), 16),
    )
    return admitted, cu_num_logits


def allocate_reference(confidence: np.ndarray, draft_lens: np.ndarray, budget: int) -> np.ndarray:
    """Admitted drafts ``[num_reqs]`` by the core's allocation, for confidences in batch order."""
    with np.errstate(invalid="ignore"):
        inside = (confidence >= 0.0) & (confidence <= 1.0)
    scheduled = np.arange(confidence.shape[1]) < draft_lens[:, None]
    doubtful = (scheduled & ~inside).any(axis=1)
    survival = np.cumprod(np.where(inside, confidence, 0.0), axis=1, dtype=np.float64)
    return allocate_on_host(survival, draft_lens, budget, doubtful)
