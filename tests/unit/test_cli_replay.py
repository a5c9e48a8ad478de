# SPDX-License-Identifier: Apache-2.0
"""`replay` reproduces what was recorded, predicts other budgets, and refuses foreign tables."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_records as synthetic

from vllm_dspark.cli import main
from vllm_dspark.cli.recorded import from_files
from vllm_dspark.cli.replay import DEFAULT_POLICIES, policy
from vllm_dspark.core.cost_io import Fingerprint, save_cost
from vllm_dspark.core.cost_model import CostModel, Curve
from vllm_dspark.core.policy import SearchMode
from vllm_dspark.core.tiers import ExecMode


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    return synthetic.write(folder / "r.jsonl", synthetic.make_records(600))


def replayed(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    out = tmp_path / "replay.json"
    assert main(["replay", *map(str, arguments), "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def table(path: Path, token_ms: float = 0.5, **changes: Any) -> Path:
    fingerprint = {**synthetic.FINGERPRINT, **changes}
    fingerprint["graph_ladder"] = tuple(fingerprint["graph_ladder"])
    sizes = np.array([1, 64])
    cost = CostModel({ExecMode.FULL: Curve(sizes, 5.0 + token_ms * sizes, limit=0)})
    save_cost(cost, Fingerprint(**fingerprint), path)
    return path


def test_verifying_everything_is_what_was_recorded(recorded: Path, tmp_path: Path) -> None:
    found = replayed(tmp_path, recorded, "--policy", "search=static")
    result = found["policies"][0]
    assert result["accept_length"] == pytest.approx(found["recorded_accept_len"], rel=0.01)
    assert result["drafts_per_request"] == synthetic.GAMMA
    assert result["censored"] == 0


@pytest.mark.parametrize("share", [0.6, 0.3])
def test_pinned_budget_within_five_percent(recorded: Path, share: float, tmp_path: Path) -> None:
    """The prediction from full verification against a server that really was pinned."""
    pinned = synthetic.write(tmp_path / "p.jsonl", synthetic.make_records(600, share, seed=9))
    real = from_files([pinned]).blocks.accept_len
    found = replayed(tmp_path, recorded, "--policy", f"pin={share}")
    assert found["policies"][0]["accept_length"] == pytest.approx(real, rel=0.05)


def test_step_times_come_from_the_records(recorded: Path, tmp_path: Path) -> None:
    found = replayed(tmp_path, recorded, "--policy", "search=static", "--requests", 8)
    result = found["policies"][0]
    tokens = 8 * (synthetic.GAMMA + 1)
    ms = synthetic.FIXED_MS + synthetic.TOKEN_MS * tokens + synthetic.REQUEST_MS * 8
    assert result["cost_table"] == "recorded times"
    assert result["step_ms"] == pytest.approx(ms, rel=0.05)


def test_tables_change_what_pays(recorded: Path, tmp_path: Path) -> None:
    cheap, dear = table(tmp_path / "cheap.json", 1e-4), table(tmp_path / "dear.json", 2.0)
    found = replayed(
        tmp_path, recorded, "--policy", "search=ragged", "--cost-table", cheap, "--cost-table", dear
    )
    by_table = {result["cost_table"]: result for result in found["policies"]}
    assert by_table["cheap.json"]["drafts_per_request"] == synthetic.GAMMA
    assert by_table["dear.json"]["drafts_per_request"] < 0.8 * synthetic.GAMMA
    assert by_table["dear.json"]["trimmed_steps"] > 0


def test_the_servers_graphs_are_used(tmp_path: Path) -> None:
    fingerprint = {**synthetic.FINGERPRINT, "graph_ladder": [8, 16, 32, 64]}
    cost = json.loads(table(tmp_path / "t.json", graph_ladder=[8, 16, 32, 64]).read_text())
    path = synthetic.write(
        tmp_path / "r.jsonl", synthetic.make_records(60), fingerprint=fingerprint, cost=cost
    )
    found = replayed(tmp_path, path, "--policy", "pin=0.5", "--requests", 4)
    assert found["policies"][0]["cost_table"] == "the server's"
    # 4 anchors and 10 drafts run in the graph of 16.
    assert found["policies"][0]["step_ms"] == pytest.approx(5.0 + 0.5 * 16)


def test_trace_without_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "demo" / "trace.jsonl"
    found = replayed(tmp_path, trace)
    assert len(found["policies"]) == len(DEFAULT_POLICIES)
    assert all(result["tokens_per_s"] is None for result in found["policies"])
    assert "no times" in capsys.readouterr().out


def test_trimmed_records_say_where_they_were_looked_past(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(200, 0.4))
    found = replayed(tmp_path, path, "--policy", "search=static", "--policy", "pin=0")
    everything, nothing = found["policies"]
    assert everything["censored"] > 0
    assert nothing["censored"] == 0
    assert nothing["accept_length"] == 1.0


def test_lagged_confidences_are_worth_less(recorded: Path, tmp_path: Path) -> None:
    live = replayed(tmp_path, recorded, "--policy", "pin=0.3")["policies"][0]
    lagged = replayed(tmp_path, recorded, "--policy", "pin=0.3", "--lagged")["policies"][0]
    assert lagged["accept_length"] < live["accept_length"]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("pin=3", "pin", 3),
        ("cap=0.5", "cap", 0.5),
        ("search=uniform", "search", SearchMode.UNIFORM),
    ],
)
def test_policy_text(text: str, name: str, value: object) -> None:
    assert getattr(policy(text)[1], name) == value


@pytest.mark.parametrize("text", ["pin", "turbo=1", "search=fast", "pin=1.5", "cap=x", "pin=nan"])
def test_bad_policy_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        policy(text)


class TestBadInput:
    def error(self, capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
        assert main(["replay", *map(str, arguments)]) == 1
        return capsys.readouterr().err

    def test_missing_table(
        self, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = self.error(capsys, recorded, "--cost-table", tmp_path / "none.json")
        assert "none.json: No such file" in shown

    def test_truncated_table(
        self, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = table(tmp_path / "t.json")
        path.write_text(path.read_text()[:-30])
        assert "t.json: not JSON" in self.error(capsys, recorded, "--cost-table", path)

    @pytest.mark.parametrize(
        "changes", [{"model": "huge (qwen3, 80 layers of 8192)"}, {"gamma": synthetic.GAMMA + 1}]
    )
    def test_table_of_another_model(
        self,
        changes: dict[str, Any],
        recorded: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = table(tmp_path / "t.json", **changes)
        shown = self.error(capsys, recorded, "--cost-table", path)
        name, value = next(iter(changes.items()))
        assert f"measured with {name}={value!r}" in shown

    def test_table_of_another_gpu_is_a_fair_question(self, recorded: Path, tmp_path: Path) -> None:
        path = table(tmp_path / "t.json", gpu="another", tp=8)
        assert main(["replay", str(recorded), "--cost-table", str(path)]) == 0

    def test_table_without_fingerprint(
        self, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = table(tmp_path / "t.json")
        data = json.loads(path.read_text())
        del data["fingerprint"]["dtype"]
        path.write_text(json.dumps(data))
        assert "fingerprint" in self.error(capsys, recorded, "--cost-table", path)

    def test_not_a_table(
        self, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "t.json"
        path.write_text("[]")
        assert "must be an object" in self.error(capsys, recorded, "--cost-table", path)

    def test_calibration_of_another_gamma(
        self, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"temperatures": [1.0, 1.0]}))
        shown = self.error(capsys, recorded, "--calibration", path)
        assert "temperatures: must have 5 values" in shown
        assert "No such file" in self.error(capsys, recorded, "--calibration", tmp_path / "none")

    def test_more_requests_than_blocks(
        self, recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "--requests 100000" in self.error(capsys, recorded, "--requests", 100_000)

    @pytest.mark.parametrize(
        "arguments", [["r.jsonl", "--policy", "pin=2.5"], ["r.jsonl", "--requests", "0"], []]
    )
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["replay", *arguments])
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err
