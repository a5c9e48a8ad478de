# SPDX-License-Identifier: Apache-2.0
"""How many drafts are worth verifying: a global search over budgets that graphs can realise.

`tau(b) = requests that sample + expectation of doubtful rows + sum of the b largest survivals`,
and the budget is the argmax of `tau(b) - worth * cost(b)`. A millisecond is worth what it earns:
the best rate `tau / cost` of the step, which makes the budget the argmax of the rate, or what the
server earns in the long run if that is more (`pace`). The search never stops early: cost is a
staircase, so there are several maxima. That is lossless only because the survivals are older
than the drafts they are spent on (DSpark paper, section 5.2); on live values this search biases the
output. Ties go to the smallest budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm_dspark.core.arrays import BoolArray, Float64Array, IntArray
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.pace import Pace
from vllm_dspark.core.plan import StepInput
from vllm_dspark.core.ranking import RankedBlock
from vllm_dspark.core.tiers import ExecMode, TierLadder


@dataclass(slots=True)
class PricedBudgets:
    """Budgets under comparison, ascending; the last one verifies as much as is allowed."""

    budgets: IntArray
    padded: IntArray
    """Tokens that run for each budget."""
    cost_ms: Float64Array
    """Cost of each, without the context term, which is the same for all."""


@dataclass(slots=True)
class Candidates:
    """Priced budgets with what they promise in this step, all `[n]`."""

    budgets: IntArray
    padded: IntArray
    cost_ms: Float64Array
    tau: Float64Array
    rates: Float64Array
    """Expected tokens per millisecond."""


def weigh(priced: PricedBudgets, tau: Float64Array, context_ms: float) -> Candidates:
    """Rates of priced budgets; `context_ms` is added to each cost."""
    cost_ms = priced.cost_ms + context_ms
    return Candidates(priced.budgets, priced.padded, cost_ms, tau, tau / cost_ms)


def price_ragged(
    step: StepInput,
    sampling: int,
    drafts: int,
    bounds: tuple[int, int],
    cost: CostModel,
    ladders: Mapping[ExecMode, TierLadder],
    trim_mode: ExecMode,
) -> PricedBudgets:
    """Every realisable budget of the batch between `bounds`.

    Verifying all `drafts` runs as the untrimmed step: in `full_mode`, without the ragged overhead.
    The result depends on counts and modes only, not on confidences, so it can be kept for the next
    step of the same shape.
    """
    low, high = bounds
    requests = len(step.draft_lens)
    budgets, padded = ladders[trim_mode].realisable(step.base_tokens, low, high, requests)
    rows = sampling + budgets
    untrimmed = high == drafts
    cost_ms = cost.step_ms(padded, requests, 0, rows, trim_mode) + cost.ragged_ms
    if untrimmed:
        padded[-1] = ladders[step.full_mode].pad_one(step.base_tokens + high, requests)
        last = cost.step_ms(padded[-1:], requests, 0, rows[-1:], step.full_mode)
        cost_ms[-1] = last[0]
    return PricedBudgets(budgets, padded, cost_ms + cost.draft_ms(requests))


def uniform_candidates(
    block: RankedBlock,
    step: StepInput,
    cost: CostModel,
    ladders: Mapping[ExecMode, TierLadder],
    bounds: tuple[int, int],
    trim_mode: ExecMode,
    width_ladders: Mapping[int, TierLadder],
) -> Candidates:
    """One draft count k for all requests, k = 0..gamma, priced as `base + sum(min(k, drafted))`.

    A width that has graphs of its own (`width_ladders`) is padded on those; if such ladders are
    given, widths without one are left out, gamma excepted. Of the widths inside `bounds` all are
    returned; if there is none, the largest that does not exceed the upper bound.
    """
    gamma, requests = block.keys.shape
    drafted = np.arange(gamma)[:, None] < step.draft_lens
    budgets = np.concatenate(([0], np.cumsum(drafted.sum(axis=1))))
    tau = np.concatenate(([0.0], np.cumsum(block.survival.sum(axis=1))))
    widths = np.arange(gamma + 1)
    keep = (budgets >= bounds[0]) & (budgets <= bounds[1])
    if width_ladders:
        keep &= _has_graphs(widths, width_ladders, gamma)
    if not keep.any():
        fitting = budgets <= bounds[1]
        keep = widths == widths[fitting][-1]
    widths, budgets, tau = widths[keep], budgets[keep], tau[keep]
    totals = step.base_tokens + budgets
    if width_ladders:
        padded = np.array(
            [
                width_ladders.get(int(k), ladders[trim_mode]).pad_one(int(t), requests)
                for k, t in zip(widths, totals, strict=True)
            ]
        )
    else:
        padded = ladders[trim_mode].pad(totals, requests)
    rows = block.sampling + budgets
    cost_ms = cost.step_ms(padded, requests, 0, rows, trim_mode)
    if budgets[-1] == block.drafts and step.full_mode is not trim_mode:
        padded[-1] = ladders[step.full_mode].pad_one(int(totals[-1]), requests)
        cost_ms[-1] = cost.step_ms(padded[-1:], requests, 0, rows[-1:], step.full_mode)[0]
    priced = PricedBudgets(budgets, padded, cost_ms + cost.draft_ms(requests))
    return weigh(priced, block.sampling + tau, cost.context_token_ms * step.context_tokens)


def _has_graphs(widths: IntArray, ladders: Mapping[int, TierLadder], gamma: int) -> BoolArray:
    return np.array([int(k) in ladders or k == gamma for k in widths])


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several candidates."""

    index: int
    gain: float
    """Tokens that it is better by than the last candidate, relative to that one's tokens."""


def best(candidates: Candidates, pace: Pace, bound_ms: float | None = None) -> Choice:
    """The candidate that leaves most after its time is paid for, smallest budget on ties.

    With `bound_ms` only candidates that cost at most that much count; if none does, the cheapest.
    """
    rates, tau, cost_ms = candidates.rates, candidates.tau, candidates.cost_ms
    if bound_ms is not None:
        feasible = cost_ms <= bound_ms
        if not feasible.any():
            feasible = cost_ms == cost_ms.min()
        rates = np.where(feasible, rates, -np.inf)
    index = int(rates.argmax())
    own = float(rates[index])
    worth = pace.worth(own)
    left = tau - worth * cost_ms
    if worth > own:
        index = int(np.where(np.isfinite(rates), left, -np.inf).argmax())
    gain = float((left[index] - left[-1]) / tau[-1]) if tau[-1] > 0.0 else 0.0
    return Choice(index, gain)
