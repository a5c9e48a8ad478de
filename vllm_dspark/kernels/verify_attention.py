# SPDX-License-Identifier: Apache-2.0
"""Attention of verify blocks with tiles as small as a block.

A verify step asks few queries of each context: five of them, on four heads of one KV head, are 20
rows, and FlashAttention 3 computes tiles of 64 to 192. Here a tile is one block of one request and
the heads of one KV head. Contexts are not split, so batches have to fill the GPU with requests.

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
    stages: int = 3


@triton.jit
def _from_prompts_on_kernel(starts_ptr, rest_ptr, num_reqs, longest, BLOCK_REQS: tl.constexpr):
    rows = tl.arange(0, BLOCK_REQS)
    inside = rows < num_reqs
    start = tl.load(starts_ptr + rows, mask=inside, other=0)
    end = tl.load(starts_ptr + rows + 1, mask=inside, other=0)
    first = tl.min(tl.where(inside & (end - start > longest), rows, num_reqs), axis=0)
    begin = tl.load(starts_ptr + first)
    tl.store(rest_ptr + rows, tl.maximum(start, begin), mask=inside)
    tl.store(rest_ptr + num_reqs, tl.load(starts_ptr + num_reqs))


def from_prompts_on(starts: torch.Tensor, longest: int) -> torch.Tensor:
    """A batch without the requests before the first one of more than ``longest`` queries.

    Args:
        starts: ``[num_reqs + 1]`` int32 first query of each request.
        longest: queries of a block.

    Returns:
        ``starts`` with those requests emptied ``[num_reqs + 1]`` int32.
    """
    rest = torch.empty_like(starts)
    num_reqs = starts.shape[0] - 1
    block = triton.next_power_of_2(num_reqs)
    _from_prompts_on_kernel[(1,)](starts, rest, num_reqs, longest, BLOCK_REQS=block)
    return rest


@triton.jit
def _verify_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
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
    num_reqs,
    longest,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: `QUERIES` queries of one request, the heads of one KV head. Where a request has
    its first program depends on the queries before it, rounded up by one program for each request.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
    request, beyond = 0, num_reqs
    while beyond - request > 1:
        middle = (request + beyond) // 2
        if tl.load(starts_ptr + middle) // QUERIES + middle <= program:
            request = middle
        else:
            beyond = middle
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    first = (program - start // QUERIES - request) * QUERIES
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
    top = tl.full([QUERIES * RATIO], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * RATIO], tl.float32)
    acc = tl.zeros([QUERIES * RATIO, SIZE], tl.float32)
    for tile in range(0, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        known = keys < end
        page = tl.load(pages_ptr + request * pages_stride + keys // PAGE, mask=known, other=0)
        at = page.to(tl.int64) * page_stride + (keys % PAGE) * slot_stride + kv_head * head_stride
        k = tl.load(k_ptr + at[:, None] + dims, mask=known[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + dims, mask=known[:, None], other=0.0)
        # Base-two exponentials are one instruction; the scale takes care of the base.
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(keys[None, :] <= visible[:, None], s, float("-inf"))
        # The first key is visible to every row, so no maximum stays infinite.
        higher = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        top = higher
    acc = acc / total[:, None]
    out_place = (start + query).to(tl.int64) * out_stride + head * SIZE
    tl.store(out_ptr + out_place[:, None] + dims, acc.to(q.dtype), mask=inside[:, None])


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
    tiles: Tiles = Tiles(),  # noqa: B008 (frozen)
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
    """
    num_tokens, heads, size = queries.shape
    num_reqs, (_, page, kv_heads, _) = contexts.shape[0], keys.shape
    assert keys.stride() == values.stride() and queries.stride()[1:] == (size, 1)
    _verify_attention_kernel[(num_tokens // tiles.queries + num_reqs, kv_heads)](
        queries,
        keys,
        values,
        out,
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
        num_reqs,
        longest,
        PAGE=page,
        RATIO=heads // kv_heads,
        SIZE=size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
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
