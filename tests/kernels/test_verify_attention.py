# SPDX-License-Identifier: Apache-2.0
"""Attention with tiles as small as a block, against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_batches import BATCHES, BLOCK, HEADS, KV_HEADS, operands
from batches import DEVICE

from vllm_dspark.kernels.verify_attention import (
    Scratch,
    Splits,
    Tiles,
    from_prompts_on,
    verify_attention,
    verify_attention_reference,
)

pytestmark = pytest.mark.usefixtures("by_value")


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether they differ by less than rounding makes them."""
    # Matrix products of float32 are rounded to 19 bits on a GPU.
    coarse = got.dtype is torch.bfloat16 or DEVICE.type == "cuda"
    return bool((got.float() - want.float()).abs().max() < (0.03 if coarse else 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", [Tiles(4, 32, 4, 2), Tiles(8, 16, 4, 2)], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_requests_of_a_block_equal_the_definition_and_others_are_left(
    name: str, tiles: Tiles, dtype: torch.dtype
) -> None:
    given = operands(*BATCHES[name], dtype)
    out = torch.full_like(given["queries"], float("nan"))
    verify_attention(**given, out=out, longest=BLOCK, tiles=tiles)
    want = verify_attention_reference(**given)
    for start, end in itertools.pairwise(given["starts"].tolist()):
        mine = slice(start, end)
        if end - start > BLOCK:
            assert out[mine].isnan().all()
        elif end > start:
            assert close(out[mine], want[mine])


@pytest.mark.parametrize("splits", [Splits(2, 16), Splits(8, 16), Splits(8, 48)], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_splits_put_together_equal_the_definition(name: str, splits: Splits) -> None:
    given = operands(*BATCHES[name], torch.bfloat16)
    tokens, slots = len(given["queries"]), len(given["contexts"])
    scratch = Scratch(8 * tokens * HEADS, 8 * slots * KV_HEADS, 16, DEVICE)
    want = verify_attention_reference(**given)
    # The counters are good for another launch.
    for _ in range(2):
        out = torch.full_like(given["queries"], float("nan"))
        tiles = Tiles(8, 16, 4, 2)
        verify_attention(**given, out=out, longest=64, tiles=tiles, splits=splits, scratch=scratch)
        assert close(out, want)
        assert not scratch.ended.any()


@pytest.mark.parametrize("name", BATCHES)
def test_the_rest_of_a_batch_begins_with_its_first_prompt(name: str) -> None:
    lens, contexts = BATCHES[name]
    starts = operands(lens, contexts, torch.float32)["starts"]
    rest = from_prompts_on(starts, BLOCK, most_reqs=6)
    first = next((row for row, count in enumerate(lens) if count > BLOCK), len(lens))
    left = [0 if row < first else count for row, count in enumerate(lens)]
    assert rest.diff().tolist() == left
    assert rest[first:].tolist() == starts[first:].tolist()
