# SPDX-License-Identifier: Apache-2.0
"""How good the operator's tools are on the demo pair: calibration, replay, cost of records.

Two servers answer the same greedy prompts one after the other. The first verifies everything and is
recorded; its records are calibrated (error on held-out requests before and after) and replayed with
a pinned budget. The second really is pinned, and its accept length judges the replay. What records
cost is counted by the first server itself, beside the step times of the same run, and timed once
more alone for larger batches.

    python benchmarks/operate.py                   # writes benchmarks/results/operate.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dspark.cli import demo
from vllm_dspark.cli.calibrate import FITS, Errors, held_out, survivals_under
from vllm_dspark.cli.costs import step_times
from vllm_dspark.cli.counters import settled
from vllm_dspark.cli.provenance import header, save
from vllm_dspark.cli.recorded import Recording, from_files, server_directory
from vllm_dspark.cli.replay import Table, policy, replay_all
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client, read_prompts
from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.tiers import TierLadder
from vllm_dspark.metrics_snapshot import Snapshot, parse_exposition, total
from vllm_dspark.records import RecordRing, StepRecord, request_records

RESULTS = Path(__file__).parent / "results" / "operate.json"
CONCURRENCY = 8
GAMMA = 7
TIMED_ADDS = 2000
D = "vllm:dspark_"


@dataclass(frozen=True)
class Run:
    """What one server left behind."""

    recording: Recording
    metrics: Snapshot


def serve(name: str, dspark: dict[str, Any], prompts: list[str], tokens: int) -> Run:
    """Answer the prompts with one server and return its records and counters."""
    with tempfile.TemporaryDirectory(prefix="vllm-dspark-operate-") as folder:
        options = demo.pair_options(dspark={"strict": True, "records": 20_000, **dspark})
        log = Path(folder) / "server.log"
        with Server(options, log, demo.gpu_present(), environment={"OMP_NUM_THREADS": "1"}) as s:
            s.wait_ready()
            begin = time.monotonic()
            Client(s.url, demo.SERVED_NAME).greedy_all(prompts, tokens, CONCURRENCY)
            print(f"{name}: {len(prompts)} prompts in {time.monotonic() - begin:.0f} s", flush=True)
            settled(s.metrics_text)
            metrics = parse_exposition(s.metrics_text())
            paths = request_records(server_directory(s.pid))
            return Run(from_files([Path(path) for path in paths]), metrics)


def calibration(recording: Recording) -> dict[str, Any]:
    """Error on the held-out requests without and with each fit to the others."""
    blocks = recording.blocks
    rows = held_out(blocks)
    identity = CalibrationTable.identity(blocks.gamma)
    before = Errors.of(survivals_under(identity, blocks), blocks, rows)
    found = {}
    for name, fit in FITS.items():
        errors = Errors.of(survivals_under(fit(blocks, ~rows), blocks), blocks, rows)
        found[name] = {"mean": errors.mean, "by_position": errors.ece.tolist()}
    return {
        "ece_before": before.mean,
        "ece_after": found["scale-bias"]["mean"],
        "ece": {
            "bins": 10,
            "held_out_blocks": int(np.count_nonzero(rows)),
            "before_by_position": before.ece.tolist(),
            "after": found,
        },
    }


def replayed(full: Recording, pinned: Recording, pin: float) -> dict[str, Any]:
    """Predicted and real accept length of the pinned server."""
    table = Table("none", None, TierLadder())
    (outcome,) = replay_all(
        full.blocks.trace(), [policy(f"pin={pin}")], [table], requests=full.typical_requests
    )
    predicted, real = outcome.result.accept_length, pinned.blocks.accept_len
    return {
        "replay_accept_len_error": abs(predicted - real) / real,
        "replay": {
            "pin": pin,
            "predicted_accept_len": predicted,
            "real_accept_len": real,
            "recorded_accept_len": full.blocks.accept_len,
            "blocks": [len(full.blocks), len(pinned.blocks)],
        },
    }


def record_cost(run: Run) -> dict[str, Any]:
    """Time for records over step time in the same run, and alone for larger batches."""
    steps = total(run.metrics, D + "steps_settled_total")
    spent_s = total(run.metrics, D + "overhead_seconds_total", part="records")
    step_ms = float(np.median(step_times(run.recording.records).ms))
    microseconds = 1e6 * spent_s / steps
    return {
        "record_overhead": microseconds / (1e3 * step_ms),
        "record_us_per_step": microseconds,
        "median_step_ms": step_ms,
        "record_add_us": {str(n): add_us(n) for n in (8, 64, 256)},
    }


def add_us(requests: int) -> float:
    """Median microseconds to keep the record of a step with so many requests."""
    ring = RecordRing(1000)
    rng = np.random.default_rng(0)
    record = StepRecord(
        step=0,
        time_s=0.0,
        num_reqs=requests,
        num_sampling=requests,
        base_tokens=requests,
        scheduled=np.full(requests, GAMMA),
        budget=requests,
        lag_steps=1,
        mode="compact",
        reason="trimmed",
        tier_tokens=0,
        verify_lens=np.full(requests, 2),
        survivals=rng.random((requests, GAMMA)),
        accepted=np.ones(requests, dtype=np.int64),
        confidence=rng.random((requests, GAMMA)),
        regimes=np.zeros(requests, dtype=np.int64),
        request_ids=[str(i) for i in range(requests)],
    )
    times = []
    for step in range(TIMED_ADDS):
        record.step = step
        begin = time.perf_counter()
        ring.add(record)
        times.append(time.perf_counter() - begin)
    return 1e6 * float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pin", type=float, default=0.5, help="share of the drafts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", args.prompts)
    full = serve("everything verified", {"budget_floor": 1.0}, prompts, args.tokens)
    options = {"verify": "compact", "budget_pin": args.pin}
    pinned = serve(f"pinned to {args.pin}", options, prompts, args.tokens)
    record = {
        **calibration(full.recording),
        **replayed(full.recording, pinned.recording, args.pin),
        **record_cost(full),
        "prompts": args.prompts,
        "tokens_per_prompt": args.tokens,
        "concurrency": CONCURRENCY,
        **header(["python", *sys.argv]),
    }
    save(record, args.out)
    for name in ("ece_before", "ece_after", "replay_accept_len_error", "record_overhead"):
        print(f"{name:24} {record[name]:.4f}")
    print(f"{'record_us_per_step':24} {record['record_us_per_step']:.1f}")


if __name__ == "__main__":
    main()
