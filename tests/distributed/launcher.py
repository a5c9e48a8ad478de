# SPDX-License-Identifier: Apache-2.0
"""Runs a function of `rank_programs` in several real processes, with a hard time limit."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_LIMIT_S = 180.0
TAIL_LINES = 60


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    how: str
    """`exit N`, `signal N` or `hang`."""
    error: str | None
    """Name of the exception that the program raised."""
    message: str
    result: Any
    log: str
    """Output of the rank, with its stacks if it hung."""


class Launcher:
    """The process that ranks are forked from; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Launcher:

        environment = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "zygote.log").open("w"),
            text=True,
            env=environment,
        )
        assert self._answer(START_LIMIT_S) == "ready"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def run(
        self, world: int, program: str, limit_s: float = 60.0, **arguments: Any
    ) -> list[Ending]:
        """Ends of `world` ranks that ran `program(group, **arguments)`, in rank order."""
        assert self._process is not None and self._process.stdin is not None
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        folder.mkdir()
        job = {
            "world": world,
            "program": program,
            "arguments": arguments,
            "limit_s": limit_s,
            "folder": str(folder),
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        hows = self._answer(limit_s + 30.0)
        return [_ending(folder, rank, how) for rank, how in enumerate(hows)]

    def _answer(self, limit_s: float) -> Any:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            log = (self._folder / "zygote.log").read_text()
            raise RuntimeError(f"the process that forks ranks has ended or hangs:\n{log}")
        return json.loads(line)


def _ending(folder: Path, rank: int, how: str) -> Ending:
    log = "\n".join((folder / f"rank{rank}.log").read_text().splitlines()[-TAIL_LINES:])
    written = folder / f"rank{rank}.json"
    if not written.exists():
        return Ending(how, None, "", None, log)
    answer = json.loads(written.read_text())
    return Ending(how, answer["error"], answer["message"], answer.get("result"), log)
