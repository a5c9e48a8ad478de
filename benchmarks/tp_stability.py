# SPDX-License-Identifier: Apache-2.0
"""Soak of a tensor-parallel group that is disturbed all the time, and the price of its agreement.

    python benchmarks/tp_stability.py            # the whole matrix: two CPU ranks over gloo
    python benchmarks/tp_stability.py --short    # a few runs, for CI
    python benchmarks/tp_stability.py --tp 8 --batch-sizes 4 8 --consensus 16
    python benchmarks/tp_stability.py --gpu --tp 8 --batch-sizes 64 96 128 --tokens 1024

A run is one workload at one batch size on a real server. The matrix is {overlap, no overlap} x {one
server for all runs, a server per run} x protocol x batch size x workload. The confidences of the
last rank, and of the one in the middle where there are more than two, are multiplied by
1 + DRIFT * noise in every step of every run. A run fails by

* `divergences`: steps in which the ranks did not do the same, seen in traces that every rank writes
  for itself,
* `hangs` and `errors`: requests that do not come back, or come back with an error,
* `truncated`: answers with fewer tokens than asked for,
* `wrong`: greedy answers whose tokens differ from those of an undisturbed server, near ties left
  out.

The price is measured apart, without drift: on one server everything is synced twice for 16 steps,
once for 16 and so on, and the medians of the two kinds of steps are compared: `step_ratio` - 1 is
the share of a step that one more sync takes, on the device or the host. `sync_share` is the part of
the step that rank 0's host spends in the sync; it includes waiting for the other ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import tp_servers
import tp_workloads
from tp_servers import DRIFT, Disturbed, Servers
from tp_workloads import WORKLOADS, Answer, Request, other_tokens, send

from vllm_dspark.cli import demo
from vllm_dspark.cli.provenance import header, save
from vllm_dspark.cli.server import Server, ServerError
from vllm_dspark.cli.traffic import Client, read_prompts
from vllm_dspark.metrics_snapshot import (
    PREFIX,
    Snapshot,
    by_label,
    parse_exposition,
    total,
)

PROTOCOLS = ("inputs", "outputs")
SHORT_WORKLOADS = ("uneven", "sampled")
WINDOW_STEPS = 16
FAILURES = ("divergences", "hangs", "errors", "truncated", "wrong")


@dataclass(frozen=True)
class Cell:
    """One run."""

    protocol: str
    overlap: bool
    restart: bool
    batch_size: int
    workload: str


@dataclass
class Soak:
    """What the runs share."""

    servers: Servers
    prompts: list[str]
    tokens: int
    batch_sizes: Sequence[int]
    protocols: Sequence[str]
    workloads: Sequence[str]
    consensus: int
    reference: dict[str, list[Answer]] = field(default_factory=dict)

    def requests(self, workload: str, batch_size: int) -> list[Request]:
        """Enough to fill the batch, and four at least."""
        return tp_workloads.build(workload, self.prompts, max(batch_size, 4), self.tokens)

    def options(self, protocol: str) -> dict[str, Any]:
        """Trimmed wherever it gains anything: the most decisions to disagree on."""
        return {
            "strict": True,
            "verify": "compact",
            "tp_sync": protocol,
            "min_gain": 0.0,
            "consensus_interval": self.consensus,
        }

    @property
    def fault(self) -> dict[str, Any]:
        """Drift of the last rank, and of the middle one where there is one."""
        world = self.servers.world
        return {"kind": "perturb", "ranks": sorted({world // 2, world - 1}), "size": DRIFT}

    def cells(self, restarts: int) -> list[Cell]:
        """The runs, those on one server first.

        A server per run is what takes the time, so there each workload is run once per kind of
        scheduling, `restarts` of them at most, with batch sizes and protocols in turn.
        """
        same_server = [
            Cell(protocol, overlap, False, batch, name)
            for overlap in (True, False)
            for protocol in self.protocols
            for batch in self.batch_sizes
            for name in self.workloads
        ]
        restarted = [
            Cell(_in_turn(self.protocols, i), overlap, True, _in_turn(self.batch_sizes, i), name)
            for overlap in (True, False)
            for i, name in enumerate(self.workloads[:restarts])
        ]
        return same_server + restarted


def _in_turn(values: Sequence[Any], index: int) -> Any:
    return values[index % len(values)]


def run_cell(soak: Soak, cell: Cell, running: Server, disturbed: Disturbed) -> dict[str, Any]:
    """One workload, counted."""
    start_step, begin = disturbed.last_step() + 1, time.monotonic()
    requests = soak.requests(cell.workload, cell.batch_size)
    answers = send(running.url, demo.SERVED_NAME, requests, cell.batch_size)
    seconds = time.monotonic() - begin
    outcomes = Counter(answer.outcome for answer in answers)
    found = disturbed.compare(since=start_step)
    row = {
        **asdict(cell),
        "seconds": round(seconds, 2),
        "requests": len(requests),
        "steps": found.steps,
        "divergences": found.differing,
        "hangs": outcomes["hang"],
        "errors": outcomes["error"],
        "truncated": outcomes["truncated"],
        "wrong": count_wrong(soak, cell, running, requests, answers),
    }
    # One token is its prompt's; nothing is verified for it.
    if not found.steps and not outcomes["error"] and max(r.tokens for r in requests) > 1:
        raise RuntimeError(f"{cell}: the ranks left no traces")
    return row


def count_wrong(
    soak: Soak, cell: Cell, running: Server, requests: Sequence[Request], answers: Sequence[Answer]
) -> int:
    """Greedy answers that are not the undisturbed server's, near ties left out."""
    reference = soak.reference[cell.workload]
    greedy = [i for i, request in enumerate(requests) if request.temperature == 0]
    client = Client(running.url, demo.SERVED_NAME)
    found = other_tokens(client, [reference[i] for i in greedy], [answers[i] for i in greedy])
    return found["wrong"]


