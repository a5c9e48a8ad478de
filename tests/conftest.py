# SPDX-License-Identifier: Apache-2.0
"""What a run of the tests found, as a JSON file: `--summary FILE`.

The file is written after every test, so that a run that is cut short leaves what it had. Tests add
facts of their own through the fixture `facts`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest


class Summary:
    """Counts outcomes and keeps facts; writes both to `path`."""

    def __init__(self, path: Path, command: list[str], commit: str | None) -> None:
        from vllm_dspark.cli import provenance

        self._path, self._start = path, time.monotonic()
        self.facts: dict[str, Any] = {"jit_events_in_traffic": 0, "modes": {}}
        self._outcomes = {"passed": 0, "failed": 0, "skipped": 0}
        self._failures: list[str] = []
        self._header, self._save = provenance.header(command, commit), provenance.save
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        failed_aside = report.when != "call" and report.failed
        if report.when != "call" and not failed_aside and not report.skipped:
            return
        self._outcomes[report.outcome] += 1
        if report.failed:
            self._failures.append(f"{report.nodeid}: {report.longreprtext[-1500:]}")
        self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes["failed"] += 1
            self._failures.append(f"{report.nodeid}: {report.longreprtext[-1500:]}")
            self.write()

    def write(self) -> None:
        document = {
            **self._header,
            **self._outcomes,
            "seconds": round(time.monotonic() - self._start, 1),
            **self.facts,
            "failures": self._failures,
        }
        self._save(document, self._path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", metavar="FILE", help="write what the run found to FILE (JSON)")
    parser.addoption("--commit", help="commit of the tree for --summary, where there is no git")
    parser.addoption("--share", metavar="I/N", help="every N-th engine of the GPU tests, from I")
    parser.addoption(
        "--full-matrix", action="store_true", help="every verify mode in both scheduler loops"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--summary")
    if path is not None:
        given = [word for word in config.invocation_params.args if isinstance(word, str)]
        command = [word.replace(f"{config.rootpath}/", "") for word in ("pytest", *given)]
        config.pluginmanager.register(
            Summary(Path(path), command, config.getoption("--commit")), "summary"
        )


@pytest.fixture(scope="session")
def facts(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Facts of this run; they end up in the file of `--summary`, if there is one."""
    summary = pytestconfig.pluginmanager.get_plugin("summary")
    return summary.facts if summary is not None else {"jit_events_in_traffic": 0, "modes": {}}
