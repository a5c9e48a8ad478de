# SPDX-License-Identifier: Apache-2.0
"""From measured steps to a `CostModel`.

Each (mode, tier) is a cell of its own, so no cliff is ever averaged with its neighbour. The linear
terms (context, logit rows, requests) come from the variation *inside* cells (fixed effects): both
sides are centred per cell, so a tier's own cost cannot leak into them. A term that does not vary
inside any cell stays 0 and its effect stays in the cell, where it was measured. Negative terms are
dropped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.arrays import Float64Array, IntArray
from vllm_dspark.core.cost_model import CostModel, Curve
from vllm_dspark.core.tiers import ExecMode, TierLadder

_TRIM_ROUNDS = 4
_TRIM_SPREADS = 5.0
_USUAL_SPREAD = 0.01
"""Part of a step's time by which clean measurements of it differ."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step. Times that were not measured are None."""

    tokens: int
    """Tokens that ran, padding included."""
    requests: int
    verify_ms: float | None = None
    draft_ms: float | None = None
    context_tokens: int = 0
    logit_rows: int = 0
    mode: ExecMode = ExecMode.FULL
    draft_width: int = 0


def fit_cost_model(
    samples: Iterable[StepSample],
    ladders: Mapping[ExecMode, TierLadder],
    draft_width: int,
) -> CostModel:
    """Fit every term that the samples can tell apart.

    Args:
        samples: measured steps; medians are taken, so warm-up outliers do no harm.
        ladders: tiers of each mode; a mode without one is continuous.
        draft_width: gamma, the width that draft times refer to where a sample does not say.

    Raises:
        ValueError: if no sample has a verify time, or a time is not finite and positive.
    """
    steps = list(samples)
    for step in steps:
        for name, value in (("verify_ms", step.verify_ms), ("draft_ms", step.draft_ms)):
            if value is not None and not (np.isfinite(value) and value > 0.0):
                raise ValueError(f"{name}={value!r} of {step}: must be finite and positive")
    verified = [s for s in steps if s.verify_ms is not None]
    if not verified:
        raise ValueError("no sample has a verify time")
    limits = {mode: ladders[mode].limit if mode in ladders else 0 for mode in ExecMode}
    cells = [(s.mode, _cell_tokens(s, ladders)) for s in verified]
    covariates = np.array(
        [(s.context_tokens, s.logit_rows, s.requests) for s in verified], dtype=np.float64
    )
    times = np.array([s.verify_ms for s in verified], dtype=np.float64)
    slopes = _robust_slopes(cells, covariates, times)
    rest = times - covariates @ slopes
    curves = {}
    for mode in ExecMode:
        own = [i for i, cell in enumerate(cells) if cell[0] is mode]
        if own:
            sizes, ms = _medians([cells[i][1] for i in own], rest[own])
            curves[mode] = Curve(sizes, np.maximum(ms, 0.0), limit=limits[mode])
    draft, slot_ms = _fit_draft(steps, draft_width)
    return CostModel(
        verify=_share_tail(curves, limits),
        draft=draft,
        draft_width=draft_width,
        draft_slot_ms=slot_ms,
        context_token_ms=float(slopes[0]),
        logit_row_ms=float(slopes[1]),
        request_ms=float(slopes[2]),
    )


def _cell_tokens(sample: StepSample, ladders: Mapping[ExecMode, TierLadder]) -> int:
    ladder = ladders.get(sample.mode)
    return sample.tokens if ladder is None else ladder.pad_one(sample.tokens, sample.requests)


def _share_tail(
    curves: Mapping[ExecMode, Curve], limits: Mapping[ExecMode, int]
) -> dict[ExecMode, Curve]:
    """Past its last graph a captured mode runs eagerly, so it borrows eager points above its
    limit.
    """
    eager = curves.get(ExecMode.EAGER)
    shared = dict(curves)
    if eager is None:
        return shared
    for mode, curve in curves.items():
        if mode is ExecMode.EAGER or (curve.sizes > limits[mode]).any():
            continue
        above = eager.sizes > limits[mode]
        shared[mode] = Curve(
            np.concatenate([curve.sizes, eager.sizes[above]]),
            np.concatenate([curve.ms, eager.ms[above]]),
            limit=limits[mode],
        )
    return shared


