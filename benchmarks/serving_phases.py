# SPDX-License-Identifier: Apache-2.0
"""Keeps the starts of some runs apart from the measurements of others on one machine.

An engine that starts loads weights, compiles and captures: it takes processor cores and memory
bandwidth from an engine that is measured on the GPU beside it, and steps stall. Runs that share a
folder start their engines at the same time or measure at the same time, but never one while another
does the other. A command that is not a run takes part with `flock --shared FOLDER/start COMMAND`.
"""

import contextlib
import fcntl
import random
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TextIO

POLL_S = 0.2


class Phase(StrEnum):
    START = "start"
    MEASURE = "measure"


@contextlib.contextmanager
def phase(folder: Path | None, wanted: Phase, limit_s: float) -> Iterator[None]:
    """Hold a phase; without a folder nothing is held.

    A phase is held by a shared lock on its file, so it ends with the process that holds it.

    Raises:
        TimeoutError: others were in the other phase for `limit_s`.
    """
    if folder is None:
        yield
        return
    other = Phase.MEASURE if wanted is Phase.START else Phase.START
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    with (folder / wanted).open("w") as own, (folder / other).open("w") as others:
        # Own lock first: of two that come at once at least one sees the other and steps back.
        while not _enter(own, others):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder}: others were in phase {other} for {limit_s:g} s")
            time.sleep(POLL_S * (0.5 + random.random()))
        yield


def _enter(own: TextIO, others: TextIO) -> bool:
    fcntl.flock(own, fcntl.LOCK_SH)
    try:
        fcntl.flock(others, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(own, fcntl.LOCK_UN)
        return False
    fcntl.flock(others, fcntl.LOCK_UN)
    return True
