# SPDX-License-Identifier: Apache-2.0
"""A new operator's day on real servers: load one, read its metrics, run every command on it.

Two servers of the demo pair take part: one verifies everything and is recorded; the other is pinned
to half of the drafts and uses the calibration and the cost table that were made from the first.
Their drafter is the demo pair's with a confidence head that promises too much: the pair's own is so
well calibrated that some hundred blocks do not always show a gain.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from vllm_dspark.cli import demo, main
from vllm_dspark.cli.counters import settled
from vllm_dspark.cli.record_metrics import snapshot_of
from vllm_dspark.cli.recorded import Recording, from_files, server_directory
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client, read_prompts
from vllm_dspark.core.calibration import REGIME_NAMES
from vllm_dspark.metrics_snapshot import Snapshot, by_label, parse_exposition, total
from vllm_dspark.metrics_sums import RELIABILITY_BINS
from vllm_dspark.records import request_records

pytestmark = pytest.mark.slow

PROMPTS, TOKENS, CONCURRENCY = 64, 48, 8
PIN = 0.5
PROMISE = 1.5
"""Added to the logit of every confidence."""
RECORDED = {"strict": True, "records": 4000}
D = "vllm:dspark_"
NOT_RECORDED = (
    "overhead",
    "host",
    "sync",
    "full_verify_rows",
    "rank_disagreements",
    "accept_steps",
)
"""Series that records do not hold: about the host, ranks, doubt, and what accepted a batch."""
RELIABILITY = tuple(f"{D}reliability_{name}_total" for name in ("drafts", "predicted", "observed"))
ROUNDING = 1e-5
"""Of survivals in record files."""
ONE_RANK = {"OMP_NUM_THREADS": "1"}
TWO_RANKS = {**ONE_RANK, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@dataclass(frozen=True)
class Served:
    """A loaded server: its counters at rest and its records."""

    server: Server
    metrics: Snapshot
    records: Path

    @property
    def recording(self) -> Recording:
        return from_files([self.records])


@contextmanager
def served(
    folder: Path,
    dspark: dict[str, Any],
    *extra: str,
    load: Callable[[Client], None],
    environment: Mapping[str, str] = ONE_RANK,
) -> Iterator[Served]:
    draft = demo.speculative_config(overconfident_draft(folder / "draft"))
    options = replace(
        demo.pair_options(dspark={**RECORDED, **dspark}, extra=extra), speculative=draft
    )
    log = folder / "server.log"
    with Server(options, log, on_gpu=demo.gpu_present(), environment=environment) as server:
        server.wait_ready()
        load(Client(server.url, demo.SERVED_NAME))
        settled(server.metrics_text)
        metrics = parse_exposition(server.metrics_text())
        (answer,) = request_records(server_directory(server.pid))
        # The answer is overwritten by the next one who asks.
        records = folder / "records.jsonl"
        records.write_bytes(Path(answer).read_bytes())
        yield Served(server, metrics, records)
        server.check_alive()


def overconfident_draft(folder: Path) -> Path:
    """The demo drafter in `folder`, its confidences raised."""
    shutil.copytree(demo.DEMO_FOLDER / "draft", folder)
    weights = load_file(folder / "model.safetensors")
    weights["confidence_head.proj.bias"] += PROMISE
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def greedy_load(client: Client) -> None:
    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", PROMPTS)
    client.greedy_all(prompts, TOKENS, CONCURRENCY)


def mixed_load(client: Client) -> None:
    for check in client.checks().values():
        check()
    greedy_load(client)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Verifies everything, mixed requests first."""
    folder = tmp_path_factory.mktemp("full")
    with served(folder, {"budget_floor": 1.0}, load=mixed_load) as running:
        yield running


