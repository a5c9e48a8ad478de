# SPDX-License-Identifier: Apache-2.0
"""The rejection sampler's results on their way to the host and to the planner.

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
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.session import find_session


class Verifier(RejectionSampler):
    """The host's rejection sampler, which tells the planner what was committed."""

    def __init__(self, sampler: Any, spec_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sampler, spec_config, *args, **kwargs)
        session = find_session(spec_config)
        assert session is not None, "bound only for runners that have a session"
        self._session = session
        states = sampler.sampling_states
        session.temperatures = lambda: states.temperature.np

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(logits, input_batch, *args, **kwargs)
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


def cap(output: Any, window: torch.Tensor) -> Any:
    """Commit at most ``window`` drafts per request, and the token after them.

    Args:
        output: sampler output with ``num_sampled`` and ``num_rejected`` ``[num_reqs]``.
        window: ``[num_reqs]`` drafts that may be committed.
    """
    kept = torch.minimum(output.num_sampled, (window + 1).to(output.num_sampled.dtype))
    dropped = output.num_sampled - kept
    return replace(output, num_sampled=kept, num_rejected=output.num_rejected + dropped)
