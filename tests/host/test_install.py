# SPDX-License-Identifier: Apache-2.0
"""The names of the model runner: replaced once, calling the original, and only for DSpark.

The runner module under test is a copy of the host's, whose collaborators are recorders with the
host's own signatures. What is real: the table, the probes, the wrappers.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import pytest
from stand_ins import Namespace as SimpleNamespace
from stand_ins import lose

from vllm_dspark import compat
from vllm_dspark.compat import MissingHookError
from vllm_dspark.config import ConfigError
from vllm_dspark.engine import install, session
from vllm_dspark.engine.modes import VerifyMode

SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
SYMBOLS = sorted(entry.path for entry in compat.HOST_SYMBOLS)
# Not a name of the runner: a host without it is noticed where the operator sees it.
TAKES_OVER = f"{compat.RUNNER}:init_speculator"


class Recorder:
    """Calls that reached the host's own code."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answer: Any = object()
        self.effect: Callable[..., Any] | None = None

    def stand_in(self, name: str, original: Any) -> Any:
        """A function with the signature of `original` that notes the call."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self.effect(*args, **kwargs) if self.effect is not None else self.answer

        recorded.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        recorded.__name__ = name
        return recorded

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def copy_of(module: ModuleType) -> ModuleType:
    """The module and its own classes, so that nothing done to it reaches the host."""
    copied = ModuleType(module.__name__)
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            body = {
                k: v
                for k, v in vars(value).items()
                if k not in ("__dict__", "__weakref__") and not hasattr(v, "__objclass__")
            }
            value = type(value)(value.__name__, value.__bases__, body)
        setattr(copied, name, value)
    return copied


@pytest.fixture(autouse=True)
def no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_sessions", {})


@pytest.fixture
def host() -> Recorder:
    return Recorder()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, host: Recorder) -> ModuleType:
    """An unbound copy of the runner module, which `import` finds while the test runs."""
    copied = copy_of(importlib.import_module(compat.RUNNER))
    for name in install._WRAPPERS:
        owner, _, attribute = name.rpartition(".")
        target = getattr(copied, owner) if owner else copied
        original = inspect.unwrap(getattr(target, attribute))
        setattr(target, attribute, host.stand_in(name, original))
    monkeypatch.setitem(sys.modules, compat.RUNNER, copied)
    return copied


def configuration(
    method: str = "dspark",
    *,
    full_graphs: bool = False,
    lora: bool = False,
    capture_sizes: Sequence[int] = (1, 2, 4, 8),
    **dspark: Any,
) -> SimpleNamespace:
    """As much of a host configuration as is read; `dspark` are the plugin's options."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method,
            num_speculative_tokens=7,
            enable_adaptive_verification=False,
            draft_sample_method="greedy",
        ),
        additional_config={"dspark": {"metrics": False, **dspark}},
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(
                has_full_cudagraphs=lambda: full_graphs, name="FULL" if full_graphs else "NONE"
            ),
            cudagraph_capture_sizes=list(capture_sizes),
        ),
        model_config=SimpleNamespace(
            model="target",
            dtype="torch.bfloat16",
            hf_text_config=SimpleNamespace(num_hidden_layers=2, hidden_size=8, model_type="qwen3"),
        ),
        lora_config=object() if lora else None,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            tensor_parallel_size=1,
        ),
    )


class Proposer:
    """What the host's factory constructs for us."""

    publish_confidence = True

    def __init__(self) -> None:
        self.allowed: tuple[int, ...] = ()
        self.families = SimpleNamespace(allow=lambda widths: setattr(self, "allowed", widths))


def take_over(runner: ModuleType, host: Recorder, config: Any) -> Any:
    """Build the speculator, as the runner does first; returns the session."""
    host.answer = proposer = Proposer()
    assert runner.init_speculator(config, "device", "states") is proposer
    found = session.find_session(config.speculative_config)
    if found is not None:
        # The session refers to it weakly, the runner keeps it.
        found.kept_by_the_runner = proposer  # type: ignore[attr-defined]
    return found


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


def factory_arguments(config: Any, **changes: Any) -> dict[str, Any]:
    """What the runner hands to the manager factory."""
    import torch

    states = SimpleNamespace(
        num_speculative_steps=7, max_num_reqs=4, device=torch.device("cpu"), req_id_to_index={}
    )
    return {
        "enable_adaptive_verification": True,
        "attn_groups": [],
        "req_states": states,
        "query_start_loc": torch.zeros(5, dtype=torch.int32),
        "num_bonus_tokens": 1,
        "max_total_logits": 1000,
        "vllm_config": config,
        "target_layer_names": set(),
        **changes,
    }


def create_manager(runner: ModuleType, config: Any, **changes: Any) -> Any:
    return runner.maybe_create_adaptive_verification_manager(**factory_arguments(config, **changes))


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


# ---------------------------------------------------------------------- the other names


class Planner:
    """A planner that notes what it is asked."""

    def __init__(self) -> None:
        self.core = SimpleNamespace()
        self.exact: list[Any] = []
        self.profiles: list[Any] = []

    def make_exact(self, batch: Any) -> None:
        self.exact.append(batch)

    def bind_profile(self, profile: Any) -> None:
        self.profiles.append(profile)

    def set_draft_width(self, width: int) -> None: ...