@pytest.fixture(scope="module")
def tables(full: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration and cost table made from the running server by the commands."""
    folder = tmp_path_factory.mktemp("tables")
    found = {"calibration": folder / "calibration.json", "cost_table": folder / "cost.json"}
    server = ["--from-server", str(full.server.pid)]
    calibrate = ["calibrate", *server, "--out", str(found["calibration"])]
    assert main([*calibrate, "--plot", str(folder / "reliability.svg")]) == 0
    profile = ["profile", *server, "--out", str(found["cost_table"])]
    assert main([*profile, "--plot", str(folder / "cost.svg")]) == 0
    for plot in ("reliability.svg", "cost.svg"):
        assert (folder / plot).read_text().startswith("<svg")
    return found


@pytest.fixture(scope="module")
def pinned(tables: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Verifies half of the drafts, with the tables of the other server."""
    options = {name: str(path) for name, path in tables.items()}
    options |= {"verify": "compact", "lens": "host", "budget_pin": PIN, "cost_correction": False}
    folder = tmp_path_factory.mktemp("pinned")
    with served(folder, options, load=greedy_load) as running:
        yield running


def add_up(metrics: Snapshot) -> dict[str, float]:
    """Token counters, checked against each other."""
    names = ("scheduled", "admitted", "trimmed", "accepted", "rejected")
    tokens = {name: total(metrics, f"{D}draft_tokens_{name}_total") for name in names}
    assert tokens["scheduled"] == tokens["admitted"] + tokens["trimmed"]
    assert tokens["admitted"] == tokens["accepted"] + tokens["rejected"]
    rows = total(metrics, D + "verify_len_count")
    assert total(metrics, D + "verify_len_sum") == tokens["admitted"] + rows
    assert total(metrics, D + "committed_tokens_total") == tokens["accepted"] + rows
    for name in ("scheduled", "admitted", "accepted"):
        assert total(metrics, f"{D}position_{name}_total") == tokens[name]
    assert total(metrics, D + "invalid_observations_total") == 0
    return tokens


def assert_metrics_equal_records(metrics: Snapshot, recording: Recording) -> None:
    """Every published series but those that records do not hold."""
    counted = snapshot_of(recording.records, recording.gamma, reliability_every=4)
    published = {
        series: value
        for series, value in metrics.items()
        if not series.name.startswith(tuple(D + name for name in NOT_RECORDED))
    }
    assert len(published) > 100
    edges = survivals_at_edges(recording)
    differing = {
        str(series): (value, counted.get(series))
        for series, value in published.items()
        # Survivals are rounded in files, so their sums differ in the last digits.
        if not abs(counted.get(series, np.nan) - value)
        <= max(1e-4 * value, 1e-3) + edges.get(series.labels, 0)
    }
    assert differing == {}
    for name in RELIABILITY:
        by_position = by_label(metrics, name, "position")
        assert by_label(counted, name, "position") == pytest.approx(by_position, 1e-4, 1e-3)


def survivals_at_edges(recording: Recording) -> dict[tuple[tuple[str, str], ...], int]:
    """How many survivals rounding may have moved into a bin or out of it, by a bin's labels.

    A bin's count, and a sum of values up to one, can differ by as many.
    """
    survivals = recording.blocks.survivals
    moved: dict[tuple[tuple[str, str], ...], int] = {}
    for position in range(recording.gamma):
        for lower in range(RELIABILITY_BINS):
            ends = np.array([lower, lower + 1]) / RELIABILITY_BINS
            near = np.abs(survivals[:, position, None] - ends) <= ROUNDING
            bin_labels = {"bin": str(ends[0]), "engine": "0", "position": str(position)}
            moved[tuple(sorted(bin_labels.items()))] = int(near.sum())
    return moved


class TestRecordedServer:
    def test_counters_add_up(self, full: Served) -> None:
        tokens = add_up(full.metrics)
        assert tokens["trimmed"] == 0
        assert 0 < tokens["accepted"] < tokens["admitted"]

    def test_metrics_equal_the_records(self, full: Served) -> None:
        assert_metrics_equal_records(full.metrics, full.recording)

    def test_records_tell_regimes_apart(self, full: Served) -> None:
        regimes = full.recording.blocks.regimes
        assert regimes is not None
        names = {REGIME_NAMES[regime] for regime in np.unique(regimes)}
        assert {"greedy/T<=0", "greedy/T<=0.9"} <= names

    def test_calibration_lowers_the_held_out_error(
        self, full: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["calibrate", str(full.records), "--out", str(tmp_path / "c.json")]
        assert main(arguments) == 0
        line = capsys.readouterr().out.partition("mean ECE on the held-out half: ")[2]
        before, after = map(float, line.splitlines()[0].split(" -> "))
        assert after < 0.75 * before

    def test_report_of_the_running_server(self, full: Served, tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        arguments = ["report", "--from-server", str(full.server.pid), "--out", str(out)]
        assert main(arguments) == 0
        html = out.read_text()
        accept_len = full.recording.blocks.accept_len
        assert f"<b>{accept_len:.2f}</b>" in html
        assert "Budget over time" in html
        # Doubt comes from metrics alone: every request is fresh once.
        assert "no confidence of this request yet" in html

    def test_report_from_the_metrics_page(self, full: Served, tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        assert main(["report", "--metrics", full.server.url, "--out", str(out)]) == 0
        assert "Acceptance by position" in out.read_text()


class TestPinnedServer:
    def test_counters_add_up(self, pinned: Served) -> None:
        tokens = add_up(pinned.metrics)
        assert tokens["admitted"] == pytest.approx(PIN * tokens["scheduled"], rel=0.03)

    def test_metrics_equal_the_records(self, pinned: Served) -> None:
        assert_metrics_equal_records(pinned.metrics, pinned.recording)

    def test_replay_predicts_the_accept_length(
        self, full: Served, tables: dict[str, Path], pinned: Served, tmp_path: Path
    ) -> None:
        out = tmp_path / "replay.json"
        arguments = ["replay", str(full.records), "--policy", f"pin={PIN}", "--json", str(out)]
        assert main([*arguments, "--calibration", str(tables["calibration"])]) == 0
        (result,) = json.loads(out.read_text())["policies"]
        real = pinned.recording.blocks.accept_len
        assert result["accept_length"] == pytest.approx(real, rel=0.05)

    def test_the_cost_table_is_in_use(self, tables: dict[str, Path], pinned: Served) -> None:
        table = json.loads(tables["cost_table"].read_text())
        in_use = pinned.recording.meta["cost"]
        assert in_use["verify"] == table["verify"]
        assert in_use["request_ms"] == table["request_ms"]
        assert all(record.predicted_ms for record in pinned.recording.records)

    def test_the_calibration_is_in_use(self, pinned: Served) -> None:
        blocks = pinned.recording.blocks
        raw = np.cumprod(blocks.confidence, axis=1)
        assert np.nanmean(np.abs(blocks.survivals - raw)) > 0.005


def test_two_ranks_one_decision(tmp_path: Path) -> None:
    """TP=2: `/metrics` equals the records, both ranks are visible, the file is kept up to date.

    The file matters because vLLM kills its workers without letting them write at exit.
    """
    path = tmp_path / "kept.parquet"

    def load(client: Client) -> None:
        client.greedy_all(read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", 8), 16, 4)

    options = {"verify": "compact", "budget_pin": PIN, "records_path": str(path)}
    two = ("--tensor-parallel-size", "2")
    with served(tmp_path, options, *two, load=load, environment=TWO_RANKS) as running:
        add_up(running.metrics)
        recording = running.recording
        assert_metrics_equal_records(running.metrics, recording)
        ranks = {
            dict(series.labels)["rank"]
            for series in running.metrics
            if series.name == D + "overhead_seconds_total"
        }
        assert ranks == {"0", "1"}
        assert recording.meta["fingerprint"]["tp"] == 2
    assert len(from_files([path]).records) == len(recording.records)
