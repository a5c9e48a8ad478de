# SPDX-License-Identifier: Apache-2.0
"""Serving throughput and latency of DSpark settings in a steady state, side by side on one machine.

    python benchmarks/serving.py --shape 8b --systems none fixed3 fixed7 adaptive plugin \
        -o benchmarks/results/h200_a.json
    python benchmarks/serving.py --merge a.json b.json -o benchmarks/results/h200_serving.json
    python benchmarks/serving.py --table c.json        python benchmarks/serving.py --plot c.json
    python benchmarks/serving.py --profile 1 32 256 --systems plugin -o profile.json

`serving_load` says what is measured, `serving_systems` how systems are written, `serving_children`
how they are kept apart, `serving_phases` what `--phases` does for runs on GPUs side by side, and
`serving_results` what a result file holds. Systems are started in the order of `--systems`,
`--together` of them at a time on one GPU (name their `--kv-cache-gib` then), and take turns at
every concurrency, `--repeats-in-process` times; all of it is repeated `--repeats` times. This
process imports neither vLLM nor torch.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import serving_results
import serving_trace
from serving_children import Child
from serving_engine import Job
from serving_memory import used_gib
from serving_phases import Phase, phase
from serving_systems import (
    CAPTURE_SIZES,
    SHAPES,
    TEMPERATURES,
    EngineOptions,
    System,
    engine_arguments,
    environment,
    parse_system,
    prepare_pair,
    requests_by_concurrency,
)

from vllm_dspark.cli.provenance import header, save

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
# Options that decide what was measured.
RECORDED = (
    *("systems", "shape", "sampling", "concurrency", "requests_per_slot", "requests"),
    *("output_tokens", "warmup_tokens", "longest_prompt", "seed", "repeats", "repeats_in_process"),
    *("capture_sizes", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "kv_cache_gib", "together", "engine", "speculative"),
)

# What a profile says of the same load without a trace.
UNTRACED = ("tok_s", "step_ms", "decode_step_p50_ms", "accept_len", "ttft_p50_ms")


@dataclass
class Start:
    """One start of a system."""

    system: System
    label: str
    child: Child
    log: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def failure(self) -> str:
        """Why it ended early; empty if it did not."""
        return self.child.failure

    @property
    def figures(self) -> dict[str, float]:
        """What only the engine's log tells."""
        return serving_results.log_figures(self.log)

    @property
    def sweeps(self) -> list[dict[str, Any]]:
        """What it has measured."""
        return [event for event in self.child.events if event["event"] == "sweep"]

    def close(self, limit_s: float) -> None:
        """End it and say how it went."""
        self.child.end(limit_s)
        spent, count = time.monotonic() - self.began, len(self.sweeps)
        print(
            f"{self.label}: {spent:.0f} s, {count} results, log {self.log}"
            + (f"; {self.failure}\n{_tail(self.log)}" if self.failure else ""),
            flush=True,
        )


@dataclass
class Group:
    """Systems whose engines are alive together; `opened` has those that were started."""

    systems: list[System]
    sampling: str
    repeat: int
    opened: list[Start] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.merge:
            document = serving_results.merge([serving_results.load(p) for p in options.merge])
            save(document, options.output)
        elif options.table or options.plot:
            document = serving_results.load(options.table or options.plot)
        elif options.profile:
            return _profile(options)
        else:
            return _measure(options)
        if options.plot:
            from serving_plot import plot

            for path in plot(document, options.plot.parent, options.plot.stem):
                print(path)
        else:
            print(serving_results.table(document))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("-o", "--output", type=Path, default=HERE / "results" / "serving.json")
    add("--systems", nargs="+", default=["none", "fixed3", "fixed7", "adaptive", "plugin"])
    add("--shape", choices=SHAPES, default="8b")
    add("--sampling", nargs="+", choices=TEMPERATURES, default=["greedy"])
    add("-c", "--concurrency", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    add("--requests-per-slot", type=int, default=4)
    add(
        "--requests",
        nargs="*",
        default=["1:16", "8:96", "32:192"],
        metavar="C:N",
        help="requests of a measurement where --requests-per-slot gives a short window",
    )
    add("--output-tokens", type=int, default=256)
    add("--warmup-tokens", type=int, default=32)
    add("--longest-prompt", type=int, default=512)
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=1, help="starts of every system")
    add("--repeats-in-process", type=int, default=2, help="sweeps per start")
    add("--together", type=int, default=1, help="engines alive at a time, measured in turn")
    add("--kv-cache-gib", type=float, help="KV cache of an engine, for several on one GPU")
    add("--limit-s", type=float, default=420.0, help="time limit of a start and of an end")
    add("--sweep-limit-s", type=float, default=300.0, help="time limit of one measurement")
    add("--phases", type=Path, metavar="FOLDER", help="shared by all runs on this machine")
    add("--phase-limit-s", type=float, default=900.0, help="time limit of a wait for other runs")
    add("--total-s", type=float, default=float("inf"), help="no new start after this time")
    add(
        "--capture-sizes",
        nargs="*",
        type=int,
        default=list(CAPTURE_SIZES),
        help="without a value: what vLLM captures by itself",
    )
    add("--max-model-len", type=int, default=1024)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--gpu-memory-utilization", type=float, default=0.85)
    add("--engine", default="{}", help="JSON object of further arguments, the same for all")
    add("--speculative", default="{}", help="JSON object of further speculative_config options")
    add("--cpu", action="store_true", help="Triton's interpreter on a CPU, eager")
    add("--demo", type=Path, default=REPOSITORY / "demo", help="folder of the demo pair")
    add("--widen-tool", type=Path, default=HERE / "widen_pair.py")
    add("--work", type=Path, default=Path("build/serving"), help="pairs, caches, events, logs")
    add("--run", default=time.strftime("%Y%m%dT%H%M%S"), help="identity of this run")
    add("--commit", default=None, help="where there is no git")
    add("--profile", nargs="+", type=int, metavar="C", help="trace one system, each C in flight")
    add("--profile-steps", type=int, default=30)
    add("--merge", nargs="+", type=Path, metavar="FILE", help="put result files together")
    add("--table", type=Path, metavar="FILE", help="print a result file")
    add("--plot", type=Path, metavar="FILE", help="draw a result file")
    return parser


