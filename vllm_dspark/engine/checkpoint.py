# SPDX-License-Identifier: Apache-2.0
"""Does this draft checkpoint fit this target? Answered before anything drafts.

Most ways in which a DSpark checkpoint can be wrong do not fail: rejection sampling keeps the output
right and the accepted length silently falls to one. This module finds them from `config.json`, the
headers of the weight files and the target's shape, without building a model.

* Errors (`CheckpointError`, all problems of a checkpoint in one message): drafts would be wrong or
  the process would die later. Every line names what, where, what was expected and what was found.
* Warnings (returned): it works, but hardly as trained.

Works on the two file layouts: the paper's reference code (`sample_from_anchor` defaults to true, a
block of `block_size` positions predicts `block_size` tokens) and *speculators* (defaults to false,
the anchor predicts nothing, so a block predicts `block_size - 1` tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from vllm_dspark.engine.checkpoint_weights import (
    read_shapes,
    read_vocabulary_map,
    vocabulary_map_problems,
    weight_problems,
)

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")

# A draft may be trained on the target's embedding matrix padded for the hardware. More extra rows
# than the largest such padding in use mean another vocabulary.
MAX_VOCAB_PADDING = 1024


class CheckpointError(ValueError):
    """The draft checkpoint cannot be served with this target and these options."""

    @classmethod
    def of(cls, where: str, problems: Sequence[str]) -> CheckpointError:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        return cls(f"DSpark draft checkpoint {where} cannot be used:{lines}")


@dataclass(frozen=True)
class TargetShape:
    """What a draft has to fit."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int


