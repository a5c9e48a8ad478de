# SPDX-License-Identifier: Apache-2.0
"""The rejection sampler's results on their way to the host and to the planner.

Greedy batches are accepted by ``folded_accept``; what it hands out are reader copies. The host's
sampler allocates its outcome anew in every step, so that is a reader's own already. Whatever
follows (cap, agreement of the ranks, planner, the runner's output copy) therefore reads tensors
that no later step writes.

Cap-accept mode verifies every draft and commits only the planned window. That is exact: whatever
the rejection rule, the token it emits at a slot is distributed as the target's own, given that the
slots before it were accepted (paper section 3.5). Cutting the output after the window keeps that
token as the bonus token of a step whose drafts ended there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_dspark.engine.accept_buffers import AcceptBuffers
from vllm_dspark.engine.folded_accept import FoldedAccept, columns_of, host_reason
from vllm_dspark.engine.head_warmup import warm_head_of
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.session import find_session
from vllm_dspark.kernels.greedy_accept import Accepted


class Verifier(RejectionSampler):
    """The host's rejection sampler, which tells the planner what was committed."""

    def __init__(self, sampler: Any, spec_config: Any, device: Any, *args: Any, **kw: Any) -> None:
        super().__init__(sampler, spec_config, device, *args, **kw)
        session = find_session(spec_config)
        assert session is not None, "bound only for runners that have a session"
        self._session = session
        self._spec_config, self._device = spec_config, torch.device(device)
        states, requests = sampler.sampling_states, sampler.req_states
        session.temperatures = lambda: states.temperature.np
        self._readers: tuple[torch.cuda.Stream, ...] = ()
        self._no_graph = "no_graphs"
        self._folded: FoldedAccept | None = None
        if session.config.folded_accept != "off":
            gamma = spec_config.num_speculative_tokens
            buffers = AcceptBuffers(requests.max_num_reqs, gamma, self._device)
            self._folded = FoldedAccept(buffers, requests.prefill_len)
            if self._device.type == "cuda":
                session.before_traffic.append(self._warm)

    @property
    def enable_adaptive_verification(self) -> bool:
        """Whether logits are laid out by lengths that only the device knows, so that the host must
        not cut them into chunks. The configuration says whether that may happen, the running step
        whether it does.
        """
        planner = self._session.planner
        return self._may_adapt and planner is not None and planner.runs_device_lens

    @enable_adaptive_verification.setter
    def enable_adaptive_verification(self, value: bool) -> None:
        self._may_adapt = value

    def _warm(self) -> None:
        """Compile acceptance for logits as the target makes them."""
        assert self._folded is not None
        target = self._spec_config.target_model_config
        logits = torch.zeros(1, target.get_vocab_size(), dtype=target.dtype, device=self._device)
        self._folded.warm(logits)

    def serve(self, runner: Any) -> None:
        """Outcomes will be copied to the host as this runner does it."""
        if not self._readers and runner.device.type == "cuda":
            self._readers = (runner.output_copy_stream,)

    def capture(self, runner: Any) -> None:
        """The runner has captured its model: capture acceptance behind it, and load the kernels of
        the LM head that the graphs do not hold.
        """
        if self._folded is not None:
            self._folded.capture(runner)
        if self._device.type == "cuda":
            warm_head_of(runner)

    def from_hidden(
        self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any
    ) -> SamplerOutput | None:
        """Outcome of a step whose acceptance is captured; None if logits must be computed first.

        Args:
            hidden_states: ``[num_tokens, hidden]`` of the step.
            input_batch: the batch of the step.
            grammar_output: bitmasks of structured requests, None without any.
        """
        if self._folded is None or not input_batch.num_draft_tokens or grammar_output is not None:
            return None
        self._no_graph = self._folded.graph_reason(hidden_states, input_batch)
        if self._no_graph or host_reason(self.sampler, self, input_batch, None):
            return None
        self._count("graph", "none")
        accepted = self._folded.replay(input_batch, self._readers)
        return self._settle(_as_output(accepted), input_batch)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        folded, reason = self._folded, "off"
        if folded is not None:
            reason = host_reason(self.sampler, self, input_batch, invalid_drafts)
        if folded is None or reason:
            self._count("host", reason)
            output = super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        else:
            self._count("kernel", self._no_graph)
            columns = columns_of(draft_logits)
            output = _as_output(folded.run(logits, input_batch, columns, self._readers))
        return self._settle(output, input_batch)

    def _settle(self, output: SamplerOutput, input_batch: Any) -> SamplerOutput:
        """The group's outcome, cut at the window where that is the mode; the planner knows it."""
        planner = self._session.planner
        if planner is None:
            return output
        if self._session.mode is VerifyMode.CAP_ACCEPT:
            window = planner.take_window(input_batch.req_ids)
            if window is not None:
                output = cap(output, async_tensor_h2d(window, device=output.num_sampled.device))
        output = planner.agree_accept(output)
        planner.committed(output.num_sampled)
        return output

    def _count(self, path: str, reason: str) -> None:
        if self._session.writer is not None:
            self._session.writer.observe_accept_path(path, reason)


def _as_output(accepted: Accepted) -> SamplerOutput:
    return SamplerOutput(
        sampled_token_ids=accepted.sampled,
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=accepted.num_sampled,
        num_rejected=accepted.num_rejected,
    )


def cap(output: Any, window: torch.Tensor) -> Any:
    """Commit at most ``window`` drafts per request, and the token after them.

    Args:
        output: sampler output with ``num_sampled`` and ``num_rejected`` ``[num_reqs]``.
        window: ``[num_reqs]`` drafts that may be committed.
    """
    kept = torch.minimum(output.num_sampled, (window + 1).to(output.num_sampled.dtype))
    dropped = output.num_sampled - kept
    return replace(output, num_sampled=kept, num_rejected=output.num_rejected + dropped)
