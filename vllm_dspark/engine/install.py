# SPDX-License-Identifier: Apache-2.0
"""Binds our pieces to the names that the model runner looks up.

All of them are bound in the runner's own module, where the runner binds its collaborators by name.
Every wrapper calls the original. A runner that does not serve DSpark gets the original and nothing
else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from vllm_dspark import compat
from vllm_dspark.config import ConfigError, DSparkConfig
from vllm_dspark.core.draft_width import widths_for
from vllm_dspark.engine.batch_order import BatchOrder
from vllm_dspark.engine.modes import (
    HostFacts,
    VerifyMode,
    device_obstacle,
    graph_obstacle,
    obstacle,
    resolve,
)
from vllm_dspark.engine.session import Session, find_session, open_session

logger = logging.getLogger("vllm.dspark")

Wrapper = Callable[[Any, ModuleType], Any]


def bind(runner: ModuleType) -> None:
    """Replace the names of ``runner`` (the imported model-runner module). Idempotent."""
    for name, wrapper in _WRAPPERS.items():
        owner, _, attribute = name.rpartition(".")
        target = getattr(runner, owner, None) if owner else runner
        original = getattr(target, attribute, None)
        if original is None or hasattr(original, "dspark_original"):
            continue
        bound = wrapper(original, runner)
        bound.dspark_original = original
        setattr(target, attribute, bound)


def _take_over(vllm_config: Any) -> Session | None:
    """Open a session, unless the host lacks something that we need.

    Raises:
        ConfigError: an option of the plugin is wrong.
        MissingHookError: the host lacks a symbol and ``strict`` is set.
    """
    config = DSparkConfig.from_vllm_config(vllm_config)
    if not compat.usable(strict=config.strict):
        return None
    session = open_session(vllm_config.speculative_config, config)
    session.widths = _draft_widths(config, vllm_config)
    session.device_obstacle = device_obstacle(
        full_graphs=vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        lora=vllm_config.lora_config is not None,
        pipeline_parallel_size=vllm_config.parallel_config.pipeline_parallel_size,
        speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
        graphs=_graph_obstacle(vllm_config),
        attention=_host_length_attention(vllm_config),
    )
    wanted = _may_trim(config, vllm_config) and config.lens in ("auto", "device")
    if wanted and not session.device_obstacle:
        # Attention backends are chosen, and their builders made, by this flag: it says that host
        # lengths may lie. The runner reads it before we know whether they will.
        vllm_config.speculative_config.enable_adaptive_verification = True
    return session


def _may_trim(config: DSparkConfig, vllm_config: Any) -> bool:
    """Whether fewer drafts may run than were scheduled, as far as the configuration tells."""
    return config.verify in ("auto", "compact") and not obstacle(host_facts(vllm_config))


def _draft_widths(config: DSparkConfig, vllm_config: Any) -> tuple[int, ...]:
    """Block widths that this server may draft, the widest one last; 0 is not drafting.

    Only where trimming can leave out the slots that a narrow block lacks: what an earlier block
    left in them is no draw from the drafter's distribution and must never be verified.
    """
    gamma = vllm_config.speculative_config.num_speculative_tokens
    config.check_block(gamma)
    if not _may_trim(config, vllm_config):
        return (gamma,)
    if config.draft_width != "auto":
        return (config.draft_width,)
    if not host_facts(vllm_config).full_graphs:
        return (gamma,)
    # An operator who asks for drafts to be verified asks for them to be drafted.
    asked = config.budget_pin is not None or config.budget_floor > 0
    return widths_for(gamma, may_skip=_may_skip_draft() and not asked)


def _may_skip_draft() -> bool:
    """Whether the host's speculator keeps its context up to date without drafting a block."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    return "num_speculative_tokens" in compat.parameters(DSparkSpeculator.propose)


def _wrap_init_speculator(original: Any, runner: ModuleType) -> Any:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        session = None
        if vllm_config.speculative_config.method == "dspark":
            session = _take_over(vllm_config)
        if session is None:
            return original(vllm_config, device, req_states)
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.v1.worker.gpu.spec_decode.dspark import speculator as native

        from vllm_dspark.engine import assembly
        from vllm_dspark.engine.proposer import DSparkProposer

        if vllm_config.parallel_config.tensor_parallel_size > 1:
            assembly.meet(session.config, get_tp_group(), device)
        # The factory looks the class up when it is called, so lending it ours for the call is all
        # it takes; another runner in this process may still want the native one.
        borrowed, native.DSparkSpeculator = native.DSparkSpeculator, DSparkProposer
        try:
            proposer = original(vllm_config, device, req_states)
        finally:
            native.DSparkSpeculator = borrowed
        session.attach_proposer(proposer)
        proposer.families.allow(session.block_widths)
        proposer.next_width = session.next_width
        proposer.fused_markov = session.config.fused_markov == "auto"
        proposer.weights = session.config.draft_weights
        proposer.before_traffic = session.before_traffic
        return proposer

    return init_speculator


