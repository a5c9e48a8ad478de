# SPDX-License-Identifier: Apache-2.0
"""What is known of the request in each slot, and whether it may be trusted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_dspark.core.survival import RowDoubt
from vllm_dspark.engine.relay import Landed

MAX_AGE_STEPS = 8
"""A request that was not drafted for this many steps counts as stale."""


class SlotTable:
    """Latest confidences per request slot, and since which step they may be trusted."""

    def __init__(self, slots: int, gamma: int) -> None:
        self._confidence = np.zeros((slots, gamma), dtype=np.float32)
        self._drafted = np.zeros((slots, gamma), dtype=np.float32)
        """The same, NaN where nothing was drafted."""
        self._step = np.full(slots, -1, dtype=np.int64)
        self._owner_since = np.zeros(slots, dtype=np.int64)

    def reset(self, slot: int, step: int) -> None:
        self._owner_since[slot] = step
        self._step[slot] = -1

    def update(self, landed: Landed, typical: Callable[[], np.ndarray]) -> None:
        """Take in a step; ``typical()`` ``[gamma]`` stands for slots that were not drafted."""
        slots, confidence, width = landed.slots, landed.agreed.confidence, landed.width
        # A step that ran before the slot changed hands says nothing of the new owner.
        mine = self._owner_since[slots] <= landed.step
        if not mine.all():
            slots, confidence = slots[mine], confidence[mine]
        self._confidence[slots] = self._drafted[slots] = confidence
        if width < confidence.shape[1]:
            self._confidence[slots, width:] = typical()[width:]
            self._drafted[slots, width:] = np.nan
        self._step[slots] = landed.step

    def read(self, slots: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Confidences ``[n, gamma]`` and ``RowDoubt`` codes ``[n]`` for step ``step``."""
        seen = self._step[slots]
        state = np.zeros(len(slots), dtype=np.int8)
        if seen.min(initial=step) < max(step - MAX_AGE_STEPS, 0):
            state[step - seen > MAX_AGE_STEPS] = RowDoubt.STALE
            state[seen < 0] = RowDoubt.FRESH
        return self._confidence[slots], state

    def peek(self, slots: np.ndarray, step: int) -> np.ndarray:
        """Confidences ``[n, gamma]`` of the block drafted in step ``step - 1``, NaN elsewhere."""
        block = self._drafted[slots]
        block[self._step[slots] != step - 1] = np.nan
        return block
