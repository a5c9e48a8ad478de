# SPDX-License-Identifier: Apache-2.0
"""What was decided for one step, until its outcome is known.

A decision is made when the runner asks for the step's tokens, executed by the calls that follow,
and settled a step or two later, when what it committed has reached the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.plan import VerifyPlan
from vllm_dspark.core.tiers import ExecMode


@dataclass
class StepDecision:
    """What was decided for one step. Rows are requests in batch order."""

    step: int
    req_ids: list[str]
    slots: np.ndarray
    base_lens: np.ndarray
    """``[num_reqs]`` tokens besides drafts."""
    base_tokens: int
    """Their sum."""
    decodes: bool
    """Every request runs one token besides its drafts."""
    draft_lens: np.ndarray
    """``[num_reqs]`` drafts that the scheduler handed over."""
    eligible: np.ndarray
    """``[num_reqs]`` those of them that are drafts of this request and not placeholders."""
    useful: np.ndarray
    """``[num_reqs]`` drafts that could still be delivered, were they accepted."""
    admitted: np.ndarray | None
    """``[num_reqs]`` drafts of the plan; None until the device's split has been read back."""
    samples: np.ndarray
    """``[num_reqs]`` requests that commit a token in this step."""
    plan: VerifyPlan
    trims: bool
    """Only admitted drafts run."""
    regimes: np.ndarray | int
    """``[num_reqs]`` sampling regime of each request, or one for all."""
    context_tokens: int
    """KV tokens read by the batch."""
    exec_mode: ExecMode
    """How the target forward is expected to run."""
    draft_width: int
    """Slots of the block that is drafted at the end of this step."""
    time_s: float
    """Wall clock when it was decided."""
    predicted: np.ndarray | None = None
    """``[num_reqs, gamma]`` confidences of the block under verification, NaN where unknown."""
    graph_tokens: int | None = None
    """Token count of the graph that was replayed; None if the step ran without one."""
    graph_miss: str = ""
    """Why a step that should have replayed a full graph did not."""
    measured_ms: float | None = None
    """How long the step took; None if it was not timed, or there was a pause."""

    @property
    def spendable(self) -> np.ndarray:
        """``[num_reqs]`` drafts to spend the budget on: the useful ones if they suffice."""
        lens = np.minimum(self.eligible, self.useful)
        return lens if int(lens.sum()) >= self.plan.verified_drafts else self.eligible

    @property
    def running_drafts(self) -> int:
        """Drafts that the target runs."""
        return self.plan.verified_drafts if self.trims else int(self.draft_lens.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens that run, padding left out."""
        return self.base_tokens + self.running_drafts

    @property
    def host_lens(self) -> np.ndarray | None:
        """``[num_reqs]`` drafts that run, None where only the device knows."""
        return self.admitted if self.trims else self.draft_lens


Observer = Callable[[StepDecision, np.ndarray], None]
"""Called with a decision and the accepted drafts ``[num_reqs]`` of its step."""


PAUSE_MS = 1000.0
"""A longer gap is an idle engine, not a step."""


def step_time(elapsed_ms: float) -> float | None:
    """The gap as the time of a step; None if it was a pause."""
    return elapsed_ms if elapsed_ms < PAUSE_MS else None


class StepClock:
    """Time from one decision to the next, which is the step time where the host runs the model."""

    def __init__(self) -> None:
        self._last = 0.0

    def tick(self, awaiting: Sequence[StepDecision], step: int) -> None:
        """Step ``step`` is about to be decided; so long did the one before it take."""
        now = time.perf_counter()
        if awaiting and awaiting[-1].step == step - 1:
            elapsed_ms = (now - self._last) * 1e3
            awaiting[-1].measured_ms = step_time(elapsed_ms)
        self._last = now
