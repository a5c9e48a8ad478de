# SPDX-License-Identifier: Apache-2.0
"""Lengths that only the device knows: the live block's confidences spend the host's budget.

The host fixes how many drafts run (and with it the graph); which ones is decided in one kernel on
the newest confidences, without the host waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dspark.kernels.allocate import allocate

if TYPE_CHECKING:
    from vllm_dspark.engine.decision import StepDecision

AgreeSplit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The group's lengths ``[num_reqs]`` for this rank's and the batch's slots."""


class DeviceSplit:
    """Live confidences by request slot, and the split of the running step."""

    def __init__(self, max_num_reqs: int, gamma: int, device: torch.device) -> None:
        # Ones: a block without confidences outranks others instead of losing its drafts unseen.
        self._live = torch.ones(max_num_reqs, gamma, dtype=torch.float32, device=device)
        self._full = torch.full((max_num_reqs,), gamma, dtype=torch.int32, device=device)
        self._single = torch.ones(max_num_reqs, dtype=torch.int32, device=device)
        self._gamma = gamma
        self._admitted: torch.Tensor | None = None

    def store(self, idx_mapping: torch.Tensor, confidence: torch.Tensor) -> None:
        """Remember a step's confidences ``[num_reqs, gamma]`` under its slots ``[num_reqs]``."""
        self._live[idx_mapping] = confidence

    def spend(
        self,
        decision: StepDecision,
        idx_mapping: torch.Tensor,
        num_bonus: int,
        query_start_loc: torch.Tensor,
        agree: AgreeSplit,
    ) -> torch.Tensor:
        """Split the decided budget, fill ``query_start_loc``; returns logit offsets."""
        count = len(decision.req_ids)
        lens, base = self._full[:count], self._single[:count]
        drafts = decision.spendable
        if not (decision.decodes and bool((drafts == self._gamma).all())):
            both = np.array((drafts, decision.base_lens), dtype=np.int32)
            lens, base = async_tensor_h2d(both, device=idx_mapping.device)
        own, cu_num_logits = allocate(
            self._live,
            idx_mapping,
            lens,
            base,
            decision.running_drafts,
            num_bonus,
            decision.num_tokens,
            query_start_loc,
        )
        self._admitted = agree(own, idx_mapping)
        if self._admitted is not own:
            # The group's lengths have the same sum, so entries past the batch stay as they are.
            torch.cumsum(base + self._admitted, 0, out=query_start_loc[1 : count + 1])
            torch.cumsum(self._admitted + num_bonus, 0, out=cu_num_logits[1:])
        return cu_num_logits

    def warm(self) -> None:
        """Compile every variant of the kernel, so that none is compiled in traffic."""
        slots, device = self._live.shape[0], self._live.device
        offsets = torch.empty(slots + 1, dtype=torch.int32, device=device)
        counts = {min(1 << power, slots) for power in range(slots.bit_length() + 1)}
        for count in sorted(counts):
            rows = torch.arange(count, device=device)
            allocate(self._live, rows, self._full[:count], self._single[:count], 1, 1, 2, offsets)

    def take_admitted(self) -> torch.Tensor | None:
        """Admitted drafts ``[num_reqs]`` of the running step, None if the host decided."""
        admitted, self._admitted = self._admitted, None
        return admitted
