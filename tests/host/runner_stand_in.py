# SPDX-License-Identifier: Apache-2.0
"""A copy of the host's runner module whose collaborators are recorders with the host's signatures.

What is real: the table of host symbols, the probes, the wrappers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from stand_ins import Namespace as SimpleNamespace
from vllm.config.attention import AttentionConfig

from vllm_dspark import compat
from vllm_dspark.engine import install, session


class Recorder:
    """Calls that reached the host's own code."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answer: Any = object()
        self.effect: Callable[..., Any] | None = None

    def stand_in(self, name: str, original: Any) -> Any:
        """A function with the signature of `original` that notes the call."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self.effect(*args, **kwargs) if self.effect is not None else self.answer

        recorded.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        recorded.__name__ = name
        return recorded

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def copy_of(module: ModuleType) -> ModuleType:
    """The module and its own classes, so that nothing done to it reaches the host."""
    copied = ModuleType(module.__name__)
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            body = {
                k: v
                for k, v in vars(value).items()
                if k not in ("__dict__", "__weakref__") and not hasattr(v, "__objclass__")
            }
            value = type(value)(value.__name__, value.__bases__, body)
        setattr(copied, name, value)
    return copied


def runner_module(host: Recorder) -> ModuleType:
    """An unbound copy of the runner module."""
    copied = copy_of(importlib.import_module(compat.RUNNER))
    for name in install._WRAPPERS:
        owner, _, attribute = name.rpartition(".")
        target = getattr(copied, owner) if owner else copied
        original = inspect.unwrap(getattr(target, attribute))
        setattr(target, attribute, host.stand_in(name, original))
    return copied


def configuration(
    method: str = "dspark",
    *,
    full_graphs: bool = False,
    lora: bool = False,
    capture_sizes: Sequence[int] = (1, 2, 4, 8),
    kv_connector: bool = False,
    data_parallel_size: int = 1,
    reports: str = "",
    attention: Any = None,
    **dspark: Any,
) -> SimpleNamespace:
    """As much of a host configuration as is read; `dspark` are the plugin's options."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method,
            num_speculative_tokens=7,
            enable_adaptive_verification=False,
            draft_sample_method="greedy",
        ),
        additional_config={"dspark": {"metrics": False, **dspark}},
        compilation_config=SimpleNamespace(
            static_forward_context={},
            cudagraph_mode=SimpleNamespace(
                has_full_cudagraphs=lambda: full_graphs, name="FULL" if full_graphs else "NONE"
            ),
            cudagraph_capture_sizes=list(capture_sizes),
        ),
        aux_output_config=SimpleNamespace(
            enable_return_routed_experts=reports == "enable_return_routed_experts"
        ),
        model_config=SimpleNamespace(
            return_sampling_mask=reports == "return_sampling_mask",
            max_model_len=1024,
            model="target",
            dtype="torch.bfloat16",
            hf_text_config=SimpleNamespace(num_hidden_layers=2, hidden_size=8, model_type="qwen3"),
        ),
        attention_config=attention or AttentionConfig(),
        lora_config=object() if lora else None,
        kv_transfer_config=object() if kv_connector else None,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=data_parallel_size,
            data_parallel_index=0,
            tensor_parallel_size=1,
        ),
    )


class Proposer:
    """What the host's factory constructs for us."""

    publish_confidence = True

    def __init__(self) -> None:
        self.allowed: tuple[int, ...] = ()
        self.families = SimpleNamespace(allow=lambda widths: setattr(self, "allowed", widths))


def take_over(runner: ModuleType, host: Recorder, config: Any) -> Any:
    """Build the speculator, as the runner does first; returns the session."""
    host.answer = proposer = Proposer()
    assert runner.init_speculator(config, "device", "states") is proposer
    found = session.find_session(config.speculative_config)
    if found is not None:
        # The session refers to it weakly, the runner keeps it.
        found.kept_by_the_runner = proposer  # type: ignore[attr-defined]
    return found


def factory_arguments(config: Any, **changes: Any) -> dict[str, Any]:
    """What the runner hands to the manager factory."""
    import torch

    states = SimpleNamespace(
        num_speculative_steps=7, max_num_reqs=4, device=torch.device("cpu"), req_id_to_index={}
    )
    return {
        "enable_adaptive_verification": True,
        "attn_groups": [],
        "req_states": states,
        "query_start_loc": torch.zeros(5, dtype=torch.int32),
        "num_bonus_tokens": 1,
        "max_total_logits": 1000,
        "vllm_config": config,
        "target_layer_names": set(),
        **changes,
    }


def create_manager(runner: ModuleType, config: Any, **changes: Any) -> Any:
    return runner.maybe_create_adaptive_verification_manager(**factory_arguments(config, **changes))
