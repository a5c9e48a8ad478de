# SPDX-License-Identifier: Apache-2.0
"""Environment of the tests that import the host (vLLM), and what stands in for a GPU in them."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# Before vLLM and Triton are imported: interpreted kernels and the V2 model runner.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import draft_harness as harness
import pytest
import torch
from hypothesis import HealthCheck, settings
from runner_stand_in import Recorder, runner_module
from stand_ins import StandInEvent, StandInStream

from vllm_dspark import compat
from vllm_dspark.engine import session

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

# Derandomised, so that a failure in CI is a failure everywhere. Interpreted kernels are slow.
settings.register_profile(
    "host",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def errors(self) -> list[str]:
        """Messages of level ERROR and above."""
        return [r.getMessage() for r in self.records if r.levelno >= logging.ERROR]


@pytest.fixture
def dspark_log() -> Iterator[_Records]:
    """Everything that the plugin logs. The host's logger does not propagate, so caplog is blind."""
    handler = _Records()
    logger = logging.getLogger("vllm.dspark")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def host() -> Recorder:
    """What reaches the host's own code from `runner`."""
    return Recorder()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, host: Recorder) -> ModuleType:
    """An unbound copy of the runner module, which `import` finds while the test runs."""
    monkeypatch.setattr(session, "_sessions", {})
    copied = runner_module(host)
    monkeypatch.setitem(sys.modules, compat.RUNNER, copied)
    return copied


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the tiny random target; read only."""
    directory = tmp_path_factory.mktemp("target")
    return harness.write_checkpoint(directory, harness.target_config(), harness.target_weights())


@pytest.fixture
def cuda_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda` streams and events for code that runs on CPU tensors here."""
    monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: StandInStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
