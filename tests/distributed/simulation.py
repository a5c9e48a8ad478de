# SPDX-License-Identifier: Apache-2.0
"""A serving run of the engine's planner without the engine: requests come, decode and leave.

Real: `StepPlanner`, relay, policy, TP sync, consensus checker, gloo. Played: the scheduler (one
view, rank 0's, as in the host), the model (`toy_target`) and the runner's calls, in the runner's
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from faults import Fault, LateRelay, PollingRelay
from toy_target import SplitTarget, draft_block, input_rows
from vllm.config.compilation import CUDAGraphMode

import vllm_dspark.engine.device_split as device_split
import vllm_dspark.engine.planner as engine_planner
from vllm_dspark.core import CostModel, ExecMode, Planner, PolicyConfig, TierLadder
from vllm_dspark.core.cost_model import Curve
from vllm_dspark.engine.agreement import Agreement
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.kernels.allocate import allocate_reference
from vllm_dspark.parallel.consensus import ConsensusChecker, ConsensusOptions
from vllm_dspark.parallel.peer_exchange import PeerExchange
from vllm_dspark.parallel.tp_sync import open_tp_sync

GAMMA = 4
TIERS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40)
PROMPT_TOKENS = 3


@dataclass(frozen=True)
class Spec:
    """One run."""

    protocol: str = "inputs"
    mode: str = "host"
    fault: Fault = field(default_factory=Fault)
    slots: int = 8
    requests: int = 24
    tokens: int = 40
    """Tokens that each request wants."""
    max_steps: int = 1000
    lagged: bool = False
    """Read results as late as on a GPU."""
    polling: bool = False
    """Use a relay that asks whether a copy has landed."""
    interval: int = 0
    """Consensus interval; 0 checks nothing."""
    grid: int = 0
    """Confidences are rounded to multiples of 1 / grid, so that many are equal; 0 does not."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Spec:
        return cls(**{**values, "fault": Fault(**values.get("fault", {}))})


def cost_model(slope: float) -> CostModel:
    sizes = np.arange(1, 200)
    return CostModel({ExecMode.FULL: Curve(sizes, 4.0 + slope * sizes)})


def counting(counter: Counter[str]) -> dict[str, Any]:
    """Callbacks of a sync that count its messages, and disagreements by site."""
    return {
        "on_sync": lambda seconds, messages: counter.update(messages=messages),
        "on_disagreement": lambda site, count: counter.update({site: count}),
    }


class States:
    """The runner's request state, as far as it is read."""

    def __init__(self, slots: int) -> None:
        self.num_speculative_steps, self.max_num_reqs = GAMMA, slots
        self.device = torch.device("cpu")
        self.req_id_to_index: dict[str, int] = {}
        self.num_computed_tokens_np = np.zeros(slots, np.int32)
        self.max_seq_len = np.full(slots, 100_000, np.int32)
        self.prefill_len = SimpleNamespace(np=np.full(slots, PROMPT_TOKENS, np.int32))
        self.draft_tokens = torch.zeros(slots, GAMMA, dtype=torch.int64)


