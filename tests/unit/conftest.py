# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the policy tests, and the strength of the property tests."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from vllm_dspark import metrics_export
from vllm_dspark.core.trace import Trace, parse_trace

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

# Derandomised, so that a failure in CI is a failure everywhere. Every property test runs
# `oracles.CASES` cases per example: 4,000 cases in all, without the generator's cost for each.
settings.register_profile(
    "policy",
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("policy")


@pytest.fixture(scope="session")
def demo_trace() -> Trace:
    """The recorded greedy blocks of the demo pair."""
    path = Path(__file__).parents[2] / "demo" / "trace.jsonl"
    with path.open() as lines:
        return parse_trace(lines)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host tests of the same run interpret kernels; here nothing may depend on that."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def no_metrics_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the operator nor an earlier test has chosen where counters are published."""
    for name in (metrics_export.DIRECTORY_ENV, metrics_export.MULTIPROC_ENV):
        monkeypatch.setenv(name, "")  # so that whatever a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(metrics_export, "_made", None)
