# SPDX-License-Identifier: Apache-2.0
"""Operands for the Markov and confidence kernels, and comparisons with their references.

Shared by the interpreted tests and those that need a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dspark.kernels.confidence import confidence, confidence_reference
from vllm_dspark.kernels.markov_step import (
    LaunchOptions,
    draft_greedy,
    draft_greedy_reference,
    markov_logits,
    markov_logits_reference,
)


@dataclass
class Case:
    """Operands of one block; the anchors are scattered in `input_ids`, as in the engine."""

    w1: torch.Tensor
    w2: torch.Tensor
    base: torch.Tensor
    input_ids: torch.Tensor
    anchor_idx: torch.Tensor
    draft_to_target: torch.Tensor | None = None

    @property
    def anchors(self) -> torch.Tensor:
        return self.input_ids[self.anchor_idx].long()

    def draft(self, options: LaunchOptions | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts and the tokens before them; the drafts lie in a wider buffer."""
        num_reqs, width, _ = self.base.shape
        buffer = torch.full((num_reqs + 1, width + 2), -7, device=self.base.device)
        previous = draft_greedy(
            self.w1,
            self.w2,
            self.base,
            self.input_ids,
            self.anchor_idx,
            buffer[:num_reqs, :width],
            self.draft_to_target,
            options,
        )
        assert (buffer[num_reqs] == -7).all() and (buffer[:, width:] == -7).all()
        return buffer[:num_reqs, :width].clone(), previous


def make_case(
    num_reqs: int,
    width: int,
    vocab: int,
    rank: int,
    *,
    dtype: torch.dtype = torch.float32,
    base_dtype: torch.dtype | None = None,
    integers: bool = False,
    reduced: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random operands. With `integers` all sums are exact, and ties abound. Logits lie in a padded
    buffer, W2 has rows of padding, and with `reduced` only every other target id is a draft id.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        if integers:
            values = torch.randint(-2, 3, shape, generator=generator, device=device).float()
        else:
            values = torch.randn(shape, generator=generator, device=device)
        return values

    targets = 2 * vocab if reduced else vocab
    padded = draw(num_reqs * width, vocab + 16).to(base_dtype or dtype)
    scale = 1.0 if integers else rank**-0.5
    last = torch.randint(0, targets, (num_reqs,), generator=generator, device=device)
    input_ids = torch.full((num_reqs * (width + 1),), 1, dtype=torch.int32, device=device)
    anchor_idx = torch.arange(num_reqs, device=device) * (width + 1)
    input_ids[anchor_idx] = last.int()
    return Case(
        w1=draw(targets, rank).to(dtype),
        w2=(scale * draw(vocab + 5, rank)).to(dtype),
        base=padded[:, :vocab].view(num_reqs, width, vocab),
        input_ids=input_ids,
        anchor_idx=anchor_idx,
        draft_to_target=torch.arange(vocab, device=device) if reduced else None,
    )


def check_equal(case: Case, options: LaunchOptions | None = None) -> torch.Tensor:
    """The kernel's block is the reference's, token for token; returns it."""
    tokens, previous = case.draft(options)
    expected, before = draft_greedy_reference(
        case.w1, case.w2, case.base, case.anchors, case.draft_to_target
    )
    assert tokens.tolist() == expected.tolist()
    assert previous.tolist() == before.tolist()
    return tokens


def check_best(case: Case, tolerance: float, options: LaunchOptions | None = None) -> None:
    """Every token has the highest logit, up to rounding, after the tokens that were drawn."""
    tokens, previous = case.draft(options)
    assert previous[:, 0].tolist() == case.anchors.tolist()
    assert previous[:, 1:].tolist() == tokens[:, :-1].tolist()
    for k in range(case.base.shape[1]):
        logits = markov_logits_reference(previous[:, k], case.w1, case.w2, case.base[:, k])
        drawn = tokens[:, k] if case.draft_to_target is None else tokens[:, k] // 2
        chosen = logits.gather(1, drawn[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen).max().item() <= tolerance


def check_logits(case: Case, position: int, tolerance: float) -> None:
    """The kernel's logits of one position are the reference's, rounded once."""
    base = case.base[:, position]
    out = torch.full((base.shape[0], base.shape[1] + 3), 7.0, dtype=base.dtype, device=base.device)
    markov_logits(case.anchors, case.w1, case.w2, base, out[:, : base.shape[1]])
    expected = markov_logits_reference(case.anchors, case.w1, case.w2, base)
    torch.testing.assert_close(
        out[:, : base.shape[1]].float(), expected, atol=tolerance, rtol=tolerance
    )
    assert (out[:, base.shape[1] :] == 7.0).all()


def check_confidence(
    num_reqs: int,
    width: int,
    hidden_size: int,
    rank: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    device: str = "cpu",
) -> None:
    """Probabilities with (`rank` > 0) or without a Markov embedding."""
    generator = torch.Generator(device).manual_seed(3)
    hidden = torch.randn(num_reqs * width, hidden_size, generator=generator, device=device)
    weight = torch.randn(1, hidden_size + rank, generator=generator, device=device)
    weight *= hidden_size**-0.5
    offset = torch.tensor([0.25], device=device) if bias else None
    table = previous = None
    if rank:
        table = torch.randn(50, rank, generator=generator, device=device).to(dtype)
        shape = (num_reqs, width)
        previous = torch.randint(0, 50, shape, generator=generator, device=device)
    hidden = hidden.to(dtype)
    buffer = torch.full((num_reqs + 1, width + 1), -1.0, device=device)
    out = confidence(hidden, weight, offset, buffer[:num_reqs, :width], table, previous)
    expected = confidence_reference(hidden, weight, offset, width, table, previous)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert (buffer[num_reqs] == -1.0).all() and (buffer[:, width] == -1.0).all()
