# SPDX-License-Identifier: Apache-2.0
"""The planner: one decision per step, `plan(StepInput) -> VerifyPlan`.

Invariants:

* deterministic: the plan is a function of the step, the adopted tables and `PlannerState`; ranks
  that see equal inputs and adopt tables on equal steps plan alike without talking;
* doubt verifies everything: without drafts, confidences, cost model or a mode that can trim, the
  plan is the full block (within the operator's bounds), and the reason says which;
* never slower by its own prediction: a trimmed step must promise the minimum gain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_dspark.core.allocation import admit, even_split, widest_within
from vllm_dspark.core.arrays import IntArray
from vllm_dspark.core.budget import (
    Candidates,
    PricedBudgets,
    best,
    price_ragged,
    uniform_candidates,
    weigh,
)
from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.pace import Pace
from vllm_dspark.core.plan import PlanReason, StepInput, VerifyPlan
from vllm_dspark.core.policy import PolicyConfig, SearchMode
from vllm_dspark.core.ranking import RankedBlock, rank_block
from vllm_dspark.core.survival import RowDoubt, RunningSurvival, count_doubts
from vllm_dspark.core.tiers import ExecMode, TierLadder

_PRICED_SHAPES = 32
"""Step shapes whose prices are remembered; the largest take some hundred kilobytes each."""


@dataclass(slots=True)
class PlannerState:
    """Everything the next plan depends on besides its input."""

    prior: RunningSurvival
    pace: Pace = field(default_factory=Pace)
    trimming: bool = False


class Planner:
    """Plans steps of one deployment.

    Args:
        policy: operator options.
        gamma: drafts per block.
        ladders: graph tiers by mode; a mode without a ladder pads nothing.
        cost: step costs; None verifies everything.
        calibration: None leaves confidences as they are.
        width_ladders: graphs captured for one uniform draft count each (uniform search only).

    Raises:
        ValueError: if gamma is not positive or the calibration has another gamma.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        gamma: int,
        ladders: Mapping[ExecMode, TierLadder] | None = None,
        cost: CostModel | None = None,
        calibration: CalibrationTable | None = None,
        width_ladders: Mapping[int, TierLadder] | None = None,
    ) -> None:
        if gamma < 1:
            raise ValueError(f"gamma={gamma!r}: must be at least 1")
        self.policy = policy
        self.gamma = gamma
        given = ladders or {}
        self.ladders = {mode: given.get(mode, TierLadder()) for mode in ExecMode}
        self.width_ladders = dict(width_ladders or {})
        self.cost = cost
        self._priced: dict[tuple[object, ...], PricedBudgets] = {}
        self.calibration = CalibrationTable.identity(gamma)
        self.adopt(calibration=calibration)
        self.state = PlannerState(
            RunningSurvival(gamma, policy.start_confidence, policy.prior_rate)
        )

    def adopt(
        self, cost: CostModel | None = None, calibration: CalibrationTable | None = None
    ) -> None:
        """Use new tables from the next plan on. Every rank has to call this on the same step."""
        if calibration is not None:
            if calibration.gamma != self.gamma:
                raise ValueError(
                    f"calibration is for gamma={calibration.gamma}, the planner has {self.gamma}"
                )
            self.calibration = calibration
        if cost is not None:
            self.cost = cost

    def plan(self, step: StepInput) -> VerifyPlan:
        """Decide one step.

        Raises:
            ValueError: if array shapes do not match each other or gamma.
        """
        plan = self._decide(step)
        if plan.predicted_tau is not None and plan.predicted_step_ms is not None:
            self.state.pace.add(plan.predicted_tau, plan.predicted_step_ms)
        return plan

    # ------------------------------------------------------------------ deciding

    def _decide(self, step: StepInput) -> VerifyPlan:
        requests = len(step.draft_lens)
        drafts = int(step.draft_lens.sum())
        if drafts == 0:
            return self._without_drafts(step)
        if step.confidence is None:
            return self._unsearched(step, drafts)
        if step.confidence.shape != (requests, self.gamma):
            raise ValueError(
                f"confidence {step.confidence.shape} must be [{requests}, gamma={self.gamma}]"
            )
        block = rank_block(step, step.confidence, drafts, self.calibration, self.state.prior)
        bounds = self.policy.bounds(block.drafts, block.doubtful_drafts, step.max_drafts)
        uniform = self.policy.search is SearchMode.UNIFORM
        if uniform and _only_fresh(block.codes):
            # One width for all: fresh rows follow it, priced by the running means.
            bounds = self.policy.bounds(block.drafts, 0, step.max_drafts)
        reason = self._unsearchable(step, block, bounds, uniform)
        if reason is not None:
            return self._settle(step, block, bounds[1], reason, uniform, None, 0)
        return self._search(step, block, bounds, uniform)

    def _unsearchable(
        self, step: StepInput, block: RankedBlock, bounds: tuple[int, int], uniform: bool
    ) -> PlanReason | None:
        """Why there is nothing to search, or None."""
        if self.policy.pin is not None:
            return PlanReason.PINNED
        reason = None
        if self.policy.search is SearchMode.STATIC:
            reason = PlanReason.STATIC
        elif step.trim_mode is None:
            reason = PlanReason.MODE_UNAVAILABLE
        elif self.cost is None:
            reason = PlanReason.NO_COST_MODEL
        elif block.doubtful_drafts == block.drafts:
            reason = PlanReason.ALL_DOUBTFUL
        elif uniform and not _only_fresh(block.codes):
            # A width of gamma is the only one that verifies a doubtful row in full.
            reason = PlanReason.ALL_DOUBTFUL
        if reason is not None and bounds[1] < block.drafts:
            return PlanReason.CAPPED
        return reason

    def _search(
        self, step: StepInput, block: RankedBlock, bounds: tuple[int, int], uniform: bool
    ) -> VerifyPlan:
        cost, mode = self.cost, step.trim_mode
        assert cost is not None and mode is not None
        if uniform:
            found = uniform_candidates(
                block, step, cost, self.ladders, bounds, mode, self.width_ladders
            )
        else:
            priced = self._price_ragged(step, block, cost, bounds, mode)
            context_ms = cost.context_token_ms * step.context_tokens
            found = weigh(priced, block.tau(priced.budgets), context_ms)
        limit = self.policy.step_bound_ms
        choice = best(found, self.state.pace, limit)
        chosen, gain, last = choice.index, choice.gain, len(found.rates) - 1
        if limit is not None and found.cost_ms[last] > limit:
            reason = PlanReason.LATENCY_BOUND if chosen != last else PlanReason.FULL_BEST
            self.state.trimming = chosen != last
        else:
            needed = self.policy.min_gain
            if not self.state.trimming:
                needed += self.policy.hysteresis
            self.state.trimming = chosen != last and gain >= needed
            if self.state.trimming:
                reason = PlanReason.TRIMMED
            else:
                reason = PlanReason.FULL_BEST if chosen == last else PlanReason.GAIN_TOO_SMALL
                chosen, gain = last, 0.0
        plan = self._settle(step, block, int(found.budgets[chosen]), reason, uniform, found, chosen)
        plan.predicted_gain = gain
        return plan

    def _price_ragged(
        self,
        step: StepInput,
        block: RankedBlock,
        cost: CostModel,
        bounds: tuple[int, int],
        mode: ExecMode,
    ) -> PricedBudgets:
        """`price_ragged`, remembered for steps of the same shape: decoding repeats itself."""
        # Tables are part of the key by identity: whoever replaces one never gets its old prices.
        tables = (cost, self.ladders[mode], self.ladders[step.full_mode])
        counts = (len(step.draft_lens), block.sampling, block.drafts, step.base_tokens)
        key = (counts, bounds, mode, step.full_mode, tables)
        priced = self._priced.get(key)
        if priced is None:
            if len(self._priced) >= _PRICED_SHAPES:
                self._priced.clear()
            priced = self._priced[key] = price_ragged(
                step, block.sampling, block.drafts, bounds, cost, self.ladders, mode
            )
        return priced

    def _settle(
        self,
        step: StepInput,
        block: RankedBlock,
        budget: int,
        reason: PlanReason,
        uniform: bool,
        found: Candidates | None,
        chosen: int,
    ) -> VerifyPlan:
        """Turn a budget into a plan: lengths, tier and prediction."""
        admitted: IntArray | None = None
        uniform_k: int | None = None
        if uniform and budget < block.drafts:
            uniform_k, budget = widest_within(step.draft_lens, self.gamma, budget)
            admitted = np.minimum(step.draft_lens, uniform_k).astype(np.int32)
        elif step.need_lens:
            admitted = self._lens(step, block, budget)
            uniform_k = _common_width(admitted, budget)
        full = budget == block.drafts
        if found is not None:
            padded = int(found.padded[chosen])
            predicted_ms: float | None = float(found.cost_ms[chosen])
            tau = float(found.tau[chosen])
        else:
            padded, predicted_ms = self._price(step, budget, full)
            tau = float(block.tau(np.asarray(budget)))
        return VerifyPlan(
            budget=None if full else budget,
            reason=reason,
            verified_drafts=budget,
            tier_tokens=self._tier(step, full, padded),
            admitted=admitted,
            uniform_k=uniform_k,
            predicted_step_ms=predicted_ms,
            predicted_tau=tau,
            doubts=count_doubts(block.codes),
        )

    @staticmethod
    def _mode(step: StepInput, full: bool) -> ExecMode:
        return step.full_mode if full or step.trim_mode is None else step.trim_mode

    def _tier(self, step: StepInput, full: bool, padded: int) -> int | None:
        """`padded` if a graph of that size is replayed, None beyond the captured sizes."""
        ladder = self.ladders[self._mode(step, full)].for_requests(len(step.draft_lens))
        return padded if padded <= ladder.limit else None

    def _price(self, step: StepInput, budget: int, full: bool) -> tuple[int, float | None]:
        """Tokens that run and the predicted cost of a budget that no search has priced."""
        mode, requests = self._mode(step, full), len(step.draft_lens)
        padded = self.ladders[mode].pad_one(step.base_tokens + budget, requests)
        if self.cost is None:
            return padded, None
        rows = int(np.count_nonzero(step.samples)) + budget
        tokens = np.array([padded])
        cost_ms = self.cost.step_ms(tokens, requests, step.context_tokens, rows, mode)
        overhead = 0.0 if full else self.cost.ragged_ms
        return padded, float(cost_ms[0]) + overhead + self.cost.draft_ms(requests)

    def _lens(self, step: StepInput, block: RankedBlock, budget: int) -> IntArray:
        if budget >= block.drafts:
            return step.draft_lens.astype(np.int32)
        if budget <= 0:
            return np.zeros(len(step.draft_lens), dtype=np.int32)
        return admit(block.keys, budget, block.descending[budget - 1])

    # ------------------------------------------------------------------ steps without a choice

    def _without_drafts(self, step: StepInput) -> VerifyPlan:
        nothing = np.zeros(len(step.draft_lens), np.int32)
        plan = self._blind(step, PlanReason.NO_DRAFTS, 0, nothing)
        plan.predicted_tau = float(np.count_nonzero(step.samples))
        return plan

    def _unsearched(self, step: StepInput, drafts: int) -> VerifyPlan:
        """Without confidences: all `drafts`, or what the bounds leave, in position order."""
        reason = PlanReason.NO_CONFIDENCE
        high = self.policy.bounds(drafts, drafts, step.max_drafts)[1]
        if self.policy.pin is not None:
            reason = PlanReason.PINNED
        elif high < drafts:
            reason = PlanReason.CAPPED
        return self._blind(step, reason, drafts, self._even_lens(step, high))

    def _even_lens(self, step: StepInput, budget: int) -> IntArray:
        if self.policy.search is SearchMode.UNIFORM:
            width, _ = widest_within(step.draft_lens, self.gamma, budget)
            return np.minimum(step.draft_lens, width).astype(np.int32)
        return even_split(step.draft_lens, budget, self.gamma)

    def _blind(
        self, step: StepInput, reason: PlanReason, drafts: int, admitted: IntArray
    ) -> VerifyPlan:
        budget = int(admitted.sum())
        full = budget == drafts
        padded, predicted_ms = self._price(step, budget, full)
        return VerifyPlan(
            budget=None if full else budget,
            reason=reason,
            verified_drafts=budget,
            tier_tokens=self._tier(step, full, padded),
            admitted=admitted if step.need_lens else None,
            uniform_k=_common_width(admitted, budget),
            predicted_step_ms=predicted_ms,
        )


def _only_fresh(codes: IntArray | None) -> bool:
    return codes is None or not (codes > RowDoubt.FRESH).any()


def _common_width(admitted: IntArray, budget: int) -> int | None:
    """Drafts per row where all rows have the same, else None."""
    if not len(admitted) or budget % len(admitted):
        return None
    width = budget // len(admitted)
    return width if bool((admitted == width).all()) else None
