# SPDX-License-Identifier: Apache-2.0
"""The words of one decision: what a step looks like, and how much of it is verified.

`Planner.plan(StepInput) -> VerifyPlan` is the whole interface of the policy. Both sides are plain
data; equal inputs (and equal planner state) give equal plans, so a rank that holds the same bits
needs no further agreement.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from vllm_dspark.core.arrays import BoolArray, Float32Array, IntArray
from vllm_dspark.core.survival import RowDoubt
from vllm_dspark.core.tiers import ExecMode


class PlanReason(StrEnum):
    """Why the plan is what it is. Everything but TRIMMED and PINNED verifies all it may."""

    TRIMMED = "trimmed"
    """The search found a smaller budget that pays."""
    FULL_BEST = "full_best"
    """The search found that verifying everything is best."""
    GAIN_TOO_SMALL = "gain_too_small"
    """A smaller budget is better, but not by the minimum gain."""
    LATENCY_BOUND = "latency_bound"
    """Verifying everything would break the step-time bound."""
    PINNED = "pinned"
    """The operator fixed the budget."""
    STATIC = "static"
    """The policy does not search."""
    NO_DRAFTS = "no_drafts"
    """Nothing was drafted for this step."""
    NO_COST_MODEL = "no_cost_model"
    NO_CONFIDENCE = "no_confidence"
    ALL_DOUBTFUL = "all_doubtful"
    MODE_UNAVAILABLE = "mode_unavailable"
    """The host cannot run a trimmed batch in this step."""
    CAPPED = "capped"
    """No search took place, and a cap or host limit holds the budget below everything."""


@dataclass(slots=True)
class StepInput:
    """One engine step before verification. Rows are requests, in an order equal on all ranks."""

    samples: BoolArray
    """`[num_reqs]` the request commits a token in this step (a chunked prefill may not)."""
    draft_lens: IntArray
    """`[num_reqs]` drafts scheduled for verification, 0..gamma."""
    base_tokens: int
    """Tokens that run whatever is decided: anchors and prefill chunks of all requests."""
    confidence: Float32Array | None = None
    """`[num_reqs, gamma]` lagged, uncalibrated confidences; None if the step has none."""
    row_state: IntArray | None = None
    """`[num_reqs]` `RowDoubt` codes known to the caller, 0 = trusted; None = all trusted."""
    context_tokens: int = 0
    """KV tokens read by the batch, all requests together."""
    regimes: IntArray | int = 0
    """`[num_reqs]` calibration regime of each request, or one for all."""
    trim_mode: ExecMode | None = ExecMode.FULL
    """How a trimmed batch would run; None if the host cannot trim this step."""
    full_mode: ExecMode = ExecMode.FULL
    """How the untrimmed batch would run."""
    max_drafts: int | None = None
    """Host limit on verified drafts (logit rows, token buffers); never exceeded."""
    need_lens: bool = True
    """Compute per-request lengths; false if the device splits the budget by itself."""


@dataclass(slots=True)
class VerifyPlan:
    """What this step verifies."""

    budget: int | None
    """Drafts verified by the whole batch; None = all that were scheduled."""
    reason: PlanReason
    verified_drafts: int
    """`budget`, or the number of scheduled drafts where it is None."""
    tier_tokens: int | None
    """Tokens of the graph that is replayed; None where nothing pads the step."""
    admitted: IntArray | None = None
    """`[num_reqs]` int32 drafts admitted per request; None if lengths were not asked for."""
    uniform_k: int | None = None
    """Drafts per request where every request has the same number."""
    predicted_step_ms: float | None = None
    predicted_tau: float | None = None
    """Expected committed tokens of the step, bonus tokens included."""
    predicted_gain: float = 0.0
    """Tokens that the chosen budget is better by than verifying everything, its time counted at
    what it is worth, relative to the tokens of verifying everything; 0 without a prediction."""
    doubts: dict[RowDoubt, int] = field(default_factory=dict)
    """Rows that verify their full block, by reason."""

    @property
    def verify_lens(self) -> IntArray | None:
        """`[num_reqs]` int32, anchor included: 1..gamma+1. A prefill chunk counts as its anchor."""
        return None if self.admitted is None else self.admitted + np.int32(1)
