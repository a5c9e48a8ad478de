# SPDX-License-Identifier: Apache-2.0
"""Do all ranks of the group take the same steps? Compared off the critical path.

The step hands over a record before it runs and one when its results are known (`step_record`). A
thread with a gloo group of its own swaps the records of every `interval` steps with all other
ranks. A thread and not an asynchronous collective: it goes on while the main thread is stuck in a
collective of another shape, which is the failure to be explained.

Invariants:

* Every wait is bounded. A rank that does not answer, or has no record of a step that another rank
  has, is named (`PeerError`); a step that does not end is reported (`StallError`).
* The first difference stops every rank with the step, the ranks and their values
  (`ConsensusError`), raised from the next call of the step. A main thread that never makes that
  call, because it hangs in the step, is ended with its stacks after `grace_s`. Ranks that wait for
  one that has stopped see their collective fail; the reason is in their log.
* A round of swaps takes place as long as any rank has a record that is not matched, so ranks enter
  equally many rounds.
* No rank runs ahead of a comparison by more than two intervals and a few steps.
* An audit stops at no difference: those from rank 0 are counted by site, and an exchange that fails
  ends the audit with a warning. Ranks that run different shapes may hang, so a step that does not
  end is fatal in an audit too, even after its end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_dspark.parallel.peer_exchange import PeerError, PeerExchange
from vllm_dspark.parallel.step_record import (
    FIELDS,
    WIDTH,
    Decision,
    Outcome,
    RecordKind,
    as_json,
    differing,
    encode,
)
from vllm_dspark.parallel.tp_sync import Group, OnDisagreement

logger = logging.getLogger("vllm.dspark")

EXIT_CODE = 70
"""Of a process whose main thread hangs in a step that the ranks disagree on."""
HISTORY = 64
"""Records kept for the dump, apart from those that are not compared yet."""
_SLACK_STEPS = 8
_TEXT_BYTES = 16384
_AUDIT_INTERVAL = 32

_Key = tuple[int, int]
_Row = tuple[int, ...]


class ConsensusError(RuntimeError):
    """Ranks of one group did different things in one step.

    Attributes:
        step: the first step that differs.
        what: the value that differs.
        values: what each rank has, by rank in the group.
        ranks: two ranks that differ, the lower one first.
    """

    def __init__(
        self, step: int, what: str, values: dict[int, str], ranks: tuple[int, int]
    ) -> None:
        self.step, self.what, self.values, self.ranks = step, what, values, ranks
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
        super().__init__(
            f"step {step}: ranks {ranks[0]} and {ranks[1]} of the tensor-parallel group differ "
            f"in {what}. {listed}"
        )


class StallError(RuntimeError):
    """The main thread has not left a step in time."""


@dataclass(frozen=True)
class ConsensusOptions:
    """How the checker works; the defaults suit a server.

    Raises:
        ValueError: an interval or a time that is not positive.
    """

    interval: int
    """Steps between two comparisons."""
    stops: bool = True
    """A difference stops the group; false for an audit."""
    timeout_s: float = 180.0
    """Longest wait for another rank or for a step's end; longer than compiling in a step takes."""
    flush_s: float = 2.0
    """Records are compared after this long even if the interval is not full."""
    grace_s: float = 10.0
    """What a stuck main thread gets before its process is ended."""
    dump_folder: str | None = None
    """Where the last records go; None for the folder of temporary files."""

    def __post_init__(self) -> None:
        for name in ("interval", "timeout_s", "flush_s", "grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be positive")


