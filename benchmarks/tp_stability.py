# SPDX-License-Identifier: Apache-2.0
"""Soak of a tensor-parallel group that is disturbed all the time, and the price of its agreement.

    python benchmarks/tp_stability.py            # the whole matrix
    python benchmarks/tp_stability.py --short    # a few runs, for CI

A run is one workload at one batch size on a real server with two CPU ranks over gloo. The matrix is
{overlap, no overlap} x {one server for all runs, a server per run} x protocol x batch size x
workload. Rank 1's confidences are multiplied by 1 + DRIFT * noise in every step of every run. A run
fails by

* `divergences`: steps in which the ranks did not take the same decision, seen in traces that both
  ranks write for themselves,
* `hangs` and `errors`: requests that do not come back, or come back with an error,
* `truncated`: answers with fewer tokens than asked for,
* `wrong`: greedy answers whose tokens differ from those of an undisturbed server, near ties left
  out.

The price is measured apart, without drift: on one server the sync is on for 16 steps, off for 16
and so on, and the medians of the two kinds of steps are compared (`step_ratio`). `sync_share` is
the part of the step that rank 0's host spends in the sync while it is on; it includes waiting for
the other rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

import engine_faults  # noqa: E402
from engine_group import WORLD, Disturbed, server  # noqa: E402
from planner import provenance  # noqa: E402
from tp_workloads import WORKLOADS, Answer, Request, send  # noqa: E402

from vllm_dspark.cli import demo  # noqa: E402
from vllm_dspark.cli.server import Server, ServerError  # noqa: E402
from vllm_dspark.cli.traffic import Client, Greedy, read_prompts  # noqa: E402
from vllm_dspark.metrics_snapshot import (  # noqa: E402
    PREFIX,
    Snapshot,
    by_label,
    parse_exposition,
    total,
)

DRIFT = 1e-3
PROTOCOLS = ("inputs", "outputs")
BATCH_SIZES = (1, 4, 8)
READY_S = 300.0
WINDOW_STEPS = 16
PRICE_REQUESTS = 96
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

    folder: Path
    prompts: list[str]
    reference: dict[str, list[Answer]]
    servers: int = 0

    @contextmanager
    def serve(self, dspark: dict[str, Any], overlap: bool, alternate: int = 0) -> Iterator[Any]:
        """A ready server and its group."""
        self.servers += 1
        folder = self.folder / f"server{self.servers}"
        folder.mkdir()
        disturbed = Disturbed(folder)
        log = folder / "server.log"
        with server(disturbed, dspark, overlap=overlap, log=log, alternate=alternate) as running:
            running.wait_ready(READY_S)
            yield running, disturbed

    def requests(self, cell: Cell) -> list[Request]:
        """The workload's first requests: enough to fill the batch, and four at least."""
        return WORKLOADS[cell.workload](self.prompts)[: max(cell.batch_size, 4)]


def options(protocol: str) -> dict[str, Any]:
    """Trimmed wherever it gains anything: the most decisions to disagree on."""
    return {"strict": True, "verify": "compact", "tp_sync": protocol, "min_gain": 0.0}


def cells(short: bool) -> list[Cell]:
    """The runs, those on one server first.

    A server per run is what takes the time, so there each workload is run once per kind of
    scheduling, with batch sizes and protocols in turn.
    """
    protocols, batches = (PROTOCOLS[:1], (4,)) if short else (PROTOCOLS, BATCH_SIZES)
    names = ("uneven", "sampled") if short else tuple(WORKLOADS)
    same_server = [
        Cell(protocol, overlap, False, batch, name)
        for overlap in (True, False)
        for protocol in protocols
        for batch in batches
        for name in names
    ]
    restarted = [
        Cell(PROTOCOLS[i % 2], overlap, True, BATCH_SIZES[i % 3], name)
        for overlap in (True, False)
        for i, name in enumerate(names[:1] if short else names)
    ]
    return same_server + restarted


def run_cell(soak: Soak, cell: Cell, running: Server, disturbed: Disturbed) -> dict[str, Any]:
    """One workload, counted."""
    start_step, begin = disturbed.last_step() + 1, time.monotonic()
    answers = send(running.url, demo.SERVED_NAME, soak.requests(cell), cell.batch_size)
    seconds = time.monotonic() - begin
    outcomes = Counter(answer.outcome for answer in answers)
    different, compared = disturbed.divergences(since=start_step)
    row = {
        **asdict(cell),
        "seconds": round(seconds, 2),
        "steps": compared,
        "divergences": different,
        "hangs": outcomes["hang"],
        "errors": outcomes["error"],
        "truncated": outcomes["truncated"],
        "wrong": count_wrong(soak, cell, running, answers) if compared else 0,
    }
    if not compared and not outcomes["error"]:
        raise RuntimeError(f"{cell}: the ranks left no traces")
    return row


def count_wrong(soak: Soak, cell: Cell, running: Server, answers: Sequence[Answer]) -> int:
    """Greedy answers that are not the undisturbed server's, near ties left out."""
    pairs = [
        (
            Greedy(list(a.prompt_ids), list(a.token_ids)),
            Greedy(list(b.prompt_ids), list(b.token_ids)),
        )
        for request, a, b in zip(
            soak.requests(cell), soak.reference[cell.workload], answers, strict=False
        )
        if request.temperature == 0 and b.outcome == "ok"
    ]
    if not pairs:
        return 0
    client = Client(running.url, demo.SERVED_NAME)
    expected, got = zip(*pairs, strict=True)
    return sum(not difference.near_tie for difference in client.differences(expected, got))


