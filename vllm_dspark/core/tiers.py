# SPDX-License-Identifier: Apache-2.0
"""Graph tiers: the token totals that a captured graph replays, and padding to them.

A ladder is built from the host's own capture sizes, never from a list of ours. Up to its largest
tier a step costs what the next tier costs; past it nothing pads and every total is realisable.
Where the host captures (tokens, requests) pairs, a step takes the smallest tier that holds both.
"""

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum

import numpy as np

from vllm_dspark.core.arrays import IntArray


class ExecMode(StrEnum):
    """How the target forward of a step runs."""

    FULL = "full"
    """One captured graph for the whole forward."""
    PIECEWISE = "piecewise"
    """Captured between attention calls."""
    EAGER = "eager"
    """No graph: continuous cost."""

    # Enum hashes in Python code; modes are dictionary keys several times per step.
    __hash__ = str.__hash__


class TierLadder:
    """Ascending tiers of one execution mode; an empty ladder pads nothing.

    Args:
        tiers: token counts, or (tokens, requests) pairs. Duplicates are dropped.

    Raises:
        ValueError: if a tier is not positive.
    """

    def __init__(self, tiers: Iterable[int] | Iterable[tuple[int, int]] = ()) -> None:
        pairs = {t if isinstance(t, tuple) else (int(t), 0) for t in tiers}
        if any(tokens < 1 or requests < 0 for tokens, requests in pairs):
            raise ValueError(f"graph tiers must be positive, got {sorted(pairs)}")
        self.buckets: tuple[tuple[int, int], ...] = tuple(sorted(pairs))
        self._two_dimensional = any(requests for _, requests in pairs)
        self._list = sorted({tokens for tokens, _ in pairs})
        self.tokens: IntArray = np.asarray(self._list, dtype=np.int64)
        self._by_requests: dict[int, TierLadder] = {}

    @property
    def limit(self) -> int:
        """Largest tier, 0 for an empty ladder: above it cost is continuous."""
        return self._list[-1] if self._list else 0

    def for_requests(self, requests: int) -> "TierLadder":
        """The one-dimensional ladder of tiers that hold `requests` requests."""
        if not self._two_dimensional:
            return self
        found = self._by_requests.get(requests)
        if found is None:
            held = (tokens for tokens, slots in self.buckets if slots == 0 or slots >= requests)
            found = self._by_requests[requests] = TierLadder(held)
        return found

    def bucket(self, tokens: int, requests: int) -> tuple[int, int] | None:
        """Smallest (tokens, requests) tier that holds both, or None past the ladder."""
        start = bisect_left(self.buckets, (tokens, 0))
        for size, slots in self.buckets[start:]:
            if slots == 0 or slots >= requests:
                return size, slots
        return None

    def pad(self, tokens: IntArray, requests: int = 0) -> IntArray:
        """Tokens that really run for each total, any shape; totals past the ladder stay as they
        are.
        """
        ladder = self.for_requests(requests)
        totals = np.asarray(tokens, dtype=np.int64)
        if not ladder._list:
            return totals
        index = np.searchsorted(ladder.tokens, totals)
        tiers = ladder.tokens[np.minimum(index, len(ladder._list) - 1)]
        return np.where(index < len(ladder._list), tiers, totals)

    def pad_one(self, tokens: int, requests: int = 0) -> int:
        """`pad` for one total, without array overhead."""
        tiers = self.for_requests(requests)._list
        index = bisect_left(tiers, tokens)
        return tiers[index] if index < len(tiers) else tokens

    def realisable(
        self, base: int, low: int, high: int, requests: int = 0
    ) -> tuple[IntArray, IntArray]:
        """Draft budgets worth evaluating for `base` other tokens, and the tokens that then run.

        Budgets inside a tier are dominated by its end, so the candidates are `low`, every tier end
        strictly between, every integer past the ladder, and `high`.

        Returns:
            `(budgets, padded)`, both `[n]` int64 and ascending, first `low`, last `high`.
        """
        ladder = self.for_requests(requests)
        tiers, limit = ladder._list, ladder.limit
        first = bisect_left(tiers, base + low + 1)
        last = bisect_left(tiers, base + high)
        ends = last - first if last > first else 0
        beyond_from = max(base + low + 1, limit + 1)
        beyond = max(base + high - beyond_from, 0)
        totals = np.empty(ends + beyond + 2, dtype=np.int64)
        totals[0] = base + low
        if ends:
            totals[1 : ends + 1] = ladder.tokens[first:last]
        if beyond:
            totals[ends + 1 : -1] = np.arange(beyond_from, base + high)
        totals[-1] = base + high
        padded = totals.copy()
        padded[0] = ladder.pad_one(base + low)
        padded[-1] = ladder.pad_one(base + high)
        return totals - base, padded
