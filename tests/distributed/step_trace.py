# SPDX-License-Identifier: Apache-2.0
"""What one rank did, as JSON lines, written without making the device wait.

A value may be a tensor on the device. It is copied in the order of the stream, so later steps may
overwrite it, and its line is written once the copy is done: a step or two later on a GPU, at once
on a CPU.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MOST_PENDING = 32

Line = Callable[[dict[str, Any]], dict[str, Any]]


class StepTrace:
    """The file of one rank."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._pending: deque[tuple[dict[str, Any], torch.cuda.Event | None, Line]] = deque()

    def write(self, values: dict[str, Any], line: Line = dict) -> None:
        """Append `line(values)`, where the tensors of `values` have become nested lists."""
        copies, on_device = {}, False
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                on_device = on_device or value.is_cuda
                value = _copy(value)
            copies[name] = value
        event = None
        if on_device:
            event = torch.cuda.Event()
            event.record()
        self._pending.append((copies, event, line))
        self._flush()

    def _flush(self) -> None:
        while self._pending:
            values, event, line = self._pending[0]
            if event is not None and not event.query():
                if len(self._pending) <= MOST_PENDING:
                    return
                event.synchronize()
            self._pending.popleft()
            lists = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            self._file.write(json.dumps(line(lists)) + "\n")


def _copy(value: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda:
        return value.clone()
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)