class ConsensusChecker:
    """Compares this rank's records with those of its peers.

    Args:
        options: see there.
        exchange: to the other ranks; used by the checker's thread alone.
        on_disagreement: told about values of this rank that differ from rank 0's, by site.
        abort: ends the process; for tests.
    """

    def __init__(
        self,
        options: ConsensusOptions,
        exchange: PeerExchange,
        on_disagreement: OnDisagreement | None = None,
        abort: Callable[[int], Any] = os._exit,
    ) -> None:
        self.options = options
        self._exchange = exchange
        self._on_disagreement = on_disagreement or (lambda site, count: None)
        self._abort = abort
        self._capacity = max(4 * options.interval, 64)
        self._wake = threading.Condition()
        self._pending: deque[_Row] = deque()
        self._steps_pending = 0
        self._last_call_s = time.monotonic()
        self._last_round_s = self._last_call_s
        self._oldest: tuple[_Key, float] | None = None
        self._inside = False
        self._awaits_peers = False
        self._closed = False
        self._error: Exception | None = None
        self._noticed = threading.Event()
        self._audit_differs = False
        self._history: deque[Decision | Outcome] = deque()
        ranks = range(exchange.world_size)
        self._unmatched: list[dict[_Key, _Row]] = [{} for _ in ranks]
        self._latest: list[dict[int, int]] = [dict.fromkeys(RecordKind, -1) for _ in ranks]
        self._thread = threading.Thread(target=self._run, name="dspark-consensus", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what the step calls

    def begin_step(self) -> None:
        """The main thread enters a step; raises what stopped the group."""
        # In this order: the thread must not see a step that began when the last one ended.
        self._last_call_s = time.monotonic()
        self._inside = True
        self.check()

    def end_step(self) -> None:
        """The main thread has left the step; raises what stopped the group."""
        self._inside = False
        self.check()

    def check(self) -> None:
        """Raises what stopped the group: `ConsensusError`, `PeerError` or `StallError`."""
        if isinstance(self._error, StallError) or (self._error and self.options.stops):
            self._noticed.set()
            raise self._error

    def decided(self, decision: Decision) -> None:
        """How the step is about to run."""
        self._submit(decision)
        if self._steps_pending <= 2 * self.options.interval + _SLACK_STEPS:
            return
        # The thread gives up waiting for peers in time, so this wait is bounded too.
        with self._wake:
            self._awaits_peers = True
            self._wake.wait_for(
                lambda: self._steps_pending <= self.options.interval or self._error is not None,
                self.options.timeout_s + self.options.flush_s,
            )
            # The step itself begins only now.
            self._last_call_s = time.monotonic()
            self._awaits_peers = False
        self.check()

    def settled(self, outcome: Outcome) -> None:
        """What a step has left behind."""
        self._submit(outcome)

    def close(self) -> None:
        """Stop comparing; records that were not compared yet are dropped."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self.options.flush_s)

    def _submit(self, record: Decision | Outcome) -> None:
        self.check()
        if self._error is not None or self._closed:
            return
        row = encode(record)
        with self._wake:
            first = not self._pending
            self._history.append(record)
            self._pending.append(row)
            self._steps_pending += record.kind is RecordKind.DECISION
            self._last_call_s = time.monotonic()
            if first or self._steps_pending >= self.options.interval:
                self._wake.notify_all()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._wait_for_records():
                self._round()
        except Exception as error:
            if self.options.stops or isinstance(error, StallError):
                self._fail(error)
            else:
                self._end_audit(error)

    def _wait_for_records(self) -> bool:
        """Until an interval is full or its records have waited long enough; false to end."""
        options, rank = self.options, self._exchange.rank
        with self._wake:
            while not self._closed and self._steps_pending < options.interval:
                left_s = self._patience_s()
                if self._pending or self._unmatched[rank]:
                    quiet_since_s = max(self._last_call_s, self._last_round_s)
                    flush_s = quiet_since_s + options.flush_s - time.monotonic()
                    if flush_s <= 0:
                        break
                    left_s = min(left_s, flush_s)
                self._wake.wait(left_s)
            return not self._closed

    def _patience_s(self) -> float:
        """How long the main thread may go on with what it does.

        Raises:
            StallError: it has been in one step for too long.
        """
        timeout_s = self.options.timeout_s
        if not self._inside or self._awaits_peers:
            return timeout_s
        left_s = self._last_call_s + timeout_s - time.monotonic()
        if left_s <= 0:
            rank = self._exchange.rank
            raise StallError(f"rank {rank} has not left its step for {timeout_s:g} s")
        return left_s

    def _round(self) -> None:
        with self._wake:
            count = min(len(self._pending), self._capacity)
            rows = [self._pending.popleft() for _ in range(count)]
        message = torch.zeros((self._capacity + 1, WIDTH), dtype=torch.int64)
        message[0, 0] = count
        if rows:
            message[1 : count + 1] = torch.tensor(rows, dtype=torch.int64)
        for rank, received in enumerate(self._exchange.swap(message.view(-1)).tolist()):
            self._file(rank, received)
        self._compare()
        self._last_round_s = time.monotonic()
        self._check_missing()
        with self._wake:
            # Sent is not compared: while a peer lags behind, this rank may not run on.
            unmatched = self._unmatched[self._exchange.rank]
            left = [kind for kind, _ in unmatched] + [row[0] for row in self._pending]
            self._steps_pending = left.count(RecordKind.DECISION)
            self._forget()
            self._wake.notify_all()

    def _forget(self) -> None:
        """Drop old records, but none that a comparison may still have to explain."""
        unmatched, kept = self._unmatched[self._exchange.rank], self._history
        while len(kept) > max(HISTORY, len(self._pending)):
            if (kept[0].kind, kept[0].step) in unmatched:
                return
            kept.popleft()

    def _file(self, rank: int, received: list[int]) -> None:
        for index in range(1, received[0] + 1):
            row = tuple(received[index * WIDTH : (index + 1) * WIDTH])
            kind, step = row[:2]
            self._unmatched[rank][kind, step] = row
            self._latest[rank][kind] = max(self._latest[rank][kind], step)

    def _compare(self) -> None:
        """Match what every rank has recorded, in the order of steps; equal on all ranks."""
        known = set().union(*self._unmatched)
        for step, kind in sorted((step, kind) for kind, step in known):
            key = kind, step
            rows = [ledger.get(key) for ledger in self._unmatched]
            waits = any(
                row is None and self._latest[rank][kind] < step for rank, row in enumerate(rows)
            )
            if waits:
                continue
            for ledger in self._unmatched:
                ledger.pop(key, None)
            self._judge(RecordKind(kind), step, rows)

    def _check_missing(self) -> None:
        """Raises `PeerError` if ranks have owed a record for too long."""
        known = set().union(*self._unmatched)
        if not known:
            self._oldest = None
            return
        key = min(known, key=lambda key: (key[1], key[0]))
        if self._oldest is None or self._oldest[0] != key:
            self._oldest = key, self._last_round_s
        if self._last_round_s - self._oldest[1] > self.options.timeout_s:
            owing = [rank for rank, ledger in enumerate(self._unmatched) if key not in ledger]
            raise PeerError(owing, f"it has no record of step {key[1]}")

    def _judge(self, kind: RecordKind, step: int, rows: list[_Row | None]) -> None:
        first, mine = rows[0], rows[self._exchange.rank]
        if first is not None and mine is not None:
            for index in differing(kind, first, mine):
                what, site = FIELDS[kind][index]
                self._on_disagreement(str(site), 1)
                self._warn_once(step, what)
        if not self.options.stops:
            return
        for rank, row in enumerate(rows):
            if first is None or row is None:
                if first is not row:
                    self._stop(kind, step, "having a record of it", rank)
                continue
            wrong = differing(kind, first, row)
            if wrong:
                self._stop(kind, step, FIELDS[kind][wrong[0]][0], rank)

    def _warn_once(self, step: int, what: str) -> None:
        """An audit's first difference: what follows may be a hang."""
        if not (self.options.stops or self._audit_differs):
            self._audit_differs = True
            logger.warning(
                "audit: rank %d differs from rank 0 in %s of step %d. Nothing mends it: outputs "
                "may be wrong, and ranks may hang; a step of over %g s ends the process",
                self._exchange.rank,
                what,
                step,
                self.options.timeout_s,
            )

    def _stop(self, kind: RecordKind, step: int, what: str, rank: int) -> None:
        """Tell everybody in full what this rank did in `step`, and raise what everybody did."""
        with self._wake:
            mine = next((r for r in self._history if r.kind is kind and r.step == step), None)
        text = as_json(mine).encode()[:_TEXT_BYTES]
        message = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        answers = self._exchange.swap(message).numpy()
        with contextlib.suppress(PeerError):
            # Nobody leaves before everybody has the answers.
            self._exchange.swap(message[:1])
        values = {
            peer: bytes(answer).rstrip(b"\0").decode(errors="replace")
            for peer, answer in enumerate(answers)
        }
        raise ConsensusError(step, what, values, (0, rank))

    # ------------------------------------------------------------------ the end

    def _fail(self, error: Exception) -> None:
        if self._closed:
            return
        idle = isinstance(error, PeerError) and not self._inside
        if idle:
            # Peers leave one after the other when a server shuts down.
            logger.warning("consensus checks have ended: %s", error)
        else:
            logger.error("consensus check failed on rank %d: %s", self._exchange.rank, error)
            self._dump()
        with self._wake:
            self._error = error
            self._wake.notify_all()
        if not self._noticed.wait(self.options.grace_s) and self._inside and not self._closed:
            logger.critical(
                "the main thread of rank %d hangs in its step and cannot raise; ending the process",
                self._exchange.rank,
            )
            faulthandler.dump_traceback(all_threads=True)
            self._abort(EXIT_CODE)

    def _end_audit(self, error: Exception) -> None:
        """Compare no more, but see to it that no step lasts for ever."""
        with self._wake:
            if self._closed:
                return
            logger.warning("the audit of the tensor-parallel group has ended: %s", error)
            self._error = error
            self._wake.notify_all()
        try:
            with self._wake:
                while not self._closed:
                    self._wake.wait(self._patience_s())
        except StallError as stall:
            self._fail(stall)

    def _dump(self) -> None:
        """The last records of this rank, to a file that the log names."""
        folder = Path(self.options.dump_folder or tempfile.gettempdir())
        path = folder / f"dspark-steps-{os.getpid()}-rank{self._exchange.rank}.jsonl"
        with self._wake:
            lines = [as_json(record) for record in self._history]
        try:
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            logger.error("last steps of rank %d: %s", self._exchange.rank, lines)
            logger.error("%s: %s", path, error.strerror)
        else:
            logger.error("last %d records of rank %d: %s", len(lines), self._exchange.rank, path)


def open_checker(
    tp_sync: str,
    consensus_interval: int,
    group: Group,
    on_disagreement: OnDisagreement | None = None,
) -> ConsensusChecker | None:
    """The checker that `dspark.tp_sync` and `dspark.consensus_interval` ask for, None if neither.

    Collective over the group: every rank calls it at the same point of its start-up.
    """
    audits = tp_sync == "audit"
    if group.world_size == 1 or not (audits or consensus_interval):
        return None
    options = ConsensusOptions(
        interval=consensus_interval or _AUDIT_INTERVAL, stops=consensus_interval > 0
    )
    exchange = PeerExchange.open(group.ranks, group.rank_in_group, options.timeout_s)
    # With a sync, differences were counted where they were mended; what is left stops the group.
    return ConsensusChecker(options, exchange, on_disagreement if audits else None)
