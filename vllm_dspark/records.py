# SPDX-License-Identifier: Apache-2.0
"""One record per verification step, kept in a ring and written on demand or at exit.

Off by default. `RecordRing.add` copies what it is given (the caller's arrays may be views of
buffers that the next step writes); accepts and times arrive one or two steps later and are attached
by step number. The newest few records may lack accepts (`accepted is None`), the others only if the
outcome never came. `RecordSaver` keeps a file of the operator's up to date; `records_io` owns the
file formats.

While serving, `request_records(directory)` makes every engine of a server write its ring into the
server's private directory (`metrics_export.running_servers` lists those of this machine).
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

REQUEST_FILE = "records.request"


@dataclass(slots=True)
class StepRecord:
    """What was decided in one step, and what came of it. Rows are requests of the batch."""

    step: int
    time_s: float
    """Wall clock at planning, seconds since the epoch."""
    num_reqs: int
    num_sampling: int
    """Requests that verify drafts or sample in this step (rows of the arrays)."""
    base_tokens: int
    """Tokens of the step that are not drafts (anchors and prompt tokens)."""
    scheduled: npt.NDArray[np.integer]
    """Draft tokens scheduled, [num_sampling]."""
    budget: int
    """Draft tokens that the batch may verify; -1 for none."""
    lag_steps: int
    """Age of the confidences that the budget was decided on."""
    mode: str
    reason: str
    tier_tokens: int
    """Token count of the replayed graph; 0 if eager."""
    verify_lens: npt.NDArray[np.integer] | None = None
    """Anchor included, 1..gamma+1, [num_sampling]; None until known (device mode)."""
    survivals: npt.NDArray[np.floating] | None = None
    """Survivals of the verified block as the policy sees them (calibrated where `confidence` is
    given, raw otherwise), [num_sampling, gamma]; NaN where missing."""
    accepted: npt.NDArray[np.integer] | None = None
    """Accepted draft tokens, [num_sampling]."""
    predicted_ms: float | None = None
    measured_ms: float | None = None
    sync_ms: float | None = None
    request_ids: list[str] | None = None
    confidence: npt.NDArray[np.floating] | None = None
    """Raw confidences of the verified block, [num_sampling, gamma]; NaN where missing."""
    regimes: npt.NDArray[np.integer] | None = None
    """Sampling regime of each request (`core.calibration`), [num_sampling]."""


_ARRAYS = ("scheduled", "verify_lens", "survivals", "accepted", "confidence", "regimes")


class RecordRing:
    """The last `capacity` steps. Thread-safe; every call costs some microseconds.

    Args:
        capacity: steps kept, at least 1.
        meta: JSON values written to the header of every dump, e.g. gamma, model, engine.
        live_meta: more of them, asked for at every dump, e.g. the cost model in use.

    Errors: `ValueError` for the capacity.
    """

    def __init__(
        self,
        capacity: int,
        meta: Mapping[str, Any] | None = None,
        live_meta: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity!r}; allowed: integers from 1")
        self.capacity = capacity
        self.meta = dict(meta or {})
        self._live_meta = live_meta
        self.orphans = 0
        """Outcomes that came for a step that is not (or no longer) kept."""
        self.changes = 0
        """Calls that changed a record so far."""
        self._records: deque[StepRecord] = deque()
        self._by_step: dict[int, StepRecord] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: StepRecord) -> None:
        """Keep a copy of `record`; a second record of the same step replaces the first."""
        kept = replace(record)
        for name in _ARRAYS:
            value = getattr(record, name)
            if value is not None:
                setattr(kept, name, np.array(value))
        with self._lock:
            self.changes += 1
            old = self._by_step.get(kept.step)
            if old is not None:
                self._records.remove(old)
            elif len(self._records) >= self.capacity:
                del self._by_step[self._records.popleft().step]
            self._records.append(kept)
            self._by_step[kept.step] = kept

    def attach(
        self,
        step: int,
        *,
        accepted: npt.NDArray[np.integer] | None = None,
        verify_lens: npt.NDArray[np.integer] | None = None,
        survivals: npt.NDArray[np.floating] | None = None,
        measured_ms: float | None = None,
        sync_ms: float | None = None,
    ) -> bool:
        """Complete the record of `step`; False (and counted in `orphans`) if it is not kept."""
        arrays = (("accepted", accepted), ("verify_lens", verify_lens), ("survivals", survivals))
        with self._lock:
            record = self._by_step.get(step)
            if record is None:
                self.orphans += 1
                return False
            self.changes += 1
            for name, array in arrays:
                if array is not None:
                    setattr(record, name, np.array(array))
            if measured_ms is not None:
                record.measured_ms = measured_ms
            if sync_ms is not None:
                record.sync_ms = sync_ms
        return True

    def tail(self, count: int | None = None) -> list[StepRecord]:
        """The newest `count` records (default: all), oldest first. Read-only for the caller."""
        with self._lock:
            records = [replace(record) for record in self._records]
        return records if count is None else records[max(0, len(records) - count) :]

    def dump(self, path: str, newest: int | None = None) -> int:
        """Write the newest records (default: all) to `path` (.jsonl, .parquet); returns how many.

        Errors: `ValueError` for the file name, `MissingParquetError`, `OSError`.
        """
        from vllm_dspark.records_io import save_records

        records = self.tail(newest)
        save_records(path, records, {**self.meta, **self._live_meta()})
        return len(records)


class RecordSaver:
    """Writes a ring to a file whenever the server falls idle, and when it is told to.

    vLLM kills its workers at once unless `--shutdown-timeout` gives them time, so a file that was
    only written at exit would mostly not be written at all. Call `poll()` every half second or so.
    """

    def __init__(self, ring: RecordRing, path: str, *, idle_s: float = 2.0) -> None:
        self._ring = ring
        self._path = path
        self._idle_s = idle_s
        self._saved = self._seen = 0
        self._since = time.monotonic()

    def poll(self) -> bool:
        """Save if nothing changed for `idle_s` since the last change; whether it did."""
        changes, now = self._ring.changes, time.monotonic()
        if changes != self._seen:
            self._seen, self._since = changes, now
        if changes == self._saved or now - self._since < self._idle_s:
            return False
        self.save()
        return True

    def save(self) -> None:
        """Write the ring now. Never raises: a file that cannot be written is logged."""
        self._saved = self._ring.changes
        try:
            self._ring.dump(self._path)
        except (OSError, ValueError, ImportError) as error:
            logger.warning("DSpark records cannot be written to %s: %s", self._path, error)


# -- on demand, while serving ------------------------------------------------------------------


def request_records(directory: str, *, timeout_s: float = 10.0) -> list[str]:
    """Ask the server whose private directory this is for its records; returns the files.

    Every engine answers with `records-engine<N>.jsonl` in that directory; waits until no new
    answer came for a second. Errors: `FileNotFoundError` for the directory; `TimeoutError` if no
    engine answers (records are off, or the server is gone).
    """
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"{directory}: no such server directory")
    asked = time.time()
    request = os.path.join(directory, REQUEST_FILE)
    with open(request, "w") as file:
        file.write(f"{asked!r}\n")
    found: list[str] = []
    changed = limit = time.monotonic()
    while time.monotonic() - limit < timeout_s:
        time.sleep(0.05)
        now = sorted(
            entry.path
            for entry in os.scandir(directory)
            if entry.name.startswith("records-engine")
            and entry.name.endswith(".jsonl")
            and entry.stat().st_mtime >= asked - 0.01
        )
        if now != found:
            found, changed = now, time.monotonic()
        elif found and time.monotonic() - changed > 1.0:
            break
    os.unlink(request)
    if not found:
        raise TimeoutError(f"{directory}: no engine answered in {timeout_s} s; are records on?")
    return found


class RecordAnswerer:
    """Worker side of `request_records`; call `poll()` every half second or so.

    A request can only make the worker write its own file into the private directory: neither
    the path nor anything else comes from the one who asks.
    """

    def __init__(
        self, ring: RecordRing, directory: str, engine_index: int, *, newest: int = 2000
    ) -> None:
        self._ring = ring
        self._newest = newest  # writing competes with serving for the interpreter
        self._request = os.path.join(directory, REQUEST_FILE)
        self._answer = os.path.join(directory, f"records-engine{engine_index}.jsonl")
        self._seen: str | None = None

    def poll(self) -> bool:
        """Answer a new request; returns whether there was one. Never raises."""
        try:
            with open(self._request) as file:
                asked = file.read(64)
        except OSError:
            return False
        if asked == self._seen or not asked.endswith("\n"):
            return False
        self._seen = asked
        try:
            self._ring.dump(self._answer, self._newest)
        except OSError as error:
            logger.warning("DSpark records cannot be written to %s: %s", self._answer, error)
        return True
