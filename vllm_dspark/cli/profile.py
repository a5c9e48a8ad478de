# SPDX-License-Identifier: Apache-2.0
"""`vllm-dspark profile`: what a step costs here, saved as a table for `dspark.cost_table`.

Without a recording it starts servers of its own, one per pinned share of the drafts: with one share
alone tokens and requests would grow together, and nothing could tell their costs apart. Where the
engine has profiled its CUDA graphs at start-up, its own table is taken, since it is measured
without host work in between; elsewhere the recorded step times are fitted.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dspark.cli import CommandError
from vllm_dspark.cli.charts import Chart
from vllm_dspark.cli.costs import (
    StepTimes,
    fit_times,
    predict_ms,
    recorded_cost,
    recorded_fingerprint,
    step_times,
)
from vllm_dspark.cli.demo import speculative_config
from vllm_dspark.cli.outputs import write_text, writing
from vllm_dspark.cli.recorded import (
    Recording,
    add_input_arguments,
    from_files,
    positive,
    read_recording,
    server_directory,
)
from vllm_dspark.cli.server import READY_LIMIT_S, Server, ServerOptions
from vllm_dspark.cli.traffic import Client, read_prompts
from vllm_dspark.core.cost_io import Fingerprint, save_cost
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.tiers import ExecMode
from vllm_dspark.cpu.host import gpu_present
from vllm_dspark.records import request_records

SERVED_NAME = "profiled"
RECORDS = 20_000
SHARES = (1.0, 0.35)
"""Shares of the drafts that are verified, one server each, where step times are fitted."""
_WAVES = 2
"""Requests of a level over its concurrency."""


@dataclass(frozen=True)
class Profile:
    """A cost model, the steps it is judged on, and where it comes from."""

    cost: CostModel
    fingerprint: Fingerprint
    times: StepTimes
    origin: str

    @property
    def error(self) -> float:
        """Median relative error of the predicted step times; NaN without a measured step."""
        if not len(self.times):
            return float("nan")
        gap = np.abs(predict_ms(self.cost, self.times) - self.times.ms)
        return float(np.median(gap / self.times.ms))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, traces=False)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="cost table to write (JSON)"
    )
    parser.add_argument("--plot", type=Path, metavar="PATH.svg", help="plot of steps and table")
    parser.add_argument(
        "--source",
        choices=("auto", "engine", "steps"),
        default="auto",
        help="the engine's start-up profile, or a fit to recorded steps (default: the profile "
        "where the engine replays CUDA graphs and has one)",
    )
    own = parser.add_argument_group("profiling with servers of its own (no FILE)")
    own.add_argument("--model", help="target checkpoint or name")
    own.add_argument("--draft", help="drafter checkpoint or name")
    own.add_argument(
        "--gamma", type=positive, metavar="N", help="drafts per block (default: the drafter's)"
    )
    own.add_argument(
        "--requests",
        type=_counts,
        default=(1, 2, 4, 8),
        metavar="N,N,...",
        help="numbers of concurrent requests to measure (default: 1,2,4,8)",
    )
    own.add_argument("--tokens", type=positive, default=48, help="tokens per request")
    own.add_argument("--prompt-file", type=Path, help='JSON lines with "prompt"')
    own.add_argument("--max-model-len", type=positive, default=1024)
    own.add_argument("--ready-limit-s", type=float, default=READY_LIMIT_S)
    own.add_argument(
        "--server-arguments",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="further arguments of `vllm serve`, in one string",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code; what cannot be profiled is a `CommandError`."""
    if args.model is None and args.draft is None:
        recordings = [read_recording(args)]
    elif args.model is None or args.draft is None or args.inputs or args.from_server is not None:
        args.usage_error("give --model and --draft, or record files, or --from-server")
    else:
        recordings = list(_own_servers(args))
    profile = make_profile(recordings, args.source)
    print(describe(profile))
    if args.plot is not None:
        write_text(args.plot, chart(profile).svg())
        print(f"plot written to {args.plot}")
    with writing(args.out):
        save_cost(profile.cost, profile.fingerprint, args.out)
    print(f"cost table written to {args.out}")
    print(f'use it with --additional-config \'{{"dspark": {{"cost_table": "{args.out}"}}}}\'')
    return 0


def make_profile(recordings: list[Recording], source: str) -> Profile:
    """Cost model of recordings of one deployment.

    Raises:
        CommandError: no fingerprint, different ones, or too little to fit.
    """
    first = recordings[0]
    fingerprint = recorded_fingerprint(first.meta)
    if fingerprint is None:
        raise CommandError(
            f"{first.source}: its header has no fingerprint, so nobody could tell later which "
            "deployment the table is of; record again with this version of the plugin"
        )
    for other in recordings[1:]:
        if recorded_fingerprint(other.meta) != fingerprint:
            raise CommandError(f"{other.source}: records of another deployment")
    times = step_times([record for r in recordings for record in r.records])
    engines = recorded_cost(first.meta)
    if source == "engine" and engines is None:
        raise CommandError(f"{first.source}: the engine had no cost model; use --source steps")
    if engines is not None and (
        source == "engine" or (source == "auto" and fingerprint.graph_ladder)
    ):
        return Profile(engines, fingerprint, times, "the engine's own profile")
    cost = fit_times(times, fingerprint.gamma)
    return Profile(cost, fingerprint, times, f"a fit to {len(times)} recorded steps")


