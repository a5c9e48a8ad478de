# SPDX-License-Identifier: Apache-2.0
"""Runs on one machine: never one that starts beside one that measures."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from serving_phases import Phase, phase

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 30.0


class Noted:
    """Which phases are held now, and every mix that was ever held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[Phase] = []
        self.mixes: set[tuple[Phase, ...]] = set()

    def hold(self, folder: Path, wanted: Phase, seconds: float) -> None:
        with phase(folder, wanted, LIMIT_S):
            with self._lock:
                self._held.append(wanted)
                self.mixes.add(tuple(sorted(self._held)))
            time.sleep(seconds)
            with self._lock:
                self._held.remove(wanted)


def test_runs_share_a_phase_and_never_mix_two(tmp_path: Path) -> None:
    noted = Noted()

    def run(number: int) -> None:
        for _ in range(4):
            noted.hold(tmp_path, Phase.START, 0.05 * (1 + number))
            noted.hold(tmp_path, Phase.MEASURE, 0.05 * (3 - number))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert all(len(set(mix)) == 1 for mix in noted.mixes), noted.mixes
    assert (Phase.START, Phase.START) in noted.mixes


def test_a_wait_has_a_limit(tmp_path: Path) -> None:
    with (
        phase(tmp_path, Phase.START, LIMIT_S),
        pytest.raises(TimeoutError, match=r"others were in phase start for 0\.3 s"),
        phase(tmp_path, Phase.MEASURE, 0.3),
    ):
        pytest.fail("entered")


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from serving_phases import Phase, phase\n"
        f"with phase(Path({str(tmp_path)!r}), Phase.START, 0.0):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError), phase(tmp_path, Phase.MEASURE, 0.0):
            pytest.fail("entered")
    finally:
        other.kill()
        other.communicate()
    with phase(tmp_path, Phase.MEASURE, 0.0):
        pass


def test_without_a_folder_nothing_is_held(tmp_path: Path) -> None:
    with phase(None, Phase.START, 0.0), phase(None, Phase.MEASURE, 0.0):
        assert not list(tmp_path.iterdir())
