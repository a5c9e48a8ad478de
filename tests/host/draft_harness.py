# SPDX-License-Identifier: Apache-2.0
"""Tiny random DSpark pairs on disk, and vLLM's real draft step on them, in this process on the CPU.

What is real: config parsing, weight loading, the draft model with vLLM's CPU attention and paged KV
cache, the Triton kernel that lays out the block (interpreted), sampling, confidences. What is made
up: the target is never run; its tapped hidden states are random numbers given to `propose`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

TARGET_LAYERS, VOCAB, HIDDEN, RANK, BLOCK = 4, 128, 64, 8, 5
TAPS = [0, 2]
DRAFT_VOCAB = 48
MAX_REQS, MAX_TOKENS, MAX_LEN = 4, 128, 128


def common_config(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LEN,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def target_config() -> dict[str, Any]:
    return common_config(TARGET_LAYERS) | {"architectures": ["Qwen3ForCausalLM"]}


def draft_config(
    head: str = "vanilla",
    *,
    confidence: bool = True,
    confidence_markov: bool | None = None,
    reduced: bool = False,
    from_anchor: bool = True,
) -> dict[str, Any]:
    """A draft's config.json as the reference code writes it; `head` may also be "none"."""
    rank = 0 if head == "none" else RANK
    config = common_config(2) | {
        "architectures": ["Qwen3DSparkModel"],
        "layer_types": ["full_attention"] * 2,
        "block_size": BLOCK if from_anchor else BLOCK + 1,
        "mask_token_id": 2,
        "target_layer_ids": TAPS,
        "num_target_layers": TARGET_LAYERS,
        "markov_rank": rank,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": bool(rank)
        if confidence_markov is None
        else confidence_markov,
    }
    if rank:
        config["markov_head_type"] = head
    if reduced:
        config["draft_vocab_size"] = DRAFT_VOCAB
    if not from_anchor:
        config["sample_from_anchor"] = False
    return config


def _random_layer(prefix: str, g: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj.weight": (64, HIDDEN),
        "self_attn.k_proj.weight": (32, HIDDEN),
        "self_attn.v_proj.weight": (32, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 64),
        "mlp.gate_proj.weight": (96, HIDDEN),
        "mlp.up_proj.weight": (96, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 96),
    }
    weights = {prefix + n: _normal(shape, g) for n, shape in shapes.items()}
    norms = {
        "self_attn.q_norm.weight": 32,
        "self_attn.k_norm.weight": 32,
        "input_layernorm.weight": HIDDEN,
        "post_attention_layernorm.weight": HIDDEN,
    }
    return weights | {prefix + n: _norm_weight(size, g) for n, size in norms.items()}


def _normal(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=g) * shape[-1] ** -0.5


def _norm_weight(size: int, g: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size, generator=g)


def target_weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=g),
        "model.norm.weight": _norm_weight(HIDDEN, g),
        "lm_head.weight": _normal((VOCAB, HIDDEN), g),
    }
    for layer in range(TARGET_LAYERS):
        weights |= _random_layer(f"model.layers.{layer}.", g)
    return weights


