# SPDX-License-Identifier: Apache-2.0
"""A short soak, as `benchmarks/tp_stability.py` does it at length."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT_S = 480.0


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """Two workloads in both loops while a rank drifts, and the price of the sync."""
    out = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "tp_stability.py"), "--short"]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--logs", str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        log, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # It ends its server then; the server's own log has what it was doing.
        process.send_signal(signal.SIGINT)
        log, _ = process.communicate()
        pytest.fail(f"not done in {LIMIT_S:g} s:\n{log}")
    assert process.returncode == 0, log
    found = json.loads(out.read_text())
    assert found["runs"] == found["planned_runs"] == 4
    failures = ("divergences", "hangs", "errors", "truncated", "wrong")
    assert [found[name] for name in failures] == [0] * len(failures)
    assert found["steps_compared"] > 20
    assert {row["overlap"] for row in found["rows"]} == {True, False}
    assert all(row["values_that_drifted"] > 0 for row in found["rows"][1::2])
    price = found["sync_price"]["inputs"]
    assert price["messages_per_step"] == pytest.approx(1.0, abs=0.1)
    assert 0 < found["sync_share"]["inputs"] < 0.5
