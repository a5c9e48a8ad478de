# SPDX-License-Identifier: Apache-2.0
"""The draft's LM head as an FP8 copy: made by the host where it can, refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import draft_harness as harness
import pytest
import torch
from draft_harness import DraftHost

from vllm_dspark import compat
from vllm_dspark.config import ConfigError
from vllm_dspark.engine import draft_head, proposer
from vllm_dspark.engine.proposer import DSparkProposer

GPU = torch.device("cuda", 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """A host that can quantise a head, on a device that can multiply it; notes its calls."""
    asked: list[tuple[Any, str]] = []

    def quantized_lm_head_copy(lm_head: Any, quantization: str) -> Any:
        asked.append((lm_head, quantization))
        if lm_head == "tied":
            raise ValueError("needs an unquantized head")
        return "a copy"

    module = ModuleType(compat.QUANTIZED_HEAD.module)
    module.quantized_lm_head_copy = quantized_lm_head_copy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return asked


def test_the_host_makes_the_copy(host: list[tuple[Any, str]]) -> None:
    assert draft_head.fp8_copy("head", GPU) == "a copy"
    assert host == [("head", "fp8")]


@pytest.mark.parametrize(
    ("head", "device", "capability", "reason"),
    [
        ("head", torch.device("cpu"), (9, 0), "no FP8 matrix units"),
        ("head", GPU, (8, 0), "no FP8 matrix units"),
        ("tied", GPU, (9, 0), "needs an unquantized head"),
    ],
)
def test_what_cannot_be_had_is_refused(
    head: str,
    device: torch.device,
    capability: tuple[int, int],
    reason: str,
    host: list[tuple[Any, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=rf"draft_head = 'fp8'.*{reason}.*'model'"):
        draft_head.fp8_copy(head, device)


def test_a_host_without_the_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, compat.QUANTIZED_HEAD.module, None)
    with pytest.raises(ConfigError, match="this vLLM cannot quantise"):
        draft_head.fp8_copy("head", GPU)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_draft_gets_the_copy_when_it_is_loaded(
    wanted: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []

    def fp8_copy(lm_head: Any, device: torch.device) -> Any:
        copies.append(lm_head)
        return lm_head

    class Asked(DSparkProposer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.fp8_head = wanted

    monkeypatch.setattr(proposer, "fp8_copy", fp8_copy)
    config = harness.draft_config()
    checkpoint = harness.write_checkpoint(tmp_path, config, harness.draft_weights(config))
    drafting = DraftHost(harness.engine_config(target, checkpoint), Asked).proposer
    assert copies == ([drafting.model.lm_head] if wanted else [])
