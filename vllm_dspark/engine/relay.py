# SPDX-License-Identifier: Apache-2.0
"""Confidences and committed counts of each step, on their way from the device to the planner.

Invariants:

* What is published is a reader copy: one freshly allocated tensor per step, made on the producing
  stream. Nothing that a CUDA graph rewrites is ever handed to the copy stream.
* When a step becomes readable depends on step numbers alone. ``collect`` waits for a copy that has
  not landed; it never asks whether one has. Ranks therefore read the same steps at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

Broadcast = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Landed:
    """One step's results on the host. Rows are requests in the batch order of that step."""

    step: int
    slots: np.ndarray
    """``[num_reqs]`` request-state slots."""
    confidence: np.ndarray
    """``[num_reqs, gamma]`` float32, of the block drafted in this step."""
    num_sampled: np.ndarray
    """``[num_reqs]`` int32, tokens committed by this step's verification."""
    verified: np.ndarray
    """``[num_reqs]`` int32, drafts verified in this step; -1 where the host decided."""
    width: int
    """Slots of the block that were drafted; confidences past it mean nothing."""


@dataclass
class _InFlight:
    step: int
    slots: np.ndarray
    width: int
    device_copy: torch.Tensor
    host: torch.Tensor
    event: torch.cuda.Event


class BlockRelay:
    """Ring of asynchronous device-to-host copies, at most ``depth`` in flight.

    Args:
        max_num_reqs: rows of the largest batch.
        gamma: drafts per block.
        device: where confidences are produced.
        depth: steps that may be unread; the oldest is read before it would be overwritten.
        broadcast: applied to the packed tensor before it is copied; every rank calls it in every
            step, so that all ranks copy equal bits (identity for a single rank).
    """

    def __init__(
        self,
        max_num_reqs: int,
        gamma: int,
        device: torch.device,
        depth: int = 4,
        broadcast: Broadcast | None = None,
    ) -> None:
        self._gamma = gamma
        self._device = device
        self._broadcast = broadcast
        pin = device.type != "cpu"
        self._free = deque(
            torch.empty(max_num_reqs, gamma + 2, dtype=torch.float32, pin_memory=pin)
            for _ in range(depth)
        )
        self._in_flight: deque[_InFlight] = deque()
        self._stream = torch.cuda.Stream(device)
        self.published = 0

    def publish(
        self,
        slots: np.ndarray,
        confidence: torch.Tensor,
        num_sampled: torch.Tensor,
        verified: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """Start copying one step.

        Args:
            slots: ``[num_reqs]`` request-state slots, batch order.
            confidence: ``[num_reqs, gamma]`` float32 on the device.
            num_sampled: ``[num_reqs]`` integers on the device.
            verified: ``[num_reqs]`` integers on the device.
            width: slots of the block that were drafted.
            The three tensors may be rewritten right after.

        Returns:
            The agreed confidences ``[num_reqs, gamma]`` float32, a reader copy.

        Raises:
            RuntimeError: ``depth`` steps are in flight and none was collected.
        """
        if not self._free:
            raise RuntimeError(f"{len(self._in_flight)} steps published and none collected")
        counts = torch.stack([num_sampled, verified], dim=1).to(torch.float32)
        packed = torch.cat([confidence, counts], dim=1)
        if self._broadcast is not None:
            packed = self._broadcast(packed)
        host = self._free.popleft()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host[: len(slots)].copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._in_flight.append(_InFlight(self.published, slots.copy(), width, packed, host, event))
        self.published += 1
        return packed[:, : self._gamma]

    def collect(self, lag: int) -> Iterator[Landed]:
        """Yield every unread step but the newest ``lag``, oldest first, waiting where needed."""
        while len(self._in_flight) > lag:
            entry = self._in_flight.popleft()
            entry.event.synchronize()
            rows = entry.host[: len(entry.slots)].numpy().copy()
            self._free.append(entry.host)
            yield Landed(
                entry.step,
                entry.slots,
                rows[:, : self._gamma],
                rows[:, self._gamma].astype(np.int32),
                rows[:, self._gamma + 1].astype(np.int32),
                entry.width,
            )
