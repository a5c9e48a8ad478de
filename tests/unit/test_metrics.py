# SPDX-License-Identifier: Apache-2.0
"""Counters add up, arrive in `/metrics` whatever process wrote them, and never disturb a step."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_dspark.metrics import CATALOGUE, MAX_LABEL_SETS, MetricsWriter
from vllm_dspark.metrics_export import (
    DIRECTORY_ENV,
    MULTIPROC_ENV,
    DSparkCollector,
    read_snapshot,
)
from vllm_dspark.metrics_snapshot import (
    GAUGE_SAMPLES,
    Series,
    Snapshot,
    by_label,
    calibration_errors,
    difference,
    format_exposition,
    parse_exposition,
    total,
)

ROOT = Path(__file__).resolve().parents[2]
D = "vllm:dspark_"

pytestmark = pytest.mark.usefixtures("no_metrics_directory")

WRITER_PROCESS = """
import json, sys
import numpy as np
from vllm_dspark.metrics import MetricsWriter
engine, rank, seed, directory = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rng = np.random.default_rng(seed)
writer = MetricsWriter(engine, rank, 7, directory=directory, reliability_every=1)
for step in range(50):
    n = int(rng.integers(1, 40))
    admitted = rng.integers(0, 8, n)
    writer.observe_plan(mode="compact", reason="budget", scheduled_tokens=7 * n,
                        budget_tokens=int(admitted.sum()), tier_tokens=64, padded_tokens=3)
    writer.observe_accept(np.full(n, 7), admitted, rng.integers(0, admitted + 1),
                          np.cumprod(rng.random((n, 7)), axis=1))
    writer.observe_timing(0.01, 0.012)
    writer.observe_sync(0.0001, 2)
    writer.observe_disagreement("budget", 1)
