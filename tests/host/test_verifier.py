# SPDX-License-Identifier: Apache-2.0
"""Cutting a verified block at its window: what is kept, what is given back."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_dspark.engine.verifier import cap


@dataclass
class Output:
    """The fields of the host's sampler output that are read or passed on."""

    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor


def capped(sampled: list[int], rejected: list[int], window: list[int]) -> Output:
    tokens = torch.arange(len(sampled) * 8).reshape(-1, 8)
    output = Output(
        tokens, torch.tensor(sampled, dtype=torch.int32), torch.tensor(rejected, dtype=torch.int32)
    )
    before = tokens.clone(), output.num_sampled.clone(), output.num_rejected.clone()
    result = cap(output, torch.tensor(window, dtype=torch.int32))
    # The sampler's own tensors may be a graph's buffers: they are never written.
    assert torch.equal(output.sampled_token_ids, before[0])
    assert torch.equal(output.num_sampled, before[1])
    assert torch.equal(output.num_rejected, before[2])
    assert result.sampled_token_ids is tokens
    return result


def test_a_window_keeps_its_drafts_and_the_token_after_them() -> None:
    result = capped([8, 8, 3, 1], [0, 0, 5, 7], [7, 2, 5, 0])
    assert result.num_sampled.tolist() == [8, 3, 3, 1]
    assert result.num_rejected.tolist() == [0, 5, 5, 7]


def test_rows_that_commit_nothing_stay_so() -> None:
    """A prompt chunk samples no token, whatever its window says."""
    result = capped([0, 0], [0, 2], [0, 7])
    assert result.num_sampled.tolist() == [0, 0]
    assert result.num_rejected.tolist() == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sampled = rng.integers(0, 9, 16)
    rejected = 8 - sampled
    window = rng.integers(0, 8, 16)
    result = capped(sampled.tolist(), rejected.tolist(), window.tolist())
    assert (result.num_sampled + result.num_rejected).tolist() == [8] * 16
    assert result.num_sampled.tolist() == np.minimum(sampled, window + 1).tolist()
    assert result.num_sampled.dtype == torch.int32
