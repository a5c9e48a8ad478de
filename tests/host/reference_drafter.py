# SPDX-License-Identifier: Apache-2.0
"""A DSpark draft model in plain PyTorch, as an oracle for the engine's one.

Written from the description of the checkpoint format and of the draft step (arXiv 2607.05147 and
its reference code), batch 1, float32, greedy, without caches of its own: small enough to be checked
by reading. Imports torch only.

Both anchor layouts:

* `sample_from_anchor`: inputs `[x0, MASK * (gamma - 1)]`; slot k predicts token k (k = 1..gamma).
* otherwise (speculators): inputs `[x0, MASK * gamma]`; slot 0, the anchor, predicts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Block:
    """One drafted block; `gamma` entries each."""

    hidden: Tensor  # [gamma, hidden_size], after the final norm
    logits: Tensor  # [gamma, draft_vocab], base logits plus Markov bias
    tokens: list[int]  # ids of the target's vocabulary
    confidence: Tensor | None  # [gamma], None without a confidence head


class ReferenceDrafter:
    """`config` and `weights` are the contents of a checkpoint's files."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = {n: w.float() if w.is_floating_point() else w for n, w in weights.items()}
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]

    def draft(
        self, features: Tensor, anchor: int, gamma: int, *, sample_from_anchor: bool
    ) -> Block:
        """Draft after a committed text.

        Args:
            features: `[num_context, num_taps * target_hidden]`, the target's tapped hidden states
                of positions 0 to num_context - 1.
            anchor: the token at position num_context.
        """
        skip = 0 if sample_from_anchor else 1
        width = gamma + skip
        ids = torch.tensor([anchor] + [self.config["mask_token_id"]] * (width - 1))
        hidden = self._backbone(features, ids)[skip:]
        return self._sample(hidden, anchor)

    def _backbone(self, features: Tensor, ids: Tensor) -> Tensor:
        num_context = features.shape[0]
        context = self._norm(features @ self.weights["fc.weight"].T, "hidden_norm.weight")
        context_pos = torch.arange(num_context)
        block_pos = num_context + torch.arange(len(ids))
        x = self.weights["embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm.weight")
            x = x + self._attention(prefix + "self_attn.", normed, block_pos, context, context_pos)
            normed = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate = F.silu(self._linear(normed, prefix + "mlp.gate_proj"))
            up = self._linear(normed, prefix + "mlp.up_proj")
            x = x + self._linear(gate * up, prefix + "mlp.down_proj")
        return self._norm(x, "norm.weight")

    def _attention(
        self, prefix: str, block: Tensor, block_pos: Tensor, context: Tensor, context_pos: Tensor
    ) -> Tensor:
        # Context rows have keys and values but no queries, and skip the layer's input norm.
        keys_of = torch.cat([context, block])
        keys_pos = torch.cat([context_pos, block_pos])
        q = self._split(self._linear(block, prefix + "q_proj"), self.heads)
        k = self._split(self._linear(keys_of, prefix + "k_proj"), self.kv_heads)
        v = self._split(self._linear(keys_of, prefix + "v_proj"), self.kv_heads)
        q = self._rotate(self._norm(q, prefix + "q_norm.weight"), block_pos)
        k = self._rotate(self._norm(k, prefix + "k_norm.weight"), keys_pos)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        # No mask: a block position sees the whole context and the whole block.
        scores = (q @ k.transpose(1, 2)) / self.head_dim**0.5
        mixed = torch.softmax(scores, dim=-1) @ v
        return self._linear(mixed.transpose(0, 1).flatten(1), prefix + "o_proj")

    def _sample(self, hidden: Tensor, anchor: int) -> Block:
        base = hidden @ self.weights["lm_head.weight"].T
        offsets = self.weights.get("d2t")
        rank = self.config["markov_rank"]
        state = torch.zeros(rank)
        token, tokens, rows, confidence = anchor, [], [], []
        for h, row in zip(hidden, base, strict=True):
            embed = self.weights["markov_head.markov_w1.weight"][token] if rank else h.new_zeros(0)
            if self.config["enable_confidence_head"]:
                with_markov = self.config["confidence_head_with_markov"]
                evidence = torch.cat([h, embed]) if with_markov else h
                confidence.append(torch.sigmoid(self._linear(evidence, "confidence_head.proj")))
            if rank:
                feature, state = self._markov_feature(embed, h, state)
                row = row + self.weights["markov_head.markov_w2.weight"] @ feature
            token = int(row.argmax())
            if offsets is not None:
                token += int(offsets[token])
            tokens.append(token)
            rows.append(row)
        return Block(
            hidden, torch.stack(rows), tokens, torch.cat(confidence) if confidence else None
        )

    def _markov_feature(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        kind = self.config["markov_head_type"]
        if kind == "gated":
            gate = self._linear(torch.cat([h, e]), "markov_head.gate_proj")
            return torch.sigmoid(gate) * e, state
        if kind == "rnn":
            joint = self._linear(torch.cat([state, e, h]), "markov_head.joint_proj")
            g, z, o = joint.split(self.config["markov_rank"])
            g = torch.sigmoid(g)
            return torch.tanh(o), g * state + (1 - g) * torch.tanh(z)
        return e, state

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.config["rms_norm_eps"]) * self.weights[name]

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(-1, heads, self.head_dim).transpose(0, 1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        exponent = torch.arange(half, dtype=torch.float32) / half
        angle = positions[:, None].float() * self.config["rope_theta"] ** -exponent
        cos, sin = angle.cos(), angle.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
