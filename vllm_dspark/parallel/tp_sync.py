# SPDX-License-Identifier: Apache-2.0
"""Rank 0's values on every rank of a tensor-parallel group.

Two protocols behind one interface (`TpSync`). An audit syncs nothing and is the business of
`consensus`.

* *inputs*: rank 0's packed rows (`block_rows`) replace those of every rank before anything reads
  them. Budget, lengths and graph tier are then functions of equal bits. One device message a step.
* *outputs*: every rank plans, rank 0's plan counts. One host message a step (budget and lengths),
  and one device message (lengths that only the device knows, and drafted ids).

Invariants:

* Every rank enters every message of a step. Whether a message is sent depends on the protocol, the
  sites and the caller's place in the step, never on a value, an event or a missing input of this
  rank.
* The shape of a message depends on `num_reqs` and gamma, which come from the scheduler.
* "No budget" travels as -1.
* A group of one has no sync: `open_tp_sync` returns None.
* A wait for a host message is bounded; what fails is a `SyncError` that names the message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from vllm_dspark.parallel.block_rows import BlockValues
from vllm_dspark.parallel.sync_sites import DEFAULT_SITES, SyncSite

HOST_TIMEOUT_S = 120.0
_UNKNOWN = -1
_HEADER = 7


class SyncError(RuntimeError):
    """A message of the TP sync failed; the group cannot go on."""


class Group(Protocol):
    """The part of vLLM's `GroupCoordinator` that is used."""

    rank_in_group: int
    world_size: int
    ranks: list[int]
    device_group: Any
    cpu_group: Any


@dataclass(frozen=True)
class HostPlan:
    """What the host decides for one step, as it travels."""

    budget: int | None
    """Drafts verified by the batch; None verifies all, -1 on the wire."""
    verified_drafts: int
    tier_tokens: int | None
    uniform_k: int | None
    draft_width: int
    """Slots of the block that is drafted at the end of the step."""
    admitted: np.ndarray | None
    """`[num_reqs]` drafts admitted; None if only the device knows."""

    def to_wire(self, step: int, num_reqs: int) -> np.ndarray:
        """int64 `[_HEADER + num_reqs]`."""
        wire = np.full(_HEADER + num_reqs, _UNKNOWN, dtype=np.int64)
        wire[0] = step
        wire[1] = _UNKNOWN if self.budget is None else self.budget
        wire[2] = self.verified_drafts
        wire[3] = _UNKNOWN if self.tier_tokens is None else self.tier_tokens
        wire[4] = _UNKNOWN if self.uniform_k is None else self.uniform_k
        wire[5] = self.draft_width
        wire[6] = self.admitted is not None
        if self.admitted is not None:
            wire[_HEADER:] = self.admitted
        return wire

    @classmethod
    def from_wire(cls, wire: np.ndarray) -> HostPlan:
        """Inverse of `to_wire`."""
        budget, verified, tier, uniform_k, draft_width, has_lens = map(int, wire[1:_HEADER])
        return cls(
            None if budget == _UNKNOWN else budget,
            verified,
            None if tier == _UNKNOWN else tier,
            None if uniform_k == _UNKNOWN else uniform_k,
            draft_width,
            wire[_HEADER:].astype(np.int32) if has_lens else None,
        )


OnSync = Callable[[float, int], None]
"""Seconds that this rank's host spent in a sync, and its messages."""
OnDisagreement = Callable[[str, int], None]
"""Site, and how many values of this rank differed from rank 0's."""


