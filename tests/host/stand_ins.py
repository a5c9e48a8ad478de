# SPDX-License-Identifier: Apache-2.0
"""What stands in for CUDA streams and events where code runs on CPU tensors, and for a host that
lacks a symbol."""

from types import SimpleNamespace
from typing import Any

import pytest


class Namespace(SimpleNamespace):
    """A bag of attributes that may be referred to weakly, as the host's configs may."""


def lose(target: Any, attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the dotted `attribute` away from `target`, wherever it is inherited from."""
    *owners, name = attribute.split(".")
    for owner in owners:
        target = getattr(target, owner)
    inherited = (target if isinstance(target, type) else type(target)).__mro__
    holders = inherited if isinstance(target, type) else (target, *inherited)
    for holder in holders:
        if name in vars(holder):
            monkeypatch.delattr(holder, name)


class StandInStream:
    """A stream whose work is done when it is queued."""

    def __init__(self, *args: object) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class StandInEvent:
    """Counts who waited for it; recorded at `now_ms`."""

    now_ms = 0.0

    def __init__(self, *args: object, **options: object) -> None:
        self.synchronized = 0
        self.recorded_ms = 0.0
        self.timed = bool(options.get("enable_timing"))

    def record(self, stream: object = None) -> None:
        self.recorded_ms = StandInEvent.now_ms

    def elapsed_time(self, later: "StandInEvent") -> float:
        assert self.timed and later.timed
        return later.recorded_ms - self.recorded_ms

    def synchronize(self) -> None:
        self.synchronized += 1
