# SPDX-License-Identifier: Apache-2.0
"""The entry point: cheap, idempotent, silent unless DSpark is asked for, and never in the way."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_dspark import compat, plugin
from vllm_dspark.compat import MissingHookError
from vllm_dspark.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"
HOOKED = ["vllm.engine.arg_utils", "vllm.model_executor.models.registry", compat.RUNNER]

Waiting = dict[str, list[Callable[[ModuleType], None]]]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """A process in which nothing was registered yet; holds what registration waits for."""
    found: Waiting = {}
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "on_import", lambda n, a: found.setdefault(n, []).append(a))
    monkeypatch.delenv("VLLM_DSPARK_ENABLED", raising=False)
    return found


def run_python(code: str, **environment: str) -> str:
    """Standard output of `code` in a fresh interpreter."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


# ---------------------------------------------------------------------- registration


def test_the_host_finds_the_entry_point() -> None:
    found = {e.value for e in entry_points(group="vllm.general_plugins") if e.name == "dspark"}
    assert found == {"vllm_dspark.plugin:register"}
    assert {e.load() for e in entry_points(group="vllm.general_plugins", name="dspark")} == {
        plugin.register
    }


def test_registering_twice_registers_once(waiting: Waiting) -> None:
    plugin.register()
    assert set(HOOKED) <= set(waiting)
    first = {name: list(actions) for name, actions in waiting.items()}
    plugin.register()
    assert waiting == first
    assert all(len(actions) == 1 for actions in waiting.values())


