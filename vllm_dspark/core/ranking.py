# SPDX-License-Identifier: Apache-2.0
"""One step's drafts, calibrated, multiplied and sorted once; everything after reads the result."""

from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.allocation import slot_keys
from vllm_dspark.core.arrays import Float32Array, Float64Array, IntArray
from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.plan import StepInput
from vllm_dspark.core.survival import (
    RowDoubt,
    RunningSurvival,
    assess_rows,
    survival_by_position,
)


@dataclass(slots=True)
class RankedBlock:
    """The drafts of one step, calibrated, ranked and summed. Position-major."""

    keys: Float32Array
    """`[gamma, num_reqs]`, see `allocation`."""
    survival: Float64Array
    """`[gamma, num_reqs]`; doubtful rows carry the running means, undrafted slots 0."""
    descending: Float32Array
    """`[gamma * num_reqs]`, the keys sorted."""
    drafts: int
    """Drafted slots of the batch."""
    doubtful_drafts: int
    """Those of rows that verify their full block; they come first in `descending`."""
    sampling: int
    """Requests that commit a token."""
    doubtful_tau: float
    """Expected accepted drafts of the doubtful rows."""
    codes: IntArray | None
    """`[num_reqs]` doubt codes, None when all rows are trusted."""
    gains: Float64Array
    """`[drafts - doubtful_drafts + 1]`, sum of the first i trusted survivals in rank order."""

    def tau(self, budgets: IntArray) -> Float64Array:
        """Expected committed tokens for each budget, bonus tokens included."""
        if not self.doubtful_drafts:
            return self.sampling + self.gains[budgets]
        covered = np.minimum(budgets / self.doubtful_drafts, 1.0)
        trusted = np.maximum(budgets - self.doubtful_drafts, 0)
        return np.asarray(self.sampling + self.doubtful_tau * covered + self.gains[trusted])


def rank_block(
    step: StepInput,
    confidence: Float32Array,
    drafts: int,
    calibration: CalibrationTable,
    prior: RunningSurvival,
) -> RankedBlock:
    """Rank the drafts of a step; `prior` learns from its trusted rows and prices the doubtful ones.

    Args:
        step: the step, with at least one draft.
        confidence: `[num_reqs, gamma]` raw confidences.
        drafts: sum of `step.draft_lens`.
    """
    lens, gamma = step.draft_lens, confidence.shape[1]
    codes = assess_rows(confidence, lens, step.row_state)
    doubtful = None if codes is None else codes != RowDoubt.TRUSTED
    by_position: Float32Array = np.ascontiguousarray(confidence.T)
    ragged_lens = None if drafts == gamma * len(lens) else lens
    doubtful_drafts, doubtful_tau = 0, 0.0
    if doubtful is None and ragged_lens is None:
        table = survival_by_position(calibration.apply(by_position, step.regimes))
        if prior.due():
            prior.update(table.sum(axis=1), len(lens))
    else:
        drafted = np.arange(gamma)[:, None] < lens
        used = drafted if doubtful is None else drafted & ~doubtful
        clean = np.where(used, by_position, np.float32(0.0))
        table = survival_by_position(calibration.apply(clean, step.regimes)) * used
        if prior.due():
            prior.update(table.sum(axis=1), used.sum(axis=1).astype(np.float64))
        if doubtful is not None:
            expected = drafted[:, doubtful] * prior.mean[:, None]
            table[:, doubtful] = expected
            doubtful_drafts, doubtful_tau = int(lens[doubtful].sum()), float(expected.sum())
    keys = slot_keys(table, ragged_lens, doubtful)
    ascending = keys.ravel().copy()
    ascending.sort()
    descending = ascending[::-1]
    # Sums start at 0 and run in float64 over the float32 keys that decide the order.
    gains = np.zeros(drafts - doubtful_drafts + 1, dtype=np.float64)
    gains[1:] = descending[doubtful_drafts:drafts]
    np.add.accumulate(gains, out=gains)
    return RankedBlock(
        keys=keys,
        survival=table,
        descending=descending,
        drafts=drafts,
        doubtful_drafts=doubtful_drafts,
        sampling=int(np.count_nonzero(step.samples)),
        doubtful_tau=doubtful_tau,
        codes=codes,
        gains=gains,
    )
