# SPDX-License-Identifier: Apache-2.0
"""Sequential temperature scaling (DSpark paper, section 3.2.1): fit.

Position after position, the temperature that minimises the calibration error of the *cumulative*
product is chosen from a grid, with earlier positions frozen at their calibrated values. Among
temperatures whose error is equal within `tolerance` the one nearest to 1 wins (in log), because the
error is piecewise constant and noisy, and late positions have few positives: without that rule they
run to the edge of the grid. Needs fully verified blocks.
"""

from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.arrays import Float64Array, FloatArray, IntArray
from vllm_dspark.core.calibration import logit
from vllm_dspark.core.reliability import expected_calibration_error


@dataclass(frozen=True, slots=True)
class StsFit:
    """Fitted temperatures `[gamma]` and the ECE before and after, per position."""

    temperatures: Float64Array
    ece_before: Float64Array
    ece_after: Float64Array
    blocks: int


def fit_sts(
    confidence: FloatArray,
    accepted: IntArray,
    grid: FloatArray | None = None,
    bins: int = 20,
    tolerance: float = 1e-3,
) -> StsFit:
    """Fit one temperature per slot.

    Args:
        confidence: `[n, gamma]` raw confidences of fully verified blocks.
        accepted: `[n]` accepted drafts.
        grid: candidate temperatures; default 61 values, log-spaced over 0.1 to 10.
        bins: equal-width bins of the ECE.
        tolerance: ECE differences that do not count.

    Raises:
        ValueError: without blocks, or on a grid that is not positive.
    """
    raw = np.asarray(confidence, dtype=np.float64)
    if raw.ndim != 2 or not len(raw) or len(raw) != len(accepted):
        raise ValueError(
            f"confidence {raw.shape} must be [n, gamma], accepted {len(accepted)} long"
        )
    temperatures = np.geomspace(0.1, 10.0, 61) if grid is None else np.asarray(grid, np.float64)
    if not len(temperatures) or not (temperatures > 0.0).all():
        raise ValueError(f"grid={grid!r}: temperatures must be positive")
    distance = np.abs(np.log(temperatures))
    gamma = raw.shape[1]
    z = logit(raw).astype(np.float64)
    chosen, before, after = np.ones(gamma), np.zeros(gamma), np.zeros(gamma)
    prefix, raw_prefix = np.ones(len(raw)), np.ones(len(raw))
    for k in range(gamma):
        outcome = np.asarray(accepted) > k
        raw_prefix = raw_prefix * raw[:, k]
        before[k] = expected_calibration_error(raw_prefix, outcome, bins)
        scaled = prefix / (1.0 + np.exp(-z[:, k] / temperatures[:, None]))
        errors = np.array([expected_calibration_error(row, outcome, bins) for row in scaled])
        good = errors <= errors.min() + tolerance
        best = int(np.argmin(np.where(good, distance, np.inf)))
        chosen[k], after[k] = temperatures[best], errors[best]
        prefix = scaled[best]
    return StsFit(chosen, before, after, len(raw))
