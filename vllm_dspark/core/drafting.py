# SPDX-License-Identifier: Apache-2.0
"""Whether to draft at all at the end of a step.

Drafting has a cost of its own, so even the best budget can lose against plain decoding (a large
batch, a hopeless drafter). Not drafting is compared with the best drafting rate; the choice flips
only for the minimum gain plus hysteresis. While drafting is off there are no confidences, so the
running means stand in for them, and one block is drafted every `redraft_steps` to refresh them.
"""

import numpy as np

from vllm_dspark.core.arrays import Float64Array
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.plan import StepInput
from vllm_dspark.core.policy import PolicyConfig
from vllm_dspark.core.tiers import TierLadder


class DraftSwitch:
    """State of the choice; deterministic in the steps it has seen."""

    def __init__(self, policy: PolicyConfig, gamma: int) -> None:
        self.on = True
        self.steps_off = 0
        self._policy = policy
        self._gamma = gamma

    def keep_drafting(
        self, step: StepInput, cost: CostModel, ladder: TierLadder, drafting_rate: float
    ) -> bool:
        """After a step with drafts, whose best rate (tokens per ms, drafting included) is known."""
        if not self._policy.allow_no_draft:
            return True
        return self._switch(self._plain_rate(step, cost, ladder), drafting_rate)

    def resume(
        self, step: StepInput, cost: CostModel, ladder: TierLadder, prior: Float64Array
    ) -> bool:
        """After a step without drafts: price a block of every width from the running means
        `[gamma]`.
        """
        sampling = int(np.count_nonzero(step.samples))
        if not self._policy.allow_no_draft or self.on or sampling == 0:
            return True
        if self.steps_off >= self._policy.redraft_steps:
            return self._set(True)
        requests = len(step.draft_lens)
        budgets = sampling * np.arange(self._gamma + 1)
        tau = sampling * (1.0 + np.concatenate(([0.0], np.cumsum(prior))))
        padded = ladder.pad(step.base_tokens + budgets, requests)
        cost_ms = cost.step_ms(
            padded, requests, step.context_tokens, sampling + budgets, step.full_mode
        ) + cost.draft_ms(requests)
        return self._switch(self._plain_rate(step, cost, ladder), float((tau / cost_ms).max()))

    def _plain_rate(self, step: StepInput, cost: CostModel, ladder: TierLadder) -> float:
        requests = len(step.draft_lens)
        sampling = int(np.count_nonzero(step.samples))
        tokens = np.array([ladder.pad_one(step.base_tokens, requests)])
        cost_ms = cost.step_ms(tokens, requests, step.context_tokens, sampling, step.full_mode)
        return sampling / float(cost_ms[0])

    def _switch(self, plain_rate: float, drafting_rate: float) -> bool:
        margin = 1.0 + self._policy.min_gain + self._policy.hysteresis
        if self.on:
            return self._set(plain_rate <= drafting_rate * margin)
        return self._set(drafting_rate >= plain_rate * margin)

    def _set(self, on: bool) -> bool:
        self.steps_off = 0 if on else self.steps_off + 1
        self.on = on
        return on
