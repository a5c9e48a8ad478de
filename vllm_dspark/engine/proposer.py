# SPDX-License-Identifier: Apache-2.0
"""The plugin's DSpark speculator: vLLM's own, checked at start-up, with confidences for everybody.

What differs from `DSparkSpeculator`, and nothing else does:

* The draft checkpoint is validated against the target before the target's weights are loaded.
* Confidences are computed whenever the draft has a confidence head and `publish_confidence` is
  true, not only under vLLM's `enable_adaptive_verification`: the plugin's planner needs them in
  every mode. They appear in `draft_token_confidence_probs` `[max_num_reqs, gamma]`, written inside
  the draft graph; whoever keeps them longer than a step takes a copy.
* Blocks may be narrower than gamma, with draft graphs up to the largest batch (`draft_width`).
* Gated, rnn and absent Markov heads are sampled (`DSparkQwen3ForCausalLM.sample_sequential`).
* Vanilla heads are sampled with fused kernels where they run (`markov_loop`).

Importing this module imports torch and vLLM; the installer does so lazily.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vllm_dspark.engine import markov_loop
from vllm_dspark.engine.attention_splits import limit_splits
from vllm_dspark.engine.checkpoint import CheckpointError, block_size, validate_checkpoint
from vllm_dspark.engine.draft_graphs import DraftGraphManager
from vllm_dspark.engine.draft_inputs import every_block
from vllm_dspark.engine.draft_model import DSparkQwen3ForCausalLM, target_shape
from vllm_dspark.engine.draft_weights import round_draft
from vllm_dspark.engine.draft_width import DraftFamilies
from vllm_dspark.engine.registration import DRAFT_ARCHITECTURES
from vllm_dspark.engine.window_clamp import drop_writes, passes_end

logger = logging.getLogger("vllm.dspark")

# Load formats that read a checkpoint's own safetensors files, under their own names.
_PLAIN_FILES = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})


class DSparkProposer(DSparkSpeculator):
    """Drafts `gamma = num_speculative_tokens` tokens per request and step.

    Attributes:
        publish_confidence: whether a draft's confidence head is run. Set it to False before
            `load_model` when nobody reads confidences (fixed-length verification). After
            `load_model` it says whether confidences are really published by a trained head.
            Without such a head, setting `use_acceptance_estimator` before `load_model` makes
            vLLM's online estimator fill the same buffer.
        families: widths of the blocks that may be drafted; allow more than gamma before
            `init_cudagraph_manager`.
        next_width: asked once per block for its width, gamma unless a planner sets it; 0 leaves
            the block out, where the host can.
        fused_markov: whether fused kernels may sample a vanilla Markov head. Set it before the
            first block is drafted.
        weights: "model" leaves the draft's weights as loaded, "auto" and "fp8" round them
            (`draft_weights`). Set it before `load_model`.
        before_traffic: called in the first dummy run on a GPU; compiles what others will need.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        validate_draft(vllm_config)
        super().__init__(vllm_config, device)
        self.publish_confidence: bool = True
        self.families = DraftFamilies(self)
        self.next_width: Callable[[], int] = lambda: self.num_speculative_steps
        self.fused_markov: bool = True
        self.weights: Literal["auto", "model", "fp8"] = "model"
        self.before_traffic: Sequence[Callable[[], None]] = ()
        self._kernels_warm = self._inputs_warm = device.type != "cuda"
        self._past_end: Any = None
        """The batch behind which a block may pass the model length, None in other steps."""

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the draft as vLLM does, then decide who provides confidences.

        Raises:
            ConfigError: FP8 weights were asked for and cannot be had.
        """
        model = super().load_draft_model(target_model, target_attn_layer_names)
        if self.weights != "model":
            round_draft(model, self.device, self.weights)
        trained_head = getattr(getattr(model, "model", None), "confidence_head", None)
        self.publish_confidence = self.publish_confidence and trained_head is not None
        if self.publish_confidence:
            self.use_confidence_head = True
            # Two writers of one buffer would race; the trained head is the better one.
            self.use_acceptance_estimator = False
        return model

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        limit_splits(self.attn_groups, self.vllm_config)
        managers = []
        for width in self.families.widths:
            with self.families.at(width), self.families.capture_sizes():
                super().init_cudagraph_manager(cudagraph_mode)
            managers.append(self.query_cudagraph_manager)
        self.query_cudagraph_manager = DraftGraphManager(managers, self.families.at_query)

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft a block of the width that the planner chose, `[num_reqs, gamma]`; columns past
        the width hold what an earlier block left there and are never verified. A width of 0 only
        keeps the draft's context up to date.
        """
        input_batch = args[0] if args else kwargs["input_batch"]
        width, dummy = self.next_width(), bool(kwargs.get("dummy_run"))
        with self._compiling(dummy):
            if width == 0:
                super().propose(*args, **{**kwargs, "num_speculative_tokens": 0})
            else:
                with self.families.at(width):
                    passes = passes_end(input_batch, self.num_query_per_req, self.max_model_len)
                    self._past_end = input_batch if passes and not dummy else None
                    super().propose(*args, **kwargs)
        return self.draft_tokens[: input_batch.num_reqs]

    @contextmanager
    def _compiling(self, dummy: bool) -> Iterator[None]:
        """Around a step, to compile what later ones need: our kernels in the first dummy run, which
        profiles memory, the host's in the first step. By default that is one of the host's warm-up.
        """
        if not dummy and not self._inputs_warm:
            self._inputs_warm = True
            with every_block(dflash, self.families.widths):
                yield
            return
        yield
        if dummy and not self._kernels_warm:
            self._kernels_warm = True
            for compile_kernels in self.before_traffic:
                compile_kernels()
            if isinstance(self.model, DSparkQwen3ForCausalLM) and not self.host_loop_reason:
                markov_loop.warm(self)

    def _prepare_eplb_forward(self, num_unpadded_tokens: int) -> None:
        """The last call before the draft runs: its inputs are laid out, and nothing reads them."""
        if self._past_end is not None:
            drop_writes(
                self.block_tables.slot_mappings,
                self.sample_pos,
                self._past_end.num_reqs,
                self.num_query_per_req,
                self.num_speculative_steps,
                self.max_model_len,
            )
        super()._prepare_eplb_forward(num_unpadded_tokens)

    @functools.cached_property
    def host_loop_reason(self) -> str:
        """Why blocks are not sampled with the fused kernels, empty if they are. Fixed once the
        draft is loaded.
        """
        reason = "the draft is another architecture"
        if isinstance(self.model, DSparkQwen3ForCausalLM):
            reason = markov_loop.loop_obstacle(self)
        logger.info("DSpark Markov head: %s", f"host's loop, {reason}" if reason else "fused")
        return reason

    def _sample_sequential(self, num_reqs: int, head_hidden: torch.Tensor) -> None:
        if not self.host_loop_reason:
            markov_loop.draft_block(self, num_reqs, head_hidden)
            return
        # Not every supported vLLM asks the model before it runs its own loop, so ask here. Other
        # models' hooks, where vLLM has them, stay vLLM's business.
        if isinstance(self.model, DSparkQwen3ForCausalLM) and self.model.sample_sequential(
            self, num_reqs, head_hidden
        ):
            return
        super()._sample_sequential(num_reqs, head_hidden)


