# SPDX-License-Identifier: Apache-2.0
"""Vectorised sums behind `metrics.MetricsWriter`: length histograms and reliability.

Everything is accumulated at the finest grain once per step and turned into counters only when it is
published; no function loops over requests.
"""

import copy
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

RELIABILITY_BINS = 10

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.floating]
Key = tuple[str, tuple[str, ...]]  # metric name, label values


class Histogram:
    """Counts of one histogram; bucket i holds values in (edges[i-1], edges[i]]."""

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        other = Histogram(self.edges)
        other.counts, other.sum = self.counts.copy(), self.sum
        return other


class Lengths:
    """How many requests had how many scheduled, admitted and accepted drafts."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.rows = np.zeros((3, gamma + 1), dtype=np.int64)

    def add(self, scheduled: IntArray, admitted: IntArray, accepted: IntArray) -> str:
        """Count one step, arrays [num_reqs]; returns "" or why all of it was refused."""
        size = self.gamma + 1
        if not len(scheduled) == len(admitted) == len(accepted):
            return "lengths_of_arrays_differ"
        try:
            rows = [np.bincount(lens, None, size) for lens in (scheduled, admitted, accepted)]
        except (ValueError, TypeError):
            return "not_a_count"
        if any(len(row) > size for row in rows):
            return "above_gamma"
        if np.greater(admitted, scheduled).any():
            return "admitted_above_scheduled"
        if np.greater(accepted, admitted).any():
            return "accepted_above_admitted"
        for mine, row in zip(self.rows, rows, strict=True):
            mine += row
        return ""

    def counts(self) -> dict[Key, float]:
        """Token totals and per-position counters."""
        scheduled, admitted, accepted = (self.rows @ np.arange(self.gamma + 1)).tolist()
        counts: dict[Key, float] = {
            ("draft_tokens_scheduled", ()): scheduled,
            ("draft_tokens_admitted", ()): admitted,
            ("draft_tokens_trimmed", ()): scheduled - admitted,
            ("draft_tokens_accepted", ()): accepted,
            ("draft_tokens_rejected", ()): admitted - accepted,
        }
        # A request with at least k + 1 drafts has one at position k.
        reached = self.rows[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:].tolist()
        for name, row in zip(("scheduled", "admitted", "accepted"), reached, strict=True):
            for position, count in enumerate(row):
                counts["position_" + name, (str(position),)] = count
        return counts

    def verify_len(self) -> Histogram:
        """Histogram of the verify length (anchor included, 1..gamma+1)."""
        histogram = Histogram(range(1, self.gamma + 2))
        histogram.counts[:-1] = self.rows[1].tolist()
        histogram.sum = float(self.rows[1] @ np.arange(1, self.gamma + 2))
        return histogram

    def copy(self) -> "Lengths":
        other = Lengths(self.gamma)
        other.rows = self.rows.copy()
        return other


class Reliability:
    """Sums of predicted and observed survival per (position, bin), over verified drafts."""

    def __init__(self, gamma: int) -> None:
        size = gamma * RELIABILITY_BINS
        self.gamma = gamma
        # The slot `size` collects drafts that were not verified or not usable.
        self.predicted = np.zeros(size + 1)
        self.outcomes = np.zeros(2 * (size + 1), dtype=np.int64)  # [slot, survived] flattened
        reached = np.arange(gamma) < np.arange(gamma + 1)[:, None]
        first_slot = np.arange(gamma) * RELIABILITY_BINS
        # Row a: slot offset by position when `a` drafts are verified; survival when `a` accepted.
        self._offset = np.where(reached, first_slot, size).astype(np.intp)
        self._survived = reached.astype(np.intp)

    def add(self, survivals: FloatArray, admitted: IntArray, accepted: IntArray) -> int:
        """Count one step; survivals [num_reqs, gamma], lengths [num_reqs] in 0..gamma.

        Returns how many survivals of verified drafts were not a number in [0, 1]; those are left
        out, as are all drafts that were not verified.
        """
        size = self.gamma * RELIABILITY_BINS
        offset = np.take(self._offset, admitted, axis=0)
        unusable = 0
        if not (survivals.min() >= 0.0 and survivals.max() <= 1.0):  # also if any is NaN
            usable = (survivals >= 0.0) & (survivals <= 1.0)
            unusable = int(np.count_nonzero(~usable & (offset < size)))
            survivals = np.where(usable, survivals, 0.0)
            offset[~usable] = size
        slot = (survivals * RELIABILITY_BINS).astype(np.intp)
        np.minimum(slot, RELIABILITY_BINS - 1, out=slot)
        slot += offset
        np.minimum(slot, size, out=slot)
        self.predicted += np.bincount(slot.ravel(), survivals.ravel(), size + 1)
        slot += slot
        slot += np.take(self._survived, accepted, axis=0)
        self.outcomes += np.bincount(slot.ravel(), None, 2 * (size + 1))
        return unusable

    def counts(self) -> dict[Key, float]:
        """Counters by (position, lower edge of the bin)."""
        counts: dict[Key, float] = {}
        outcomes = self.outcomes.reshape(-1, 2)[:-1].tolist()
        predicted = self.predicted[:-1].tolist()
        for slot, (missed, survived) in enumerate(outcomes):
            position, lower = divmod(slot, RELIABILITY_BINS)
            labels = (str(position), str(lower / RELIABILITY_BINS))
            counts["reliability_drafts", labels] = missed + survived
            counts["reliability_predicted", labels] = predicted[slot]
            counts["reliability_observed", labels] = survived
        return counts

    def copy(self) -> "Reliability":
        other = copy.copy(self)  # shares the constant tables
        other.predicted, other.outcomes = self.predicted.copy(), self.outcomes.copy()
        return other
