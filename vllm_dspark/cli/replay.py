# SPDX-License-Identifier: Apache-2.0
"""`vllm-dspark replay`: recorded blocks under other policies and cost tables.

Predicts accept length (from what the target did with the recorded blocks) and throughput (from a
cost table, or else from the recorded step times). Blocks that were trimmed when they were recorded
hide what lay behind; the table says how many of those a policy looked into.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.cli import CommandError
from vllm_dspark.cli.costs import (
    Table,
    fit_times,
    read_table,
    recorded_cost,
    recorded_fingerprint,
    step_times,
)
from vllm_dspark.cli.outputs import write_text
from vllm_dspark.cli.recorded import Recording, add_input_arguments, positive, read_recording
from vllm_dspark.core.calibration import CalibrationTable
from vllm_dspark.core.calibration_io import load_calibration
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.policy import PolicyConfig, SearchMode
from vllm_dspark.core.replay import ReplayResult, replay
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.core.trace import Trace

_AMOUNTS = ("pin", "cap", "floor")
_NUMBERS = ("min_gain", "hysteresis", "step_bound_ms")
DEFAULT_POLICIES = (
    "search=static",
    "search=ragged",
    "search=uniform",
    "pin=0.75",
    "pin=0.5",
    "pin=0.25",
    "pin=0",
)


@dataclass(frozen=True)
class Outcome:
    """What a replay says about one policy with one table."""

    policy: str
    table: str
    result: ReplayResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    parser.add_argument(
        "--policy",
        action="append",
        type=policy,
        metavar="KEY=VALUE,...",
        help="policy to try, may be repeated: search=ragged|uniform|static, pin, cap, floor (an "
        "integer counts drafts, 0.5 is a fraction), min_gain, hysteresis, step_bound_ms "
        f"(default: {'; '.join(DEFAULT_POLICIES)})",
    )
    parser.add_argument(
        "--cost-table",
        action="append",
        type=Path,
        metavar="PATH",
        help="cost table to predict times with, may be repeated (default: the one in the records, "
        "or a fit to their step times)",
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="PATH", help="calibration file to plan with"
    )
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="requests decoded side by side (default: as in the records, 8 for a trace)",
    )
    parser.add_argument(
        "--context", type=positive, default=0, metavar="TOKENS", help="KV tokens of every request"
    )
    parser.add_argument(
        "--lagged",
        action="store_true",
        help="spend the budget by the confidences of the block before, as lens=host does on a GPU "
        "(default: by the live block)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table to this file")


def run(args: argparse.Namespace) -> int:
    """Exit code; an input that cannot be replayed is a `CommandError`."""
    recording = read_recording(args)
    gamma = recording.gamma
    tables = _tables(args.cost_table, recording)
    calibration = None if args.calibration is None else _calibration(args.calibration, gamma)
    policies = args.policy or [policy(text) for text in DEFAULT_POLICIES]
    requests = args.requests or min(recording.typical_requests, len(recording.blocks))
    outcomes = replay_all(
        recording.blocks.trace(),
        policies,
        tables,
        requests=requests,
        calibration=calibration,
        context=args.context,
        live=not args.lagged,
    )
    print(_head(recording, requests))
    print(_table_text(outcomes))
    if args.json is not None:
        record = _record(recording, requests, outcomes)
        write_text(args.json, json.dumps(record, indent=1) + "\n")
        print(f"written to {args.json}")
    return 0


def replay_all(
    trace: Trace,
    policies: Sequence[tuple[str, PolicyConfig]],
    tables: Sequence[Table],
    *,
    requests: int,
    calibration: CalibrationTable | None = None,
    context: int = 0,
    live: bool = True,
) -> list[Outcome]:
    """Every policy with every table.

    Raises:
        CommandError: the trace is too short for so many requests.
    """
    from tqdm import tqdm

    work = [(text, config, table) for table in tables for text, config in policies]
    outcomes = []
    for text, config, table in tqdm(work, desc="replaying", leave=False, disable=None):
        planner = Planner(
            config, trace.gamma, {ExecMode.FULL: table.ladder}, table.cost, calibration
        )
        try:
            result = replay(trace, planner, requests, context, live_membership=live)
        except ValueError as error:
            raise CommandError(f"--requests {requests}: {error}") from None
        outcomes.append(Outcome(text, table.name, result))
    return outcomes


def policy(text: str) -> tuple[str, PolicyConfig]:
    """`pin=0.5` or `search=uniform,cap=0.75` as options of the planner.

    Raises:
        argparse.ArgumentTypeError: an unknown key, or a value that is not allowed.
    """
    given: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not equals or key not in ("search", *_AMOUNTS, *_NUMBERS):
            allowed = ", ".join(("search", *_AMOUNTS, *_NUMBERS))
            raise argparse.ArgumentTypeError(
                f"{pair!r}: expected key=value with a key of {allowed}"
            )
        given[key] = _value(key, value)
    try:
        return text, PolicyConfig(**given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _value(key: str, text: str) -> SearchMode | int | float:
    try:
        if key == "search":
            return SearchMode(text)
        return int(text) if key in _AMOUNTS and text.isdigit() else float(text)
    except ValueError:
        allowed = ", ".join(SearchMode) if key == "search" else "a number"
        raise argparse.ArgumentTypeError(f"{key}={text!r}: allowed: {allowed}") from None


def _tables(paths: Sequence[Path] | None, recording: Recording) -> list[Table]:
    fingerprint = recorded_fingerprint(recording.meta)
    if paths:
        return [read_table(path, fingerprint) for path in paths]
    return [default_table(recording)]


def default_table(recording: Recording) -> Table:
    """The server's own cost model if it profiled graphs, else a fit to its step times, else none.

    Without graphs the server fits a line of its own; the fit here also tells requests apart.
    """
    fingerprint = recorded_fingerprint(recording.meta)
    own = recorded_cost(recording.meta)
    if own is not None and fingerprint is not None and fingerprint.graph_ladder:
        return Table.of("the server's", own, fingerprint)
    try:
        fitted = fit_times(step_times(recording.records), recording.gamma)
    except CommandError:
        return Table.of("none" if own is None else "the server's", own, fingerprint)
    return Table.of("recorded times", fitted, fingerprint)


def _calibration(path: Path, gamma: int) -> CalibrationTable:
    try:
        return load_calibration(path, gamma)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(str(error)) from None


# -- output ------------------------------------------------------------------------------------


def _head(recording: Recording, requests: int) -> str:
    blocks = recording.blocks
    return (
        f"{recording.source}: {len(blocks)} blocks, accept length {blocks.accept_len:.3f} with "
        f"{blocks.verified.mean():.2f} of {blocks.scheduled.mean():.2f} drafts verified; replayed "
        f"as {requests} requests"
    )


def _table_text(outcomes: Sequence[Outcome]) -> str:
    base = {o.table: o.result for o in reversed(outcomes)}
    width = max(len("policy"), *(len(o.policy) for o in outcomes))
    wide = max(len("cost table"), *(len(o.table) for o in outcomes))
    lines = [
        f"{'policy':<{width}}  {'cost table':<{wide}}  accept len  drafts/req  step ms   tokens/s"
        f"  vs first  trimmed steps  looked past"
    ]
    for o in outcomes:
        r = o.result
        gain = r.gain_over(base[o.table])
        speed = f"{r.step_ms:7.2f}  {r.tokens_per_s:9.1f}  {gain:+8.1%}"
        if r.step_ms != r.step_ms:
            speed = f"{'-':>7}  {'-':>9}  {'-':>8}"
        lines.append(
            f"{o.policy:<{width}}  {o.table:<{wide}}  {r.accept_length:10.3f}  "
            f"{r.drafts_per_request:10.2f}  {speed}  {r.trimmed_steps / r.steps:13.0%}  "
            f"{r.censored / (r.steps * r.requests):11.0%}"
        )
    if any(o.table == "none" for o in outcomes):
        lines.append("no times: neither a cost table nor step times; search policies verify all")
    return "\n".join(lines)


def _record(recording: Recording, requests: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    def finite(values: dict[str, Any]) -> dict[str, Any]:
        return {name: None if value != value else value for name, value in values.items()}

    return {
        "source": recording.source,
        "model": recording.meta.get("model"),
        "blocks": len(recording.blocks),
        "recorded_accept_len": recording.blocks.accept_len,
        "requests": requests,
        "policies": [
            {"policy": o.policy, "cost_table": o.table, **finite(asdict(o.result))}
            for o in outcomes
        ],
    }
