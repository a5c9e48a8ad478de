# SPDX-License-Identifier: Apache-2.0
"""The draft in FP8: its layers rounded by the host's method, its head copied, refusals reasoned."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import draft_harness as harness
import pytest
import torch
from draft_harness import DraftHost
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from vllm_dspark import compat
from vllm_dspark.config import ConfigError
from vllm_dspark.engine import draft_weights, proposer
from vllm_dspark.engine.draft_model import DSparkQwen3ForCausalLM
from vllm_dspark.engine.proposer import DSparkProposer

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
HEAD = torch.nn.Identity()
COPY = torch.nn.Identity()


class Draft(DSparkQwen3ForCausalLM):
    """A dense draft of two linear layers and a head; nothing of it is read from files."""

    def __init__(self, config: Any, dtype: torch.dtype = BF16) -> None:
        torch.nn.Module.__init__(self)
        layer = torch.nn.Module()
        layer.qkv_proj = QKVParallelLinear(64, 32, 2, 1, bias=False, params_dtype=dtype, prefix="q")
        layer.o_proj = RowParallelLinear(64, 64, bias=False, params_dtype=dtype, prefix="o")
        generator = torch.Generator().manual_seed(3)
        for projection in layer.children():
            projection.weight.data = torch.randn(
                projection.weight.shape, generator=generator, dtype=dtype
            )
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])
        self.model.vllm_config = config
        self.lm_head = HEAD

    def projections(self) -> list[Any]:
        return list(self.model.layers[0].children())


@pytest.fixture
def config(target: Path, tmp_path: Path) -> Iterator[Any]:
    draft = harness.draft_config()
    checkpoint = harness.write_checkpoint(tmp_path, draft, harness.draft_weights(draft))
    config = harness.engine_config(target, checkpoint)
    config.model_config.dtype = BF16
    with set_current_vllm_config(config):
        harness.init_single_process()
        yield config


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host that can copy a head, and a device that can multiply it; both may be changed."""
    state = SimpleNamespace(capability=(9, 0), refuses="", copied=[])

    def quantized_lm_head_copy(lm_head: Any, quantization: str) -> Any:
        state.copied.append((lm_head, quantization))
        if state.refuses:
            raise ValueError(state.refuses)
        return COPY

    module = ModuleType(compat.QUANTIZED_HEAD.module)
    module.quantized_lm_head_copy = quantized_lm_head_copy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.capability)
    return state


def test_rounded_layers_compute_nearly_the_same(config: Any, host: SimpleNamespace) -> None:
    """The host's kernel for this machine runs; e4m3 has three bits behind the leading one."""
    draft = Draft(config)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4), dtype=BF16)
    loaded = [torch.nn.functional.linear(x, layer.weight).float() for layer in draft.projections()]
    draft_weights.round_draft(draft, GPU, "fp8")
    for layer, expected in zip(draft.projections(), loaded, strict=True):
        output = layer(x)[0]
        assert layer.weight.dtype == torch.float8_e4m3fn
        assert output.dtype == BF16
        error = (output.float() - expected).norm() / expected.norm()
        assert 0 < error < 0.06
    assert draft.lm_head is COPY
    assert host.copied == [(HEAD, "fp8")]


