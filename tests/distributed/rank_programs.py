# SPDX-License-Identifier: Apache-2.0
"""What one rank of a test does. Public functions run in processes of a real gloo group."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Replaces CUDA's streams and events by empty ones, as a CPU worker of the host does. Comes first.
import vllm.v1.worker.cpu.shm  # noqa: F401
from simulation import GAMMA, Simulation, Spec, States, build_planner, counting

from vllm_dspark.config import Switches
from vllm_dspark.core import CostModel, ExecMode
from vllm_dspark.core.cost_model import Curve
from vllm_dspark.engine.agreement import Agreement
from vllm_dspark.parallel.block_rows import BlockRows
from vllm_dspark.parallel.consensus import ConsensusChecker, ConsensusOptions
from vllm_dspark.parallel.decision_log import DecisionLog
from vllm_dspark.parallel.peer_exchange import PeerExchange
from vllm_dspark.parallel.roll_call import call_roll, default_store
from vllm_dspark.parallel.step_record import Decision, Outcome
from vllm_dspark.parallel.sync_sites import SyncSite
from vllm_dspark.parallel.tp_sync import HostPlan, open_tp_sync

GROUP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RankGroup:
    """Looks like the host's group coordinator."""

    rank_in_group: int
    world_size: int
    ranks: list[int]
    device_group: Any
    cpu_group: Any
    engine_group: Any
    """For the model itself; nobody but the simulation uses it."""


def join(folder: Path, rank: int, world: int) -> RankGroup:
    """Enter the group of this job."""
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout
    )
    ranks = list(range(world))
    groups = [dist.new_group(ranks, backend="gloo", timeout=timeout) for _ in range(3)]
    # A rank that is done early takes the store with it, so all have to be connected by then.
    dist.barrier()
    return RankGroup(rank, world, ranks, *groups)


def simulate(group: RankGroup, spec: dict[str, Any]) -> dict[str, Any]:
    """A serving run with one fault; see `simulation`."""
    return Simulation(group, Spec.of(spec)).run()


def drifted_step(group: RankGroup, protocol: str, confidences: list[float]) -> list[Any]:
    """Budget, plan's tier and lengths of a step of 32 requests; each rank sees its own confidence.

    The cost is even between the tiers of 144 and 160 tokens at a confidence of 0.8105, as in the
    report that this is about: 0.811 takes 160, 0.810 takes 144.
    """
    count = 32
    sizes = np.arange(1, 161)
    tau = [count * sum(0.8105**slot for slot in range(width + 1)) for width in (4, 3)]
    tau_144 = tau[0] - 16 * 0.8105**4
    ms = np.where(sizes > 144, 1.0, np.where(sizes > 128, tau_144 / tau[0], 0.97))
    cost = CostModel({ExecMode.FULL: Curve(sizes, ms)})
    states = States(count)
    states.prefill_len.np[:] = 0
    states.req_id_to_index = {f"r{i}": i for i in range(count)}
    query_start_loc = torch.zeros(count + 1, dtype=torch.int32)
    sync = open_tp_sync(protocol, group)
    tiers = range(16, 161, 16)
    planner = build_planner(states, query_start_loc, tiers, cost, Agreement(sync))
    slots = np.arange(count)
    batch = SimpleNamespace(
        num_reqs=count, idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots
    )
    own = torch.full((count, GAMMA), confidences[group.rank_in_group])
    for _ in range(2):
        planner.record_confidences(own, batch)
    tokens = dict.fromkeys(states.req_id_to_index, 1 + GAMMA)
    drafts = {req_id: [-1] * GAMMA for req_id in tokens}
    num_tokens = planner.get_num_tokens(tokens, drafts)
    decision = planner._decision
    return [num_tokens, decision.plan.tier_tokens, decision.admitted.tolist()]


def repeat_outputs(group: RankGroup, plans: list[list[Any]]) -> list[list[Any]]:
    """Budgets and lengths that the *outputs* protocol gives for each rank's own plan.

    `plans[step][rank]` is `(budget, lengths)`; None as lengths stands for the device's.
    """
    counter = Counter()
    sync = open_tp_sync("outputs", group, **counting(counter))
    assert sync is not None
    got = []
    for step, by_rank in enumerate(plans):
        budget, lens = by_rank[group.rank_in_group]
        admitted = None if lens is None else np.asarray(lens, np.int32)
        plan = HostPlan(budget, 0 if budget is None else budget, None, None, 4, admitted)
        agreed = sync.agree_plan(step, plan, num_reqs=4)
        lens = None if agreed.admitted is None else agreed.admitted.tolist()
        got.append([agreed.budget, lens])
    return [got, dict(counter)]


def repeat_inputs(group: RankGroup, missing_on: int) -> dict[str, Any]:
    """Rows that the *inputs* protocol gives when rank `missing_on` has no confidences."""
    counter = Counter()
    sync = open_tp_sync("inputs", group, **counting(counter))
    assert sync is not None
    rows, rank = BlockRows(2), group.rank_in_group
    confidence = torch.tensor([[0.5, 0.25], [float("nan"), 1.0]]) + rank
    own = rows.pack(
        2,
        torch.device("cpu"),
        None if rank == missing_on else confidence,
        torch.tensor([3, 1]),
        None,
        torch.tensor([[5, 6], [7, 8 + rank]]),
    )
    kept = own.clone()
    agreed = sync.agree_block(own, rows.gamma)
    values = rows.unpack(agreed.numpy())
    sync.compare_blocks(values, rows.unpack(kept.numpy()), width=2)
    return {
        "bits": values.confidence.view(np.int32).tolist(),
        "drafts": values.drafts.tolist(),
        "verified": values.verified.tolist(),
        "own_kept": bool((own == kept).all()),
        "counter": dict(counter),
    }


