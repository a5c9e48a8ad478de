# SPDX-License-Identifier: Apache-2.0
"""Greedy acceptance from logits, against its definition: equal to the last token."""

from __future__ import annotations

import pytest
import torch
from batches import DEVICE, GAMMA, Batch, draw_batch, make_batch

from vllm_dspark.engine.accept_buffers import AcceptBuffers
from vllm_dspark.kernels.greedy_accept import Accepted, greedy_accept, greedy_accept_reference

DTYPES = [torch.float32, torch.bfloat16]


def accept(batch: Batch, num_columns: int | None = None) -> Accepted:
    """Outcome of the kernels on this machine's device, as CPU tensors."""
    buffers = AcceptBuffers(batch.num_reqs, GAMMA, DEVICE)
    out = buffers.accept_buffers(batch.num_reqs)
    for tensor in out:
        tensor.fill_(-77)
    greedy_accept(*batch.to(DEVICE).arguments, out, num_columns)
    return Accepted(*(tensor.cpu() for tensor in buffers.read_accept(batch.num_reqs)))


def check(batch: Batch) -> Accepted:
    got, want = accept(batch), greedy_accept_reference(*batch.arguments, GAMMA)
    for name, have, wanted in zip(Accepted._fields, got, want, strict=True):
        assert have.dtype == wanted.dtype, name
        assert have.tolist() == wanted.tolist(), name
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(24))
def test_equals_its_definition(dtype: torch.dtype, seed: int) -> None:
    check(draw_batch(seed, count=1 + seed % 9, vocab=2 + 37 * seed % 300, dtype=dtype))


def test_a_vocabulary_of_many_blocks() -> None:
    """The best token lies in any of them, and the last one is not full."""
    batch = make_batch([7, 3, 0, 7], [7, 1, 0, 4], vocab=30_011, dtype=torch.bfloat16)
    got = check(batch)
    assert got.num_sampled.tolist() == [8, 2, 1, 5]
    assert got.num_rejected.tolist() == [0, 2, 0, 3]


def test_what_is_accepted_is_counted() -> None:
    got = check(make_batch([7, 7, 4, 0, 2], [7, 0, 2, 0, 1]))
    assert got.num_sampled.tolist() == [8, 1, 3, 1, 2]
    assert got.num_rejected.tolist() == [0, 7, 2, 0, 1]
    assert (got.sampled >= 0).sum(1).tolist() == got.num_sampled.tolist()


def test_a_placeholder_is_never_accepted() -> None:
    got = check(make_batch([4, 4, 4], [4, 4, 4], invalid_from={0: 0, 1: 2}))
    assert got.num_sampled.tolist() == [1, 3, 5]


def test_drafts_of_a_step_inside_the_prompt_are_placeholders() -> None:
    got = check(make_batch([3, 3], [3, 3], placeholder_rows=[0]))
    assert got.num_sampled.tolist() == [1, 4]
    assert got.num_rejected.tolist() == [3, 0]


def test_a_prompt_chunk_commits_nothing() -> None:
    got = check(make_batch([0, 2], [0, 2], prompt_rows=[0]))
    assert got.num_sampled.tolist() == [0, 3]
    assert got.num_rejected.tolist() == [0, 0]


@pytest.mark.parametrize("vocab", [50, 20_000])
def test_ties_go_to_the_lowest_token(vocab: int) -> None:
    """Also where the equals lie in different blocks of the vocabulary."""
    batch = make_batch([1], [0], vocab=vocab)
    batch.logits.zero_()
    batch.logits[:, [vocab - 1, vocab // 2, 7]] = 2.5
    assert check(batch).sampled[0].tolist() == [7, *[-1] * GAMMA]


def test_nan_never_wins() -> None:
    batch = make_batch([1, 0], [1, 0], vocab=9000)
    batch.logits[0, 8500] = torch.nan
    batch.logits[2] = torch.nan
    got = check(batch)
    assert got.num_sampled.tolist() == [2, 1]
    assert got.sampled[1, 0] == 0


def test_columns_past_the_draft_vocabulary_do_not_count() -> None:
    batch = make_batch([0], [0], vocab=40)
    batch.logits[0, 39] = 100.0
    assert accept(batch).sampled[0, 0] == 39
    want = batch.logits[0, :32].argmax()
    assert accept(batch, num_columns=32).sampled[0, 0] == want


def test_padding_requests_have_no_rows() -> None:
    """A captured launch has more requests and more logit rows than the batch."""
    batch = make_batch([3, 1], [2, 1])
    used = int(batch.cu_num_logits[-1])
    padded = Batch(
        torch.cat([batch.logits, torch.full((3, batch.logits.shape[1]), torch.inf)]),
        batch.input_ids,
        batch.positions,
        torch.cat([batch.logits_indices, torch.zeros(3, dtype=torch.int64)]),
        torch.cat([batch.cu_num_logits, torch.full((2,), used, dtype=torch.int32)]),
        torch.cat([batch.idx_mapping, torch.zeros(2, dtype=torch.int64)]),
        torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        batch.prefill_len,
    )
    got = check(padded)
    assert got.num_sampled.tolist() == [3, 2, 0, 0]
    assert got.num_rejected.tolist() == [1, 0, 0, 0]
    assert (got.sampled[2:] == -1).all()


def test_logits_may_be_a_slice_of_wider_rows() -> None:
    """The host cuts the padding of its vocabulary off without a copy."""
    batch = make_batch([2, 2], [1, 2], vocab=60)
    wide = torch.full((len(batch.logits), 64), torch.inf)
    wide[:, :60] = batch.logits
    got = accept(Batch(wide[:, :60], *batch.arguments[1:]))
    assert got.num_sampled.tolist() == [2, 3]
