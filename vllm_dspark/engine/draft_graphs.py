# SPDX-License-Identifier: Apache-2.0
"""One graph manager for draft blocks of every width.

Graphs share what they allocate only within one capture run: each run has a stream of its own, and
the allocator never lends a block to another stream. So the families of all widths are captured in
one run, largest first, and together need little more memory than the largest graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

AtQuery = Callable[[int], AbstractContextManager[None]]
"""Context in which the speculator drafts blocks of so many query tokens."""


class _EachAtItsQuery(CudaGraphManager):
    """Prepares and runs every graph of a capture with the speculator at that graph's width.

    It stands between the host's draft graph manager, which builds the forward passes, and that
    manager's base class, which captures them.
    """

    at_query: AtQuery

    def capture(self, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        def create(desc: BatchExecutionDescriptor, **stage: Any) -> Callable[[Any], None]:
            query_len = desc.uniform_token_count
            assert query_len is not None, "draft graphs are uniform"
            with self.at_query(query_len):
                forward = create_forward_fn(desc, **stage)

            def run(mode: Any) -> None:
                with self.at_query(query_len):
                    forward(mode)

            return run

        super().capture(create, *args, **kwargs)


class DraftGraphManager(DFlashCudaGraphManager, _EachAtItsQuery):
    """The host's draft graph manager, holding the graphs of several others.

    Args:
        families: managers that the host made, one per width, none of them captured; the last one's
            settings hold.
        at_query: puts the speculator to a width.
    """

    def __init__(self, families: Iterable[CudaGraphManager], at_query: AtQuery) -> None:
        managers = list(families)
        usual = managers[-1]
        super().__init__(
            usual.vllm_config, usual.device, usual.cudagraph_mode, usual.decode_query_len
        )
        self.at_query = at_query
        self._candidates, self._capture_descs = {}, {}
        for manager in managers:
            for key, found in manager._candidates.items():
                self._candidates.setdefault(key, []).extend(found)
            for mode, descs in manager._capture_descs.items():
                self._capture_descs.setdefault(mode, []).extend(descs)
        for descs in self._capture_descs.values():
            descs.sort(key=lambda desc: desc.num_tokens, reverse=True)
