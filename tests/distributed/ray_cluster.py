# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of one node, with room for CPU workers unless it has GPUs.

`ray stop` ends every Ray process of the machine, so the node runs in the foreground of a session of
its own and ends with it. A token keeps others from running code in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vllm_dspark.cli.server import CPU_ENVIRONMENT
from vllm_dspark.metrics_export import DIRECTORY_ENV

START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
STACKS_S = 2.0
TAIL = 8000
OBJECT_STORE_BYTES = 80_000_000


class RayCluster:
    """A running node; use it as a context manager.

    Args:
        workers: logical GPUs that it offers.
        environment: variables of its processes, which its workers inherit.
        on_gpu: they are real ones.
    """

    def __init__(self, workers: int, environment: dict[str, str], on_gpu: bool = False) -> None:
        self._workers = workers
        self._environment = {
            **({} if on_gpu else CPU_ENVIRONMENT),
            # A process that has loaded the plugin names its own folder of counters there, and what
            # a node has set wins over what the server copies to it.
            **{name: value for name, value in os.environ.items() if name != DIRECTORY_ENV},
            **environment,
            "PYTHONFAULTHANDLER": "1",
            # Ray makes workers nice, so that anything else on the machine would come first.
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray would end workers because of what else fills the machine's memory.
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a server needs to find the cluster."""
        names = ("PYTHONFAULTHANDLER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED")
        return {"RAY_ADDRESS": self._address} | {n: self._environment[n] for n in names}

    def __enter__(self) -> RayCluster:
        # Sockets lie in it, whose paths may have about a hundred characters: not pytest's folder.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--num-gpus", str(self._workers), "--num-cpus", str(self._workers), "--port", "0"),
            *("--include-dashboard", "false", "--disable-usage-stats"),
            *("--temp-dir", str(self.folder), "--object-store-memory", str(OBJECT_STORE_BYTES)),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._address = self._wait_for_address()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @property
    def _log(self) -> Path:
        return self.folder / "node.log"

    def _wait_for_address(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            found = re.search(r"ray start --address='([^']+)'", self._log.read_text())
            if found and "block forever" in self._log.read_text():
                return found[1]
            time.sleep(0.2)
        raise AssertionError(f"Ray did not start:\n{self._log.read_text()[-TAIL:]}")

    @contextlib.contextmanager
    def limit(self, seconds: float, pids: Callable[[], Iterable[int]]) -> Iterator[None]:
        """What takes longer fails: these workers show their stacks and end, and so does a hang."""
        stacks: list[str] = []
        timer = threading.Timer(seconds, lambda: stacks.append(self._end_with_stacks(pids())))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            assert not stacks, f"not done in {seconds:g} s; workers:\n{stacks[0]}"

    def _end_with_stacks(self, pids: Iterable[int]) -> str:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        time.sleep(STACKS_S)
        logs = self.folder.glob("session_*/logs/worker-*.err")
        return "\n".join(f"--- {log.name}\n{log.read_text()[-TAIL:]}" for log in logs)

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_for_end(pids: list[int], limit_s: float) -> list[int]:
    """Processes of `pids` that are still running after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        running = [pid for pid in pids if _runs(pid)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # A zombie has ended; who reaps it is its parent's business.
    return status.rpartition(")")[2].split()[0] != "Z"
