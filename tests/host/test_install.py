# SPDX-License-Identifier: Apache-2.0
"""The names of the model runner: replaced once, calling the original, and only for DSpark.

The runner module under test is a copy of the host's (`runner_stand_in`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest
from runner_stand_in import (
    Proposer,
    Recorder,
    configuration,
    copy_of,
    create_manager,
    factory_arguments,
    take_over,
)
from stand_ins import Namespace as SimpleNamespace
from stand_ins import lose
from vllm.config import AttentionConfig

from vllm_dspark import compat
from vllm_dspark.compat import MissingHookError
from vllm_dspark.config import ConfigError
from vllm_dspark.engine import install, session
from vllm_dspark.engine.modes import VerifyMode

SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
SYMBOLS = sorted(entry.path for entry in compat.HOST_SYMBOLS if not entry.optional)
# Not a name of the runner: a host without it is noticed where the operator sees it.
TAKES_OVER = f"{compat.RUNNER}:init_speculator"


# ---------------------------------------------------------------------- binding


def test_binding_twice_wraps_once(runner: ModuleType) -> None:
    install.bind(runner)
    bound = {name: _resolve(runner, name) for name in install._WRAPPERS}
    for name, value in bound.items():
        assert isinstance(value, FunctionType), name
        assert not hasattr(value.dspark_original, "dspark_original"), name
    install.bind(runner)
    assert {name: _resolve(runner, name) for name in install._WRAPPERS} == bound


def test_wrappers_keep_name_and_signature(runner: ModuleType) -> None:
    before = {n: inspect.signature(_resolve(runner, n)) for n in install._WRAPPERS}
    install.bind(runner)
    for name in install._WRAPPERS:
        assert inspect.signature(_resolve(runner, name)) == before[name]


@pytest.mark.parametrize("method", ["eagle3", None])
def test_without_dspark_every_call_goes_to_the_host(
    runner: ModuleType, host: Recorder, method: str | None
) -> None:
    install.bind(runner)
    config = configuration(method or "")
    if method is None:
        config.speculative_config = None
    speculative = config.speculative_config
    full = SimpleNamespace(has_full_cudagraphs=lambda: True)
    owner = SimpleNamespace(speculative_config=speculative)
    calls = {
        "maybe_create_adaptive_verification_manager": ((), {"vllm_config": config, "other": 1}),
        "sort_batch_req_ids": (({"a": 8}, {"a": [0] * 7}, 8), {}),
        "resolve_adaptive_cudagraph_mode": ((full,), {"piecewise_capture_available": True}),
        "ModelCudaGraphManager": ((config, 1), {"varlen_decode": True}),
        "RejectionSampler": (("sampler", speculative, "device"), {}),
        "GPUModelRunner.capture_model": ((owner,), {"profile_only": True}),
        "GPUModelRunner.prepare_inputs": ((owner, 1, 2, 3), {}),
        "GPUModelRunner.sample": ((owner, 1, 2, 3), {}),
    }
    if method is not None:
        calls["init_speculator"] = ((config, "device", "states"), {})
    for name, (args, kwargs) in calls.items():
        assert _resolve(runner, name)(*args, **kwargs) is host.answer, name
        assert host.calls[-1] == (name, args, kwargs)
    assert session._sessions == {}


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_meet_before_anything_is_loaded(
    runner: ModuleType, host: Recorder, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """A rank that is not there is found out now, and what the meeting costs is seen by the host."""
    from vllm.distributed import parallel_state

    from vllm_dspark.engine import assembly

    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: "group")
    met: list[Any] = []
    monkeypatch.setattr(
        assembly, "meet", lambda config, *given: met.append((config.records, *given, host.names))
    )
    install.bind(runner)
    config = configuration(records=3)
    config.parallel_config.tensor_parallel_size = ranks
    take_over(runner, host, config)
    assert met == ([(3, "group", "device", [])] if ranks > 1 else [])
    assert host.names == ["init_speculator"]


def test_the_plan_is_told_the_order_that_the_runner_sorted(
    runner: ModuleType, host: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_dspark.engine import assembly

    asked: list[Any] = []
    monkeypatch.setattr(
        assembly, "build_planner", lambda session, kwargs, order, *rest: asked.append(order)
    )
    install.bind(runner)
    config = configuration()
    opened = take_over(runner, host, config)
    create_manager(runner, config)
    assert opened.planner is None
    (order,) = asked
    host.answer = ["a", "b"]
    step = ({"a": 8, "b": 1}, {"a": [0] * 7}, 8)
    sorted_by_the_host = runner.sort_batch_req_ids(*step)
    before = host.names.count("sort_batch_req_ids")
    assert order(*step) is sorted_by_the_host is host.answer
    assert host.names.count("sort_batch_req_ids") == before == 1


# ---------------------------------------------------------------------- missing hooks


def _resolve(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _lose(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one symbol of the table away, on copies of the modules that hold it."""
    module_name, _, attribute = path.partition(":")
    if module_name != compat.RUNNER:
        monkeypatch.setitem(sys.modules, module_name, copy_of(importlib.import_module(module_name)))
    lose(sys.modules[module_name], attribute, monkeypatch)


