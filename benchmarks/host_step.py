# SPDX-License-Identifier: Apache-2.0
"""Host time of the plugin's whole part of a step, driven as the model runner drives it.

`benchmarks/planner.py` times the policy alone. Here a service goes through all calls of a step with
the device's verify mode: the plan with what it reads and hands to metrics, calibration and cost
learning, the split, and what is published. Requests end after 85 steps (256 tokens, three a step),
and another takes the slot with a prompt of one step, so a large batch has prompts and requests
without known confidences in nearly every step.

No device is there: streams and events do nothing, the split's kernel answers at once, so launches
and waits are left out and what is timed is Python and NumPy.

    python benchmarks/host_step.py --out benchmarks/results/host_step.json

| figure | what it times |
|---|---|
| `plan_us`, `spend_us`, `publish_us` | medians of what a server reports as `host_us_per_step` |
| `step_us`, `step_mean_us` | their sum; the mean has the steps that refit or evaluate in it |
| `decode_step_us` | the median of the `decode_steps` in which every request decodes |
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from planner import make_planner

from vllm_dspark.cli.provenance import header, save
from vllm_dspark.core.draft_width import WidthChoice, widths_for
from vllm_dspark.core.trace import parse_trace
from vllm_dspark.engine import device_split
from vllm_dspark.engine.accounting import Accounting
from vllm_dspark.engine.batch_order import BatchOrder
from vllm_dspark.engine.cost_learning import CostLearning
from vllm_dspark.engine.learning import OnlineLearning
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.planner import StepPlanner
from vllm_dspark.metrics import MetricsWriter

ROOT = Path(__file__).parents[1]
SIZES = (1, 32, 256)
BONUS, PROMPT = 1, 250
STEPS = 85
"""Of a request: 256 tokens, three a step."""
WARM_UP = 64
PARTS = ("plan", "spend", "publish")


class Event:
    """A CUDA event that has always happened, ten milliseconds after the one before."""

    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return 10.0


class Stream:
    """A CUDA stream that nothing waits for."""

    def __init__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


def no_device() -> Any:
    """`torch.cuda` without a device."""
    return mock.patch.multiple(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        current_stream=lambda *args: None,
        stream=lambda stream: nullcontext(),
    )


class Service:
    """Requests with a block of gamma drafts in every step but the one that reads their prompt."""

    def __init__(self, confidence: np.ndarray, requests: int) -> None:
        gamma = confidence.shape[1]
        self._rng = np.random.default_rng(requests)
        self._blocks = confidence
        self._count, self._gamma = requests, gamma
        self._ids = [f"request-{slot:05d}" for slot in range(requests)]
        self._named = requests
        self._steps_left = self._rng.integers(1, STEPS + 1, requests)
        self._admitted = torch.zeros(requests, dtype=torch.int32)
        self._logits = torch.arange(requests + 1, dtype=torch.int32) * (gamma + BONUS)
        self._states = SimpleNamespace(
            num_speculative_steps=gamma,
            max_num_reqs=requests,
            device=torch.device("cpu"),
            req_id_to_index={name: slot for slot, name in enumerate(self._ids)},
            num_computed_tokens_np=np.full(requests, PROMPT, np.int32),
            max_seq_len=np.full(requests, 1024, np.int32),
            prefill_len=SimpleNamespace(np=np.full(requests, PROMPT, np.int32)),
            draft_tokens=torch.zeros(requests, gamma, dtype=torch.int64),
        )
        self._order = BatchOrder(_sort)
        self.seconds: dict[str, float] = defaultdict(float)
        self.decodes = True
        """Whether every request of the last step decoded, with confidences."""
        self._planner = self._assemble()

    def _assemble(self) -> StepPlanner:
        core = make_planner(self._gamma)
        writer = MetricsWriter(0, 0, self._gamma, enabled=True)
        planner = StepPlanner(
            core,
            VerifyMode.DEVICE,
            self._states,
            torch.zeros(self._count + 1, dtype=torch.int32),
            BONUS,
            max_total_logits=1 << 30,
            order=self._order.again,
            answers_admitted=False,
            observers=[
                Accounting(writer, VerifyMode.DEVICE, core, None),
                OnlineLearning(core),
                CostLearning(core, lambda value: value),
            ],
            widths=WidthChoice(widths_for(self._gamma)),
            overlaps=True,
            on_host_time=self._spent,
        )
        # The arrays live on the CPU and are read as late as a device's would be.
        planner._live_host = False
        planner._lagged = planner._latest
        return planner

    def _spent(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds

    def _turn_over(self) -> set[str]:
        """Give slots of requests that have ended to new ones; returns those that read a prompt."""
        new = set()
        self._steps_left -= 1
        for slot in np.flatnonzero(self._steps_left == 0).tolist():
            self._steps_left[slot] = STEPS
            del self._states.req_id_to_index[self._ids[slot]]
            name = self._ids[slot] = f"request-{self._named:05d}"
            self._named += 1
            self._states.req_id_to_index[name] = slot
            self._states.num_computed_tokens_np[slot] = 0
            self._planner.add_request(slot)
            new.add(name)
        return new

    def step(self) -> None:
        """One step; what it took is in `seconds` by part."""
        new = self._turn_over()
        planner, states, count = self._planner, self._states, self._count
        # A prompt, a block that no plan has seen, and one that the next plan will see.
        self.decodes = bool((self._steps_left <= STEPS - 3).all())
        scheduled = {name: PROMPT if name in new else self._gamma + 1 for name in self._ids}
        drafts = {name: [-1] * self._gamma for name in self._ids if name not in new}
        block = torch.from_numpy(self._blocks[self._rng.integers(0, len(self._blocks), count)])
        ids = self._order.sort(scheduled, drafts, self._gamma + BONUS)
        slots = np.array([states.req_id_to_index[name] for name in ids])
        lens = np.array([scheduled[name] for name in ids], np.int32)
        drafted = np.array([len(drafts.get(name, ())) for name in ids], np.int32)
        sampled = self._rng.integers(1, 6, count, dtype=np.int32)
        idx_mapping, accepted = torch.from_numpy(slots), torch.from_numpy(sampled)
        batch = SimpleNamespace(
            req_ids=ids, num_reqs=count, idx_mapping=idx_mapping, idx_mapping_np=slots
        )
        self.seconds.clear()
        if drafts:  # the host asks for a budget only if something was drafted
            planner.get_num_tokens(scheduled, drafts)
            planner.compact_batch(drafted, lens, self._logits.numpy())
            split = (self._admitted, self._logits.clone())
            with mock.patch.object(device_split, "allocate", lambda *args: split):
                planner.reallocate_drafts(ids, idx_mapping)
        planner.committed(accepted)
        planner.record_confidences(block, batch)
        states.num_computed_tokens_np[slots] += lens - drafted + np.where(drafted > 0, 2, 0)


def _sort(tokens: dict[str, int], drafts: dict[str, list[int]], query_len: int) -> list[str]:
    return sorted(tokens, key=tokens.__getitem__)


def row(confidence: np.ndarray, requests: int, steps: int) -> dict[str, Any]:
    service = Service(confidence, requests)
    taken: dict[str, list[float]] = {name: [] for name in PARTS}
    decodes = []
    for number in range(-WARM_UP, steps):
        service.step()
        if number < 0:
            continue
        decodes.append(service.decodes)
        for name, values in taken.items():
            values.append(service.seconds[name] * 1e6)
    together = np.sum(list(taken.values()), axis=0)
    decoding = together[decodes]
    figures: dict[str, float | None] = {f"{n}_us": float(np.median(v)) for n, v in taken.items()}
    figures["step_us"], figures["step_mean_us"] = float(np.median(together)), float(together.mean())
    figures["decode_step_us"] = float(np.median(decoding)) if len(decoding) else None
    rounded = {name: value and round(value, 1) for name, value in figures.items()}
    return {"requests": requests, "steps": steps, **rounded, "decode_steps": len(decoding)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--steps", type=int, default=4096)
    options = parser.parse_args()
    made_by = header(["python", *sys.argv])
    with (ROOT / "demo" / "trace.jsonl").open() as lines:
        confidence = parse_trace(lines).confidence.astype(np.float32)
    with no_device():
        rows = [row(confidence, requests, options.steps) for requests in options.sizes]
    for entry in rows:
        print(json.dumps(entry))
    if options.out:
        save({**made_by, "rows": rows}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