writer.close()
print(json.dumps([[s.name, s.labels, v] for s, v in writer.snapshot().items()]))
"""


@pytest.fixture
def writer():
    writer = MetricsWriter(0, 0, 7, directory="", reliability_every=1)
    yield writer
    writer.close()


def run_writer(engine: int, rank: int, seed: int, directory: Path, **env: str) -> Snapshot:
    done = subprocess.run(
        [sys.executable, "-c", WRITER_PROCESS, str(engine), str(rank), str(seed), str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **env},
        check=True,
    )
    return {
        Series.of(name, [(k, v) for k, v in labels]): value
        for name, labels, value in json.loads(done.stdout)
    }


def summed(snapshots: list[Snapshot]) -> Snapshot:
    result: Snapshot = {}
    for snapshot in snapshots:
        for series, value in snapshot.items():
            gauge = series.name in GAUGE_SAMPLES
            result[series] = value if gauge else result.get(series, 0.0) + value
    return without_flush_time(result)


def without_flush_time(snapshot: Snapshot) -> Snapshot:
    """The time of a publication is known only after it."""
    return {s: v for s, v in snapshot.items() if ("part", "flush") not in s.labels}


class TestAcrossProcesses:
    @pytest.mark.parametrize("engines", [(0, 0), (0, 1)], ids=["restarted", "data-parallel"])
    def test_scrape_equals_the_writers(self, tmp_path: Path, engines: tuple[int, int]) -> None:
        parts = [run_writer(engine, 0, 3 + i, tmp_path) for i, engine in enumerate(engines)]
        registry = CollectorRegistry()
        registry.register(DSparkCollector(str(tmp_path)))
        scraped = parse_exposition(generate_latest(registry).decode())
        expected = summed(parts)
        assert total(expected, D + "steps_total") == 100
        assert without_flush_time(scraped) == pytest.approx(expected)
        assert without_flush_time(read_snapshot(str(tmp_path))) == pytest.approx(expected)

    def test_only_rank_0_counts_decisions(self, tmp_path: Path) -> None:
        for rank in range(2):
            run_writer(0, rank, 5, tmp_path)
        both = read_snapshot(str(tmp_path))
        assert total(both, D + "steps_total") == 50
        assert total(both, D + "verify_len_count") == total(both, D + "verify_len_bucket", le="8.0")
        assert by_label(both, D + "sync_messages_total", "rank") == {"0": 100, "1": 100}
        assert by_label(both, D + "rank_disagreements_total", "rank") == {"0": 50, "1": 50}

    def test_multiprocess_registry_of_the_host_shows_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With several API servers the host reads PROMETHEUS_MULTIPROC_DIR itself."""
        monkeypatch.setenv(MULTIPROC_ENV, str(tmp_path))
        monkeypatch.setenv(DIRECTORY_ENV, str(tmp_path / "not-this-one"))
        writer = MetricsWriter(0, 0, 7)
        writer.observe_plan(mode="static", reason="no-table")
        writer.close()
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        scraped = parse_exposition(generate_latest(registry).decode())
        assert without_flush_time(scraped) == pytest.approx(without_flush_time(writer.snapshot()))
        assert not (tmp_path / "not-this-one").exists()

    def test_files_do_not_meet_those_of_prometheus_client(self, tmp_path: Path) -> None:
        """A process may publish its own metrics under the same pid in the same directory."""
        script = (
            "import sys\n"
            "from prometheus_client import Counter\n"
            "from vllm_dspark.metrics import MetricsWriter\n"
            "mine = Counter('other', 'Not ours.'); mine.inc(3)\n"
            "w = MetricsWriter(0, 0, 7); w.observe_plan(mode='static'); w.flush(); mine.inc(2)\n"
            "w.observe_plan(mode='static'); w.close()\n"
        )
        env = {**os.environ, MULTIPROC_ENV: str(tmp_path)}
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, check=True, timeout=60)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))
        text = generate_latest(registry).decode()
        assert "other_total 5.0" in text
        assert total(parse_exposition(text), D + "steps_total") == 2
        assert total(read_snapshot(str(tmp_path)), D + "steps_total") == 2

    def test_forked_worker_publishes_at_exit(self, tmp_path: Path) -> None:
        """Forked children do not run atexit; the counts of the last interval must not be lost."""
        script = (
            "import multiprocessing\n"
            "from vllm_dspark.metrics import MetricsWriter\n"
            "def work():\n"
            f"    w = MetricsWriter(0, 0, 7, directory={str(tmp_path)!r}, flush_interval_s=60)\n"
            "    w.observe_plan(mode='static')\n"
            "p = multiprocessing.get_context('fork').Process(target=work)\n"
            "p.start(); p.join(30)\n"
        )
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
        assert total(read_snapshot(str(tmp_path)), D + "steps_total") == 1