@pytest.mark.parametrize("path", [path for path in SYMBOLS if path != TAKES_OVER])
def test_a_missing_hook_leaves_the_native_path_with_one_error(
    path: str, runner: ModuleType, host: Recorder, monkeypatch: pytest.MonkeyPatch, dspark_log: Any
) -> None:
    _lose(path, monkeypatch)
    install.bind(runner)
    config = configuration(full_graphs=True)
    assert take_over(runner, host, config) is None
    assert host.names == ["init_speculator"]
    assert not config.speculative_config.enable_adaptive_verification
    (error,) = dspark_log.errors()
    assert path in error
    assert compat.describe_versions() in error


@pytest.mark.parametrize("path", [path for path in SYMBOLS if path != TAKES_OVER])
def test_a_missing_hook_stops_a_strict_server(
    path: str, runner: ModuleType, host: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lose(path, monkeypatch)
    install.bind(runner)
    with pytest.raises(MissingHookError) as caught:
        runner.init_speculator(configuration(strict=True), "device", "states")
    assert path in str(caught.value)
    assert host.calls == []


@pytest.mark.parametrize("name", ["GPUModelRunner", *install._WRAPPERS])
def test_binding_survives_whatever_is_missing(name: str, runner: ModuleType) -> None:
    owner, _, attribute = name.rpartition(".")
    delattr(getattr(runner, owner) if owner else runner, attribute)
    install.bind(runner)
    kept = [n for n in install._WRAPPERS if n != name and not n.startswith(f"{name}.")]
    assert all(hasattr(_resolve(runner, n), "dspark_original") for n in kept)


# ---------------------------------------------------------------------- taking over


def test_the_factory_is_lent_our_class_for_one_call(runner: ModuleType, host: Recorder) -> None:
    from vllm_dspark.engine.proposer import DSparkProposer

    native = importlib.import_module(SPECULATOR)
    before, seen = native.DSparkSpeculator, []
    install.bind(runner)

    def factory(*args: Any) -> Any:
        seen.append(native.DSparkSpeculator)
        return Proposer()

    host.effect = factory
    runner.init_speculator(configuration(), "device", "states")
    assert seen == [DSparkProposer]
    assert native.DSparkSpeculator is before


def test_the_class_is_given_back_when_the_factory_fails(runner: ModuleType, host: Recorder) -> None:
    native = importlib.import_module(SPECULATOR)
    before = native.DSparkSpeculator
    install.bind(runner)

    def fail(*args: Any) -> Any:
        raise ValueError("bad checkpoint")

    host.effect = fail
    with pytest.raises(ValueError, match="bad checkpoint"):
        runner.init_speculator(configuration(), "device", "states")
    assert native.DSparkSpeculator is before


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ({"full_graphs": False}, (7,)),
        ({"full_graphs": True, "verify": "static"}, (7,)),
        ({"draft_width": 3}, (3,)),
    ],
)
def test_the_proposer_learns_which_widths_it_may_draft(
    runner: ModuleType, host: Recorder, options: dict[str, Any], widths: tuple[int, ...]
) -> None:
    install.bind(runner)
    opened = take_over(runner, host, configuration(**options))
    proposer = opened.kept_by_the_runner
    assert proposer.allowed == opened.widths == widths
    assert proposer.next_width() == widths[-1]


