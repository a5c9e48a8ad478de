# SPDX-License-Identifier: Apache-2.0
"""A general plugin of vLLM for tests: disturbs ranks of a real server and traces all of them.

It is installed through a distribution folder that `engine_group` writes. `FAULT_FILE` names a file
with the fault as JSON (`kind`, `ranks`, `size`, `every`); while the file is missing nothing is
disturbed. `TRACE_FOLDER` names a folder where each rank writes what it did, so that ranks are
compared by nothing that is under test, and its stacks when it is sent SIGUSR1. The same code traces
and disturbs vLLM's own verification manager, for comparison.

`ALTERNATE` is a number of steps: for so many steps everything is synced twice, then once for so
many, and so on, by the step's number, which is equal on all ranks. The second time changes nothing,
so it shows what a sync costs within one run.

`COLLECTIVES` set to `gloo` lets CPU ranks talk through gloo, as ranks on several machines do. By
default those of one machine meet in shared memory and spin there, which takes the cores of ranks
that are still at work when there are more ranks than cores.

Kinds: `perturb`, `missing`, `nan` (confidences), `flip` (a drafted id), `commit` (another first
token is committed, and the last one is not), `late` (the rank's main thread is late by `size`
seconds), `slow_copy` (the copy of a step's output to the host is late by `size` seconds; GPUs
only). On a CPU a cost table is adopted at start-up, since a CPU measures none; it differs between
ranks before tables are shared.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

FAULT_FILE = "DSPARK_TEST_FAULT_FILE"
TRACE_FOLDER = "DSPARK_TEST_TRACE_FOLDER"
ALTERNATE = "DSPARK_TEST_ALTERNATE"
COLLECTIVES = "DSPARK_TEST_COLLECTIVES"

SPIN_CYCLES_PER_S = 1.8e9
"""Of `torch.cuda._sleep`, about; how long exactly does not matter."""


def register() -> None:
    """Entry point; imports neither torch nor vLLM."""
    if os.environ.get(TRACE_FOLDER):
        from vllm_dspark.late_binding import on_import

        on_import("vllm_dspark.engine.planner", _bind_planner)
        on_import("vllm.v1.worker.gpu.spec_decode.adaptive_verification", _bind_native)
        on_import("vllm.v1.worker.gpu.async_utils", _bind_output)
        if os.environ.get(COLLECTIVES) == "gloo":
            on_import("vllm.distributed.device_communicators.cpu_communicator", _bind_communicator)


@dataclass(frozen=True)
class Seam:
    """Where the two verification managers differ."""

    states: str
    """Attribute with the runner's request states."""
    budget: Callable[[Any, tuple[Any, ...]], int | None]
    """From the manager and the answer of its `reallocate_drafts`."""


def _bind_planner(module: ModuleType) -> None:
    planner = module.StepPlanner
    _bind(planner, Seam("_states", lambda self, answer: self._running.plan.budget))
    original = planner.agree_accept

    @wraps(original)
    def agree_accept(self: Any, output: Any) -> Any:
        agreed = original(self, _disturb_accepted(self, output))
        values = {"step": self.test_step, "ids": agreed.sampled_token_ids, "n": agreed.num_sampled}
        self.test_trace.write(values, _committed)
        return agreed

    planner.agree_accept = agree_accept


def _bind_native(module: ModuleType) -> None:
    seam = Seam("req_states", lambda self, answer: int(answer[2]))
    _bind(module.AdaptiveVerificationManager, seam)


def _bind(manager: Any, seam: Seam) -> None:
    start, reallocate, record = (
        getattr(manager, name) for name in ("__init__", "reallocate_drafts", "record_confidences")
    )

    @wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        _after_init(self, getattr(self, seam.states).device)

    @wraps(reallocate)
    def reallocate_drafts(self: Any, req_ids: list[str], idx_mapping: Any) -> Any:
        answer = reallocate(self, req_ids, idx_mapping)
        line = {
            "step": self.test_step,
            "requests": len(req_ids),
            "budget": seam.budget(self, answer),
            "running": int(answer[2]),
            "logits": answer[0],
            "drafts": getattr(self, seam.states).draft_tokens[idx_mapping],
            "at_s": time.monotonic(),
        }
        self.test_trace.write(line, _decided)
        return answer

    @wraps(record)
    def record_confidences(self: Any, confidence: Any, batch: Any) -> Any:
        drafts = getattr(self, seam.states).draft_tokens
        self.test_trace.write({"step": self.test_step, "graph": batch.num_tokens_after_padding})
        answer = record(self, _disturb(self, confidence, batch, drafts), batch)
        self.test_step += 1
        return answer

    manager.__init__ = __init__
    manager.reallocate_drafts = reallocate_drafts
    manager.record_confidences = record_confidences


def _decided(values: dict[str, Any]) -> dict[str, Any]:
    """Lengths instead of offsets of logits; drafted ids that run."""
    offsets = values.pop("logits")
    values["lens"] = [end - start - 1 for start, end in zip(offsets, offsets[1:], strict=False)]
    values["drafts"] = [d[:n] for d, n in zip(values["drafts"], values["lens"], strict=True)]
    return values


