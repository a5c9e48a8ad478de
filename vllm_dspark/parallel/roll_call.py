# SPDX-License-Identifier: Apache-2.0
"""Do all ranks of the group run the plugin, in the same version and with the same options?

Asked once, before the plugin's first message. A rank without the plugin, on a node where it is not
installed, would stay away from every message, and the others would wait in a collective of the
host's.

The answers go through the key-value store that the process group was made with. A message could
not do it: who does not know of it meets it with a collective of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

LIMIT_S = 120.0


class RollCallError(RuntimeError):
    """A rank of the group lacks the plugin, or runs another version or other options."""


def default_store() -> Any:
    """The store of torch.distributed's default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def call_roll(
    store: Any, ranks: Sequence[int], rank_in_group: int, badge: str, limit_s: float = LIMIT_S
) -> None:
    """Return once every rank has shown this badge.

    Args:
        store: has `set`, `get` and `wait`; the same one on all ranks.
        ranks: global ranks of the group, which name it.
        badge: version and options of this rank.

    Raises:
        RollCallError: naming the ranks that show another badge, or none within the limit.
    """
    group = "-".join(map(str, ranks))
    keys = [f"vllm-dspark/{group}/{rank}" for rank in range(len(ranks))]
    store.set(keys[rank_in_group], badge)
    deadline = time.monotonic() + limit_s
    for rank, key in enumerate(keys):
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left_s))
        except RuntimeError as error:
            raise RollCallError(
                f"rank {rank} of the tensor-parallel group has not shown within {limit_s:g} s that "
                "it runs vllm-dspark: install it on every node, in the same version, and leave "
                f"VLLM_DSPARK_ENABLED alone there ({str(error).partition(chr(10))[0]})"
            ) from error
        shown = store.get(key).decode()
        if shown != badge:
            raise RollCallError(
                f"rank {rank} of the tensor-parallel group runs vllm-dspark with {shown}, and rank "
                f"{rank_in_group} with {badge}: both must be the same on every node"
            )
