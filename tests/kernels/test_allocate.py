# SPDX-License-Identifier: Apache-2.0
"""The split kernel against the core's allocation: equal to the last draft."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import DEVICE

from vllm_dspark.kernels.allocate import allocate, allocate_reference

NAN, INF = float("nan"), float("inf")
PALETTES = {
    "smooth": None,
    "ties": [0.5, 0.25, 1.0],
    "saturated": [1.0, 1.0, 1.0, 0.0],
    "one value": [0.75],
    "dead": [0.0, -0.0],
    "denormal": [1e-38, 1e-30, 1e-8, 1.0],
    "neighbours": [0.9, float(np.nextafter(np.float32(0.9), np.float32(1)))],
    "doubtful": [0.5, NAN, 0.9, 1.0],
    "out of range": [0.5, 0.9, 1.5, -0.25, INF, -INF],
}


def split(
    confidence: np.ndarray,
    lens: np.ndarray,
    budget: int,
    *,
    base: np.ndarray | None = None,
    bonus: int = 1,
    max_reqs: int | None = None,
    slots: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Admitted drafts, `query_start_loc`, `cu_num_logits`; rows of `confidence` in batch order."""
    count, gamma = confidence.shape
    total = count if max_reqs is None else max_reqs
    slots = np.arange(count) if slots is None else slots
    base = np.ones(count, np.int64) if base is None else base
    by_slot = np.full((total, gamma), NAN, np.float32)
    by_slot[slots] = confidence
    query_start_loc = torch.full((total + 1,), -99, dtype=torch.int32, device=DEVICE)
    admitted, cu_num_logits = allocate(
        torch.from_numpy(by_slot).to(DEVICE),
        torch.from_numpy(slots.astype(np.int64)).to(DEVICE),
        torch.from_numpy(lens.astype(np.int32)).to(DEVICE),
        torch.from_numpy(base.astype(np.int32)).to(DEVICE),
        budget,
        bonus,
        int(base.sum()) + budget,
        query_start_loc,
    )
    return tuple(found.cpu().numpy() for found in (admitted, query_start_loc, cu_num_logits))


def check(
    confidence: np.ndarray, lens: np.ndarray, budget: int, seed: int = 0, bonus: int = 1
) -> np.ndarray:
    """Compare every output with its definition; returns the admitted drafts."""
    rng = np.random.default_rng(seed)
    count = len(lens)
    max_reqs = count + int(rng.integers(0, 5))
    slots = rng.permutation(max_reqs)[:count]
    base = rng.integers(1, 9, count)
    admitted, starts, logits = split(
        confidence, lens, budget, base=base, bonus=bonus, max_reqs=max_reqs, slots=slots
    )
    assert admitted.tolist() == allocate_reference(confidence, lens, budget).tolist()
    assert int(admitted.sum()) == budget
    assert (admitted <= lens).all()
    assert starts[0] == logits[0] == 0
    assert starts[1 : count + 1].tolist() == np.cumsum(base + admitted).tolist()
    assert (starts[count + 1 :] == base.sum() + budget).all(), "entries past the batch"
    assert logits[1:].tolist() == np.cumsum(admitted + bonus).tolist()
    return admitted


def draw(rng: np.random.Generator, palette: str, count: int, gamma: int) -> np.ndarray:
    values = PALETTES[palette]
    if values is None:
        return rng.random((count, gamma)).astype(np.float32)
    return rng.choice(np.array(values, np.float32), (count, gamma))


@pytest.mark.parametrize("palette", sorted(PALETTES))
@pytest.mark.parametrize("seed", range(8))
def test_equals_the_core(seed: int, palette: str) -> None:
    rng = np.random.default_rng([seed, len(palette)])
    count, gamma = int(rng.integers(1, 21)), int(rng.integers(1, 10))
    lens = rng.integers(0, gamma + 1, count) if seed % 2 else np.full(count, gamma)
    check(draw(rng, palette, count, gamma), lens, round(rng.random() * int(lens.sum())), seed)


