# SPDX-License-Identifier: Apache-2.0
"""Attention of verify blocks with tiles as small as a block.

A verify step asks few queries of each context: five of them, on four heads of one KV head, are 20
rows, and FlashAttention 3 computes tiles of 64 to 192. Here a tile is one block of one request and
the heads of one KV head. Long contexts are split; the last split of a tile to end puts them
together, so that there is no second kernel where nothing is split.

Requests that ask more than a block (prompts) are left to a kernel with large tiles. They come last
in a batch; `from_prompts_on` tells on the device where they begin, since a captured graph cannot
know.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """How the kernel is launched.

    Args:
        queries: of a tile; times the query heads of a KV head, a power of two of 16 or more.
        keys: of a tile, a power of two of 16 or more.
        warps: of a program.
        stages: tiles of keys that are loaded ahead.
    """

    queries: int = 8
    keys: int = 64
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Splits:
    """How contexts are split: into pieces of ``chunk`` tokens, or ``most`` longer ones."""

    most: int = 1
    chunk: int = 512


class Scratch:
    """What splits leave for the last of them; one for all layers of a stream.

    Args:
        rows: query heads of all tokens, times splits: the most of any launch.
        tiles: of the largest launch, those of all KV heads.
        size: of a head.
        device: of the kernel.
    """

    def __init__(self, rows: int, tiles: int, size: int, device: torch.device) -> None:
        self.rows = rows
        self.sums = torch.empty(rows, size, dtype=torch.float32, device=device)
        self.tops = torch.empty(rows, 2, dtype=torch.float32, device=device)
        # Whoever counts to the end starts it anew.
        self.ended = torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_reqs", "longest"])
def _from_prompts_on_kernel(starts_ptr, rest_ptr, num_reqs, longest, BLOCK_REQS: tl.constexpr):
    rows = tl.arange(0, BLOCK_REQS)
    inside = rows < num_reqs
    start = tl.load(starts_ptr + rows, mask=inside, other=0)
    end = tl.load(starts_ptr + rows + 1, mask=inside, other=0)
    first = tl.min(tl.where(inside & (end - start > longest), rows, num_reqs), axis=0)
    begin = tl.load(starts_ptr + first)
    tl.store(rest_ptr + rows, tl.maximum(start, begin), mask=inside)
    tl.store(rest_ptr + num_reqs, tl.load(starts_ptr + num_reqs))


def from_prompts_on(starts: torch.Tensor, longest: int, most_reqs: int) -> torch.Tensor:
    """A batch without the requests before the first one of more than ``longest`` queries.

    Args:
        starts: ``[num_reqs + 1]`` int32 first query of each request.
        longest: queries of a block.
        most_reqs: of any batch, so that one kernel serves them all.

    Returns:
        ``starts`` with those requests emptied ``[num_reqs + 1]`` int32.
    """
    rest = torch.empty_like(starts)
    block = triton.next_power_of_2(most_reqs)
    _from_prompts_on_kernel[(1,)](starts, rest, starts.shape[0] - 1, longest, BLOCK_REQS=block)
    return rest


# Counts that differ from batch to batch are no reason to compile anew.
_NOT_SPECIALIZED = ["pages_stride", "num_rows", "longest", "most"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _verify_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sums_ptr,
    tops_ptr,
    ended_ptr,
    starts_ptr,
    contexts_ptr,
    pages_ptr,
    scale,
    q_stride,
    out_stride,
    page_stride,
    slot_stride,
    head_stride,
    pages_stride,
    num_rows,
    longest,
    most,
    chunk,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program: `QUERIES` queries of one request, the heads of one KV head, a split. A request
    has `TILES` programs for its queries, enough for a block.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
    request, first = program // TILES, program % TILES * QUERIES
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    if (first >= count) | (count > longest):
        return
    context = tl.load(contexts_ptr + request)
    rows = tl.arange(0, QUERIES * RATIO)
    query = first + rows // RATIO
    dims = tl.arange(0, SIZE)
    inside = query < count
    head = kv_head * RATIO + rows % RATIO
    q_place = (start + query).to(tl.int64) * q_stride + head * SIZE
    q = tl.load(q_ptr + q_place[:, None] + dims, mask=inside[:, None], other=0.0)
    visible = context - count + query
    end = context - count + tl.minimum(first + QUERIES, count)
    split = tl.program_id(2)
    pieces = tl.minimum(tl.cdiv(end, chunk), most)
    span = tl.cdiv(tl.cdiv(end, pieces), KEYS) * KEYS
    pieces = tl.cdiv(end, span)
    if split >= pieces:
        return
    top = tl.full([QUERIES * RATIO], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * RATIO], tl.float32)
    acc = tl.zeros([QUERIES * RATIO, SIZE], tl.float32)
    for tile in range(split * span, tl.minimum((split + 1) * span, end), KEYS):
        keys = tile + tl.arange(0, KEYS)
        known = keys < end
        page = tl.load(pages_ptr + request * pages_stride + keys // PAGE, mask=known, other=0)
        at = page.to(tl.int64) * page_stride + (keys % PAGE) * slot_stride + kv_head * head_stride
        k = tl.load(k_ptr + at[:, None] + dims, mask=known[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + dims, mask=known[:, None], other=0.0)
        # Base-two exponentials are one instruction; the scale takes care of the base.
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(keys[None, :] <= visible[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        # The last split may hold no key that the first queries of a block see.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        top = higher
    if SPLIT and pieces > 1:
        row = (start + query) * (RATIO * tl.num_programs(1)) + head
        mine = split * num_rows + row
        tl.store(sums_ptr + mine[:, None] * SIZE + dims, acc, mask=inside[:, None])
        tl.store(tops_ptr + mine * 2, top, mask=inside)
        tl.store(tops_ptr + mine * 2 + 1, total, mask=inside)
        # All of it is written before this split counts as ended.
        tl.debug_barrier()
        counter = ended_ptr + program * tl.num_programs(1) + kv_head
        ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if ended < pieces - 1:
            return
        tl.store(counter, 0)
        for other in range(0, pieces):
            if other != split:
                theirs = other * num_rows + row
                their_top = tl.load(
                    tops_ptr + theirs * 2, inside, float("-inf"), cache_modifier=".cg"
                )
                their_total = tl.load(tops_ptr + theirs * 2 + 1, inside, 0.0, cache_modifier=".cg")
                sums = tl.load(
                    sums_ptr + theirs[:, None] * SIZE + dims,
                    inside[:, None],
                    0.0,
                    cache_modifier=".cg",
                )
                higher = tl.maximum(top, their_top)
                finite = tl.where(higher == float("-inf"), 0.0, higher)
                shrink, grow = tl.exp2(top - finite), tl.exp2(their_top - finite)
                total = total * shrink + their_total * grow
                acc = acc * shrink[:, None] + sums * grow[:, None]
                top = higher
    acc = acc / total[:, None]
    out_place = (start + query).to(tl.int64) * out_stride + head * SIZE
    tl.store(out_ptr + out_place[:, None] + dims, acc.to(q.dtype), mask=inside[:, None])


_TILES, _WHOLE = Tiles(), Splits()


def verify_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    longest: int,
    tiles: Tiles = _TILES,
    splits: Splits = _WHOLE,
    scratch: Scratch | None = None,
) -> None:
    """Causal attention of the requests with at most ``longest`` queries, written to ``out``.

    Args:
        queries: ``[num_tokens, heads, size]``, heads of a token side by side, size a power of two.
        keys: ``[num_pages, page, kv_heads, size]``.
        values: as ``keys``, with the same strides.
        out: ``[num_tokens, heads, size]``, or with the last two dimensions in one.
        starts: ``[num_reqs + 1]`` int32 first query of each request.
        contexts: ``[num_reqs]`` int32 tokens of each request, its queries included.
        pages: ``[num_reqs, max_pages]`` int32.
        scale: of the scores.
        longest: queries of a block; requests with more are left out.
        tiles: launch options.
        splits: of contexts.
        scratch: needed where there is more than one split.
    """
    num_tokens, heads, size = queries.shape
    _, page, kv_heads, _ = keys.shape
    assert keys.stride() == values.stride() and queries.stride()[1:] == (size, 1)
    per_request = triton.cdiv(longest, tiles.queries)
    programs = contexts.shape[0] * per_request
    if splits.most > 1:
        assert scratch is not None and len(scratch.ended) >= programs * kv_heads
        assert scratch.rows >= splits.most * num_tokens * heads
    _verify_attention_kernel[(programs, kv_heads, splits.most)](
        queries,
        keys,
        values,
        out,
        None if scratch is None else scratch.sums,
        None if scratch is None else scratch.tops,
        None if scratch is None else scratch.ended,
        starts,
        contexts,
        pages,
        scale * LOG2_E,
        queries.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        pages.stride(0),
        num_tokens * heads,
        longest,
        splits.most,
        splits.chunk,
        PAGE=page,
        RATIO=heads // kv_heads,
        SIZE=size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        TILES=per_request,
        SPLIT=scratch is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def verify_attention_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The naive twin ``[num_tokens, heads, size]``: every request alone, in float32."""
    out = torch.empty_like(queries)
    ratio, page = queries.shape[1] // keys.shape[2], keys.shape[1]
    for row, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        context = int(contexts[row])
        used = pages[row, : -(-context // page)].long()
        k, v = (
            cache[used].flatten(0, 1)[:context].float().repeat_interleave(ratio, dim=1)
            for cache in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", queries[start:end].float(), k) * scale
        last = torch.arange(context - (end - start), context, device=scores.device)
        hidden = torch.arange(context, device=scores.device) > last[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out