def accept(group: RankGroup, sites: list[str]) -> list[Any]:
    """Committed tokens when each rank accepted something else."""
    sync = open_tp_sync("outputs", group, [SyncSite(site) for site in sites])
    assert sync is not None
    rank = group.rank_in_group
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]]) * (rank + 1)
    got = sync.agree_accept(ids, torch.tensor([3, 1 + rank]), torch.tensor([0, 2 - rank]))
    return [tensor.tolist() for tensor in got]


def switched(group: RankGroup, protocol: str, sites: list[str]) -> dict[str, Any]:
    """Plan, lengths and drafts that count on this rank, whose own are all different."""
    counter = Counter()
    sync = open_tp_sync(protocol, group, [SyncSite(site) for site in sites], **counting(counter))
    assert sync is not None
    rank, rows, slots = group.rank_in_group, BlockRows(2), torch.arange(2)
    lens = torch.tensor([1, rank], dtype=torch.int32)
    drafts = torch.tensor([[5, 6], [7, 8 + rank]])
    own = HostPlan(2 + rank, 2, None, None, 2, None)
    plan = sync.agree_plan(0, own, num_reqs=2)
    agreed_lens = sync.agree_split(lens, drafts, slots)
    packed = rows.pack(
        2, torch.device("cpu"), torch.full((2, 2), 0.5 + rank), None, lens, drafts.clone()
    )
    values = rows.unpack(sync.agree_block(packed, rows.gamma).numpy())
    inputs = protocol == "inputs"
    return {
        "plan": values.confidence.tolist() if inputs else plan.budget,
        "lens": (values.verified if inputs else agreed_lens).tolist(),
        "drafts": (values.drafts if inputs else drafts).tolist(),
        "messages": counter["messages"],
    }


def off_by_one(group: RankGroup) -> None:
    """Rank 1 has entered one step less than rank 0."""
    sync = open_tp_sync("outputs", group)
    assert sync is not None
    plan = HostPlan(1, 1, None, None, 4, np.ones(1, np.int32))
    sync.agree_plan(7 - group.rank_in_group, plan, num_reqs=1)


def no_message(group: RankGroup, timeout_s: float) -> float:
    """Rank 0 stays away from a host message; how long the others wait for it."""
    sync = open_tp_sync("outputs", group, timeout_s=timeout_s)
    assert sync is not None
    begin = time.monotonic()
    if group.rank_in_group:
        sync.agree_plan(0, HostPlan(1, 1, None, None, 4, np.ones(1, np.int32)), num_reqs=1)
    else:
        time.sleep(timeout_s + 2.0)
    return time.monotonic() - begin


def roll_call(group: RankGroup, badges: list[str | None]) -> float:
    """Seconds until all ranks have shown their badge; None stays away as a rank without plugin."""
    begin, badge = time.monotonic(), badges[group.rank_in_group]
    try:
        if badge is not None:
            call_roll(default_store(), group.ranks, group.rank_in_group, badge, limit_s=2.0)
    finally:
        # Rank 0 takes the store with it.
        if group.rank_in_group == 0:
            time.sleep(3.0)
    return time.monotonic() - begin


def check_decisions(
    group: RankGroup,
    interval: int,
    steps: int,
    differs_at: int | None = None,
    stays_away_at: int | None = None,
    hangs_at: int | None = None,
    pauses_at: int | None = None,
    stops: bool = True,
    folder: str | None = None,
) -> dict[str, Any]:
    """Feeds a checker; the last rank misbehaves. Returns how far this rank got and what it saw."""
    options = ConsensusOptions(
        interval, stops, timeout_s=3.0, flush_s=0.2, grace_s=1.0, dump_folder=folder
    )
    exchange = PeerExchange.open(group.ranks, group.rank_in_group, options.timeout_s)
    counter = Counter()
    checker = ConsensusChecker(options, exchange, counting(counter)["on_disagreement"])
    odd = group.rank_in_group == group.world_size - 1
    for step in range(steps):
        if odd and step == stays_away_at:
            time.sleep(8.0)
            return {"reached": step}
        try:
            checker.begin_step()
            budget = 10 + int(odd and step == differs_at)
            lens = np.full(3, 1 + step % 4)
            checker.decided(Decision(step, budget, None, 16, 4, 3, lens))
            if step:
                checker.settled(Outcome(step - 1, lens, lens - 1, None))
            if step == hangs_at:
                time.sleep(60.0)
            checker.end_step()
            if step == pauses_at:
                time.sleep(options.timeout_s + 2.0)
        except Exception as error:
            return {
                "reached": step,
                "error": type(error).__name__,
                "message": str(error),
                "step": getattr(error, "step", None),
                "ranks": getattr(error, "ranks", None),
                "values": getattr(error, "values", None),
            }
    time.sleep(0.6)
    checker.close()
    return {"reached": steps, "counter": dict(counter)}


def log_lines(group: RankGroup) -> list[str]:
    """What the debug logs say about one step."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.dspark.decisions")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    log = DecisionLog(group.rank_in_group, Switches(True, True, True))
    confidence = np.array([[0.811, 0.5], [0.25, 1.0]], np.float32)
    log.planned(4, None, ["a", "b"], np.array([2, 0]), confidence)
    log.drafted(4, np.array([7]), confidence[:1])
    log.graph(4, 16, 13, 2)
    return lines
