# SPDX-License-Identifier: Apache-2.0
"""The GPU suite's parts and the one file that is made of what they found."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import h200_correctness as suite
import pytest


def part(**found: Any) -> dict[str, Any]:
    header = {"machine": {"gpu": "a"}, "versions": {}, "commit": "c", "command": "pytest"}
    counts = {"passed": 1, "failed": 0, "skipped": 0, "jit_events_in_traffic": 0}
    return {**header, **counts, "seconds": 2.0, "modes": {}, "failures": [], **found}


def mode(accept_len: float | None, *, same_drafts: bool = True) -> dict[str, Any]:
    return {"accept_len": accept_len, "same_drafts": same_drafts}


def test_counts_add_up_and_modes_come_together() -> None:
    found = {
        "kernels": part(passed=5),
        "one": part(failed=1, failures=["a test"], modes={"device": mode(3.1)}),
        "two": part(modes={"host": mode(3.2)}, native={"accept_len": 3}, seconds=9.0),
    }
    merged = suite.merge(found)
    assert (merged["passed"], merged["failed"], merged["skipped"]) == (7, 1, 0)
    assert list(merged["modes"]) == ["device", "host"]
    assert (merged["native"], merged["failures"]) == ({"accept_len": 3}, ["a test"])
    assert (merged["seconds"], merged["commit"]) == (9.0, "c")


@pytest.mark.parametrize("gpus", [None, [1], [0, 1]])
def test_every_engine_is_in_one_share_and_the_native_one_too(gpus: list[int] | None) -> None:
    every = suite.SHARES * len(gpus or [0])
    engines = [part for part in suite.parts(gpus).values() if "--share" in part.tests]
    shares = [part.tests[part.tests.index("--share") + 1] for part in engines]
    assert shares == [f"{share}/{every}" for share in range(every)]
    assert sum(suite.NATIVE in part.tests for part in engines) == every - 1
    assert all(suite.ACCEPTANCE in part.tests for part in engines)
    places = Counter(part.gpu for part in engines)
    assert places == dict.fromkeys(gpus or [None], suite.SHARES)


def test_a_part_runs_on_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), sys.argv[-2:])"
    interpreter = tmp_path / "python"
    out = tmp_path / "out"
    interpreter.write_text(f'#!/bin/sh\n"{sys.executable}" -c "{script}" "$@" > "{out}"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(suite.sys, "executable", str(interpreter))
    assert suite.Part(["tests"], 1).start(tmp_path / "s.json", []).wait() == 0
    assert out.read_text() == f"1 ['--summary', '{tmp_path / 's.json'}']\n"


def test_modes_are_compared_whatever_share_they_ran_in() -> None:
    modes = {
        "device, sync": mode(3.0),
        "host, sync": mode(3.09),
        "device, overlap, widths by load": mode(1.5, same_drafts=False),
        "device, overlap, draft as loaded": mode(2.5, same_drafts=False),
        "static, sync": mode(None),
    }
    assert suite.acceptance_spread(modes) == 0.03
    assert suite.acceptance_spread({"device, sync": mode(3.0)}) is None