def test_a_host_without_a_kernel_leaves_every_layer_as_it_is(
    config: Any, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.online import fp8

    def no_kernel(**kwargs: Any) -> Any:
        if kwargs["weight_shape"] == torch.Size([64, 64]):
            raise ValueError("no kernel for this shape")
        return SimpleNamespace()

    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", no_kernel)
    draft = Draft(config)
    draft_weights.round_draft(draft, GPU, "auto")
    for layer in draft.projections():
        assert layer.weight.dtype == BF16 and not layer.weight.is_meta
        assert type(layer.quant_method) is UnquantizedLinearMethod
    with pytest.raises(ConfigError, match="layers: no kernel for this shape"):
        draft_weights.round_draft(draft, GPU, "fp8")


def test_artifacts_compiled_for_other_weights_are_not_loaded(
    config: Any, host: SimpleNamespace
) -> None:
    before = config.compute_hash()
    draft_weights.round_draft(Draft(config), GPU, "auto")
    assert config.compute_hash() != before


def test_options_of_the_operator_stay_in_the_hash(config: Any, host: SimpleNamespace) -> None:
    hashes = set()
    for given in ({"mine": 1}, {"mine": 2}, SimpleNamespace(compute_hash=lambda: "x")):
        config.additional_config = given
        draft_weights.round_draft(Draft(config), GPU, "auto")
        hashes.add(config.compute_hash())
    assert len(hashes) == 3


NO_UNITS = "no FP8 matrix units"
REFUSED = [
    ({"capability": (8, 0)}, BF16, rf"layers: .*{NO_UNITS}; LM head: .*{NO_UNITS}"),
    ({"refuses": "needs an unquantized head"}, BF16, "LM head: needs an unquantized head"),
    ({}, torch.float32, "layers: the checkpoint's layers are not all of a 16-bit dtype"),
]


@pytest.mark.parametrize(("facts", "dtype", "reason"), REFUSED)
def test_what_cannot_be_had_is_refused_when_asked_for(
    facts: dict[str, Any], dtype: torch.dtype, reason: str, config: Any, host: SimpleNamespace
) -> None:
    vars(host).update(facts)
    with pytest.raises(ConfigError, match=rf"draft_weights = 'fp8'.*{reason}.*'auto', 'model'"):
        draft_weights.round_draft(Draft(config, dtype), GPU, "fp8")


@pytest.mark.parametrize(
    ("facts", "dtype", "layers", "head"),
    [
        ({"capability": (8, 0)}, BF16, BF16, HEAD),
        ({"refuses": "needs an unquantized head"}, BF16, torch.float8_e4m3fn, HEAD),
        ({}, torch.float32, torch.float32, COPY),
    ],
)
def test_auto_rounds_what_it_can_and_says_why_not_the_rest(
    facts: dict[str, Any],
    dtype: torch.dtype,
    layers: torch.dtype,
    head: Any,
    config: Any,
    host: SimpleNamespace,
    dspark_log: Any,
) -> None:
    vars(host).update(facts)
    draft = Draft(config, dtype)
    logging.getLogger("vllm.dspark").setLevel(logging.INFO)
    draft_weights.round_draft(draft, GPU, "auto")
    assert {layer.weight.dtype for layer in draft.projections()} == {layers}
    assert draft.lm_head is head
    said = [r.getMessage() for r in dspark_log.records if "draft weights" in r.getMessage()]
    assert [line.endswith(": FP8") for line in said] == [
        layers is torch.float8_e4m3fn,
        head is COPY,
    ]


def test_a_cpu_has_no_matrix_units(config: Any, host: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=NO_UNITS):
        draft_weights.round_draft(Draft(config), torch.device("cpu"), "fp8")


def test_drafts_of_other_architectures_stay_as_they_are(host: SimpleNamespace) -> None:
    foreign = SimpleNamespace(lm_head=HEAD)
    draft_weights.round_draft(foreign, GPU, "auto")
    assert foreign.lm_head is HEAD
    with pytest.raises(ConfigError, match="another architecture"):
        draft_weights.round_draft(foreign, GPU, "fp8")


@pytest.mark.parametrize(
    ("symbol", "named"),
    [
        (compat.QUANTIZED_HEAD, "LM head: this vLLM cannot quantise"),
        (compat.QUANTIZED_LINEAR[0], "layers: this vLLM cannot quantise"),
    ],
)
def test_a_host_without_the_functions_is_named(
    symbol: compat.HostSymbol,
    named: str,
    config: Any,
    host: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = Draft(config)
    monkeypatch.setitem(sys.modules, symbol.module, None)
    with pytest.raises(ConfigError, match=named):
        draft_weights.round_draft(draft, GPU, "fp8")


@pytest.mark.parametrize("wanted", ["auto", "fp8", "model"])
def test_a_draft_is_rounded_when_it_is_loaded(
    wanted: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Asked(DSparkProposer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.weights = wanted

    monkeypatch.setattr(proposer, "round_draft", lambda *args: asked.append(args))
    draft = harness.draft_config()
    checkpoint = harness.write_checkpoint(tmp_path, draft, harness.draft_weights(draft))
    drafting = DraftHost(harness.engine_config(target, checkpoint), Asked).proposer
    expected = [] if wanted == "model" else [(drafting.model, drafting.device, wanted)]
    assert asked == expected
