# SPDX-License-Identifier: Apache-2.0
"""The fused Markov step and confidence head on a GPU, at the size of a served draft.

Run with `pytest -m gpu tests/kernels`; without the marker they are deselected.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))

from markov_cases import (  # noqa: E402
    Case,
    check_best,
    check_confidence,
    check_equal,
    check_logits,
    make_case,
)

from vllm_dspark.kernels.markov_step import draft_greedy  # noqa: E402

pytestmark = pytest.mark.gpu

VOCAB, RANK, HIDDEN, BLOCK = 151_936, 256, 4096, 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCHES = [1, 8, 64, 256]


@pytest.mark.parametrize("num_reqs", BATCHES)
def test_draws_the_best_token(num_reqs: int) -> None:
    check_best(make_case(num_reqs, BLOCK, VOCAB, RANK, dtype=torch.bfloat16, device="cuda"), 1e-4)


@pytest.mark.parametrize("num_reqs", BATCHES)
def test_ties_go_to_the_lowest_token(num_reqs: int) -> None:
    """Small integers: sums are exact, thousands of tokens tie, and any order of programs counts."""
    case = make_case(
        num_reqs, BLOCK, VOCAB, RANK, dtype=torch.bfloat16, integers=True, device="cuda"
    )
    tokens = check_equal(case)
    assert torch.equal(tokens, case.draft()[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 3, 17, 1000])
@pytest.mark.parametrize(("vocab", "rank"), [(1001, 48), (4096, 512), (32_000, 64)])
def test_other_shapes(num_reqs: int, vocab: int, rank: int, dtype: torch.dtype) -> None:
    case = make_case(num_reqs, 3, vocab, rank, dtype=dtype, integers=True, device="cuda")
    check_equal(case)
    check_best(make_case(num_reqs, 3, vocab, rank, dtype=dtype, reduced=True, device="cuda"), 1e-4)
    check_logits(case, 1, 2**-7)


@pytest.mark.parametrize("num_reqs", BATCHES)
def test_logits_equal_the_reference(num_reqs: int) -> None:
    case = make_case(num_reqs, BLOCK, VOCAB, RANK, dtype=torch.bfloat16, device="cuda")
    check_logits(case, BLOCK - 1, 2**-7)


def test_not_a_number() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 4, [-inf, nan, -1.0, -1.0], [-0.0, 0.0, nan, -1.0], [nan, inf, inf, 0.0]]
    base = torch.full((4, 2, 4 * 500), -inf, device="cuda")
    base[:, :, ::500] = torch.tensor(rows, device="cuda")[:, None]
    zeros = torch.zeros(2000, 32, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(4, dtype=torch.int32, device="cuda")
    case = Case(zeros, zeros, base, ids, ids.long())
    assert check_equal(case).tolist() == [[0, 0], [1000, 1000], [0, 0], [500, 500]]


@pytest.mark.parametrize("num_reqs", [8, 64])
def test_replays_in_a_graph(num_reqs: int) -> None:
    """Each replay reads what the buffers hold then, and starts from fresh cells."""
    case = make_case(num_reqs, BLOCK, VOCAB, RANK, dtype=torch.bfloat16, device="cuda")
    case.draft()
    graph = torch.cuda.CUDAGraph()
    buffer = torch.empty(num_reqs, BLOCK, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        previous = draft_greedy(
            case.w1, case.w2, case.base, case.input_ids, case.anchor_idx, buffer
        )
    for seed in (1, 2):
        other = make_case(
            num_reqs, BLOCK, VOCAB, RANK, dtype=torch.bfloat16, device="cuda", seed=seed
        )
        case.base.copy_(other.base)
        case.input_ids.copy_(other.input_ids)
        graph.replay()
        tokens, before = case.draft()
        assert torch.equal(buffer, tokens)
        assert torch.equal(previous, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", BATCHES)
@pytest.mark.parametrize("rank", [0, RANK])
def test_confidence_equals_the_reference(num_reqs: int, rank: int, dtype: torch.dtype) -> None:
    check_confidence(num_reqs, BLOCK, HIDDEN, rank, dtype, device="cuda")
