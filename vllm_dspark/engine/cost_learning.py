# SPDX-License-Identifier: Apache-2.0
"""Cost models that come from the steps being served.

Where the host profiles nothing at start-up (eager, CPU) a line is fitted from the first steps and
refitted as more shapes are seen; a profiled model is corrected. Step times differ between ranks, so
rank 0's result is shared, on step numbers that are equal on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_dspark.core.cost_fit import line_model
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.live_cost import Corrections, LiveCost
from vllm_dspark.core.planner import Planner
from vllm_dspark.engine.decision import StepDecision

FIRST_FIT_STEPS = 48
EXCHANGE_STEPS = 128
_SAMPLES_KEPT = 4096

Share = Callable[[Any], Any]


class CostLearning:
    """Observer that fits, or corrects, the planner's cost model.

    Args:
        core: the policy; its cost model is replaced.
        share: rank 0's object on every rank; a collective, called on equal steps.
    """

    def __init__(self, core: Planner, share: Share) -> None:
        self._core = core
        self._share = share
        self._steps = 0
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES_KEPT)
        self._live: LiveCost | None = None

    def __call__(self, decision: StepDecision, accepted: np.ndarray) -> None:
        if self._steps == 0 and self._core.cost is not None:
            # Decided once, by what all ranks have in common.
            self._live = LiveCost(self._core.cost)
        self._steps += 1
        if decision.measured_ms is not None:
            if self._live is not None:
                self._correct(self._live, decision, decision.measured_ms)
            else:
                self._samples.append((decision.num_tokens, decision.measured_ms))
        if self._steps == FIRST_FIT_STEPS or self._steps % EXCHANGE_STEPS == 0:
            self._exchange()

    def _correct(self, live: LiveCost, decision: StepDecision, measured_ms: float) -> None:
        requests = len(decision.req_ids)
        tokens = decision.graph_tokens or decision.num_tokens
        rows = int(np.count_nonzero(decision.samples)) + decision.running_drafts
        model = live.model
        other = model.batch_ms(requests, decision.context_tokens) + model.logit_row_ms * rows
        other += model.draft_ms(requests, decision.draft_width)
        live.observe(decision.exec_mode, tokens, other, measured_ms)

    def _exchange(self) -> None:
        if self._live is not None:
            version, corrections = self._share(self._live.payload())
            if self._live.adopt(version, spread(corrections, self._live.model)):
                self._core.adopt(cost=self._live.model)
            return
        fitted = self._share(self._fit())
        if fitted is not None:
            self._core.adopt(cost=fitted)

    def _fit(self) -> CostModel | None:
        if len(self._samples) < FIRST_FIT_STEPS // 2:
            return None
        return fit_line(np.array(self._samples))


def fit_line(samples: np.ndarray) -> CostModel | None:
    """Step time as a line over tokens, ``samples`` ``[n, 2]`` of tokens and milliseconds.

    A step without graphs pads nothing, and a few dozen noisy steps carry no more than a line.
    Drafting is part of the intercept: it is the same for every budget. None if all steps were of
    one size.
    """
    tokens, ms = samples[:, 0], samples[:, 1]
    usual = ms <= 3.0 * np.median(ms)
    tokens, ms = tokens[usual], ms[usual]
    if tokens.min() == tokens.max():
        return None
    slope = max(float(np.polyfit(tokens, ms, 1)[0]), 0.0)
    return line_model(tokens, ms - slope * tokens, ms, slope, request_ms=0.0)


def spread(corrections: Corrections, model: CostModel) -> Corrections:
    """Corrections for every measured size of ``model``.

    A size that no step has run at gets the median of its mode. Left alone it would look cheap
    beside those that are known to cost more than profiled, and be chosen for that.
    """
    everywhere = dict(corrections)
    for mode, curve in model.verify.items():
        seen = [ratio for (name, _), ratio in corrections.items() if name == mode.value]
        if seen:
            typical = float(np.median(seen))
            for size in curve.sizes.tolist():
                everywhere.setdefault((mode.value, size), typical)
    return everywhere
