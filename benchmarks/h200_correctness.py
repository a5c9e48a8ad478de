# SPDX-License-Identifier: Apache-2.0
"""Correctness on one GPU: kernels, captured acceptance, every verify mode against the target.

    python benchmarks/h200_correctness.py [--out FILE] [--gpus N [N ...]] [--shares N]
        [pytest arguments]

Runs `pytest tests/kernels tests/e2e -m gpu` in parts, side by side on one GPU or shared out among
several (every engine still has one), and leaves a JSON file with what they found: `passed`,
`failed`, `skipped`, `jit_events_in_traffic` (kernels compiled while requests ran, the host's own
included), `modes` (accepted length, continuations that differ from the target's and by how much,
steps by what accepted them), `acceptance_spread` of the modes, `native` (the same of vLLM's own
DSpark), `failures`, and the machine, versions, commit and commands of the run. Each part's own file
is written after every test, so that a run which is cut short keeps what it had. The exit status is
zero if every part ran to its end, nothing failed and all modes accept alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.cli.provenance import save

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 560
SHARES = 4
"""Processes per GPU that share the engines; each holds one at a time, of a few GiB."""
NATIVE = "tests/e2e/test_gpu_modes.py::test_native_dspark_beside_ours"
ACCEPTANCE = "tests/e2e/test_gpu_modes.py::test_acceptance_is_the_same_in_every_loop"
"""Compares all modes with each other, so it is done on what all shares have found."""
SAME_ACCEPTANCE = 0.02
COUNTS = ("passed", "failed", "skipped", "jit_events_in_traffic")


@dataclass(frozen=True)
class Part:
    """One run of pytest; on the GPU of that number, None for whichever CUDA takes."""

    tests: list[str]
    gpu: int | None = None

    def start(self, summary: Path, further: list[str]) -> subprocess.Popen[bytes]:
        place = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}
        command = [sys.executable, "-m", "pytest", *self.tests, "-m", "gpu", *further]
        return subprocess.Popen(
            [*command, "--summary", str(summary)], cwd=ROOT, env={**os.environ, **place}
        )


def parts(gpus: Sequence[int] | None = None, shares: int = SHARES) -> dict[str, Part]:
    """Parts by name: the kernels, and the engines in `shares` per GPU."""
    places = list(gpus or [None])
    every = shares * len(places)
    found = {"kernels": Part(["tests/kernels"], places[-1])}
    for share in range(every):
        tests = ["tests/e2e", "--share", f"{share}/{every}", "--deselect", ACCEPTANCE]
        # The last share has no more cases than any other.
        tests += ["--deselect", NATIVE] if share < every - 1 else []
        found[f"engines {share + 1} of {every}"] = Part(tests, places[share % len(places)])
    return found


def merge(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One document of the parts' documents."""
    first = next(iter(found.values()))
    merged: dict[str, Any] = {name: first[name] for name in ("machine", "versions", "commit")}
    merged["command"] = [part["command"] for part in found.values()]
    merged |= {name: sum(part[name] for part in found.values()) for name in COUNTS}
    merged["seconds"] = max(part["seconds"] for part in found.values())
    merged["modes"] = {
        mode: notes for part in found.values() for mode, notes in part["modes"].items()
    }
    merged["acceptance_spread"] = acceptance_spread(merged["modes"])
    merged["native"] = next((part["native"] for part in found.values() if "native" in part), None)
    merged["failures"] = [failure for part in found.values() for failure in part["failures"]]
    return merged


def acceptance_spread(modes: dict[str, dict[str, Any]]) -> float | None:
    """How much more the best mode accepts than the worst, of those that draft the same blocks; None
    if fewer than two did.
    """
    lengths = [
        notes["accept_len"]
        for notes in modes.values()
        if notes["same_drafts"] and notes["accept_len"] is not None
    ]
    return round(max(lengths) / min(lengths) - 1, 4) if len(lengths) > 1 else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200_correctness.json"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="stop the tests after this")
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="share out among these")
    parser.add_argument(
        "--shares", type=int, default=SHARES, metavar="N", help="engines at a time per GPU"
    )
    options, further = parser.parse_known_args()
    planned = parts(options.gpus, options.shares)
    deadline = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.json" for name in planned}
        running = {name: part.start(files[name], further) for name, part in planned.items()}
        failed = False
        for name, process in running.items():
            try:
                failed |= process.wait(max(deadline - time.monotonic(), 0)) != 0
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                failed = True
                print(f"{name}: stopped after {options.limit_s:.0f} s")
        found = {n: json.loads(file.read_text()) for n, file in files.items() if file.exists()}
    for name in files.keys() - found.keys():
        print(f"{name}: found nothing")
    if not found:
        return 1
    merged = merge(found)
    save(merged, options.out)
    spread = merged["acceptance_spread"]
    if spread is None or spread > SAME_ACCEPTANCE:
        print(f"accepted lengths differ by {spread}, not by at most {SAME_ACCEPTANCE}")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
