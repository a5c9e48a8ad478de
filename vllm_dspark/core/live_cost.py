# SPDX-License-Identifier: Apache-2.0
"""Cost corrected by what steps really take while serving.

Every measured step gives a ratio (measured / predicted by the *base* model) for the cell that
priced it: one execution mode and one graph tier. Ratios are averaged exponentially; an outlier
(preemption, a JIT compilation, a clock change) is dropped, unless outliers keep coming, which means
that the world has changed.

Step times differ between ranks, so nothing that is observed changes a decision by itself: ranks use
what `adopt(version, corrections)` gave them, on the step on which all of them adopt it. One rank's
`payload()` is what is sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.tiers import ExecMode

Cell: TypeAlias = tuple[str, int]
"""Execution mode and measured size, e.g. `("full", 512)`."""
Corrections: TypeAlias = dict[Cell, float]


@dataclass(slots=True)
class _CellState:
    ratio: float = 1.0
    seen: int = 0
    rejected_in_row: int = 0


class LiveCost:
    """A base model, what was observed of it, and the model in use.

    Args:
        base: the profiled model; corrections are relative to it and never accumulate.
        rate: weight of one observation once a cell has been seen `1 / rate` times.
        outlier: a ratio further than this factor from the cell's average is dropped.
        patience: that many outliers in a row restart the cell's average.
        min_observations: cells seen less often are not corrected.
    """

    def __init__(
        self,
        base: CostModel,
        rate: float = 0.05,
        outlier: float = 2.0,
        patience: int = 20,
        min_observations: int = 8,
    ) -> None:
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate={rate!r}: must lie in (0, 1]")
        if not outlier > 1.0:
            raise ValueError(f"outlier={outlier!r}: must be above 1")
        self._base = base
        self._rate = rate
        self._outlier = outlier
        self._patience = patience
        self._min_observations = min_observations
        self._cells: dict[Cell, _CellState] = {}
        self._sizes: dict[Cell, int | None] = {}  # by the tokens that ran
        self.version = 0
        self.model = base
        """The model in use; changes only in `adopt`."""
        self.rejected = 0
        """Observations dropped as outliers."""

    def observe(self, mode: ExecMode, tokens: int, other_ms: float, measured_ms: float) -> bool:
        """Fold in one step; false if it was dropped or no single cell priced it.

        Args:
            mode: how the step ran.
            tokens: tokens that ran, padding included.
            other_ms: what the model says of all that `measured_ms` holds besides the verify term;
                only that term is corrected, so the base and the model in use say the same.
            measured_ms: what the step took.
        """
        curve = self._base.verify_curve(mode)
        cell = (mode.value, tokens)
        if cell not in self._sizes:
            self._sizes[cell] = curve.cell_of(tokens)
        size = self._sizes[cell]
        verify_ms = measured_ms - other_ms
        # Written so that NaN fails too.
        if size is None or not (0.0 < verify_ms <= measured_ms < float("inf")):
            return False
        base = float(curve.at(tokens))
        return base > 0.0 and self._fold((mode.value, size), verify_ms / base)

    def _fold(self, cell: Cell, ratio: float) -> bool:
        state = self._cells.setdefault(cell, _CellState())
        far = max(ratio / state.ratio, state.ratio / ratio) > self._outlier
        if far and state.rejected_in_row + 1 < self._patience:
            state.rejected_in_row += 1
            self.rejected += 1
            return False
        if far:
            state.seen = 0
        state.rejected_in_row = 0
        state.seen += 1
        state.ratio += max(self._rate, 1.0 / state.seen) * (ratio - state.ratio)
        return True

    def payload(self) -> tuple[int, Corrections]:
        """Next version and the corrections observed here, ready to be sent to all ranks."""
        found = {
            cell: state.ratio
            for cell, state in sorted(self._cells.items())
            if state.seen >= self._min_observations
        }
        return self.version + 1, found

    def adopt(self, version: int, corrections: Mapping[Cell, float]) -> bool:
        """Use `corrections` from now on; false (and no change) unless `version` is newer.

        Raises:
            ValueError: if a correction is not a positive finite number.
        """
        if version <= self.version:
            return False
        for cell, ratio in corrections.items():
            if not 0.0 < ratio < float("inf"):
                raise ValueError(f"correction {ratio!r} of {cell}: must be positive and finite")
        scaled = {}
        for mode, curve in self._base.verify.items():
            own = {size: ratio for (name, size), ratio in corrections.items() if name == mode}
            scaled[mode] = curve.scaled(own) if own else curve
        self.model = replace(self._base, verify=scaled)
        self.version = version
        return True
