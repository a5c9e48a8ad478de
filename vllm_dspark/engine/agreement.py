# SPDX-License-Identifier: Apache-2.0
"""Where a step meets the other ranks of its tensor-parallel group.

The planner calls every method in every step, in the order in which they stand here; what happens
then depends on the operator's options and on the group's size, never on a value of this rank. A
group of one passes through.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_dspark.parallel.block_rows import BlockRows
from vllm_dspark.parallel.consensus import ConsensusChecker
from vllm_dspark.parallel.decision_log import DecisionLog
from vllm_dspark.parallel.step_record import Decision, Outcome
from vllm_dspark.parallel.tp_sync import HostPlan, TpSync

if TYPE_CHECKING:
    from vllm_dspark.engine.decision import StepDecision
    from vllm_dspark.engine.relay import Landed


class Agreement:
    """Sync, checker and logs of one planner; each may be absent."""

    def __init__(
        self,
        sync: TpSync | None = None,
        checker: ConsensusChecker | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        self._sync, self._checker, self._log = sync, checker, log
        self.keeps_own_rows = sync is not None and sync.keeps_own_rows

    def begin_step(self) -> None:
        """The host enters a step."""
        if self._checker is not None:
            self._checker.begin_step()

    def plan(self, decision: StepDecision, confidence: np.ndarray) -> None:
        """Put the group's plan, lengths and draft width where this rank's are.

        Args:
            confidence: ``[num_reqs, gamma]`` that this rank planned from.
        """
        plan, step = decision.plan, decision.step
        if self._log is not None:
            lens = decision.admitted
            self._log.planned(step, plan.budget, decision.req_ids, lens, confidence)
        if self._sync is None:
            return
        own = HostPlan(
            plan.budget,
            plan.verified_drafts,
            plan.tier_tokens,
            plan.uniform_k,
            decision.draft_width,
            decision.admitted,
        )
        agreed = self._sync.agree_plan(step, own, len(decision.req_ids))
        if agreed is own:
            return
        decision.plan = replace(
            plan,
            budget=agreed.budget,
            verified_drafts=agreed.verified_drafts,
            tier_tokens=agreed.tier_tokens,
            uniform_k=agreed.uniform_k,
        )
        decision.admitted, decision.draft_width = agreed.admitted, agreed.draft_width

    def decided(self, decision: StepDecision) -> None:
        """The step is about to run."""
        plan, lens, num_reqs = decision.plan, decision.admitted, len(decision.req_ids)
        if self._log is not None:
            self._log.graph(decision.step, decision.graph_tokens, decision.num_tokens, num_reqs)
        if self._checker is not None:
            self._checker.decided(
                Decision(
                    decision.step,
                    plan.budget,
                    plan.tier_tokens,
                    decision.graph_tokens,
                    decision.draft_width,
                    num_reqs,
                    None if lens is None else lens + 1,
                )
            )

    def split(
        self, lens: torch.Tensor | None, draft_tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor | None:
        """The group's device lengths ``[num_reqs]``; its ids replace those in ``draft_tokens``."""
        if self._sync is None:
            return lens
        return self._sync.agree_split(lens, draft_tokens, slots)

    def accept(self, output: Any) -> Any:
        """The group's sampler output; the same object unless accepted tokens are synced."""
        if self._sync is None or not self._sync.syncs_accept:
            return output
        ids, num_sampled, num_rejected = self._sync.agree_accept(
            output.sampled_token_ids, output.num_sampled, output.num_rejected
        )
        return replace(
            output, sampled_token_ids=ids, num_sampled=num_sampled, num_rejected=num_rejected
        )

    def block(
        self, own: torch.Tensor, rows: BlockRows, draft_tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """The group's rows ``[num_reqs, width]``; its ids replace those in ``draft_tokens``."""
        if self._sync is None:
            return own
        agreed = self._sync.agree_block(own, rows.gamma)
        if agreed is not own:
            draft_tokens[slots] = rows.drafts(agreed).to(draft_tokens.dtype)
        return agreed

    def end_step(self) -> None:
        """The host leaves the step."""
        if self._checker is not None:
            self._checker.end_step()

    def landed(self, landed: Landed) -> None:
        """A step's results are on the host."""
        agreed, own = landed.agreed, landed.own
        if own is not agreed:
            if self._sync is not None:
                self._sync.compare_blocks(agreed, own, landed.width)
            if self._log is not None:
                self._log.drafted(landed.step, landed.slots, own.confidence)
        if self._checker is not None:
            later = self._sync is not None and self._sync.mends_drafts_later
            drafts = None if later else agreed.drafts[:, : landed.width]
            self._checker.settled(Outcome(landed.step, own.num_sampled, agreed.verified, drafts))
