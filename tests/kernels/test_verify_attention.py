# SPDX-License-Identifier: Apache-2.0
"""The kernel that `benchmarks/verify_attention.py` times computes attention."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from batches import DEVICE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if DEVICE.type == "cpu":
        from vllm_dspark.cpu import interpreter

        # As it comes, it multiplies the bits of 16-bit floats.
        assert interpreter.install()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import verify_attention

    return verify_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_q, tile", [(4, 32), (8, 16)])
@pytest.mark.parametrize(
    "lens, contexts",
    [
        ([1], [1]),
        ([8], [8]),
        ([3, 1, 8, 5], [40, 1, 23, 64]),
        ([1, 37, 2], [17, 50, 16]),
    ],
    ids=["one token", "a block alone", "blocks", "with a prompt"],
)
def test_small_tiles_equal_their_definition(
    bench: ModuleType,
    lens: list[int],
    contexts: list[int],
    block_q: int,
    tile: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(len(lens))
    batch = bench.make_batch((8, 2, 16), lens, contexts, DEVICE, dtype)
    batch.out.fill_(float("nan"))
    got = bench.small_tiles(batch, block_q, tile)
    # Matrix products of float32 are rounded to 19 bits on a GPU.
    limit = 0.02 if dtype is torch.bfloat16 or DEVICE.type == "cuda" else 1e-5
    assert bench.difference(got, bench.reference(batch)) < limit