def _medians(keys: Sequence[int], values: Float64Array) -> tuple[IntArray, Float64Array]:
    sizes = np.unique(np.asarray(keys, dtype=np.int64))
    index = np.asarray(keys)
    return sizes, np.array([float(np.median(values[index == size])) for size in sizes])


def _robust_slopes(
    cells: Sequence[object], covariates: Float64Array, times: Float64Array
) -> Float64Array:
    """`_within_cell_slopes` without the samples that stand out from their cell's median."""
    keep = np.ones(len(times), dtype=np.bool_)
    slopes = np.zeros(covariates.shape[1])
    for _ in range(_TRIM_ROUNDS):
        kept_cells = [cell for cell, kept in zip(cells, keep, strict=True) if kept]
        slopes = _within_cell_slopes(kept_cells, covariates[keep], times[keep])
        rest = times - covariates @ slopes
        medians = {
            cell: float(np.median(rest[[other == cell for other in cells]])) for cell in set(cells)
        }
        residual = np.abs(rest - np.array([medians[cell] for cell in cells])) / times
        # 1.4826 MAD estimates a standard deviation. Relative, and with a floor: small cells fit
        # themselves, and must not make those look odd whose samples tell something.
        spread = 1.4826 * float(np.median(residual)) + _USUAL_SPREAD
        trimmed = residual <= _TRIM_SPREADS * spread
        if (trimmed == keep).all():
            break
        keep = trimmed
    return slopes


def _within_cell_slopes(
    cells: Sequence[object], covariates: Float64Array, times: Float64Array
) -> Float64Array:
    """Non-negative linear terms `[n_covariates]` from the variation inside cells."""
    codes = {cell: i for i, cell in enumerate(dict.fromkeys(cells))}
    group = np.array([codes[cell] for cell in cells])
    sizes = np.bincount(group).astype(np.float64)

    def centred(column: Float64Array) -> Float64Array:
        means = np.bincount(group, weights=column) / sizes
        return np.asarray(column - means[group])

    y = centred(times)
    x = np.stack([centred(column) for column in covariates.T], axis=1)
    scale = np.abs(covariates).max(axis=0, initial=0.0)
    spread = np.sqrt((x**2).mean(axis=0))
    active = [i for i in range(x.shape[1]) if spread[i] > 1e-6 * max(scale[i], 1.0)]
    slopes = np.zeros(x.shape[1])
    while active:
        # Unit columns, so that lstsq's rank cut-off drops true duplicates and nothing else.
        unit = x[:, active] / spread[active]
        found = np.linalg.lstsq(unit, y, rcond=1e-6)[0] / spread[active]
        if (found >= 0.0).all():
            slopes[active] = found
            break
        active.pop(int(np.argmin(found * spread[active])))
    return slopes


def _fit_draft(steps: Sequence[StepSample], reference: int) -> tuple[Curve | None, float]:
    drafted = [s for s in steps if s.draft_ms is not None]
    if not drafted:
        return None, 0.0
    extra = np.array(
        [[(s.draft_width or reference) - reference] for s in drafted], dtype=np.float64
    )
    times = np.array([s.draft_ms for s in drafted], dtype=np.float64)
    slot = float(_within_cell_slopes([s.requests for s in drafted], extra, times)[0])
    sizes, ms = _medians([s.requests for s in drafted], times - slot * extra[:, 0])
    return Curve(sizes, np.maximum(ms, 0.0)), slot


def line_model(
    tokens: Float64Array,
    rest_ms: Float64Array,
    ms: Float64Array,
    token_ms: float,
    request_ms: float,
) -> CostModel:
    """Steps without graphs as a line over tokens that costs `token_ms` a token.

    Args:
        tokens: `[n]` tokens of the measured steps; the line is sampled at 1 and at the largest.
        rest_ms: `[n]` what tokens and requests leave unexplained. Its median is the intercept:
            robust to a slope that was cut off at zero.
        ms: `[n]` measured times; a step is never free, it costs 5 % of their median at least.
        token_ms: slope.
        request_ms: cost of a request.
    """
    fixed = max(float(np.median(rest_ms)), 0.05 * float(np.median(ms)))
    sizes = np.array([1, int(tokens.max())])
    curve = Curve(sizes, fixed + token_ms * sizes, limit=0)
    return CostModel({ExecMode.EAGER: curve}, request_ms=request_ms)