class TestAccounting:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.lists(st.tuples(*[st.integers(0, 5)] * 3).map(sorted), min_size=1, max_size=9),
            min_size=1,
            max_size=6,
        )
    )
    def test_counters_add_up(self, steps: list[list[list[int]]]) -> None:
        writer = MetricsWriter(0, 0, 5, directory="")
        for rows in steps:
            accepted, admitted, scheduled = np.array(rows, dtype=np.int32).T
            writer.observe_accept(scheduled, admitted, accepted)
        writer.close()
        got = writer.snapshot()
        value = {
            key: total(got, f"{D}draft_tokens_{key}_total")
            for key in ("scheduled", "admitted", "trimmed", "accepted", "rejected")
        }
        flat = [row for rows in steps for row in rows]
        assert value["scheduled"] == sum(row[2] for row in flat)
        assert value["scheduled"] == value["admitted"] + value["trimmed"]
        assert value["admitted"] == value["accepted"] + value["rejected"]
        assert total(got, D + "committed_tokens_total") == value["accepted"] + len(flat)
        assert total(got, D + "verify_len_sum") == value["admitted"] + len(flat)
        for which, column in (("accepted", 0), ("admitted", 1), ("scheduled", 2)):
            by_position = by_label(got, f"{D}position_{which}_total", "position")
            assert sum(by_position.values()) == value[which]
            assert by_position["2"] == sum(row[column] > 2 for row in flat)

    def test_committed_tokens_can_be_given(self, writer: MetricsWriter) -> None:
        writer.observe_accept(np.array([7]), np.array([7]), np.array([5]), committed_tokens=2)
        assert total(writer.snapshot(), D + "committed_tokens_total") == 2

    @pytest.mark.parametrize(
        ("scheduled", "admitted", "accepted", "what"),
        [
            ([8], [1], [1], "above_gamma"),
            ([7], [-1], [0], "not_a_count"),
            ([7], [0.5], [0.0], "not_a_count"),
            ([3], [4], [1], "admitted_above_scheduled"),
            ([7], [2], [3], "accepted_above_admitted"),
            ([7, 7], [2], [1], "lengths_of_arrays_differ"),
        ],
    )
    def test_contradiction_is_dropped_and_counted(
        self, writer: MetricsWriter, scheduled: list, admitted: list, accepted: list, what: str
    ) -> None:
        writer.observe_accept(np.array(scheduled), np.array(admitted), np.array(accepted))
        got = writer.snapshot()
        assert by_label(got, D + "invalid_observations_total", "what") == {what: 1}
        assert total(got, D + "draft_tokens_scheduled_total") == 0
        assert total(got, D + "steps_settled_total") == 0

    def test_plan(self, writer: MetricsWriter) -> None:
        plan = {"reason": "gain", "scheduled_tokens": 70, "tier_tokens": 64}
        writer.observe_plan(mode="compact", budget_tokens=35, padded_tokens=4, **plan)
        writer.observe_plan(mode="compact", budget_tokens=0, filled_tokens=9, **plan)
        writer.observe_plan(mode="uniform", graph_miss="batch-too-large", bypass=True)
        got = writer.snapshot()
        assert by_label(got, D + "steps_total", "mode") == {"compact": 2, "uniform": 1}
        assert total(got, D + "bypass_steps_total") == 1
        assert total(got, D + "budget_tokens") == -1
        assert total(got, D + "budget_fraction_count") == 2
        assert total(got, D + "budget_fraction_bucket", le="0.0") == 1
        assert total(got, D + "budget_fraction_bucket", le="0.5") == 2
        assert total(got, D + "budget_fraction_bucket", le="0.4") == 1
        assert by_label(got, D + "tier_steps_total", "tokens") == {"64": 2, "0": 1}
        assert by_label(got, D + "graph_misses_total", "reason") == {"batch-too-large": 1}
        assert total(got, D + "verify_tokens_padded_total") == 4
        assert total(got, D + "verify_tokens_filled_total") == 9

    def test_doubt_timing_and_overhead(self, writer: MetricsWriter) -> None:
        writer.observe_doubt("stale", 3)
        writer.observe_doubt("stale", 0)
        writer.observe_timing(0.010, 0.008)
        for predicted, measured in ((None, 0.01), (float("nan"), 0.01), (0.01, 0.0)):
            writer.observe_timing(predicted, measured)
        writer.observe_overhead("records", 0.25)
        writer.observe_host("plan", 0.5)
        got = writer.snapshot()
        assert by_label(got, D + "full_verify_rows_total", "reason") == {"stale": 3}
        assert total(got, D + "predicted_step_seconds_total") == pytest.approx(0.010)
        assert total(got, D + "measured_step_seconds_total") == pytest.approx(0.008)
        assert total(got, D + "step_time_relative_error_sum") == pytest.approx(0.25)
        assert total(got, D + "step_time_relative_error_count") == 1
        assert total(got, D + "overhead_seconds_total", part="records") == 0.25
        assert by_label(got, D + "host_seconds_total", "part", rank="0") == {"plan": 0.5}
        assert by_label(got, D + "host_seconds_total", "part", rank="1") == {}

    def test_label_values_are_bounded(self, writer: MetricsWriter) -> None:
        for tokens in range(MAX_LABEL_SETS + 50):
            writer.observe_plan(mode="compact", tier_tokens=tokens)
        tiers = by_label(writer.snapshot(), D + "tier_steps_total", "tokens")
        assert len(tiers) == MAX_LABEL_SETS + 1
        assert tiers["other"] == 50

    def test_disabled_writer_keeps_nothing(self, tmp_path: Path) -> None:
        writer = MetricsWriter(0, 0, 7, enabled=False, directory=str(tmp_path))
        writer.observe_plan(mode="static")
        writer.observe_accept(np.array([7]), np.array([7]), np.array([5]))
        writer.observe_sync(1.0, 1)
        writer.close()
        assert writer.snapshot() == {}
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "bad", [{"gamma": 0}, {"tp_rank": -1}, {"flush_interval_s": 0}, {"reliability_every": 0}]
    )
    def test_bad_argument_names_itself(self, bad: dict[str, int]) -> None:
        arguments = {"engine_index": 0, "tp_rank": 0, "gamma": 7, "directory": "", **bad}
        with pytest.raises(ValueError, match=next(iter(bad))):
            MetricsWriter(**arguments)