def _measure(options: argparse.Namespace) -> int:
    """All starts; the result file is rewritten after each group of them."""
    systems = [parse_system(text) for text in options.systems]
    if len({system.name for system in systems}) < len(systems):
        raise ValueError(f"--systems {options.systems}: expected different names")
    if max(options.concurrency) > options.max_num_seqs:
        raise ValueError(f"-c {max(options.concurrency)}: expected at most --max-num-seqs")
    if options.together < 1:
        raise ValueError(f"--together {options.together}: expected at least 1")
    began = time.monotonic()
    starts: dict[tuple[str, str], list[Start]] = {}
    requests_by_concurrency(options.requests)  # refuses other words before anything is started
    run = _run_record(options)
    failed = False
    for repeat in range(options.repeats):
        for sampling in options.sampling:
            for first in range(0, len(systems), options.together):
                group = Group(systems[first : first + options.together], sampling, repeat)
                if time.monotonic() - began > options.total_s:
                    names = ", ".join(system.name for system in group.systems)
                    print(f"{names}: not started, --total-s {options.total_s:g} is over")
                    failed = True
                    continue
                try:
                    _measure_group(options, group)
                except TimeoutError as error:
                    print(error)
                    failed = True
                finally:
                    for start in group.opened:
                        failed |= bool(start.failure)
                        starts.setdefault((sampling, start.system.name), []).append(start)
                    save(_document(options, run, starts), options.output)
    print(serving_results.table(_document(options, run, starts)))
    return int(failed)


def _measure_group(options: argparse.Namespace, group: Group) -> None:
    """Start, measure and end the engines of a group."""
    try:
        with phase(options.phases, Phase.START, options.phase_limit_s):
            _open_group(options, group)
        with phase(options.phases, Phase.MEASURE, options.phase_limit_s):
            _sweep_all(options, group.opened)
    except (SystemExit, TimeoutError) as error:
        reason = str(error) if isinstance(error, TimeoutError) else "the run was terminated"
        for start in group.opened:
            start.child.failure = start.child.failure or reason
        raise
    finally:
        for start in group.opened:
            start.close(options.limit_s)


def _open_group(options: argparse.Namespace, group: Group) -> None:
    """Start engines that stay idle until all are ready, and put them in the order of the systems;
    those that time steps while they start come last, one after the other, with all others idle.
    """
    opened, sampling = group.opened, group.sampling
    for system in sorted(group.systems, key=lambda system: system.profiles):
        for other in opened if system.profiles else ():
            other.child.wait_ready(options.limit_s)
        opened.append(_open(options, system, sampling, f"{group.repeat}-{sampling}-{system.name}"))
    for start in opened:
        start.child.wait_ready(options.limit_s)
    opened.sort(key=lambda start: group.systems.index(start.system))


def _sweep_all(options: argparse.Namespace, opened: list[Start]) -> None:
    """Measure the concurrencies in turn on every engine, in the opposite order each time."""
    for start in opened:
        start.child.order(options.sweep_limit_s)
    turn = list(opened)
    for sweep in range(options.repeats_in_process):
        for concurrency in options.concurrency:
            for start in turn:
                start.child.order(options.sweep_limit_s, concurrency=concurrency, sweep=sweep)
            turn.reverse()


def _document(
    options: argparse.Namespace, run: dict[str, Any], starts: dict[tuple[str, str], list[Start]]
) -> dict[str, Any]:
    rows = []
    for (sampling, name), same in starts.items():
        labels = {
            "run": options.run,
            "shape": options.shape,
            "sampling": sampling,
            "system": name,
            "plugin": same[0].system.plugin is not None,
        }
        figures = next((start.figures for start in reversed(same) if start.figures), {})
        rows += [
            {**row, **figures}
            for row in serving_results.make_rows(labels, [start.child.events for start in same])
        ]
    failures = [
        f"{sampling} {name}: {start.failure}"
        for (sampling, name), same in starts.items()
        for start in same
        if start.failure
    ]
    return {"runs": [{**run, "failures": failures}], "rows": rows}


