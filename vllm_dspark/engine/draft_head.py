# SPDX-License-Identifier: Apache-2.0
"""The draft's LM head as an FP8 copy of its own.

A DSpark draft shares the target's LM head. It is the largest matrix that drafting reads: with one
request in flight reading it takes as long as half of the draft's backbone, with hundreds its
product takes a third of the draft. The draft's logits only propose, the target verifies with its
own head, so a rounded copy can change how many drafts are accepted and nothing else. vLLM makes
such copies for EAGLE and MTP drafts; here the same function makes one for DSpark.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_dspark import compat
from vllm_dspark.config import ConfigError

_FP8_CAPABILITY = (8, 9)


def obstacle(device: torch.device) -> str:
    """Why no FP8 copy can be made and multiplied on this host; empty if one can."""
    if not compat.present(compat.QUANTIZED_HEAD):
        return "this vLLM cannot quantise a loaded LM head"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return "the device has no FP8 matrix units"
    return ""


def fp8_copy(lm_head: Any, device: torch.device) -> Any:
    """A head like ``lm_head`` with FP8 weights, one scale per row; ``lm_head`` stays as it is.

    Raises:
        ConfigError: there can be none here.
    """
    reason = obstacle(device)
    if not reason:
        from vllm.model_executor.layers.quantization.online.lm_head import quantized_lm_head_copy

        try:
            return quantized_lm_head_copy(lm_head, "fp8")
        except ValueError as error:
            reason = str(error)
    raise ConfigError(f"dspark.draft_head = 'fp8' cannot run: {reason}; allowed here: 'model'")