def _wrap_manager_factory(original: Any, runner: ModuleType) -> Any:
    answers_admitted = "copy_admitted_drafts_to_host" in compat.parameters(original)

    @functools.wraps(original)
    def maybe_create_adaptive_verification_manager(**kwargs: Any) -> Any:
        session = find_session(kwargs["vllm_config"].speculative_config)
        if session is None:
            return original(**kwargs)
        from vllm_dspark.engine import assembly
        from vllm_dspark.engine.attention_splits import limit_splits
        from vllm_dspark.engine.block_attention import attend_blocks

        refusal = session.device_obstacle or _refusal(original, kwargs)
        session.resolved = resolve(session.config, host_facts(kwargs["vllm_config"], refusal))
        logger.info("DSpark verify mode %s: %s", session.mode, session.resolved.why)
        session.mixed_full_graphs = _mixed_full_graphs(session, kwargs)
        limit_splits(kwargs["attn_groups"], kwargs["vllm_config"])
        attention = session.config.block_attention
        if attention != "off":
            attend_blocks(kwargs["vllm_config"], kwargs["target_layer_names"], attention == "on")
        manager = original(**{**kwargs, "enable_adaptive_verification": False})
        if session.mode is VerifyMode.STATIC and not session.config.metrics:
            session.attach_planner(None)
            return manager
        planner = assembly.build_planner(
            session, kwargs, runner.sort_batch_req_ids.again, answers_admitted
        )
        session.attach_planner(planner)
        return planner

    return maybe_create_adaptive_verification_manager


def _refusal(original: Any, kwargs: dict[str, Any]) -> str:
    """The native validation's objection to lengths that only the device knows, empty if none."""
    try:
        original(**{**kwargs, "enable_adaptive_verification": True})
    except ValueError as error:
        return str(error)
    return ""


def _mixed_full_graphs(session: Session, kwargs: dict[str, Any]) -> bool:
    """Whether mixed steps get full graphs.

    Raises:
        ConfigError: they were asked for and cannot be had.
    """
    wanted, unable = session.config.mixed_graphs, _unable_to_mix(session, kwargs)
    if wanted == "full" and unable:
        raise ConfigError(f"dspark.mixed_graphs = 'full' cannot run: {unable}")
    return wanted != "piecewise" and not unable


def _unable_to_mix(session: Session, kwargs: dict[str, Any]) -> str:
    """Why mixed steps cannot replay full graphs; empty if they can."""
    if session.mode is VerifyMode.STATIC:
        return "a server that verifies every draft keeps the host's graphs"
    vllm_config, checked = kwargs["vllm_config"], kwargs.get("target_layer_names")
    graphs = vllm_config.compilation_config.cudagraph_mode
    if not graphs.has_full_cudagraphs():
        return f"cudagraph_mode {graphs.name} has no full graphs"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        # Some connectors load and save layer by layer, from code that a full graph does not run.
        return "a KV connector may act between the layers of a step with a prefill"
    for group in itertools.chain.from_iterable(kwargs["attn_groups"]):
        if checked is not None and checked.isdisjoint(group.layer_names):
            continue
        support = group.get_metadata_builder(0).get_cudagraph_support(
            vllm_config, group.kv_cache_spec
        )
        if support.name != "ALWAYS":
            return f"{group.backend.get_name()} attention replays no mixed batch"
    return ""


def host_facts(vllm_config: Any, obstacle_to_device: str = "") -> HostFacts:
    """What the configuration says about the modes that can run."""
    parallel, hindrance = vllm_config.parallel_config, _graph_obstacle(vllm_config)
    wanted = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    return HostFacts(
        full_graphs=wanted and not hindrance,
        data_parallel_size=parallel.data_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        batch_sharded_sampling=bool(getattr(parallel, "enable_batch_sharded_sampling", False)),
        whole_blocks=_reporting(vllm_config),
        device_obstacle=obstacle_to_device,
        graph_obstacle=hindrance,
    )


def _reporting(vllm_config: Any) -> str:
    """Options with which the host refuses to trim; it looks before we switch trimming on."""
    outputs = getattr(vllm_config, "aux_output_config", None)
    if getattr(outputs, "enable_return_routed_experts", False):
        return "enable_return_routed_experts"
    if getattr(vllm_config.model_config, "return_sampling_mask", False):
        return "return_sampling_mask"
    return ""


def _graph_obstacle(vllm_config: Any) -> str:
    compilation = vllm_config.compilation_config
    return graph_obstacle(
        compilation.cudagraph_mode.has_full_cudagraphs(),
        compilation.cudagraph_capture_sizes or (),
        vllm_config.speculative_config.num_speculative_tokens + 1,
    )


def _host_length_attention(vllm_config: Any) -> str:
    """Name of an attention backend that the operator has picked and that cannot run lengths which
    only the device knows; empty if there is none. The host would refuse it once it is told of such
    lengths, instead of picking another.
    """
    attention = vllm_config.attention_config
    if not compat.present(compat.HOST_LENGTHS):
        return ""
    for backend in (attention.backend, *getattr(attention, "backend_per_kind", {}).values()):
        if backend is None:
            continue
        try:
            runs = backend.get_class().supports_device_cpu_query_lens_mismatch()
        except ImportError:
            # The host says better what is not installed.
            continue
        if not runs:
            return str(backend.name)
    return ""


