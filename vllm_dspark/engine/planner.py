# SPDX-License-Identifier: Apache-2.0
"""Answers the model runner's verification calls from the policy in ``core``.

Per step the runner asks, in this order: ``get_num_tokens`` (how many tokens will run; the decision
falls here), ``dispatch`` on the graph manager (which graph), ``compact_batch`` (host lengths),
``reallocate_drafts`` (device offsets), and after drafting ``record_confidences``.

Age of what is read (paper section 5.2): a block drafted in step t is verified in step t+1. The
budget of step t+1 comes from blocks drafted in step t-1 or before, so it never depends on the live
block. Who gets the budget may depend on the live block: the device spends it there, and so does the
host where the device is the CPU; elsewhere a host split uses the same lagged values as the budget.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dspark.core.allocation import allocate, even_split
from vllm_dspark.core.draft_width import Load, WidthChoice
from vllm_dspark.core.plan import StepInput
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.survival import RowDoubt, assess_rows
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.engine.agreement import Agreement
from vllm_dspark.engine.batch_order import OrderRequests
from vllm_dspark.engine.decision import Observer, StepClock, StepDecision
from vllm_dspark.engine.device_split import DeviceSplit
from vllm_dspark.engine.host_time import HostTime, Report, timed
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.profile import StartupProfile, describe
from vllm_dspark.engine.relay import BlockRelay, Landed
from vllm_dspark.engine.slot_table import SlotTable
from vllm_dspark.engine.window_clamp import useful_drafts
from vllm_dspark.parallel.block_rows import BlockRows

LAG_STEPS = 1

logger = logging.getLogger("vllm.dspark")

RegimesOf = Callable[[np.ndarray], "np.ndarray | int"]
"""Sampling regimes ``[num_reqs]`` of request slots ``[num_reqs]``, or the one that all share."""


@dataclass(frozen=True)
class _Batch:
    """The scheduled batch in the order in which it will run, see ``StepDecision``."""

    req_ids: list[str]
    slots: np.ndarray
    base_lens: np.ndarray
    base_tokens: int
    decodes: bool
    draft_lens: np.ndarray
    eligible: np.ndarray
    useful: np.ndarray
    samples: np.ndarray
    context_tokens: int


class StepPlanner:
    """Takes the place of the host's verification manager.

    Args:
        core: the policy.
        mode: what the plan is allowed to do.
        req_states: the runner's request state.
        query_start_loc: ``[max_num_reqs + 1]`` int32 device buffer that the runner fills.
        num_bonus_tokens: logit rows per request besides its drafts.
        max_total_logits: logit rows that are verified in one chunk.
        order: the runner's batch order.
        answers_admitted: the runner expects admitted counts in ``reallocate_drafts``.
        observers: receive every decision once its outcome is known.
        regimes_of: sampling regimes of request slots; None if there is only one.
        has_confidence: the draft publishes confidences; without them everything is verified.
        share: rank 0's object on every rank; start-up only.
        widths: chooses the width of the next block; None drafts gamma slots.
        agreement: makes the decisions of all ranks one; None for a group of one.
        overlaps: the scheduler plans a step before it knows what the step before has rejected.
        on_host_time: takes the parts of a step and the seconds that the host spent on them.
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
        observers: Sequence[Observer] = (),
        regimes_of: RegimesOf | None = None,
        has_confidence: bool = True,
        share: Callable[[Any], Any] = lambda value: value,
        widths: WidthChoice | None = None,
        agreement: Agreement | None = None,
        overlaps: bool = False,
        on_host_time: Report = lambda part, seconds: None,
    ) -> None:
        self.host_time = HostTime(on_host_time)
        self.core = core
        self.mode = mode
        self._states = req_states
        self._query_start_loc = query_start_loc
        self._bonus = num_bonus_tokens
        self._max_logits = max_total_logits
        self._order = order
        self._answers_admitted = answers_admitted
        self._observers = tuple(observers)
        self._regimes_of = regimes_of
        self._has_confidence = has_confidence
        self._share = share
        self._profile: StartupProfile | None = None
        gamma, slots = req_states.num_speculative_steps, req_states.max_num_reqs
        self._gamma = gamma
        self._in_flight = gamma if overlaps else 0
        self._agreement = agreement or Agreement()
        self._rows = BlockRows(gamma)
        own = self._agreement.keeps_own_rows
        self._live_host = req_states.device.type == "cpu"
        self._relay = BlockRelay(
            slots,
            self._rows,
            req_states.device,
            own,
            timed=not self._live_host,
            waiting=self.host_time.waiting,
        )
        self._clock = StepClock() if self._live_host else None
        self._latest = SlotTable(slots, gamma)
        # Elsewhere nothing newer than what the budget may see ever reaches the host.
        self._lagged = SlotTable(slots, gamma) if self._live_host else self._latest
        self._unread: Landed | None = None
        self._split = (
            DeviceSplit(slots, gamma, req_states.device) if mode is VerifyMode.DEVICE else None
        )
        self._widths = widths
        self.draft_width = gamma if widths is None else widths.current
        self._block_width = np.full(slots, gamma, dtype=np.int64)
        self._awaiting: deque[StepDecision] = deque()
        self._decision: StepDecision | None = None
        self._running: StepDecision | None = None
        self._num_sampled: torch.Tensor | None = None

    # ------------------------------------------------------------------ requests

    def add_request(self, req_idx: int) -> None:
        """A slot has a new owner; what is known of it belongs to the previous one."""
        self._lagged.reset(req_idx, self._relay.published)
        self._latest.reset(req_idx, self._relay.published)

    # ------------------------------------------------------------------ the decision

    @timed("plan")
    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Decide the step; returns the tokens that will run."""
        self._agreement.begin_step()
        if self._clock is not None:
            self._clock.tick(self._awaiting, self._relay.published)
        self._read_results()
        batch = self._batch(num_tokens_per_req, draft_tokens)
        confidence, state = self._lagged.read(batch.slots, self._relay.published)
        regimes = 0 if self._regimes_of is None else self._regimes_of(batch.slots)
        full_mode = self._exec_mode(batch.decodes)
        trim_mode = self._trim_mode(full_mode)
        plan = self.core.plan(
            self._step_input(batch, confidence, state, regimes, trim_mode, full_mode)
        )
        decision = StepDecision(
            step=self._relay.published,
            req_ids=batch.req_ids,
            slots=batch.slots,
            base_lens=batch.base_lens,
            base_tokens=batch.base_tokens,
            decodes=batch.decodes,
            draft_lens=batch.draft_lens,
            eligible=batch.eligible,
            useful=batch.useful,
            admitted=None,
            samples=batch.samples,
            plan=plan,
            trims=self.mode.trims,
            regimes=regimes,
            context_tokens=batch.context_tokens,
            exec_mode=full_mode if plan.budget is None else trim_mode,
            draft_width=self.draft_width,
            time_s=time.time(),
        )
        decision.admitted = self._admit(decision)
        self._size_next_block(confidence, state, decision)
        self._agreement.plan(decision, confidence)
        self.draft_width = decision.draft_width
        self._decision = decision
        self._awaiting.append(decision)
        return decision.num_tokens

    def _batch(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> _Batch:
        req_ids = self._order(num_tokens_per_req, draft_tokens, self._gamma + self._bonus)
        count = len(req_ids)
        # Chains of C functions: these three loops are what grows with the batch.
        drafted = map(draft_tokens.get, req_ids, itertools.repeat(()))
        slot_of = self._states.req_id_to_index.__getitem__
        scheduled = np.fromiter(map(num_tokens_per_req.__getitem__, req_ids), np.int64, count)
        drafts = np.fromiter(map(len, drafted), np.int64, count)
        slots = np.fromiter(map(slot_of, req_ids), np.int64, count)
        base = scheduled - drafts
        computed = self._states.num_computed_tokens_np[slots]
        prefill = self._states.prefill_len.np[slots]
        return _Batch(
            req_ids=req_ids,
            slots=slots,
            base_lens=base,
            base_tokens=int(base.sum()),
            decodes=bool((base == 1).all()),
            draft_lens=drafts,
            # Drafts of a step that starts inside the prompt are placeholders of a migrated request.
            eligible=np.where(computed < prefill, 0, np.minimum(drafts, self._block_width[slots])),
            useful=useful_drafts(self._states.max_seq_len[slots], computed, self._in_flight),
            samples=computed + base >= prefill,
            context_tokens=int(computed.sum()),
        )

    def _step_input(
        self,
        batch: _Batch,
        confidence: np.ndarray,
        state: np.ndarray,
        regimes: np.ndarray | int,
        trim_mode: ExecMode,
        full_mode: ExecMode,
    ) -> StepInput:
        on_device = self._split is not None
        # A batch whose lengths only the device knows is verified in one chunk of logits.
        room = max(0, self._max_logits - len(batch.req_ids) * self._bonus)
        return StepInput(
            samples=batch.samples,
            draft_lens=batch.eligible,
            base_tokens=batch.base_tokens,
            confidence=confidence if self._has_confidence else None,
            row_state=state,
            context_tokens=batch.context_tokens,
            regimes=regimes,
            trim_mode=trim_mode,
            full_mode=full_mode,
            max_drafts=room if on_device else None,
            need_lens=not on_device,
        )

    def _size_next_block(
        self,
        confidence: np.ndarray,
        state: np.ndarray,
        decision: StepDecision,
    ) -> None:
        cost = self.core.cost
        if self._widths is None or cost is None or not self._has_confidence:
            return
        if self._widths.due():
            load = Load(
                sampling=int(np.count_nonzero(decision.samples)),
                requests=len(decision.req_ids),
                base_tokens=decision.base_tokens,
                context_tokens=decision.context_tokens,
                mode=decision.exec_mode,
            )
            trusted = state == RowDoubt.TRUSTED
            known = np.where(trusted, confidence.T, np.float32(1.0))
            calibrated = self.core.calibration.apply(known, decision.regimes)
            survival = calibrated.cumprod(axis=0, dtype=np.float64)
            survival = np.where(trusted, survival, self.core.state.prior.mean[:, None])
            self._widths.choose(survival, load, cost, self.core.ladders[decision.exec_mode])
        decision.draft_width = self._widths.current

    def _admit(self, decision: StepDecision) -> np.ndarray | None:
        """Lengths of the plan, spent by the live block where the host can read it."""
        plan, slots, eligible = decision.plan, decision.slots, decision.eligible
        if self.mode is VerifyMode.STATIC or plan.budget is None:
            return eligible
        if plan.verified_drafts == 0:
            return np.zeros_like(eligible)
        if self._split is not None:
            return None
        assert plan.admitted is not None
        if self.mode is VerifyMode.UNIFORM or not self._live_host:
            return plan.admitted
        confidence, state = self._latest.read(slots, self._relay.published)
        lens = decision.spendable
        codes = assess_rows(confidence, lens, state)
        doubtful = None if codes is None else codes != RowDoubt.TRUSTED
        calibrated = self.core.calibration.apply(confidence.T.copy(), decision.regimes)
        return allocate(calibrated.cumprod(axis=0).T, lens, plan.verified_drafts, doubtful)

    def _exec_mode(self, decodes: bool) -> ExecMode:
        """How a batch runs if every draft is verified."""
        if self._has_full_graphs and decodes:
            return ExecMode.FULL
        return self._mixed_mode

    def _trim_mode(self, full_mode: ExecMode) -> ExecMode:
        """How the batch runs if it is trimmed: uniform graphs take no lengths that differ."""
        ragged = self.mode is VerifyMode.HOST and self.core.ladders[ExecMode.FULL].limit == 0
        return self._mixed_mode if ragged else full_mode

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
        if decision is None or not decision.trims or not decision.decodes:
            return None
        if decision.plan.verified_drafts == 0:
            return 1
        width = decision.plan.uniform_k if self.mode is VerifyMode.UNIFORM else None
        return None if width is None else int(width) + 1

    def dispatched(self, graph: Any) -> None:
        """The graph manager's choice for the decided step."""
        decision = self._decision
        if decision is None:
            return
        if graph.cg_mode.value:
            decision.graph_tokens = graph.num_tokens
        if decision.exec_mode is ExecMode.FULL and graph.cg_mode.name != "FULL":
            decision.graph_miss = "beyond_captured_sizes"

    @timed("spend")
    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Exact host lengths ``[num_reqs]`` and logit offsets ``[num_reqs + 1]``."""
        decision = self._decision
        assert decision is not None
        lens = decision.host_lens
        if lens is None:
            # The device decides; the host carries an even split, and logit offsets stay the bound.
            lens = even_split(decision.eligible, decision.running_drafts, self._gamma)
        else:
            cu_num_logits_np = self._logit_offsets(lens)
        counts = num_scheduled_tokens - num_draft_tokens_per_req + lens
        return counts.astype(num_scheduled_tokens.dtype), cu_num_logits_np

    def _logit_offsets(self, lens: np.ndarray) -> np.ndarray:
        offsets = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens + self._bonus, out=offsets[1:])
        return offsets

    @timed("spend")
    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Device offsets of the decided step; the decision is consumed.

        Returns:
            Logit offsets ``[num_reqs + 1]`` int32, the runner's ``query_start_loc``, drafts that
            run, and, where the runner asks for it, None: such runners are not trimmed.
        """
        decision = self._decision
        assert decision is not None and decision.req_ids == req_ids, "one decision per step"
        self._decision, self._running = None, decision
        self._agreement.decided(decision)
        lens = decision.host_lens
        if lens is None:
            assert self._split is not None
            cu_num_logits = self._split.spend(
                decision, idx_mapping, self._bonus, self._query_start_loc, self._agree_split
            )
        else:
            self._agree_split(None, idx_mapping)
            cu_num_logits = async_tensor_h2d(self._logit_offsets(lens), device=idx_mapping.device)
        answer = (cu_num_logits, self._query_start_loc, decision.running_drafts)
        return (*answer, None) if self._answers_admitted else answer

    def _agree_split(
        self, lens: torch.Tensor | None, idx_mapping: torch.Tensor
    ) -> torch.Tensor | None:
        return self._agreement.split(lens, self._states.draft_tokens, idx_mapping)

    @property
    def runs_device_lens(self) -> bool:
        """The running step has lengths that only the device knows."""
        return self._running is not None and self._running.host_lens is None

    def make_exact(self, input_batch: Any) -> None:
        """Put the lengths that run where the host left what was scheduled.

        Scheduled draft counts stay: grammar masks are laid out by them.
        """
        decision = self._running
        if decision is None or decision.req_ids != input_batch.req_ids or not decision.trims:
            return
        if decision.host_lens is None:
            return
        lens = np.diff(input_batch.query_start_loc_np[: input_batch.num_reqs + 1])
        input_batch.num_scheduled_tokens = lens
        input_batch.max_query_len = int(lens.max())

    def take_window(self, req_ids: list[str]) -> np.ndarray | None:
        """Drafts ``[num_reqs]`` int32 that the running step may commit, None without a plan."""
        decision = self._running
        if decision is None or decision.req_ids != req_ids or decision.admitted is None:
            return None
        return decision.admitted.astype(np.int32)

    # ------------------------------------------------------------------ results

    def agree_accept(self, output: Any) -> Any:
        """The group's sampler output."""
        return self._agreement.accept(output)

    def committed(self, num_sampled: torch.Tensor) -> None:
        """Tokens committed per request ``[num_reqs]`` by the verification of the running step."""
        self._num_sampled = num_sampled

    @timed("publish")
    def record_confidences(self, confidence_probs: torch.Tensor | None, input_batch: Any) -> None:
        """Publish the block that was just drafted and what its step committed."""
        # Steps without drafts ask for no plan; their results must not pile up unread either.
        self._read_results()
        self._running = None
        count, slots = input_batch.num_reqs, input_batch.idx_mapping
        num_sampled, self._num_sampled = self._num_sampled, None
        own = self._rows.pack(
            count,
            self._states.device,
            None if confidence_probs is None else confidence_probs[:count],
            num_sampled,
            self._split.take_admitted() if self._split is not None else None,
            self._states.draft_tokens[slots],
        )
        agreed = self._agreement.block(own, self._rows, self._states.draft_tokens, slots)
        published = (agreed, own) if self._agreement.keeps_own_rows else (agreed,)
        self._relay.publish(input_batch.idx_mapping_np, self.draft_width, *published)
        self._block_width[input_batch.idx_mapping_np] = self.draft_width
        if self._split is not None:
            self._split.store(slots, self._rows.confidence(agreed))
        self._agreement.end_step()

    def _read_results(self) -> None:
        """Take in every step that is old enough, in order."""
        for landed in self._relay.collect(0 if self._live_host else LAG_STEPS):
            self._settle(landed)
            self._latest.update(landed, self._typical_confidence)
            if not self._live_host:
                continue
            # The copy is done when publish returns, so the newest step may be read for ranking;
            # the budget still waits one step.
            if self._unread is not None:
                self._lagged.update(self._unread, self._typical_confidence)
            self._unread = landed

    def _typical_confidence(self) -> np.ndarray:
        """``[gamma]`` running mean of each slot's confidence."""
        mean = self.core.state.prior.mean
        return mean / np.concatenate(([1.0], np.maximum(mean[:-1], 1e-6)))

    def _settle(self, landed: Landed) -> None:
        """Match a step's outcome with its decision."""
        self._agreement.landed(landed)
        while self._awaiting and self._awaiting[0].step < landed.step:
            self._awaiting.popleft()
        if not self._awaiting or self._awaiting[0].step != landed.step:
            return
        decision = self._awaiting.popleft()
        if landed.step_ms is not None:
            decision.measured_ms = landed.step_ms
        if decision.admitted is None:
            decision.admitted = landed.agreed.verified
        decision.predicted = self._latest.peek(decision.slots, decision.step)
        accepted = np.maximum(landed.agreed.num_sampled - 1, 0)
        for observer in self._observers:
            observer(decision, accepted)

    # ------------------------------------------------------------------ start-up

    def set_draft_width(self, width: int) -> None:
        """Draft ``width`` slots until the next plan says otherwise."""
        self.draft_width = width

    def bind_profile(self, profile: StartupProfile | None) -> None:
        """Who measures step costs when the host asks which batches to time."""
        self._profile = profile

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterable[dict[str, Any]]:
        """Dummy batches whose step times seed the cost model; none if there is one already."""
        if self._profile is None or self.core.cost is not None:
            return ()
        return self._profile.batches()

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Adopt the cost model that the timed batches give, rank 0's on every rank."""
        if self._split is not None:
            self._split.warm()
        if self._profile is None or self.core.cost is not None:
            return
        cost = self._profile.fit(samples)
        if cost is not None:
            self.core.adopt(cost=self._share(cost))
            logger.info("DSpark step costs: %s", describe(self.core.cost))
