# SPDX-License-Identifier: Apache-2.0
"""`calibrate` finds a planted error, judges it on requests it has not seen, refuses bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic_records as synthetic

from vllm_dspark.cli import main
from vllm_dspark.cli.calibrate import Errors, reliability_curve
from vllm_dspark.cli.recorded import from_files
from vllm_dspark.core.calibration import REGIME_NAMES
from vllm_dspark.core.calibration_io import load_calibration
from vllm_dspark.records_io import load_records

DEMO_TRACE = Path(__file__).parents[2] / "demo" / "trace.jsonl"


def mean_errors(shown: str) -> tuple[float, float]:
    line = next(line for line in shown.splitlines() if line.startswith("mean ECE"))
    before, _, after = line.partition(": ")[2].partition(" -> ")
    return float(before), float(after)


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_finds_the_planted_scale_and_bias(
    share: float, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = synthetic.write(tmp_path / f"r.{suffix}", synthetic.make_records(1500, share))
    out, plot = tmp_path / "c.json", tmp_path / "c.svg"
    assert main(["calibrate", str(path), "--out", str(out), "--plot", str(plot)]) == 0
    before, after = mean_errors(capsys.readouterr().out)
    assert after < 0.5 * before
    table = load_calibration(out, synthetic.GAMMA)
    # The first two slots have plenty of labels, also where later ones are trimmed.
    assert table.scale[0, :2] == pytest.approx([synthetic.SCALE] * 2, abs=0.2)
    assert table.bias[0, :2] == pytest.approx([synthetic.BIAS] * 2, abs=0.2)
    assert plot.read_text().startswith("<svg")


def test_only_recorded_regimes_change(tmp_path: Path) -> None:
    records = synthetic.make_records(600)
    for record in records:
        record.regimes = np.full(record.num_sampling, 3)
    path = synthetic.write(tmp_path / "r.jsonl", records)
    assert main(["calibrate", str(path), "--out", str(tmp_path / "c.json")]) == 0
    saved = json.loads((tmp_path / "c.json").read_text())
    assert list(saved["regimes"]) == [REGIME_NAMES[3]]


def test_sts_on_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = synthetic.make_records(1200, 1.0) + synthetic.make_records(300, 0.4, seed=5)
    path = synthetic.write(tmp_path / "r.jsonl", records)
    out = tmp_path / "c.json"
    assert main(["calibrate", str(path), "--out", str(out), "--method", "sts"]) == 0
    before, after = mean_errors(capsys.readouterr().out)
    assert after < before
    table = load_calibration(out, synthetic.GAMMA)
    assert (table.bias == 0.0).all()
    assert (table.scale[0] > 1.0).all()


def test_sts_needs_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(100, 0.2, most=8))
    arguments = ["calibrate", str(path), "--out", str(tmp_path / "c.json"), "--method", "sts"]
    assert main(arguments) == 1
    assert "verify: static" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()


def test_demo_trace_holds_for_every_regime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.json"
    assert main(["calibrate", str(DEMO_TRACE), "--out", str(out)]) == 0
    before, after = mean_errors(capsys.readouterr().out)
    assert after < before
    assert set(json.loads(out.read_text())["regimes"]) == set(REGIME_NAMES)


def test_survivals_of_old_records_are_raw(tmp_path: Path) -> None:
    records = synthetic.make_records(200)
    new = from_files([synthetic.write(tmp_path / "new.jsonl", records)])
    for record in records:
        record.confidence = record.regimes = None
    old = from_files([synthetic.write(tmp_path / "old.jsonl", records)])
    assert old.blocks.regimes is None
    assert np.abs(old.blocks.confidence - new.blocks.confidence).max() < 0.02


def test_no_gain_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels without any relation to the confidences of the other half."""
    records = synthetic.make_records(400, seed=3)
    for record in records:
        odd = int(record.request_ids[0].rpartition("-")[2]) % 2 if record.request_ids else 0
        record.accepted = np.full(record.num_sampling, synthetic.GAMMA if odd else 0)
    for record in records:
        record.request_ids = [f"q{int(record.step) // 20}"] * record.num_sampling
    path = synthetic.write(tmp_path / "r.jsonl", records)
    out = tmp_path / "c.json"
    assert main(["calibrate", str(path), "--out", str(out)]) == 1
    assert "nothing saved" in capsys.readouterr().out
    assert not out.exists()
    assert main(["calibrate", str(path), "--out", str(out), "--force"]) == 0
    assert out.exists()