class TestReliability:
    def test_equals_a_loop(self, writer: MetricsWriter) -> None:
        rng = np.random.default_rng(1)
        survivals = np.cumprod(rng.uniform(0.4, 1.0, (60, 7)), axis=1).astype(np.float32)
        survivals[0] = 1.0
        admitted = rng.integers(0, 8, 60)
        accepted = rng.integers(0, admitted + 1)
        writer.observe_accept(np.full(60, 7), admitted, accepted, survivals)
        expected: dict[tuple[str, str], list[float]] = {}
        for row in range(60):
            for k in range(admitted[row]):
                p = float(survivals[row, k])
                cell = expected.setdefault((str(k), str(min(int(p * 10), 9) / 10)), [0, 0, 0])
                for i, add in enumerate((1, p, accepted[row] > k)):
                    cell[i] += add
        got = writer.snapshot()
        for (position, lower), cell in expected.items():
            for i, part in enumerate(("drafts", "predicted", "observed")):
                name = f"{D}reliability_{part}_total"
                value = total(got, name, position=position, bin=lower)
                assert value == pytest.approx(cell[i], rel=1e-5)
        assert total(got, D + "reliability_drafts_total") == admitted.sum()
        assert total(got, D + "unusable_survivals_total") == 0

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.1, 1.5])
    def test_unusable_survival_is_left_out_and_counted(
        self, writer: MetricsWriter, value: float
    ) -> None:
        survivals = np.full((2, 7), 0.55)
        survivals[1, 3] = value
        full = np.full(2, 7)
        with np.errstate(all="raise"):
            writer.observe_accept(full, full, full, survivals)
        got = writer.snapshot()
        assert total(got, D + "unusable_survivals_total") == 1
        assert total(got, D + "reliability_drafts_total") == 13
        assert total(got, D + "reliability_drafts_total", position="3", bin="0.5") == 1
        assert total(got, D + "reliability_predicted_total") == pytest.approx(13 * 0.55)

    def test_calibration_error_of_a_known_case(self, writer: MetricsWriter) -> None:
        survivals = np.full((4, 7), 0.75)
        ones = np.ones(4, dtype=np.int64)
        writer.observe_accept(np.full(4, 7), ones, np.array([1, 1, 0, 0]), survivals)
        assert calibration_errors(writer.snapshot()) == {0: pytest.approx(0.25)}

    def test_samples_one_step_in_n(self) -> None:
        writer = MetricsWriter(0, 0, 7, directory="", reliability_every=3)
        for _ in range(7):
            writer.observe_accept(np.array([7]), np.array([7]), np.array([7]), np.ones((1, 7)))
        writer.close()
        assert total(writer.snapshot(), D + "reliability_drafts_total", position="0") == 2

    @pytest.mark.parametrize("contradiction", [False, True])
    def test_many_steps_count_as_one_by_one(self, contradiction: bool) -> None:
        rng = np.random.default_rng(2)
        steps, survivals = [], []
        for rows in (5, 0, 9, 1, 7, 3):
            admitted = rng.integers(0, 8, rows)
            steps.append((np.full(rows, 7), admitted, rng.integers(0, admitted + 1)))
            survivals.append(np.cumprod(rng.uniform(0.4, 1.0, (rows, 7)), axis=1))
        if contradiction:
            steps[2][2][4] = 7
            steps[2][1][4] = 0
        together, apart = (
            MetricsWriter(0, 0, 7, directory="", reliability_every=2) for _ in range(2)
        )
        together.observe_accepts(steps, survivals.__getitem__)
        for step, survival in zip(steps, survivals, strict=True):
            apart.observe_accept(*step, survival)
        counted = [
            {
                series: value
                for series, value in writer.snapshot().items()
                if "overhead" not in series.name
            }
            for writer in (together, apart)
        ]
        for writer in (together, apart):
            writer.close()
        assert counted[0] == counted[1]
        assert total(counted[0], D + "steps_settled_total") == (4 if contradiction else 5)
        assert total(counted[0], D + "reliability_drafts_total") > 0

    def test_wrong_shape_is_counted_not_raised(self, writer: MetricsWriter) -> None:
        writer.observe_accept(np.array([7]), np.array([7]), np.array([7]), np.ones((1, 6)))
        got = writer.snapshot()
        assert by_label(got, D + "invalid_observations_total", "what") == {"survivals_shape": 1}
        assert total(got, D + "draft_tokens_accepted_total") == 7


