# SPDX-License-Identifier: Apache-2.0
"""Host time of one scheduling decision: the plugin's planner beside native vLLM's.

Native is `AdaptiveVerificationManager.get_num_tokens` + `compact_batch`, the real methods on an
object that has only the attributes they read. Both sides see the same confidences (blocks of the
demo trace), the same staircase of costs and the same number of requests, and take turns in one
process. All figures are medians.

    python benchmarks/planner.py --out benchmarks/results/planner.json

| figure | what it times |
|---|---|
| `plugin_us` | `Planner.plan` on arrays: survival, calibration, budget, allocation |
| `plugin_mixed_us` | the same, a calibration regime per request |
| `plugin_new_shape_us` | the same, no two steps alike in tokens (prices are not remembered) |
| `plugin_from_dicts_us` | the same, arrays built from the dictionaries that native reads |
| `native_us` | native's host path |
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_dspark.cli.provenance import header, save
from vllm_dspark.core import (
    CalibrationTable,
    CostModel,
    ExecMode,
    Planner,
    PolicyConfig,
    StepInput,
    TierLadder,
)
from vllm_dspark.core.calibration import NUM_REGIMES
from vllm_dspark.core.cost_model import Curve
from vllm_dspark.core.trace import parse_trace

ROOT = Path(__file__).parents[1]
SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TARGETS_US = {64: 60.0, 256: 150.0, 4096: 1500.0}
CAPTURE = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
VARIANTS = 8


def cost_points() -> tuple[np.ndarray, np.ndarray]:
    """Synthetic verify curve: flat shelves with cliffs, a jump where graphs end, then a line."""
    sizes = np.array([*CAPTURE, 768, 1024, 2048, 4096, 8192, 16384, 32768])
    ms = 5.0 + 0.004 * sizes + 0.6 * (sizes // 128) + 3.0 * (sizes > CAPTURE[-1])
    return sizes, ms


def make_planner(gamma: int) -> Planner:
    sizes, ms = cost_points()
    cost = CostModel(
        {ExecMode.FULL: Curve(sizes, ms, limit=CAPTURE[-1])},
        draft=Curve(np.array([1, 64, 512, 4096]), np.array([0.5, 0.6, 1.2, 6.0])),
        draft_width=gamma,
        logit_row_ms=2e-4,
        ragged_ms=0.02,
    )
    shape = (NUM_REGIMES, gamma)
    calibration = CalibrationTable(np.full(shape, 0.9), np.full(shape, -0.1))
    return Planner(PolicyConfig(), gamma, {ExecMode.FULL: TierLadder(CAPTURE)}, cost, calibration)


class Batch:
    """One batch of decoding requests, as the engine holds it."""

    def __init__(self, confidence: np.ndarray, requests: int, rng: np.random.Generator) -> None:
        gamma = confidence.shape[1]
        self.slots = rng.permutation(requests).astype(np.int32)
        self.ids = [f"request-{i:05d}" for i in range(requests)]
        self.tokens = dict.fromkeys(self.ids, gamma + 1)
        self.drafts = {r: list(range(gamma)) for r in self.ids}
        self.slot_of = dict(zip(self.ids, self.slots.tolist(), strict=True))
        self.table = confidence[rng.integers(0, len(confidence), requests)]
        self.regimes = rng.integers(0, NUM_REGIMES, requests)
        self.lens = np.full(requests, gamma)
        self.samples = np.ones(requests, dtype=bool)

    def step(self, regimes: Any = 0) -> StepInput:
        return StepInput(
            samples=self.samples,
            draft_lens=self.lens,
            base_tokens=len(self.ids),
            confidence=self.table,
            context_tokens=1000 * len(self.ids),
            regimes=regimes,
        )

    def step_from_dicts(self) -> StepInput:
        """The same step, gathered from what the scheduler hands over."""
        total = len(self.tokens)
        tokens = np.fromiter(self.tokens.values(), np.int64, total)
        lens = np.fromiter(map(len, map(self.drafts.__getitem__, self.tokens)), np.int64, total)
        slots = np.fromiter(map(self.slot_of.__getitem__, self.tokens), np.int64, total)
        return StepInput(
            samples=self.samples,
            draft_lens=lens,
            base_tokens=int(tokens.sum() - lens.sum()),
            confidence=self.table[slots],
            context_tokens=1000 * total,
        )


def make_native(batches: list[Batch], gamma: int) -> Callable[[int], None]:
    """A closure that runs native's host path on batch `i`."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as native

    requests = len(batches[0].ids)
    sizes, ms = cost_points()
    verify = list(zip(sizes.tolist(), ms.tolist(), strict=True))
    manager = object.__new__(native.AdaptiveVerificationManager)
    manager.num_speculative_steps = gamma
    manager.num_bonus_tokens = 1
    manager._max_total_logits = 10**9
    manager._batch_budget = None
    manager._stale_idx = 0
    manager._stale_confidences = [SimpleNamespace(np=np.empty((requests, gamma), np.float32))]
    manager.cost_tables = native.build_cost_tables_from_curves(
        [(1, 0.5), (64, 0.6), (512, 1.2), (4096, 6.0)],
        verify,
        max_num_reqs=requests,
        max_batch_tokens=requests * (gamma + 1),
        cudagraph_limit=CAPTURE[-1],
    )
    manager.req_states = SimpleNamespace(
        req_id_to_index={},
        num_computed_tokens_np=np.full(requests, 1000, np.int32),
        max_seq_len=np.full(requests, 2000, np.int32),
        prefill_len=SimpleNamespace(np=np.full(requests, 500, np.int32)),
    )
    drafts = np.full(requests, gamma, np.int32)
    scheduled = np.full(requests, gamma + 1, np.int32)
    logits = np.arange(requests + 1, dtype=np.int32) * (gamma + 1)

    def run(index: int) -> None:
        batch = batches[index]
        manager.req_states.req_id_to_index = batch.slot_of
        manager._stale_confidences[0].np = batch.table
        manager.get_num_tokens(batch.tokens, batch.drafts)
        manager.compact_batch(drafts, scheduled, logits)

    return run


