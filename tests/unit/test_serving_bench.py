# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark without an engine: its load, its sums, its files and its process limits."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import serving
import serving_children
import serving_plot
import serving_results as results
from serving_children import Child
from serving_engine import plugin_metrics, step_of, verified
from serving_load import (
    ClosedLoop,
    Served,
    Step,
    Window,
    client_metrics,
    engine_metrics,
)
from serving_prompts import make_prompts
from serving_systems import (
    SCHEDULE,
    EngineOptions,
    engine_arguments,
    environment,
    parse_system,
    prepare_pair,
)
from synthetic_sweeps import measured

from vllm_dspark.cli import provenance


class FakeEngine:
    """Commits up to `per_step` tokens of every active request in steps of a real clock."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self.steps: list[Step] = []
        self.in_flight: list[tuple[float, int]] = []
        self._active: dict[int, asyncio.Queue[int]] = {}

    async def stream(self, number: int, output_tokens: int) -> AsyncIterator[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        self._active[number] = queue
        self._note()
        try:
            left = output_tokens
            while left:
                count = min(left, await queue.get())
                left -= count
                yield count
        finally:
            del self._active[number]
            self._note()

    def _note(self) -> None:
        self.in_flight.append((time.perf_counter(), len(self._active)))

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            for queue in self._active.values():
                queue.put_nowait(self.per_step)
            rows = len(self._active)
            await asyncio.sleep(0)
            self.steps.append(Step(time.perf_counter(), tokens=rows * self.per_step, rows=rows))


def run_loop(concurrency: int, requests: int) -> tuple[FakeEngine, ClosedLoop, Window]:
    engine = FakeEngine(per_step=2)
    loop = ClosedLoop(engine.stream, concurrency, requests, output_tokens=16)

    async def run() -> Window:
        server = asyncio.create_task(engine.serve())
        try:
            return await asyncio.wait_for(loop.run(), 30)
        finally:
            server.cancel()

    return engine, loop, asyncio.run(run())


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_window_lies_between_ramp_up_and_the_first_free_slot(concurrency: int) -> None:
    engine, loop, window = run_loop(concurrency, requests=4 * concurrency)

    assert max(count for _, count in engine.in_flight) == concurrency
    first = loop.served[:concurrency]
    assert all(r.finished and r.deliveries[-1][0] <= window.start_s for r in first)
    assert sum(request.finished for request in loop.served) == 4 * concurrency
    last = max(r.deliveries[-1][0] for r in loop.served if r.finished)
    assert last <= window.end_s
    # A slot that has just ended is refilled at once: no moment with two free ones.
    inside = [count for moment, count in engine.in_flight if moment in window]
    assert min(inside[:-concurrency] or [concurrency]) >= concurrency - 1


def test_first_requests_are_staggered_and_later_ones_full() -> None:
    _, loop, _ = run_loop(4, requests=16)
    assert [request.tokens for request in loop.served[:4]] == [4, 8, 12, 16]
    assert {request.tokens for request in loop.served[4:] if request.finished} == {16}


def test_everything_in_flight_is_cancelled_at_the_end() -> None:
    engine, loop, _ = run_loop(4, requests=16)
    assert engine.in_flight[-1][1] == 0
    assert 1 <= sum(not request.finished for request in loop.served) <= 4


def test_throughput_of_clients_and_of_steps_agree() -> None:
    engine, loop, window = run_loop(8, requests=64)
    metrics = engine_metrics(engine.steps, window)
    delivered = sum(n for r in loop.served for moment, n in r.deliveries if moment in window)
    assert metrics["accept_len"] == 2.0
    assert metrics["tok_s"] == pytest.approx(delivered / (window.end_s - window.start_s), rel=0.1)


def test_an_error_of_a_request_ends_the_load() -> None:
    async def broken(number: int, output_tokens: int) -> AsyncIterator[int]:
        yield 1
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(asyncio.wait_for(ClosedLoop(broken, 2, 8, 16).run(), 10))


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="two requests per slot"):
        ClosedLoop(FakeEngine(1).stream, 8, 15, 16)


def test_latency_per_delivery_differs_from_time_per_token() -> None:
    served = [
        # Sent before the window: its gap counts, its time per token does not.
        Served(0.0, [(0.5, 1), (1.5, 8)], finished=True),
        Served(1.0, [(1.1, 1), (1.2, 4), (1.5, 4)], finished=True),
        Served(1.6, [(1.7, 1), (5.0, 1)]),
    ]
    metrics = client_metrics(served, Window(0.9, 2.0))
    assert metrics["requests"] == 1
    assert metrics["itl_p50_ms"] == pytest.approx(300.0)  # of 1000, 100 and 300
    assert metrics["tpot_p50_ms"] == pytest.approx(50.0)  # 400 ms for 8 tokens
    assert metrics["ttft_p50_ms"] == pytest.approx(100.0)
    assert metrics["request_tok_s"] == pytest.approx(18.0)
    assert client_metrics([], Window(0, 1))["itl_p99_ms"] is None


def test_sums_start_after_the_first_step_of_the_window() -> None:
    steps = [
        Step(0.9, tokens=999, rows=999),
        Step(1.0, tokens=999, rows=999),
        Step(2.0, tokens=12, rows=4, scheduled_drafts=28, batch_tokens=20, padded_tokens=24),
        Step(
            4.0,
            tokens=10,
            rows=3,
            first_tokens=1,
            prompt_tokens=50,
            batch_tokens=60,
            padded_tokens=64,
            latencies_s=[0.4, 0.5, 0.6],
        ),
        Step(9.0, tokens=999, rows=999),
    ]
    steps.insert(3, Step(3.0))  # bookkeeping, no batch: not a step
    metrics = engine_metrics(steps, Window(0.95, 5.0))
    assert metrics["tok_s"] == pytest.approx(22 / 3, abs=1e-3)
    assert metrics["step_ms"] == 1500.0
    assert metrics["decode_step_p50_ms"] == 1000.0
    assert metrics["accept_len"] == 3.0  # 21 tokens of 7 rows: the first token is no acceptance
    assert metrics["verified_per_step"] == 11.5  # 80 in the batches - 50 prompt - 7 anchors
    assert metrics["padded_per_step"] == 4.0
    slowest = metrics["slowest_steps"]
    assert [step["ms"] for step in slowest] == [2000.0, 1000.0]
    assert (slowest[0]["prompts"], slowest[0]["prompt_tokens"]) == (1, 50)
    # The frontend saw the step after 2 s, the engine had it done after half a second.
    assert [step["engine_ms"] for step in slowest] == [500.0, None]
    assert metrics["engine_itl_p50_ms"] == 500.0
    with pytest.raises(ValueError, match="1 engine steps"):
        engine_metrics(steps, Window(8.0, 10.0))


def test_verified_is_unknown_when_some_batches_are() -> None:
    steps = [Step(float(i), tokens=4, rows=4, scheduled_drafts=28) for i in range(4)]
    metrics = engine_metrics(steps, Window(-1, 9))
    assert metrics["verified_per_step"] is None
    scheduled = verified(metrics, {}, adaptive=False)
    assert scheduled == {"verified_per_step": 28.0, "verified_source": "scheduled"}
    assert verified(metrics, {}, adaptive=True) == {"verified_source": None}
    counted = verified(metrics, {"admitted_per_step": 9.5}, adaptive=True)
    assert counted == {"verified_per_step": 9.5, "verified_source": "plugin"}


def test_step_of_hosts_statistics() -> None:
    class Stats:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

    scheduler = Stats(
        spec_decoding_stats=Stats(num_draft_tokens=14, num_accepted_tokens=5),
        cudagraph_stats=Stats(num_unpadded_tokens=16, num_padded_tokens=24, runtime_mode="FULL"),
    )
    iteration = Stats(
        num_generation_tokens=8,
        inter_token_latencies_iter=[0.1, 0.1],
        time_to_first_tokens_iter=[0.3],
        num_prompt_tokens=40,
    )
    step = step_of(scheduler, iteration)
    assert (step.tokens, step.rows, step.first_tokens, step.prompt_tokens) == (8, 2, 1, 40)
    assert step.latencies_s == [0.1, 0.1]
    assert (step.scheduled_drafts, step.accepted_drafts) == (14, 5)
    assert (step.batch_tokens, step.padded_tokens, step.graph) == (16, 24, "FULL")
    idle = step_of(Stats(spec_decoding_stats=None, cudagraph_stats=None), None)
    assert (idle.tokens, idle.batch_tokens) == (0, None)


def test_plugin_counters_are_taken_over_the_window() -> None:
    from vllm_dspark.metrics_snapshot import Series

    def snapshot(settled: float, admitted: float, steps: float) -> dict[Series, float]:
        labels = [("engine", "0"), ("mode", "compact"), ("reason", "budget")]
        return {
            Series.of("vllm:dspark_steps_settled_total"): settled,
            Series.of("vllm:dspark_draft_tokens_admitted_total"): admitted,
            Series.of("vllm:dspark_steps_total", labels): steps,
            Series.of("vllm:dspark_host_seconds_total", [("part", "plan")]): settled * 1e-4,
        }

    metrics = plugin_metrics(snapshot(10, 100, 11), snapshot(20, 150, 22))
    assert metrics["admitted_per_step"] == 5.0
    assert metrics["modes"] == {"compact": 11.0}
    assert metrics["host_us_per_step"] == {"plan": 100.0}
    assert plugin_metrics({}, {})["admitted_per_step"] is None


def test_prompts_are_the_same_for_any_count_and_within_bounds() -> None:
    texts = [list(range(i, i + 50)) for i in range(20)]
    many, few = make_prompts(texts, 300, seed=1), make_prompts(texts, 10, seed=1)
    assert many[:10] == few != make_prompts(texts, 10, seed=2)
    lengths = [len(prompt) for prompt in many]
    assert min(lengths) >= 32 and max(lengths) <= 512
    assert min(lengths) < 48 and max(lengths) > 400


def test_systems_are_parsed() -> None:
    assert parse_system("none").speculative is None
    assert parse_system("fixed5").speculative == {"num_speculative_tokens": 5}
    schedule = parse_system("schedule").speculative
    assert schedule and schedule["num_speculative_tokens_per_batch_size"] == SCHEDULE
    adaptive = parse_system("adaptive").speculative
    assert adaptive and adaptive["enable_adaptive_verification"] is True
    variant = parse_system('static=plugin:{"verify": "static"}')
    assert (variant.name, variant.plugin, variant.native) == ("static", {"verify": "static"}, False)
    rounded = parse_system('fixed3:{"quantization": "fp8"}')
    assert rounded.native
    assert rounded.speculative == {"num_speculative_tokens": 3, "quantization": "fp8"}
    assert [parse_system(s).native for s in ("none", "plugin", "fixed1")] == [False, False, True]


@pytest.mark.parametrize(
    "text",
    [
        "fixed0",
        "fixed",
        "fixed3:[]",
        "fastest",
        "none:{}",
        "plugin:[]",
        "plugin:{",
        "schedule:{}",
        "",
    ],
)
def test_other_systems_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="system"):
        parse_system(text)


def test_systems_differ_in_speculation_and_plugin_options_only(tmp_path: Path) -> None:
    options = EngineOptions()
    every = {
        text: engine_arguments(parse_system(text), tmp_path, "greedy", options)
        for text in ("none", "fixed3", "adaptive", "plugin")
    }
    own = {"speculative_config", "additional_config"}
    common = [{k: v for k, v in args.items() if k not in own} for args in every.values()]
    assert all(arguments == common[0] for arguments in common)
    assert own.isdisjoint(every["none"])
    assert every["plugin"]["additional_config"] == {"dspark": {}}
    assert every["fixed3"]["speculative_config"]["draft_sample_method"] == "greedy"
    sampled = engine_arguments(parse_system("fixed3"), tmp_path, "t0.8", options)
    assert sampled["speculative_config"]["draft_sample_method"] == "probabilistic"
    own = engine_arguments(parse_system("fixed3"), tmp_path, "greedy", EngineOptions(()))
    assert "compilation_config" not in own
    more = EngineOptions(speculative={"quantization": "fp8"})
    for name in ("fixed3", "plugin"):
        rounded = engine_arguments(parse_system(name), tmp_path, "greedy", more)
        assert rounded["speculative_config"]["quantization"] == "fp8"
    assert engine_arguments(parse_system("none"), tmp_path, "greedy", more) == every["none"]


def test_only_the_plugin_runs_with_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DSPARK_METRICS_DIR", "/elsewhere")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    native = environment(parse_system("adaptive"), cpu=False, cache=tmp_path)
    plugin = environment(parse_system("plugin"), cpu=True, cache=tmp_path)
    assert (native["VLLM_DSPARK_ENABLED"], plugin["VLLM_DSPARK_ENABLED"]) == ("0", "1")
    assert "VLLM_DSPARK_METRICS_DIR" not in native
    assert native["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    assert "TRITON_INTERPRET" in plugin and "TRITON_INTERPRET" not in native


def test_a_pair_is_widened_once(tmp_path: Path) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[2]); folder.mkdir(parents=True)\n"
        "(folder / 'arguments').write_text(' '.join(sys.argv[3:]))\n"
    )
    pair = prepare_pair("8b", tmp_path, tmp_path / "work", tool)
    assert "--hidden 4096 --layers 36" in (pair / "arguments").read_text()
    tool.write_text("raise SystemExit(1)")
    assert prepare_pair("8b", tmp_path, tmp_path / "work", tool) == pair
    assert prepare_pair("demo", tmp_path, tmp_path / "work", tool) == tmp_path.resolve()


def row(system: str, tok_s: float, *, run: str = "r", concurrency: int = 8) -> results.Row:
    labels = {
        "run": run,
        "shape": "demo",
        "sampling": "greedy",
        "system": system,
        "plugin": system.startswith("plugin"),
    }
    ready = {"event": "ready", "start_s": 30.0, "kv_blocks": 100}
    return results.make_rows(labels, [[ready, measured(concurrency, tok_s)]])[0]


def test_rows_are_medians_over_all_starts() -> None:
    ready = {"event": "ready", "start_s": 30.0, "kv_blocks": 100}
    starts = [
        [ready, measured(1, 100.0), measured(8, 500.0), measured(1, 104.0)],
        [{**ready, "start_s": 40.0}, measured(1, 90.0)],
    ]
    one, eight = results.make_rows({"system": "fixed3", "plugin": False}, starts)
    assert (one["concurrency"], one["tok_s"], one["spread"]) == (1, 100.0, 0.14)
    assert one["samples_tok_s"] == [100.0, 104.0, 90.0]
    assert (eight["tok_s"], eight["spread"], eight["start_s"]) == (500.0, 0.0, 35.0)
    assert eight["peak_gpu_mem_gib"] == 18.0
    assert results.make_rows({}, [[ready], []]) == []


def test_ratios_stay_within_a_run() -> None:
    rows = [
        row("none", 100.0),
        row("fixed3", 200.0),
        row("fixed7", 150.0),
        row("plugin", 220.0),
        row("plugin", 1000.0, run="other"),
        row("fixed3", 500.0, run="other"),
    ]
    best = results.ratios(rows, "best")
    assert best["r", "demo", "greedy", "plugin"] == {8: pytest.approx(1.1)}
    assert best["other", "demo", "greedy", "plugin"] == {8: pytest.approx(2.0)}
    assert results.ratios(rows, "none")["r", "demo", "greedy", "plugin"] == {8: pytest.approx(2.2)}
    assert results.ratios([row("none", 1.0), row("plugin", 2.0)], "best") == {}
    text = results.table({"runs": [], "rows": rows})
    assert "1.100" in text and "2.000" in text


def test_a_plot_puts_runs_together_and_keeps_ratios_within_them() -> None:
    rows = [
        row("none", 100.0),
        row("fixed3", 200.0),
        row("plugin", 220.0),
        row("plugin", 880.0, run="other"),
        row("fixed7", 400.0, run="other"),
        row("fixed3", 500.0, run="without"),
    ]
    absolute, relative, against = serving_plot.lines(rows)
    assert against == "the plugin"
    assert absolute["plugin"][8].runs == [220.0, 880.0]
    ratios = {system: line[8].runs for system, line in relative.items()}
    approx = pytest.approx
    assert ratios == {
        "none": [approx(1 / 2.2)],
        "fixed3": [approx(2 / 2.2)],
        "fixed7": [approx(4 / 8.8)],
        "plugin": [1.0, 1.0],
    }
    _, relative, against = serving_plot.lines(rows[:2])
    assert (against, relative["none"][8].runs) == ("the best native setting", [0.5])
    assert serving_plot.lines(rows[:1])[2] == "the slowest system"


def test_merge_keeps_runs_apart(tmp_path: Path) -> None:
    first = {"runs": [{"id": "a"}], "rows": [row("none", 1.0, run="a")]}
    second = {"runs": [{"id": "b"}], "rows": [row("none", 2.0, run="b")]}
    for name, document in (("a", first), ("b", second)):
        provenance.save(document, tmp_path / f"{name}.json")
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert serving.main(["--merge", *paths, "-o", str(tmp_path / "c.json")]) == 0
    merged = results.load(tmp_path / "c.json")
    assert [r["run"] for r in merged["rows"]] == ["a", "b"]
    with pytest.raises(ValueError, match="runs a occur"):
        results.merge([first, first])
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(SystemExit):
        serving.main(["--table", str(tmp_path / "bad.json")])


def test_events_of_a_killed_child_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "ready"}\n{"event": "sweep"}\n{"event": "sw')
    assert [event["event"] for event in results.read_events(path)] == ["ready", "sweep"]
    assert results.read_events(tmp_path / "none.jsonl") == []


def test_memory_figures_come_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Graph capturing finished in 21 secs, took 1.25 GiB\nno more\n")
    assert results.log_figures(log) == {"graph_mem_gib": 1.25}


CHILD = """
import json, sys, time
events = open(sys.argv[1], "a", buffering=1)
def emit(name, **values): events.write(json.dumps({"event": name, **values}) + chr(10))
def deeply_stuck(): time.sleep(60)
"""


def child(tmp_path: Path, body: str) -> Child:
    script = tmp_path / "child.py"
    script.write_text(CHILD + body)
    events = tmp_path / "events.jsonl"
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    return Child([sys.executable, str(script), str(events)], env, events, tmp_path / "log")


def test_a_child_measures_on_command_and_ends_with_its_input(tmp_path: Path) -> None:
    engine = child(
        tmp_path,
        "emit('ready')\n"
        "for line in sys.stdin:\n    emit('sweep', **json.loads(line))\n"
        "emit('shut down')\n",
    )
    assert engine.wait_ready(20)
    assert engine.order(20, concurrency=4)
    assert engine.events[-1] == {"event": "sweep", "concurrency": 4}
    engine.end(20)
    assert (engine.failure, engine.events[-1]["event"]) == ("", "shut down")


@pytest.mark.parametrize("stuck", ["before", "command", "end"])
def test_a_stuck_child_leaves_its_stacks_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    monkeypatch.setattr(serving_children, "STACKS_S", 2.0)
    wait = {
        "before": "deeply_stuck()\n",
        "command": "emit('ready')\nsys.stdin.readline()\ndeeply_stuck()\n",
        "end": "emit('ready')\nsys.stdin.readline()\nemit('sweep')\ndeeply_stuck()\n",
    }
    engine = child(
        tmp_path,
        "import subprocess\n"
        "code = 'from signal import *; import time; signal(SIGABRT, SIG_IGN); time.sleep(60)'\n"
        "print(subprocess.Popen([sys.executable, '-c', code]).pid, flush=True)\n" + wait[stuck],
    )
    until = time.monotonic() + 30
    while not (tmp_path / "log").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    ready_s, order_s = {"before": (1, 1), "command": (30, 1), "end": (30, 30)}[stuck]
    done = [engine.wait_ready(ready_s), engine.order(order_s, concurrency=1)]
    assert done == {"before": [False] * 2, "command": [True, False], "end": [True] * 2}[stuck]
    engine.end(1)
    text = (tmp_path / "log").read_text()
    assert engine.failure == "killed after 1 s, stacks are in the log"
    assert "deeply_stuck" in text
    assert is_gone(int(text.split()[0]))


def test_a_child_that_ends_early_says_how(tmp_path: Path) -> None:
    engine = child(tmp_path, "emit('ready')\nsys.stdin.readline()\nsys.exit(3)\n")
    assert engine.wait_ready(20)
    assert not engine.order(20, concurrency=1)
    assert not engine.order(20, concurrency=2)
    engine.end(20)
    assert engine.failure == "exit status 3"


def is_gone(pid: int) -> bool:
    """Whether the process has ended within a second (a zombie counts)."""
    for _ in range(20):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False
