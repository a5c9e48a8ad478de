# SPDX-License-Identifier: Apache-2.0
"""`profile` finds known step costs, writes a table that a server accepts, and refuses the rest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_records as synthetic

from vllm_dspark.cli import main, profile
from vllm_dspark.cli.costs import recorded_fingerprint
from vllm_dspark.cli.recorded import from_files
from vllm_dspark.core.cost_io import FingerprintMismatch, load_cost
from vllm_dspark.core.tiers import ExecMode


def test_two_shares_tell_tokens_and_requests_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        synthetic.write(tmp_path / f"{share}.jsonl", synthetic.make_records(300, share, seed))
        for seed, share in enumerate(profile.SHARES)
    ]
    out, plot = tmp_path / "cost.json", tmp_path / "cost.svg"
    arguments = ["profile", *map(str, paths), "--out", str(out), "--plot", str(plot)]
    assert main(arguments) == 0
    cost = load_cost(out, recorded_fingerprint({"fingerprint": synthetic.FINGERPRINT}))
    curve = cost.verify_curve(ExecMode.EAGER)
    slope = float(curve.at(40) - curve.at(20)) / 20
    assert slope == pytest.approx(synthetic.TOKEN_MS, rel=0.1)
    assert cost.request_ms == pytest.approx(synthetic.REQUEST_MS, rel=0.1)
    assert float(curve.at(0)) == pytest.approx(synthetic.FIXED_MS, rel=0.05)
    shown = capsys.readouterr().out
    assert "a fit to 600 recorded steps" in shown
    assert "median error on 600 measured steps" in shown
    assert plot.read_text().count("<circle") > 100


def test_outliers_and_unmeasured_steps_do_not_count(tmp_path: Path) -> None:
    records = synthetic.make_records(400, 0.5)
    for record in records[::10]:
        assert record.measured_ms is not None
        record.measured_ms *= 20
    for record in records[5::10]:
        record.measured_ms = None
    recording = from_files([synthetic.write(tmp_path / "r.jsonl", records)])
    found = profile.make_profile([recording], "auto")
    # Tokens and requests grew together, so only shapes that occurred are priced right.
    ms = float(found.cost.step_ms(np.array([14]), 4)[0])
    expected = synthetic.FIXED_MS + synthetic.TOKEN_MS * 14 + synthetic.REQUEST_MS * 4
    assert ms == pytest.approx(expected, rel=0.05)


def test_graph_steps_are_priced_per_graph(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(500, 0.6, tier=16))
    cost = profile.make_profile([from_files([path])], "steps").cost
    curve = cost.verify_curve(ExecMode.FULL)
    assert curve.sizes.tolist() == [16, 32]
    # Inside a tier tokens are free.
    assert float(curve.at(17)) == float(curve.at(32))


class TestSource:
    def recording(self, tmp_path: Path, ladder: list[int], with_cost: bool) -> Any:
        cost = {
            "format": "vllm-dspark-cost",
            "fingerprint": {},
            "verify": {"full": {"sizes": [8], "ms": [1.0]}},
        }
        return from_files(
            [
                synthetic.write(
                    tmp_path / "r.jsonl",
                    synthetic.make_records(60),
                    fingerprint={**synthetic.FINGERPRINT, "graph_ladder": ladder},
                    cost=cost if with_cost else None,
                )
            ]
        )

    @pytest.mark.parametrize(
        ("ladder", "source", "engines"),
        [([8], "auto", True), ([], "auto", False), ([], "engine", True), ([8], "steps", False)],
    )
    def test_choice(self, ladder: list[int], source: str, engines: bool, tmp_path: Path) -> None:
        found = profile.make_profile([self.recording(tmp_path, ladder, True)], source)
        assert found.origin.startswith("the engine's") == engines

    def test_engine_without_a_profile(self, tmp_path: Path) -> None:
        with pytest.raises(Exception, match="--source steps"):
            profile.make_profile([self.recording(tmp_path, [8], False)], "engine")


def test_a_table_of_another_deployment_is_refused(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(60))
    out = tmp_path / "cost.json"
    assert main(["profile", str(path), "--out", str(out)]) == 0
    here = recorded_fingerprint({"fingerprint": {**synthetic.FINGERPRINT, "tp": 2}})
    with pytest.raises(FingerprintMismatch, match="tp=1, this deployment has tp=2"):
        load_cost(out, here)


class TestBadInput:
    def error(self, capsys: pytest.CaptureFixture[str], path: Path) -> str:
        out = path.with_name("cost.json")
        assert main(["profile", str(path), "--out", str(out)]) == 1
        assert not out.exists()
        return capsys.readouterr().err

    def test_missing_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no such file" in self.error(capsys, tmp_path / "none.jsonl")

    def test_no_fingerprint(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(60), fingerprint=None)
        assert "no fingerprint" in self.error(capsys, path)

    def test_trace(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"confidence": [0.5], "accepted": 1}\n')
        assert "no fingerprint" in self.error(capsys, path)

    def test_too_few_steps(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(5))
        assert "only 5 steps" in self.error(capsys, path)

    def test_steps_of_one_size(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(60, most=1))
        assert "different numbers of concurrent requests" in self.error(capsys, path)

    def test_two_deployments(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        one = from_files([synthetic.write(tmp_path / "a.jsonl", synthetic.make_records(60))])
        other = {**synthetic.FINGERPRINT, "gpu": "another"}
        two = from_files(
            [synthetic.write(tmp_path / "b.jsonl", synthetic.make_records(60), fingerprint=other)]
        )
        with pytest.raises(Exception, match="another deployment"):
            profile.make_profile([one, two], "auto")

    def test_damaged_cost_in_the_header(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(60), cost={"x": 1})
        assert "the cost model in the header" in self.error(capsys, path)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--out", "c.json"],
            ["--out", "c.json", "--model", "m"],
            ["--out", "c.json", "--model", "m", "--draft", "d", "r.jsonl"],
            ["--out", "c.json", "--model", "m", "--draft", "d", "--requests", "1,0"],
            ["r.jsonl"],
        ],
    )
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["profile", *arguments])
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err

    def test_draft_name_needs_gamma(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["profile", "--model", "m", "--draft", "d", "--out", "c.json"]) == 1
        assert "--gamma" in capsys.readouterr().err


def test_server_options_are_valid() -> None:
    """What the command asks its own servers for passes the plugin's own checks."""
    from vllm_dspark.config import DSparkConfig

    for share in (None, *profile.SHARES):
        assert DSparkConfig.parse(profile._options(share)).budget_pin == share


def test_table_is_json_with_a_fingerprint(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(60))
    assert main(["profile", str(path), "--out", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["fingerprint"] == synthetic.FINGERPRINT
