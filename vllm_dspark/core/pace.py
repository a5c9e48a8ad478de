# SPDX-License-Identifier: Apache-2.0
"""What the server earns per millisecond in the long run.

A step with long prefills earns little for its time whatever it verifies, so the best rate of such a
step alone is low, and measured by it even unlikely drafts seem to pay. But what the server earns
altogether is largest if a millisecond is worth the same in every step: a draft pays if it earns
more than its time would earn elsewhere (renewal-reward; Dinkelbach's condition for a ratio of
sums). A step may hold its own drafts to more than that, never to less: verifying less likely drafts
in light steps would gain next to nothing and make every step longer.
"""

from dataclasses import dataclass

_KEPT = 0.98
"""Weight of the past after one more step: about fifty steps count."""
_MOST = 2.0
"""Largest multiple of a step's own rate: after a change of load the past says nothing."""


@dataclass(slots=True)
class Pace:
    """Expected tokens and predicted milliseconds of recent steps, weighted by age.

    Predictions, not measurements: they are equal on all ranks.
    """

    tokens: float = 0.0
    ms: float = 0.0

    def add(self, tokens: float, ms: float) -> None:
        """Count one planned step."""
        self.tokens = _KEPT * self.tokens + tokens
        self.ms = _KEPT * self.ms + ms

    def worth(self, own: float) -> float:
        """Tokens that a millisecond must earn in a step whose best rate is `own` tokens per ms."""
        if not self.ms > 0.0:
            return own
        return max(own, min(self.tokens / self.ms, _MOST * own))
