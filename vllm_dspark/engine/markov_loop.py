# SPDX-License-Identifier: Apache-2.0
"""Drafting a block with the fused kernels of a vanilla Markov head.

Takes the place of the host's loop, position by position of embedding, matrix product, addition,
argmax and copies, where nothing but that head decides the logits. Everything is queued on the
current stream without a host synchronisation, so a block can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_dspark.engine.markov import MarkovStepHead
from vllm_dspark.kernels.confidence import confidence
from vllm_dspark.kernels.markov_step import (
    MAX_RANK,
    VARIANT_BATCHES,
    draft_greedy,
    markov_logits,
)

SampleLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""The host's sampler: logits, request slots and positions `[num_reqs]`, block position; it returns
target ids `[num_reqs]`."""

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def device_obstacle(device: torch.device) -> str:
    """Why the kernels do not run on a device, empty if they do."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the device is not an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return ""


def head_obstacle(model: Any) -> str:
    """Why a draft model's logits are not just base logits plus `W2 @ W1[previous]`, empty if so.

    `model` is a loaded `DSparkQwen3ForCausalLM`.
    """
    head, processor = model.model.markov_head, model.logits_processor
    if isinstance(head, MarkovStepHead):
        return "the Markov head is not vanilla"
    w2 = head.markov_w2
    if not isinstance(w2.quant_method, UnquantizedEmbeddingMethod):
        return "the Markov head is quantised"
    if w2.tp_size != 1:
        return "the Markov head is sharded"
    weights = head.markov_w1.weight, w2.weight
    if weights[0].dtype != weights[1].dtype or weights[0].dtype not in _WEIGHT_DTYPES:
        return f"the Markov weights are {weights[0].dtype} and {weights[1].dtype}"
    if weights[0].shape[1] > MAX_RANK:
        return f"the Markov rank is above {MAX_RANK}"
    if not all(weight.is_contiguous() for weight in weights):
        return "the Markov weights are not contiguous"
    if processor.scale != 1.0 or processor.soft_cap is not None:
        return "logits are scaled or capped"
    if hasattr(model, "apply_output_logit_transform"):
        return "logits are transformed"
    return ""


def loop_obstacle(speculator: Any) -> str:
    """Why a loaded speculator must run the host's own loop, empty if the fused one can run."""
    if not speculator.fused_markov:
        return "switched off"
    if speculator._draft_topk is not None:
        return "dspark_draft_topk is set"
    if speculator.acceptance_estimator is not None:
        return "the acceptance estimator reads the logits"
    return device_obstacle(speculator.device) or head_obstacle(speculator.model)


def warm(speculator: Any) -> None:
    """Compile every variant of the kernels, with drafts that nobody reads: for servers that capture
    no graphs, and whose own warm-up meets one batch size.
    """
    most, queries = speculator.max_num_reqs, speculator.max_num_reqs * speculator.num_query_per_req
    hidden = torch.zeros(
        queries, speculator.hidden_size, dtype=speculator.dtype, device=speculator.device
    )
    for num_reqs in sorted({min(count, most) for count in VARIANT_BATCHES}):
        draft_block(speculator, num_reqs, hidden)


def draft_block(speculator: Any, num_reqs: int, head_hidden: torch.Tensor) -> None:
    """Sample a block and its confidences into the speculator's buffers, rows `[:num_reqs]`.

    `head_hidden` is the backbone's output `[num_query_tokens, hidden_size]`.
    """
    model, width = speculator.model, speculator.num_speculative_steps
    rows = num_reqs * width
    hidden = head_hidden[speculator.sample_indices[:rows]]
    base_logits = model.compute_draft_logits(hidden).view(num_reqs, width, -1)
    head = model.model.markov_head
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    input_ids, anchor_idx = speculator.input_buffers.input_ids, speculator._anchor_idx[:num_reqs]
    draft_tokens = speculator.draft_tokens[:num_reqs, :width]
    if speculator.draft_logits is None:
        previous = draft_greedy(
            w1,
            w2,
            base_logits,
            input_ids,
            anchor_idx,
            draft_tokens,
            model.draft_id_to_target_id,
        )
    else:
        previous = draft_sampled(
            w1,
            w2,
            base_logits,
            input_ids[anchor_idx],
            draft_tokens,
            speculator._sample_logits,
            speculator.sample_idx_mapping[:rows].view(num_reqs, width),
            speculator.sample_pos[:rows].view(num_reqs, width),
        )
    if speculator.use_confidence_head:
        publish_confidence(
            model, hidden, previous, speculator.draft_token_confidence_probs[:num_reqs]
        )


def publish_confidence(
    model: Any, hidden: torch.Tensor, previous: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill `out` `[num_reqs, width]` from hidden states `[num_reqs * width, hidden_size]` and the
    tokens before each position `[num_reqs, width]`.
    """
    trained, table = model.model.confidence_head, model.model.markov_head.markov_w1.weight
    weight = trained.proj.weight
    size = hidden.shape[1] + (table.shape[1] if trained.with_markov else 0)
    if weight.shape != (1, size) or weight.dtype != torch.float32:
        # A host may keep its weights in a form of its own; it knows how to read it.
        embeds = model.markov_embed(previous.flatten())
        out.copy_(model.compute_confidence(hidden, embeds).view_as(out))
        return
    confidence(
        hidden, weight, trained.proj.bias, out, table if trained.with_markov else None, previous
    )


def draft_sampled(
    w1: torch.Tensor,
    w2: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    draft_tokens: torch.Tensor,
    sample: SampleLogits,
    request: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Draw every position by the host's rule, which reads and keeps the whole of its logits.

    Args:
        w1: `[vocab_in, rank]`, embedding of the previous token.
        w2: `[rows, rank]`, rows past the vocabulary are padding.
        base_logits: `[num_reqs, width, vocab]`, dense in its last dimension.
        anchors: `[num_reqs]` target ids.
        draft_tokens: `[num_reqs, width]` int64, filled with target ids.
        sample: the host's sampler.
        request: `[num_reqs, width]` request slots, as the sampler wants them.
        position: `[num_reqs, width]` positions of the drawn tokens, likewise.

    Returns:
        The token before each position, `[num_reqs, width]`.
    """
    token, previous = anchors, []
    logits = torch.empty_like(base_logits[:, 0])
    for k in range(base_logits.shape[1]):
        previous.append(token)
        markov_logits(token, w1, w2, base_logits[:, k], logits)
        token = sample(logits, request[:, k], position[:, k], k)
        draft_tokens[:, k] = token
    return torch.stack(previous, 1)
