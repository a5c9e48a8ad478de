# SPDX-License-Identifier: Apache-2.0
"""`report` says what was recorded, answers its two questions, and needs nothing from outside."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import synthetic_records as synthetic

from vllm_dspark.cli import main
from vllm_dspark.cli import report_views as views
from vllm_dspark.cli.charts import Chart, ticks
from vllm_dspark.cli.record_metrics import snapshot_of
from vllm_dspark.cli.recorded import from_files
from vllm_dspark.cli.report import compare
from vllm_dspark.core.plan import PlanReason
from vllm_dspark.core.survival import RowDoubt
from vllm_dspark.metrics_snapshot import Snapshot, format_exposition, total


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    return synthetic.write(folder / "r.jsonl", synthetic.make_records(300, 0.5))


def page(tmp_path: Path, *arguments: object) -> str:
    out = tmp_path / "report.html"
    assert main(["report", *map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def exposition(snapshot: Snapshot) -> str:
    return format_exposition(snapshot)


class _Checker(HTMLParser):
    """Every opened element is closed, nothing is loaded, no script runs."""

    VOID = ("meta", "rect", "line", "polyline", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_whole_and_self_contained(trimmed: Path, tmp_path: Path) -> None:
    html = page(tmp_path, trimmed)
    checker = _Checker()
    checker.feed(html)
    assert checker.open == []
    assert checker.tags.count("svg") >= 8
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "nan" not in svg.lower().replace("predominant", "")


def test_answers(trimmed: Path, tmp_path: Path) -> None:
    html = page(tmp_path, trimmed)
    blocks = from_files([trimmed]).blocks
    assert f"<b>{blocks.accept_len:.2f}</b>" in html
    assert re.search(r"(Yes|No)[ :(]", html)
    assert "trimmed" in html
    assert views.REASONS["trimmed"] in html
    for title in (
        "Budget over time",
        "Verify length",
        "Acceptance by position",
        "Calibration",
        "What decided the budget",
        "Step-time error",
        "Step time",
    ):
        assert f">{title}</text>" in html


def test_comparison_is_on_one_basis(tmp_path: Path) -> None:
    """Recorded with everything verified, "as recorded" and "verify everything" are the same."""
    path = synthetic.write(tmp_path / "r.jsonl", synthetic.make_records(500))
    comparison = compare(from_files([path]))
    assert comparison is not None
    everything = comparison.others["verify everything"].tokens_per_s
    assert comparison.recorded_rate == pytest.approx(everything, rel=0.02)
    assert comparison.others["verify nothing"].accept_length == 1.0
    assert comparison.measured_rate > 0


def test_no_comparison_without_step_times(tmp_path: Path) -> None:
    records = synthetic.make_records(100)
    for record in records:
        record.measured_ms = None
    html = page(tmp_path, synthetic.write(tmp_path / "r.jsonl", records))
    assert "Too few step times" in html


def test_metrics_alone(trimmed: Path, tmp_path: Path) -> None:
    recording = from_files([trimmed])
    saved = tmp_path / "metrics.prom"
    saved.write_text(exposition(snapshot_of(recording.records, synthetic.GAMMA)))
    html = page(tmp_path, "--metrics", saved)
    assert f"<b>{recording.blocks.accept_len:.2f}</b>" in html
    assert "give step records" in html
    assert "Budget over time" not in html
    assert "values that differed between ranks" in html


def test_alarms_are_shown(tmp_path: Path) -> None:
    records = synthetic.make_records(300)
    for record in records:
        record.accepted = record.accepted * 0  # type: ignore[operator]
    html = page(tmp_path, synthetic.write(tmp_path / "r.jsonl", records))
    assert re.search(r'class="alarm">acceptance: only 0.0%', html)
    few = page(tmp_path, synthetic.write(tmp_path / "few.jsonl", records[:20]))
    assert "Too little to judge: 20 steps, 100 are needed" in few


def test_counters_of_records_add_up(trimmed: Path) -> None:
    recording = from_files([trimmed])
    snapshot = snapshot_of(recording.records, synthetic.GAMMA)
    d = views.D + "draft_tokens_"
    scheduled, admitted, lost, accepted, rejected = (
        total(snapshot, f"{d}{name}_total")
        for name in ("scheduled", "admitted", "trimmed", "accepted", "rejected")
    )
    assert scheduled == admitted + lost == len(recording.blocks) * synthetic.GAMMA
    assert admitted == accepted + rejected == recording.blocks.verified.sum()
    totals = views.Totals.of(snapshot)
    assert totals.accept_len == pytest.approx(recording.blocks.accept_len)


@pytest.mark.parametrize(("share", "bypassed"), [(0.0, 40), (0.5, 0)])
def test_bypass_steps_of_records_are_those_that_verify_nothing(share: float, bypassed: int) -> None:
    snapshot = snapshot_of(synthetic.make_records(40, share), synthetic.GAMMA)
    assert total(snapshot, views.D + "bypass_steps_total") == bypassed


def test_conditional_acceptance_needs_blocks_where_drafts_are_trimmed(trimmed: Path) -> None:
    recording = from_files([trimmed])
    snapshot = snapshot_of(recording.records, synthetic.GAMMA)
    by_counts = views.positions(snapshot)[-1].conditional
    by_blocks = views.positions(snapshot, recording.blocks)[-1].conditional
    assert by_counts != by_counts
    assert 0.0 < by_blocks <= 1.0


def test_every_reason_and_doubt_is_explained() -> None:
    assert set(views.REASONS) == {reason.value for reason in PlanReason}
    assert set(views.DOUBTS) == {doubt.name.lower() for doubt in RowDoubt if doubt}


class TestBadInput:
    def error(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: object) -> str:
        out = tmp_path / "report.html"
        assert main(["report", *map(str, arguments), "--out", str(out)]) == 1
        assert not out.exists()
        return capsys.readouterr().err

    def test_missing_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no such file" in self.error(capsys, tmp_path, tmp_path / "none.jsonl")
        shown = self.error(capsys, tmp_path, "--metrics", tmp_path / "none.prom")
        assert "No such file" in shown

    def test_server_that_does_not_answer(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = self.error(capsys, tmp_path, "--metrics", "http://127.0.0.1:1")
        assert "Connection refused" in shown

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [("other_total 3.0\n", "no vllm:dspark_"), ("{not metrics", "not a Prometheus text page")],
    )
    def test_other_text(
        self, text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "m.prom"
        path.write_text(text)
        assert complaint in self.error(capsys, tmp_path, "--metrics", path)

    def test_truncated_records(
        self, trimmed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text(trimmed.read_text()[:-30])
        assert "truncated" in self.error(capsys, tmp_path, path)

    def test_folder_that_does_not_exist(
        self, trimmed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "nowhere" / "report.html"
        assert main(["report", str(trimmed), "--out", str(out)]) == 1
        assert "No such file or directory" in capsys.readouterr().err

    @pytest.mark.parametrize("arguments", [["--out", "r.html"], ["r.jsonl"]])
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["report", *arguments])
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err


class TestChart:
    def test_text_is_escaped(self) -> None:
        svg = Chart("a < b & c").bars([1.0]).svg()
        assert "a &lt; b &amp; c" in svg
        ElementTree.fromstring(svg)

    def test_nothing_to_show(self) -> None:
        chart = Chart("empty").line([1.0, float("nan")], [float("nan"), 2.0])
        assert chart.empty
        assert "no data" in chart.svg()
        assert Chart("no steps").bars([0.0, 0.0]).empty

    def test_one_point_and_one_value(self) -> None:
        assert "<circle" in Chart("one").dots([3.0], [3.0]).svg()
        assert "<polyline" in Chart("flat").line([1.0, 2.0], [0.0, 0.0]).svg()

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3.0, 97.0, [20.0, 40.0, 60.0, 80.0])],
    )
    def test_ticks_are_round(self, low: float, high: float, expected: list[float]) -> None:
        assert ticks(low, high) == pytest.approx(expected)
