# SPDX-License-Identifier: Apache-2.0
"""The fused Markov step and confidence head, interpreted, against their definitions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from markov_cases import (
    Case,
    check_best,
    check_confidence,
    check_equal,
    check_logits,
    make_case,
)

from vllm_dspark.cpu import interpreter
from vllm_dspark.kernels.confidence import confidence
from vllm_dspark.kernels.markov_step import (
    MAX_RANK,
    LaunchOptions,
    draft_greedy,
    launch_options,
    markov_logits,
)

interpreter.install()

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Blocks of the vocabulary and tiles of requests that end inside the operands.
SMALL = LaunchOptions(block_vocab=32, tile_reqs=16, num_warps=4, num_stages=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 3, 17])
@pytest.mark.parametrize(("vocab", "rank"), [(77, 48), (128, 16), (200, 8)])
def test_equals_the_reference(num_reqs: int, vocab: int, rank: int, dtype: torch.dtype) -> None:
    """Sums of small integers are exact, so the tokens are equal; most maxima are tied."""
    check_equal(make_case(num_reqs, 4, vocab, rank, dtype=dtype, integers=True), SMALL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduced", [False, True])
def test_draws_the_best_token(reduced: bool, dtype: torch.dtype) -> None:
    check_best(make_case(5, 7, 150, 48, dtype=dtype, reduced=reduced), 1e-5, SMALL)


@pytest.mark.parametrize("num_reqs", [1, 16, 20, 40, 70])
def test_options_of_every_batch_size(num_reqs: int) -> None:
    check_equal(make_case(num_reqs, 3, 300, 24, dtype=torch.bfloat16, integers=True))


def test_reduced_vocabulary_feeds_target_ids_back() -> None:
    case = make_case(6, 5, 90, 16, integers=True, reduced=True)
    tokens = check_equal(case, SMALL)
    assert (tokens % 2 == 0).all() and (tokens >= 90).any(), "a draft id was not mapped"


def test_logits_of_another_dtype_than_the_weights() -> None:
    case = make_case(
        3, 3, 64, 16, dtype=torch.bfloat16, base_dtype=torch.float32, integers=True, seed=4
    )
    # Decided by less than bfloat16 can tell.
    case.base[:] += torch.linspace(0, 1e-4, 64)
    check_equal(case, SMALL)


def plain(base: list[list[float]]) -> Case:
    """One request whose Markov bias is zero, so that `base` `[width, vocab]` decides."""
    logits = torch.tensor([base])
    vocab = logits.shape[-1]
    return Case(
        torch.zeros(vocab, 16),
        torch.zeros(vocab, 16),
        logits,
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-1.0, -3.0, -0.5, -0.5], 2),
        ([NAN, -5.0, NAN, -4.0], 3),
        ([NAN, NAN, NAN, NAN], 0),
        ([-INF, -INF, -INF, -INF], 0),
        ([-INF, NAN, -INF, -1e38], 3),
        ([0.0, INF, INF, NAN], 1),
        ([-0.0, 0.0, -1.0, 0.0], 0),
        ([-1e-40, 1e-40, 0.0, 0.0], 1),
    ],
)
def test_ties_and_numbers_that_are_none(row: list[float], token: int) -> None:
    """Also where the tied candidates belong to different programs."""
    spread = [-INF] * 160
    spread[::40] = row
    for base, step in ((row + [-INF] * 12, 1), (spread, 40)):
        tokens = check_equal(plain([base, base]), SMALL)
        assert tokens.tolist() == [[token * step] * 2]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    """All real logits are minus infinity or negative, and padded columns read as zeros."""
    for value in (-INF, -5.0):
        assert check_equal(plain([[value] * 33]), SMALL).tolist() == [[0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 3, 17])
def test_logits_equal_the_reference(num_reqs: int, dtype: torch.dtype) -> None:
    case = make_case(num_reqs, 3, 77, 48, dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for position in range(3):
        check_logits(case, position, tolerance)


def test_operands_that_cannot_be_read_are_refused() -> None:
    case = make_case(2, 3, 40, 16)
    out = torch.empty(2, 40)
    for w1, w2, base in (
        (case.w1.bfloat16(), case.w2, case.base),
        (case.w1[:, :8].contiguous(), case.w2, case.base),
        (case.w1, case.w2[:39], case.base),
        (case.w1, torch.empty(16, 45).T, case.base),
        (case.w1, case.w2, torch.empty(40, 3, 2).permute(2, 1, 0)),
        (torch.empty(40, MAX_RANK + 1), torch.empty(40, MAX_RANK + 1), case.base),
    ):
        with pytest.raises(ValueError, match=r"W1|rank"):
            markov_logits(case.anchors, w1, w2, base[:, 0], out)
        tokens = torch.empty(2, 3, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"W1|rank"):
            draft_greedy(w1, w2, base, case.input_ids, case.anchor_idx, tokens)


@pytest.mark.parametrize("rank", [16, 48, 256, 300, MAX_RANK])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("limit", [64 << 10, 99 << 10, 163 << 10, 232_448])
def test_options_fit_the_device_and_are_few(rank: int, element_bytes: int, limit: int) -> None:
    variants = {launch_options(count, rank, element_bytes, limit) for count in range(1, 1025)}
    assert len(variants) <= 4
    for options in variants:
        assert options.block_vocab >= 16 and options.tile_reqs >= 16
        smallest = options.block_vocab == 16
        assert options.shared_bytes(rank, element_bytes) <= limit or smallest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 8, 48])
@pytest.mark.parametrize("bias", [True, False])
def test_confidence_equals_the_reference(rank: int, bias: bool, dtype: torch.dtype) -> None:
    check_confidence(3, 5, 96, rank, dtype, bias=bias)


def test_confidence_of_long_rows_and_single_columns() -> None:
    check_confidence(2, 1, 2500, 8, torch.float32)


def test_confidence_of_no_number_is_none() -> None:
    """The planner counts such a row as doubtful; a number would hide it."""
    hidden = torch.ones(2, 8)
    hidden[1, 3] = NAN
    out = confidence(hidden, torch.zeros(1, 8), None, torch.empty(1, 2))
    assert out[0, 0] == 0.5 and out[0, 1].isnan()


def test_confidence_refuses_a_weight_that_does_not_fit() -> None:
    hidden, out = torch.ones(2, 8), torch.empty(1, 2)
    for weight in (torch.zeros(1, 9), torch.zeros(1, 8).bfloat16()):
        with pytest.raises(
            ValueError, match=r"confidence weight .*expected torch.float32 \(1, 8\)"
        ):
            confidence(hidden, weight, None, out)


def test_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts what a compiler may not."""
    search = [str(Path(__file__).parents[2]), *sys.path]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(search), "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("kernel_compiler.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 7
    for kernel in compiled:
        assert kernel["shared"] <= 232_448, kernel
        assert kernel["matrix_product"] == kernel["kernel"].startswith(("greedy", "logits"))
        assert kernel["maximum"] == kernel["kernel"].startswith("greedy")
        assert kernel["overlap"] == kernel["kernel"].startswith("greedy")