@dataclass(frozen=True)
class DraftSpec:
    """A draft's `config.json`, in either layout, with the defaults that vLLM applies."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_target_layers: int | None
    block_size: int | None
    sample_from_anchor: bool
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...]
    markov_rank: int | None
    markov_head_type: str
    has_confidence_head: bool
    confidence_with_markov: bool
    uses_target_features: bool
    attention_bias: bool
    is_speculators: bool
    is_quantized: bool

    @property
    def trained_tokens(self) -> int | None:
        """Tokens that a block of the trained size predicts; None if the config has no size."""
        if self.block_size is None:
            return None
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "config.json") -> DraftSpec:
        """Read a raw `config.json` of either layout, or vLLM's flattened form of it.

        Raises:
            CheckpointError: a size that every draft needs is missing or not a positive integer.
        """
        speculators = (
            "speculators_model_type" in config or config.get("model_type") == "speculators"
        )
        flat = {**config, **(config.get("transformer_layer_config") or {})}
        problems: list[str] = []

        def size(name: str, default: int | None = None) -> int:
            value = flat.get(name)
            value = default if value is None else value
            if not _is_int(value) or value < 1:
                problems.append(f"config field {name}: expected a positive integer, found {value}")
                return 1
            return int(value)

        hidden = size("hidden_size")
        heads = size("num_attention_heads")
        vocab = size("vocab_size")
        spec = cls(
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", max(1, hidden // heads)),
            vocab_size=vocab,
            draft_vocab_size=size("draft_vocab_size", vocab),
            target_hidden_size=size("target_hidden_size", hidden),
            num_target_layers=flat.get("num_target_layers"),
            block_size=block_size(flat),
            sample_from_anchor=bool(flat.get("sample_from_anchor", not speculators)),
            mask_token_id=_mask_token_id(flat),
            target_layer_ids=_target_layer_ids(flat),
            markov_rank=flat.get("markov_rank"),
            markov_head_type=flat.get("markov_head_type") or "vanilla",
            has_confidence_head=bool(flat.get("enable_confidence_head")),
            confidence_with_markov=bool(flat.get("confidence_head_with_markov")),
            uses_target_features=bool(flat.get("use_aux_hidden_state", True)),
            attention_bias=bool(flat.get("attention_bias")),
            is_speculators=speculators,
            is_quantized=bool(flat.get("quantization_config") or flat.get("compression_config")),
        )
        if problems:
            raise CheckpointError.of(where, problems)
        return spec


def validate_checkpoint(
    config: Mapping[str, Any],
    target: TargetShape,
    num_speculative_tokens: int,
    *,
    where: str,
    weights_dir: Path | None = None,
) -> list[str]:
    """Check a draft's config and, if `weights_dir` is given, the headers of its weight files.

    Args:
        config: the draft's `config.json` (or vLLM's flattened form).
        where: how messages call the checkpoint, e.g. its path.
        weights_dir: local directory of the safetensors files.

    Returns:
        Warnings, one per line, without prefix.

    Raises:
        CheckpointError: every problem found, in one message.
    """
    spec = DraftSpec.from_config(config, where=where)
    problems, warnings = config_problems(spec, target, num_speculative_tokens)
    if weights_dir is not None:
        try:
            shapes = read_shapes(weights_dir)
            offsets = read_vocabulary_map(weights_dir)
        except ValueError as error:
            raise CheckpointError.of(where, [*problems, str(error)]) from error
        if shapes is None:
            warnings.append(f"no safetensors files in {weights_dir}: weights were not checked")
        else:
            found, more = weight_problems(spec, target, shapes)
            problems += found + vocabulary_map_problems(offsets, target)
            warnings += more
    if problems:
        raise CheckpointError.of(where, problems)
    return warnings


def check_weights(
    spec: DraftSpec, target: TargetShape, shapes: Mapping[str, tuple[int, ...]], *, where: str
) -> list[str]:
    """Check names and shapes as a weight loader delivers them; returns warnings.

    Raises:
        CheckpointError: weights missing, of another shape, or unexpected.
    """
    problems, warnings = weight_problems(spec, target, shapes)
    if problems:
        raise CheckpointError.of(where, problems)
    return warnings


def config_problems(
    spec: DraftSpec, target: TargetShape, num_speculative_tokens: int
) -> tuple[list[str], list[str]]:
    """Problems and warnings of the config alone."""
    problems: list[str] = []
    warnings: list[str] = []
    _check_block(spec, num_speculative_tokens, problems, warnings)
    _check_vocabulary(spec, target, problems, warnings)
    _check_taps(spec, target, problems, warnings)
    _check_heads(spec, problems, warnings)
    return problems, warnings


def block_size(config: Mapping[str, Any]) -> int | None:
    """Trained block size under either of its two names, None if absent or not an integer."""
    value = config.get("block_size")
    value = config.get("dspark_block_size") if value is None else value
    return int(value) if _is_int(value) else None


def _check_block(spec: DraftSpec, num_tokens: int, problems: list[str], warn: list[str]) -> None:
    trained = spec.trained_tokens
    if trained is None:
        warn.append("config has no block_size: num_speculative_tokens could not be checked")
        return
    basis = f"block_size={spec.block_size}, sample_from_anchor={spec.sample_from_anchor}"
    if trained < 1:
        problems.append(f"config field block_size: {basis} leaves no position that predicts")
    elif num_tokens > trained:
        problems.append(
            f"num_speculative_tokens: expected at most {trained} ({basis}), found {num_tokens}; "
            "the draft attends over a whole block and was never trained on a longer one"
        )
    elif num_tokens < trained:
        warn.append(
            f"num_speculative_tokens={num_tokens} is less than the {trained} tokens of a trained "
            f"block ({basis}): the draft sees fewer positions than it was trained on, "
            "acceptance may be lower"
        )


def _check_vocabulary(
    spec: DraftSpec, target: TargetShape, problems: list[str], warn: list[str]
) -> None:
    limit = target.vocab_size + MAX_VOCAB_PADDING
    if spec.vocab_size < target.vocab_size:
        problems.append(
            f"config field vocab_size: expected the target's {target.vocab_size} input tokens, "
            f"found {spec.vocab_size} (a smaller output vocabulary belongs in draft_vocab_size, "
            "with a d2t table)"
        )
    for name in ("vocab_size", "draft_vocab_size"):
        found = getattr(spec, name)
        if found > limit:
            problems.append(
                f"config field {name}: expected {target.vocab_size} as in the target (or up to "
                f"{MAX_VOCAB_PADDING} padding rows more), found {found}"
            )
        elif found > target.vocab_size:
            warn.append(
                f"config field {name}: {found - target.vocab_size} rows beyond the target's "
                f"{target.vocab_size} are taken as padding"
            )
    mask = spec.mask_token_id
    if mask is None:
        problems.append("config field mask_token_id: expected a token id, found none")
    elif not 0 <= mask < spec.vocab_size:
        problems.append(
            f"config field mask_token_id: expected 0 <= id < vocab_size={spec.vocab_size}, "
            f"found {mask}"
        )


def _check_taps(spec: DraftSpec, target: TargetShape, problems: list[str], warn: list[str]) -> None:
    if not spec.uses_target_features:
        return
    ids, layers = spec.target_layer_ids, target.num_hidden_layers
    if not ids:
        problems.append("config field target_layer_ids: expected at least one layer, found none")
    outside = [i for i in ids if not -1 <= i < layers]
    if outside:
        problems.append(
            f"config field target_layer_ids: expected -1 (embeddings) to {layers - 2}, as the "
            f"target has {layers} layers, found {outside}"
        )
    elif ids and max(ids) == layers - 1:
        text = (
            f"config field target_layer_ids: {layers - 1} is the target's last layer, whose output "
            "training frameworks store after the final norm and vLLM captures before it"
        )
        (warn if spec.is_speculators else problems).append(text)
    if any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        problems.append(
            "config field target_layer_ids: expected strictly increasing layers (vLLM concatenates "
            f"features in layer order), found {list(ids)}"
        )
    if spec.target_hidden_size != target.hidden_size:
        problems.append(
            f"config field target_hidden_size (or hidden_size): expected the target's hidden size "
            f"{target.hidden_size}, found {spec.target_hidden_size}"
        )
    if spec.num_target_layers not in (None, layers):
        warn.append(
            f"config field num_target_layers: trained for {spec.num_target_layers} layers, the "
            f"target has {layers}; is this the target that the draft was trained for?"
        )


def _check_heads(spec: DraftSpec, problems: list[str], warn: list[str]) -> None:
    rank = spec.markov_rank
    if not _is_int(rank) or rank < 0:
        problems.append(f"config field markov_rank: expected an integer >= 0, found {rank}")
        return
    if spec.markov_head_type not in MARKOV_HEAD_TYPES:
        problems.append(
            f"config field markov_head_type: expected one of {', '.join(MARKOV_HEAD_TYPES)}, found "
            f"{spec.markov_head_type!r}"
        )
    if rank == 0:
        warn.append(
            "markov_rank=0: the draft has no Markov head, its positions are drawn independently "
            "(as in DFlash) and accepted lengths are shorter"
        )
        if spec.has_confidence_head and spec.confidence_with_markov:
            problems.append(
                "config field confidence_head_with_markov: expected false with markov_rank=0, "
                "found true"
            )


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _mask_token_id(config: Mapping[str, Any]) -> int | None:
    nested = config.get("dflash_config") or {}
    for value in (
        nested.get("mask_token_id"),
        config.get("mask_token_id"),
        config.get("dspark_noise_token_id"),
    ):
        if value is not None:
            return int(value)
    return None


def _target_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose output is read, counted from 0 (-1: embeddings), in vLLM's order of lookup."""
    nested = config.get("dflash_config") or {}
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        if config.get(name):
            # These count layer inputs, one more than the layer whose output they are.
            return tuple(i - 1 for i in config[name])
    for ids in (
        nested.get("target_layer_ids"),
        config.get("dspark_target_layer_ids"),
        config.get("target_layer_ids"),
    ):
        if ids:
            return tuple(ids)
    return ()
