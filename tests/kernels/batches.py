# SPDX-License-Identifier: Apache-2.0
"""Verification batches of every shape, laid out as the model runner lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GAMMA = 7


@dataclass(frozen=True)
class Batch:
    """Arguments of `greedy_accept`, and what the host wants besides."""

    logits: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    cu_num_logits: torch.Tensor
    idx_mapping: torch.Tensor
    seq_lens: torch.Tensor
    prefill_len: torch.Tensor

    @property
    def num_reqs(self) -> int:
        return len(self.idx_mapping)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return tuple(vars(self).values())

    @property
    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Request slot and place inside its request of every logit row."""
        counts = self.cu_num_logits.diff()
        slots = self.idx_mapping.repeat_interleave(counts)
        starts = self.cu_num_logits[:-1].repeat_interleave(counts)
        rows = torch.arange(len(slots), device=slots.device)
        return slots, (rows - starts).to(torch.int32)

    def to(self, device: torch.device) -> Batch:
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})


def make_batch(
    drafts: Sequence[int],
    accepted: Sequence[int],
    *,
    vocab: int = 97,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    prompt_rows: Sequence[int] = (),
    placeholder_rows: Sequence[int] = (),
    invalid_from: dict[int, int] | None = None,
    max_reqs: int | None = None,
) -> Batch:
    """A batch in which request `i` has `drafts[i]` drafts, of which `accepted[i]` agree with the
    target's argmax and the next one does not.

    prompt_rows: requests that read a chunk of their prompt (no drafts).
    placeholder_rows: requests whose step starts inside the prompt; nothing of them is accepted.
    invalid_from: per request, the draft from which on ids are -1.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(drafts)
    max_reqs = count + 2 if max_reqs is None else max_reqs
    slots = torch.randperm(max_reqs, generator=generator)[:count]
    rows = sum(drafts) + count
    logits = torch.randn(rows, vocab, generator=generator).to(dtype)
    argmax = logits.float().argmax(1)
    ids, positions, indices, lens, prefill = [], [], [], [], torch.zeros(max_reqs)
    row = 0
    for req, (width, agree) in enumerate(zip(drafts, accepted, strict=True)):
        base = 5 if req in prompt_rows else 1
        first = int(torch.randint(20, 40, (), generator=generator))
        ids += [3] * base
        indices += range(len(ids) - 1, len(ids) + width)
        for place in range(width):
            right = int(argmax[row + place])
            invalid = invalid_from is not None and place >= invalid_from.get(req, width)
            ids.append(-1 if invalid else right if place < agree else (right + 1) % vocab)
        positions += range(first, first + base + width)
        lens.append(first + base + width)
        inside = req in prompt_rows or req in placeholder_rows
        prefill[slots[req]] = first + base + (1 if req in prompt_rows else 0) if inside else first
        row += width + 1
    int32 = torch.int32
    return Batch(
        logits,
        torch.tensor(ids, dtype=int32),
        torch.tensor(positions),
        torch.tensor(indices),
        torch.tensor([0, *(width + 1 for width in drafts)]).cumsum(0).to(int32),
        slots,
        torch.tensor(lens, dtype=int32),
        prefill.to(int32),
    )


def draw_batch(seed: int, *, count: int, vocab: int, dtype: torch.dtype) -> Batch:
    """A random batch with prompt chunks, placeholders and invalid drafts among its requests."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int) -> list[int]:
        return torch.randint(0, high, (count,), generator=generator).tolist()

    kinds, drafts, accepted = numbers(8), numbers(GAMMA + 1), numbers(GAMMA + 1)
    prompt = [req for req, kind in enumerate(kinds) if kind == 0]
    for req in prompt:
        drafts[req] = 0
    return make_batch(
        drafts,
        [min(pair) for pair in zip(accepted, drafts, strict=True)],
        vocab=vocab,
        seed=seed,
        dtype=dtype,
        prompt_rows=prompt,
        placeholder_rows=[req for req, kind in enumerate(kinds) if kind == 1],
        invalid_from={req: seed % 3 for req, kind in enumerate(kinds) if kind == 2},
    )


def as_input_batch(batch: Batch, **fields: Any) -> Any:
    """What the verifier reads of the host's input batch."""
    from types import SimpleNamespace

    slots, places = batch.expanded
    given = {name: value for name, value in vars(batch).items() if name != "logits"}
    return SimpleNamespace(
        **given,
        num_reqs=batch.num_reqs,
        req_ids=[str(slot) for slot in batch.idx_mapping.tolist()],
        idx_mapping_np=batch.idx_mapping.cpu().numpy(),
        expanded_idx_mapping=slots,
        expanded_local_pos=places,
        cu_num_logits_np=batch.cu_num_logits.cpu().numpy(),
        seq_lens_cpu_upper_bound=batch.seq_lens.cpu(),
        num_draft_tokens=len(batch.logits_indices) - batch.num_reqs,
        has_structured_output_reqs=False,
        has_prefill=False,
        **fields,
    )
