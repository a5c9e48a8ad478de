# SPDX-License-Identifier: Apache-2.0
"""The proposer around the draft: what it refuses, and when it publishes confidences."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draft_harness as harness
import pytest
import torch
from draft_harness import BLOCK, HIDDEN, TAPS, DraftHost, Step
from reference_drafter import ReferenceDrafter

from vllm_dspark.engine import markov_loop
from vllm_dspark.engine.checkpoint import CheckpointError


def engine_config(target: Path, directory: Path, config: dict[str, Any], **options: Any) -> Any:
    draft = harness.write_checkpoint(directory, config, harness.draft_weights(config))
    return harness.engine_config(target, draft, **options)


def one_step(anchor: int = 7) -> list[Step]:
    features = torch.randn(6, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(5))
    return [Step(list(range(6)), 0, anchor, features)]


def test_confidences_need_no_native_flag(target: Path, tmp_path: Path) -> None:
    from vllm_dspark.engine.proposer import DSparkProposer

    config = engine_config(target, tmp_path, harness.draft_config())
    assert config.speculative_config.enable_adaptive_verification is False
    host = DraftHost(config, DSparkProposer)
    assert host.proposer.publish_confidence
    assert not host.proposer.use_acceptance_estimator
    _, confidence = host.propose(one_step())
    assert ((confidence > 0) & (confidence < 1)).all()


def test_confidences_can_be_left_out(target: Path, tmp_path: Path) -> None:
    from vllm_dspark.engine.proposer import DSparkProposer

    class Silent(DSparkProposer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.publish_confidence = False

    host = DraftHost(engine_config(target, tmp_path, harness.draft_config("rnn")), Silent)
    assert not host.proposer.publish_confidence
    host.proposer.draft_token_confidence_probs.fill_(-1.0)
    _, confidence = host.propose(one_step())
    assert (confidence == -1.0).all()


def test_without_a_trained_head_the_estimator_may_serve(target: Path, tmp_path: Path) -> None:
    from vllm_dspark.engine.proposer import DSparkProposer

    class Estimating(DSparkProposer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.use_acceptance_estimator = True

    config = harness.draft_config("gated", confidence=False)
    host = DraftHost(engine_config(target, tmp_path / "without", config), Estimating)
    assert not host.proposer.publish_confidence
    assert host.proposer.acceptance_estimator is not None
    with_head = engine_config(target, tmp_path / "with", harness.draft_config("gated"))
    assert DraftHost(with_head, Estimating).proposer.acceptance_estimator is None


@pytest.mark.parametrize(
    ("head", "reduced", "fused"),
    [
        ("vanilla", False, False),
        ("vanilla", False, True),
        ("vanilla", True, True),
        ("gated", True, False),
        ("rnn", False, False),
        ("none", False, False),
    ],
)
def test_probabilistic_drafting_keeps_the_proposal(
    head: str,
    reduced: bool,
    fused: bool,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rejection sampling needs the exact logits that each draft was drawn from."""
    from vllm_dspark.cpu import interpreter
    from vllm_dspark.engine.proposer import DSparkProposer

    interpreter.install()
    if fused:
        monkeypatch.setattr(markov_loop, "device_obstacle", lambda device: "")
    draft = harness.draft_config(head, reduced=reduced)
    config = engine_config(target, tmp_path, draft, draft_sample_method="probabilistic")
    host = DraftHost(config, DSparkProposer)
    steps = one_step()
    assert bool(host.proposer.host_loop_reason) != fused
    tokens, _ = host.propose(steps)
    weights = harness.draft_weights(draft)
    expected = ReferenceDrafter(draft, weights).draft(
        steps[0].features, steps[0].anchor, BLOCK, sample_from_anchor=True
    )
    # Temperature 0, so the draws are the reference's argmaxes.
    assert tokens[0].tolist() == expected.tokens
    cached = host.proposer.draft_logits[0]
    columns = torch.arange(expected.logits.shape[1]) + weights.get("d2t", torch.tensor(0))
    torch.testing.assert_close(cached[:, columns], expected.logits, atol=2e-5, rtol=1e-4)
    others = torch.ones(cached.shape[1], dtype=torch.bool)
    others[columns] = False
    assert (cached[:, others] == -torch.inf).all()