class TpSync:
    """Passes this rank's values through, except at ACCEPT if that site is on.

    Args:
        group: the tensor-parallel group, more than one rank.
        sites: where rank 0's values are used; `sync_sites.objection` says which may go together.
        on_sync: told about every message.
        on_disagreement: told where this rank's own values differed from rank 0's.
        timeout_s: longest wait for a message between hosts.
    """

    def __init__(
        self,
        group: Group,
        sites: Collection[SyncSite] = DEFAULT_SITES,
        on_sync: OnSync | None = None,
        on_disagreement: OnDisagreement | None = None,
        timeout_s: float = HOST_TIMEOUT_S,
    ) -> None:
        self.sites = frozenset(SyncSite(site) for site in sites)
        self.rank = group.rank_in_group
        self._group = group
        self._source = group.ranks[0]
        self._on_sync = on_sync or (lambda seconds, messages: None)
        self._on_disagreement = on_disagreement or (lambda site, count: None)
        self._timeout = timedelta(seconds=timeout_s)
        self.keeps_own_rows = False
        """`agree_block` replaces values; the rank's own are worth keeping for `compare_blocks`."""
        self.mends_drafts_later = False
        """Drafted ids become equal in `agree_split`, not when they are published."""
        self.syncs_accept = SyncSite.ACCEPT in self.sites

    # ------------------------------------------------------------------ what the step calls

    def agree_block(self, rows: torch.Tensor, gamma: int) -> torch.Tensor:
        """Rows that count, `[num_reqs, 2 * gamma + 2]` int32; `rows` itself is left alone."""
        return rows

    def agree_plan(self, step: int, plan: HostPlan, num_reqs: int) -> HostPlan:
        """The plan that counts for `num_reqs` requests."""
        return plan

    def agree_split(
        self, lens: torch.Tensor | None, draft_tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor | None:
        """Device lengths `[num_reqs]` int32 that count, the same tensor where nothing was replaced;
        None if the host decided.

        Drafted ids that count replace those of `slots` `[num_reqs]` in `draft_tokens`
        `[max_num_reqs, gamma]`.
        """
        return lens

    def agree_accept(
        self, token_ids: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Committed ids `[num_reqs, width]` and counts `[num_reqs]` that count on every rank."""
        if not self.syncs_accept:
            return token_ids, num_sampled, num_rejected
        counts = torch.stack([num_sampled, num_rejected], dim=1)
        packed = torch.cat([token_ids, counts.to(token_ids.dtype)], dim=1)
        self._device_broadcast(packed, SyncSite.ACCEPT)
        return (
            packed[:, :-2].contiguous(),
            packed[:, -2].to(num_sampled.dtype),
            packed[:, -1].to(num_rejected.dtype),
        )

    def compare_blocks(self, agreed: BlockValues, own: BlockValues, width: int) -> None:
        """Report where this rank's own rows differed from rank 0's, once they are on the host.

        Args:
            width: slots that were drafted; what lies past them means nothing.
        """
        bits = agreed.confidence.view(np.int32), own.confidence.view(np.int32)
        ids = agreed.drafts, own.drafts
        for site, (theirs, mine) in ((SyncSite.PLAN, bits), (SyncSite.DRAFT, ids)):
            differs = theirs[:, :width] != mine[:, :width]
            self._differed(site, int(np.count_nonzero(differs)))
        self._differed(SyncSite.LENS, int(np.count_nonzero(agreed.verified != own.verified)))
        committed = int(np.count_nonzero(agreed.num_sampled != own.num_sampled))
        self._differed(SyncSite.ACCEPT, committed)

    # ------------------------------------------------------------------ messages

    def _differed(self, site: SyncSite, count: int) -> None:
        if count:
            self._on_disagreement(str(site), count)

    def _device_broadcast(self, tensor: torch.Tensor, site: SyncSite) -> None:
        self._broadcast(tensor, self._group.device_group, site)

    def _host_broadcast(self, tensor: torch.Tensor, site: SyncSite) -> None:
        self._broadcast(tensor, self._group.cpu_group, site)

    def _broadcast(self, tensor: torch.Tensor, group: Any, site: SyncSite) -> None:
        begin = time.perf_counter()
        try:
            if tensor.device.type == "cpu":
                work = dist.broadcast(tensor, src=self._source, group=group, async_op=True)
                work.wait(self._timeout)
            else:
                # Ordered by the stream; a wait with a limit would stop the host here.
                dist.broadcast(tensor, src=self._source, group=group)
        except RuntimeError as error:
            raise SyncError(
                f"rank {self.rank} got no {site} message {tuple(tensor.shape)} from rank 0 within "
                f"{self._timeout.total_seconds():g} s: {error}"
            ) from error
        self._on_sync(time.perf_counter() - begin, 1)


class InputsSync(TpSync):
    """Rank 0's rows for every rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keeps_own_rows = self.rank != 0

    def agree_block(self, rows: torch.Tensor, gamma: int) -> torch.Tensor:
        agreed = rows if self.rank == 0 else torch.empty_like(rows)
        self._device_broadcast(agreed, SyncSite.PLAN)
        if self.rank == 0:
            return agreed
        # The message is one; a site that is off keeps this rank's columns.
        if SyncSite.PLAN not in self.sites:
            agreed[:, :gamma] = rows[:, :gamma]
            agreed[:, gamma + 1] = rows[:, gamma + 1]
        if SyncSite.DRAFT not in self.sites:
            agreed[:, gamma + 2 :] = rows[:, gamma + 2 :]
        return agreed


class OutputsSync(TpSync):
    """Rank 0's plan for every rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mends_drafts_later = SyncSite.DRAFT in self.sites

    def agree_plan(self, step: int, plan: HostPlan, num_reqs: int) -> HostPlan:
        if SyncSite.PLAN not in self.sites:
            return plan
        own = plan.to_wire(step, num_reqs)
        tensor = torch.from_numpy(own.copy())
        self._host_broadcast(tensor, SyncSite.PLAN)
        wire = tensor.numpy()
        if wire[0] != step:
            raise SyncError(
                f"rank {self.rank} is at step {step} and got the plan of step {int(wire[0])}: "
                "the ranks have entered different numbers of steps"
            )
        self._differed(SyncSite.PLAN, int((wire[1:_HEADER] != own[1:_HEADER]).any()))
        self._differed(SyncSite.LENS, int(np.count_nonzero(wire[_HEADER:] != own[_HEADER:])))
        return HostPlan.from_wire(wire)

    def agree_split(
        self, lens: torch.Tensor | None, draft_tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor | None:
        if self.sites.isdisjoint((SyncSite.LENS, SyncSite.DRAFT)):
            return lens
        drafts = draft_tokens[slots]
        first = torch.full_like(drafts[:, 0], _UNKNOWN) if lens is None else lens
        packed = torch.cat([first.to(torch.int32).unsqueeze(1), drafts.to(torch.int32)], dim=1)
        self._device_broadcast(packed, SyncSite.LENS)
        if lens is not None and SyncSite.LENS in self.sites:
            lens = packed[:, 0].contiguous()
        if SyncSite.DRAFT in self.sites:
            draft_tokens[slots] = packed[:, 1:].to(draft_tokens.dtype)
        return lens


def connect(group: Group, device: torch.device) -> None:
    """Send the first device message of a group; every rank calls this, and waits for the others.

    A library like NCCL connects ranks when they first talk, which takes seconds and memory. Early,
    no request waits for it, and the host counts it when it sizes the KV cache.
    """
    message = torch.zeros(1, dtype=torch.int32, device=device)
    dist.broadcast(message, src=group.ranks[0], group=group.device_group)
    message.item()


_PROTOCOLS: dict[str, type[TpSync]] = {
    "inputs": InputsSync,
    "outputs": OutputsSync,
}
_UNSYNCED = ("audit", "off")


def open_tp_sync(
    protocol: str,
    group: Group,
    sites: Collection[SyncSite] = DEFAULT_SITES,
    on_sync: OnSync | None = None,
    on_disagreement: OnDisagreement | None = None,
    timeout_s: float = HOST_TIMEOUT_S,
) -> TpSync | None:
    """The sync that `dspark.tp_sync` names; None where there is nothing to sync.

    Raises:
        ValueError: unknown protocol.
    """
    if protocol not in (*_PROTOCOLS, *_UNSYNCED):
        allowed = ", ".join(repr(name) for name in (*_PROTOCOLS, *_UNSYNCED))
        raise ValueError(f"tp_sync={protocol!r}: allowed: {allowed}")
    if protocol in _UNSYNCED or group.world_size == 1:
        return None
    return _PROTOCOLS[protocol](group, sites, on_sync, on_disagreement, timeout_s)
