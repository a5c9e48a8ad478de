# SPDX-License-Identifier: Apache-2.0
"""Puts the plugin's draft models into vLLM's model registry, by name only.

Cheap (no torch, no model code is imported) and idempotent: the registry keeps the last entry of a
name, and a lazy entry is resolved only when a model of that architecture is loaded.
"""

from __future__ import annotations

from typing import Any

# Architecture names in a draft's config.json. None of them names a target model.
DRAFT_ARCHITECTURES = frozenset({"Qwen3DSparkModel"})

_MODEL_CLASS = "vllm_dspark.engine.draft_model:DSparkQwen3ForCausalLM"


def register_draft_models(registry: Any = None) -> None:
    """Serve the DSpark draft architectures with the plugin's classes.

    Args:
        registry: vLLM's `ModelRegistry`; imported if not given.
    """
    if registry is None:
        from vllm.model_executor.models.registry import ModelRegistry as registry
    for architecture in sorted(DRAFT_ARCHITECTURES):
        registry.register_model(architecture, _MODEL_CLASS)
