# SPDX-License-Identifier: Apache-2.0
"""Scale and bias per slot, fitted on conditional accept labels; offline and while serving.

The label of slot k is "accepted, given that 1..k-1 were", known for
`k <= min(accepted + 1, verified)`. It stays unbiased under trimming, because who is trimmed depends
on features of the head only (cumulative labels do not: a fully accepted short prefix hides the
rest). A ridge towards scale 1 and bias 0 keeps sparse slots near the raw head, `scale >= 0` keeps
the order within a slot.
"""

import numpy as np

from vllm_dspark.core.arrays import BoolArray, Float64Array, FloatArray, IntArray
from vllm_dspark.core.calibration import (
    LOGIT_LIMIT,
    NUM_REGIMES,
    CalibrationTable,
    logit,
)

_NEWTON_STEPS = 12


def conditional_labels(
    gamma: int, accepted: IntArray, verified: IntArray
) -> tuple[BoolArray, BoolArray]:
    """`(label, known)`, both `[n, gamma]`, for blocks with `verified` of their drafts verified."""
    slots = np.arange(gamma)
    label = slots < accepted[:, None]
    known = (slots < verified[:, None]) & (slots <= accepted[:, None])
    return label, known


def fit_scale_bias(
    z: FloatArray, label: BoolArray, known: BoolArray, ridge: float = 4.0
) -> tuple[Float64Array, Float64Array]:
    """Logistic regression of every slot at once.

    Args:
        z: `[n, gamma]` logits of the raw confidences.
        label: `[n, gamma]` conditional outcomes.
        known: `[n, gamma]` outcomes that count.
        ridge: strength of the pull to (1, 0), in observations.

    Returns:
        `(scale, bias)`, both `[gamma]`, scale >= 0.
    """
    x = np.asarray(z, dtype=np.float64)
    weight = known.astype(np.float64)
    y = label.astype(np.float64)
    scale, bias = np.ones(x.shape[1]), np.zeros(x.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = _sigmoid(x * scale + bias)
        error, curvature = (p - y) * weight, p * (1.0 - p) * weight
        g_scale = (error * x).sum(axis=0) + ridge * (scale - 1.0)
        g_bias = error.sum(axis=0) + ridge * bias
        h_ss = (curvature * x * x).sum(axis=0) + ridge
        h_sb = (curvature * x).sum(axis=0)
        h_bb = curvature.sum(axis=0) + ridge
        det = h_ss * h_bb - h_sb**2
        step_scale = (h_bb * g_scale - h_sb * g_bias) / det
        step_bias = (h_ss * g_bias - h_sb * g_scale) / det
        # A bounded step: far from the optimum the logistic curve is flat and Newton overshoots.
        scale = scale - np.clip(step_scale, -1.0, 1.0)
        bias = bias - np.clip(step_bias, -2.0, 2.0)
    reversed_slots = scale < 0.0
    if reversed_slots.any():
        rate = ((y * weight).sum(axis=0) + ridge / 2) / (weight.sum(axis=0) + ridge)
        scale = np.where(reversed_slots, 0.0, scale)
        bias = np.where(reversed_slots, np.log(rate / (1.0 - rate)), bias)
    return scale, bias


def _sigmoid(x: Float64Array) -> Float64Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -LOGIT_LIMIT, LOGIT_LIMIT))))


class OnlineCalibrator:
    """Collects verified blocks per sampling regime and refits from the most recent ones.

    Collected values differ between ranks, so a refit takes effect only where its table is adopted
    (`Planner.adopt`), on the same step everywhere.

    Args:
        gamma: drafts per block.
        window: blocks remembered per regime.
        min_blocks: regimes with fewer blocks keep their table.
        ridge: see `fit_scale_bias`.
    """

    def __init__(
        self, gamma: int, window: int = 4096, min_blocks: int = 128, ridge: float = 4.0
    ) -> None:
        if gamma < 1 or window < 1:
            raise ValueError(f"gamma={gamma!r} and window={window!r} must be at least 1")
        self._gamma = gamma
        self._window = window
        self._min_blocks = min_blocks
        self._ridge = ridge
        self._blocks: dict[int, tuple[FloatArray, IntArray, IntArray]] = {}
        self._next = np.zeros(NUM_REGIMES, dtype=np.int64)
        self.ignored = 0
        """Blocks left out because a confidence was not a probability."""

    def observe(
        self,
        confidence: FloatArray,
        accepted: IntArray,
        verified: IntArray,
        regimes: IntArray | int = 0,
    ) -> None:
        """Remember verified blocks.

        Args:
            confidence: `[n, gamma]` raw confidences of the blocks that were verified.
            accepted: `[n]` accepted drafts.
            verified: `[n]` verified drafts; blocks with none are ignored.
            regimes: `[n]`, or one for all.
        """
        values = np.asarray(confidence)
        scheduled = np.arange(self._gamma) < np.asarray(verified)[:, None]
        sane = ((values >= 0.0) & (values <= 1.0) | ~scheduled).all(axis=1)
        self.ignored += int(np.count_nonzero(~sane))
        keep = sane & (np.asarray(verified) > 0)
        regime_rows = np.broadcast_to(np.asarray(regimes), keep.shape)
        for regime in np.unique(regime_rows[keep]):
            rows = keep & (regime_rows == regime)
            clean = np.where(scheduled[rows], values[rows], 0.5)
            self._append(int(regime), logit(clean), accepted[rows], verified[rows])

    def _append(self, regime: int, z: FloatArray, accepted: IntArray, verified: IntArray) -> None:
        if regime not in self._blocks:
            self._blocks[regime] = (
                np.zeros((self._window, self._gamma), dtype=np.float32),
                np.zeros(self._window, dtype=np.int32),
                np.zeros(self._window, dtype=np.int32),
            )
        recent = slice(max(len(z) - self._window, 0), None)
        count = len(z[recent])
        where = (self._next[regime] + np.arange(count)) % self._window
        stores = self._blocks[regime]
        for store, values in zip(stores, (z, accepted, verified), strict=True):
            store[where] = values[recent]
        self._next[regime] += count

    def refit(self, table: CalibrationTable) -> CalibrationTable:
        """`table` with every regime refitted that has enough blocks; the same object if none
        has.
        """
        rows = {}
        for regime, (z, accepted, verified) in sorted(self._blocks.items()):
            count = int(min(self._next[regime], self._window))
            if count < self._min_blocks:
                continue
            label, known = conditional_labels(self._gamma, accepted[:count], verified[:count])
            rows[regime] = fit_scale_bias(z[:count], label, known, self._ridge)
        return table.with_regimes(rows, table.version + 1) if rows else table
