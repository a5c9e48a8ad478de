# SPDX-License-Identifier: Apache-2.0
"""The host's kernel that lays out a draft's inputs, compiled for all prompts at once.

Its block is the power of two above the longest query of the batch, up to 256, so that the first
prompt of each class of lengths would compile a variant in traffic: two stalls of 0.3 s on an H200.
The kernel writes what its arguments say and reads nothing that it has written, so the first batch
may run it once for every block; the batch's own run comes last and is what remains.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

_LARGEST_BLOCK = 256


@contextmanager
def every_block(host: ModuleType, widths: Sequence[int]) -> Iterator[None]:
    """Inside, ``host.prepare_dflash_inputs`` runs for every block before it runs for its batch.

    Args:
        host: the module in which the speculator looks the function up.
        widths: drafts per request of all blocks that this server drafts. Triton makes a variant
            of its own for arguments that are one.
    """
    original = host.prepare_dflash_inputs
    signature = inspect.signature(original)

    def prepare_dflash_inputs(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        batch = given["input_batch"]
        fill = given["num_query_per_req"] - given["num_speculative_steps"]
        for width in sorted({widths[-1]} | ({1} & set(widths))):
            given["num_speculative_steps"], given["num_query_per_req"] = width, width + fill
            for longest in longest_queries(width + fill):
                given["input_batch"] = _with_longest_query(batch, longest)
                original(*bound.args, **bound.kwargs)
        return original(*args, **kwargs)

    host.prepare_dflash_inputs = prepare_dflash_inputs
    try:
        yield
    finally:
        host.prepare_dflash_inputs = original


def longest_queries(num_query: int) -> list[int]:
    """A longest query of the target for each block, behind which ``num_query`` are drafted."""
    smallest = 1 << num_query.bit_length()
    blocks = [1 << k for k in range(_LARGEST_BLOCK.bit_length()) if 1 << k >= smallest]
    return [block - num_query for block in blocks]


def _with_longest_query(batch: Any, longest: int) -> Any:
    """The batch, as far as the choice of the block goes with a query of that length."""
    other = copy.copy(batch)
    other.num_scheduled_tokens = np.full(batch.num_reqs, longest, dtype=np.int32)
    return other
