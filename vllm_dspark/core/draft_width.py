# SPDX-License-Identifier: Apache-2.0
"""How wide a block to draft next.

A block of w slots costs draft time for all of them, whether or not they are verified. The steady
state of each width is priced like a step: the best rate over all budgets when only the first w
slots of every request can be admitted, drafting included. The choice looks at blocks older than the
one it sizes and sizes the block before any token of it is drawn, so it anticipates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.arrays import Float64Array
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.tiers import ExecMode, TierLadder


@dataclass(frozen=True, slots=True)
class Load:
    """The batch that the next block will be verified in, as far as it is known."""

    sampling: int
    requests: int
    base_tokens: int
    context_tokens: int
    mode: ExecMode


def widths_for(gamma: int) -> tuple[int, ...]:
    """Widths worth having graphs for, ascending; gamma is always among them."""
    return tuple(sorted({width for width in (1, 2, 3, 5) if width < gamma} | {gamma}))


class WidthChoice:
    """Keeps the width until another one promises ``margin`` more tokens per millisecond.

    Args:
        widths: ascending, the last one is gamma.
        margin: relative gain that a change must promise.
        every: steps between two evaluations.

    Raises:
        ValueError: no widths, or not ascending.
    """

    def __init__(self, widths: Sequence[int], margin: float = 0.01, every: int = 4) -> None:
        if not widths or list(widths) != sorted(set(widths)) or widths[0] < 1:
            raise ValueError(f"widths={widths!r}: must be positive and ascend")
        self.widths = tuple(widths)
        self.current = self.widths[-1]
        self._margin = margin
        self._every = every
        self._steps = 0

    def due(self) -> bool:
        """Count one step; whether the width is evaluated in it."""
        self._steps += 1
        return len(self.widths) > 1 and (self._steps - 1) % self._every == 0

    def choose(
        self, survival: Float64Array, load: Load, cost: CostModel, ladder: TierLadder
    ) -> int:
        """Width of the next block; asked in the steps that are `due`.

        Args:
            survival: ``[gamma, num_reqs]`` position-major; 0 where nothing is known to be drafted.
            load: the batch.
            cost: prices verify tokens and drafting by width.
            ladder: tiers of ``load.mode``.
        """
        rates = {width: _rate(survival[:width], load, cost, ladder, width) for width in self.widths}
        best = max(self.widths, key=lambda width: (rates[width], -width))
        if rates[best] > rates[self.current] * (1.0 + self._margin):
            self.current = best
        return self.current


def _rate(
    survival: Float64Array, load: Load, cost: CostModel, ladder: TierLadder, width: int
) -> float:
    """Best expected tokens per millisecond when ``survival`` ``[width, num_reqs]`` may be spent."""
    gains = np.concatenate(([0.0], np.cumsum(np.sort(survival, axis=None)[::-1])))
    budgets, padded = ladder.realisable(load.base_tokens, 0, survival.size, load.requests)
    rows = load.sampling + budgets
    cost_ms = cost.step_ms(padded, load.requests, load.context_tokens, rows, load.mode)
    tau = load.sampling + gains[budgets]
    return float((tau / (cost_ms + cost.draft_ms(load.requests, width))).max())