def test_interpreter_fixes_only_where_kernels_are_interpreted(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    plugin.register()
    assert sorted(waiting) == sorted(HOOKED)


def test_registration_imports_neither_torch_nor_the_host() -> None:
    code = """
import json, sys
from vllm_dspark.plugin import register
register(); register()
from importlib.metadata import entry_points
heavy = {"torch", "vllm", "triton", "transformers", "prometheus_client"}
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & heavy)))
"""
    assert json.loads(run_python(code)) == []


def test_the_switch_leaves_nothing_behind(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, dspark_log: Any
) -> None:
    monkeypatch.setenv("VLLM_DSPARK_ENABLED", "0")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    plugin.register()
    assert waiting == {}
    assert dspark_log.records == []


def test_the_switch_keeps_what_interpreted_kernels_need(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DSPARK_ENABLED", "0")
    plugin.register()
    assert list(waiting) == ["triton.runtime.interpreter"]


def test_a_typo_in_the_switch_keeps_the_plugin_off_and_says_so(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, dspark_log: Any
) -> None:
    monkeypatch.setenv("VLLM_DSPARK_ENABLED", "yes")
    plugin.register()
    assert not set(HOOKED) & set(waiting)
    (error,) = dspark_log.errors()
    assert "VLLM_DSPARK_ENABLED='yes'" in error


def test_registration_never_raises(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, dspark_log: Any
) -> None:
    def fail() -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(plugin, "_register", fail)
    plugin.register()
    plugin.register()
    assert len(dspark_log.errors()) == 1


BOUND = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins(); load_general_plugins()
import vllm.engine.arg_utils as args
import vllm.v1.worker.gpu.model_runner as runner
from vllm.v1.worker.gpu.spec_decode.dspark import speculator
names = ["init_speculator", "maybe_create_adaptive_verification_manager",
         "resolve_adaptive_cudagraph_mode", "ModelCudaGraphManager", "RejectionSampler"]
found = [getattr(runner, name) for name in names]
found += [runner.GPUModelRunner.capture_model, runner.GPUModelRunner.prepare_inputs,
          args.EngineArgs.create_engine_config]
depths = []
for bound in found:
    depth = 0
    while hasattr(bound, "dspark_original"):
        depth, bound = depth + 1, bound.dspark_original
    depths.append(depth)
import sys
print(json.dumps({"depths": depths, "native": speculator.DSparkSpeculator.__module__,
    "sessions": len(sys.modules["vllm_dspark.engine.session"]._sessions)
                if "vllm_dspark.engine.session" in sys.modules else 0,
    "engine": "vllm_dspark.engine.install" in sys.modules}))
"""


def test_loaded_by_the_host_every_hook_is_bound_once() -> None:
    found = json.loads(run_python(BOUND, VLLM_LOGGING_LEVEL="ERROR"))
    assert found["depths"] == [1] * 8
    assert found["native"] == "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
    assert found["sessions"] == 0


def test_switched_off_the_host_is_as_it_was() -> None:
    found = json.loads(run_python(BOUND, VLLM_LOGGING_LEVEL="ERROR", VLLM_DSPARK_ENABLED="0"))
    assert found["depths"] == [0] * 8
    assert not found["engine"]


# ---------------------------------------------------------------------- the operator's process


def engine_args(**options: Any) -> Any:
    """Engine arguments of the demo pair; `dspark` None leaves our options out."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    dspark = options.pop("dspark", None)
    if dspark is not None:
        options["additional_config"] = {"dspark": dspark}
    return EngineArgs(
        model=str(DEMO / "target"),
        enforce_eager=True,
        max_model_len=256,
        dtype="float32",
        **options,
    )


SPECULATIVE = {"method": "dspark", "model": str(DEMO / "draft"), "num_speculative_tokens": 7}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verfy": "static"}, ["dspark.verfy", "did you mean 'verify'"]),
        ({"verify": "fast"}, ["dspark.verify = 'fast'", "'cap-accept'"]),
        ({"budget_pin": 1.5}, ["dspark.budget_pin = 1.5", "<= 1.0"]),
        ({"strict": "true"}, ["dspark.strict = 'true'", "true or false"]),
        ({"config_file": "/nowhere/at.all"}, ["dspark.config_file = '/nowhere/at.all'"]),
    ],
)
def test_a_wrong_option_stops_the_start_up_before_a_worker(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_args(dspark=options, speculative_config=SPECULATIVE).create_engine_config()
    for word in words:
        assert word in str(caught.value)


def test_right_options_pass_through() -> None:
    options = {"verify": "compact", "metrics": False, "strict": True}
    config = engine_args(dspark=options, speculative_config=SPECULATIVE).create_engine_config()
    assert config.additional_config["dspark"] == options
    assert config.speculative_config.method == "dspark"


def test_without_dspark_our_options_are_not_even_read() -> None:
    config = engine_args(dspark={"no_such_option": 1}).create_engine_config()
    assert config.speculative_config is None


def test_strict_refuses_a_host_that_lacks_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import model_runner

    monkeypatch.delattr(model_runner, "sort_batch_req_ids")
    args = engine_args(dspark={"strict": True, "metrics": False}, speculative_config=SPECULATIVE)
    with pytest.raises(MissingHookError, match="model_runner:sort_batch_req_ids") as caught:
        args.create_engine_config()
    assert compat.describe_versions() in str(caught.value)


def test_the_operator_reads_that_the_worker_cannot_notice_us(
    monkeypatch: pytest.MonkeyPatch, dspark_log: Any
) -> None:
    """Without the hook that takes over, only the operator's process can say that nothing does."""
    from vllm.v1.worker.gpu import model_runner

    args = engine_args(dspark={"metrics": False}, speculative_config=SPECULATIVE)
    monkeypatch.delattr(model_runner, "init_speculator")
    args.create_engine_config()
    (error,) = dspark_log.errors()
    assert "model_runner:init_speculator" in error
    assert compat.describe_versions() in error


# ---------------------------------------------------------------------- the engine-args hook


def fake_host(config: Any) -> ModuleType:
    module = ModuleType("fake_arg_utils")

    class EngineArgs:
        def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
            return config, args, kwargs

    module.EngineArgs = EngineArgs  # type: ignore[attr-defined]
    return module


def test_engine_args_are_wrapped_once() -> None:
    module = fake_host(None)
    original = module.EngineArgs.create_engine_config
    plugin._wrap_engine_args(module)
    wrapped = module.EngineArgs.create_engine_config
    assert wrapped.dspark_original is original
    assert wrapped.__name__ == "create_engine_config"
    plugin._wrap_engine_args(module)
    assert module.EngineArgs.create_engine_config is wrapped


@pytest.mark.parametrize("speculative", [None, SimpleNamespace(method="eagle3")])
def test_other_methods_get_the_original_answer(speculative: Any) -> None:
    config = SimpleNamespace(speculative_config=speculative, additional_config={"dspark": 3})
    module = ModuleType("fake_arg_utils")
    module.EngineArgs = type(  # type: ignore[attr-defined]
        "EngineArgs", (), {"create_engine_config": lambda self, usage=None: config}
    )
    plugin._wrap_engine_args(module)
    assert module.EngineArgs().create_engine_config(usage=1) is config


@pytest.mark.parametrize("present", [{}, {"EngineArgs": type("EngineArgs", (), {})}])
def test_engine_args_without_the_hook_are_left_alone(present: dict[str, Any]) -> None:
    module = ModuleType("changed_arg_utils")
    vars(module).update(present)
    before = dict(vars(module))
    plugin._wrap_engine_args(module)
    assert vars(module) == before
