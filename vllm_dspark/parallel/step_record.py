# SPDX-License-Identifier: Apache-2.0
"""What one rank did in one step, and its fixed-size form that other ranks compare with theirs.

A record is a row of `WIDTH` int64: kind, step, values. Numbers travel as they are, so that a
mismatch shows both; arrays travel as 64-bit digests. Nothing but integers is ever read from a peer,
apart from the JSON text that explains a mismatch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vllm_dspark.parallel.sync_sites import SyncSite

WIDTH = 8
NONE = -1
"""Stands for None in a record; no count is negative."""


class RecordKind(IntEnum):
    """When in a step a record is made."""

    DECISION = 1
    """Before the step runs: a step that hangs has left this one behind."""
    OUTCOME = 2
    """When the step's results are on the host, some steps later."""


@dataclass(frozen=True)
class Decision:
    """How a step runs. Rows are requests in batch order."""

    step: int
    budget: int | None
    """Drafts verified by the batch, None for all."""
    tier_tokens: int | None
    """Token count that the plan pads to."""
    graph_tokens: int | None
    """Token count of the graph that is replayed, None without one."""
    draft_width: int
    """Slots of the block that is drafted at the end of the step."""
    num_reqs: int
    verify_lens: np.ndarray | None
    """`[num_reqs]` anchor included; None if only the device knows."""

    kind = RecordKind.DECISION


@dataclass(frozen=True)
class Outcome:
    """What a step left behind on this rank. Rows are requests in batch order."""

    step: int
    committed: np.ndarray
    """`[num_reqs]` tokens that verification committed."""
    verified: np.ndarray
    """`[num_reqs]` drafts that the device admitted, -1 where the host decided."""
    drafts: np.ndarray | None
    """`[num_reqs, width]` drafted ids that this rank will verify, None if not known yet."""

    kind = RecordKind.OUTCOME


FIELDS: dict[RecordKind, tuple[tuple[str, SyncSite], ...]] = {
    RecordKind.DECISION: (
        ("num_reqs", SyncSite.PLAN),
        ("budget", SyncSite.PLAN),
        ("tier_tokens", SyncSite.PLAN),
        ("graph_tokens", SyncSite.PLAN),
        ("draft_width", SyncSite.PLAN),
        ("verify_lens", SyncSite.LENS),
    ),
    RecordKind.OUTCOME: (
        ("committed", SyncSite.ACCEPT),
        ("verified", SyncSite.LENS),
        ("drafts", SyncSite.DRAFT),
    ),
}
"""Attributes in the order of a record's values, and the sync site that owns each."""


def encode(record: Decision | Outcome) -> tuple[int, ...]:
    """Row of `WIDTH` int64."""
    names = [name for name, _ in FIELDS[record.kind]]
    values = [_number(getattr(record, name)) for name in names]
    return (record.kind, record.step, *values, *[0] * (WIDTH - 2 - len(values)))


def differing(kind: RecordKind, one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    """Indices into `FIELDS[kind]` of the values that are not equal."""
    return [i for i in range(len(FIELDS[kind])) if one[2 + i] != other[2 + i]]


def as_json(record: Decision | Outcome | None) -> str:
    """One line with every value in full; null without a record."""
    if record is None:
        return "null"
    names = ["step", *(name for name, _ in FIELDS[record.kind])]
    values = {name: _plain(getattr(record, name)) for name in names}
    return json.dumps({"kind": record.kind.name.lower(), **values})


def _number(value: Any) -> int:
    if value is None:
        return NONE
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype=np.int64).tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
    return int(value)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