def test_a_width_of_zero_asks_the_host_for_no_block(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    from vllm_dspark.engine.proposer import DSparkProposer

    asked: list[int | None] = []

    def propose(self: Any, batch: Any, num_speculative_tokens: int | None = None) -> None:
        asked.append(num_speculative_tokens)

    monkeypatch.setattr(DSparkSpeculator, "propose", propose)
    config = engine_config(target, tmp_path, harness.draft_config())
    proposer = DSparkProposer(config, torch.device("cpu"))
    for width in (0, BLOCK):
        proposer.next_width = lambda width=width: width
        batch = SimpleNamespace(num_reqs=2, seq_lens_cpu_upper_bound=torch.tensor([9, 9]))
        assert proposer.propose(batch).shape == (2, BLOCK)
    assert asked == [0, None]


@pytest.mark.parametrize("fused", [True, False])
def test_kernels_are_compiled_in_the_first_dummy_run(
    fused: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never in a later one, which an idle rank may run beside traffic."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    from vllm_dspark.engine.proposer import DSparkProposer

    warmed: list[Any] = []
    monkeypatch.setattr(markov_loop, "warm", warmed.append)
    reason = "" if fused else "the test wants the host's loop"
    monkeypatch.setattr(markov_loop, "loop_obstacle", lambda speculator: reason)
    monkeypatch.setattr(DSparkSpeculator, "propose", lambda *args, **kwargs: None)
    config = engine_config(target, tmp_path, harness.draft_config())
    proposer = DraftHost(config, DSparkProposer).proposer
    proposer._kernels_warm = False  # as on a GPU
    proposer.before_traffic = [lambda: warmed.append("acceptance")]
    batch = SimpleNamespace(num_reqs=2, seq_lens_cpu_upper_bound=torch.tensor([9, 9]))
    proposer.propose(batch, dummy_run=False)
    assert not warmed
    for _ in range(2):
        proposer.propose(batch, dummy_run=True)
    assert warmed == ["acceptance", *([proposer] if fused else [])]


def test_misfit_is_refused_before_anything_is_loaded(target: Path, tmp_path: Path) -> None:
    from vllm_dspark.engine.proposer import DSparkProposer

    config = engine_config(target, tmp_path, harness.draft_config(), num_tokens=BLOCK + 2)
    with pytest.raises(CheckpointError, match=rf"expected at most {BLOCK} .*found {BLOCK + 2}"):
        DSparkProposer(config, torch.device("cpu"))


def test_short_blocks_are_logged_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_dspark.engine import proposer

    logged: list[str] = []
    record = SimpleNamespace(warning=lambda text, *args: logged.append(text % args))
    monkeypatch.setattr(proposer, "logger", record)
    draft = harness.draft_config()
    DraftHost(engine_config(target, tmp_path, draft, num_tokens=BLOCK - 1), proposer.DSparkProposer)
    assert len(logged) == 1
    assert "num_speculative_tokens=4 is less than the 5 tokens of a trained block" in logged[0]


def test_loader_checks_what_no_file_header_told(target: Path, tmp_path: Path) -> None:
    from vllm_dspark.engine.proposer import DSparkProposer

    draft = harness.draft_config("gated")
    host = DraftHost(engine_config(target, tmp_path, draft), DSparkProposer)
    weights = harness.draft_weights(draft)
    del weights["markov_head.gate_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing weights: markov_head\.gate_proj\.weight"):
        host.proposer.model.load_weights(iter(weights.items()))


def test_topk_bias_is_refused_for_stateful_heads(target: Path, tmp_path: Path) -> None:
    from vllm_dspark.engine.proposer import DSparkProposer

    config = engine_config(target, tmp_path, harness.draft_config("rnn"), dspark_draft_topk=4)
    with pytest.raises(ValueError, match=r"dspark_draft_topk: allowed only with a vanilla"):
        DraftHost(config, DSparkProposer)


def foreign(**config: Any) -> Any:
    draft = SimpleNamespace(
        architectures=["Gemma4DSparkModel"],
        model="DRAFT",
        hf_config=SimpleNamespace(
            to_dict=lambda: {"architectures": ["Gemma4DSparkModel"], **config}
        ),
    )
    speculative = SimpleNamespace(draft_model_config=draft, num_speculative_tokens=5)
    return SimpleNamespace(speculative_config=speculative)


def test_other_architectures_are_checked_for_what_their_loaders_drop() -> None:
    from vllm_dspark.engine.proposer import validate_draft

    validate_draft(foreign(block_size=5, markov_head_type="vanilla"))
    with pytest.raises(CheckpointError, match=r"'vanilla' for architecture .*Gemma4.*'gated'"):
        validate_draft(foreign(block_size=7, markov_head_type="gated"))
    with pytest.raises(CheckpointError, match=r"at most block_size=4, found 5"):
        validate_draft(foreign(dspark_block_size=4))
