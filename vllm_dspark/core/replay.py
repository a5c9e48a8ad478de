# SPDX-License-Identifier: Apache-2.0
"""A recorded trace under another policy: what would have been committed, and how fast.

The trace is cut into `requests` streams that decode side by side. At every step the planner sees
the previous block's confidences of each stream (as a server would), fixes the budget, and the
budget is spent by the lagged (host-exact) or the live (device) confidences. A stream advances one
recorded block per step whatever was verified: blocks are treated as exchangeable, which leaves
accept length unbiased but not the text.

A block that was itself trimmed hides what lay past its window; where the replay looks further, the
calibrated expectation stands in, and `censored` counts those blocks.
"""

from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.allocation import allocate
from vllm_dspark.core.arrays import Float64Array, IntArray
from vllm_dspark.core.plan import StepInput
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.survival import RowDoubt, survival
from vllm_dspark.core.trace import Trace


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Means over all steps of a replay."""

    steps: int
    requests: int
    accept_length: float
    """Committed tokens per request and step, bonus included."""
    drafts_per_request: float
    """Verified drafts per request and step."""
    predicted_accept_length: float
    step_ms: float
    """Mean predicted step time; NaN without a cost model."""
    tokens_per_s: float
    """Committed tokens per second of the whole batch; NaN without a cost model."""
    trimmed_steps: int
    censored: int

    def gain_over(self, other: "ReplayResult") -> float:
        """Relative throughput over `other`, e.g. 0.1 for ten percent more."""
        return self.tokens_per_s / other.tokens_per_s - 1.0


def replay(
    trace: Trace,
    planner: Planner,
    requests: int,
    context_per_request: int = 0,
    live_membership: bool = False,
) -> ReplayResult:
    """Run the trace through `planner`.

    Args:
        trace: recorded blocks.
        planner: policy, ladders, cost and calibration under test; its state advances.
        requests: streams decoded side by side.
        context_per_request: KV tokens of each request, for the cost model.
        live_membership: spend the budget by the live block instead of by the lagged one.

    Raises:
        ValueError: if gamma differs or the trace is too short.
    """
    if trace.gamma != planner.gamma:
        raise ValueError(f"trace has gamma={trace.gamma}, the planner {planner.gamma}")
    blocks = trace.streams(requests)
    lens = np.full(requests, trace.gamma, dtype=np.int32)
    samples = np.ones(requests, dtype=np.bool_)
    fresh = np.full(requests, RowDoubt.FRESH, dtype=np.int8)
    committed, drafts, tau, times, trimmed, censored = 0.0, 0, 0.0, [], 0, 0
    for index, now in enumerate(blocks):
        lagged = blocks[max(index - 1, 0)]
        step = StepInput(
            samples=samples,
            draft_lens=lens,
            base_tokens=requests,
            confidence=trace.confidence[lagged],
            row_state=fresh if index == 0 else None,
            context_tokens=context_per_request * requests,
        )
        plan = planner.plan(step)
        admitted = plan.admitted
        assert admitted is not None
        if live_membership and plan.budget is not None:
            live, _ = survival(_calibrated(planner, trace.confidence[now]))
            admitted = allocate(live, lens, plan.budget)
        accepted, hidden = _outcome(trace, now, admitted)
        committed += requests + float(accepted.sum())
        drafts += int(admitted.sum())
        tau += plan.predicted_tau or 0.0
        trimmed += plan.budget is not None
        censored += hidden
        if plan.predicted_step_ms is not None:
            times.append(plan.predicted_step_ms)
    steps = len(blocks)
    total_ms = float(np.sum(times)) if len(times) == steps else float("nan")
    return ReplayResult(
        steps=steps,
        requests=requests,
        accept_length=committed / (steps * requests),
        drafts_per_request=drafts / (steps * requests),
        predicted_accept_length=tau / (steps * requests),
        step_ms=total_ms / steps,
        tokens_per_s=1000.0 * committed / total_ms,
        trimmed_steps=trimmed,
        censored=censored,
    )


def _calibrated(planner: Planner, confidence: Float64Array) -> Float64Array:
    return np.asarray(planner.calibration.apply(confidence.T, 0).T)


def _outcome(trace: Trace, rows: IntArray, admitted: IntArray) -> tuple[Float64Array, int]:
    """Accepted drafts `[requests]` under the new windows, and how many were censored."""
    accepted, verified = trace.accepted[rows], trace.verified[rows]
    known = np.minimum(accepted, admitted).astype(np.float64)
    hidden = (accepted == verified) & (admitted > verified)
    if hidden.any():
        positions = np.arange(trace.gamma)
        beyond = positions >= verified[hidden, None]
        inside = beyond & (positions < admitted[hidden, None])
        chain = np.cumprod(np.where(beyond, trace.confidence[rows][hidden], 1.0), axis=1)
        known[hidden] += (chain * inside).sum(axis=1)
    return known, int(np.count_nonzero(hidden))