@pytest.mark.parametrize("can_skip", [True, False])
def test_drafting_may_be_left_out_where_the_host_can(
    runner: ModuleType, host: Recorder, can_skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    def propose(self: Any, input_batch: Any, num_speculative_tokens: int | None = None) -> None: ...

    def propose_always(self: Any, input_batch: Any) -> None: ...

    monkeypatch.setattr(DSparkSpeculator, "propose", propose if can_skip else propose_always)
    install.bind(runner)
    opened = take_over(runner, host, configuration(full_graphs=True))
    assert opened.widths == ((0,) if can_skip else ()) + (1, 2, 3, 5, 7)


@pytest.mark.parametrize(("option", "allowed"), [("auto", True), ("off", False)])
def test_the_proposer_learns_whether_fused_kernels_may_run(
    runner: ModuleType, host: Recorder, option: str, allowed: bool
) -> None:
    install.bind(runner)
    opened = take_over(runner, host, configuration(fused_markov=option))
    assert opened.kept_by_the_runner.fused_markov is allowed


def test_a_width_above_gamma_is_refused(runner: ModuleType) -> None:
    install.bind(runner)
    with pytest.raises(ConfigError, match=r"dspark\.draft_width = 8: allowed: .* 7"):
        runner.init_speculator(configuration(draft_width=8), "device", "states")


def test_a_wrong_option_is_an_error_in_the_worker_too(runner: ModuleType) -> None:
    install.bind(runner)
    with pytest.raises(ConfigError, match=r"dspark\.verify = 'fast'"):
        runner.init_speculator(configuration(verify="fast"), "device", "states")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"full_graphs": True}, True),
        ({"full_graphs": True, "verify": "compact", "lens": "device"}, True),
        ({"full_graphs": False}, False),
        ({"full_graphs": True, "lora": True}, False),
        ({"full_graphs": True, "verify": "static"}, False),
        ({"full_graphs": True, "verify": "cap-accept"}, False),
        ({"full_graphs": True, "lens": "host"}, False),
        ({"full_graphs": True, "lens": "uniform"}, False),
        ({"full_graphs": True, "capture_sizes": [1, 2, 4]}, False),
    ],
)
def test_backends_are_told_that_host_lengths_may_lie_only_where_they_may(
    runner: ModuleType, host: Recorder, options: dict[str, Any], wanted: bool
) -> None:
    install.bind(runner)
    config = configuration(**options)
    take_over(runner, host, config)
    assert config.speculative_config.enable_adaptive_verification is wanted


class Backend:
    """A backend as the operator names it."""

    name = "FLASHY"

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer

    def get_class(self) -> Any:
        if self.answer is None:
            raise ImportError("no module named flashy")
        return SimpleNamespace(supports_device_cpu_query_lens_mismatch=lambda: self.answer)


@pytest.mark.parametrize("answer", [True, False, None], ids=["runs", "refuses", "not installed"])
@pytest.mark.parametrize("kind", [False, True], ids=["for all layers", "for some layers"])
def test_a_backend_that_the_operator_picked_is_not_told_what_it_would_refuse(
    runner: ModuleType, host: Recorder, answer: bool | None, kind: bool
) -> None:
    install.bind(runner)
    picked = Backend(answer)
    attention = SimpleNamespace(
        backend=None if kind else picked, backend_per_kind={"full": picked} if kind else {}
    )
    config = configuration(full_graphs=True, attention=attention)
    opened = take_over(runner, host, config)
    refuses = answer is False
    assert config.speculative_config.enable_adaptive_verification is not refuses
    assert opened.device_obstacle == (
        "FLASHY attention reads the lengths of a batch on the host" if refuses else ""
    )


def test_the_hosts_triton_attention_runs_lengths_of_the_device(
    runner: ModuleType, host: Recorder
) -> None:
    install.bind(runner)
    config = configuration(full_graphs=True, attention=AttentionConfig(backend="TRITON_ATTN"))
    assert take_over(runner, host, config).device_obstacle == ""


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    group = SimpleNamespace(
        rank_in_group=0, world_size=1, broadcast_object=lambda value, src: value
    )
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)


def test_static_without_metrics_is_the_host_alone(runner: ModuleType, host: Recorder) -> None:
    install.bind(runner)
    config = configuration(verify="static")
    opened = take_over(runner, host, config)
    host.answer = None
    assert create_manager(runner, config) is None
    assert host.calls[-1][2]["enable_adaptive_verification"] is False
    assert opened.mode is VerifyMode.STATIC
    assert opened.planner is None


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"verify": "cap-accept"}, VerifyMode.CAP_ACCEPT),
        ({"verify": "compact"}, VerifyMode.HOST),
        ({"lens": "uniform"}, VerifyMode.UNIFORM),
        ({"verify": "static", "metrics": True}, VerifyMode.STATIC),
        ({"full_graphs": True}, VerifyMode.DEVICE),
    ],
)
def test_the_planner_takes_the_managers_place(
    runner: ModuleType,
    host: Recorder,
    options: dict[str, Any],
    mode: VerifyMode,
    cuda_stand_ins: None,
    one_rank: None,
) -> None:
    install.bind(runner)
    config = configuration(**options)
    opened = take_over(runner, host, config)
    planner = create_manager(runner, config)
    assert opened.mode is mode
    assert planner is opened.planner
    assert planner.mode is mode
    # The native factory was asked last for nothing, and for its validation before where it counts.
    asked = [c[2]["enable_adaptive_verification"] for c in host.calls if "adaptive" in c[0]]
    assert asked == ([True, False] if mode is VerifyMode.DEVICE else [False])


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        {"reports": "enable_return_routed_experts"},
        {"reports": "return_sampling_mask"},
    ],
    ids=str,
)
def test_where_no_draft_may_be_left_out_the_host_is_told_of_no_trimming(
    runner: ModuleType,
    host: Recorder,
    options: dict[str, Any],
    cuda_stand_ins: None,
    one_rank: None,
) -> None:
    install.bind(runner)
    config = configuration(full_graphs=True, **options)
    opened = take_over(runner, host, config)
    assert not config.speculative_config.enable_adaptive_verification
    create_manager(runner, config)
    assert opened.mode is VerifyMode.STATIC
    assert (options.get("reports") or "data-parallel ranks") in opened.resolved.why
    config = configuration(full_graphs=True, verify="compact", **options)
    take_over(runner, host, config)
    with pytest.raises(ConfigError, match="verify = 'compact' cannot run"):
        create_manager(runner, config)