# -- servers of its own ------------------------------------------------------------------------


def _own_servers(args: argparse.Namespace) -> Iterator[Recording]:
    on_gpu = gpu_present()
    most = max(args.requests)
    prompts = (
        read_prompts(args.prompt_file, _WAVES * most)
        if args.prompt_file is not None
        else [f"def function_{i}(values, index={i}):\n" for i in range(_WAVES * most)]
    )
    # Graphs are profiled by the engine; a pin would only hide its choice from the records.
    shares = (None,) if on_gpu and args.source != "steps" else SHARES
    for number, share in enumerate(shares, 1):
        what = "start-up profile" if share is None else f"{share:.0%} of the drafts verified"
        print(f"{number}/{len(shares)}  server: {what}")
        with tempfile.TemporaryDirectory(prefix="vllm-dspark-profile-") as folder:
            options = ServerOptions(
                args.model,
                SERVED_NAME,
                speculative=_speculative(args),
                dspark=_options(share),
                max_model_len=args.max_model_len,
                max_num_seqs=most,
                extra=args.server_arguments,
            )
            with Server(options, Path(folder) / "server.log", on_gpu) as server:
                yield _measure(server, args, prompts)


def _options(share: float | None) -> dict[str, Any]:
    fixed = {"strict": True, "records": RECORDS, "cost_correction": False, "calibration": "off"}
    return fixed if share is None else {**fixed, "verify": "compact", "budget_pin": share}


def _speculative(args: argparse.Namespace) -> dict[str, Any]:
    if args.gamma is not None:
        return {"method": "dspark", "model": args.draft, "num_speculative_tokens": args.gamma}
    if not (Path(args.draft) / "config.json").is_file():
        raise CommandError(
            f"--draft {args.draft}: no folder with a config.json, so give its block size: --gamma"
        )
    return speculative_config(Path(args.draft))


def _measure(server: Server, args: argparse.Namespace, prompts: list[str]) -> Recording:
    from tqdm import tqdm

    server.show_start(args.ready_limit_s)
    client = Client(server.url, SERVED_NAME)
    with server.requests():
        client.completion()
        for level in tqdm(args.requests, desc="     requests side by side", disable=None):
            client.greedy_all(prompts[: _WAVES * level], args.tokens, level)
        try:
            paths = request_records(server_directory(server.pid))
        except TimeoutError as error:
            raise CommandError(server.with_log(str(error))) from None
    return from_files([Path(path) for path in paths])


# -- output ------------------------------------------------------------------------------------


def describe(profile: Profile) -> str:
    """The table for people: where it comes from, its curves and terms, how well it fits."""
    cost, fingerprint = profile.cost, profile.fingerprint
    lines = [
        f"{fingerprint.model} on {fingerprint.gpu}, tp={fingerprint.tp}, "
        f"gamma={fingerprint.gamma}, {fingerprint.dtype}: {profile.origin}"
    ]
    for mode, curve in cost.verify.items():
        points = _some(list(zip(curve.sizes.tolist(), curve.ms.tolist(), strict=True)))
        lines.append(
            f"  verify ({mode}): " + ", ".join(f"{n} tokens {ms:.3f} ms" for n, ms in points)
        )
    for width, curve in sorted(cost.draft_widths.items()):
        points = _some(list(zip(curve.sizes.tolist(), curve.ms.tolist(), strict=True)))
        lines.append(
            f"  draft ({width} slots): "
            + ", ".join(f"{n} requests {ms:.3f} ms" for n, ms in points)
        )
    lines.append(
        f"  per request {cost.request_ms * 1e3:.2f} us, "
        f"per logit row {cost.logit_row_ms * 1e3:.2f} us"
    )
    if len(profile.times):
        lines.append(f"  median error on {len(profile.times)} measured steps: {profile.error:.1%}")
    return "\n".join(lines)


def _some(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most eight of the points, ends included."""
    if len(points) <= 8:
        return points
    return [points[round(i * (len(points) - 1) / 7)] for i in range(8)]


def chart(profile: Profile) -> Chart:
    """Measured steps, and what the table says for the same tokens at two numbers of requests."""
    times, cost = profile.times, profile.cost
    plot = Chart("Step time", "tokens that run", "ms", width=640, height=360)
    if len(times):
        usual = times.ms <= 3.0 * float(np.median(times.ms))
        plot.dots(times.tokens[usual], times.ms[usual], "measured", 0.35)
    largest = int(times.tokens.max()) if len(times) else 256
    tokens = np.arange(1, largest + 1)
    mode = ExecMode.FULL if profile.fingerprint.graph_ladder else ExecMode.EAGER
    shown = sorted({1, int(times.requests.max())}) if len(times) else [1]
    for requests in shown:
        ms = cost.step_ms(tokens, requests, logit_rows=tokens, mode=mode) + cost.draft_ms(requests)
        plot.line(tokens, ms, f"table, {requests} requests" if requests > 1 else "table, 1 request")
    return plot


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part) for part in text.split(",")}))
