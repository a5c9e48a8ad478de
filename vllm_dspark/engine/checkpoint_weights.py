# SPDX-License-Identifier: Apache-2.0
"""Which weights a DSpark draft must have, and what a checkpoint really holds.

Names are those of the files (no `model.` prefix); shapes follow from the config. Reading touches
file headers only, plus the small `d2t` table.

A quantized checkpoint stores other tensors under the same module names: there only the presence of
each module is checked, not shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_dspark.engine.checkpoint import DraftSpec, TargetShape

Shape = tuple[int, ...]

INDEX_FILE = "model.safetensors.index.json"
_LISTED = 6

# Other spellings that vLLM's loader understands, and tensors that it does not load.
_ALIASES = (
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("encoder.fc.", "fc."),
    ("midlayer.", "layers.0."),
)
_IGNORED = ("t2d", "mask_embedding")


def expected_weights(
    spec: DraftSpec, target: TargetShape
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Required and optional weights by name, with their shapes."""
    d, vocab = spec.hidden_size, spec.vocab_size
    embeddings: dict[str, Shape] = {"embed_tokens.weight": (vocab, d)}
    lm_head: dict[str, Shape] = {"lm_head.weight": (spec.draft_vocab_size, d)}
    d2t: dict[str, Shape] = {"d2t": (spec.draft_vocab_size,)}
    required: dict[str, Shape] = {"hidden_norm.weight": (d,), "norm.weight": (d,)}
    optional: dict[str, Shape] = {}
    if spec.uses_target_features:
        required["fc.weight"] = (d, len(spec.target_layer_ids) * spec.target_hidden_size)

    # Whatever is absent comes from the target, so it has to have the target's shape.
    can_borrow = d == target.hidden_size
    can_borrow_embeddings = can_borrow and vocab <= target.vocab_size
    (optional if can_borrow_embeddings else required).update(embeddings)
    if spec.draft_vocab_size < target.vocab_size:
        required |= lm_head | d2t
    else:
        can_borrow_head = can_borrow and spec.draft_vocab_size == target.vocab_size
        (optional if can_borrow_head else required).update(lm_head)
        optional |= d2t

    for layer in range(spec.num_hidden_layers):
        _add_layer(spec, f"layers.{layer}.", required, optional)
    _add_heads(spec, required)
    return required, optional


def _add_layer(
    spec: DraftSpec, prefix: str, required: dict[str, Shape], optional: dict[str, Shape]
) -> None:
    d, ffn = spec.hidden_size, spec.intermediate_size
    q = spec.num_attention_heads * spec.head_dim
    kv = spec.num_key_value_heads * spec.head_dim
    attention: dict[str, Shape] = {
        "q_proj": (q, d),
        "k_proj": (kv, d),
        "v_proj": (kv, d),
        "o_proj": (d, q),
    }
    for name, shape in attention.items():
        required[f"{prefix}self_attn.{name}.weight"] = shape
        if spec.attention_bias:
            required[f"{prefix}self_attn.{name}.bias"] = shape[:1]
    required |= {
        f"{prefix}self_attn.q_norm.weight": (spec.head_dim,),
        f"{prefix}self_attn.k_norm.weight": (spec.head_dim,),
        f"{prefix}mlp.gate_proj.weight": (ffn, d),
        f"{prefix}mlp.up_proj.weight": (ffn, d),
        f"{prefix}mlp.down_proj.weight": (d, ffn),
        f"{prefix}input_layernorm.weight": (d,),
        f"{prefix}post_attention_layernorm.weight": (d,),
    }
    optional[f"{prefix}self_attn.attention_sink_bias"] = (spec.num_attention_heads,)


