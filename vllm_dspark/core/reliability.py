# SPDX-License-Identifier: Apache-2.0
"""How far predicted survivals can be believed: ECE, Brier score and ROC-AUC per position.

Measures are those of the DSpark paper's figure 6: the prediction at position k is the survival
`a_k`, the outcome is "the first k drafts were all accepted". Under trimming an outcome past the
verified prefix is unknown where that whole prefix was accepted; such pairs are left out.
"""

from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.arrays import BoolArray, Float64Array, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PositionReliability:
    """Measures at one position; NaN where there is nothing to measure."""

    position: int
    """1-based."""
    count: int
    predicted: float
    observed: float
    ece: float
    brier: float
    auc: float


def expected_calibration_error(predicted: FloatArray, outcome: BoolArray, bins: int = 20) -> float:
    """Mean |predicted - observed| over equal-width bins of `[n]` predictions, weighted by count."""
    if not len(predicted):
        return float("nan")
    index = np.minimum((np.asarray(predicted) * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=np.asarray(predicted) - outcome, minlength=bins)
    return float(np.abs(gap).sum() / len(predicted))


def brier_score(predicted: FloatArray, outcome: BoolArray) -> float:
    """Mean squared error of `[n]` predictions."""
    if not len(predicted):
        return float("nan")
    return float(np.mean((np.asarray(predicted, dtype=np.float64) - outcome) ** 2))


def roc_auc(predicted: FloatArray, outcome: BoolArray) -> float:
    """Chance that a positive outranks a negative, ties counted half; NaN with one class only."""
    labels = np.asarray(outcome, dtype=np.bool_)
    positives = int(np.count_nonzero(labels))
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, group, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(mean_rank[group][labels].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def known_outcomes(
    gamma: int, accepted: IntArray, verified: IntArray | None = None
) -> tuple[BoolArray, BoolArray]:
    """`(outcome, known)`, both `[n, gamma]`: slot k accepted with all before it, and whether that
    can be told."""
    positions = np.arange(1, gamma + 1)
    outcome = positions <= accepted[:, None]
    if verified is None:
        return outcome, np.ones_like(outcome)
    # A rejection would settle later slots as well, but only where there was one: counting them
    # there and not behind a fully accepted window would count failures only.
    return outcome, positions <= verified[:, None]


def reliability(
    survival: Float64Array,
    accepted: IntArray,
    verified: IntArray | None = None,
    bins: int = 20,
) -> list[PositionReliability]:
    """Measures at every position.

    Args:
        survival: `[n, gamma]` predicted survivals of n blocks.
        accepted: `[n]` accepted drafts.
        verified: `[n]` verified drafts; None if all were.
        bins: equal-width bins of the ECE.
    """
    gamma = survival.shape[1]
    outcome, known = known_outcomes(gamma, accepted, verified)
    rows = []
    for k in range(gamma):
        mask = known[:, k]
        predicted, observed = survival[mask, k], outcome[mask, k]
        count = len(predicted)
        rows.append(
            PositionReliability(
                position=k + 1,
                count=count,
                predicted=float(predicted.mean()) if count else float("nan"),
                observed=float(observed.mean()) if count else float("nan"),
                ece=expected_calibration_error(predicted, observed, bins),
                brier=brier_score(predicted, observed),
                auc=roc_auc(predicted, observed),
            )
        )
    return rows
