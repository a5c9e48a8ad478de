# SPDX-License-Identifier: Apache-2.0
"""Attention with tiles as small as a block, against its definition, alone and before the host's."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import DEVICE

from vllm_dspark.engine import block_attention
from vllm_dspark.kernels.verify_attention import (
    Scratch,
    Splits,
    Tiles,
    from_prompts_on,
    verify_attention,
    verify_attention_reference,
)

PAGE, HEADS, KV_HEADS, BLOCK = 16, 8, 2, 8
LIMITS = block_attention.Limits(BLOCK, num_reqs=64, model_len=4096, least_slots=1)
BATCHES = {
    "one token": ([1], [1]),
    "a block alone": ([8], [8]),
    "blocks": ([3, 1, 8, 5], [40, 1, 23, 64]),
    "a slot without a request": ([8, 2, 0], [20, 2, 0]),
    "prompts": ([2, 1, 37, 12], [17, 16, 50, 12]),
    "a short request after a prompt": ([2, 9, 3], [17, 50, 70]),
    "a prompt alone": ([33], [33]),
}


@pytest.fixture(autouse=True)
def by_value() -> None:
    if DEVICE.type == "cpu":
        from vllm_dspark.cpu import interpreter

        # As it comes, it multiplies the bits of 16-bit floats.
        assert interpreter.install()


def operands(name: str, dtype: torch.dtype, size: int = 16) -> dict[str, Any]:
    """Operands of a layer, pages in random order, a key and its value side by side."""
    lens, contexts = BATCHES[name]
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
    given = operands(name, dtype)
    out = torch.full_like(given["queries"], float("nan"))
    verify_attention(**given, out=out, longest=BLOCK, tiles=tiles)
    want = verify_attention_reference(**given)
    for start, end in itertools.pairwise(given["starts"].tolist()):
        mine = slice(start, end)
        if end - start > BLOCK:
            assert out[mine].isnan().all()
        elif end > start:
            assert close(out[mine], want[mine])


@pytest.mark.parametrize(
    "splits",
    [
        Splits(2, 16),
        Splits(8, 16),
        Splits(8, 48),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", BATCHES)
def test_splits_put_together_equal_the_definition(name: str, splits: Splits) -> None:
    given = operands(name, torch.bfloat16)
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
    lens, _ = BATCHES[name]
    starts = operands(name, torch.float32)["starts"]
    rest = from_prompts_on(starts, BLOCK, most_reqs=6)
    first = next((row for row, count in enumerate(lens) if count > BLOCK), len(lens))
    left = [0 if row < first else count for row, count in enumerate(lens)]
    assert rest.diff().tolist() == left
    assert rest[first:].tolist() == starts[first:].tolist()


@dataclasses.dataclass
class Metadata:
    """What the host plans for a step, as far as it is read."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: Any = True
    scheduler_metadata: Any = "planned"
    max_num_splits: int = 32
    use_cascade: bool = False
    mm_prefix_query_range_tensor: Any = None
    rswa_prefix_lens: Any = None


class Host:
    """FlashAttention's implementation in a layer, and the calls that reach it."""

    num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, 16
    num_queries_per_kv = HEADS // KV_HEADS
    scale = 16**-0.5

    def __init__(self) -> None:
        self.calls: list[Metadata] = []

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: Any = None,
    ) -> torch.Tensor:
        self.calls.append(attn_metadata)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        starts, contexts = attn_metadata.query_start_loc, attn_metadata.seq_lens
        table, queries = attn_metadata.block_table, query[: attn_metadata.num_actual_tokens]
        done = verify_attention_reference(
            queries, keys, values, starts, contexts, table, self.scale
        )
        for start, end in itertools.pairwise(starts.tolist()):
            output[start:end] = done[start:end].flatten(1)
        return output


def layer_call(host: Host, name: str, limits: Any = LIMITS, **changes: Any) -> bool:
    """One forward pass of a layer behind ours; whether the output is attention's."""
    given = operands(name, torch.bfloat16)
    tokens = len(given["queries"])
    # The host's buffers are longer than the batch.
    query = torch.cat([given["queries"], given["queries"].new_zeros(3, HEADS, 16)])
    output = torch.full((tokens + 3, HEADS * 16), float("nan"), device=DEVICE).bfloat16()
    lens = BATCHES[name][0]
    metadata = Metadata(
        num_actual_tokens=tokens,
        max_query_len=max(lens),
        query_start_loc=given["starts"],
        seq_lens=given["contexts"],
        block_table=given["pages"],
        **changes,
    )
    cache = torch.cat([given["keys"], given["values"]], dim=-1).transpose(1, 2)
    scratch = Scratch(2 * tokens * HEADS, 64 * KV_HEADS, 16, DEVICE)
    forward = block_attention._before(host, limits, scratch)
    assert forward(SimpleNamespace(), query, None, None, cache, metadata, output) is output
    want = verify_attention_reference(**given).flatten(1)
    return close(output[:tokens], want) and bool(output[tokens:].isnan().all())


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_shared_out_between_ours_and_the_hosts(name: str) -> None:
    host = Host()
    assert layer_call(host, name)
    if max(BATCHES[name][0]) <= BLOCK:
        assert host.calls == []
        return
    (call,) = host.calls
    assert call.scheduler_metadata is None and call.max_num_splits == 32


def test_small_batches_stay_with_the_host() -> None:
    host = Host()
    slots = len(BATCHES["blocks"][0])
    assert layer_call(host, "blocks", dataclasses.replace(LIMITS, least_slots=slots))
    assert host.calls == []
    assert layer_call(host, "blocks", dataclasses.replace(LIMITS, least_slots=slots + 1))
    assert [call.scheduler_metadata for call in host.calls] == ["planned"]


@pytest.mark.parametrize(
    "rows, model_len, expected",
    [(64, 1024, 1), (64, 1025, 2), (64, 65536, 4), (600, 65536, 1), (300, 65536, 3), (2000, 9, 1)],
)
def test_splits_fit_the_scratch_and_the_contexts(rows: int, model_len: int, expected: int) -> None:
    scratch = Scratch(1000, 1, 16, DEVICE)
    assert block_attention.split_plan(rows, model_len, scratch).most == expected
    assert block_attention.split_plan(rows, model_len, None).most == 1


@pytest.mark.parametrize(
    "changes", [{"causal": False}, {"rswa_prefix_lens": 1}, {"use_cascade": True}], ids=str
)
def test_other_attention_stays_with_the_host(changes: dict[str, Any]) -> None:
    host = Host()
    assert layer_call(host, "blocks", **changes)
    (call,) = host.calls
    assert call.scheduler_metadata == "planned" and call.max_num_splits == 32
