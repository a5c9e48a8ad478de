# SPDX-License-Identifier: Apache-2.0
"""When a vanilla Markov head is sampled with the fused kernels, and when by the host's own loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draft_harness as harness
import pytest
import torch
from draft_harness import DraftHost
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_dspark.engine import markov_loop
from vllm_dspark.engine.markov import NoMarkovHead
from vllm_dspark.engine.markov_loop import device_obstacle, head_obstacle, loop_obstacle
from vllm_dspark.kernels.markov_step import launch_options

CPU = torch.device("cpu")


def draft(**changes: Any) -> Any:
    """A draft model that the fused kernels can sample, but for `changes` (`__` for dots)."""
    weight = torch.zeros(8, 4)
    w2 = SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), tp_size=1, weight=weight)
    head = SimpleNamespace(markov_w1=SimpleNamespace(weight=weight), markov_w2=w2)
    model = SimpleNamespace(
        model=SimpleNamespace(markov_head=head),
        logits_processor=SimpleNamespace(scale=1.0, soft_cap=None),
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = model
        for step in owners:
            owner = getattr(owner, step)
        setattr(owner, name, value)
    return model


def speculator(**changes: Any) -> Any:
    usual = {
        "fused_markov": True,
        "_draft_topk": None,
        "acceptance_estimator": None,
        "device": CPU,
        "model": draft(),
    }
    return SimpleNamespace(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"model__markov_head": NoMarkovHead()}, "not vanilla"),
        ({"model__markov_head__markov_w2__quant_method": object()}, "quantised"),
        ({"model__markov_head__markov_w2__tp_size": 2}, "sharded"),
        ({"model__markov_head__markov_w2__weight": torch.zeros(8, 4).bfloat16()}, "bfloat16"),
        (
            {
                f"model__markov_head__markov_w{i}__weight": torch.zeros(8, 4, dtype=torch.float64)
                for i in (1, 2)
            },
            "float64",
        ),
        ({"model__markov_head__markov_w1__weight": torch.zeros(8, 513)}, "rank is above 512"),
        ({"model__markov_head__markov_w1__weight": torch.zeros(4, 8).T}, "not contiguous"),
        ({"logits_processor__scale": 0.5}, "scaled"),
        ({"logits_processor__soft_cap": 30.0}, "capped"),
        ({"apply_output_logit_transform": abs}, "transformed"),
    ],
)
def test_heads(changes: dict[str, Any], reason: str) -> None:
    found = head_obstacle(draft(**changes))
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"fused_markov": False}, "switched off"),
        ({"_draft_topk": 8}, "dspark_draft_topk"),
        ({"acceptance_estimator": object()}, "estimator"),
        ({"model": draft(logits_processor__scale=2.0)}, "scaled"),
    ],
)
def test_speculators(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markov_loop, "device_obstacle", lambda device: "")
    found = loop_obstacle(speculator(**changes))
    assert reason in found and bool(found) == bool(reason)


def test_a_cpu_keeps_the_hosts_loop() -> None:
    """Interpreted kernels are right there, but slow."""
    assert "not an NVIDIA GPU" in loop_obstacle(speculator())


@pytest.mark.parametrize(
    ("hip", "capability", "reason"),
    [(None, (9, 0), ""), (None, (8, 0), ""), (None, (7, 5), "older"), ("6.2", (9, 4), "NVIDIA")],
)
def test_devices(
    hip: str | None, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = device_obstacle(torch.device("cuda", 0))
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize("fused", [True, False])
def test_the_log_says_which_loop_runs_and_why(
    fused: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_dspark.engine import proposer

    logged: list[str] = []
    record = SimpleNamespace(
        info=lambda text, *args: logged.append(text % args), warning=lambda *args: None
    )
    monkeypatch.setattr(proposer, "logger", record)
    monkeypatch.setattr(markov_loop, "device_obstacle", lambda device: "")
    config = harness.draft_config()
    path = harness.write_checkpoint(tmp_path, config, harness.draft_weights(config))
    host = DraftHost(harness.engine_config(target, path), proposer.DSparkProposer)
    host.proposer.fused_markov = fused
    assert host.proposer.host_loop_reason == host.proposer.host_loop_reason
    reason = "fused" if fused else "host's loop, switched off"
    assert logged == [f"DSpark Markov head: {reason}"]
    assert (host.proposer.host_loop_reason == "") == fused


@pytest.mark.parametrize(("most", "met"), [(1, [1]), (8, [1, 8]), (64, [1, 17])])
def test_warming_meets_every_variant(
    most: int, met: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(
        markov_loop,
        "draft_block",
        lambda spec, num_reqs, hidden: blocks.append((num_reqs, tuple(hidden.shape))),
    )
    sizes = {"max_num_reqs": most, "num_query_per_req": 7, "hidden_size": 16}
    markov_loop.warm(speculator(**sizes, dtype=torch.float32))
    assert blocks == [(num_reqs, (most * 7, 16)) for num_reqs in met]
    options = {launch_options(num_reqs) for num_reqs in range(1, most + 1)}
    assert options == {launch_options(num_reqs) for num_reqs in met}
