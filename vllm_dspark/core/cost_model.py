# SPDX-License-Identifier: Apache-2.0
"""What a step costs, in milliseconds, as a function of everything the planner may change.

    step = verify[mode](tokens) + requests_curve(requests) + context + logit rows   (+ ragged)
    draft = draft_curve(requests) + per-slot cost * (width - reference width)

The verify term keeps cliffs exact: up to the capture limit a total costs what its graph tier was
measured to cost, with neither smoothing nor a monotone envelope, because the search lands on the
cliffs' edges. Above the limit nothing pads: cost is linear between points measured above it, and
never blended with the last tier below.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from vllm_dspark.core.arrays import Float64Array, IntArray
from vllm_dspark.core.tiers import ExecMode

_TABLE_LIMIT = 1 << 18
"""Sizes from here on are computed when asked for instead of tabulated."""


class CurveRule(StrEnum):
    """How a curve reads between its measured points, up to its limit."""

    NEXT = "next"
    """The point at or above: a graph tier."""
    PREVIOUS = "previous"
    """The point at or below (SGLang's one-dimensional tables)."""
    LINEAR = "linear"
    """Straight lines, flat outside (SGLang's additive and TensorRT-LLM's tables)."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Measured cost over a size (tokens or requests).

    Args:
        sizes: `[n]` ascending.
        ms: `[n]` cost at each size.
        limit: sizes up to here follow `rule`; above, cost is continuous. None: the last size for
            `NEXT`, no limit for the other rules (which are flat outside their points).

    Raises:
        ValueError: on empty, unsorted, non-finite or negative input.
    """

    sizes: IntArray
    ms: Float64Array
    limit: int | None = None
    rule: CurveRule = CurveRule.NEXT
    _above_sizes: IntArray = field(init=False, repr=False)
    _above_ms: Float64Array = field(init=False, repr=False)
    _below: int = field(init=False, repr=False)
    _slope: float = field(init=False, repr=False)
    _table: Float64Array = field(init=False, repr=False)
    """Cost of every size so far asked for: the search reads thousands of sizes per step."""

    def __post_init__(self) -> None:
        sizes = np.asarray(self.sizes, dtype=np.int64)
        ms = np.asarray(self.ms, dtype=np.float64)
        if sizes.ndim != 1 or sizes.shape != ms.shape or not len(sizes):
            raise ValueError(
                f"a cost curve needs as many sizes as times, got {sizes.shape} and {ms.shape}"
            )
        if (np.diff(sizes) <= 0).any():
            raise ValueError(f"sizes of a cost curve must ascend strictly, got {sizes.tolist()}")
        if not (np.isfinite(ms).all() and (ms >= 0.0).all()):
            raise ValueError(
                f"times of a cost curve must be finite and not negative, got {ms.tolist()}"
            )
        limit = self.limit
        if limit is None and self.rule is CurveRule.NEXT:
            limit = int(sizes[-1])
        below = len(sizes) if limit is None else int(np.searchsorted(sizes, limit, "right"))
        for name, value in (("sizes", sizes), ("ms", ms), ("limit", limit), ("_below", below)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_above_sizes", sizes[below:])
        object.__setattr__(self, "_above_ms", ms[below:])
        object.__setattr__(self, "_slope", self._last_slope())
        object.__setattr__(self, "_table", np.empty(0))

    def _last_slope(self) -> float:
        """Cost per token past the last point; never negative, so size is never free at infinity."""
        sizes, ms = (
            (self._above_sizes, self._above_ms)
            if len(self._above_sizes) > 1
            else (self.sizes, self.ms)
        )
        if len(sizes) < 2:
            return 0.0
        return max(float((ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2])), 0.0)

    def at(self, size: IntArray | int) -> Float64Array:
        """Cost in ms for every size (not negative), same shape."""
        try:
            return np.asarray(self._table[size], dtype=np.float64)
        except IndexError:
            values = np.asarray(size)
            if values.max() >= _TABLE_LIMIT:
                return self._compute(values)
            grown = min(max(2 * int(values.max()), 1024), _TABLE_LIMIT)
            object.__setattr__(self, "_table", self._compute(np.arange(grown)))
            return np.asarray(self._table[size], dtype=np.float64)

    def _compute(self, values: IntArray) -> Float64Array:
        if self.limit is None:
            return self._lookup(values)
        if not self._below:
            return self._continuous(values)
        return np.where(values <= self.limit, self._lookup(values), self._continuous(values))

    def _lookup(self, values: IntArray) -> Float64Array:
        sizes, ms = self.sizes[: self._below], self.ms[: self._below]
        if self.rule is CurveRule.LINEAR:
            return np.asarray(np.interp(values, sizes, ms), dtype=np.float64)
        if self.rule is CurveRule.PREVIOUS:
            index = np.maximum(np.searchsorted(sizes, values, "right") - 1, 0)
        else:
            index = np.minimum(np.searchsorted(sizes, values), self._below - 1)
        return np.asarray(ms[index], dtype=np.float64)

    def _continuous(self, values: IntArray) -> Float64Array:
        sizes, ms = self._above_sizes, self._above_ms
        if not len(sizes):
            return np.asarray(
                self.ms[-1] + self._slope * (values - self.sizes[-1]), dtype=np.float64
            )
        cost = np.interp(values, sizes, ms) + self._slope * np.maximum(values - sizes[-1], 0)
        if len(sizes) > 1 and values.min(initial=sizes[0]) < sizes[0]:
            slope = max(float((ms[1] - ms[0]) / (sizes[1] - sizes[0])), 0.0)
            # Extrapolated down to the limit, losing the graph must not look like a gain.
            least = self.ms[self._below - 1] if self._below else 0.0
            extrapolated = np.maximum(ms[0] + slope * (values - sizes[0]), min(least, ms[0]))
            cost = np.where(values < sizes[0], extrapolated, cost)
        return np.asarray(cost, dtype=np.float64)

    def scaled(self, factors: Mapping[int, float]) -> "Curve":
        """This curve with the points named in `factors` multiplied."""
        ratio = np.array([factors.get(int(size), 1.0) for size in self.sizes])
        return replace(self, ms=self.ms * ratio)

    def cell_of(self, size: int) -> int | None:
        """The measured size that a step of `size` tells most about: the one that alone decides its
        cost, or the nearest one above the limit. None between two points below it.
        """
        if size in self.sizes:
            return size
        if self.limit is not None and size > self.limit:
            distances = np.abs(self._above_sizes - size)
            return int(self._above_sizes[distances.argmin()]) if len(distances) else None
        if self.rule is CurveRule.NEXT:
            index = int(np.searchsorted(self.sizes[: self._below], size))
            return int(self.sizes[index]) if index < self._below else None
        return None


@dataclass(frozen=True, eq=False)
class CostModel:
    """Step and draft cost of one deployment; immutable, so a version is a model.

    All terms but `verify` are optional and default to nothing.
    """

    verify: Mapping[ExecMode, Curve]
    """Target forward over tokens that run. A mode that was not measured reads the next slower
    one.
    """
    draft: Curve | None = None
    """Drafting a block of `draft_width`, over requests."""
    draft_width: int = 0
    draft_slot_ms: float = 0.0
    """Cost of one more drafted slot (a turn of the Markov loop)."""
    draft_widths: Mapping[int, Curve] = field(default_factory=dict)
    """Drafting a block of each measured width, over requests; read before the two terms above."""
    requests: Curve | None = None
    context_token_ms: float = 0.0
    logit_row_ms: float = 0.0
    request_ms: float = 0.0
    ragged_ms: float = 0.0
    """What a trimmed step pays on top of an untrimmed one: ranking, offsets, varlen kernels."""

    def __post_init__(self) -> None:
        if not self.verify:
            raise ValueError("a cost model needs the verify curve of at least one execution mode")
        modes = list(ExecMode)
        nearest = {}
        for mode in modes:
            slower_first = modes[modes.index(mode) :] + modes[: modes.index(mode)][::-1]
            nearest[mode] = next(self.verify[m] for m in slower_first if m in self.verify)
        object.__setattr__(self, "_nearest", nearest)

    _nearest: Mapping[ExecMode, Curve] = field(init=False, repr=False, default_factory=dict)

    def verify_curve(self, mode: ExecMode) -> Curve:
        """The curve that prices `mode`."""
        return self._nearest[mode]

    def step_ms(
        self,
        tokens: IntArray,
        requests: int,
        context_tokens: int = 0,
        logit_rows: IntArray | int = 0,
        mode: ExecMode = ExecMode.FULL,
    ) -> Float64Array:
        """Cost of the target step without drafting, for every candidate.

        Args:
            tokens: `[n]` tokens that run, padding included or not (tiers price both alike).
            requests: requests of the batch.
            context_tokens: KV tokens read, all requests together.
            logit_rows: `[n]` or scalar, rows through the LM head and the sampler.
        """
        cost = self._nearest[mode].at(tokens) + self.batch_ms(requests, context_tokens)
        if self.logit_row_ms:
            cost = cost + self.logit_row_ms * logit_rows
        return np.asarray(cost)

    def batch_ms(self, requests: int, context_tokens: int) -> float:
        """What every candidate of a step pays besides its tokens and logit rows."""
        fixed = self.request_ms * requests + self.context_token_ms * context_tokens
        if self.requests is not None:
            fixed += float(self.requests.at(requests))
        return fixed

    def draft_ms(self, requests: int, width: int | None = None) -> float:
        """Cost of drafting `width` slots (default: the measured block) for `requests` requests."""
        if requests <= 0:
            return 0.0
        measured = self.draft_widths.get(self.draft_width if width is None else width)
        if measured is not None:
            return float(measured.at(requests))
        if self.draft is None:
            return 0.0
        extra = 0 if width is None else width - self.draft_width
        return max(float(self.draft.at(requests)) + self.draft_slot_ms * extra, 0.0)