def test_a_backend_that_refuses_leaves_lengths_to_the_host(
    runner: ModuleType, host: Recorder, cuda_stand_ins: None, one_rank: None
) -> None:
    install.bind(runner)
    config = configuration(full_graphs=True)
    opened = take_over(runner, host, config)

    def refuse(**kwargs: Any) -> None:
        if kwargs["enable_adaptive_verification"]:
            raise ValueError("backend FLASHY allows none")

    host.effect = refuse
    create_manager(runner, config)
    assert opened.mode is VerifyMode.UNIFORM
    assert "FLASHY" in opened.resolved.why


def attention(support: str) -> SimpleNamespace:
    """An attention group of the target whose backend can replay that much."""
    builder = SimpleNamespace(
        get_cudagraph_support=lambda config, spec: SimpleNamespace(name=support)
    )
    return SimpleNamespace(
        layer_names={"layer"},
        kv_cache_spec=None,
        backend=SimpleNamespace(get_name=lambda: "FLASHY"),
        get_metadata_builder=lambda number: builder,
        metadata_builders=[builder],
    )


MIXED_GRAPHS = {
    "": {},
    "keeps the host's graphs": {"verify": "static", "metrics": True},
    "cudagraph_mode NONE has no full graphs": {"full_graphs": False},
    "a KV connector may act between the layers": {"kv_connector": True},
    "FLASHY attention replays no mixed batch": {"support": "UNIFORM_BATCH"},
}
"""Options by why steps with a prefill get no full graphs."""


@pytest.mark.parametrize("why", MIXED_GRAPHS)
def test_steps_with_a_prefill_get_full_graphs_where_nothing_forbids_them(
    runner: ModuleType, host: Recorder, cuda_stand_ins: None, one_rank: None, why: str
) -> None:
    install.bind(runner)
    options = {"full_graphs": True, "support": "ALWAYS", **MIXED_GRAPHS[why]}
    attended = {"attn_groups": [[attention(options.pop("support"))]]}
    attended["target_layer_names"] = {"layer"}
    config = configuration(**options)
    opened = take_over(runner, host, config)
    create_manager(runner, config, **attended)
    assert opened.mixed_full_graphs is (why == "")
    config = configuration(**options, mixed_graphs="piecewise")
    opened = take_over(runner, host, config)
    create_manager(runner, config, **attended)
    assert not opened.mixed_full_graphs
    config = configuration(**options, mixed_graphs="full")
    opened = take_over(runner, host, config)
    if not why:
        create_manager(runner, config, **attended)
        assert opened.mixed_full_graphs
        return
    with pytest.raises(ConfigError, match=f"mixed_graphs = 'full' cannot run: .*{why}"):
        create_manager(runner, config, **attended)


@pytest.mark.parametrize("lens", ["device", "uniform"])
def test_capture_sizes_that_hold_no_block_are_refused(
    runner: ModuleType, host: Recorder, lens: str
) -> None:
    install.bind(runner)
    config = configuration(full_graphs=True, lens=lens, capture_sizes=[1, 2, 4])
    take_over(runner, host, config)
    with pytest.raises(ConfigError) as caught:
        runner.maybe_create_adaptive_verification_manager(**factory_arguments(config))
    assert f"dspark.lens = '{lens}' cannot run: cudagraph_capture_sizes = [1, 2, 4]" in str(
        caught.value
    )
    assert "at least one size of 8 or more" in str(caught.value)


def test_a_mode_that_cannot_run_is_refused_with_the_backends_words(
    runner: ModuleType, host: Recorder
) -> None:
    install.bind(runner)
    config = configuration(full_graphs=True, lens="device")
    take_over(runner, host, config)

    def refuse(**kwargs: Any) -> None:
        raise ValueError("backend FLASHY allows none")

    host.effect = refuse
    with pytest.raises(ConfigError, match=r"lens = 'device' cannot run: .*FLASHY"):
        create_manager(runner, config)
