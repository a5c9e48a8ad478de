# SPDX-License-Identifier: Apache-2.0
"""Who gets the verify budget: the b best draft slots of the batch under one total order.

The order is (survival descending, position ascending, request ascending), compared on float32
values, so a float32 device kernel that uses the same key agrees bit for bit. The order does not
depend on what was drafted beyond the survival itself, even among ties (a saturated sigmoid is
exactly 1.0), which losslessness needs (DSpark paper, section 3.2.3 and appendix A). Admission is
prefix-closed: survival never increases along a row and the position breaks ties.

Keys are position-major `[gamma, num_reqs]`. `+inf` marks a doubtful row (served before all others,
so a budget that covers the doubtful drafts gives them their full blocks), `-inf` a slot that was
not drafted (never admitted). `-0.0` equals `0.0`.
"""

import numpy as np

from vllm_dspark.core.arrays import BoolArray, Float32Array, FloatArray, IntArray

DOUBTFUL = np.float32(np.inf)
NOT_DRAFTED = np.float32(-np.inf)


def slot_keys(
    survival: FloatArray, draft_lens: IntArray | None = None, doubtful: BoolArray | None = None
) -> Float32Array:
    """Ranking keys `[gamma, num_reqs]` from position-major, non-increasing survivals.

    Args:
        survival: `[gamma, num_reqs]`, free of NaN.
        draft_lens: `[num_reqs]` scheduled drafts; None when every row has gamma.
        doubtful: `[num_reqs]` rows that verify their full block; None when there are none.
    """
    keys = survival.astype(np.float32)
    if doubtful is not None:
        keys[:, doubtful] = DOUBTFUL
    if draft_lens is not None:
        positions = np.arange(keys.shape[0])[:, None]
        keys[positions >= draft_lens] = NOT_DRAFTED
    return keys


def admit(keys: Float32Array, budget: int, threshold: np.float32 | None = None) -> IntArray:
    """Admitted drafts `[num_reqs]` int32 for `budget` slots, `0 < budget <= drafted slots`.

    `threshold` is the budget-th largest key where the caller already knows it (a sorted copy).
    """
    flat = keys.ravel()
    if threshold is None:
        cut = flat.size - budget
        threshold = np.partition(flat, cut)[cut]
    admitted = flat >= threshold
    excess = int(np.count_nonzero(admitted)) - budget
    if excess > 0:
        # Position-major flat order is the tie order: the last of the equal keys lose.
        admitted[np.flatnonzero(flat == threshold)[-excess:]] = False
    lens: IntArray = np.add.reduce(admitted.reshape(keys.shape), axis=0, dtype=np.int32)
    return lens


def _clamped(draft_lens: IntArray, gamma: int) -> IntArray:
    """Drafts `[num_reqs]` int32 within 0..gamma."""
    # On a batch's few hundred entries most of np.clip's time is its own Python.
    lens: IntArray = np.minimum(np.maximum(draft_lens, 0), gamma).astype(np.int32)
    return lens


def allocate(
    survival: FloatArray,
    draft_lens: IntArray,
    budget: int,
    doubtful: BoolArray | None = None,
) -> IntArray:
    """Admitted drafts `[num_reqs]` int32: the `budget` best slots, clamped to the drafted ones.

    Args:
        survival: `[num_reqs, gamma]`, any float type. A row that rises is read as its running
            minimum; a row with NaN in a drafted slot counts as doubtful.
        draft_lens: `[num_reqs]` drafts scheduled per request, 0..gamma.
        budget: draft tokens for the whole batch, doubtful rows included.
        doubtful: `[num_reqs]` rows served first.

    Raises:
        ValueError: on shapes that do not match.
    """
    values = np.asarray(survival)
    lens = np.asarray(draft_lens)
    if values.ndim != 2 or lens.shape != values.shape[:1]:
        raise ValueError(
            f"survival {values.shape} must be [num_reqs, gamma], draft_lens {lens.shape} [num_reqs]"
        )
    gamma = values.shape[1]
    lens = _clamped(lens, gamma)
    if budget <= 0:
        return np.zeros_like(lens)
    if budget >= int(lens.sum()):
        return lens
    by_position = np.ascontiguousarray(values.T)
    missing = np.isnan(by_position)
    if missing.any():
        poisoned: BoolArray = np.any(missing & (np.arange(gamma)[:, None] < lens), axis=0)
        doubtful = poisoned if doubtful is None else np.logical_or(poisoned, doubtful)
        by_position = np.where(missing, 0.0, by_position)
    keys = slot_keys(np.minimum.accumulate(by_position, axis=0), lens, doubtful)
    return admit(keys, budget)


def even_split(draft_lens: IntArray, budget: int, gamma: int) -> IntArray:
    """Admitted drafts `[num_reqs]` int32 where nothing ranks the requests: in position order, and
    in request order among those at the last position that the budget reaches. This is `allocate`
    with equal survivals, without sorting anything.
    """
    lens = _clamped(draft_lens, gamma)
    width, used = widest_within(lens, gamma, budget)
    admitted: IntArray = np.minimum(lens, np.int32(width))
    if budget > used:
        admitted[(lens > width).nonzero()[0][: budget - used]] += 1
    return admitted


def widest_within(draft_lens: IntArray, gamma: int, budget: int) -> tuple[int, int]:
    """Largest k whose `sum(min(k, drafted))` fits the budget, and that sum.

    Args:
        draft_lens: `[num_reqs]` drafts scheduled per request, 0..gamma.
    """
    # Drafts up to each position, all requests together.
    reached = np.bincount(draft_lens, minlength=gamma + 1)[:0:-1].cumsum()[::-1][:gamma]
    totals = reached.cumsum()
    width = int(np.searchsorted(totals, budget, side="right"))
    return width, int(totals[width - 1]) if width else 0


def fill(
    survival: FloatArray,
    draft_lens: IntArray,
    admitted: IntArray,
    spare: int,
    doubtful: BoolArray | None = None,
) -> IntArray:
    """Admit up to `spare` more drafts in the same order, e.g. into a padded graph tier.

    `admitted` must come from `allocate` on the same arguments; then the result is the allocation of
    the sum, and contains `admitted`.
    """
    return allocate(survival, draft_lens, int(np.sum(admitted)) + max(spare, 0), doubtful)
