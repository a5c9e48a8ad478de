# SPDX-License-Identifier: Apache-2.0
"""What attention costs a verify step, and what it would cost with small tiles; one GPU.

    python benchmarks/verify_attention.py --out benchmarks/results/h200_attention.json

A verify step asks few queries of each context: five of them, on four heads of one KV head, are 20
rows, where FlashAttention 3 computes tiles of 64 to 192. Rows hold one batch: times of the host's
kernels (FlashAttention 3 with vLLM's 32 splits and with one, the same on blocks and prompts apart,
and vLLM's Triton kernel), of a kernel whose tile is one block of drafts, for several launch
options, and the time in which the keys and values alone could be read (`ceilings.py`). All run in
CUDA graphs; medians over replays, in microseconds per layer.

Rows are a 16-bit cache in pages, causal, no window: what the 8B shapes of `serving.py` serve.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_timing import median_ms

from vllm_dspark.cli.provenance import header, save
from vllm_dspark.kernels.verify_attention import (
    Scratch,
    Splits,
    Tiles,
    from_prompts_on,
    verify_attention,
    verify_attention_reference,
)

PAGE = 16
SHAPES = {"8b, heads of 64": (64, 16, 64), "8b, heads of 128": (32, 8, 128)}
"""Query heads, KV heads, size of a head."""
BATCHES = tuple(itertools.product((1, 8, 32, 128, 256), (400, 2000)))
"""Requests and mean context."""
PROMPTS = (0, 4)
"""Requests that read a prompt in the same step."""
_PROMPT, _BLOCK = 250, 8
_MOST_REQUESTS = 256
TILES = (Tiles(), Tiles(keys=32), Tiles(stages=3), Tiles(warps=8), Tiles(keys=128, warps=8))
SPLITS = (Splits(), Splits(2), Splits(4), Splits(4, 1024), Splits(4, 4096))


@dataclass
class Batch:
    """Operands of one layer; rows of `queries` are requests one after another."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    starts: torch.Tensor
    """`[num_reqs + 1]` int32 first query of each request."""
    contexts: torch.Tensor
    """`[num_reqs]` int32 tokens of each, its queries included."""
    pages: torch.Tensor
    """`[num_reqs, max_pages]` int32."""
    longest_query: int
    longest_context: int
    scratch: Scratch

    @property
    def scale(self) -> float:
        return float(self.queries.shape[-1] ** -0.5)


