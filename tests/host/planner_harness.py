# SPDX-License-Identifier: Apache-2.0
"""A runner without an engine: request state, and the calls of a step in the model runner's order.

`Runner.step` asserts what every step has to get right, whatever was decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.policy import PolicyConfig
from vllm_dspark.engine.assembly import _SEARCH
from vllm_dspark.engine.decision import StepDecision
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.planner import StepPlanner

GAMMA, SLOTS, BONUS, PROMPT = 4, 6, 1, 5


@dataclass
class Outcome:
    """What the runner saw of one step, rows in batch order."""

    num_tokens: int
    req_ids: list[str]
    lens: np.ndarray
    """Drafts that ran."""
    batch: Any
    """The batch after `make_exact`."""
    window: np.ndarray | None
    decision: StepDecision


def scheduler_output(
    drafts: dict[str, int], base: dict[str, int] | None
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Scheduled tokens and draft placeholders by request; `base` tokens besides drafts, or 1."""
    scheduled = {name: (base or {}).get(name, 1) + count for name, count in drafts.items()}
    return scheduled, {name: [-1] * count for name, count in drafts.items() if count}


class Runner:
    """Request state, and the order in which the model runner makes its calls."""

    def __init__(
        self,
        mode: VerifyMode,
        cost: CostModel | None = None,
        pin: int | float | None = None,
        **options: Any,
    ) -> None:
        """`options` are the planner's."""
        self.states = SimpleNamespace(
            num_speculative_steps=GAMMA,
            max_num_reqs=SLOTS,
            device=torch.device("cpu"),
            req_id_to_index={},
            num_computed_tokens_np=np.zeros(SLOTS, np.int32),
            max_seq_len=np.full(SLOTS, 1000, np.int32),
            prefill_len=SimpleNamespace(np=np.full(SLOTS, PROMPT, np.int32)),
            draft_tokens=torch.zeros(SLOTS, GAMMA, dtype=torch.int64),
        )
        self.query_start_loc = torch.full((SLOTS + 1,), -1, dtype=torch.int32)
        self.settled: list[tuple[StepDecision, np.ndarray]] = []
        policy = PolicyConfig(search=_SEARCH[mode], pin=pin)
        self.planner = StepPlanner(
            Planner(policy, GAMMA, cost=cost),
            mode,
            self.states,
            self.query_start_loc,
            BONUS,
            order=sort_batch_req_ids,
            observers=[lambda decision, accepted: self.settled.append((decision, accepted))],
            **{"max_total_logits": 1000, "answers_admitted": False, **options},
        )

    def add(self, name: str, slot: int) -> None:
        self.states.req_id_to_index[name] = slot
        self.states.num_computed_tokens_np[slot] = 0
        self.planner.add_request(slot)

    def remove(self, name: str) -> None:
        del self.states.req_id_to_index[name]

    def prefill(self, confidence: float | np.ndarray = 0.9, names: tuple[str, ...] = ()) -> None:
        """A step of whole prompts: nothing was drafted for it, a block is drafted after it."""
        for name in names or tuple(self.states.req_id_to_index):
            self.states.num_computed_tokens_np[self.states.req_id_to_index[name]] = PROMPT
        self._record(list(names or self.states.req_id_to_index), confidence)

    def decide(self, drafts: dict[str, int], base: dict[str, int] | None = None) -> int:
        """Only the first call of a step."""
        return self.planner.get_num_tokens(*scheduler_output(drafts, base))

    def step(
        self,
        drafts: dict[str, int],
        confidence: float | np.ndarray = 0.9,
        committed: Callable[[int], int] = lambda drafts_run: drafts_run + 1,
        base: dict[str, int] | None = None,
    ) -> Outcome:
        """One step; `confidence` `[num_reqs, gamma]` of the block drafted after it."""
        scheduled, tokens = scheduler_output(drafts, base)
        num_tokens = self.planner.get_num_tokens(scheduled, tokens)
        decision = self.planner._decision
        assert decision is not None
        req_ids = sort_batch_req_ids(scheduled, tokens, GAMMA + BONUS)
        slots = np.array([self.states.req_id_to_index[name] for name in req_ids])
        all_tokens = np.array([scheduled[name] for name in req_ids], np.int32)
        all_drafts = np.array([drafts[name] for name in req_ids], np.int32)
        bound = np.concatenate(([0], np.cumsum(all_drafts + BONUS))).astype(np.int32)

        counts, logits_np = self.planner.compact_batch(all_drafts, all_tokens, bound)
        starts_np = np.full(SLOTS + 1, num_tokens, np.int32)
        starts_np[0] = 0
        np.cumsum(counts, out=starts_np[1 : len(req_ids) + 1])
        self.query_start_loc.copy_(torch.from_numpy(starts_np))
        answer = self.planner.reallocate_drafts(req_ids, torch.from_numpy(slots))
        logits, starts, running = answer[:3]
        batch = SimpleNamespace(
            req_ids=req_ids,
            num_reqs=len(req_ids),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            query_start_loc_np=starts_np[: len(req_ids) + 1],
            num_scheduled_tokens=all_tokens,
            num_draft_tokens_per_req=all_drafts,
            max_query_len=int(all_tokens.max()),
        )
        self.planner.make_exact(batch)

        lens = np.diff(logits.numpy()) - BONUS
        base_lens = all_tokens - all_drafts
        # What every step has to get right, whatever was decided.
        assert num_tokens == base_lens.sum() + running == counts.sum()
        assert lens.sum() == running
        assert ((lens >= 0) & (lens <= all_drafts)).all()
        assert starts is self.query_start_loc
        assert np.diff(starts.numpy()[: len(req_ids) + 1]).tolist() == (base_lens + lens).tolist()
        assert (starts.numpy()[len(req_ids) :] == num_tokens).all()
        assert counts.dtype == all_tokens.dtype
        assert logits_np.dtype == logits.numpy().dtype == np.int32
        # What the host lays out chunks of logits by is exact, or it knows that it is not.
        exact = np.array_equal(logits_np, logits.numpy())
        assert exact or self.planner.runs_device_lens
        assert self.planner.runs_device_lens is (decision.host_lens is None)
        window = self.planner.take_window(req_ids)
        if running or decision.plan.verified_drafts:
            num_sampled = np.array([committed(int(n)) for n in lens])
            self.planner.committed(torch.from_numpy(num_sampled.astype(np.int32)))
        self.states.num_computed_tokens_np[slots] += base_lens
        self._record(req_ids, confidence, batch)
        # Grammar masks follow what was scheduled, also where less of it runs.
        assert batch.num_draft_tokens_per_req.tolist() == all_drafts.tolist()
        return Outcome(num_tokens, req_ids, lens, batch, window, decision)

    def _record(self, names: list[str], confidence: float | np.ndarray, batch: Any = None) -> None:
        slots = np.array([self.states.req_id_to_index[name] for name in names])
        batch = batch or SimpleNamespace(
            req_ids=names,
            num_reqs=len(names),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
        )
        # The host's buffer is larger than the batch, and is overwritten by the next block.
        buffer = torch.full((SLOTS, GAMMA), float("nan"))
        buffer[: len(names)] = torch.as_tensor(np.asarray(confidence, np.float32))
        self.planner.record_confidences(buffer, batch)
        buffer.fill_(float("nan"))


def started(mode: VerifyMode, count: int = 3, **options: Any) -> Runner:
    """A runner whose requests have confidences that the budget may see."""
    runner = Runner(mode, **options)
    names = [f"r{slot}" for slot in range(count)]
    for slot, name in enumerate(names):
        runner.add(name, slot)
    runner.prefill()
    for _ in range(2):
        runner.step(dict.fromkeys(names, GAMMA))
    return runner


def drafts_of(runner: Runner) -> dict[str, int]:
    return dict.fromkeys(runner.states.req_id_to_index, GAMMA)
