# SPDX-License-Identifier: Apache-2.0
"""A target and a draft small enough for a thousand steps in a second, split over ranks.

The target's next token is a function of the all-reduced input row. Ranks with equal rows get the
one right answer; ranks whose rows stand for different requests or positions get another token, as
in a real model, where the all-reduce adds unrelated rows without any complaint.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

VOCABULARY = 997


def input_rows(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64 value of every input row."""
    return ids.astype(np.int64) * 100_003 + positions


def next_tokens(rows: np.ndarray) -> np.ndarray:
    """Greedy next token after every row."""
    return (rows * 31 + 7) % VOCABULARY


class SplitTarget:
    """The target of one rank."""

    def __init__(self, group: object, world_size: int) -> None:
        self._group = group
        self._world_size = world_size
        self.shape_mismatches = 0
        """Steps in which a real collective would have hung."""

    def forward(self, rows: np.ndarray, graph_tokens: int) -> np.ndarray:
        """Next tokens after `rows`, which run on a graph of `graph_tokens`."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world_size)]
        dist.all_gather(sizes, torch.tensor([graph_tokens]), group=self._group)
        if len({int(size) for size in sizes}) > 1:
            self.shape_mismatches += 1
            return next_tokens(rows)
        padded = np.zeros(graph_tokens, dtype=np.int64)
        padded[: len(rows)] = rows
        total = torch.from_numpy(padded)
        dist.all_reduce(total, group=self._group)
        return next_tokens(total.numpy()[: len(rows)] // self._world_size)


def draft_block(
    request: int, position: int, token: int, gamma: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and confidences `[gamma]` of the block after `token`; equal on every rank.

    A slot is right with its confidence's probability, and what follows a wrong one continues it.
    """
    random = np.random.default_rng((request, position))
    confidence = random.beta(6.0, 1.0 + 3.0 * random.random(), gamma).astype(np.float32)
    right = random.random(gamma) < confidence
    ids = np.zeros(gamma, dtype=np.int64)
    for slot in range(gamma):
        row = input_rows(np.array([token]), np.array([position + slot]))
        token = int(next_tokens(row)[0])
        if not right[slot]:
            token = (token + 1 + request) % VOCABULARY
        ids[slot] = token
    return ids, confidence


def continuation(request: int, prompt_tokens: int, count: int) -> list[int]:
    """What the target alone writes after a prompt that ends in token `request`."""
    token, written = request % VOCABULARY, []
    for position in range(prompt_tokens - 1, prompt_tokens - 1 + count):
        token = int(next_tokens(input_rows(np.array([token]), np.array([position])))[0])
        written.append(token)
    return written