def run_matrix(soak: Soak, cells: Sequence[Cell], deadline_s: float) -> Iterator[Any]:
    """Rows of each server's runs, one server after the other; none is started too late."""
    for same, group in groupby(cells, key=lambda cell: (cell.restart, cell.overlap, cell.protocol)):
        for one_server in [[cell] for cell in group] if same[0] else [list(group)]:
            if time.monotonic() > deadline_s:
                return
            yield run_server(soak, one_server, deadline_s)


def run_server(soak: Soak, group: Sequence[Cell], deadline_s: float) -> list[dict[str, Any]]:
    """Runs on one server; if it ends, that is an error of every run that it still had to do."""
    rows: list[dict[str, Any]] = []
    try:
        options = soak.options(group[0].protocol)
        with soak.servers.plugin(options, overlap=group[0].overlap) as (running, disturbed):
            disturbed.set_fault(soak.fault)
            for cell in group:
                if rows and time.monotonic() > deadline_s:
                    break
                rows.append(run_cell(soak, cell, running, disturbed))
                print(json.dumps(rows[-1]), flush=True)
            rows[-1]["values_that_drifted"] = disagreements(
                parse_exposition(running.metrics_text())
            )
    except ServerError as error:
        print(error, flush=True)
        for cell in group[len(rows) :]:
            rows.append({**asdict(cell), **dict.fromkeys(FAILURES, 0), "errors": 1})
    return rows


def write_reference(soak: Soak, running: Server) -> None:
    """Answers of a server that nobody disturbs."""
    largest = max(soak.batch_sizes)
    for name in soak.workloads:
        requests = soak.requests(name, largest)
        soak.reference[name] = send(running.url, demo.SERVED_NAME, requests, largest)


def price(
    running: Server,
    disturbed: Disturbed,
    prompts: Sequence[str],
    tokens: int,
    batch: int,
    rounds: int,
) -> dict[str, Any]:
    """Step times with everything synced twice and once, in turn, without drift.

    Args:
        running: a server that alternates every `WINDOW_STEPS`.
        batch: requests at a time; the batch is filled `rounds` times.
    """
    requests = tp_workloads.build("even", prompts, batch * rounds, tokens)
    send(running.url, demo.SERVED_NAME, requests[:batch], batch)
    before = sync_totals(running, disturbed.world)
    start = disturbed.last_step() + 1
    answers = send(running.url, demo.SERVED_NAME, requests, batch)
    failed = [answer for answer in answers if answer.outcome != "ok"]
    if failed:
        raise RuntimeError(running.with_log(f"batch size {batch}: {failed[0]}"))
    time.sleep(1.5)
    after = sync_totals(running, disturbed.world)
    steps = [step for step in disturbed.steps()[0].values() if step["step"] >= start]
    full = max(step["requests"] for step in steps)
    times: dict[bool, list[float]] = {True: [], False: []}
    for one, other in zip(steps, steps[1:], strict=False):
        twice = tp_servers.synced_twice(one["step"], WINDOW_STEPS)
        inside = tp_servers.synced_twice(other["step"], WINDOW_STEPS) == twice
        if inside and other["step"] == one["step"] + 1 and one["requests"] == full:
            times[twice].append((other["at_s"] - one["at_s"]) * 1e3)
    twice_ms, once_ms = median(times[True]), median(times[False])
    syncs = sum(1 + tp_servers.synced_twice(step["step"], WINDOW_STEPS) for step in steps)
    sync_ms = [(b[0] - a[0]) * 1e3 / syncs for a, b in zip(before, after, strict=True)]
    return {
        "requests_per_step": full,
        "steps_twice": len(times[True]),
        "steps_once": len(times[False]),
        "step_twice_ms": round(twice_ms, 3),
        "step_once_ms": round(once_ms, 3),
        "step_ratio": round(twice_ms / once_ms, 4),
        "messages_per_step": round((after[0][1] - before[0][1]) / syncs, 3),
        "sync_ms_by_rank": [round(value, 3) for value in sync_ms],
        "sync_share": round(sync_ms[0] / once_ms, 4),
    }