def _open(
    options: argparse.Namespace, system: System, sampling: str, label: str, profile_dir: str = ""
) -> Start:
    """Start one child."""
    work = (options.work / options.run).resolve()
    work.mkdir(parents=True, exist_ok=True)
    # An engine that outlived an earlier run of this name must not answer for a new one.
    stem = "".join(c if c.isalnum() or c in ".+-" else "_" for c in label)[:100]
    stem = f"{os.getpid()}-{stem}"
    job_file, events, log = (work / f"{stem}.{kind}" for kind in ("json", "jsonl", "log"))
    _job(options, system, sampling, events, profile_dir).write(job_file)
    child = Child(
        [sys.executable, str(HERE / "serving_engine.py"), str(job_file)],
        environment(system, cpu=options.cpu, cache=options.work.resolve() / "cache"),
        events,
        log,
    )
    return Start(system, label, child, log)


def _job(
    options: argparse.Namespace, system: System, sampling: str, events: Path, profile_dir: str
) -> Job:
    pair = prepare_pair(options.shape, options.demo, options.work, options.widen_tool)
    engine = EngineOptions(
        capture_sizes=tuple(options.capture_sizes),
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_gib=options.kv_cache_gib,
        eager=options.cpu,
        profile_dir=profile_dir,
        profile_steps=options.profile_steps,
        speculative=serving_results.parse_object(options.speculative),
        extra=serving_results.parse_object(options.engine),
    )
    return Job(
        arguments=engine_arguments(system, pair, sampling, engine),
        events=str(events),
        prompts=str((options.demo / "prompts.jsonl").resolve()),
        temperature=TEMPERATURES[sampling],
        concurrencies=tuple(options.profile if profile_dir else options.concurrency),
        requests_per_slot=options.requests_per_slot,
        requests=requests_by_concurrency(options.requests),
        output_tokens=options.output_tokens,
        warmup_tokens=options.warmup_tokens,
        longest_prompt=options.longest_prompt,
        seed=options.seed,
        plugin=system.plugin is not None,
        adaptive="enable_adaptive_verification" in (system.speculative or {}),
    )


def _tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    | {line[:300]}" for line in text[-lines:])


def _profile(options: argparse.Namespace) -> int:
    """Trace one system: parts and kernels of its steps per concurrency, to the result file and in
    text.

    Tracing slows the host, so every concurrency is measured without it before.
    """
    if len(options.systems) != 1:
        raise ValueError(f"--systems {options.systems}: --profile takes one system")
    system, sampling = parse_system(options.systems[0]), options.sampling[0]
    traces = (options.work / options.run / "traces").resolve()
    traces.mkdir(parents=True, exist_ok=True)
    with phase(options.phases, Phase.START, options.phase_limit_s):
        start = _open(options, system, sampling, f"profile-{sampling}-{system.name}", str(traces))
        start.child.wait_ready(options.limit_s)
    try:
        with phase(options.phases, Phase.MEASURE, options.phase_limit_s):
            start.child.order(options.sweep_limit_s)
            for trace in (False, True):
                for concurrency in options.profile:
                    start.child.order(options.sweep_limit_s, concurrency=concurrency, trace=trace)
    finally:
        start.close(options.limit_s)
    found = sorted(traces.glob("*.json*"), key=lambda path: path.stat().st_mtime)
    if start.failure or len(found) != len(options.profile):
        print(start.failure or f"{len(found)} traces in {traces}, not {len(options.profile)}")
        return 1
    document = {
        "runs": [_run_record(options)],
        "system": system.name,
        "shape": options.shape,
        "sampling": sampling,
        "rows": list(_profile_rows(options, start, found)),
    }
    save(document, options.output)
    return 0


def _profile_rows(
    options: argparse.Namespace, start: Start, traces: Sequence[Path]
) -> Iterator[dict[str, Any]]:
    """One row per traced concurrency; prints the tables on the way."""
    sweeps = start.sweeps
    for concurrency, path in zip(options.profile, traces, strict=True):
        untraced = [event for event in sweeps if event["concurrency"] == concurrency][-1]
        figures = {name: untraced[name] for name in UNTRACED}
        print(f"# {start.system.name}, {options.shape}, c = {concurrency}: {figures}")
        profiles = serving_trace.summarize(serving_trace.read_trace(path))
        print(*(profile.text() for profile in profiles), path, sep="\n")
        profiled = [profile.figures() for profile in profiles]
        yield {"concurrency": concurrency, "untraced": figures, "profiles": profiled}


def _run_record(options: argparse.Namespace) -> dict[str, Any]:
    made_by = header(["python", "benchmarks/serving.py", *sys.argv[1:]], options.commit)
    made_by["machine"]["memory_used_before_gib"] = used_gib()
    return {
        "id": options.run,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **made_by,
        "options": {name: getattr(options, name) for name in RECORDED},
    }


if __name__ == "__main__":
    # A time limit from outside ends the engines too, and what they have measured is saved.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    raise SystemExit(main())
