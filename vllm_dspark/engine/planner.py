# SPDX-License-Identifier: Apache-2.0
"""Answers the model runner's verification calls from the policy in ``core``.

Per step the runner asks, in this order: ``get_num_tokens`` (how many tokens will run; the decision
falls here), ``dispatch`` on the graph manager (which graph), ``compact_batch`` (host lengths),
``reallocate_drafts`` (device offsets), and after drafting ``record_confidences``.

Age of what is read (paper section 5.2): a block drafted in step t is verified in step t+1. The budget of
step t+1 comes from blocks drafted in step t-1 or before, so it never depends on the live block. Who
gets the budget may depend on the live block; on a host whose device is the CPU it does, elsewhere the
same lagged values decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dspark.core.allocation import allocate
from vllm_dspark.core.plan import StepInput, VerifyPlan
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.survival import RowDoubt
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.relay import BlockRelay, Landed

LAG_STEPS = 1
MAX_AGE_STEPS = 8
"""A request that was not drafted for this many steps counts as stale."""

OrderRequests = Callable[[dict[str, int], dict[str, list[int]], int], list[str]]


@dataclass
class StepDecision:
    """What was decided for one step. Rows are requests in batch order."""

    step: int
    req_ids: list[str]
    slots: np.ndarray
    draft_lens: np.ndarray
    admitted: np.ndarray
    base_tokens: int
    samples: np.ndarray
    """``[num_reqs]`` requests that commit a token in this step."""
    plan: VerifyPlan
    predicted: np.ndarray
    """``[num_reqs, gamma]`` confidences of the block under verification, NaN where unknown."""
    verified: np.ndarray
    """``[num_reqs]`` drafts that the target runs: the admitted ones where the mode trims."""
    graph_tokens: int | None = None
    """Token count of the graph that was replayed; None if the step ran without one."""

    @property
    def num_tokens(self) -> int:
        """Tokens that run, padding left out."""
        return self.base_tokens + int(self.verified.sum())


class StepPlanner:
    """Takes the place of the host's verification manager.

    Args:
        core: the policy.
        mode: what the plan is allowed to do.
        req_states: the runner's request state.
        query_start_loc: ``[max_num_reqs + 1]`` int32 device buffer that the runner fills.
        num_bonus_tokens: logit rows per request besides its drafts.
        order: the runner's batch order.
        answers_admitted: the runner expects admitted counts in ``reallocate_drafts``.
        observer: receives every decision once its outcome is known.
        has_confidence: the draft publishes confidences; without them everything is verified.
        broadcast: makes the published results of all ranks equal, see ``BlockRelay``.
    """

    def __init__(
        self,
        core: Planner,
        mode: VerifyMode,
        req_states: Any,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int,
        max_total_logits: int,
        order: OrderRequests,
        answers_admitted: bool,
        observer: Observer | None = None,
        has_confidence: bool = True,
        broadcast: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.core = core
        self.mode = mode
        self._states = req_states
        self._query_start_loc = query_start_loc
        self._bonus = num_bonus_tokens
        self._max_logits = max_total_logits
        self._order = order
        self._answers_admitted = answers_admitted
        self._observer = observer
        self._has_confidence = has_confidence
        gamma, slots = req_states.num_speculative_steps, req_states.max_num_reqs
        self._gamma = gamma
        self._relay = BlockRelay(slots, gamma, req_states.device, broadcast=broadcast)
        self._live_host = req_states.device.type == "cpu"
        self._lagged = _SlotTable(slots, gamma)
        self._live = _SlotTable(slots, gamma)
        self._unread: Landed | None = None
        self._awaiting: deque[StepDecision] = deque()
        self._decision: StepDecision | None = None
        self._running: StepDecision | None = None
        self._num_sampled: torch.Tensor | None = None

    # ------------------------------------------------------------------ requests

    def add_request(self, req_idx: int) -> None:
        """A slot has a new owner; what is known of it belongs to the previous one."""
        self._lagged.reset(req_idx, self._relay.published)
        self._live.reset(req_idx, self._relay.published)

    # ------------------------------------------------------------------ the decision

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Decide the step; returns the tokens that will run."""
        self._read_results()
        req_ids = self._order(num_tokens_per_req, draft_tokens, self._gamma + self._bonus)
        count = len(req_ids)
        scheduled = np.fromiter((num_tokens_per_req[r] for r in req_ids), np.int64, count)
        drafts = np.fromiter((len(draft_tokens.get(r, ())) for r in req_ids), np.int64, count)
        slots = np.fromiter((self._states.req_id_to_index[r] for r in req_ids), np.int64, count)
        base = scheduled - drafts
        computed = self._states.num_computed_tokens_np[slots]
        prefill = self._states.prefill_len.np[slots]
        # Drafts of a step that starts inside the prompt are placeholders of a migrated request.
        real = np.where(computed < prefill, 0, drafts)
        samples = computed + base >= prefill
        step = self._relay.published
        confidence, state = self._lagged.read(slots, step)
        plan = self.core.plan(
            StepInput(
                samples=samples,
                draft_lens=real,
                base_tokens=int(base.sum()),
                confidence=confidence if self._has_confidence else None,
                row_state=state,
                context_tokens=int(computed.sum()),
                trim_mode=self._exec_mode(base),
                full_mode=self._exec_mode(base),
                max_drafts=max(0, self._max_logits - count * self._bonus),
            )
        )
        admitted = drafts if self.mode is VerifyMode.STATIC else self._admit(plan, slots, real, step)
        predicted = self._live.peek(slots, step) if self._live_host else confidence
        self._decision = StepDecision(
            step=step,
            req_ids=req_ids,
            slots=slots,
            draft_lens=drafts,
            admitted=admitted,
            base_tokens=int(base.sum()),
            samples=samples,
            plan=plan,
            predicted=predicted,
            verified=admitted if self.mode.trims else drafts,
        )
        self._awaiting.append(self._decision)
        return self._decision.num_tokens

    def _admit(
        self, plan: VerifyPlan, slots: np.ndarray, drafts: np.ndarray, step: int
    ) -> np.ndarray:
        """Lengths of the plan, spent by the live block where the host can read it."""
        assert plan.admitted is not None
        if plan.budget is None or plan.uniform_k is not None or not self._live_host:
            return plan.admitted
        confidence, state = self._live.read(slots, step)
        doubtful = state != RowDoubt.TRUSTED
        survival = self.core.calibration.apply(confidence.T.copy(), 0).cumprod(axis=0).T
        return allocate(survival, drafts, plan.verified_drafts, doubtful)

    def _exec_mode(self, base: np.ndarray) -> ExecMode:
        """How a batch with ``base`` tokens besides its drafts runs, trimmed or not."""
        if self._has_full_graphs and bool((base == 1).all()):
            return ExecMode.FULL
        return self._mixed_mode

    @property
    def _has_full_graphs(self) -> bool:
        return self.core.ladders[ExecMode.FULL].limit > 0 or bool(self.core.width_ladders)

    @property
    def _mixed_mode(self) -> ExecMode:
        has_piecewise = self.core.ladders[ExecMode.PIECEWISE].limit > 0
        return ExecMode.PIECEWISE if has_piecewise else ExecMode.EAGER

    # ------------------------------------------------------------------ execution

    @property
    def uniform_query_len(self) -> int | None:
        """Query length of the decided step if it is one for all requests and shorter than usual."""
        decision = self._decision
        if decision is None or not self.mode.trims or decision.plan.uniform_k is None:
            return None
        if decision.base_tokens != len(decision.req_ids):
            return None
        return int(decision.plan.uniform_k) + 1

    def dispatched(self, graph: Any) -> None:
        """The graph manager's choice for the decided step."""
        if self._decision is not None and graph.cg_mode.value:
            self._decision.graph_tokens = graph.num_tokens

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Exact host lengths ``[num_reqs]`` and logit offsets ``[num_reqs + 1]``."""
        decision = self._decision
        assert decision is not None
        if not self.mode.trims:
            return num_scheduled_tokens, cu_num_logits_np
        counts = num_scheduled_tokens - num_draft_tokens_per_req + decision.admitted
        return counts.astype(num_scheduled_tokens.dtype), self._logit_offsets(decision)

    def _logit_offsets(self, decision: StepDecision) -> np.ndarray:
        offsets = np.zeros(len(decision.req_ids) + 1, dtype=np.int32)
        np.cumsum(decision.verified + self._bonus, out=offsets[1:])
        return offsets

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Device offsets of the decided step; the decision is consumed.

        Returns:
            Logit offsets ``[num_reqs + 1]`` int32, the runner's ``query_start_loc``, drafts that
            run, and, where the runner asks for it, None: host counts are exact.
        """
        decision = self._decision
        assert decision is not None and decision.req_ids == req_ids, "one decision per step"
        self._decision = None
        cu_num_logits = async_tensor_h2d(self._logit_offsets(decision), device=idx_mapping.device)
        self._running = decision
        answer = (cu_num_logits, self._query_start_loc, int(decision.verified.sum()))
        return (*answer, None) if self._answers_admitted else answer

    def make_exact(self, input_batch: Any) -> None:
        """Put the lengths that run where the host left what was scheduled."""
        decision = self._running
        if decision is None or decision.req_ids != input_batch.req_ids or not self.mode.trims:
            return
        lens = np.diff(input_batch.query_start_loc_np[: input_batch.num_reqs + 1])
        input_batch.num_scheduled_tokens = lens
        input_batch.num_draft_tokens_per_req = decision.verified.astype(np.int32)
        input_batch.max_query_len = int(lens.max())

    def take_window(self, req_ids: list[str]) -> np.ndarray | None:
        """Drafts ``[num_reqs]`` int32 that the running step may commit, None without a plan."""
        decision = self._running
        if decision is None or decision.req_ids != req_ids:
            return None
        return decision.admitted.astype(np.int32)

    # ------------------------------------------------------------------ results

    def committed(self, num_sampled: torch.Tensor) -> None:
        """Tokens committed per request ``[num_reqs]`` by the verification of the running step."""
        self._num_sampled = num_sampled

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Publish the block that was just drafted and what its step committed."""
        self._running = None
        count = input_batch.num_reqs
        num_sampled, self._num_sampled = self._num_sampled, None
        if num_sampled is None:
            num_sampled = torch.zeros(count, dtype=torch.int32, device=confidence_probs.device)
        self._relay.publish(input_batch.idx_mapping_np, confidence_probs[:count], num_sampled)

    def _read_results(self) -> None:
        """Take in every step that is old enough, in order."""
        if self._live_host:
            # The copy is done when publish returns, so the newest step may be read for ranking;
            # the budget still waits one step.
            for landed in self._relay.collect(0):
                if self._unread is not None:
                    self._lagged.update(self._unread)
                self._live.update(landed)
                self._settle(landed)
                self._unread = landed
            return
        for landed in self._relay.collect(LAG_STEPS):
            self._lagged.update(landed)
            self._settle(landed)

    def _settle(self, landed: Landed) -> None:
        """Match a step's outcome with its decision."""
        while self._awaiting and self._awaiting[0].step < landed.step:
            self._awaiting.popleft()
        if not self._awaiting or self._awaiting[0].step != landed.step:
            return
        decision = self._awaiting.popleft()
        if self._observer is not None:
            self._observer(decision, np.maximum(landed.num_sampled - 1, 0))

    # ------------------------------------------------------------------ start-up

    def batches_to_profile(self, capture_sizes: list[int]) -> list[dict[str, int]]:
        """Dummy batches whose step times seed the cost model."""
        return []

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Step times of ``batches_to_profile``."""


Observer = Callable[[StepDecision, np.ndarray], None]
"""Called with a decision and the accepted drafts ``[num_reqs]`` of its step."""


class _SlotTable:
    """Latest confidences per request slot, and since which step they may be trusted."""

    def __init__(self, slots: int, gamma: int) -> None:
        self._confidence = np.zeros((slots, gamma), dtype=np.float32)
        self._step = np.full(slots, -1, dtype=np.int64)
        self._owner_since = np.zeros(slots, dtype=np.int64)

    def reset(self, slot: int, step: int) -> None:
        self._owner_since[slot] = step
        self._step[slot] = -1

    def update(self, landed: Landed) -> None:
        # A step that ran before the slot changed hands says nothing of the new owner.
        mine = self._owner_since[landed.slots] <= landed.step
        self._confidence[landed.slots[mine]] = landed.confidence[mine]
        self._step[landed.slots[mine]] = landed.step

    def read(self, slots: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Confidences ``[n, gamma]`` and ``RowDoubt`` codes ``[n]`` for step ``step``."""
        seen = self._step[slots]
        state = np.zeros(len(slots), dtype=np.int8)
        state[step - seen > MAX_AGE_STEPS] = RowDoubt.STALE
        state[seen < 0] = RowDoubt.FRESH
        return self._confidence[slots], state

    def peek(self, slots: np.ndarray, step: int) -> np.ndarray:
        """Confidences ``[n, gamma]`` of the block drafted in step ``step - 1``, else NaN."""
        current = (self._step[slots] == step - 1)[:, None]
        return np.where(current, self._confidence[slots], np.float32(np.nan))
