# SPDX-License-Identifier: Apache-2.0
"""Confidences to survivals, and the rule for rows that cannot be trusted.

Survival `a_k = prod(c_1..c_k)` is the predicted chance that the first k drafts of a block are all
accepted (DSpark paper, section 3.2.2). Invariants:

* survival never increases along a row, so "the b largest of the batch" is always a set of prefixes;
* a doubtful row (see `RowDoubt`) is judged alone: its values reach neither sums nor ranks of other
  rows. It verifies its full block, and its expectation is the running mean of the trusted rows;
* slots at or past a row's scheduled draft count are never read as evidence, whatever they hold.
"""

from enum import IntEnum

import numpy as np

from vllm_dspark.core.arrays import Float64Array, FloatArray, IntArray

_BITS_OF_ONE = 0x3F800000
_WIDE_BATCH = 256
"""Requests from which whole-row products beat `ufunc.accumulate`."""


class RowDoubt(IntEnum):
    """Why a row verifies its full block. `TRUSTED` rows compete for the budget."""

    TRUSTED = 0
    FRESH = 1
    """No confidence of this request has been seen yet."""
    STALE = 2
    """The confidences belong to another request or to a block that is too old."""
    NON_FINITE = 3
    """A scheduled slot holds NaN or infinity."""
    OUT_OF_RANGE = 4
    """A scheduled slot lies outside [0, 1]."""


_LAST_DOUBT = max(RowDoubt)


def assess_rows(
    confidence: FloatArray, draft_lens: IntArray, row_state: IntArray | None = None
) -> IntArray | None:
    """Doubt code of every row, or None when all rows are trusted (the usual case, and cheap).

    Args:
        confidence: `[num_reqs, gamma]`, conditional acceptance probabilities as the head gave them.
        draft_lens: `[num_reqs]`, scheduled drafts; a row without drafts is never doubtful.
        row_state: `[num_reqs]` `RowDoubt` codes known to the caller; an unknown code reads as
            STALE.

    Returns:
        `[num_reqs]` int8 codes. A code given by the caller wins over one found in the values.
    """
    in_range = _all_in_range(confidence)
    if in_range and (row_state is None or not np.count_nonzero(row_state)):
        return None
    # Requests come and go in most steps of a large batch; values that mean nothing are rare.
    codes = (
        np.zeros(len(draft_lens), dtype=np.int8)
        if in_range
        else _assess_values(confidence, np.asarray(draft_lens))
    )
    if row_state is not None:
        given = row_state.nonzero()[0]
        states = row_state[given]
        states[(states < 0) | (states > _LAST_DOUBT)] = RowDoubt.STALE
        codes[given] = states
    codes[np.asarray(draft_lens) == 0] = RowDoubt.TRUSTED
    return codes if np.count_nonzero(codes) else None


def _assess_values(confidence: FloatArray, draft_lens: IntArray) -> IntArray:
    """Doubt codes `[num_reqs]` int8 that the values of scheduled slots give."""
    scheduled = np.arange(confidence.shape[1]) < draft_lens[:, None]
    finite = np.isfinite(confidence)
    in_range = (confidence >= 0.0) & (confidence <= 1.0)
    codes = np.zeros(len(draft_lens), dtype=np.int8)
    codes[(scheduled & finite & ~in_range).any(axis=1)] = RowDoubt.OUT_OF_RANGE
    codes[(scheduled & ~finite).any(axis=1)] = RowDoubt.NON_FINITE
    return codes


def _all_in_range(confidence: FloatArray) -> bool:
    """Whether every value lies in [0, 1]; may say no for -0.0 and for an empty batch."""
    if not confidence.size or confidence.dtype != np.float32:
        return False
    # As unsigned integers, floats from 0.0 to 1.0 are exactly those up to the bits of 1.0: negative
    # ones have the sign bit set, infinities and NaN the largest exponent.
    return bool(np.maximum.reduce(confidence.view(np.uint32), axis=None) <= _BITS_OF_ONE)


def count_doubts(codes: IntArray | None) -> dict[RowDoubt, int]:
    """Rows per reason, reasons that did not occur left out."""
    if codes is None:
        return {}
    counts = np.bincount(codes, minlength=len(RowDoubt))
    return {reason: int(counts[reason]) for reason in RowDoubt if reason and counts[reason]}


def survival_by_position(confidence: FloatArray) -> Float64Array:
    """Running product `[gamma, num_reqs]` (position-major) of trusted confidences, float64."""
    if confidence.shape[1] < _WIDE_BATCH:
        return np.multiply.accumulate(confidence, axis=0, dtype=np.float64)
    # accumulate walks the batch column by column; these are gamma products of whole rows.
    table = confidence.astype(np.float64)
    for position in range(1, len(table)):
        np.multiply(table[position], table[position - 1], out=table[position])
    return table


def survival(
    confidence: FloatArray,
    draft_lens: IntArray | None = None,
    row_state: IntArray | None = None,
    prior: Float64Array | None = None,
) -> tuple[Float64Array, IntArray]:
    """Survivals `[num_reqs, gamma]` float64 and the doubt code `[num_reqs]` of every row.

    Doubtful rows carry `prior` `[gamma]` (ones if absent: the full block is verified either way);
    slots past the scheduled drafts carry 0.
    """
    confidence = np.asarray(confidence)
    num_reqs, gamma = confidence.shape
    lens = np.full(num_reqs, gamma) if draft_lens is None else np.asarray(draft_lens)
    codes = assess_rows(confidence, lens, row_state)
    if codes is None:
        codes = np.zeros(num_reqs, dtype=np.int8)
    scheduled = np.arange(gamma) < lens[:, None]
    trusted = (codes == RowDoubt.TRUSTED)[:, None]
    table = survival_by_position(np.where(scheduled & trusted, confidence, 0.0).T).T
    fallback = np.ones(gamma) if prior is None else prior
    return np.where(trusted, table, np.where(scheduled, fallback, 0.0)), codes


class RunningSurvival:
    """Per-position means of the trusted survivals: what a row without evidence is worth.

    The first evidence replaces the configured start value; later steps enter with weight `rate`.
    The mean never increases along positions. Once every position has been seen, one step in `EVERY`
    is enough (`due`). Deterministic: equal inputs give equal means on every
    rank.
    """

    EVERY = 8

    def __init__(self, gamma: int, start_confidence: float = 0.5, rate: float = 0.05) -> None:
        self.mean: Float64Array = start_confidence ** np.arange(1, gamma + 1, dtype=np.float64)
        self.rate = rate
        self._seen = np.zeros(gamma, dtype=np.bool_)
        self._all_seen = False
        self._steps = 0

    def due(self) -> bool:
        """Count one step; whether it should be folded in."""
        self._steps += 1
        return not self._all_seen or self._steps % self.EVERY == 0

    def update(self, sums: Float64Array, counts: Float64Array | int) -> None:
        """Fold in one step: `sums` `[gamma]` of survivals over `counts` trusted rows per
        position.
        """
        if self._all_seen and isinstance(counts, int):
            if counts > 0:
                self.mean += self.rate * (sums / counts - self.mean)
            return
        per_slot = np.broadcast_to(np.asarray(counts, dtype=np.float64), sums.shape)
        present = per_slot > 0
        step_mean = np.where(present, sums / np.maximum(per_slot, 1.0), self.mean)
        rate = np.where(self._seen, self.rate, 1.0)
        # Positions may average over different rows, so the order has to be restored.
        self.mean = np.minimum.accumulate(self.mean + rate * (step_mean - self.mean))
        self._seen |= present
        self._all_seen = bool(self._seen.all())
