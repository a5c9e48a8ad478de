# SPDX-License-Identifier: Apache-2.0
"""The GPU suite's parts and the one file that is made of what they found."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import h200_correctness as suite  # noqa: E402


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


def test_every_engine_is_in_one_share_and_the_native_one_too() -> None:
    arguments = list(suite.parts().values())
    shares = [words[words.index("--share") + 1] for words in arguments if "--share" in words]
    assert shares == [f"{share}/{suite.SHARES}" for share in range(suite.SHARES)]
    assert sum(suite.NATIVE in words for words in arguments) == suite.SHARES - 1
    assert sum(suite.ACCEPTANCE in words for words in arguments) == suite.SHARES


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
