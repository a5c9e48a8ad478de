# SPDX-License-Identifier: Apache-2.0
"""How wide a block to draft next, and whether to draft one at all.

A block of w slots costs draft time for all of them, whether or not they are verified. The steady
state of each width is priced like a step: the best rate over all budgets when only the first w
slots of every request can be admitted, drafting included. The choice looks at blocks older than the
one it sizes and sizes the block before any token of it is drawn, so it anticipates nothing.

A width of 0 is plain decoding. There are no confidences then, so running means stand in for them,
and every now and then some blocks are drafted anyway, to see what has become of the confidences.
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


def widths_for(gamma: int, may_skip: bool = False) -> tuple[int, ...]:
    """Widths worth having graphs for, ascending; gamma is always among them.

    Args:
        gamma: the widest block.
        may_skip: the host can leave out drafting, which is width 0.
    """
    narrow = (0, 1, 2, 3, 5) if may_skip else (1, 2, 3, 5)
    return tuple(sorted({width for width in narrow if width < gamma} | {gamma}))


class WidthChoice:
    """Keeps the width until another one promises ``margin`` more tokens per millisecond.

    Args:
        widths: ascending, the last one is gamma.
        margin: relative gain that a change must promise.
        every: steps between two evaluations: enough for a block to be drafted and read back, and
            for the time of one, which grows with the batch, not to matter.
        redraft: steps without drafting after which blocks are drafted until the next evaluation.

    Raises:
        ValueError: no widths, not ascending, or no block among them.
    """

    def __init__(
        self, widths: Sequence[int], margin: float = 0.01, every: int = 16, redraft: int = 256
    ) -> None:
        if list(widths) != sorted(set(widths)) or not any(widths) or widths[0] < 0:
            raise ValueError(f"widths={widths!r}: must ascend from 0 or more and hold a block")
        self.widths = tuple(widths)
        self.current = self.widths[-1]
        self._margin = margin
        self._every = every
        self._redraft = redraft
        self._steps = 0
        self._skipped_since = 0

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
        if self.current == 0 and self._steps - self._skipped_since >= self._redraft:
            del rates[0]
        best = max(rates, key=lambda width: (rates[width], -width))
        if rates[best] > rates.get(self.current, 0.0) * (1.0 + self._margin):
            self.current = best
            self._skipped_since = self._steps
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
    draft_ms = cost.draft_ms(load.requests, width) if width else 0.0
    return float((tau / (cost_ms + draft_ms)).max())