def draft_weights(config: dict[str, Any], seed: int = 2) -> dict[str, torch.Tensor]:
    """Random weights under the names and shapes of the reference code's files."""
    g = torch.Generator().manual_seed(seed)
    rank = config["markov_rank"]
    out_vocab = config.get("draft_vocab_size", VOCAB)
    weights = {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=g),
        "lm_head.weight": _normal((out_vocab, HIDDEN), g),
        "fc.weight": _normal((HIDDEN, len(TAPS) * HIDDEN), g),
        "hidden_norm.weight": _norm_weight(HIDDEN, g),
        "norm.weight": _norm_weight(HIDDEN, g),
    }
    for layer in range(2):
        weights |= _random_layer(f"layers.{layer}.", g)
    if rank:
        # Strong enough that the bias decides some of the argmaxes.
        weights["markov_head.markov_w1.weight"] = torch.randn(VOCAB, rank, generator=g)
        weights["markov_head.markov_w2.weight"] = 3 * _normal((out_vocab, rank), g)
    if rank and config["markov_head_type"] == "gated":
        weights["markov_head.gate_proj.weight"] = 2 * _normal((rank, HIDDEN + rank), g)
        weights["markov_head.gate_proj.bias"] = torch.randn(rank, generator=g)
    if rank and config["markov_head_type"] == "rnn":
        weights["markov_head.joint_proj.weight"] = 2 * _normal((3 * rank, 2 * rank + HIDDEN), g)
        weights["markov_head.joint_proj.bias"] = torch.randn(3 * rank, generator=g)
    if config["enable_confidence_head"]:
        width = HIDDEN + (rank if config["confidence_head_with_markov"] else 0)
        weights["confidence_head.proj.weight"] = _normal((1, width), g)
        weights["confidence_head.proj.bias"] = torch.randn(1, generator=g)
    if "draft_vocab_size" in config:
        ids = torch.randperm(VOCAB, generator=g)[:out_vocab].sort().values
        weights["d2t"] = ids - torch.arange(out_vocab)
        weights["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    return weights


def write_checkpoint(
    directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({n: w.contiguous() for n, w in weights.items()}, directory / "model.safetensors")
    return directory


def engine_config(target: Path, draft: Path, num_tokens: int = BLOCK, **speculative: Any) -> Any:
    """A real `VllmConfig` for the pair; `speculative` extends the speculative config."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dspark.engine.registration import register_draft_models

    register_draft_models()
    config = EngineArgs(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,  # what CPU attention takes multiples of; an executor would choose it
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_REQS,
        max_num_batched_tokens=MAX_TOKENS,
        speculative_config={
            "method": "dspark",
            "model": str(draft),
            "num_speculative_tokens": num_tokens,
            **speculative,
        },
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def init_single_process() -> None:
    """What vLLM's CPU worker sets up, and parallel groups for a world of one; once per process."""
    import vllm.v1.worker.cpu.shm  # noqa: F401 - stands in for CUDA streams and memory queries
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
    if parallel_state.model_parallel_is_initialized():
        return
    store = Path(tempfile.mkdtemp()) / "store"
    parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)


def _cache_config(config: Any, specs: dict[str, Any]) -> Any:
    """A small KV cache for the layers of `specs`, planned as the host's engine does."""
    from vllm.v1.engine import core

    arguments = [config, [specs], [8 << 20]]
    # From 0.33 on the engine forms the groups, and chooses a layout for them, before.
    if hasattr(core, "get_global_kv_cache_groups"):
        arguments.append(core.get_global_kv_cache_groups(config, [specs]))
    return core.get_kv_cache_configs(*arguments)[0]


@dataclass
class Step:
    """What the engine hands to `propose` for one request: new context, then an anchor."""

    positions: list[int]
    rejected: int
    anchor: int
    features: torch.Tensor  # [len(positions), num_taps * hidden]


class DraftHost:
    """A loaded proposer (or vLLM's speculator) with its KV cache; records what a step computes."""

    def __init__(self, config: Any, proposer_cls: type) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.config.compilation import CUDAGraphMode
        from vllm.model_executor.model_loader import get_model

        self.config = config
        self.device = torch.device("cpu")
        with set_current_vllm_config(config):
            init_single_process()
            self.proposer = proposer_cls(config, self.device)
            self.target = get_model(vllm_config=config)
            self.proposer.load_model(self.target)
            self._init_cache()
            self.proposer.init_cudagraph_manager(CUDAGraphMode.NONE)
        self.backbone_output: torch.Tensor | None = None
        self.logits: list[torch.Tensor] = []
        sample_block, sample_logits = self.proposer._sample_sequential, self.proposer._sample_logits

        def record_block(num_reqs: int, head_hidden: torch.Tensor) -> None:
            self.backbone_output = head_hidden.clone()
            self.logits = []
            sample_block(num_reqs, head_hidden)

        def record_logits(logits: torch.Tensor, *args: Any) -> torch.Tensor:
            self.logits.append(logits.clone())
            return sample_logits(logits, *args)

        self.proposer._sample_sequential = record_block
        self.proposer._sample_logits = record_logits

    def _init_cache(self) -> None:
        from vllm.v1.worker.gpu.attn_utils import (
            get_kv_cache_spec,
            init_attn_backend,
            init_kv_cache,
        )
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        specs = get_kv_cache_spec(self.config)
        cache = _cache_config(self.config, specs)
        groups, _, kernel_sizes = init_attn_backend(cache, self.config, self.device)
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        blocks_per_req = -(-MAX_LEN // min(sizes))
        tables = BlockTables(
            sizes, MAX_REQS, MAX_TOKENS, [blocks_per_req] * len(sizes), self.device
        )
        for table in tables.input_block_tables:
            # Block 0 is vLLM's null block.
            table.copy_(1 + torch.arange(table.numel()).view_as(table))
        self.buffers = InputBuffers(MAX_REQS, MAX_TOKENS, self.device)
        self.proposer.set_attn(None, cache, tables, self.buffers, groups)
        init_kv_cache(
            self.config.compilation_config.static_forward_context,
            cache,
            self.device,
            kernel_sizes,
            self.config,
            block_tables=tables,
            attn_groups=(g for gs in groups + self.proposer.attn_groups for g in gs),
        )

    def predicting_hidden(self, num_reqs: int) -> torch.Tensor:
        """Hidden states of the last step that predict a token, `[num_reqs, gamma, hidden]`."""
        assert self.backbone_output is not None
        gamma = self.proposer.num_speculative_steps
        rows = self.proposer.sample_indices[: num_reqs * gamma]
        return self.backbone_output[rows].view(num_reqs, gamma, -1)

    def propose(self, steps: list[Step]) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step for a batch; returns tokens and confidences `[num_reqs, gamma]`."""
        from vllm.config import set_current_vllm_config

        n = len(steps)
        anchors = torch.zeros(MAX_REQS, 1, dtype=torch.int64)
        anchors[:n, 0] = torch.tensor([s.anchor for s in steps])
        features = torch.cat([s.features for s in steps])
        with set_current_vllm_config(self.config):
            tokens = self.proposer.propose(
                self._input_batch(steps),
                {},
                {},
                features[:, :HIDDEN].contiguous(),
                list(features.split(HIDDEN, dim=-1)),
                torch.ones(n, dtype=torch.int32),
                torch.tensor([s.rejected for s in steps], dtype=torch.int32),
                anchors,
                torch.zeros(MAX_REQS, dtype=torch.int32),
                torch.zeros(MAX_REQS),
                torch.zeros(MAX_REQS, dtype=torch.int64),
            )
        return tokens.clone(), self.proposer.draft_token_confidence_probs[:n].clone()

    def _input_batch(self, steps: list[Step]) -> Any:
        from vllm.v1.worker.gpu.input_batch import InputBatch

        lengths = np.array([len(s.positions) for s in steps], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch = InputBatch.make_dummy(len(steps), int(starts[-1]), self.buffers, is_padding=False)
        batch.num_scheduled_tokens = lengths
        batch.query_start_loc_np = starts
        batch.query_start_loc.copy_(torch.from_numpy(starts))
        batch.positions.copy_(torch.tensor([p for s in steps for p in s.positions]))
        ends = torch.tensor([s.positions[-1] + 1 for s in steps], dtype=torch.int32)
        batch.seq_lens.copy_(ends)
        batch.seq_lens_cpu_upper_bound = ends.clone()
        return batch
