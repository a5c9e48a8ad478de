# SPDX-License-Identifier: Apache-2.0
"""The two networks of the demo pair, in plain PyTorch.

Parameter names are those of the checkpoints: Qwen3's for the target, and for the drafter those of
`deepseek-ai/dspark_qwen3_*_block7` (`layers`, `fc`, `hidden_norm`, `norm`, `markov_head`,
`confidence_head`).
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, HIDDEN, LAYERS, FFN = 4096, 256, 6, 768
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
EPS, THETA, CONTEXT, MAX_POSITION = 1e-6, 10000.0, 1024, 2048
EOS, PAD, MASK = 0, 1, 2
BLOCK, DRAFT_LAYERS, TAPS, MARKOV_RANK = 7, 3, [0, 2, 4], 64


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * self.weight


def rope(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [batch, heads, tokens, HEAD_DIM] to `position` [batch or 1, tokens]."""
    inverse = 1.0 / (THETA ** (torch.arange(0, HEAD_DIM, 2, device=x.device).float() / HEAD_DIM))
    angle = position[..., None].float() * inverse
    cos = torch.cat([angle.cos(), angle.cos()], -1)[:, None].to(x.dtype)
    sin = torch.cat([angle.sin(), angle.sin()], -1)[:, None].to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)

    def query(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        split = self.q_proj(x).view(*x.shape[:2], HEADS, HEAD_DIM)
        return rope(self.q_norm(split).transpose(1, 2), position)

    def key_value(
        self, x: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*x.shape[:2], KV_HEADS, HEAD_DIM)
        key = rope(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), position)
        return key, self.v_proj(x).view(shape).transpose(1, 2)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        group = HEADS // KV_HEADS
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1))

    def forward(
        self,
        x: torch.Tensor,
        position: torch.Tensor,
        mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_position: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k, v = self.key_value(x, position)
        if context is not None and context_position is not None:
            context_k, context_v = self.key_value(context, context_position)
            k, v = torch.cat([context_k, k], 2), torch.cat([context_v, v], 2)
        return self.attend(self.query(x, position), k, v, mask, causal=mask is None)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, **context: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position, **context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm(HIDDEN)


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Backbone(), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.with_taps(ids)[0]

    def with_taps(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [batch, tokens, VOCAB] and the tapped layers' outputs [batch, tokens, taps]."""
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        x, tapped = self.model.embed_tokens(ids), []
        for number, layer in enumerate(self.model.layers):
            x = layer(x, position)
            if number in TAPS:
                tapped.append(x)
        return self.lm_head(self.model.norm(x)), torch.cat(tapped, -1)


class MarkovHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(VOCAB, MARKOV_RANK)
        self.markov_w2 = nn.Linear(MARKOV_RANK, VOCAB, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN + MARKOV_RANK, 1)


class Draft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DRAFT_LAYERS))
        self.fc = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False)
        self.hidden_norm, self.norm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.markov_head, self.confidence_head = MarkovHead(), ConfidenceHead()

    def forward(
        self,
        x: torch.Tensor,
        features: torch.Tensor,
        position: torch.Tensor,
        context_position: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            x = layer(x, position, mask=mask, context=context, context_position=context_position)
        return self.norm(x)


def initialise(model: nn.Module) -> None:
    """Normal weights; projections into the residual stream smaller by its depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * LAYERS) if residual else 1))


@torch.no_grad()
def rollout(
    target: Target, prompts: torch.Tensor, new: int, temperatures: torch.Tensor
) -> torch.Tensor:
    """Continue `prompts` [batch, tokens] by `new` tokens; one temperature per row, 0 is greedy."""
    batch, prompt = prompts.shape
    device = prompts.device
    ids = torch.cat([prompts, prompts.new_zeros(batch, new)], 1)
    shape = (LAYERS, batch, KV_HEADS, prompt + new, HEAD_DIM)
    keys = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    start, current, position = 0, prompts, torch.arange(prompt, device=device)[None]
    for number in range(new):
        end = start + current.shape[1]
        x = target.model.embed_tokens(current)
        for i, layer in enumerate(target.model.layers):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.key_value(normed, position)
            keys[i, :, :, start:end], values[i, :, :, start:end] = k, v
            q = layer.self_attn.query(normed, position)
            past = keys[i, :, :, :end].to(q.dtype), values[i, :, :, :end].to(q.dtype)
            x = x + layer.self_attn.attend(q, *past, mask=None, causal=end - start > 1)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = target.lm_head(target.model.norm(x[:, -1])).float()
        scaled = (logits / temperatures.clamp_min(1e-3)[:, None]).softmax(-1)
        sampled = torch.multinomial(scaled, 1)[:, 0]
        token = torch.where(temperatures > 0, sampled, logits.argmax(-1))
        ids[:, prompt + number] = token
        start, current = end, token[:, None]
        position = torch.full((1, 1), prompt + number, device=device)
    return ids


def _common_config() -> dict[str, object]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": MAX_POSITION,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "use_cache": True,
        "attention_dropout": 0.0,
    }


def target_config() -> dict[str, object]:
    """`config.json` of the target."""
    architecture = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": LAYERS}
    return _common_config() | architecture


def draft_config(anchors: int) -> dict[str, object]:
    """`config.json` of the drafter; `anchors` per sequence is a note on its training."""
    return _common_config() | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "target_layer_ids": TAPS,
        "mask_token_id": MASK,
        "num_anchors": anchors,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
    }
