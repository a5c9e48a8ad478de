# SPDX-License-Identifier: Apache-2.0
"""The engine's draft step against a plain PyTorch reference, for every kind of checkpoint.

Each case drafts twice for three requests of different lengths through vLLM's own `propose`: after a
prompt, then after a verification that rejected some rows, so that context keys come from the cache
and rejected rows must leave no trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draft_harness as harness
import pytest
import torch
from draft_harness import BLOCK, HIDDEN, TAPS, DraftHost, Step
from reference_drafter import ReferenceDrafter

from vllm_dspark.engine import markov_loop

PROMPT_LENGTHS = (9, 4, 17)
REJECTED = (0, 3, 5)
CONFIDENCE_WEIGHT = "confidence_head.proj.weight"
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}

CASES: dict[str, dict[str, Any]] = {
    "vanilla": {"head": "vanilla"},
    "vanilla-plain-confidence-bonus-anchor": {
        "head": "vanilla",
        "confidence_markov": False,
        "from_anchor": False,
    },
    "vanilla-reduced-no-confidence": {"head": "vanilla", "reduced": True, "confidence": False},
    "gated": {"head": "gated"},
    "gated-reduced-bonus-anchor": {"head": "gated", "reduced": True, "from_anchor": False},
    "rnn": {"head": "rnn"},
    "rnn-reduced-no-confidence": {"head": "rnn", "reduced": True, "confidence": False},
    "rnn-plain-confidence-bonus-anchor": {
        "head": "rnn",
        "confidence_markov": False,
        "from_anchor": False,
    },
    "none": {"head": "none"},
    "none-reduced-no-confidence-bonus-anchor": {
        "head": "none",
        "reduced": True,
        "confidence": False,
        "from_anchor": False,
    },
}


def load(target: Path, directory: Path, config: dict[str, Any], cls: type | None = None) -> Any:
    from vllm_dspark.engine.proposer import DSparkProposer

    weights = harness.draft_weights(config)
    draft = harness.write_checkpoint(directory, config, weights)
    host = DraftHost(harness.engine_config(target, draft), cls or DSparkProposer)
    return host, ReferenceDrafter(config, weights)


def features(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, len(TAPS) * HIDDEN, generator=generator)


def two_steps() -> tuple[list[Step], list[Step], list[torch.Tensor]]:
    """Prompt step, verification step, and the context features valid after the latter."""
    prompts, verified, valid = [], [], []
    for r, length in enumerate(PROMPT_LENGTHS):
        prompts.append(Step(list(range(length)), 0, 10 + r, features(length, 100 + r)))
        rows = features(BLOCK + 1, 200 + r)
        positions = list(range(length, length + BLOCK + 1))
        verified.append(Step(positions, REJECTED[r], 20 + r, rows))
        valid.append(torch.cat([prompts[r].features, rows[: BLOCK + 1 - REJECTED[r]]]))
    return prompts, verified, valid


def compare(
    host: DraftHost, reference: ReferenceDrafter, options: dict[str, Any], *, logits: bool = True
) -> None:
    """Draft two steps; `logits` says whether the loop hands whole rows of them to the sampler."""
    prompts, verified, valid = two_steps()
    contexts = [[s.features for s in prompts], valid]
    for steps, context in zip((prompts, verified), contexts, strict=True):
        tokens, confidence = host.propose(steps)
        hidden = host.predicting_hidden(len(steps))
        assert len(host.logits) == (BLOCK if logits else 0)
        for r, step in enumerate(steps):
            expected = reference.draft(
                context[r], step.anchor, BLOCK, sample_from_anchor=options.get("from_anchor", True)
            )
            torch.testing.assert_close(hidden[r], expected.hidden, **TOLERANCE)
            if logits:
                rows = torch.stack([row[r] for row in host.logits])
                torch.testing.assert_close(rows, expected.logits, **TOLERANCE)
            assert tokens[r].tolist() == expected.tokens
            if options.get("confidence", True):
                torch.testing.assert_close(confidence[r], expected.confidence, **TOLERANCE)
            else:
                assert expected.confidence is None
                assert not host.proposer.publish_confidence


@pytest.mark.parametrize("case", CASES)
def test_draft_equals_reference(case: str, target: Path, tmp_path: Path) -> None:
    options = CASES[case]
    host, reference = load(target, tmp_path, harness.draft_config(**options))
    compare(host, reference, options)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("vanilla")])
def test_fused_draft_equals_reference(
    case: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markov_loop, "device_obstacle", lambda device: "")
    options = CASES[case]
    host, reference = load(target, tmp_path, harness.draft_config(**options))
    assert host.proposer.host_loop_reason == ""
    compare(host, reference, options, logits=False)
    if options.get("confidence", True):
        # vLLM repacks linear weights on the CPU, and the host's code was asked above. Where they
        # are as stored, the kernel reads them.
        model = host.proposer.model
        model.model.confidence_head.proj.weight.data = reference.weights[CONFIDENCE_WEIGHT]
        monkeypatch.setattr(model, "compute_confidence", None)
        compare(host, reference, options, logits=False)


def test_cases_are_told_apart() -> None:
    """The reference gives different drafts for different heads: parity above is not vacuous."""
    drafts = {}
    for head in ("vanilla", "gated", "rnn", "none"):
        config = harness.draft_config(head)
        reference = ReferenceDrafter(config, harness.draft_weights(config))
        block = reference.draft(features(12, 1), 7, BLOCK, sample_from_anchor=True)
        drafts[head] = block.logits
    heads = list(drafts)
    for i, one in enumerate(heads):
        for other in heads[i + 1 :]:
            assert (drafts[one] - drafts[other]).abs().max() > 0.1, (one, other)


def test_vanilla_is_the_hosts_own_model_bit_for_bit(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    from vllm_dspark.engine import context_keys, registration

    # Where the kernel is right, as on a GPU, nothing of the model is replaced.
    monkeypatch.setattr(context_keys, "cpu_norm_honours_rows", lambda: True)
    config = harness.draft_config("vanilla", confidence=False)
    ours, _ = load(target, tmp_path / "ours", config)
    assert "_normalize_context_k" not in vars(ours.proposer.model.model)

    monkeypatch.setattr(
        registration, "_MODEL_CLASS", f"{Qwen3DSparkForCausalLM.__module__}:Qwen3DSparkForCausalLM"
    )
    native, _ = load(target, tmp_path / "native", config, DSparkSpeculator)
    assert type(native.proposer.model) is Qwen3DSparkForCausalLM
    monkeypatch.undo()
    registration.register_draft_models(ModelRegistry)

    for steps in two_steps()[:2]:
        assert torch.equal(ours.propose(steps)[0], native.propose(steps)[0])
        assert torch.equal(ours.backbone_output, native.backbone_output)
        assert torch.equal(torch.stack(ours.logits), torch.stack(native.logits))