class Simulation:
    """One rank's side of a run."""

    def __init__(self, group: Any, spec: Spec) -> None:
        self.group, self.spec, self.rank = group, spec, group.rank_in_group
        self.counter: Counter[str] = Counter()
        self.states = States(spec.slots)
        self.query_start_loc = torch.zeros(spec.slots + 1, dtype=torch.int32)
        self.planner = self._build_planner()
        self.target = SplitTarget(group.engine_group, group.world_size)
        self.waiting = [f"{number}" for number in range(spec.requests)]
        self.written: dict[str, list[int]] = {}
        self.last = np.zeros(spec.slots, np.int64)
        self.position = np.zeros(spec.slots, np.int64)
        """Of this rank: tokens in the cache, whose last one is `last`, minus one."""
        self.decisions: list[list[Any]] = []
        self.step = 0

    def _build_planner(self) -> Any:
        spec, group, callbacks = self.spec, self.group, counting(self.counter)
        sync = open_tp_sync(
            spec.protocol,
            group,
            **callbacks,
            timeout_s=20.0,
        )
        checker = None
        if spec.interval or spec.protocol == "audit":
            options = ConsensusOptions(
                spec.interval or 16, spec.interval > 0, timeout_s=6.0, flush_s=0.3, grace_s=2.0
            )
            exchange = PeerExchange.open(group.ranks, self.rank, options.timeout_s)
            checker = ConsensusChecker(options, exchange, callbacks["on_disagreement"])
        self.checker = checker
        self._play_devices()
        odd = spec.fault.kind == "cost" and spec.fault.rank == self.rank
        return build_planner(
            self.states,
            self.query_start_loc,
            TIERS,
            cost_model(0.3 if odd else 0.2),
            Agreement(sync, checker),
            mode=spec.mode,
            lagged=spec.lagged,
            share=(lambda value: value) if spec.protocol == "off" else self._share,
        )

    def _share(self, value: Any) -> Any:
        """Rank 0's object on every rank, as the host's group coordinator gives it."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group.cpu_group)
        return box[0]

    def _play_devices(self) -> None:
        """Relays with late copies, and the allocation kernel's reference."""
        spec = self.spec
        relay = PollingRelay if spec.polling else LateRelay
        fault, rank = spec.fault, self.rank
        relay.late_in = staticmethod(lambda step: fault.hits("late", rank, step))
        engine_planner.BlockRelay = relay
        device_split.allocate = allocate_like_kernel

    # ------------------------------------------------------------------ the run

    def run(self) -> dict[str, Any]:
        while (self.waiting or self.states.req_id_to_index) and self.step < self.spec.max_steps:
            self._admit_requests()
            self._step()
            self.step += 1
        if self.checker is not None:
            self.checker.end_step()
            torch.distributed.barrier(self.group.engine_group)
            self.checker.close()
        return {
            "steps": self.step,
            "decisions": self.decisions,
            "written": self.written,
            "unfinished": len(self.waiting) + len(self.states.req_id_to_index),
            "shape_mismatches": self.target.shape_mismatches,
            "counter": dict(self.counter),
        }

    def _admit_requests(self) -> None:
        index = self.states.req_id_to_index
        free = sorted(set(range(self.spec.slots)) - set(index.values()))
        # One newcomer every other step, so that most batches are mixed or ragged at first.
        if self.waiting and free and self.step % 2 == 0:
            req_id, slot = self.waiting.pop(0), free[0]
            index[req_id] = slot
            self.written[req_id] = []
            self.states.num_computed_tokens_np[slot] = 0
            self.states.draft_tokens[slot] = 0
            self.position[slot], self.last[slot] = PROMPT_TOKENS - 1, int(req_id)
            self.planner.add_request(slot)

    def _step(self) -> None:
        index, fault = self.states.req_id_to_index, self.spec.fault
        fresh = [r for r in index if not self.written[r]]
        drafts = {r: [-1] * GAMMA for r in index if self.written[r]}
        tokens = {r: PROMPT_TOKENS if r in fresh else 1 + GAMMA for r in index}
        req_ids = batch_order(tokens, drafts, GAMMA + 1)
        slots = np.array([index[r] for r in req_ids])
        base = np.array([PROMPT_TOKENS if r in fresh else 1 for r in req_ids])
        lens = self._verify_lens(req_ids, slots, base, tokens, drafts)
        fault.end(self.rank, self.step)
        committed = self._verify(req_ids, slots, lens)
        self._draft(req_ids, slots, committed)
        self._schedule(req_ids, committed)

    def _verify_lens(
        self,
        req_ids: list[str],
        slots: np.ndarray,
        base: np.ndarray,
        tokens: dict[str, int],
        drafts: dict[str, list[int]],
    ) -> np.ndarray:
        """Drafts that run per request, by the planner's answers to the runner's calls."""
        self.graph_tokens = int(base.sum())
        if not drafts:
            return np.zeros(len(req_ids), np.int64)
        planner, count = self.planner, len(req_ids)
        fault = self.spec.fault
        if fault.hits("retable", self.rank, self.step):
            planner.core.adopt(cost=cost_model(0.3))
        if fault.hits("draft_width", self.rank, self.step):
            planner.draft_width = GAMMA - 1
        num_tokens = planner.get_num_tokens(tokens, drafts)
        fitting = [tier for tier in TIERS if tier >= num_tokens]
        graph = bool((base == 1).all() and fitting)
        self.graph_tokens = fitting[0] if graph else num_tokens
        planner.dispatched(
            SimpleNamespace(
                cg_mode=CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE,
                num_tokens=self.graph_tokens,
                num_reqs=count if graph else None,
            )
        )
        scheduled = np.array([len(drafts.get(r, ())) for r in req_ids])
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(scheduled + 1, out=offsets[1:])
        counts, _ = planner.compact_batch(scheduled, scheduled + base, offsets)
        self.query_start_loc[0] = 0
        self.query_start_loc[1 : count + 1] = torch.from_numpy(np.cumsum(counts))
        planner.reallocate_drafts(req_ids, torch.from_numpy(slots))
        lens = np.diff(self.query_start_loc[: count + 1].numpy()) - base
        decision = planner._running
        self.decisions.append(
            [
                self.step,
                decision.plan.budget,
                lens.tolist(),
                decision.plan.tier_tokens,
                self.graph_tokens,
                planner.draft_width,
                self.states.draft_tokens[slots].tolist(),
            ]
        )
        return lens

    def _verify(self, req_ids: list[str], slots: np.ndarray, lens: np.ndarray) -> list[list[int]]:
        """Tokens that each request commits on this rank."""
        ids, positions = [], []
        for slot, length in zip(slots, lens, strict=True):
            drafts = self.states.draft_tokens[slot, :length].tolist()
            ids += [int(self.last[slot]), *drafts]
            positions += range(self.position[slot], self.position[slot] + length + 1)
        # Prompt rows but the last one say nothing here; they only count for the graph.
        rows = input_rows(np.array(ids), np.array(positions))
        answers = self.target.forward(rows, max(self.graph_tokens, len(rows)))
        committed, start = [], 0
        for slot, length in zip(slots, lens, strict=True):
            outputs = answers[start : start + length + 1].tolist()
            drafts = self.states.draft_tokens[slot, :length].tolist()
            accepted = 0
            while accepted < length and drafts[accepted] == outputs[accepted]:
                accepted += 1
            committed.append(outputs[: accepted + 1])
            start += length + 1
        if self.spec.fault.hits("commit", self.rank, self.step):
            max(committed, key=len).pop()
        return committed

    def _draft(self, req_ids: list[str], slots: np.ndarray, committed: list[list[int]]) -> None:
        confidence = torch.zeros(self.spec.slots, GAMMA)
        for row, (req_id, slot) in enumerate(zip(req_ids, slots, strict=True)):
            self.last[slot] = committed[row][-1]
            self.position[slot] += len(committed[row])
            ids, values = draft_block(
                int(req_id), int(self.position[slot]), int(self.last[slot]), GAMMA
            )
            self.states.draft_tokens[slot] = torch.from_numpy(ids)
            if self.spec.grid:
                values = np.round(values * self.spec.grid) / np.float32(self.spec.grid)
            confidence[row] = torch.from_numpy(values)
        used = self.states.draft_tokens[slots]
        self.spec.fault.drafts(self.rank, self.step, used)
        self.states.draft_tokens[slots] = used
        self.planner.committed(torch.tensor([len(tokens) for tokens in committed]))
        count = len(req_ids)
        own = self.spec.fault.confidence(self.rank, self.step, confidence[:count].clone())
        batch = SimpleNamespace(
            num_reqs=count, idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots
        )
        self.planner.record_confidences(own, batch)

    def _schedule(self, req_ids: list[str], committed: list[list[int]]) -> None:
        """Rank 0's outputs go to the one scheduler, whose view everybody gets."""
        table = torch.full((len(req_ids), GAMMA + 2), -1)
        for row, tokens in enumerate(committed):
            table[row, 0] = len(tokens)
            table[row, 1 : len(tokens) + 1] = torch.tensor(tokens)
        dist.broadcast(table, src=0, group=self.group.engine_group)
        index = self.states.req_id_to_index
        for row, req_id in enumerate(req_ids):
            count = int(table[row, 0])
            self.written[req_id] += table[row, 1 : count + 1].tolist()
            slot = index[req_id]
            self.states.num_computed_tokens_np[slot] = PROMPT_TOKENS - 1 + len(self.written[req_id])
            if len(self.written[req_id]) >= self.spec.tokens:
                del self.written[req_id][self.spec.tokens :]
                del index[req_id]


