# SPDX-License-Identifier: Apache-2.0
"""What the operator's commands read: step records, a trace, or the records of a running server.

Contract: one `Recording` holds blocks of one model and one gamma; anything else is a `CommandError`
that names the file. A block is one request in one step; requests that had no draft to verify (their
prompt ended in that step) are no blocks. Blocks of a request lie next to each other, in decoding
order.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark import metrics_export
from vllm_dspark.cli import CommandError
from vllm_dspark.core.trace import Trace, parse_trace
from vllm_dspark.records import StepRecord, request_records
from vllm_dspark.records_io import MissingParquetError, RecordError, load_records

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

UNTRIMMED_MODES = ("static", "cap-accept")
"""Modes of a record in which every scheduled draft runs, whatever was planned."""


@dataclass(frozen=True)
class Blocks:
    """Verified blocks with a known outcome, rows grouped by request."""

    confidence: Floats
    """`[n, gamma]` raw; NaN where a slot was not drafted."""
    survivals: Floats
    """`[n, gamma]` as the policy saw them, calibrated where the server calibrates."""
    accepted: Ints
    """`[n]` accepted drafts."""
    verified: Ints
    """`[n]` verified drafts."""
    scheduled: Ints
    """`[n]` scheduled drafts."""
    regimes: Ints | None
    """`[n]` sampling regime, None if not recorded."""
    request: Ints
    """`[n]` number of the request."""

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def gamma(self) -> int:
        return int(self.confidence.shape[1])

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """`[n, gamma]` slots that the target verified and the head judged.

        Which slots these are depends on predictions only, so what they show is unbiased.
        """
        inside = np.arange(self.gamma) < self.verified[:, None]
        return inside & np.isfinite(self.survivals) & np.isfinite(self.confidence)

    @property
    def outcome(self) -> npt.NDArray[np.bool_]:
        """`[n, gamma]` accepted together with every slot before it."""
        return np.arange(self.gamma) < self.accepted[:, None]

    @property
    def accept_len(self) -> float:
        """Committed tokens per request and step, bonus included."""
        return 1.0 + float(self.accepted.mean())

    def trace(self) -> Trace:
        """The blocks as the replay reads them; a slot that was not drafted gets the mean of its
        position."""
        seen = np.isfinite(self.confidence)
        sums = np.where(seen, self.confidence, 0.0).sum(axis=0)
        means = sums / np.maximum(seen.sum(axis=0), 1)
        filled = np.where(seen, self.confidence, means)
        return Trace(
            filled.astype(np.float32),
            self.accepted.astype(np.int64),
            self.verified.astype(np.int64),
        )


@dataclass(frozen=True)
class Recording:
    """Blocks, and where they come from the steps that they were verified in."""

    source: str
    meta: dict[str, Any]
    blocks: Blocks
    records: list[StepRecord] = field(default_factory=list)
    directory: str | None = None
    """Private directory of the running server that was asked."""

    @property
    def gamma(self) -> int:
        return self.blocks.gamma

    @property
    def untrimmed(self) -> bool:
        """Every scheduled draft ran, whatever was planned."""
        return bool(self.records) and all(r.mode in UNTRIMMED_MODES for r in self.records)

    @property
    def typical_requests(self) -> int:
        """Requests of a step in which the median block was verified; 8 for a trace."""
        sizes = np.array([int((r.scheduled > 0).sum()) for r in self.records], dtype=np.int64)
        sizes = sizes[sizes > 0]
        if not len(sizes):
            return 8
        return int(np.median(np.repeat(sizes, sizes)))


def add_input_arguments(parser: argparse.ArgumentParser, *, traces: bool = True) -> None:
    """`FILE...` and `--from-server`, for `read_recording`."""
    kinds = "step records (.jsonl, .parquet)" + (" or a trace (.jsonl)" if traces else "")
    parser.add_argument("inputs", nargs="*", type=Path, metavar="FILE", help=kinds)
    parser.add_argument(
        "--from-server",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help="ask a running server of this machine for its newest records instead; PID is needed "
        "if there are several",
    )
    parser.set_defaults(usage_error=parser.error)


def read_recording(args: argparse.Namespace) -> Recording:
    """The recording that the arguments of `add_input_arguments` name.

    Raises:
        CommandError: it cannot be read, or holds no usable block.
        SystemExit: neither or both of files and server are given (code 2).
    """
    if (args.from_server is None) == (not args.inputs):
        args.usage_error("give either record files or --from-server")
    if args.from_server is None:
        return from_files(args.inputs)
    directory = server_directory(args.from_server)
    try:
        paths = request_records(directory)
    except (OSError, TimeoutError) as error:
        raise CommandError(str(error)) from None
    found = from_files([Path(path) for path in paths])
    return Recording("running server", found.meta, found.blocks, found.records, directory)


def server_directory(pid: int) -> str:
    """Private directory of the running server `pid`, or of the only one if `pid` is 0.

    Raises:
        CommandError: no such server, or several.
    """
    running = {
        owner: path for owner, path in metrics_export.running_servers().items() if _alive(owner)
    }
    if pid and pid in running:
        return running[pid]
    listed = ", ".join(map(str, sorted(running))) or "none"
    if pid or len(running) != 1:
        raise CommandError(
            f"--from-server{f' {pid}' if pid else ''}: servers with the plugin that run on this "
            f"machine: {listed}" + ("" if pid or not running else "; name one")
        )
    return next(iter(running.values()))


def from_files(paths: Sequence[Path]) -> Recording:
    """Recording of one or more files, one per engine.

    Raises:
        CommandError: a file is missing, empty, truncated or of another kind, or files differ in
            model or gamma.
    """
    parts = [_one_file(path) for path in paths]
    first = parts[0]
    for path, part in zip(paths[1:], parts[1:], strict=True):
        for name in ("model", "draft_model", "gamma"):
            if part.meta.get(name) != first.meta.get(name):
                raise CommandError(
                    f"{path}: {name} is {part.meta.get(name)!r}, in {paths[0]} it is "
                    f"{first.meta.get(name)!r}; only files of one deployment go together"
                )
    source = ", ".join(path.name for path in paths)
    if len(parts) == 1:
        return Recording(source, first.meta, first.blocks, first.records)
    records = sorted((r for part in parts for r in part.records), key=lambda r: r.time_s)
    return Recording(source, first.meta, _join([p.blocks for p in parts]), records)


def _one_file(path: Path) -> Recording:
    if not path.is_file():
        raise CommandError(f"{path}: no such file")
    if path.suffix == ".jsonl" and _is_trace(path):
        return _trace_file(path)
    try:
        file = load_records(str(path))
    except (RecordError, MissingParquetError, ValueError, OSError) as error:
        raise CommandError(str(error)) from None
    gamma = file.meta.get("gamma")
    if type(gamma) is not int or gamma < 1:
        raise CommandError(f"{path}: its header has no gamma, so its blocks cannot be read")
    return Recording(path.name, file.meta, _blocks_of(file.records, gamma, path), file.records)


def _is_trace(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        head = json.loads(first)
    except json.JSONDecodeError:
        return False
    return isinstance(head, dict) and "confidence" in head


def _trace_file(path: Path) -> Recording:
    try:
        with path.open(encoding="utf-8") as lines:
            trace = parse_trace(lines)
    except (ValueError, OSError) as error:
        raise CommandError(f"{path}: {error}") from None
    blocks = Blocks(
        confidence=trace.confidence,
        survivals=np.cumprod(trace.confidence, axis=1, dtype=np.float64),
        accepted=trace.accepted,
        verified=trace.verified,
        scheduled=np.full(len(trace.accepted), trace.gamma),
        regimes=None,
        request=np.zeros(len(trace.accepted), dtype=np.int64),
    )
    return Recording(path.name, {"gamma": trace.gamma}, blocks)


def _blocks_of(records: Iterable[StepRecord], gamma: int, path: Path) -> Blocks:
    steps = [
        r
        for r in records
        if r.accepted is not None and r.verify_lens is not None and r.survivals is not None
    ]
    rows: dict[str, list[Any]] = {name: [] for name in _ROWS}
    numbers: dict[str, int] = {}
    with_regimes = bool(steps) and all(r.regimes is not None for r in steps)
    for record in steps:
        for row, request in _drafted_rows(record, numbers):
            values = _row(record, row)
            if len(values["survivals"]) != gamma:
                raise CommandError(f"{path}: step {record.step} has blocks of another gamma")
            values["request"] = request
            for name in _ROWS:
                rows[name].append(values[name])
    if not rows["accepted"]:
        raise CommandError(
            f"{path}: none of its {len(steps)} complete steps verified a draft; were requests "
            "decoded while records were on?"
        )
    arrays = {name: np.array(column) for name, column in rows.items()}
    order = np.argsort(arrays["request"], kind="stable")
    arrays = {name: array[order] for name, array in arrays.items()}
    if not with_regimes:
        arrays["regimes"] = None  # type: ignore[assignment]
    return Blocks(**arrays)


_ROWS = (
    "confidence",
    "survivals",
    "accepted",
    "verified",
    "scheduled",
    "regimes",
    "request",
)


def positive(text: str) -> int:
    """An option's value that counts something."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1")
    return int(text)