def _add_heads(spec: DraftSpec, required: dict[str, Shape]) -> None:
    d, rank = spec.hidden_size, max(0, spec.markov_rank or 0)
    if rank:
        required["markov_head.markov_w1.weight"] = (spec.vocab_size, rank)
        required["markov_head.markov_w2.weight"] = (spec.draft_vocab_size, rank)
    if rank and spec.markov_head_type == "gated":
        required["markov_head.gate_proj.weight"] = (rank, d + rank)
        required["markov_head.gate_proj.bias"] = (rank,)
    if rank and spec.markov_head_type == "rnn":
        required["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + d)
        required["markov_head.joint_proj.bias"] = (3 * rank,)
    if spec.has_confidence_head:
        width = d + (rank if spec.confidence_with_markov else 0)
        required["confidence_head.proj.weight"] = (1, width)
        required["confidence_head.proj.bias"] = (1,)


def weight_problems(
    spec: DraftSpec, target: TargetShape, shapes: Mapping[str, Shape]
) -> tuple[list[str], list[str]]:
    """Compare the weights of a checkpoint with what its config calls for.

    Returns:
        Problems (missing, wrongly shaped, unexpected) and warnings (a confidence head that is
        switched off or absent: the draft works, without confidences).
    """
    found = {_canonical(name): shape for name, shape in shapes.items() if not _is_ignored(name)}
    required, optional = expected_weights(spec, target)
    warnings = _settle_confidence_head(spec, found, required)
    known = required | optional
    if spec.is_quantized:
        modules = {name.rpartition(".")[0] or name for name in found}
        missing = [n for n in required if (n.rpartition(".")[0] or n) not in modules]
        unexpected, wrong = [], []
    else:
        missing = [name for name in required if name not in found]
        unexpected = sorted(name for name in found if name not in known)
        wrong = [name for name in known if name in found and found[name] != known[name]]

    problems = [
        f"weight {name}: expected shape {list(known[name])}, found {list(found[name])}"
        for name in wrong
    ]
    if missing:
        problems.append(f"missing weights: {_list(missing, required)}")
    if unexpected:
        head = f"markov_rank={spec.markov_rank}, markov_head_type={spec.markov_head_type}"
        problems.append(
            f"unexpected weights, which nothing in the config ({head}, num_hidden_layers="
            f"{spec.num_hidden_layers}) calls for: {_list(unexpected, {})}"
        )
    return problems, warnings


def vocabulary_map_problems(offsets: Sequence[int] | None, target: TargetShape) -> list[str]:
    """Check a `d2t` table: draft id i stands for target id `i + offsets[i]`."""
    if offsets is None:
        return []
    ids = [i + offset for i, offset in enumerate(offsets)]
    outside = [i for i in ids if not 0 <= i < target.vocab_size]
    problems = []
    if outside:
        problems.append(
            f"weight d2t: expected target ids 0 to {target.vocab_size - 1}, found "
            f"{len(outside)} others, e.g. {outside[0]}"
        )
    if len(set(ids)) != len(ids):
        problems.append(
            f"weight d2t: expected {len(ids)} different target ids, found {len(set(ids))}; one "
            "token must have one draft probability"
        )
    return problems


def _settle_confidence_head(
    spec: DraftSpec, found: dict[str, Shape], required: dict[str, Shape]
) -> list[str]:
    stored = [name for name in found if name.startswith("confidence_head.")]
    if spec.has_confidence_head and not stored:
        for name in [n for n in required if n.startswith("confidence_head.")]:
            del required[name]
        return [
            "enable_confidence_head is true but the checkpoint has no confidence_head weights: "
            "the draft gives no confidences"
        ]
    if stored and not spec.has_confidence_head:
        for name in stored:
            del found[name]
        return [
            "the checkpoint has confidence_head weights but enable_confidence_head is not true: "
            "they are not loaded and the draft gives no confidences"
        ]
    return []


def _list(names: list[str], shapes: Mapping[str, Shape]) -> str:
    shown = [f"{n} {list(shapes[n])}" if n in shapes else n for n in names[:_LISTED]]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(shown) + more


def _canonical(name: str) -> str:
    for old, new in _ALIASES:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _is_ignored(name: str) -> bool:
    return any(part in name for part in _IGNORED)


def read_shapes(directory: Path) -> dict[str, Shape] | None:
    """Names and shapes of all tensors in a directory's safetensors files, from their headers.

    Returns None if there are no such files.

    Raises:
        ValueError: a file named by the index is absent, or a file is damaged.
    """
    shapes: dict[str, Shape] = {}
    files = _weight_files(directory)
    for path in files:
        with _open(path) as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(handle.get_slice(name).get_shape())
    return shapes if files else None


def read_vocabulary_map(directory: Path) -> list[int] | None:
    """The `d2t` table of a local checkpoint as plain integers, None if it has none."""
    for path in _weight_files(directory):
        with _open(path) as handle:
            if "d2t" in handle.keys():  # noqa: SIM118 - not a mapping
                return [int(offset) for offset in handle.get_tensor("d2t").reshape(-1)]
    return None


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ValueError(f"{INDEX_FILE} names files that are not there: {', '.join(absent)}")
    return [directory / name for name in names]


def _open(path: Path):  # type: ignore[no-untyped-def]
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read the weight file {path.name}: {error}") from error
