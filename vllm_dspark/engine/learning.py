# SPDX-License-Identifier: Apache-2.0
"""Calibration that follows the traffic.

Every rank sees equal outcomes in equal order (see ``relay``), refits on equal step numbers and so
adopts equal tables; nothing is exchanged for it.
"""

from __future__ import annotations

import numpy as np

from vllm_dspark.core.planner import Planner
from vllm_dspark.core.platt import OnlineCalibrator
from vllm_dspark.engine.decision import StepDecision

REFIT_STEPS = 512
_WINDOW_BLOCKS = 1024
"""Recent blocks per sampling regime: enough for two parameters a slot, and quick to refit."""


class OnlineLearning:
    """Observer that refits the planner's calibration every ``REFIT_STEPS`` settled steps."""

    def __init__(self, core: Planner) -> None:
        self._core = core
        self._calibrator = OnlineCalibrator(core.gamma, window=_WINDOW_BLOCKS)
        self._steps = 0

    def __call__(self, decision: StepDecision, accepted: np.ndarray) -> None:
        assert decision.admitted is not None and decision.predicted is not None, "settled"
        rows = decision.samples & np.isfinite(decision.predicted[:, 0])
        regimes = decision.regimes
        self._calibrator.observe(
            decision.predicted[rows],
            accepted[rows],
            decision.admitted[rows],
            regimes if isinstance(regimes, int) else regimes[rows],
        )
        self._steps += 1
        if self._steps % REFIT_STEPS == 0:
            self._core.adopt(calibration=self._calibrator.refit(self._core.calibration))
