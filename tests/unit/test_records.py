# SPDX-License-Identifier: Apache-2.0
"""Records survive the ring and the files unchanged; a bad file is refused by name and line."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_dspark.records import (
    RecordAnswerer,
    RecordRing,
    RecordSaver,
    StepRecord,
    request_records,
)
from vllm_dspark.records_io import MissingParquetError, RecordError, load_records


def make(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "time_s": 1000.0 + step,
        "num_reqs": 3,
        "num_sampling": 2,
        "base_tokens": 5,
        "scheduled": np.array([7, 7], dtype=np.int32),
        "budget": 9,
        "lag_steps": 1,
        "mode": "compact",
        "reason": "gain",
        "tier_tokens": 16,
        "verify_lens": np.array([8, 3]),
        "survivals": np.linspace(1.0, 0.1, 14).reshape(2, 7).astype(np.float32),
        "predicted_ms": 4.25,
        "request_ids": ["a", "b"],
    }
    return StepRecord(**{**values, **changes})


def same(left: StepRecord, right: StepRecord) -> bool:
    for name in StepRecord.__slots__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            if b is None or not np.allclose(a, b, atol=1e-5, equal_nan=True):
                return False
        elif a != b:
            return False
    return True


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    ring = RecordRing(10, {"gamma": 7})
    for step in range(3):
        ring.add(make(step))
    path = tmp_path / "records.jsonl"
    assert ring.dump(str(path)) == 3
    return path


class TestRing:
    def test_keeps_the_newest(self) -> None:
        ring = RecordRing(4)
        for step in range(10):
            ring.add(make(step))
        assert [r.step for r in ring.tail()] == [6, 7, 8, 9]
        assert [r.step for r in ring.tail(2)] == [8, 9]
        assert ring.tail(0) == []
        assert len(ring) == 4

    def test_late_outcomes_find_their_step(self) -> None:
        ring = RecordRing(3)
        for step in range(5):
            ring.add(make(step, verify_lens=None))
            if step >= 2:
                attached = ring.attach(
                    step - 2, accepted=np.array([step, 0]), verify_lens=[8, 1], measured_ms=2.0
                )
                assert attached
        first, second, third = ring.tail()
        assert first.accepted.tolist() == [4, 0]
        assert first.verify_lens.tolist() == [8, 1]
        assert first.measured_ms == 2.0
        assert second.accepted is None and third.accepted is None

    def test_outcome_of_a_forgotten_step_is_counted(self) -> None:
        ring = RecordRing(1)
        ring.add(make(1))
        ring.add(make(2))
        assert not ring.attach(1, accepted=np.array([1, 1]))
        assert ring.orphans == 1
        assert ring.tail()[0].accepted is None

    def test_copies_what_the_next_step_overwrites(self) -> None:
        ring = RecordRing(2)
        buffer, accepts = np.array([7, 7]), np.array([3, 4])
        ring.add(make(1, scheduled=buffer))
        ring.attach(1, accepted=accepts)
        buffer[:] = accepts[:] = 0
        record = ring.tail()[0]
        assert record.scheduled.tolist() == [7, 7]
        assert record.accepted.tolist() == [3, 4]

    def test_same_step_again_replaces(self) -> None:
        ring = RecordRing(2)
        for reason in ("first", "second"):
            ring.add(make(1, reason=reason))
        assert [(r.step, r.reason) for r in ring.tail()] == [(1, "second")]
        ring.add(make(2))
        ring.add(make(3))
        assert [r.step for r in ring.tail()] == [2, 3]

    def test_capacity_is_checked(self) -> None:
        with pytest.raises(ValueError, match="capacity is 0"):
            RecordRing(0)


class TestFiles:
    @pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
    def test_round_trip(self, tmp_path: Path, suffix: str) -> None:
        survivals = np.full((2, 7), 0.5)
        survivals[1, 2:] = np.nan
        records = [
            make(1, accepted=np.array([7, 1]), measured_ms=4.5, sync_ms=0.05),
            make(2, survivals=survivals, verify_lens=None, request_ids=None, predicted_ms=None),
            make(
                3,
                num_sampling=0,
                scheduled=np.zeros(0, np.int32),
                verify_lens=np.zeros(0, np.int32),
                survivals=None,
                request_ids=[],
                budget=-1,
            ),
        ]
        ring = RecordRing(5, {"gamma": 7, "model": "m"})
        for record in records:
            ring.add(record)
        path = str(tmp_path / f"records.{suffix}")
        assert ring.dump(path) == 3
        loaded = load_records(path)
        assert loaded.meta == {"gamma": 7, "model": "m"}
        assert len(loaded) == 3
        for before, after in zip(records, loaded, strict=True):
            assert same(before, after)
        assert [p.name for p in tmp_path.iterdir()] == [f"records.{suffix}"]

    def test_parquet_without_pyarrow_names_the_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        ring = RecordRing(1)
        ring.add(make(1))
        with pytest.raises(MissingParquetError, match=r"vllm-dspark\[parquet\]"):
            ring.dump(str(tmp_path / "records.parquet"))
        (tmp_path / "old.parquet").write_bytes(b"")
        with pytest.raises(MissingParquetError, match=r"vllm-dspark\[parquet\]"):
            load_records(str(tmp_path / "old.parquet"))

    def test_failed_dump_keeps_the_old_file(self, dumped: Path) -> None:
        before = dumped.read_text()
        ring = RecordRing(1)
        ring.add(make(1, request_ids=[object()]))
        with pytest.raises(TypeError):
            ring.dump(str(dumped))
        assert dumped.read_text() == before
        assert [p.name for p in dumped.parent.iterdir()] == [dumped.name]

    def test_other_suffix_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"'\.pkl'; allowed: \.jsonl, \.parquet"):
            RecordRing(1).dump(str(tmp_path / "records.pkl"))


class TestBadFiles:
    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
            load_records(str(tmp_path / "absent.jsonl"))

    def test_truncated_line(self, dumped: Path) -> None:
        dumped.write_text(dumped.read_text()[:-40])
        with pytest.raises(RecordError, match=r"records\.jsonl, line 4: .*truncated"):
            load_records(str(dumped))

    def test_empty_file_and_no_records(self, dumped: Path) -> None:
        header = dumped.read_text().splitlines()[0]
        dumped.write_text(header + "\n")
        with pytest.raises(RecordError, match="holds no records"):
            load_records(str(dumped))
        dumped.write_text("")
        with pytest.raises(RecordError, match="the file is empty"):
            load_records(str(dumped))

    @pytest.mark.parametrize(
        ("header", "message"),
        [({"confidence": [0.5]}, "not a record file"), ([1], "not a record file")],
    )
    def test_another_format(self, dumped: Path, header: Any, message: str) -> None:
        dumped.write_text(json.dumps(header) + "\n")
        with pytest.raises(RecordError, match=message):
            load_records(str(dumped))

    def test_another_version(self, dumped: Path) -> None:
        dumped.write_text(dumped.read_text().replace('"version": 1', '"version": 99'))
        with pytest.raises(RecordError, match="version 99; readable: 1"):
            load_records(str(dumped))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"budget": ...}, "field 'budget' is missing"),
            ({"surprise": 1}, "unknown field 'surprise'"),
            ({"step": "one"}, "step is 'one'; allowed: an integer"),
            ({"step": True}, "step is True"),
            ({"mode": 3}, "mode is 3; allowed: a string"),
            ({"time_s": None}, "time_s is None; allowed: a number"),
            ({"measured_ms": "fast"}, "measured_ms is 'fast'"),
            ({"scheduled": None}, "scheduled must be a list of 2 integers"),
            ({"accepted": [1]}, "accepted must be a list of 2 integers"),
            ({"accepted": [1, None]}, "accepted holds something that is not an integer"),
            ({"verify_lens": [1.5, 2]}, "verify_lens holds something"),
            ({"survivals": [[0.5], [0.5, 0.4]]}, "survivals must be a list of 2 equally long"),
        ],
    )
    def test_bad_field_names_file_and_line(
        self, dumped: Path, change: dict[str, Any], message: str
    ) -> None:
        rows = lines(dumped)
        rows[2].update(change)
        rows[2] = {key: value for key, value in rows[2].items() if value is not ...}
        dumped.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(RecordError, match=message) as caught:
            load_records(str(dumped))
        assert f"{dumped}, line 3: " in str(caught.value)

    def test_parquet_of_somebody_else(self, tmp_path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "other.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path)
        with pytest.raises(RecordError, match="not a record file"):
            load_records(str(path))
        path.write_bytes(b"PAR1 but not really")
        with pytest.raises(RecordError, match="not a readable Parquet file"):
            load_records(str(path))


class TestOnDemand:
    def test_engines_answer_while_running(self, tmp_path: Path) -> None:
        rings = [RecordRing(4, {"engine": engine}) for engine in range(2)]
        stop = threading.Event()

        def serve() -> None:
            answerers = [RecordAnswerer(r, str(tmp_path), e) for e, r in enumerate(rings)]
            step = 0
            while not stop.wait(0.005):
                for ring, answerer in zip(rings, answerers, strict=True):
                    ring.add(make(step))
                    answerer.poll()
                step += 1

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            first = request_records(str(tmp_path))
            newest = [load_records(path).records[-1].step for path in first]
            second = request_records(str(tmp_path))
        finally:
            stop.set()
            thread.join()
        assert [Path(p).name for p in first] == ["records-engine0.jsonl", "records-engine1.jsonl"]
        assert first == second
        for engine, (path, before) in enumerate(zip(second, newest, strict=True)):
            loaded = load_records(path)
            assert loaded.meta == {"engine": engine}
            assert loaded.records[-1].step > before

    def test_nobody_answers(self, tmp_path: Path) -> None:
        with pytest.raises(TimeoutError, match="are records on"):
            request_records(str(tmp_path), timeout_s=0.1)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(FileNotFoundError, match="absent"):
            request_records(str(tmp_path / "absent"))

    def test_one_request_is_answered_once(self, tmp_path: Path) -> None:
        ring = RecordRing(3)
        for step in range(3):
            ring.add(make(step))
        answerer = RecordAnswerer(ring, str(tmp_path), 0, newest=2)
        assert not answerer.poll()
        (tmp_path / "records.request").write_text("1.0\n")
        assert answerer.poll() and not answerer.poll()
        answer = load_records(str(tmp_path / "records-engine0.jsonl"))
        assert [record.step for record in answer] == [1, 2]
        (tmp_path / "records.request").write_text("2.0\n")
        assert answerer.poll()


def test_live_meta_is_asked_for_at_every_dump(tmp_path: Path) -> None:
    versions = iter((1, 2))
    ring = RecordRing(4, {"gamma": 7}, lambda: {"version_in_use": next(versions)})
    ring.add(make(0))
    path = str(tmp_path / "r.jsonl")
    for expected in (1, 2):
        ring.dump(path)
        assert load_records(path).meta == {"gamma": 7, "version_in_use": expected}


class TestSaver:
    def test_saves_once_when_nothing_changes_any_more(self, tmp_path: Path) -> None:
        ring, path = RecordRing(4), tmp_path / "r.jsonl"
        saver = RecordSaver(ring, str(path), idle_s=0.02)
        assert not saver.poll()
        ring.add(make(0))
        assert not saver.poll(), "the server is still busy"
        time.sleep(0.03)
        assert saver.poll()
        assert not saver.poll()
        ring.attach(0, accepted=np.array([1, 2]))
        assert not saver.poll()
        time.sleep(0.03)
        assert saver.poll()
        (record,) = load_records(str(path)).records
        assert record.accepted is not None

    def test_a_file_that_cannot_be_written_is_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ring = RecordRing(4)
        ring.add(make(0))
        RecordSaver(ring, str(tmp_path / "nowhere" / "r.jsonl")).save()
        RecordSaver(ring, str(tmp_path / "r.csv")).save()
        assert caplog.text.count("cannot be written") == 2
