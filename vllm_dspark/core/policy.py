# SPDX-License-Identifier: Apache-2.0
"""Operator choices of the planner, validated when they are made."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Amount: TypeAlias = int | float | None
"""Drafts of the whole batch: an int is a count, a float in [0, 1] a fraction of those scheduled."""


class SearchMode(StrEnum):
    """What the planner may choose."""

    STATIC = "static"
    """Always everything."""
    RAGGED = "ragged"
    """A budget for the batch, spent by confidence."""
    UNIFORM = "uniform"
    """One number of drafts for every request."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Options of the verify policy.

    `pin` fixes the budget; otherwise `floor` and `cap` bound it. All three hold always: without a
    cost model, in every mode, and also against doubtful rows (which then share what the cap
    leaves). A cap below the floor wins. In uniform mode a budget becomes the largest width that
    does not exceed it.

    Raises:
        ValueError: naming option, value and allowed values.
    """

    search: SearchMode = SearchMode.RAGGED
    pin: Amount = None
    floor: Amount = None
    cap: Amount = None
    min_gain: float = 0.02
    """Predicted relative gain that a trimmed step must keep."""
    hysteresis: float = 0.01
    """Gain on top of `min_gain` that is needed to start trimming."""
    step_bound_ms: float | None = None
    """Largest predicted step time, so that every request waits at most this long per step."""
    start_confidence: float = 0.5
    """Stands for every confidence until the first trusted row is seen."""
    prior_rate: float = 0.05
    """Weight of one step in the running survival means."""

    def __post_init__(self) -> None:
        if self.search not in list(SearchMode):
            raise ValueError(
                f"search={self.search!r}: must be one of {[m.value for m in SearchMode]}"
            )
        for name in ("pin", "floor", "cap"):
            _check_amount(name, getattr(self, name))
        _check_range("min_gain", self.min_gain, 0.0, 10.0)
        _check_range("hysteresis", self.hysteresis, 0.0, 10.0)
        _check_range("start_confidence", self.start_confidence, 0.0, 1.0)
        _check_range("prior_rate", self.prior_rate, 0.0, 1.0)
        if self.step_bound_ms is not None and not self.step_bound_ms > 0.0:
            raise ValueError(f"step_bound_ms={self.step_bound_ms!r}: must be positive or None")

    def bounds(self, scheduled: int, doubtful: int, host_limit: int | None) -> tuple[int, int]:
        """Smallest and largest admissible budget for `scheduled` drafts of the batch.

        `doubtful` drafts belong to rows that verify their full block; they raise the lower bound as
        far as the upper one allows. Equal bounds leave no choice.
        """
        high = scheduled if host_limit is None else max(min(scheduled, host_limit), 0)
        if self.pin is not None:
            pinned = min(_drafts(self.pin, scheduled), high)
            return pinned, pinned
        if self.cap is not None:
            high = min(high, _drafts(self.cap, scheduled))
        low = doubtful if self.floor is None else max(doubtful, _drafts(self.floor, scheduled))
        return min(low, high), high


def _drafts(amount: int | float, scheduled: int) -> int:
    if isinstance(amount, int):
        return min(amount, scheduled)
    return math.floor(amount * scheduled)


def _check_amount(name: str, value: Amount) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: must be an int, a float or None")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name}={value!r}: a count must be at least 0")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value!r}: a fraction must lie in [0, 1]")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must lie in [{low}, {high}]")
