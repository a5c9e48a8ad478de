# SPDX-License-Identifier: Apache-2.0
"""The dense (Qwen3-style) DSpark draft model with every Markov head of the reference code.

vLLM's own class serves the vanilla head; this subclass adds what it does not know and checks what
it takes on trust:

* heads `gated`, `rnn` and none (`markov_rank = 0`), read from the config's `markov_head_type`;
* on the CPU, context keys are normalised per layer (`context_keys`);
* weights are checked for names and shapes before any is loaded (`checkpoint.check_weights`).

On a GPU a vanilla draft is vLLM's model bit for bit: same modules, same loader. Its block is
sampled by vLLM's loop or, where nothing else touches the logits, by `markov_loop`.

Importing this module imports torch and vLLM. `registration.register_draft_models` names it lazily.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from vllm_dspark.engine.checkpoint import (
    CheckpointError,
    DraftSpec,
    TargetShape,
    check_weights,
)
from vllm_dspark.engine.checkpoint_weights import vocabulary_map_problems
from vllm_dspark.engine.context_keys import mend_context_key_norm
from vllm_dspark.engine.markov import (
    GatedMarkovHead,
    MarkovStepHead,
    NoMarkovHead,
    RnnMarkovHead,
)

logger = logging.getLogger("vllm.dspark")


class DSparkQwen3ForCausalLM(Qwen3DSparkForCausalLM):
    """Draft model for the architecture name `Qwen3DSparkModel`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        draft_model_config = vllm_config.speculative_config.draft_model_config
        where = draft_model_config.model
        spec = DraftSpec.from_config(draft_model_config.hf_config.to_dict(), where=where)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._where = where
        self._spec = spec
        self._target_shape = target_shape(vllm_config)
        head = _step_head(spec, self.model.markov_head)
        if head is not None:
            if getattr(self.config, "dspark_draft_topk", None) is not None:
                raise ValueError(
                    "speculative_config.dspark_draft_topk: allowed only with a vanilla Markov "
                    f"head, found {_describe(spec)} in {where}"
                )
            self.model.markov_head = head
        mend_context_key_norm(self.model)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Check every name and shape, then let vLLM's loader place them.

        Raises:
            CheckpointError: weights missing, of another shape, or unexpected.
        """
        stored = dict(weights)
        if self._spec.markov_rank == 0:
            # Some writers store the head that a rank of zero means as tensors without elements.
            stored = {n: w for n, w in stored.items() if w.numel() or "markov_head." not in n}
        shapes = {name: tuple(weight.shape) for name, weight in stored.items()}
        for warning in check_weights(self._spec, self._target_shape, shapes, where=self._where):
            # The proposer has said it already if it could read the files.
            if not Path(self._where).is_dir():
                logger.warning("DSpark draft checkpoint %s: %s", self._where, warning)
        if "d2t" in stored:
            problems = vocabulary_map_problems(stored["d2t"].tolist(), self._target_shape)
            if problems:
                raise CheckpointError.of(self._where, problems)
        return super().load_weights((_module_name(n), w) for n, w in stored.items())

    def sample_sequential(self, speculator: Any, num_reqs: int, head_hidden: torch.Tensor) -> bool:
        """Sample a block with a gated, rnn or absent head; False (nothing done) if vanilla.

        vLLM 0.33 calls this hook from its own speculator; `DSparkProposer` calls it on every
        version. `head_hidden` is the backbone's output `[num_query_tokens, hidden_size]`. Results
        go where vLLM's loop puts them: `draft_tokens` and `draft_token_confidence_probs`, rows
        `[:num_reqs]`. Runs inside the draft's CUDA graph: no host synchronisation.
        """
        head = self.model.markov_head
        if not isinstance(head, MarkovStepHead):
            return False
        width = speculator.num_speculative_steps
        rows = num_reqs * width
        hidden = head_hidden[speculator.sample_indices[:rows]]
        base_logits = self.compute_draft_logits(hidden).view(num_reqs, width, -1)
        by_position = hidden.view(num_reqs, width, -1)
        request = speculator.sample_idx_mapping[:rows].view(num_reqs, width)
        position = speculator.sample_pos[:rows].view(num_reqs, width)

        token = speculator.input_buffers.input_ids[speculator._anchor_idx[:num_reqs]]
        state = head.init_state(by_position[:, 0])
        # Part of the host's sampling contract since 0.33; its dense drafts define none so far.
        transform = getattr(self, "apply_output_logit_transform", None)
        embeds = []
        for k in range(width):
            embed = head.embed(token)
            embeds.append(embed)
            feature, state = head.step(embed, by_position[:, k], state)
            logits = base_logits[:, k]
            if feature is not None:
                logits = logits + self.markov_bias(feature)
            if transform is not None:
                logits = transform(logits)
            token = speculator._sample_logits(logits, request[:, k], position[:, k], k)
            speculator.draft_tokens[:num_reqs, k] = token

        if speculator.use_confidence_head:
            confidence = self.compute_confidence(hidden, torch.stack(embeds, 1).flatten(0, 1))
            speculator.draft_token_confidence_probs[:num_reqs] = confidence.view(num_reqs, width)
        return True


def target_shape(vllm_config: VllmConfig) -> TargetShape:
    """The target's sizes that a draft has to fit."""
    model_config = vllm_config.model_config
    return TargetShape(
        vocab_size=model_config.get_vocab_size(),
        hidden_size=model_config.get_hidden_size(),
        num_hidden_layers=model_config.get_total_num_hidden_layers(),
    )


def _step_head(spec: DraftSpec, vanilla: Any) -> MarkovStepHead | None:
    """The head that replaces vLLM's vanilla one, None if there is nothing to replace."""
    if not spec.markov_rank:
        return NoMarkovHead()
    heads = {"gated": GatedMarkovHead, "rnn": RnnMarkovHead}
    if spec.markov_head_type not in heads:
        return None
    return heads[spec.markov_head_type](
        vanilla.markov_w1,
        vanilla.markov_w2,
        rank=spec.markov_rank,
        hidden_size=spec.hidden_size,
    )


def _describe(spec: DraftSpec) -> str:
    return f"markov_head_type={spec.markov_head_type!r}" if spec.markov_rank else "markov_rank=0"


def _module_name(name: str) -> str:
    return name.replace("markov_head.gate_proj.", "markov_head.gate.")
