# SPDX-License-Identifier: Apache-2.0
"""Which decode graphs are captured, and which one a plan replays.

The host captures either uniform decode graphs of one query length (gamma + 1), or varlen graphs
that take any lengths up to it. Further families of uniform graphs are laid out from the same
capture
sizes: one per query length where the host fixes lengths, the two ends (no draft, every draft) where
the device does. A planned step is dispatched to the family of its query length, and a full budget
replays exactly the graph that fixed-gamma decoding replays.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from vllm_dspark.core.tiers import ExecMode, TierLadder
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.session import Session, find_session


class VerifyGraphManager(ModelCudaGraphManager):
    """The host's graph manager with one family of uniform graphs per query length."""

    def __init__(
        self, vllm_config: Any, *args: Any, varlen_decode: bool = False, **kw: Any
    ) -> None:
        session = find_session(vllm_config.speculative_config)
        assert session is not None, "bound only for runners that have a session"
        self._session: Session = session
        self._single_token: dict[Any, list[BatchExecutionDescriptor]] = {}
        """Candidates of batches with one token per request."""
        varlen = session.mode is VerifyMode.DEVICE
        super().__init__(vllm_config, *args, varlen_decode=varlen, **kw)

    def _init_candidates(self) -> None:
        super()._init_candidates()
        if not self._capture_descs:
            return
        self._add_uniform_graphs()
        if self._session.mixed_full_graphs and self.cudagraph_mode.has_piecewise_cudagraphs():
            self._add_mixed_graphs()
        self._single_token = {
            key: [desc for desc in found if _schedules_single_tokens(desc)]
            for key, found in self._candidates.items()
        }

    def _add_uniform_graphs(self) -> None:
        usual_width, usual_config = self.decode_query_len, self.compilation_config
        varlen, self.varlen_decode = self.varlen_decode, False
        sizes = sorted(usual_config.cudagraph_capture_sizes or ())
        requests = thin([size for size in sizes if size <= self.max_num_reqs])
        try:
            for query_len in self._uniform_query_lens():
                self.decode_query_len = query_len
                self.compilation_config = copy.copy(usual_config)
                self.compilation_config.cudagraph_capture_sizes = [
                    count * query_len for count in requests if count * query_len <= sizes[-1]
                ]
                self._add_family(query_len)
        finally:
            self.decode_query_len, self.compilation_config = usual_width, usual_config
            self.varlen_decode = varlen

    def _add_mixed_graphs(self) -> None:
        """Full graphs for steps that mix prefill and decode, asked before the piecewise ones.

        A piecewise step launches every layer from the host, which takes longer than the device
        needs for some hundred tokens. Where the attention backend replays any batch, one launch
        does.
        """
        usual = self.cudagraph_mode
        self.cudagraph_mode = CUDAGraphMode.FULL
        try:
            self._add_family(None)
        finally:
            self.cudagraph_mode = usual

    def _uniform_query_lens(self) -> list[int]:
        """Query lengths that get uniform graphs besides what the host captures anyway."""
        full = self.decode_query_len
        wanted = {
            VerifyMode.UNIFORM: list(range(1, full)),
            # Any length runs in a varlen graph; the two ends run cheaper in a uniform one.
            VerifyMode.DEVICE: [1, full],
            VerifyMode.HOST: [1],
        }
        return wanted.get(self._session.mode, [])

    def _add_family(self, query_len: int | None) -> None:
        """Let the host lay out full graphs of ``query_len`` and put them before what is there.

        A uniform graph matches no batch but its own, so being asked first changes nothing for
        others; being asked last would lose every step to the piecewise graph of the same size.
        None is the family that takes any batch; it goes behind the other full graphs.
        """
        candidates, descs = self._candidates, self._capture_descs
        self._candidates, self._capture_descs = {}, {}
        super()._init_candidates()
        family_candidates, family_descs = self._candidates, self._capture_descs
        self._candidates, self._capture_descs = candidates, descs

        def wanted(desc: BatchExecutionDescriptor) -> bool:
            return desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count == query_len

        for key, found in family_candidates.items():
            family = [desc for desc in found if wanted(desc)]
            present = self._candidates.get(key, [])
            full = [desc for desc in present if desc.cg_mode == CUDAGraphMode.FULL]
            rest = [desc for desc in present if desc.cg_mode != CUDAGraphMode.FULL]
            ahead = full + family if query_len is None else family + full
            self._candidates[key] = ahead + rest
        full_descs = self._capture_descs.setdefault(CUDAGraphMode.FULL, [])
        full_descs.extend(filter(wanted, family_descs.get(CUDAGraphMode.FULL, ())))
        full_descs.sort(key=lambda desc: desc.num_tokens, reverse=True)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        planner = self._session.planner
        planned = planner.uniform_query_len if planner is not None else None
        if planned is not None:
            uniform_token_count = max_query_len = planned
        usual = self._candidates
        if num_tokens == num_reqs:
            self._candidates = self._single_token
        try:
            desc = super().dispatch(
                num_reqs,
                num_tokens,
                uniform_token_count,
                num_active_loras,
                max_query_len,
                num_ubatches,
            )
        finally:
            self._candidates = usual
        if planner is not None:
            planner.dispatched(desc)
        return desc

    def ladders(self) -> dict[ExecMode, TierLadder]:
        """Token totals with a captured graph, by execution mode, uniform families left out."""
        sizes: dict[ExecMode, set[int]] = {ExecMode.FULL: set(), ExecMode.PIECEWISE: set()}
        for mode, descs in self._capture_descs.items():
            kind = ExecMode.FULL if mode is CUDAGraphMode.FULL else ExecMode.PIECEWISE
            for desc in descs:
                if desc.uniform_token_count is not None:
                    continue
                # A full graph without a bound on query lengths is there for mixed steps.
                mixed = kind is ExecMode.FULL and desc.max_query_len is None
                sizes[ExecMode.PIECEWISE if mixed else kind].add(desc.num_tokens)
        return {kind: TierLadder(found) for kind, found in sizes.items()}

    def width_ladders(self) -> dict[int, TierLadder]:
        """Token totals of the uniform decode graphs, by drafts per request."""
        sizes: dict[int, set[int]] = {}
        for desc in self._capture_descs.get(CUDAGraphMode.FULL, ()):
            if desc.uniform_token_count is not None:
                sizes.setdefault(desc.uniform_token_count - 1, set()).add(desc.num_tokens)
        return {width: TierLadder(tokens) for width, tokens in sizes.items()}


def _schedules_single_tokens(desc: BatchExecutionDescriptor) -> bool:
    """Whether the graph may replay a batch with one token per request.

    FlashAttention 3 plans each replay on the host's longest query, and treats a longest query of
    one as not causal. A graph captured for longer ones runs other tiles than that plan is made for,
    and attends to the wrong tokens.
    """
    return desc.cg_mode != CUDAGraphMode.FULL or desc.uniform_token_count == 1


def thin(sizes: list[int], ratio: float = 1.18) -> list[int]:
    """Sizes (ascending) without those that pad less than ``ratio`` to the next one kept.

    The largest size stays, so that nothing the host could run in a graph falls out of one.
    """
    kept: list[int] = []
    for size in reversed(sizes):
        if not kept or kept[-1] >= size * ratio:
            kept.append(size)
    return kept[::-1]