def make_batch(
    shape: tuple[int, int, int],
    lens: list[int],
    contexts: list[int],
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """A batch with `lens` queries at the end of `contexts` tokens, pages in random order."""
    heads, kv_heads, size = shape
    needed = [-(-length // PAGE) for length in contexts]
    order = torch.randperm(sum(needed), device=device).int()
    pages = torch.zeros(len(lens), max(needed), dtype=torch.int32, device=device)
    for row, mine in enumerate(order.split(needed)):
        pages[row, : len(mine)] = mine

    def noise(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, device=device, dtype=torch.float32).to(dtype)

    queries = noise(sum(lens), heads, size)
    # As vLLM lays them out: a token's key and value of one head lie side by side.
    keys, values = noise(sum(needed), PAGE, kv_heads, 2 * size).split(size, dim=-1)
    return Batch(
        queries=queries,
        keys=keys,
        values=values,
        out=torch.empty_like(queries),
        starts=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device),
        contexts=torch.tensor(contexts, dtype=torch.int32, device=device),
        pages=pages,
        longest_query=max(lens),
        longest_context=max(contexts),
        scratch=Scratch(
            max(splits.most for splits in SPLITS) * sum(lens) * heads,
            len(lens) * kv_heads,
            size,
            torch.device(device),
        ),
    )


# ------------------------------------------------------------------ small tiles


def small_tiles(batch: Batch, longest: int, tiles: Tiles, splits: Splits) -> None:
    """Attention of requests with at most `longest` queries."""
    verify_attention(
        batch.queries,
        batch.keys,
        batch.values,
        batch.out,
        batch.starts,
        batch.contexts,
        batch.pages,
        batch.scale,
        longest,
        tiles,
        splits,
        batch.scratch,
    )


def with_prompts(batch: Batch, longest: int, tiles: Tiles, splits: Splits) -> None:
    """Small tiles for blocks, FlashAttention from the first prompt on."""
    small_tiles(batch, longest, tiles, splits)
    rest = from_prompts_on(batch.starts, longest, _MOST_REQUESTS)
    flash_launch(batch, 1, rest, None)


def reference(batch: Batch) -> torch.Tensor:
    """What all of them compute."""
    return verify_attention_reference(
        batch.queries,
        batch.keys,
        batch.values,
        batch.starts,
        batch.contexts,
        batch.pages,
        batch.scale,
    )


# ------------------------------------------------------------------ the host's kernels


def _arguments(batch: Batch) -> dict[str, Any]:
    """What all of them take."""
    return {
        "q": batch.queries,
        "k": batch.keys,
        "v": batch.values,
        "out": batch.out,
        "cu_seqlens_q": batch.starts,
        "max_seqlen_q": batch.longest_query,
        "seqused_k": batch.contexts,
        "max_seqlen_k": batch.longest_context,
        "softmax_scale": batch.scale,
        "causal": True,
        "block_table": batch.pages,
    }


def flash(batch: Batch, splits: int) -> Callable[[], Any]:
    """FlashAttention 3 as vLLM calls it in a graph, planned ahead."""
    from vllm.vllm_flash_attn import get_scheduler_metadata

    heads, size = batch.queries.shape[1:]
    plan = get_scheduler_metadata(
        batch_size=len(batch.contexts),
        max_seqlen_q=batch.longest_query,
        max_seqlen_k=batch.longest_context,
        num_heads_q=heads,
        num_heads_kv=batch.keys.shape[2],
        headdim=size,
        cache_seqlens=batch.contexts,
        qkv_dtype=batch.queries.dtype,
        cu_seqlens_q=batch.starts,
        page_size=PAGE,
        causal=True,
        num_splits=splits,
    )
    return lambda: flash_launch(batch, splits, batch.starts, plan)


def flash_apart(batch: Batch) -> None:
    """FlashAttention 3 on the blocks, whose heads it packs into tiles, and then on the prompts."""
    rest = from_prompts_on(batch.starts, _BLOCK, _MOST_REQUESTS)
    # The first entry is where prompts begin.
    flash_launch(batch, 1, torch.minimum(batch.starts, rest[0]), None, longest_query=_BLOCK)
    flash_launch(batch, 1, rest, None)


def flash_launch(
    batch: Batch,
    splits: int,
    starts: torch.Tensor,
    plan: torch.Tensor | None,
    longest_query: int = 0,
) -> None:
    """FlashAttention 3 on the queries that `starts` names, planned ahead or by itself."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    longest_query = longest_query or batch.longest_query
    flash_attn_varlen_func(
        **_arguments(batch) | {"cu_seqlens_q": starts, "max_seqlen_q": longest_query},
        scheduler_metadata=plan,
        num_splits=splits,
        fa_version=3,
    )


def host_triton(batch: Batch) -> Callable[[], Any]:
    """vLLM's Triton kernel, without splits."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    return lambda: unified_attention(
        **_arguments(batch),
        window_size=(-1, -1),
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )


# ------------------------------------------------------------------ timing


def in_graph(body: Callable[[], Any]) -> Callable[[], None]:
    """Ten launches in a CUDA graph, so that what is timed is the device's work."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            body()
    return graph.replay


def microseconds(body: Callable[[], Any]) -> float:
    """Device time of one launch."""
    return round(median_ms(in_graph(body)) * 100.0, 1)


def draw(requests: int, mean: int, prompts: int) -> tuple[list[int], list[int]]:
    """Queries and contexts of a batch: 2 to 8 queries, contexts half to one and a half `mean`."""
    generator = torch.Generator().manual_seed(requests + mean)
    lens = torch.randint(2, 9, (requests,), generator=generator).tolist()
    contexts = torch.randint(mean // 2, mean * 3 // 2, (requests,), generator=generator).tolist()
    for row in range(max(requests - prompts, 0), requests):
        lens[row] = _PROMPT
        contexts[row] = max(contexts[row], _PROMPT)
    return lens, contexts


def row(name: str, requests: int, mean: int, prompts: int, read_tb_s: float) -> dict[str, Any]:
    """Times of all kernels on one batch.

    Raises:
        RuntimeError: a kernel does not compute attention.
    """
    shape = SHAPES[name]
    lens, contexts = draw(requests, mean, prompts)
    batch = make_batch(shape, lens, contexts, "cuda")
    body = with_prompts if prompts else small_tiles
    choices = [(tiles, SPLITS[0]) for tiles in TILES] + [(TILES[0], s) for s in SPLITS[1:]]
    tiles = {label(*choice): functools.partial(body, batch, _BLOCK, *choice) for choice in choices}
    host = {
        "flash_32_splits": flash(batch, 32),
        "flash_1_split": flash(batch, 1),
        "flash_apart": functools.partial(flash_apart, batch),
        "host_triton": host_triton(batch),
    }
    wanted, times = reference(batch), {}
    for kernel, body in (host | tiles).items():
        batch.out.zero_()
        times[kernel] = microseconds(body)
        if difference(batch.out, wanted) > 0.02:
            raise RuntimeError(f"{kernel} differs from its definition on {requests} requests")
    best = min(tiles, key=times.__getitem__)
    read = 2 * sum(contexts) * shape[1] * shape[2] * batch.keys.element_size()
    return {
        "shape": name,
        "requests": requests,
        "prompts": prompts,
        "queries": sum(lens),
        "context_tokens": sum(contexts),
        **{kernel: times[kernel] for kernel in host},
        "small_tiles": times[label(*choices[0])],
        "best_options": best,
        "by_options": {choice: times[choice] for choice in tiles},
        "read_bound": round(read / read_tb_s / 1e6, 1),
    }


def label(tiles: Tiles, splits: Splits) -> str:
    """Options in short."""
    chunk = f" of {splits.chunk}" if splits.most > 1 else ""
    sizes = f"{tiles.keys} keys, {tiles.warps} warps, {tiles.stages} stages"
    return f"{sizes}, {splits.most} splits{chunk}"


def difference(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, in units of the output's own size."""
    return float((out.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--read-tb-s", type=float, default=4.27, help="of `ceilings.py`")
    options = parser.parse_args()
    made_by = header(["python", *sys.argv], options.commit)
    found = []
    for name, (requests, mean), prompts in itertools.product(SHAPES, BATCHES, PROMPTS):
        if prompts > requests:
            continue
        found.append(row(name, requests, mean, prompts, options.read_tb_s))
        print(found[-1], flush=True)
    if options.out:
        save({**made_by, "read_tb_s": options.read_tb_s, "rows": found}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
