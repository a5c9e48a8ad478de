# SPDX-License-Identifier: Apache-2.0
"""What a cost table depends on, read from the host's configuration.

`vllm-dspark profile` copies it from a server's records into the table, and a server compares it
with the table that it is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_dspark.core.cost_io import Fingerprint


def fingerprint_of(vllm_config: Any) -> Fingerprint:
    """Fingerprint of the deployment that this configuration starts."""
    from vllm.platforms import current_platform

    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    graphs = compilation.cudagraph_mode.name != "NONE"
    return Fingerprint(
        gpu=current_platform.get_device_name() or current_platform.device_type,
        model=_model_name(model),
        tp=vllm_config.parallel_config.tensor_parallel_size,
        graph_ladder=tuple(sorted(compilation.cudagraph_capture_sizes or ())) if graphs else (),
        gamma=vllm_config.speculative_config.num_speculative_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _model_name(model_config: Any) -> str:
    """Name and shape: a folder may be moved, and two folders may have the same name."""
    text = model_config.hf_text_config
    shape = f"{text.num_hidden_layers} layers of {text.hidden_size}"
    name = model_config.model
    return f"{Path(name).name if Path(name).is_dir() else name} ({text.model_type}, {shape})"
