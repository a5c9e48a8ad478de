# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank of a simulated group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_dspark.engine.relay import BlockRelay, Landed

DIED = 9


@dataclass(frozen=True)
class Fault:
    """One kind of trouble on one rank.

    Kinds: `none`, `perturb` (confidences times 1 + `size` * noise), `missing` (no confidences),
    `nan` (one row), `flip` (one drafted id), `late` (the host copy lands after the step), `cost`
    (another cost table), `retable` (the same while serving), `draft_width`, `commit` (one token
    fewer than rank 0), `die`, `stall`.
    """

    kind: str = "none"
    rank: int = 1
    size: float = 1e-3
    every: int = 3
    """Steps between two occurrences."""
    start: int = 10
    """First step that is disturbed."""

    def hits(self, kind: str, rank: int, step: int) -> bool:
        """This kind strikes this rank in this step."""
        mine = self.kind == kind and self.rank == rank
        return mine and step >= self.start and (step - self.start) % self.every == 0

    def confidence(self, rank: int, step: int, values: torch.Tensor) -> torch.Tensor | None:
        """The step's confidences as this rank has them."""
        if self.hits("missing", rank, step):
            return None
        if self.hits("nan", rank, step):
            values[step % len(values), 1] = torch.nan
        if self.hits("perturb", rank, step):
            random = np.random.default_rng(step)
            noise = torch.from_numpy(random.standard_normal(values.shape).astype(np.float32))
            values = (values * (1.0 + self.size * noise)).clamp(0.0, 1.0)
        return values

    def drafts(self, rank: int, step: int, ids: torch.Tensor) -> None:
        """Flip a drafted id in place."""
        if self.hits("flip", rank, step):
            ids[step % len(ids), 0] += 1

    def end(self, rank: int, step: int) -> None:
        """Die or stop answering in the middle of a step."""
        if self.hits("die", rank, step):
            os._exit(DIED)
        if self.hits("stall", rank, step):
            time.sleep(3600)


class LateEvent:
    """Of a copy that lands only `steps` polls later, or when somebody waits for it."""

    def __init__(self, host: torch.Tensor, polls: int) -> None:
        self._host, self._landed = host, host.clone()
        self._polls = polls
        host.fill_(-7)

    def query(self) -> bool:
        self._polls -= 1
        if self._polls <= 0:
            self._host.copy_(self._landed)
        return self._polls <= 0

    def synchronize(self) -> None:
        time.sleep(0.002)
        self._host.copy_(self._landed)


class LateRelay(BlockRelay):
    """Copies land late in some steps."""

    late_in: Any = staticmethod(lambda step: False)

    def publish(self, *args: Any) -> Any:
        step, answer = self.published, super().publish(*args)
        entry = self._in_flight[-1]
        if self.late_in(step):
            entry.event = LateEvent(entry.host, 2)
        return answer


class PollingRelay(LateRelay):
    """What a relay must not do: leave out what has not landed yet."""

    def collect(self, lag: int) -> Iterator[Landed]:
        ready = 0
        for entry in list(self._in_flight)[: len(self._in_flight) - lag]:
            if isinstance(entry.event, LateEvent) and not entry.event.query():
                break
            ready += 1
        yield from super().collect(len(self._in_flight) - ready)
