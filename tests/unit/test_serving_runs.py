# SPDX-License-Identifier: Apache-2.0
"""Runs of the serving benchmark: the order of starts and measurements, and what is kept of them."""

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import serving
import serving_results as results
from serving_engine import Job
from serving_phases import Phase, phase
from synthetic_sweeps import measured


class FakeChild:
    """Answers every command at once; `fixed7` fails at the first one."""

    orders: ClassVar[list[tuple[Any, Any]]] = []

    def __init__(self, command: list[str], env: dict[str, str], events: Path, log: Path) -> None:
        job = Job.read(Path(command[-1]))
        self._drafts = job.arguments.get("speculative_config", {}).get("num_speculative_tokens")
        self.events = [{"event": "ready", "start_s": 1.0, "kv_blocks": 5}]
        self.failure = ""
        log.write_text("the end\n")

    def wait_ready(self, limit_s: float) -> bool:
        return True

    def order(self, limit_s: float, concurrency: int | None = None, sweep: int = 0) -> bool:
        if concurrency is None:
            self.orders.append((self._drafts, "warm"))
            return True
        if self.failure:
            return False
        self.orders.append((self._drafts, concurrency))
        self.events.append(measured(concurrency, 50.0))
        self.failure = "exit status 1" if self._drafts == 7 else ""
        return not self.failure

    def end(self, limit_s: float) -> None: ...


def test_of_engines_that_time_their_steps_one_starts_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Recorded(FakeChild):
        def __init__(self, command: list[str], *rest: Any) -> None:
            super().__init__(command, *rest)
            self.name = Path(command[-1]).stem.rpartition("-")[2]
            seen.append(f"start {self.name}")

        def wait_ready(self, limit_s: float) -> bool:
            seen.append(f"wait {self.name}")
            return True

    monkeypatch.setattr(serving, "Child", Recorded)
    arguments = ["--shape", "demo", "--systems", "plugin", "none", "adaptive", "fixed3", "-c", "2"]
    arguments += ["--together", "4", "--work", str(tmp_path), "-o", str(tmp_path / "o.json")]
    serving.main(arguments)
    ready = ["wait none", "wait fixed3"]
    assert seen[:5] == ["start none", "start fixed3", *ready, "start plugin"]
    assert seen[5:9] == [*ready, "wait plugin", "start adaptive"]


def test_a_run_writes_what_succeeded_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "Child", FakeChild)
    FakeChild.orders.clear()
    output = tmp_path / "out.json"
    arguments = ["--shape", "demo", "--systems", "none", "fixed7", "-c", "2", "--repeats", "2"]
    arguments += ["--work", str(tmp_path), "-o", str(output), "--run", "x"]
    assert serving.main(arguments) == 1
    # One after the other; the one that failed is not asked again in the same start.
    first = [(None, "warm"), (None, 2), (None, 2)]
    assert FakeChild.orders == [*first, (7, "warm"), (7, 2)] * 2
    document = results.load(output)
    assert [r["system"] for r in document["rows"]] == ["none", "fixed7"]
    assert document["rows"][0]["samples_tok_s"] == [50.0] * 4
    (run,) = document["runs"]
    assert run["failures"] == ["greedy fixed7: exit status 1"] * 2
    assert {"id", "machine", "versions", "commit", "command"} <= run.keys()


def test_a_run_that_is_terminated_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminated(FakeChild):
        def order(self, limit_s: float, concurrency: int | None = None, sweep: int = 0) -> bool:
            if sweep == 1 and self._drafts == 3:
                sys.exit(143)
            return super().order(limit_s, concurrency, sweep)

    monkeypatch.setattr(serving, "Child", Terminated)
    arguments = ["--shape", "demo", "--systems", "none", "fixed3", "-c", "2", "--together", "2"]
    arguments += ["--work", str(tmp_path), "-o", str(tmp_path / "out.json")]
    with pytest.raises(SystemExit):
        serving.main(arguments)
    document = results.load(tmp_path / "out.json")
    assert {r["system"]: r["samples_tok_s"] for r in document["rows"]} == {
        "none": [50.0],
        "fixed3": [50.0],
    }
    failures = document["runs"][0]["failures"]
    assert failures == [f"greedy {name}: the run was terminated" for name in ("none", "fixed3")]


@pytest.mark.parametrize("word", ["8", "8:15", "0:4", "8:x", "8:96:1"])
def test_requests_of_a_measurement_fill_a_window(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serving.main(["--requests", "1:16", word])
    assert f"--requests {word!r}: expected C:N" in capsys.readouterr().err


def test_engines_alive_together_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "Child", FakeChild)
    FakeChild.orders.clear()
    arguments = ["--shape", "demo", "--systems", "none", "fixed3", "-c", "2", "4"]
    arguments += ["--together", "2", "--kv-cache-gib", "30", "--work", str(tmp_path)]
    assert serving.main([*arguments, "-o", str(tmp_path / "out.json"), "--run", "x"]) == 0
    turn = [(None, 2), (3, 2), (3, 4), (None, 4)]
    assert FakeChild.orders == [(None, "warm"), (3, "warm"), *turn * 2]
    (stored,) = (tmp_path / "x").glob("*-0-greedy-none.json")
    job = Job.read(stored)
    assert job.requests == {1: 16, 8: 96, 32: 192}
    assert job.arguments["kv_cache_memory_bytes"] == 30 * 2**30


def test_a_run_starts_and_measures_in_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "phases"
    seen: list[str] = []

    def free(wanted: Phase) -> bool:
        try:
            with phase(folder, wanted, 0.0):
                return True
        except TimeoutError:
            return False

    class Watched(FakeChild):
        def wait_ready(self, limit_s: float) -> bool:
            seen.append(f"starts, others may measure: {free(Phase.MEASURE)}")
            return True

        def order(self, limit_s: float, *rest: Any, **more: Any) -> bool:
            seen.append(f"measures, others may start: {free(Phase.START)}")
            return super().order(limit_s, *rest, **more)

        def end(self, limit_s: float) -> None:
            seen.append(f"ends, others may start: {free(Phase.START)}")

    monkeypatch.setattr(serving, "Child", Watched)
    arguments = ["--shape", "demo", "--systems", "none", "-c", "2", "--repeats-in-process", "1"]
    arguments += ["--work", str(tmp_path), "-o", str(tmp_path / "out.json")]
    assert serving.main([*arguments, "--phases", str(folder)]) == 0
    measures = ["measures, others may start: False"] * 2
    assert seen == ["starts, others may measure: False", *measures, "ends, others may start: True"]


@pytest.mark.parametrize(("busy", "starts"), [(Phase.MEASURE, 0), (Phase.START, 1)])
def test_a_run_that_waits_for_others_in_vain_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    busy: Phase,
    starts: int,
) -> None:
    monkeypatch.setattr(serving, "Child", FakeChild)
    FakeChild.orders.clear()
    output = tmp_path / "out.json"
    arguments = ["--shape", "demo", "--systems", "none", "-c", "2", "--work", str(tmp_path)]
    arguments += ["-o", str(output), "--phases", str(tmp_path), "--phase-limit-s", "0.3"]
    with phase(tmp_path, busy, 0.0):
        assert serving.main(arguments) == 1
    reason = f"{tmp_path}: others were in phase {busy} for 0.3 s"
    assert reason in capsys.readouterr().out
    assert results.load(output)["runs"][0]["failures"] == [f"greedy none: {reason}"] * starts
    assert not FakeChild.orders
