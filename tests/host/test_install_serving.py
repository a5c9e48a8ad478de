# SPDX-License-Identifier: Apache-2.0
"""What a runner that serves DSpark does with the names that were replaced."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from runner_stand_in import Recorder, configuration, take_over
from stand_ins import Namespace as SimpleNamespace

from vllm_dspark.engine import install


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
        self.served: list[Any] = []

    def serve(self, runner: Any) -> None:
        self.served.append(runner)

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
