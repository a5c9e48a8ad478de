# SPDX-License-Identifier: Apache-2.0
"""Every way in which a draft checkpoint does not fit is an error that says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_harness as harness
import pytest
import torch
from draft_harness import BLOCK, DRAFT_VOCAB, HIDDEN, RANK, TARGET_LAYERS, VOCAB
from safetensors.torch import save_file

from vllm_dspark.engine.checkpoint import (
    CheckpointError,
    DraftSpec,
    TargetShape,
    validate_checkpoint,
)
from vllm_dspark.engine.checkpoint_weights import expected_weights

TARGET = TargetShape(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=TARGET_LAYERS)

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


def check(
    tmp_path: Path, config: Config, weights: Weights | None = None, tokens: int = BLOCK
) -> list[str]:
    weights = harness.draft_weights(config) if weights is None else weights
    harness.write_checkpoint(tmp_path, config, weights)
    stored = json.loads((tmp_path / "config.json").read_text())
    return validate_checkpoint(stored, TARGET, tokens, where="DRAFT", weights_dir=tmp_path)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("from_anchor", [False, True])
def test_sound_checkpoints_pass_without_warnings(
    tmp_path: Path, head: str, reduced: bool, from_anchor: bool
) -> None:
    config = harness.draft_config(head, reduced=reduced, from_anchor=from_anchor)
    assert check(tmp_path, config) == []


def edit(**changes: Any) -> Callable[[Config, Weights], None]:
    return lambda config, weights: config.update(changes)


def drop(name: str) -> Callable[[Config, Weights], None]:
    def damage(config: Config, weights: Weights) -> None:
        del weights[name]

    return damage


def reshape(name: str, *shape: int) -> Callable[[Config, Weights], None]:
    return lambda config, weights: weights.update({name: torch.zeros(shape)})


def borrowed_embeddings_of_another_width(config: Config, weights: Weights) -> None:
    config.update(hidden_size=32, target_hidden_size=HIDDEN)
    del weights["embed_tokens.weight"], weights["lm_head.weight"]


def duplicate_in_vocabulary_map(config: Config, weights: Weights) -> None:
    weights["d2t"][1] = weights["d2t"][0] - 1


def vocabulary_map_beyond_the_target(config: Config, weights: Weights) -> None:
    weights["d2t"][-1] = VOCAB


BROKEN: dict[str, tuple[Config, Callable[[Config, Weights], None], str]] = {
    "missing weight": (
        {},
        drop("layers.1.mlp.up_proj.weight"),
        r"missing weights: layers\.1\.mlp\.up_proj\.weight \[96, 64\]",
    ),
    "missing gate": (
        {"head": "gated"},
        drop("markov_head.gate_proj.bias"),
        rf"missing weights: markov_head\.gate_proj\.bias \[{RANK}\]",
    ),
    "missing confidence bias": (
        {},
        drop("confidence_head.proj.bias"),
        r"missing weights: confidence_head\.proj\.bias \[1\]",
    ),
    "wrong shape": (
        {},
        reshape("fc.weight", HIDDEN, HIDDEN),
        r"weight fc\.weight: expected shape \[64, 128\], found \[64, 64\]",
    ),
    "wrong confidence width": (
        {},
        edit(confidence_head_with_markov=False),
        r"weight confidence_head\.proj\.weight: expected shape \[1, 64\], found \[1, 72\]",
    ),
    "unexpected layer": (
        {},
        reshape("layers.2.input_layernorm.weight", HIDDEN),
        r"unexpected weights.*num_hidden_layers=2.*: layers\.2\.input_layernorm\.weight",
    ),
    "head type says less than the weights": (
        {"head": "rnn"},
        edit(markov_head_type="vanilla"),
        r"unexpected weights.*markov_head_type=vanilla.*: markov_head\.joint_proj\.bias",
    ),
    "unknown head type": (
        {},
        edit(markov_head_type="lstm"),
        r"markov_head_type: expected one of vanilla, gated, rnn, found 'lstm'",
    ),
    "rank 0 with Markov weights": (
        {},
        edit(markov_rank=0, confidence_head_with_markov=False),
        r"unexpected weights.*markov_rank=0.*: markov_head\.markov_w1\.weight",
    ),
    "rank 0 with a Markov confidence": (
        {"head": "none"},
        edit(confidence_head_with_markov=True),
        r"confidence_head_with_markov: expected false with markov_rank=0, found true",
    ),
    "no rank": (
        {},
        edit(markov_rank=None),
        r"markov_rank: expected an integer >= 0, found None",
    ),
    "negative rank": (
        {},
        edit(markov_rank=-1),
        r"markov_rank: expected an integer >= 0, found -1",
    ),
    "block shorter than asked": (
        {},
        edit(block_size=BLOCK - 1),
        r"num_speculative_tokens: expected at most 4 \(block_size=4, sample_from_anchor=True\), "
        r"found 5",
    ),
    "block includes a bonus anchor": (
        {},
        edit(sample_from_anchor=False),
        r"num_speculative_tokens: expected at most 4 \(block_size=5, sample_from_anchor=False\)",
    ),
    "another target's vocabulary": (
        {},
        edit(vocab_size=VOCAB + 2000, draft_vocab_size=VOCAB),
        rf"vocab_size: expected {VOCAB} as in the target .* found {VOCAB + 2000}",
    ),
    "input vocabulary too small": (
        {},
        edit(vocab_size=VOCAB - 8),
        rf"vocab_size: expected the target's {VOCAB} input tokens, found {VOCAB - 8}",
    ),
    "reduced vocabulary without d2t": (
        {"reduced": True},
        drop("d2t"),
        rf"missing weights: d2t \[{DRAFT_VOCAB}\]",
    ),
    "reduced vocabulary without head": (
        {"reduced": True},
        drop("lm_head.weight"),
        rf"missing weights: lm_head\.weight \[{DRAFT_VOCAB}, {HIDDEN}\]",
    ),
    "one target token twice": (
        {"reduced": True},
        duplicate_in_vocabulary_map,
        rf"weight d2t: expected {DRAFT_VOCAB} different target ids, found {DRAFT_VOCAB - 1}",
    ),
    "d2t beyond the target": (
        {"reduced": True},
        vocabulary_map_beyond_the_target,
        rf"weight d2t: expected target ids 0 to {VOCAB - 1}, found 1 others",
    ),
    "embeddings to borrow have another width": (
        {},
        borrowed_embeddings_of_another_width,
        r"missing weights: embed_tokens\.weight \[128, 32\], lm_head\.weight \[128, 32\]",
    ),
    "layer out of range": (
        {},
        edit(target_layer_ids=[0, TARGET_LAYERS]),
        rf"target_layer_ids: expected -1 \(embeddings\) to 2.*found \[{TARGET_LAYERS}\]",
    ),
    "last layer": (
        {},
        edit(target_layer_ids=[0, TARGET_LAYERS - 1]),
        r"target_layer_ids: 3 is the target's last layer",
    ),
    "layers out of order": (
        {},
        edit(target_layer_ids=[2, 0]),
        r"target_layer_ids: expected strictly increasing layers.*found \[2, 0\]",
    ),
    "no layers": (
        {},
        edit(target_layer_ids=[]),
        r"target_layer_ids: expected at least one layer, found none",
    ),
    "another target's width": (
        {},
        edit(target_hidden_size=80),
        r"target_hidden_size .*expected the target's hidden size 64, found 80",
    ),
    "no mask token": (
        {},
        edit(mask_token_id=None),
        r"mask_token_id: expected a token id, found none",
    ),
    "mask token out of range": (
        {},
        edit(mask_token_id=VOCAB),
        rf"mask_token_id: expected 0 <= id < vocab_size={VOCAB}, found {VOCAB}",
    ),
    "no hidden size": (
        {},
        edit(hidden_size=None),
        r"config field hidden_size: expected a positive integer, found None",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_named(name: str, tmp_path: Path) -> None:
    options, damage, message = BROKEN[name]
    config = harness.draft_config(**options)
    weights = harness.draft_weights(config)
    damage(config, weights)
    with pytest.raises(CheckpointError, match=message) as error:
        check(tmp_path, config, weights)
    assert str(error.value).startswith("DSpark draft checkpoint DRAFT cannot be used:")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    config = harness.draft_config() | {"mask_token_id": None, "markov_head_type": "lstm"}
    weights = harness.draft_weights(harness.draft_config())
    del weights["norm.weight"]
    with pytest.raises(CheckpointError) as error:
        check(tmp_path, config, weights)
    assert len(re.findall(r"^  - ", str(error.value), re.MULTILINE)) == 3


WARNED: dict[str, tuple[Config, Config, int, str]] = {
    "fewer tokens": ({}, {}, BLOCK - 2, "num_speculative_tokens=3 is less than the 5 tokens"),
    "rank 0": ({"head": "none"}, {}, BLOCK, "markov_rank=0: the draft has no Markov head"),
    "no block size": ({}, {"block_size": None}, BLOCK, "config has no block_size"),
    "another depth": ({}, {"num_target_layers": 36}, BLOCK, "trained for 36 layers"),
    "head not enabled": (
        {},
        {"enable_confidence_head": False},
        BLOCK,
        "they are not loaded and the draft gives no confidences",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_doubtful_checkpoint_is_warned_about(name: str, tmp_path: Path) -> None:
    options, changes, tokens, message = WARNED[name]
    config = harness.draft_config(**options)
    weights = harness.draft_weights(config)
    warnings = check(tmp_path, config | changes, weights, tokens)
    assert len(warnings) == 1
    assert message in warnings[0]


def test_confidence_head_without_weights_is_warned_about(tmp_path: Path) -> None:
    config = harness.draft_config()
    weights = harness.draft_weights(config)
    weights = {n: w for n, w in weights.items() if not n.startswith("confidence_head.")}
    (warning,) = check(tmp_path, config, weights)
    assert "the draft gives no confidences" in warning


def test_padded_vocabulary_is_allowed(tmp_path: Path) -> None:
    config = harness.draft_config() | {"vocab_size": VOCAB + 64}
    weights = harness.draft_weights(harness.draft_config())
    for name in ("embed_tokens", "lm_head", "markov_head.markov_w1", "markov_head.markov_w2"):
        weight = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = torch.cat([weight, weight[:64]])
    warnings = check(tmp_path, config, weights)
    assert all("64 rows beyond the target's 128 are taken as padding" in w for w in warnings)
    assert warnings


def test_embeddings_of_the_target_may_be_borrowed(tmp_path: Path) -> None:
    config = harness.draft_config()
    weights = harness.draft_weights(config)
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    assert check(tmp_path, config, weights) == []


def speculators_config(**changes: Any) -> Config:
    flat = harness.draft_config()
    top = ("markov_rank", "markov_head_type", "mask_token_id", "block_size")
    heads = ("enable_confidence_head", "confidence_head_with_markov")
    return {
        "speculators_model_type": "dspark",
        "transformer_layer_config": harness.common_config(2),
        "aux_hidden_state_layer_ids": [i + 1 for i in harness.TAPS],
        **{key: flat[key] for key in top + heads},
        **changes,
    }


def test_speculators_layout_defaults_to_a_bonus_anchor() -> None:
    native = DraftSpec.from_config(harness.draft_config())
    assert (native.sample_from_anchor, native.trained_tokens) == (True, BLOCK)
    spec = DraftSpec.from_config(speculators_config())
    assert (spec.sample_from_anchor, spec.trained_tokens) == (False, BLOCK - 1)
    assert spec.target_layer_ids == tuple(harness.TAPS)
    assert expected_weights(spec, TARGET) == expected_weights(native, TARGET)
    explicit = DraftSpec.from_config(speculators_config(sample_from_anchor=True))
    assert explicit.trained_tokens == BLOCK


def test_speculators_layout_only_warns_about_the_last_layer() -> None:
    config = speculators_config(aux_hidden_state_layer_ids=[1, TARGET_LAYERS])
    (warning,) = validate_checkpoint(config, TARGET, BLOCK - 1, where="DRAFT")
    assert "is the target's last layer" in warning


def test_quantized_weights_are_checked_by_module(tmp_path: Path) -> None:
    config = harness.draft_config() | {"quantization_config": {"quant_method": "fp8"}}
    weights = harness.draft_weights(harness.draft_config())
    weights["layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)
    assert check(tmp_path, config, weights) == []
    del weights["layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing weights: layers\.1\.mlp\.up_proj\.weight"):
        check(tmp_path, config, weights)


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    config = harness.draft_config()
    harness.write_checkpoint(tmp_path, config, harness.draft_weights(config))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot read the weight file model\.safetensors"):
        validate_checkpoint(config, TARGET, BLOCK, where="DRAFT", weights_dir=tmp_path)
    index = {"weight_map": {"norm.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not there: model-00002-of-00002\.safetensors"):
        validate_checkpoint(config, TARGET, BLOCK, where="DRAFT", weights_dir=tmp_path)


def test_sharded_checkpoint_is_read_as_one(tmp_path: Path) -> None:
    config = harness.draft_config()
    weights = harness.draft_weights(config)
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({n: weights[n] for n in members}, tmp_path / file)
    index = {"weight_map": {n: file for file, members in shards.items() for n in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert validate_checkpoint(config, TARGET, BLOCK, where="D", weights_dir=tmp_path) == []


def test_other_formats_are_not_checked_but_said_so(tmp_path: Path) -> None:
    config = harness.draft_config()
    (warning,) = validate_checkpoint(config, TARGET, BLOCK, where="D", weights_dir=tmp_path)
    assert "weights were not checked" in warning