def _wrap_batch_order(original: Any, runner: ModuleType) -> Any:
    order = BatchOrder(original)

    @functools.wraps(original)
    def sort_batch_req_ids(*args: Any, **kwargs: Any) -> list[str]:
        return order.sort(*args, **kwargs)

    sort_batch_req_ids.again = order.again  # type: ignore[attr-defined]
    return sort_batch_req_ids


def _wrap_graph_mode(original: Any, runner: ModuleType) -> Any:
    @functools.wraps(original)
    def resolve_adaptive_cudagraph_mode(mode: Any, **kwargs: Any) -> Any:
        # The runner calls this for a manager of its own or for our planner. Only the former needs
        # a decode route of its own, and it is built only where full graphs exist.
        if not mode.has_full_cudagraphs():
            return mode
        return original(mode, **kwargs)

    return resolve_adaptive_cudagraph_mode


def _wrap_graph_manager(original: Any, runner: ModuleType) -> Any:
    @functools.wraps(original, updated=())
    def model_cuda_graph_manager(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        session = find_session(vllm_config.speculative_config)
        if session is None or session.planner is None:
            return original(vllm_config, *args, **kwargs)
        from vllm_dspark.engine import assembly
        from vllm_dspark.engine.graphs import VerifyGraphManager

        manager = VerifyGraphManager(vllm_config, *args, **kwargs)
        assembly.adopt_ladders(session.planner, manager)
        return manager

    return model_cuda_graph_manager


def _wrap_rejection_sampler(original: Any, runner: ModuleType) -> Any:
    @functools.wraps(original, updated=())
    def rejection_sampler(sampler: Any, spec_config: Any, *args: Any, **kwargs: Any) -> Any:
        if find_session(spec_config) is None:
            return original(sampler, spec_config, *args, **kwargs)
        from vllm_dspark.engine.verifier import Verifier

        return Verifier(sampler, spec_config, *args, **kwargs)

    return rejection_sampler


def _wrap_prepare_inputs(original: Any, runner: ModuleType) -> Any:
    @functools.wraps(original)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        session = find_session(self.speculative_config)
        if session is not None and session.planner is not None:
            session.planner.make_exact(batch)
        return batch

    return prepare_inputs


def _verifier(runner: Any) -> Any:
    """Our rejection sampler, if it is what this runner accepts with."""
    if find_session(runner.speculative_config) is None:
        return None
    from vllm_dspark.engine.verifier import Verifier

    # Some models bring samplers of their own, and pipeline stages may have none.
    found = getattr(runner, "rejection_sampler", None)
    return found if isinstance(found, Verifier) else None


def _wrap_sample(original: Any, runner: ModuleType) -> Any:
    @functools.wraps(original)
    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        verifier = _verifier(self)
        if verifier is not None and self.batch_sharder is None:
            verifier.serve(self)
            output = verifier.from_hidden(hidden_states, input_batch, grammar_output)
            if output is not None:
                return output, output.num_sampled, output.num_rejected
        return original(self, hidden_states, input_batch, grammar_output)

    return sample


def _wrap_capture_model(original: Any, runner: ModuleType) -> Any:
    @functools.wraps(original)
    def capture_model(self: Any, **kwargs: Any) -> Any:
        session = find_session(self.speculative_config)
        if session is None or kwargs.get("profile_only"):
            return original(self, **kwargs)
        with _profiling(session, self):
            size = original(self, **kwargs)
        verifier = _verifier(self)
        if verifier is not None:
            verifier.capture(self)
        return size

    return capture_model


@contextlib.contextmanager
def _profiling(session: Session, runner: Any) -> Iterator[None]:
    """Step costs are measured in the block, unless they are given or nobody asks for them."""
    planner = session.planner
    if planner is None or session.config.cost_table is not None:
        yield
        return
    from vllm_dspark.engine.profile import StartupProfile

    planner.bind_profile(
        StartupProfile(planner.core, runner, session.block_widths, planner.set_draft_width)
    )
    try:
        yield
    finally:
        planner.bind_profile(None)


_WRAPPERS: dict[str, Wrapper] = {
    "init_speculator": _wrap_init_speculator,
    "maybe_create_adaptive_verification_manager": _wrap_manager_factory,
    "sort_batch_req_ids": _wrap_batch_order,
    "resolve_adaptive_cudagraph_mode": _wrap_graph_mode,
    "ModelCudaGraphManager": _wrap_graph_manager,
    "RejectionSampler": _wrap_rejection_sampler,
    "GPUModelRunner.capture_model": _wrap_capture_model,
    "GPUModelRunner.prepare_inputs": _wrap_prepare_inputs,
    "GPUModelRunner.sample": _wrap_sample,
}