def run_matrix(soak: Soak, short: bool) -> Iterator[list[dict[str, Any]]]:
    """Rows of each server's runs, one server after the other."""
    for same, group in groupby(cells(short), key=_server_of):
        for one_server in [[cell] for cell in group] if same[0] else [list(group)]:
            yield run_server(soak, one_server)


def _server_of(cell: Cell) -> tuple[bool, bool, str]:
    return cell.restart, cell.overlap, cell.protocol


def run_server(soak: Soak, group: Sequence[Cell]) -> list[dict[str, Any]]:
    """Runs on one server; if it ends, that is an error of every run that it still had to do."""
    rows: list[dict[str, Any]] = []
    try:
        with soak.serve(options(group[0].protocol), group[0].overlap) as (running, disturbed):
            disturbed.set_fault({"kind": "perturb", "rank": 1, "size": DRIFT})
            for cell in group:
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


def write_reference(soak: Soak) -> None:
    """Answers of a server that nobody disturbs."""
    with soak.serve(options("inputs"), overlap=True) as (running, _):
        for name, workload in WORKLOADS.items():
            answers = send(running.url, demo.SERVED_NAME, workload(soak.prompts), 4)
            soak.reference[name] = answers


def price(soak: Soak, protocol: str, short: bool) -> dict[str, Any]:
    """Step times with the sync on and off, in turn, on one server without drift."""
    count = PRICE_REQUESTS // (4 if short else 1)
    requests = [Request(soak.prompts[i % len(soak.prompts)], 48) for i in range(count)]
    with soak.serve(options(protocol), overlap=True, alternate=WINDOW_STEPS) as served:
        running, disturbed = served
        send(running.url, demo.SERVED_NAME, requests[:8], 8)
        before = sync_totals(parse_exposition(running.metrics_text()))
        start = disturbed.last_step() + 1
        answers = send(running.url, demo.SERVED_NAME, requests, 8)
        failed = [answer for answer in answers if answer.outcome != "ok"]
        if failed:
            raise RuntimeError(running.with_log(f"{protocol}: {failed[0]}"))
        time.sleep(1.5)
        counters = parse_exposition(running.metrics_text())
        after, drifted = sync_totals(counters), disagreements(counters)
        steps = [step for step in disturbed.steps()[0].values() if step["step"] >= start]
    full = max(step["requests"] for step in steps)
    times: dict[bool, list[float]] = {True: [], False: []}
    for one, other in zip(steps, steps[1:], strict=False):
        on = engine_faults.synced(one["step"], WINDOW_STEPS)
        inside = engine_faults.synced(other["step"], WINDOW_STEPS) == on
        if inside and other["step"] == one["step"] + 1 and one["requests"] == full:
            times[on].append((other["at_s"] - one["at_s"]) * 1e3)
    on_ms, off_ms = median(times[True]), median(times[False])
    synced_steps = sum(engine_faults.synced(step["step"], WINDOW_STEPS) for step in steps)
    sync_ms = [(after[r][0] - before[r][0]) * 1e3 / synced_steps for r in range(WORLD)]
    return {
        "requests_per_step": full,
        "steps_on": len(times[True]),
        "steps_off": len(times[False]),
        "step_on_ms": round(on_ms, 3),
        "step_off_ms": round(off_ms, 3),
        "step_ratio": round(on_ms / off_ms, 4),
        "values_that_drifted": drifted,
        "messages_per_step": round((after[0][1] - before[0][1]) / synced_steps, 3),
        "sync_ms_by_rank": [round(value, 3) for value in sync_ms],
        "sync_share": round(sync_ms[0] / on_ms, 4),
    }


def sync_totals(metrics: Snapshot) -> dict[int, tuple[float, float]]:
    """Seconds in the sync and messages, by rank."""
    seconds, messages = (
        by_label(metrics, f"{PREFIX}sync_{unit}_total", "rank") for unit in ("seconds", "messages")
    )
    ranks = {rank: str(rank) for rank in range(WORLD)}
    return {r: (seconds.get(name, 0.0), messages.get(name, 0.0)) for r, name in ranks.items()}


def disagreements(metrics: Snapshot) -> int:
    """Values of a rank that were not rank 0's and were replaced."""
    return int(total(metrics, PREFIX + "rank_disagreements_total"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few runs instead of all")
    parser.add_argument("--out", type=Path, help="JSON file; none is written without it")
    parser.add_argument("--logs", type=Path, help="new folder for logs and traces that stays")
    arguments = parser.parse_args()
    started = provenance()
    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", 8)
    with tempfile.TemporaryDirectory(prefix="dspark-tp-") as temporary:
        folder = arguments.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, prompts, {})
        write_reference(soak)
        prices = {name: price(soak, name, arguments.short) for name in PROTOCOLS}
        print(json.dumps(prices), flush=True)
        rows: list[dict[str, Any]] = []
        for new in run_matrix(soak, arguments.short):
            rows += new
            # After every server, so that an interrupted soak leaves what it found.
            document = summary(started, rows, prices, len(cells(arguments.short)))
            if arguments.out is not None:
                text = json.dumps(document, indent=1) + "\n"
                arguments.out.write_text(text, encoding="utf-8")
    print(json.dumps({key: document[key] for key in ("runs", *FAILURES, "sync_share")}))
    return 1 if any(document[name] for name in FAILURES) else 0


def summary(
    started: dict[str, Any], rows: list[dict[str, Any]], prices: dict[str, Any], planned: int
) -> dict[str, Any]:
    """The result file for the runs so far."""
    return {
        **started,
        "runs": len(rows),
        "planned_runs": planned,
        **{name: sum(row[name] for row in rows) for name in FAILURES},
        "steps_compared": sum(row.get("steps", 0) for row in rows),
        "drift": DRIFT,
        "sync_share": {name: found["sync_share"] for name, found in prices.items()},
        "sync_price": prices,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
