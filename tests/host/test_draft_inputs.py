# SPDX-License-Identifier: Apache-2.0
"""The host's input kernel is compiled for every block in the first step, whose drafts stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draft_harness as harness
import pytest
import torch
from draft_harness import BLOCK, HIDDEN, TAPS, DraftHost, Step
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash

from vllm_dspark.engine.draft_inputs import every_block, longest_queries
from vllm_dspark.engine.proposer import DSparkProposer

BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(drafts per request, block) of every launch of the host's kernel."""
    seen: list[tuple[int, int]] = []
    kernel = dflash._prepare_dflash_inputs_kernel

    class Recorded:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                # Its integer arguments end with queries, drafts, three limits and a rank.
                seen.append((args[-5], kwargs["BLOCK_SIZE"]))
                kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(dflash, "_prepare_dflash_inputs_kernel", Recorded())
    return seen


def host(tmp_path: Path, target: Path, **draft: Any) -> DraftHost:
    config = harness.draft_config(**draft)
    checkpoint = harness.write_checkpoint(tmp_path, config, harness.draft_weights(config))
    return DraftHost(harness.engine_config(target, checkpoint), DSparkProposer)


def steps() -> list[Step]:
    """Two requests: a prompt of six tokens, and one of three."""
    generator = torch.Generator().manual_seed(5)
    return [
        Step(list(range(count)), 0, 7, torch.randn(count, len(TAPS) * HIDDEN, generator=generator))
        for count in (6, 3)
    ]


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("widths", [(BLOCK,), (1, 2, BLOCK)])
def test_the_first_step_runs_every_block_and_drafts_as_usual(
    widths: tuple[int, ...],
    from_anchor: bool,
    target: Path,
    tmp_path: Path,
    launches: list[tuple[int, int]],
) -> None:
    usual = host(tmp_path / "usual", target, from_anchor=from_anchor)
    expected = usual.propose(steps())
    launches.clear()
    warming = host(tmp_path / "warming", target, from_anchor=from_anchor)
    warming.proposer.families.allow(widths)
    warming.proposer._inputs_warm = False  # as on a GPU
    original = dflash.prepare_dflash_inputs
    tokens, confidence = warming.propose(steps())
    assert dflash.prepare_dflash_inputs is original
    assert tokens.tolist() == expected[0].tolist()
    assert torch.equal(confidence, expected[1])
    drafts = warming.proposer.num_speculative_steps
    for width in {drafts, *(w for w in widths if w == 1)}:
        met = {block for seen, block in launches if seen == width}
        assert met == {block for block in BLOCKS if block > width + (not from_anchor)}
    count = len(launches)
    warming.propose(steps())
    assert len(launches) == count + 1, "only the first step does this"


def test_the_longest_queries_are_of_one_block_each() -> None:
    for num_query in range(1, 12):
        longest = longest_queries(num_query)
        blocks = [1 << (length + num_query - 1).bit_length() for length in longest]
        assert longest[0] >= 1
        assert blocks == [b for b in BLOCKS if b > num_query]


def test_a_failing_step_leaves_the_hosts_function() -> None:
    original = dflash.prepare_dflash_inputs
    with pytest.raises(KeyError), every_block(dflash, (BLOCK,)):
        raise KeyError
    assert dflash.prepare_dflash_inputs is original
