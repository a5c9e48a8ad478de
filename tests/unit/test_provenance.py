# SPDX-License-Identifier: Apache-2.0
"""The header of result files."""

import subprocess
from typing import Any

import pytest

from vllm_dspark import __version__
from vllm_dspark.cli import provenance


def test_recorded_commands_hold_no_folders_of_the_machine() -> None:
    words = ["python", "benchmarks/serving.py", "--systems", "plugin:{}", "-o", "/home/me/x.json"]
    found = provenance.command_line(words)
    assert found == "python benchmarks/serving.py --systems 'plugin:{}' -o x.json"


def test_header_says_what_ran_where() -> None:
    found = provenance.header(["python", "x.py"], "abc")
    assert found.keys() == {"machine", "versions", "commit", "command"}
    assert found["commit"] == "abc"
    assert found["versions"]["vllm-dspark"] == __version__
    assert found["machine"]["cores"] >= 1


def test_gpus_are_named_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVIDIA H200, 580.1, 143771 MiB\n"

    def answer(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, line * 2)

    monkeypatch.setattr(subprocess, "run", answer)
    found = provenance.machine()
    assert (found["gpu"], found["driver"], found["gpus"]) == ("NVIDIA H200", "580.1", 2)


def test_no_gpu_and_no_git_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert "gpu" not in provenance.machine()
    assert provenance.commit() is None
