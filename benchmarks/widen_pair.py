# SPDX-License-Identifier: Apache-2.0
"""Function-preserving widening of a (Qwen3 target, DSpark drafter) pair.

Every added width is zero where it could reach the residual stream, every added layer is an identity
(`o_proj` = `down_proj` = 0), and norm weights absorb the change of the mean. The widened pair
computes the same function as the original (tokens, acceptance, confidences, up to rounding) at the
cost of a model of the requested shape, so a benchmark has real acceptance without a large
checkpoint.

The ratio of the hidden sizes must be a power of 4: norm weights then scale by a power of 2.

    python benchmarks/widen_pair.py demo OUT --hidden 4096 --layers 36 --ffn 12288 \
        --q-heads 64 --kv-heads 16 --vocab 151936 --draft-layers 5 --rank 256
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SHARD_BYTES = 4_000_000_000
DTYPE = torch.bfloat16
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Requested sizes of the widened pair."""

    hidden: int = 4096
    layers: int = 36
    ffn: int = 12288
    q_heads: int = 64
    kv_heads: int = 16
    vocab: int = 151936
    draft_layers: int = 5
    rank: int = 256


class Widener:
    """Copies tensors of a small pair into zero-padded tensors of `shape`.

    Raises:
        ValueError: the shape cannot hold the pair, or its hidden ratio is no power of 4.
    """

    def __init__(
        self, target: Mapping[str, Any], draft: Mapping[str, Any], shape: Shape, device: str
    ) -> None:
        self.target, self.draft, self.shape = target, draft, shape
        self.device = torch.device(device)
        self.noise_source = torch.Generator(device=self.device).manual_seed(0)
        self.head_dim = target["head_dim"]
        self._check()
        self.ratio = shape.hidden // target["hidden_size"]
        self.layer_stride = shape.layers // target["num_hidden_layers"]
        self.query_rows = self._query_rows()

    def _check(self) -> None:
        shape, small = self.shape, self.target
        ratio, rest = divmod(shape.hidden, small["hidden_size"])
        root = math.isqrt(ratio)
        if rest or root * root != ratio or root & (root - 1):
            raise ValueError(
                f"--hidden {shape.hidden}: must be {small['hidden_size']} times a power of 4"
            )
        if shape.layers < 1 or shape.layers % small["num_hidden_layers"]:
            raise ValueError(
                f"--layers {shape.layers}: must be a multiple of {small['num_hidden_layers']}"
            )
        group = small["num_attention_heads"] // small["num_key_value_heads"]
        if shape.kv_heads < 1 or shape.q_heads % shape.kv_heads:
            raise ValueError(f"--q-heads {shape.q_heads}: must be a multiple of --kv-heads")
        for option, value, least in (
            ("--kv-heads", shape.kv_heads, small["num_key_value_heads"]),
            ("--q-heads", shape.q_heads, group * shape.kv_heads),
            ("--ffn", shape.ffn, small["intermediate_size"]),
            ("--vocab", shape.vocab, small["vocab_size"]),
            ("--draft-layers", shape.draft_layers, self.draft["num_hidden_layers"]),
            ("--rank", shape.rank, self.draft["markov_rank"]),
        ):
            if value < least:
                raise ValueError(f"{option} {value}: must be at least {least}")

    def _query_rows(self) -> torch.Tensor:
        """Where each row of the small query projection goes, so that heads keep their KV head."""
        small = self.target
        old_group = small["num_attention_heads"] // small["num_key_value_heads"]
        new_group = self.shape.q_heads // self.shape.kv_heads
        rows = []
        for head in range(small["num_attention_heads"]):
            place = head // old_group * new_group + head % old_group
            rows.append(torch.arange(place * self.head_dim, (place + 1) * self.head_dim))
        return torch.cat(rows).to(self.device)

    def zeros(self, *size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=DTYPE, device=self.device)

    def noise(self, *size: int) -> torch.Tensor:
        values = torch.randn(*size, device=self.device, generator=self.noise_source)
        return (values * 0.02).to(DTYPE)

    def place(
        self,
        size: tuple[int, int],
        old: torch.Tensor,
        rows: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`old` at `rows` and `columns` (default: the first ones) of a zero matrix."""
        r = torch.arange(old.shape[0], device=self.device) if rows is None else rows
        c = torch.arange(old.shape[1], device=self.device) if columns is None else columns
        new = self.zeros(*size)
        new[r[:, None], c[None]] = old.to(self.device, DTYPE)
        return new

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """Norm weight for a residual stream whose mean square fell by the hidden ratio."""
        new = torch.ones(self.shape.hidden, dtype=DTYPE, device=self.device)
        new[: weight.shape[0]] = weight.to(self.device, DTYPE) / math.isqrt(self.ratio)
        return new

    def vocabulary(self, weight: torch.Tensor, width: int) -> torch.Tensor:
        """[vocab, width]; rows past the old vocabulary repeat the never-trained pad row."""
        old = weight.to(self.device, DTYPE)
        new = self.zeros(self.shape.vocab, width)
        new[: old.shape[0], : old.shape[1]] = old
        new[old.shape[0] :, : old.shape[1]] = old[self.target["pad_token_id"]]
        return new

    def layer(self, old: Weights, source: str, destination: str) -> Weights:
        """One layer with the function of `source`."""
        shape, hidden = self.shape, self.shape.hidden
        q_width, kv_width = shape.q_heads * self.head_dim, shape.kv_heads * self.head_dim

        def of(name: str) -> torch.Tensor:
            return old[f"{source}{name}.weight"]

        new = {
            "self_attn.q_proj": self.place(
                (q_width, hidden), of("self_attn.q_proj"), rows=self.query_rows
            ),
            "self_attn.k_proj": self.place((kv_width, hidden), of("self_attn.k_proj")),
            "self_attn.v_proj": self.place((kv_width, hidden), of("self_attn.v_proj")),
            "self_attn.o_proj": self.place(
                (hidden, q_width), of("self_attn.o_proj"), columns=self.query_rows
            ),
            # These share rms_norm_eps but keep their width; the change of eps is below rounding.
            "self_attn.q_norm": of("self_attn.q_norm").to(self.device, DTYPE),
            "self_attn.k_norm": of("self_attn.k_norm").to(self.device, DTYPE),
            "mlp.gate_proj": self.place((shape.ffn, hidden), of("mlp.gate_proj")),
            "mlp.up_proj": self.place((shape.ffn, hidden), of("mlp.up_proj")),
            "mlp.down_proj": self.place((hidden, shape.ffn), of("mlp.down_proj")),
            "input_layernorm": self.norm(of("input_layernorm")),
            "post_attention_layernorm": self.norm(of("post_attention_layernorm")),
        }
        return {f"{destination}{name}.weight": value for name, value in new.items()}

    def identity(self, destination: str) -> Weights:
        """One layer that computes and adds nothing to the residual stream."""
        shape, hidden = self.shape, self.shape.hidden
        q_width, kv_width = shape.q_heads * self.head_dim, shape.kv_heads * self.head_dim
        new = {
            "self_attn.q_proj": self.noise(q_width, hidden),
            "self_attn.o_proj": self.zeros(hidden, q_width),
            "self_attn.k_proj": self.noise(kv_width, hidden),
            "self_attn.v_proj": self.noise(kv_width, hidden),
            "mlp.gate_proj": self.noise(shape.ffn, hidden),
            "mlp.up_proj": self.noise(shape.ffn, hidden),
            "mlp.down_proj": self.zeros(hidden, shape.ffn),
        }
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            new[name] = torch.ones(self.head_dim, dtype=DTYPE, device=self.device)
        for name in ("input_layernorm", "post_attention_layernorm"):
            new[name] = torch.ones(hidden, dtype=DTYPE, device=self.device)
        return {f"{destination}{name}.weight": value for name, value in new.items()}

    def widen_target(self, old: Weights) -> Weights:
        new = {
            "model.embed_tokens.weight": self.vocabulary(
                old["model.embed_tokens.weight"], self.shape.hidden
            )
        }
        for number in range(self.target["num_hidden_layers"]):
            first = number * self.layer_stride
            new |= self.layer(old, f"model.layers.{number}.", f"model.layers.{first}.")
            for added in range(first + 1, first + self.layer_stride):
                new |= self.identity(f"model.layers.{added}.")
        new["model.norm.weight"] = self.norm(old["model.norm.weight"])
        new["lm_head.weight"] = self.vocabulary(old["lm_head.weight"], self.shape.hidden)
        return new

    def widen_draft(self, old: Weights) -> Weights:
        hidden, rank = self.shape.hidden, self.shape.rank
        small_hidden, taps = self.target["hidden_size"], len(self.draft["target_layer_ids"])
        new: Weights = {}
        for number in range(self.draft["num_hidden_layers"]):
            new |= self.layer(old, f"layers.{number}.", f"layers.{number}.")
        for added in range(self.draft["num_hidden_layers"], self.shape.draft_layers):
            new |= self.identity(f"layers.{added}.")
        tap_columns = torch.cat(
            [torch.arange(tap * hidden, tap * hidden + small_hidden) for tap in range(taps)]
        ).to(self.device)
        new["fc.weight"] = self.place((hidden, taps * hidden), old["fc.weight"], None, tap_columns)
        for name in ("hidden_norm", "norm"):
            new[f"{name}.weight"] = self.norm(old[f"{name}.weight"])
        for name in ("markov_w1", "markov_w2"):
            key = f"markov_head.{name}.weight"
            new[key] = self.vocabulary(old[key], rank)
        weight = old["confidence_head.proj.weight"].float()
        wide = torch.zeros(1, hidden + rank)
        wide[:, :small_hidden] = weight[:, :small_hidden]
        wide[:, hidden : hidden + self.draft["markov_rank"]] = weight[:, small_hidden:]
        new["confidence_head.proj.weight"] = wide
        new["confidence_head.proj.bias"] = old["confidence_head.proj.bias"].float()
        return new

    def target_config(self) -> dict[str, Any]:
        return {**self.target, **self._sizes(), "num_hidden_layers": self.shape.layers}

    def draft_config(self) -> dict[str, Any]:
        return {
            **self.draft,
            **self._sizes(),
            "num_hidden_layers": self.shape.draft_layers,
            "layer_types": ["full_attention"] * self.shape.draft_layers,
            "num_target_layers": self.shape.layers,
            "target_layer_ids": [t * self.layer_stride for t in self.draft["target_layer_ids"]],
            "markov_rank": self.shape.rank,
        }

    def _sizes(self) -> dict[str, Any]:
        return {
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.ffn,
            "num_attention_heads": self.shape.q_heads,
            "num_key_value_heads": self.shape.kv_heads,
            "vocab_size": self.shape.vocab,
            "rms_norm_eps": self.target["rms_norm_eps"] / self.ratio,
        }


def save(weights: Weights, config: Mapping[str, Any], folder: Path) -> None:
    """Write shards of about SHARD_BYTES, their index if there are several, and the config."""
    shards: list[Weights] = [{}]
    size = 0
    for name, value in weights.items():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value.contiguous().cpu()
        size += value.numel() * value.element_size()
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        one = len(shards) == 1
        part = "model" if one else f"model-{number:05d}-of-{len(shards):05d}"
        save_file(shard, folder / f"{part}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, f"{part}.safetensors")
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def widen(source: Path, destination: Path, shape: Shape, device: str) -> None:
    """Write the widened pair of `source` (with `target/` and `draft/`) to `destination`.

    Raises:
        ValueError: see `Widener`.
    """
    configs = {
        name: json.loads((source / name / "config.json").read_text())
        for name in ("target", "draft")
    }
    widener = Widener(configs["target"], configs["draft"], shape, device)
    jobs = {
        "target": (widener.widen_target, widener.target_config()),
        "draft": (widener.widen_draft, widener.draft_config()),
    }
    for name, (widened, config) in jobs.items():
        folder = destination / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in (source / name).iterdir():
            if file.suffix != ".safetensors" and file.name != "config.json":
                shutil.copy(file, folder / file.name)
        save(widened(load_file(source / name / "model.safetensors")), config, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Function-preserving widening of a pair.")
    parser.add_argument("source", type=Path, help="folder with target/ and draft/")
    parser.add_argument("destination", type=Path)
    for name, default in Shape().__dict__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    shape = Shape(**{name: getattr(args, name) for name in Shape().__dict__})
    try:
        widen(args.source, args.destination, shape, args.device)
    except (OSError, ValueError) as error:
        print(f"widen_pair: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
