# SPDX-License-Identifier: Apache-2.0
"""Calibration that follows the traffic.

Every rank sees equal outcomes in equal order (see ``relay``), refits on equal step numbers and so
adopts equal tables; nothing is exchanged for it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from vllm_dspark.core.planner import Planner
from vllm_dspark.core.platt import OnlineCalibrator
from vllm_dspark.engine.decision import StepDecision

REFIT_STEPS = 512
_WINDOW_BLOCKS = 1024
"""Recent blocks per sampling regime: enough for two parameters a slot, and quick to refit."""
_KEPT_BLOCKS = 4 * _WINDOW_BLOCKS
"""Blocks of all regimes that wait for a refit. Older ones are dropped unseen: in a large batch most
blocks of 512 steps would only push each other out of the window.
"""


class OnlineLearning:
    """Observer that refits the planner's calibration every ``REFIT_STEPS`` settled steps."""

    def __init__(self, core: Planner) -> None:
        self._core = core
        self._calibrator = OnlineCalibrator(core.gamma, window=_WINDOW_BLOCKS)
        self._steps = 0
        self._waiting: deque[tuple[StepDecision, np.ndarray]] = deque()
        self._blocks = 0

    def __call__(self, decision: StepDecision, accepted: np.ndarray) -> None:
        # Looked at in the step that refits, so that the others only keep what they know.
        self._waiting.append((decision, accepted))
        self._blocks += len(accepted)
        while self._blocks - len(self._waiting[0][1]) >= _KEPT_BLOCKS:
            self._blocks -= len(self._waiting.popleft()[1])
        self._steps += 1
        if self._steps % REFIT_STEPS == 0:
            self._observe()
            self._core.adopt(calibration=self._calibrator.refit(self._core.calibration))

    def _observe(self) -> None:
        """Hand all that waits to the calibrator, at once."""
        columns: list[list[np.ndarray]] = [[], [], [], []]
        for decision, accepted in self._waiting:
            assert decision.admitted is not None and decision.predicted is not None, "settled"
            rows = decision.samples & np.isfinite(decision.predicted[:, 0])
            regimes = np.broadcast_to(decision.regimes, rows.shape)
            step = (decision.predicted, accepted, decision.admitted, regimes)
            for column, values in zip(columns, step, strict=True):
                column.append(values[rows])
        self._waiting.clear()
        self._blocks = 0
        self._calibrator.observe(*(np.concatenate(column) for column in columns))