def sync_totals(running: Server, world: int) -> list[tuple[float, float]]:
    """Seconds in the sync and messages, by rank."""
    metrics = parse_exposition(running.metrics_text())
    seconds, messages = (
        by_label(metrics, f"{PREFIX}sync_{unit}_total", "rank") for unit in ("seconds", "messages")
    )
    return [(seconds.get(str(r), 0.0), messages.get(str(r), 0.0)) for r in range(world)]


def disagreements(metrics: Snapshot) -> int:
    """Values of a rank that were not rank 0's and were replaced."""
    return int(total(metrics, PREFIX + "rank_disagreements_total"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tp_servers.add_arguments(parser)
    add = parser.add_argument
    add("--short", action="store_true", help="a few runs instead of all")
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    add("--tokens", type=int, default=32, help="of the longest output")
    add("--consensus", type=int, default=0, help="steps between two checks of the ranks; 0: none")
    add(
        "--price-rounds",
        type=int,
        default=12,
        help="full batches that the sync's price is taken from",
    )
    add("--restarts", type=int, default=len(WORKLOADS), help="servers of one run, per scheduling")
    add("--minutes", type=float, default=600.0, help="no run begins later")
    options = parser.parse_args()
    if options.short:
        options.batch_sizes, options.workloads = [4], list(SHORT_WORKLOADS)
        options.protocols, options.restarts = list(PROTOCOLS[:1]), 0
        options.price_rounds = 3
    return options


def main() -> int:
    options = parse_arguments()
    deadline_s = time.monotonic() + 60.0 * options.minutes
    made_by = header(["python", *sys.argv], options.commit)
    largest = max(options.batch_sizes)
    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", min(max(largest, 8), 100))
    with tempfile.TemporaryDirectory(prefix="dspark-tp-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        # Room for the longest prompt and the longest output, and a power of two of requests.
        seqs, length = max(largest, 8), 2048 if options.tokens > 512 else 1024
        servers = tp_servers.from_arguments(options, folder, seqs, length)
        soak = Soak(
            servers,
            prompts,
            options.tokens,
            options.batch_sizes,
            options.protocols,
            options.workloads,
            options.consensus,
        )
        prices: dict[str, Any] = {}
        for name in options.protocols:
            with servers.plugin(soak.options(name), alternate=WINDOW_STEPS) as served:
                if not soak.reference:
                    # Syncing twice changes no value, and a server more takes minutes on a GPU.
                    write_reference(soak, served[0])
                prices[name] = price(*served, prompts, 48, largest, options.price_rounds)
        print(json.dumps(prices), flush=True)
        cells = soak.cells(options.restarts)
        rows: list[dict[str, Any]] = []
        for new in run_matrix(soak, cells, deadline_s):
            rows += new
            # After every server, so that an interrupted soak leaves what it found.
            document = summary(made_by, soak, rows, prices, len(cells))
            if options.out is not None:
                save(document, options.out)
    print(json.dumps({key: document[key] for key in ("runs", *FAILURES, "sync_share")}))
    return 1 if any(document[name] for name in FAILURES) else 0


def summary(
    made_by: dict[str, Any],
    soak: Soak,
    rows: list[dict[str, Any]],
    prices: dict[str, Any],
    planned: int,
) -> dict[str, Any]:
    """The result file for the runs so far."""
    return {
        **made_by,
        "tp": soak.servers.world,
        "devices": "gpu" if soak.servers.on_gpu else "cpu",
        "runs": len(rows),
        "planned_runs": planned,
        **{name: sum(row[name] for row in rows) for name in FAILURES},
        "steps_compared": sum(row.get("steps", 0) for row in rows),
        "drift": soak.fault,
        "consensus_interval": soak.consensus,
        "sync_share": {name: found["sync_share"] for name, found in prices.items()},
        "sync_price": prices,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