@pytest.fixture
def served(runner: ModuleType, host: Recorder) -> SimpleNamespace:
    """A bound runner whose session has a planner."""
    install.bind(runner)
    config = configuration()
    opened = take_over(runner, host, config)
    planner = Planner()
    opened.attach_planner(planner)
    owner = SimpleNamespace(speculative_config=config.speculative_config)
    return SimpleNamespace(runner=runner, config=config, planner=planner, owner=owner)


def test_prepared_inputs_pass_the_planner(served: SimpleNamespace, host: Recorder) -> None:
    host.answer = batch = object()
    assert served.runner.GPUModelRunner.prepare_inputs(served.owner, 1, 2, 3) is batch
    assert host.calls[-1][1] == (served.owner, 1, 2, 3)
    assert served.planner.exact == [batch]


def test_a_profile_exists_while_graphs_are_captured(
    served: SimpleNamespace, host: Recorder
) -> None:
    host.effect = lambda *args, **kwargs: len(served.planner.profiles)
    assert served.runner.GPUModelRunner.capture_model(served.owner) == 1
    assert served.planner.profiles[0] is not None
    assert served.planner.profiles[1:] == [None]


def test_a_failing_capture_leaves_no_profile(served: SimpleNamespace, host: Recorder) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    host.effect = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        served.runner.GPUModelRunner.capture_model(served.owner)
    assert served.planner.profiles[-1] is None


def test_a_memory_profile_times_nothing(served: SimpleNamespace) -> None:
    served.runner.GPUModelRunner.capture_model(served.owner, profile_only=True)
    assert served.planner.profiles == []


class _Accepting:
    """A verifier that accepts from hidden states, or leaves it to the host."""

    def __init__(self, output: Any) -> None:
        self.output, self.captured = output, []

    def from_hidden(self, *args: Any) -> Any:
        return self.output

    def capture(self, owner: Any) -> None:
        self.captured.append(owner)


@pytest.fixture
def accepting(served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`served`, whose runner has a verifier of ours."""
    from vllm_dspark.engine import verifier

    monkeypatch.setattr(verifier, "Verifier", _Accepting)
    output = SimpleNamespace(num_sampled="counts", num_rejected="rest")
    served.owner.rejection_sampler = _Accepting(output)
    served.owner.batch_sharder = None
    return served


def test_captured_acceptance_needs_no_logits(accepting: SimpleNamespace, host: Recorder) -> None:
    sample = accepting.runner.GPUModelRunner.sample
    output = accepting.owner.rejection_sampler.output
    calls = len(host.calls)
    assert sample(accepting.owner, "hidden", "batch", None) == (output, "counts", "rest")
    assert len(host.calls) == calls


def test_what_is_not_captured_is_sampled_by_the_host(
    accepting: SimpleNamespace, host: Recorder
) -> None:
    sample = accepting.runner.GPUModelRunner.sample
    accepting.owner.rejection_sampler.output = None
    assert sample(accepting.owner, "hidden", "batch", "grammar") is host.answer
    assert host.calls[-1][1] == (accepting.owner, "hidden", "batch", "grammar")


def test_sharded_batches_and_foreign_samplers_are_the_hosts(
    accepting: SimpleNamespace, host: Recorder
) -> None:
    sample = accepting.runner.GPUModelRunner.sample
    accepting.owner.batch_sharder = object()
    assert sample(accepting.owner, 1, 2, None) is host.answer
    accepting.owner.batch_sharder = None
    accepting.owner.rejection_sampler = object()
    assert sample(accepting.owner, 1, 2, None) is host.answer


def test_acceptance_is_captured_behind_the_model(
    accepting: SimpleNamespace, host: Recorder
) -> None:
    verifier = accepting.owner.rejection_sampler
    capture = accepting.runner.GPUModelRunner.capture_model
    host.effect = lambda *args, **kwargs: len(verifier.captured)
    assert capture(accepting.owner) == 0, "the model first"
    assert verifier.captured == [accepting.owner]
    capture(accepting.owner, profile_only=True)
    assert verifier.captured == [accepting.owner], "a memory profile keeps no graphs"


def test_without_full_graphs_there_is_no_graph_mode_to_choose(
    served: SimpleNamespace, host: Recorder
) -> None:
    eager = SimpleNamespace(has_full_cudagraphs=lambda: False)
    count = len(host.calls)
    found = served.runner.resolve_adaptive_cudagraph_mode(eager, piecewise_capture_available=True)
    assert found is eager
    assert len(host.calls) == count


def test_a_planner_that_is_gone_is_not_asked(served: SimpleNamespace, host: Recorder) -> None:
    del served.planner
    host.answer = batch = object()
    assert served.runner.GPUModelRunner.prepare_inputs(served.owner, 1, 2, 3) is batch


def test_runners_of_one_process_do_not_share_a_session(runner: ModuleType, host: Recorder) -> None:
    install.bind(runner)
    ours, theirs = configuration(verify="static"), configuration("eagle3")
    assert take_over(runner, host, ours) is not None
    assert take_over(runner, host, theirs) is None
    sampler = runner.RejectionSampler("sampler", theirs.speculative_config, "device")
    assert sampler is host.answer