def test_unverified_slots_do_not_count(tmp_path: Path) -> None:
    """A rejection settles later slots, but only of rejected blocks: counting them would bias."""
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(300, 0.3))
    blocks = from_files([path]).blocks
    errors = Errors.of(blocks.survivals, blocks, np.ones(len(blocks), dtype=np.bool_))
    assert errors.count.tolist() == [
        int((blocks.verified > k).sum()) for k in range(synthetic.GAMMA)
    ]


def test_reliability_curve_is_ordered() -> None:
    predicted = np.linspace(0.0, 1.0, 100)
    x, y = reliability_curve(predicted, predicted > 0.5, points=4)
    assert x.tolist() == sorted(x.tolist())
    assert y[0] == 0.0
    assert y[-1] == 1.0


class TestBadInput:
    def run(self, capsys: pytest.CaptureFixture[str], *files: Path, tmp_path: Path) -> str:
        assert main(["calibrate", *map(str, files), "--out", str(tmp_path / "c.json")]) == 1
        assert not (tmp_path / "c.json").exists()
        return capsys.readouterr().err

    def test_missing_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "none.jsonl"
        assert f"{path}: no such file" in self.run(capsys, path, tmp_path=tmp_path)

    def test_empty_records(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = synthetic.write(tmp_path / "r.jsonl", [])
        assert "holds no records" in self.run(capsys, path, tmp_path=tmp_path)

    def test_truncated(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(30))
        path.write_text(path.read_text()[:-40])
        assert "looks truncated" in self.run(capsys, path, tmp_path=tmp_path)

    def test_neither_records_nor_trace(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text('{"prompt": "a"}\n')
        assert "not a record file" in self.run(capsys, path, tmp_path=tmp_path)

    def test_bad_trace_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"confidence": [0.5, 0.4], "accepted": 1}\n{"confidence": [0.5]}\n')
        shown = self.run(capsys, path, tmp_path=tmp_path)
        assert f"{path}: trace line 2" in shown

    def test_another_suffix(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "r.csv"
        path.write_text("a,b\n")
        assert "allowed: .jsonl, .parquet" in self.run(capsys, path, tmp_path=tmp_path)

    def test_steps_without_drafts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        records = synthetic.make_records(20)
        for record in records:
            record.accepted = None
        path = synthetic.write(tmp_path / "r.jsonl", records)
        assert "verified a draft" in self.run(capsys, path, tmp_path=tmp_path)

    def test_too_few_blocks(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(10, most=1))
        assert "10 blocks, at least 128" in self.run(capsys, path, tmp_path=tmp_path)

    def test_files_of_two_models(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        records = synthetic.make_records(30)
        one = synthetic.write(tmp_path / "a.jsonl", records)
        two = synthetic.write(tmp_path / "b.jsonl", records, model="models/other")
        shown = self.run(capsys, one, two, tmp_path=tmp_path)
        assert f"{two}: model is 'models/other'" in shown

    @pytest.mark.parametrize(
        "arguments",
        [
            ["calibrate"],
            ["calibrate", "--out", "c.json"],
            ["calibrate", "r.jsonl", "--from-server", "--out", "c.json"],
            ["calibrate", "r.jsonl", "--out", "c.json", "--method", "magic"],
            ["calibrate", "r.jsonl", "--out", "c.json", "--bins", "1"],
        ],
    )
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err

    def test_no_running_server(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vllm_dspark.metrics_export.running_servers", dict)
        for pid in ([], ["1"]):
            arguments = ["calibrate", "--out", str(tmp_path / "c.json"), "--from-server", *pid]
            assert main(arguments) == 1
            assert "run on this machine: none" in capsys.readouterr().err


def test_records_keep_confidence_and_regimes(tmp_path: Path) -> None:
    records = synthetic.make_records(3)
    loaded = load_records(str(synthetic.write(tmp_path / "r.jsonl", records))).records
    for wrote, read in zip(records, loaded, strict=True):
        assert read.confidence == pytest.approx(wrote.confidence, abs=1e-5)
        assert (read.regimes == wrote.regimes).all()
