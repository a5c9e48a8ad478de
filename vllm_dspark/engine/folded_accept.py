# SPDX-License-Identifier: Apache-2.0
"""Acceptance without the host's sampler, where the batch allows it.

A batch of greedy requests that want nothing but tokens needs no sampler: its outcome is an argmax
per logit row and a comparison (``kernels.greedy_accept``). Two ways to run it:

* *graph*: gather, LM head and acceptance are one captured graph that is replayed behind the
  verify graph (SGLang's folded accept, see its ``DsparkVerifyEpilogue``);
* *kernel*: the same function on logits that the host computed, for steps that ran no full graph.

Everything else is *host*: the rejection sampler of vLLM. Which way a step goes depends only on what
every rank knows alike: options, sampling parameters and the shape of the batch.

One graph serves (request bucket, logit-row bucket). A batch has no more requests than logit rows,
so the row bucket fixes the request bucket and there is one graph per number of rows.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from vllm_dspark.engine.accept_buffers import AcceptBuffers
from vllm_dspark.kernels.greedy_accept import Accepted, greedy_accept

MAX_GRAPH_ROWS = 256
"""More logit rows keep the device busy for longer than the host needs to launch the sampler, and
padding them to a bucket costs more than it saves."""

logger = logging.getLogger("vllm.dspark")


def host_reason(
    sampler: Any, verifier: Any, input_batch: Any, invalid_drafts: torch.Tensor | None
) -> str:
    """Why the host's sampler has to accept this batch; empty if an argmax will do.

    Args:
        sampler: the host's sampler with the requests' sampling state.
        verifier: the host's rejection sampler.
        input_batch: the batch of the step.
        invalid_drafts: drafts that a grammar rules out.
    """
    rows, states = input_batch.idx_mapping_np, sampler.sampling_states
    checks = (
        ("sampled", lambda: np.any(states.temperature.np[rows] != 0.0)),
        # Penalties, bias, bad words, minimum length, thinking budget, custom processors.
        ("logits_processing", lambda: np.any(sampler.needs_logits_processing[rows])),
        ("logprobs", lambda: states.max_num_logprobs(rows) >= 0),
        (
            "structured_output",
            lambda: invalid_drafts is not None or input_batch.has_structured_output_reqs,
        ),
        ("nan_check", lambda: sampler.compute_nans),
        ("sampling_mask", lambda: sampler.return_sampling_mask),
        ("watermark", lambda: verifier.watermark_key is not None),
        ("synthetic_acceptance", lambda: verifier.synthetic_conditional_rates is not None),
        ("relaxed_acceptance", lambda: bool(getattr(verifier, "fly_window_size", 0))),
    )
    return next((reason for reason, applies in checks if applies()), "")


class FoldedAccept:
    """Accepts greedy batches into its buffers; every outcome that leaves is a reader copy.

    Args:
        buffers: where outcomes are written.
        prefill_len: the runner's prompt lengths, read anew in every step: the host moves them.
    """

    def __init__(self, buffers: AcceptBuffers, prefill_len: Any) -> None:
        self._buffers = buffers
        self._prefill_len = prefill_len
        self._graphs: AcceptGraphs | None = None

    @torch.inference_mode()
    def warm(self, logits: torch.Tensor) -> None:
        """Compile the kernels for such logits ``[1, vocabulary]``, before traffic."""
        first, one = (
            torch.zeros(1, dtype=dtype, device=logits.device)
            for dtype in (torch.int64, torch.int32)
        )
        greedy_accept(
            logits,
            one,
            first,
            first,
            torch.arange(2, dtype=torch.int32, device=logits.device),
            first,
            one,
            self._prefill_len.gpu,
            self._buffers.accept_buffers(1),
        )

    def capture(self, runner: Any) -> None:
        """Capture the graphs of a runner that has captured its model; see ``AcceptGraphs``."""
        self._graphs = AcceptGraphs.of(runner, self._buffers)

    def graph_reason(self, hidden_states: torch.Tensor, input_batch: Any) -> str:
        """Why no captured graph can accept this batch; empty if one can."""
        if self._graphs is None:
            return "no_graphs"
        return self._graphs.reason(hidden_states, input_batch)

    def replay(self, input_batch: Any, readers: tuple[torch.cuda.Stream, ...] = ()) -> Accepted:
        """Outcome of a batch for which ``graph_reason`` has none."""
        assert self._graphs is not None
        self._graphs.replay(input_batch)
        return self._buffers.read_accept(input_batch.num_reqs, readers)

    def run(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        num_columns: int | None,
        readers: tuple[torch.cuda.Stream, ...] = (),
    ) -> Accepted:
        """Outcome of a batch for which ``host_reason`` has none, from logits ``[rows, vocab]``."""
        greedy_accept(
            logits,
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            input_batch.seq_lens,
            self._prefill_len.gpu,
            self._buffers.accept_buffers(input_batch.num_reqs),
            num_columns,
        )
        return self._buffers.read_accept(input_batch.num_reqs, readers)


class AcceptGraphs:
    """Captured acceptance on persistent inputs, one graph per number of logit rows.

    Args:
        hidden_states: ``[max_tokens, hidden]`` that the verify graphs write.
        compute_logits: LM head, ``[rows, hidden]`` to ``[rows, vocabulary]``.
        input_buffers: the runner's ``input_ids``, ``positions`` and ``seq_lens``.
        row_sizes: numbers of logit rows to capture.
        buffers: where outcomes are written.
        num_columns: leading logits that count, None for all.
    """

    def __init__(
        self,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        input_buffers: Any,
        row_sizes: list[int],
        buffers: AcceptBuffers,
        num_columns: int | None = None,
    ) -> None:
        device, slots = hidden_states.device, buffers.max_num_reqs
        self._hidden_states = hidden_states
        self._compute_logits = compute_logits
        self._inputs = input_buffers
        self._buffers = buffers
        self._num_columns = num_columns
        self.row_sizes = sorted(row_sizes)
        self._logits_indices = torch.zeros(self.row_sizes[-1], dtype=torch.int64, device=device)
        self._cu_num_logits = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        # No request of a batch that gets here is still reading its prompt, so no length matters.
        self._idx_mapping = torch.zeros(slots, dtype=torch.int64, device=device)
        self._prefill_len = torch.zeros(1, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @classmethod
    def of(cls, runner: Any, buffers: AcceptBuffers) -> AcceptGraphs | None:
        """Graphs of a runner; None where it has no verify graphs, or LM heads that a graph of
        one rank cannot hold.
        """
        manager = runner.cudagraph_manager
        parallel = runner.vllm_config.parallel_config
        sizes = graph_row_sizes(
            runner.compilation_config.cudagraph_capture_sizes or (),
            runner.max_num_reqs * runner.decode_query_len,
        )
        shared = parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1
        if (
            not sizes
            or shared
            or runner.lora_config is not None
            or getattr(manager, "hidden_states", None) is None
        ):
            return None
        graphs = cls(
            manager.hidden_states,
            runner.model.compute_logits,
            runner.input_buffers,
            sizes,
            buffers,
            columns_of(runner.speculator.draft_logits),
        )
        from vllm.compilation.cudagraph_pool import capture_pool

        try:
            graphs.capture(lambda: capture_pool(manager.pool, runner.vllm_config))
        except RuntimeError as error:
            # Some LM heads cannot be captured; the kernels run without a graph as well.
            logger.warning("DSpark could not capture acceptance: %s", error)
            return None
        return graphs

    @torch.inference_mode()
    def capture(self, pool: Callable[[], AbstractContextManager[Any]]) -> None:
        """Capture every size, largest first, into the memory pool that ``pool`` opens."""
        # Capture collects garbage, which takes long on the heap of a loaded model.
        gc.freeze()
        try:
            for rows in reversed(self.row_sizes):
                self.accept(rows)
                graph = torch.cuda.CUDAGraph()
                with pool() as target, torch.cuda.graph(graph, target):
                    self.accept(rows)
                self._graphs[rows] = graph
        finally:
            gc.unfreeze()
        logger.info("DSpark captured acceptance for %s logit rows", self.row_sizes)

    def accept(self, rows: int) -> None:
        """What is captured: from hidden states to the accept buffers, ``rows`` logit rows."""
        requests = min(rows, self._buffers.max_num_reqs)
        indices = self._logits_indices[:rows]
        greedy_accept(
            self._compute_logits(self._hidden_states[indices]),
            self._inputs.input_ids,
            self._inputs.positions,
            indices,
            self._cu_num_logits[: requests + 1],
            self._idx_mapping[:requests],
            self._inputs.seq_lens,
            self._prefill_len,
            self._buffers.accept_buffers(requests),
            self._num_columns,
        )

    def reason(self, hidden_states: torch.Tensor, input_batch: Any) -> str:
        """Why this batch fits no graph; empty if it does."""
        if input_batch.has_prefill:
            return "prefill"
        if hidden_states.data_ptr() != self._hidden_states.data_ptr():
            return "eager_forward"
        if input_batch.logits_indices.shape[0] > self.row_sizes[-1]:
            return "rows"
        return ""

    def stage(self, input_batch: Any) -> int:
        """Put the batch's layout where the graphs read it; returns the rows of its graph."""
        used, num_reqs = input_batch.logits_indices.shape[0], input_batch.num_reqs
        self._logits_indices[:used].copy_(input_batch.logits_indices)
        self._cu_num_logits[: num_reqs + 1].copy_(input_batch.cu_num_logits)
        # Requests past the batch have no logit rows.
        self._cu_num_logits[num_reqs + 1 :].fill_(used)
        return self.row_sizes[bisect_left(self.row_sizes, used)]

    def replay(self, input_batch: Any) -> None:
        """Accept a batch for which ``reason`` has none."""
        self._graphs[self.stage(input_batch)].replay()


def graph_row_sizes(capture_sizes: Any, most_rows: int) -> list[int]:
    """Numbers of logit rows that get a graph: the host's own sizes, up to where graphs help."""
    return sorted(size for size in set(capture_sizes) if size <= min(MAX_GRAPH_ROWS, most_rows))


def columns_of(draft_logits: torch.Tensor | None) -> int | None:
    """Leading logits that the host compares: a draft's vocabulary may lack the target's padding."""
    return None if draft_logits is None else draft_logits.shape[-1]
