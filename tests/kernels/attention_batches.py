# SPDX-License-Identifier: Apache-2.0
"""Batches of verify blocks and prompts, and what a layer's attention reads of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from batches import DEVICE

PAGE, HEADS, KV_HEADS, BLOCK = 16, 8, 2, 8
BATCHES = {
    "one token": ([1], [1]),
    "a block alone": ([8], [8]),
    "blocks": ([3, 1, 8, 5], [40, 1, 23, 64]),
    "a slot without a request": ([8, 2, 0], [20, 2, 0]),
    "prompts": ([2, 1, 37, 12], [17, 16, 50, 12]),
    "a short request after a prompt": ([2, 9, 3], [17, 50, 70]),
    "a prompt alone": ([33], [33]),
}
"""Queries and contexts of each request."""


def operands(
    lens: list[int], contexts: list[int], dtype: torch.dtype, size: int = 16
) -> dict[str, Any]:
    """Operands of a layer, pages in random order, a key and its value side by side."""
    torch.manual_seed(len(lens))
    needed = [-(-length // PAGE) for length in contexts]
    pages = torch.zeros(len(lens), max(needed), dtype=torch.int32)
    for row, mine in enumerate(torch.randperm(sum(needed)).int().split(needed)):
        pages[row, : len(mine)] = mine
    cache = torch.randn(sum(needed), PAGE, KV_HEADS, 2 * size, device=DEVICE).to(dtype)
    keys, values = cache.split(size, dim=-1)
    starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE)
    return {
        "queries": torch.randn(sum(lens), HEADS, size, device=DEVICE).to(dtype),
        "keys": keys,
        "values": values,
        "starts": starts,
        "contexts": torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        "pages": pages.to(DEVICE),
        "scale": size**-0.5,
    }
