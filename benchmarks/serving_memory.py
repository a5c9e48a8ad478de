# SPDX-License-Identifier: Apache-2.0
"""Memory in use on the GPU, as the driver counts it: contexts, weights, caches and graphs."""

import os
import subprocess

import psutil

_LIMIT_S = 30


def used_gib() -> float | None:
    """Of all processes on the first visible GPU; None without a GPU."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    rows = _query("--query-gpu=memory.used", "-i", device)
    return round(rows[0][0] / 1024, 3) if rows else None


def own_gib() -> float | None:
    """Of this process and all that it started, on all GPUs; None if the driver does not tell."""
    me = psutil.Process()
    mine = {me.pid, *(child.pid for child in me.children(recursive=True))}
    rows = _query("--query-compute-apps=pid,used_memory")
    held = [mib for pid, mib in rows if pid in mine]
    return round(sum(held) / 1024, 3) if held else None


def _query(*arguments: str) -> list[tuple[int, ...]]:
    """Rows of whole numbers that `nvidia-smi` answers; none without it or without an answer."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        return [tuple(map(int, line.split(","))) for line in output.stdout.splitlines()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
