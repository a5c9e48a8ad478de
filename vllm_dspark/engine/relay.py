# SPDX-License-Identifier: Apache-2.0
"""Confidences and committed counts of each step, on their way from the device to the planner.

Invariants:

* What is published is a reader copy: one freshly allocated tensor per step, made on the producing
  stream. Nothing that a CUDA graph rewrites is ever handed to the copy stream.
* Rows are int32 (``parallel.block_rows``): bits travel, so equal on the device is equal here.
* When a step becomes readable depends on step numbers alone. ``collect`` waits for a copy that has
  not landed; it never asks whether one has. Ranks therefore read the same steps at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dspark.engine.decision import step_time
from vllm_dspark.parallel.block_rows import BlockRows, BlockValues


@dataclass(frozen=True)
class Landed:
    """One step's results on the host. Rows are requests in the batch order of that step."""

    step: int
    slots: np.ndarray
    """``[num_reqs]`` request-state slots."""
    agreed: BlockValues
    """What the group goes by."""
    own: BlockValues
    """What this rank produced; the same object unless the group's values replaced it."""
    width: int
    """Slots of the block that were drafted; confidences past it mean nothing."""
    step_ms: float | None = None
    """Time between the end of the step before and the end of this one on the device; None without
    a step before, after a pause, and where events are not timed."""


@dataclass
class _InFlight:
    step: int
    slots: np.ndarray
    width: int
    device_rows: tuple[torch.Tensor, ...]
    host: torch.Tensor
    event: torch.cuda.Event


class BlockRelay:
    """Ring of asynchronous device-to-host copies, at most ``depth`` in flight.

    Args:
        max_num_reqs: rows of the largest batch.
        rows: layout of a row.
        device: where confidences are produced.
        keeps_own: two sets of rows are published per step, the group's and this rank's.
        depth: steps that may be unread; the oldest is read before it would be overwritten.
        timed: steps are timed by the device. The host cannot tell their times where it runs ahead:
            the time between two of its decisions is that of an earlier step.
        waiting: entered around every wait for a copy.
    """

    def __init__(
        self,
        max_num_reqs: int,
        rows: BlockRows,
        device: torch.device,
        keeps_own: bool = False,
        depth: int = 4,
        timed: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._rows = rows
        self._device = device
        sets = 2 if keeps_own else 1
        pin = device.type != "cpu"
        self._free = deque(
            torch.empty(sets, max_num_reqs, rows.width, dtype=torch.int32, pin_memory=pin)
            for _ in range(depth)
        )
        self._in_flight: deque[_InFlight] = deque()
        self._stream = torch.cuda.Stream(device)
        self._timed = timed
        self._waiting = waiting
        self._last: torch.cuda.Event | None = None
        self.published = 0

    def publish(self, slots: np.ndarray, width: int, *rows: torch.Tensor) -> None:
        """Start copying one step.

        Args:
            slots: ``[num_reqs]`` request-state slots, batch order.
            width: slots of the block that were drafted.
            rows: ``[num_reqs, rows.width]`` int32 reader copies on the device: the group's, then
                this rank's own if they are kept.

        Raises:
            RuntimeError: ``depth`` steps are in flight and none was collected.
        """
        if not self._free:
            raise RuntimeError(f"{len(self._in_flight)} steps published and none collected")
        host = self._free.popleft()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, source in zip(host, rows, strict=True):
                target[: len(slots)].copy_(source, non_blocking=True)
            event = torch.cuda.Event(enable_timing=self._timed)
            event.record(self._stream)
        self._in_flight.append(_InFlight(self.published, slots.copy(), width, rows, host, event))
        self.published += 1

    def collect(self, lag: int) -> Iterator[Landed]:
        """Yield every unread step but the newest ``lag``, oldest first, waiting where needed."""
        while len(self._in_flight) > lag:
            entry = self._in_flight.popleft()
            with self._waiting():
                entry.event.synchronize()
            count = len(entry.slots)
            values = [self._rows.unpack(rows[:count].numpy()) for rows in entry.host]
            self._free.append(entry.host)
            step_ms = self._time(entry.event)
            yield Landed(entry.step, entry.slots, values[0], values[-1], entry.width, step_ms)

    def _time(self, event: torch.cuda.Event) -> float | None:
        last, self._last = self._last, event
        if not self._timed or last is None:
            return None
        return step_time(float(last.elapsed_time(event)))
