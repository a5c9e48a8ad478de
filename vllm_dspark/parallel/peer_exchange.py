# SPDX-License-Identifier: Apache-2.0
"""Fixed-size messages between all ranks of a group, every wait bounded, every culprit named.

Each pair of ranks talks directly. A collective would be shorter, but its failure does not say which
rank stayed away. The group is a gloo group of its own, so a thread may use it while the main thread
is inside a collective of the host's groups.

`PeerExchange.open` is collective over the ranks given, and over no others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class PeerError(RuntimeError):
    """Ranks that did not answer; after it the exchange is unusable.

    Attributes:
        ranks: the silent ranks, numbered inside the group.
    """

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        self.ranks = tuple(ranks)
        names = ", ".join(str(rank) for rank in ranks)
        super().__init__(f"no answer from rank {names} of the tensor-parallel group: {why}")


class PeerExchange:
    """Swaps equally long messages with every other rank.

    Args:
        ranks: global ranks, in group order.
        rank_in_group: this rank's position in them.
        timeout_s: longest wait for all peers of one swap.
        process_group: the gloo group to talk through.
    """

    def __init__(
        self, ranks: Sequence[int], rank_in_group: int, timeout_s: float, process_group: Any
    ) -> None:
        self.rank = rank_in_group
        self.world_size = len(ranks)
        self.timeout_s = timeout_s
        self._ranks = list(ranks)
        self._group = process_group

    @classmethod
    def open(cls, ranks: Sequence[int], rank_in_group: int, timeout_s: float) -> PeerExchange:
        """An exchange with a group of its own; every rank of `ranks` calls this."""
        group = dist.new_group(
            list(ranks),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,
        )
        return cls(ranks, rank_in_group, timeout_s, group)

    def swap(self, mine: torch.Tensor) -> torch.Tensor:
        """This rank's message `[size]` to everybody; returns `[world_size, size]`.

        Raises:
            PeerError: naming the ranks that did not answer in time or are gone.
        """
        received = mine.new_empty((self.world_size, *mine.shape))
        received[self.rank] = mine
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + self.timeout_s
        silent: dict[int, str] = {}
        works: list[tuple[int, Any]] = []
        for start in (self._receive, self._send):
            for peer in peers:
                try:
                    works.append((peer, start(peer, received[peer], mine)))
                except RuntimeError as error:
                    silent.setdefault(peer, _first_line(error))
        for peer, work in works:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                silent.setdefault(peer, _first_line(error))
        if silent:
            raise PeerError(sorted(silent), "; ".join(silent.values()))
        return received

    def _receive(self, peer: int, into: torch.Tensor, mine: torch.Tensor) -> Any:
        return dist.irecv(into, src=self._ranks[peer], group=self._group)

    def _send(self, peer: int, into: torch.Tensor, mine: torch.Tensor) -> Any:
        return dist.isend(mine, dst=self._ranks[peer], group=self._group)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