def _committed(values: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(values["ids"], values["n"], strict=True)
    return {"step": values["step"], "committed": [ids[:count] for ids, count in pairs]}


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().rank_in_group


def _after_init(manager: Any, device: Any) -> None:
    from step_trace import StepTrace

    folder, name = Path(os.environ[TRACE_FOLDER]), f"rank{_rank()}-{os.getpid()}"
    manager.test_step = 0
    manager.test_trace = StepTrace(folder / f"{name}.jsonl")
    # Stays open as long as the process.
    manager.test_stacks = (folder / f"{name}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=manager.test_stacks, all_threads=True)
    if device.type == "cpu":
        _adopt_costs(manager)
    window = int(os.environ.get(ALTERNATE, 0))
    agreement = getattr(manager, "_agreement", None)
    if window and agreement is not None and agreement._sync is not None:
        agreement._sync = Twice(agreement._sync, lambda: synced_twice(manager.test_step, window))


def _adopt_costs(planner: Any) -> None:
    import numpy as np

    from vllm_dspark.core import CostModel, ExecMode
    from vllm_dspark.core.cost_model import Curve

    sizes = np.arange(1, 257)
    slope = 0.2 + 0.1 * _rank()
    cost = CostModel({ExecMode.EAGER: Curve(sizes, 4.0 + slope * sizes)})
    planner.bind_profile(type("Measured", (), {"fit": staticmethod(lambda samples: cost)}))
    planner.set_initial_cost_curves([])
    planner.bind_profile(None)


def synced_twice(step: int, window: int) -> bool:
    """Everything is synced a second time in this step."""
    return (step // window) % 2 == 0


class Twice:
    """A sync that repeats itself in the steps where `repeats()` is true."""

    def __init__(self, sync: Any, repeats: Callable[[], bool]) -> None:
        self._sync, self._repeats = sync, repeats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync, name)

    def agree_block(self, rows: Any, gamma: int) -> Any:
        agreed = self._sync.agree_block(rows, gamma)
        return self._sync.agree_block(agreed, gamma) if self._repeats() else agreed

    def agree_plan(self, step: int, plan: Any, num_reqs: int) -> Any:
        agreed = self._sync.agree_plan(step, plan, num_reqs)
        return self._sync.agree_plan(step, agreed, num_reqs) if self._repeats() else agreed

    def agree_split(self, lens: Any, draft_tokens: Any, slots: Any) -> Any:
        agreed = self._sync.agree_split(lens, draft_tokens, slots)
        if self._repeats():
            agreed = self._sync.agree_split(agreed, draft_tokens, slots)
        return agreed

    def agree_accept(self, *values: Any) -> Any:
        agreed = self._sync.agree_accept(*values)
        return self._sync.agree_accept(*agreed) if self._repeats() else agreed


def _fault(step: int) -> dict[str, Any]:
    """The fault that strikes this rank in this step; of kind `none` if there is none."""
    try:
        fault = json.loads(Path(os.environ[FAULT_FILE]).read_text())
    except (OSError, ValueError, KeyError):
        return {"kind": "none"}
    strikes = _rank() in fault["ranks"] and step % fault.get("every", 1) == 0
    return fault if strikes else {"kind": "none"}


def _bind_output(module: ModuleType) -> None:
    """The copies of a step's output wait behind a kernel that spins."""
    import inspect

    output = module.AsyncOutput
    original, signature = output.__init__, inspect.signature(output.__init__)

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        fault = _fault(0)
        if fault["kind"] == "slow_copy":
            import torch

            with torch.cuda.stream(signature.bind(self, *args, **kwargs).arguments["copy_stream"]):
                torch.cuda._sleep(int(fault["size"] * SPIN_CYCLES_PER_S))
        original(self, *args, **kwargs)

    output.__init__ = __init__


def _bind_communicator(module: ModuleType) -> None:
    """Ranks that cannot agree on a name for their shared memory do without."""
    shared_memory = module._CPUSHMDistributed
    original = shared_memory.make_group_name

    @wraps(original)
    def make_group_name(communicator: Any) -> str:
        return f"{original(communicator)}-{os.getpid()}"

    shared_memory.make_group_name = staticmethod(make_group_name)


def _disturb_accepted(planner: Any, output: Any) -> Any:
    """The sampler's output as this rank shall have it."""
    from dataclasses import replace

    if _fault(planner.test_step)["kind"] != "commit":
        return output
    ids = output.sampled_token_ids.clone()
    ids[:, 0] = (ids[:, 0] + 1) % 256
    dropped = (output.num_sampled > 1).to(output.num_sampled.dtype)
    return replace(
        output,
        sampled_token_ids=ids,
        num_sampled=output.num_sampled - dropped,
        num_rejected=output.num_rejected + dropped,
    )


def _disturb(manager: Any, confidence: Any, batch: Any, drafts: Any) -> Any:
    """The step's confidences as this rank shall have them."""
    import torch

    step = manager.test_step
    fault = _fault(step)
    kind, row = fault["kind"], step % batch.num_reqs
    if kind == "missing":
        return None
    if kind == "late":
        time.sleep(fault["size"])
    if kind == "flip":
        drafts[batch.idx_mapping[row], 0] = (drafts[batch.idx_mapping[row], 0] + 1) % 256
    if kind == "nan":
        confidence = confidence.clone()
        confidence[row, 0] = torch.nan
    if kind == "perturb":
        seeded = torch.Generator().manual_seed(1000 * step + _rank())
        noise = torch.randn(confidence.shape, generator=seeded).to(confidence.device)
        confidence = (confidence * (1.0 + fault["size"] * noise)).clamp(0.0, 1.0)
    return confidence