def _drafted_rows(record: StepRecord, numbers: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Rows with drafts, and the number of the request of each."""
    for row in np.flatnonzero(record.scheduled > 0).tolist():
        name = record.request_ids[row] if record.request_ids else ""
        yield row, numbers.setdefault(name, len(numbers))


def _row(record: StepRecord, row: int) -> dict[str, Any]:
    assert record.verify_lens is not None and record.survivals is not None
    assert record.accepted is not None
    survivals = np.asarray(record.survivals[row], dtype=np.float64)
    if record.confidence is not None:
        confidence = np.asarray(record.confidence[row], dtype=np.float64)
    else:  # the survivals are raw then
        before = np.concatenate(([1.0], survivals[:-1]))
        confidence = np.divide(
            survivals, before, out=np.zeros_like(survivals), where=~(before == 0.0)
        )
    return {
        "confidence": confidence,
        "survivals": survivals,
        "accepted": int(record.accepted[row]),
        "verified": int(record.verify_lens[row]) - 1,
        "scheduled": int(record.scheduled[row]),
        "regimes": 0 if record.regimes is None else int(record.regimes[row]),
    }


def _join(parts: Sequence[Blocks]) -> Blocks:
    offsets = np.cumsum([0, *(int(part.request.max()) + 1 for part in parts[:-1])])
    with_regimes = all(part.regimes is not None for part in parts)
    return Blocks(
        confidence=np.concatenate([p.confidence for p in parts]),
        survivals=np.concatenate([p.survivals for p in parts]),
        accepted=np.concatenate([p.accepted for p in parts]),
        verified=np.concatenate([p.verified for p in parts]),
        scheduled=np.concatenate([p.scheduled for p in parts]),
        regimes=np.concatenate([p.regimes for p in parts if p.regimes is not None])
        if with_regimes
        else None,
        request=np.concatenate([p.request + o for p, o in zip(parts, offsets, strict=True)]),
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
