# SPDX-License-Identifier: Apache-2.0
"""`vllm-dspark report`: one page that says whether speculation helps and what limits it.

Counters come from a server's metrics where they are given, else they are counted from the records.
What metrics do not hold (the budget of every step, times over tokens, other policies) comes from
records and is left out without them. The page is one file: nothing is loaded from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_dspark import metrics_export
from vllm_dspark.alarms import Alarms, Thresholds
from vllm_dspark.cli import CommandError
from vllm_dspark.cli import report_page as page
from vllm_dspark.cli import report_views as views
from vllm_dspark.cli.outputs import write_text
from vllm_dspark.cli.record_metrics import snapshot_of
from vllm_dspark.cli.recorded import Recording, add_input_arguments, read_recording
from vllm_dspark.cli.replay import default_table, policy, replay_all
from vllm_dspark.core.replay import ReplayResult
from vllm_dspark.metrics_snapshot import Snapshot, parse_exposition

FETCH_LIMIT_S = 10.0
REPLAYED = {"verify everything": "search=static", "verify nothing": "pin=0"}


@dataclass(frozen=True)
class Comparison:
    """What was recorded beside what other policies would make of the same blocks.

    All rates are tokens per second of a batch of `requests`, by the same step costs.
    """

    requests: int
    recorded_rate: float
    measured_rate: float
    """As measured, over recorded steps without a prompt; NaN without one."""
    others: dict[str, ReplayResult]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, traces=False)
    parser.add_argument(
        "--metrics",
        metavar="URL|FILE",
        help="a server's /metrics (http://host:port or a saved copy); may stand alone",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH.html", help="page to write"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code; an input that cannot be read is a `CommandError`."""
    given = None if args.metrics is None else read_metrics(args.metrics)
    recording = None
    if args.inputs or args.from_server is not None or given is None:
        recording = read_recording(args)
    html = build(recording, given)
    write_text(args.out, html)
    print(f"report written to {args.out}")
    return 0


def read_metrics(where: str) -> Snapshot:
    """The plugin's series of a server's `/metrics`, or of a saved copy.

    Raises:
        CommandError: it cannot be read, is no Prometheus text, or has no series of the plugin.
    """
    try:
        if where.startswith(("http://", "https://")):
            url = (
                where if where.rstrip("/").endswith("/metrics") else where.rstrip("/") + "/metrics"
            )
            with urllib.request.urlopen(url, timeout=FETCH_LIMIT_S) as answer:
                text = answer.read().decode()
        else:
            text = Path(where).read_text(encoding="utf-8")
        snapshot = parse_exposition(text)
    except urllib.error.URLError as error:
        raise CommandError(f"--metrics {where}: {error.reason}") from None
    except OSError as error:
        raise CommandError(f"--metrics {where}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"--metrics {where}: {error}") from None
    if not snapshot:
        raise CommandError(
            f"--metrics {where}: no vllm:dspark_* series; is the plugin active "
            "(`vllm-dspark doctor`) and dspark.metrics on?"
        )
    return snapshot


def build(recording: Recording | None, metrics: Snapshot | None) -> str:
    """The page of a recording, of metrics, or of both."""
    if metrics is None and recording is not None and recording.directory is not None:
        with contextlib.suppress(FileNotFoundError):
            metrics = metrics_export.read_snapshot(recording.directory) or None
    counted = metrics
    if counted is None:
        assert recording is not None
        counted = snapshot_of(recording.records, recording.gamma)
    comparison = None if recording is None else compare(recording)
    # Metrics may have counted more than the records hold, so rows of blocks fit records alone.
    found = views.positions(
        counted, recording.blocks if recording is not None and metrics is None else None
    )
    parts = [
        page.summary(counted, recording, comparison),
        page.alarms(
            Alarms().check(counted), views.Totals.of(counted).steps, Thresholds().min_steps
        ),
        page.limits(counted),
        page.charts(counted, found, [] if recording is None else recording.records),
        page.position_table(found),
    ]
    if metrics is not None:
        parts.insert(3, page.ranks(metrics))
    return page.document(_subtitle(recording, metrics), parts)


def compare(recording: Recording) -> Comparison | None:
    """Other policies on the recorded blocks; None without usable step times."""
    table = default_table(recording)
    if table.cost is None or not recording.records:
        return None
    blocks = recording.blocks
    requests = min(recording.typical_requests, len(blocks))
    policies = [policy(text) for text in REPLAYED.values()]
    outcomes = replay_all(blocks.trace(), policies, [table], requests=requests)
    runs = blocks.scheduled if recording.untrimmed else blocks.verified
    tokens = requests + round(requests * float(runs.mean()))
    padded = np.array([table.ladder.pad_one(tokens, requests)])
    step_ms = float(table.cost.step_ms(padded, requests, logit_rows=tokens)[0])
    step_ms += table.cost.draft_ms(requests)
    return Comparison(
        requests=requests,
        recorded_rate=1e3 * requests * blocks.accept_len / step_ms,
        measured_rate=_measured_rate(recording),
        others={name: o.result for name, o in zip(REPLAYED, outcomes, strict=True)},
    )


def _measured_rate(recording: Recording) -> float:
    timed = [
        (float(r.accepted.sum()) + r.num_sampling, r.measured_ms)
        for r in recording.records
        if r.base_tokens == r.num_reqs and r.accepted is not None and r.measured_ms is not None
    ]
    if not timed:
        return float("nan")
    tokens, ms = np.array(timed).sum(axis=0)
    return 1e3 * float(tokens) / float(ms)


def _subtitle(recording: Recording | None, metrics: Snapshot | None) -> str:
    parts = []
    if recording is not None:
        meta = recording.meta
        model, draft = (Path(str(meta.get(name, "?"))).name for name in ("model", "draft_model"))
        parts.append(f"{model} with {draft}, {recording.gamma} drafts per block")
        parts.append(f"{len(recording.records)} recorded steps ({recording.source})")
    if metrics is not None:
        parts.append("counters of the server since it started")
    parts.append(time.strftime("%Y-%m-%d %H:%M"))
    return " · ".join(parts)
