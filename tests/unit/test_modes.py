# SPDX-License-Identifier: Apache-2.0
"""Which verify mode runs: every combination gives a mode or the reason why not."""

import itertools
from typing import Any

import pytest

from vllm_dspark.config import ConfigError, DSparkConfig
from vllm_dspark.engine.modes import (
    HostFacts,
    VerifyMode,
    device_obstacle,
    graph_obstacle,
    resolve,
)

VERIFY = ("auto", "static", "cap-accept", "compact")
LENS = ("auto", "host", "uniform", "device")
NO_DEVICE = "the backend takes no varlen batches"
SERVER_OBSTACLES = {
    "pipeline_parallel_size": (2, "pipeline stage"),
    "data_parallel_size": (2, "data-parallel ranks"),
    "batch_sharded_sampling": (True, "batch-sharded sampling"),
    "whole_blocks": ("return_something", "return_something reports on every scheduled draft"),
}


def options(**given: Any) -> DSparkConfig:
    return DSparkConfig.parse(given)


def mode(facts: HostFacts, **given: Any) -> VerifyMode:
    return resolve(options(**given), facts).mode


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("full_graphs", [False, True])
@pytest.mark.parametrize("device", ["", NO_DEVICE])
def test_static_runs_everywhere(lens: str, full_graphs: bool, device: str) -> None:
    facts = HostFacts(full_graphs, 2, 2, True, "x", device)
    resolved = resolve(options(verify="static", lens=lens), facts)
    assert resolved.mode is VerifyMode.STATIC
    assert "dspark.verify = 'static'" in resolved.why


@pytest.mark.parametrize("verify", ["auto", "compact"])
def test_compact_takes_the_device_where_it_may(verify: str) -> None:
    assert mode(HostFacts(True), verify=verify) is VerifyMode.DEVICE
    assert mode(HostFacts(True, device_obstacle=NO_DEVICE), verify=verify) is VerifyMode.UNIFORM
    assert mode(HostFacts(False, device_obstacle=NO_DEVICE), verify=verify) is VerifyMode.HOST


@pytest.mark.parametrize("verify", ["auto", "compact"])
@pytest.mark.parametrize("full_graphs", [False, True])
@pytest.mark.parametrize("device", ["", NO_DEVICE])
def test_named_lens_are_taken_as_they_are(verify: str, full_graphs: bool, device: str) -> None:
    facts = HostFacts(full_graphs, device_obstacle=device)
    assert mode(facts, verify=verify, lens="host") is VerifyMode.HOST
    assert mode(facts, verify=verify, lens="uniform") is VerifyMode.UNIFORM


def test_why_names_the_obstacle() -> None:
    for facts in (
        HostFacts(True, device_obstacle=NO_DEVICE),
        HostFacts(False, 1, 1, False, "", "x"),
    ):
        assert facts.device_obstacle in resolve(options(), facts).why


def test_device_lens_are_refused_with_the_reason() -> None:
    assert mode(HostFacts(True), lens="device") is VerifyMode.DEVICE
    with pytest.raises(ConfigError) as caught:
        resolve(options(lens="device"), HostFacts(True, device_obstacle=NO_DEVICE))
    assert "dspark.lens = 'device'" in str(caught.value)
    assert NO_DEVICE in str(caught.value)


@pytest.mark.parametrize("fact", SERVER_OBSTACLES)
@pytest.mark.parametrize("verify", ["cap-accept", "compact"])
def test_what_the_server_cannot_do_is_refused_if_it_was_asked_for(fact: str, verify: str) -> None:
    value, word = SERVER_OBSTACLES[fact]
    facts = HostFacts(True, **{fact: value})
    with pytest.raises(ConfigError) as caught:
        resolve(options(verify=verify), facts)
    assert f"dspark.verify = {verify!r}" in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize("fact", SERVER_OBSTACLES)
def test_what_the_server_cannot_do_is_static_if_nobody_asked(fact: str) -> None:
    value, word = SERVER_OBSTACLES[fact]
    resolved = resolve(options(), HostFacts(True, **{fact: value}))
    assert resolved.mode is VerifyMode.STATIC
    assert word in resolved.why


def test_every_combination_is_a_mode_or_a_reason() -> None:
    modes = set()
    for verify, lens, full, dp, pp, sharded, device in itertools.product(
        VERIFY, LENS, (False, True), (1, 2), (1, 2), (False, True), ("", NO_DEVICE)
    ):
        config, facts = options(verify=verify, lens=lens), HostFacts(full, dp, pp, sharded, device)
        try:
            resolved = resolve(config, facts)
        except ConfigError as error:
            assert verify != "static", error
            assert verify != "auto" or lens == "device", error
            assert "cannot run: " in str(error)
            continue
        assert resolved.why
        modes.add(resolved.mode)
        assert resolved.mode is not VerifyMode.DEVICE or not device
        if resolved.mode.trims:
            assert (dp, pp, sharded) == (1, 1, False)
    assert modes == set(VerifyMode)


def test_which_modes_trim() -> None:
    assert {m for m in VerifyMode if m.trims} == {
        VerifyMode.HOST,
        VerifyMode.UNIFORM,
        VerifyMode.DEVICE,
    }


def test_capture_sizes_that_hold_no_block() -> None:
    assert graph_obstacle(True, [1, 2, 8], 8) == ""
    assert graph_obstacle(False, [1], 8) == "", "nothing is to be captured"
    reason = graph_obstacle(True, [1, 2, 4], 8)
    assert "cudagraph_capture_sizes = [1, 2, 4]" in reason
    assert "with 7 speculative tokens" in reason
    assert "at least one size of 8 or more" in reason
    assert graph_obstacle(True, (), 8)
    assert device_obstacle(**{**SOUND, "graphs": reason}) == reason
    facts = HostFacts(False, device_obstacle=reason, graph_obstacle=reason)
    for lens in ("device", "uniform"):
        with pytest.raises(ConfigError) as caught:
            resolve(options(lens=lens), facts)
        assert str(caught.value) == f"dspark.lens = {lens!r} cannot run: {reason}"
    resolved = resolve(options(), facts)
    assert resolved.mode is VerifyMode.HOST
    assert reason in resolved.why


SOUND: dict[str, Any] = {
    "full_graphs": True,
    "lora": False,
    "pipeline_parallel_size": 1,
    "speculative_tokens": 7,
}


def test_a_configuration_without_a_device_obstacle() -> None:
    assert device_obstacle(**SOUND) == ""
    assert device_obstacle(**{**SOUND, "speculative_tokens": 2}) == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"full_graphs": False}, "full CUDA graphs"),
        ({"lora": True}, "LoRA"),
        ({"pipeline_parallel_size": 2}, "pipeline stage"),
        ({"speculative_tokens": 1}, "nothing to split"),
        ({"attention": "FLASHINFER"}, "FLASHINFER attention reads"),
    ],
)
def test_configurations_with_a_device_obstacle(change: dict[str, Any], word: str) -> None:
    assert word in device_obstacle(**{**SOUND, **change})
