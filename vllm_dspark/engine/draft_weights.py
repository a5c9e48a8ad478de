# SPDX-License-Identifier: Apache-2.0
"""The draft in FP8: its layers' weights rounded in place, its LM head as a rounded copy.

What a draft costs is reading its weights (one request in flight) or multiplying with them
(hundreds), and FP8 halves both. A draft only proposes: the target verifies with weights of its own,
which stay as they are, so rounding can change how many drafts are accepted and nothing else.
Weights get one scale per output channel, activations one per token, with vLLM's own methods.

What vLLM computes from the draft once per committed token, its context, keeps the model's dtype.
Importing this module imports torch and vLLM.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_dspark import compat
from vllm_dspark.config import ConfigError
from vllm_dspark.engine.draft_model import DSparkQwen3ForCausalLM

logger = logging.getLogger("vllm.dspark")

_FP8_CAPABILITY = (8, 9)
_ROUNDABLE = (torch.float16, torch.bfloat16)


def round_draft(model: Any, device: torch.device, wanted: Literal["auto", "fp8"]) -> None:
    """Round what can be rounded of a loaded draft, before it is compiled, and say so in the log.

    Only dense drafts (`DSparkQwen3ForCausalLM`) are rounded. In a tensor-parallel group all ranks
    call this.

    Raises:
        ConfigError: FP8 was asked for (not `auto`), and a part cannot have it.
    """
    reason = _obstacle(model, device)
    reasons = {
        "layers": reason or _round_layers(model),
        "LM head": reason or _round_head(model),
    }
    refused = {part: reason for part, reason in reasons.items() if reason}
    if refused and wanted == "fp8":
        why = "; ".join(f"{part}: {reason}" for part, reason in refused.items())
        raise ConfigError(
            f"dspark.draft_weights = 'fp8' cannot run: {why}; allowed here: 'auto', 'model'"
        )
    for part, reason in reasons.items():
        found = f"as loaded, {reason}" if reason else "FP8"
        logger.info("DSpark draft weights, %s: %s", part, found)


def _obstacle(model: Any, device: torch.device) -> str:
    if not isinstance(model, DSparkQwen3ForCausalLM):
        return "the draft is another architecture"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return "the device has no FP8 matrix units"
    return ""


def _round_layers(model: Any) -> str:
    """Why the layers keep their weights; empty if they are rounded now."""
    if not all(map(compat.present, compat.QUANTIZED_LINEAR)):
        return "this vLLM cannot quantise loaded layers"
    layers = [m for m in model.model.layers.modules() if isinstance(m, LinearBase)]
    if not all(map(_is_plain, layers)):
        return "the checkpoint's layers are not all of a 16-bit dtype"
    try:
        for layer in layers:
            _fp8_method(layer, torch.nn.Module())
    except ValueError as error:
        return str(error)
    for layer in layers:
        _round_layer(layer)
    _tell_compile_cache(model.model)
    return ""


def _is_plain(layer: LinearBase) -> bool:
    plain = isinstance(layer.quant_method, UnquantizedLinearMethod)
    return plain and layer.weight.dtype in _ROUNDABLE


def _fp8_method(layer: Any, target: torch.nn.Module) -> Any:
    """The host's FP8 method for a layer like `layer`, set up on `target`, whose weights it makes.

    Raises:
        ValueError: the host has no kernel for it.
    """
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

    dtype = layer.weight.dtype
    # The method takes its output dtype from the default one, as if the model were being built.
    with set_default_torch_dtype(dtype):
        method = Fp8PtpcOnlineLinearMethod()
        method.create_weights(
            target,
            layer.input_size_per_partition,
            layer.output_partition_sizes,
            layer.input_size,
            layer.output_size,
            dtype,
            weight_loader=layer.weight_loader,
        )
    return method


def _round_layer(layer: Any) -> None:
    """Give one loaded layer the method, and the weights, that an FP8 layer has after loading."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded = layer.weight.data
    layer.quant_method = _fp8_method(layer, layer)
    layer.weight = torch.nn.Parameter(loaded, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    # Nothing is being loaded any more; a later reload starts from the 16-bit shapes on record.
    get_layerwise_info(layer).reset()


def _tell_compile_cache(backbone: Any) -> None:
    """Keep artifacts compiled for 16-bit layers from being loaded for FP8 ones: the cache's key is
    computed from the configuration that the compiled module holds, the draft's own copy.
    """
    config = getattr(backbone, "vllm_config", None)
    if config is None:
        return
    given = config.additional_config or {}
    known = given if isinstance(given, dict) else {"hash": given.compute_hash()}
    config.additional_config = {**known, "dspark_draft": "fp8"}


def _round_head(model: Any) -> str:
    """Why the LM head is as it was; empty if the draft has an FP8 copy now."""
    if not compat.present(compat.QUANTIZED_HEAD):
        return "this vLLM cannot quantise a loaded LM head"
    from vllm.model_executor.layers.quantization.online.lm_head import quantized_lm_head_copy

    try:
        model.lm_head = quantized_lm_head_copy(model.lm_head, "fp8")
    except ValueError as error:
        return str(error)
    return ""
