# SPDX-License-Identifier: Apache-2.0
"""Engines as child processes that measure on command, several of them alive side by side.

A child starts its engine, writes the event `ready` and then obeys commands, one JSON line each on
its standard input; for each it writes one event when it is done. At the end of its input it shuts
the engine down. While one child measures, the others wait and leave the GPU alone, so that systems
are compared minutes apart instead of a start apart.

Every wait has a limit. A child that passes it writes the stacks of all its threads to its log and
is killed with everything that it started; what it had measured before is kept.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import serving_results

STACKS_S = 10  # time that a process gets to write its stacks before it is killed
POLL_S = 0.05


class Child:
    """One engine in a process group of its own.

    Args:
        command: starts the process.
        env: its environment; `PYTHONFAULTHANDLER` makes it write stacks.
        events: file to which the process appends its events.
        log: file for its output.
    """

    def __init__(
        self, command: Sequence[str], env: dict[str, str], events: Path, log: Path
    ) -> None:
        self.failure = ""
        self._events_file = events
        self._answered = 0
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        # Stacks, not core files.
        resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the child has measured so far."""
        return serving_results.read_events(self._events_file)

    def wait_ready(self, limit_s: float) -> bool:
        """Wait for the engine; False if it failed, see `failure`."""
        return self._wait_event(limit_s)

    def order(self, limit_s: float, **command: Any) -> bool:
        """Have a command done; False if the child failed, now or before."""
        if self.failure:
            return False
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which the wait finds out
        return self._wait_event(limit_s)

    def end(self, limit_s: float) -> None:
        """Let the engine shut down, then kill whatever is left of the group."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            status = self._process.wait(0 if self.failure else limit_s)
            if status and not self.failure:
                self.failure = f"exit status {status}"
        except subprocess.TimeoutExpired:
            if not self.failure:
                self._give_up(limit_s)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _wait_event(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while len(self.events) <= self._answered:
            status = self._process.poll()
            if status is not None and len(self.events) <= self._answered:
                self.failure = f"exit status {status}"
                return False
            if time.monotonic() > deadline:
                self._give_up(limit_s)
                return False
            time.sleep(POLL_S)
        self._answered += 1
        return True

    def _give_up(self, limit_s: float) -> None:
        self.failure = f"killed after {limit_s:g} s, stacks are in the log"
        self._signal(signal.SIGABRT)
        time.sleep(STACKS_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