@pytest.mark.parametrize("palette", sorted(PALETTES))
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_budgets_at_the_ends(palette: str, gamma: int) -> None:
    rng = np.random.default_rng(gamma)
    count = 5
    confidence, lens = draw(rng, palette, count, gamma), rng.integers(0, gamma + 1, count)
    lens[0] = gamma
    total = int(lens.sum())
    assert check(confidence, lens, 0).tolist() == [0] * count
    assert int(check(confidence, lens, 1).max()) == 1
    assert check(confidence, lens, total).tolist() == lens.tolist()
    check(confidence, lens, total - 1)


def test_no_drafts_at_all() -> None:
    confidence = np.full((3, 4), 0.5, np.float32)
    assert check(confidence, np.zeros(3, np.int64), 0).tolist() == [0, 0, 0]


def test_one_request_is_a_prefix() -> None:
    confidence = np.array([[0.1, 1.0, 1.0, 1.0]], np.float32)
    for budget in range(5):
        assert check(confidence, np.array([4]), budget).tolist() == [budget]


def test_ties_go_to_the_earlier_position_then_to_the_earlier_request() -> None:
    """A saturated sigmoid is exactly 1.0: this is the common case, not a corner."""
    confidence, lens = np.ones((4, 3), np.float32), np.full(4, 3)
    taken = [check(confidence, lens, budget).tolist() for budget in range(13)]
    assert taken[:6] == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [2, 1, 1, 1],
    ]
    assert taken[12] == [3, 3, 3, 3]


def test_a_doubtful_row_is_served_first_and_in_full() -> None:
    confidence = np.full((3, 4), 0.99, np.float32)
    confidence[1, 2] = NAN
    lens = np.full(3, 4)
    assert check(confidence, lens, 4).tolist() == [0, 4, 0]
    assert check(confidence, lens, 6).tolist() == [1, 4, 1]
    # What the row did not draft is no evidence against it.
    assert check(confidence, np.array([4, 2, 4]), 2).tolist() == [1, 1, 0]


def test_all_rows_doubtful_share_by_position() -> None:
    confidence = np.full((3, 4), NAN, np.float32)
    assert check(confidence, np.full(3, 4), 7).tolist() == [3, 2, 2]


def test_slots_without_drafts_never_win() -> None:
    confidence = np.ones((2, 4), np.float32)
    assert check(confidence, np.array([0, 4]), 3).tolist() == [0, 3]


def test_several_bonus_rows_per_request() -> None:
    rng = np.random.default_rng(3)
    check(draw(rng, "smooth", 6, 5), np.full(6, 5), 11, bonus=3)


def test_a_large_batch() -> None:
    rng = np.random.default_rng(4)
    count = 300
    lens = rng.integers(0, 8, count)
    for palette in ("smooth", "ties", "out of range"):
        check(draw(rng, palette, count, 7), lens, int(lens.sum()) // 3)


def test_survival_is_rounded_as_in_the_core() -> None:
    """Products in float64, compared as float32: a float32 product would order these differently."""
    rng = np.random.default_rng(5)
    confidence = rng.uniform(0.6, 1.0, (64, 7)).astype(np.float32)
    single = np.cumprod(confidence, axis=1, dtype=np.float32)
    double = np.cumprod(confidence.astype(np.float64), axis=1).astype(np.float32)
    assert (single != double).any(), "the case does not tell the two apart"
    for budget in range(0, 448, 37):
        check(confidence, np.full(64, 7), budget, seed=budget)


def test_padding_covers_every_entry_past_the_batch() -> None:
    """More entries than one block of rows holds."""
    lens = np.full(2, 3)
    _, starts, _ = split(np.full((2, 3), 0.5, np.float32), lens, 4, max_reqs=100)
    assert starts.tolist() == [0, 3, *[6] * 99]