class TestPublication:
    def test_last_interval_is_published_without_another_step(self, tmp_path: Path) -> None:
        writer = MetricsWriter(0, 0, 7, directory=str(tmp_path), flush_interval_s=0.02)
        writer.observe_plan(mode="static")
        limit = time.monotonic() + 10
        while total(read_snapshot(str(tmp_path)), D + "steps_total") < 1:
            assert time.monotonic() < limit
            time.sleep(0.01)
        writer.close()

    def test_gauge_shows_the_last_value(self, tmp_path: Path) -> None:
        writer = MetricsWriter(0, 0, 7, directory=str(tmp_path), flush_interval_s=60)
        for budget in (40, 12):
            writer.observe_plan(mode="compact", budget_tokens=budget, scheduled_tokens=70)
            writer.flush()
            assert total(read_snapshot(str(tmp_path)), D + "budget_tokens") == budget
        writer.close()

    def test_published_counters_never_fall_while_serving(self, tmp_path: Path) -> None:
        writer = MetricsWriter(0, 0, 7, directory=str(tmp_path), flush_interval_s=0.001)
        stop = threading.Event()

        def serve() -> None:
            lens = np.array([7, 5, 2])
            while not stop.is_set():
                writer.observe_accept(np.full(3, 7), lens, lens // 2)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            last: Snapshot = {}
            reads, limit = 0, time.monotonic() + 10
            while reads < 40 or not total(last, D + "draft_tokens_rejected_total"):
                assert time.monotonic() < limit
                reads += 1
                now = read_snapshot(str(tmp_path))
                fallen = [s for s, v in last.items() if v > now[s]]
                assert fallen == []
                last = now
        finally:
            stop.set()
            thread.join()
            writer.close()

    def test_timers_are_called_and_a_failing_one_is_removed(self) -> None:
        writer = MetricsWriter(0, 0, 7, directory="", flush_interval_s=0.005)
        seen: list[float] = []
        calls: list[int] = []

        def fail() -> None:
            calls.append(1)
            raise RuntimeError("on purpose")

        writer.every(0.001, fail)
        writer.every(0.001, lambda: seen.append(total(writer.snapshot(), D + "steps_total")))
        writer.observe_plan(mode="static")
        limit = time.monotonic() + 10
        while len(seen) < 3 and time.monotonic() < limit:
            time.sleep(0.005)
        writer.close()
        assert seen[:3] == [1, 1, 1]
        assert len(calls) == 1

    def test_directory_that_cannot_be_used_leaves_serving_alone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        writer = MetricsWriter(0, 0, 7, directory=str(tmp_path / "file" / "below"))
        writer.observe_plan(mode="static")
        writer.close()
        assert total(writer.snapshot(), D + "steps_total") == 1
        assert "stay in this process" in caplog.text

    def test_directory_that_vanishes_warns_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        gone = tmp_path / "gone"
        writer = MetricsWriter(0, 0, 7, directory=str(gone), flush_interval_s=60)
        gone.rmdir()
        for _ in range(3):
            writer.observe_plan(mode="static")
            writer.flush()
        writer.close()
        assert caplog.text.count("no longer published") == 1

    def test_unreadable_file_hides_only_itself(self, tmp_path: Path) -> None:
        run_writer(0, 0, 1, tmp_path)
        (tmp_path / "counter_dspark-1-0.db").write_bytes(b"")
        (tmp_path / "histogram_dspark-1-0.db").write_bytes(b"\xff" * 64)
        registry = CollectorRegistry()
        registry.register(DSparkCollector(str(tmp_path)))
        assert total(parse_exposition(generate_latest(registry).decode()), D + "steps_total") == 50


class TestSnapshots:
    def test_difference(self) -> None:
        counter, gauge = Series.of(D + "x_total"), Series.of(D + "budget_tokens")
        old, new = {counter: 5.0, gauge: 2.0}, {counter: 8.0, gauge: 3.0}
        assert difference(new, old) == {counter: 3.0, gauge: 3.0}
        assert difference({counter: 2.0}, old) == {counter: 2.0}

    def test_text_round_trip(self, writer: MetricsWriter) -> None:
        writer.observe_plan(mode="compact", budget_tokens=3, scheduled_tokens=7)
        snapshot = writer.snapshot()
        assert parse_exposition(format_exposition(snapshot)).keys() == snapshot.keys()
        other = 'vllm:num_requests{engine="0"} 4\n'
        assert parse_exposition(other) == {}
        with pytest.raises(ValueError, match="Prometheus"):
            parse_exposition("<html>502 Bad Gateway</html>")

    def test_gauges_are_those_of_the_catalogue(self) -> None:
        assert {m.exported for m in CATALOGUE if m.kind == "gauge"} == GAUGE_SAMPLES


class TestDocuments:
    def test_every_metric_is_documented_as_it_is(self) -> None:
        text = (ROOT / "docs" / "metrics.md").read_text()
        rows = set(re.findall(r"^\| `(vllm:dspark_\w+)` \| (\w+) \| (.*?) \|", text, re.M))
        labels = {m.exported: ", ".join(f"`{x}`" for x in ("engine", *m.labels)) for m in CATALOGUE}
        assert rows == {(m.exported, m.kind, labels[m.exported]) for m in CATALOGUE}

    def test_dashboard_asks_only_for_what_exists(self) -> None:
        board = json.loads((ROOT / "configs" / "grafana-dashboard.json").read_text())
        asked = set(re.findall(r"vllm:dspark_\w+", json.dumps(board["panels"])))
        exported = set()
        for metric in CATALOGUE:
            suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
            exported |= {metric.exported + suffix for suffix in suffixes}
        assert asked and asked <= exported
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])

    def test_names_follow_the_rules(self) -> None:
        assert len({m.name for m in CATALOGUE}) == len(CATALOGUE)
        for metric in CATALOGUE:
            assert re.fullmatch(r"vllm:dspark_[a-z_]+", metric.exported)
            assert metric.help.endswith(".")
            assert not metric.name.endswith("_total")
