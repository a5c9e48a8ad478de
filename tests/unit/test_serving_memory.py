# SPDX-License-Identifier: Apache-2.0
"""GPU memory in the serving benchmark, with a stand-in for `nvidia-smi`."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from serving_memory import own_gib, used_gib

Answer = Callable[[str], None]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Sets what `nvidia-smi` writes; it keeps its arguments in `asked`."""

    def set_output(text: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat <<END\n{text}\nEND\n')
        tool.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return set_output


def test_memory_of_the_first_visible_gpu(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    answer("5120")
    assert used_gib() == 5.0
    assert "-i 1" in (tmp_path / "asked").read_text()


def test_own_memory_is_that_of_all_processes_that_were_started(answer: Answer) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        answer(f"{child.pid}, 2048\n1, 4096\n{os.getpid()}, 512")
        assert own_gib() == 2.5
        answer("1, 4096")
        assert own_gib() is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("text", ["", "[N/A]", "No devices were found"])
def test_without_an_answer_there_is_no_figure(answer: Answer, text: str) -> None:
    answer(text)
    assert own_gib() is None and used_gib() is None