def measure(contestants: dict[str, Callable[[int], Any]], seconds: float) -> dict[str, float]:
    """Median microseconds of each, taking turns until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        for index in range(VARIANTS):
            run(index)
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 2 * VARIANTS:
        for name, run in contestants.items():
            start = time.perf_counter()
            run(turn % VARIANTS)
            times[name].append(time.perf_counter() - start)
        turn += 1
    return {name: round(float(np.median(values)) * 1e6, 1) for name, values in times.items()}


def row(confidence: np.ndarray, requests: int, seconds: float) -> dict[str, Any]:
    gamma = confidence.shape[1]
    rng = np.random.default_rng(requests)
    batches = [Batch(confidence, requests, rng) for _ in range(VARIANTS)]
    steps = [batch.step() for batch in batches]
    mixed = [batch.step(batch.regimes) for batch in batches]
    planner = make_planner(gamma)
    shapes = count(1)

    def new_shape(index: int) -> None:
        step = steps[index]
        planner.plan(replace(step, base_tokens=requests + next(shapes) % 1000))

    found = measure(
        {
            "plugin_us": lambda i: planner.plan(steps[i]),
            "plugin_mixed_us": lambda i: planner.plan(mixed[i]),
            "plugin_new_shape_us": new_shape,
            "plugin_from_dicts_us": lambda i: planner.plan(batches[i].step_from_dicts()),
            "native_us": make_native(batches, gamma),
        },
        seconds,
    )
    return {
        "requests": requests,
        "gamma": gamma,
        **found,
        "native_over_plugin": round(found["native_us"] / found["plugin_us"], 2),
        "target_us": TARGETS_US.get(requests),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=3.0, help="time per batch size")
    options = parser.parse_args()
    made_by = header(["python", *sys.argv])
    with (ROOT / "demo" / "trace.jsonl").open() as lines:
        confidence = parse_trace(lines).confidence
    rows = [row(confidence, requests, options.seconds) for requests in options.sizes]
    for entry in rows:
        print(json.dumps(entry))
    if options.out:
        save({**made_by, "rows": rows}, options.out)
    missed = [r["requests"] for r in rows if r["target_us"] and r["plugin_us"] > r["target_us"]]
    slower = [r["requests"] for r in rows if r["plugin_us"] >= r["native_us"]]
    for label, sizes in (("above its target", missed), ("not faster than native", slower)):
        if sizes:
            print(f"{label} at {sizes} requests", file=sys.stderr)
    return 1 if missed or slower else 0


if __name__ == "__main__":
    sys.exit(main())