def validate_draft(vllm_config: VllmConfig) -> None:
    """Check the configured draft checkpoint, logging warnings.

    Dense Qwen3-style drafts are checked in full (a remote one without its weights, which the model
    checks while loading). For the other DSpark architectures only what holds for all is checked.

    Raises:
        CheckpointError: the checkpoint does not fit the target or the options.
    """
    speculative_config = vllm_config.speculative_config
    draft_model_config = speculative_config.draft_model_config
    config = draft_model_config.hf_config.to_dict()
    where = draft_model_config.model
    num_tokens = speculative_config.num_speculative_tokens
    if DRAFT_ARCHITECTURES.isdisjoint(draft_model_config.architectures):
        _validate_foreign(config, num_tokens, where)
        return
    load_config = get_draft_load_config(vllm_config)
    readable = Path(where).is_dir() and load_config.load_format in _PLAIN_FILES
    warnings = validate_checkpoint(
        config,
        target_shape(vllm_config),
        num_tokens,
        where=where,
        weights_dir=Path(where) if readable else None,
    )
    for warning in warnings:
        logger.warning("DSpark draft checkpoint %s: %s", where, warning)


def _validate_foreign(config: Mapping[str, Any], num_tokens: int, where: str) -> None:
    problems = []
    trained = block_size(config)
    if trained is not None and num_tokens > trained:
        problems.append(
            f"num_speculative_tokens: expected at most block_size={trained}, found {num_tokens}"
        )
    head_type = config.get("markov_head_type") or "vanilla"
    if head_type != "vanilla":
        # vLLM's loaders for these architectures drop the extra weights without a word.
        problems.append(
            "config field markov_head_type: expected 'vanilla' for architecture "
            f"{config.get('architectures')}, found {head_type!r}"
        )
    if problems:
        raise CheckpointError.of(where, problems)
