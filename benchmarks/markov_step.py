# SPDX-License-Identifier: Apache-2.0
"""The fused Markov step and the confidence head against library calls, on one GPU.

    python benchmarks/markov_step.py --out benchmarks/results/h200_markov.json

Both sides run inside CUDA graphs, as drafts do. Times are medians over replays, in microseconds. A
row holds one batch size and width: the host's way of drafting (embedding, matrix product, addition,
argmax, copy, position by position), the fused kernels, how many tokens agree with the naive twin,
and how far below the best logit a differing token lies. `--candidates` times more launch options.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from device_timing import median_ms

from vllm_dspark.cli.provenance import header, save
from vllm_dspark.kernels.confidence import confidence
from vllm_dspark.kernels.markov_step import (
    LaunchOptions,
    draft_greedy,
    draft_greedy_reference,
    launch_options,
    markov_logits_reference,
)

VOCAB, RANK, HIDDEN, GAMMA = 151_936, 256, 4096, 7
BATCHES = (1, 2, 4, 8, 32, 64, 128, 256)
WIDTHS = (7, 3)
CANDIDATES = tuple(
    LaunchOptions(block_vocab, tile_reqs, num_warps, 1, overlap)
    for overlap in (False, True)
    for block_vocab, tile_reqs, num_warps in (
        (64, 16, 4),
        (128, 16, 4),
        (128, 64, 8),
        (256, 64, 8),
    )
)


def candidates(num_reqs: int) -> list[LaunchOptions]:
    """Those that do not waste most of a tile."""
    return [other for other in CANDIDATES if other.tile_reqs <= max(num_reqs, 16)]


class Block:
    """Operands of one block, and the two ways to draft it."""

    def __init__(self, num_reqs: int, width: int, heads: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.num_reqs, self.width = num_reqs, width
        self.w1, self.w2 = heads
        shape = (num_reqs, width, VOCAB)
        self.base = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, 3)
        self.input_ids = torch.randint(0, VOCAB, (num_reqs * GAMMA,), device="cuda").int()
        self.anchor_idx = torch.arange(num_reqs, device="cuda") * GAMMA
        self.tokens = torch.zeros(num_reqs, GAMMA, dtype=torch.int64, device="cuda")

    def with_library(self) -> None:
        previous = self.input_ids[self.anchor_idx]
        for k in range(self.width):
            logits = self.base[:, k] + F.linear(F.embedding(previous, self.w1), self.w2)
            previous = logits.argmax(dim=-1)
            self.tokens[:, k] = previous

    def fused(self, options: LaunchOptions | None = None) -> torch.Tensor:
        tokens = self.tokens[:, : self.width]
        operands = (self.w1, self.w2, self.base, self.input_ids, self.anchor_idx, tokens)
        return draft_greedy(*operands, None, options)

    def agreement(self) -> dict[str, float]:
        """Share of tokens that the naive twin draws too, and the largest shortfall of a logit."""
        previous, drawn = self.fused(), self.tokens[:, : self.width].clone()
        anchors = self.input_ids[self.anchor_idx].long()
        expected, _ = draft_greedy_reference(self.w1, self.w2, self.base, anchors)
        worst = 0.0
        for k in range(self.width):
            logits = markov_logits_reference(previous[:, k], self.w1, self.w2, self.base[:, k])
            taken = logits.gather(1, drawn[:, k : k + 1])[:, 0]
            worst = max(worst, float((logits.amax(1) - taken).max()))
        return {"equal_tokens": float((drawn == expected).float().mean()), "shortfall": worst}


def median_us(body: Callable[[], object]) -> float:
    """Median time of a replay of `body`, compiled and warm."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return round(median_ms(graph.replay) * 1e3, 1)


def confidence_row(num_reqs: int, table: torch.Tensor) -> dict[str, Any]:
    weight = torch.randn(1, HIDDEN + RANK, device="cuda") * HIDDEN**-0.5
    bias, out = torch.randn(1, device="cuda"), torch.empty(num_reqs, GAMMA, device="cuda")
    hidden = torch.randn(num_reqs * GAMMA, HIDDEN, device="cuda").bfloat16()
    previous = torch.randint(0, VOCAB, (num_reqs, GAMMA), device="cuda")
    embeds = [table[previous[:, k]] for k in range(GAMMA)]

    def with_library() -> None:
        rows = torch.cat([hidden, torch.stack(embeds, 1).flatten(0, 1)], -1).float()
        out.copy_(torch.sigmoid(F.linear(rows, weight, bias)).view_as(out))

    library_us = median_us(with_library)
    fused_us = median_us(lambda: confidence(hidden, weight, bias, out, table, previous))
    return {"num_reqs": num_reqs, "library_us": library_us, "fused_us": fused_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--candidates", action="store_true", help="time further launch options")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    options = parser.parse_args()
    torch.manual_seed(0)
    heads = (
        torch.randn(VOCAB, RANK, device="cuda").bfloat16(),
        (torch.randn(VOCAB, RANK, device="cuda") * RANK**-0.5).bfloat16(),
    )
    began = time.monotonic()
    rows = []
    for num_reqs in options.batches:
        for width in WIDTHS:
            block = Block(num_reqs, width, heads)
            row: dict[str, Any] = {"num_reqs": num_reqs, "width": width}
            row["library_us"], row["fused_us"] = (
                median_us(block.with_library),
                median_us(block.fused),
            )
            row["ratio"] = round(row["library_us"] / row["fused_us"], 2)
            row |= block.agreement() | {"options": asdict(launch_options(num_reqs, RANK, 2))}
            if options.candidates:
                row["candidates_us"] = {
                    str(tuple(asdict(other).values())): median_us(
                        functools.partial(block.fused, other)
                    )
                    for other in candidates(num_reqs)
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    document = {
        **header(["python", *sys.argv], options.commit),
        "vocabulary": VOCAB,
        "rank": RANK,
        "seconds": round(time.monotonic() - began, 1),
        "blocks": rows,
        "confidences": [confidence_row(num_reqs, heads[0]) for num_reqs in options.batches],
    }
    if options.out is not None:
        save(document, options.out)


if __name__ == "__main__":
    main()