def build_planner(
    states: Any,
    query_start_loc: torch.Tensor,
    tiers: Sequence[int],
    cost: CostModel,
    agreement: Agreement,
    mode: str = "host",
    lagged: bool = False,
    share: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """The engine's planner with a cost model that it adopts as it does at start-up."""
    core = Planner(PolicyConfig(min_gain=0.0, hysteresis=0.0), GAMMA)
    core.ladders[ExecMode.FULL] = TierLadder(tiers)
    planner = engine_planner.StepPlanner(
        core,
        VerifyMode(mode),
        states,
        query_start_loc,
        num_bonus_tokens=1,
        max_total_logits=4096,
        order=batch_order,
        answers_admitted=False,
        agreement=agreement,
        share=share,
    )
    if lagged:
        planner._live_host, planner._lagged = False, planner._latest
    planner.bind_profile(SimpleNamespace(fit=lambda samples: cost))
    planner.set_initial_cost_curves([])
    return planner


def batch_order(
    tokens: dict[str, int], drafts: dict[str, list[int]], decode_query_len: int
) -> list[str]:
    """Decodes first, then prompts, as the runner orders them."""
    return sorted(tokens, key=lambda r: (r not in drafts, tokens[r] != decode_query_len, tokens[r]))


def allocate_like_kernel(
    confidence: torch.Tensor,
    slots: torch.Tensor,
    draft_lens: torch.Tensor,
    base_lens: torch.Tensor,
    budget: int,
    num_bonus: int,
    num_tokens: int,
    query_start_loc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's contract, kept by its reference."""
    admitted = torch.from_numpy(
        allocate_reference(confidence[slots].numpy(), draft_lens.numpy(), budget).astype(np.int32)
    )
    count = len(slots)
    query_start_loc[0] = 0
    query_start_loc[1 : count + 1] = torch.cumsum(base_lens + admitted, 0)
    query_start_loc[count + 1 :] = num_tokens
    offsets = torch.zeros(count + 1, dtype=torch.int32)
    offsets[1:] = torch.cumsum(admitted + num_bonus, 0)
    return admitted, offsets
