# SPDX-License-Identifier: Apache-2.0
"""Correctness on one GPU: kernels, captured acceptance, every verify mode against the target.

    python benchmarks/h200_correctness.py [--out FILE] [--only kernels|e2e] [pytest arguments]

Runs `pytest tests/kernels tests/e2e -m gpu` (pytest's own arguments, `--commit` and `--full-matrix`
are passed on) and leaves a JSON file with what it found: `passed`,
`failed`, `skipped`, `jit_events_in_traffic` (kernels compiled while requests ran, the host's own
included), `modes` (accepted length, continuations that differ from the target's and by how much,
steps by what accepted them), `native` (the same of vLLM's own DSpark), `failures`, and the machine,
versions, commit and command of the run. The file is written after every test. The exit status is
pytest's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 560


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200_correctness.json"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="stop the tests after this")
    parser.add_argument(
        "--only", choices=("kernels", "e2e"), help="one half, with a file of its own"
    )
    options, further = parser.parse_known_args()
    folders = [f"tests/{options.only}"] if options.only else ["tests/kernels", "tests/e2e"]
    out = options.out.resolve()
    command = [sys.executable, "-m", "pytest", *folders, "-m", "gpu", "--summary", str(out)]
    try:
        done = subprocess.run([*command, *further], cwd=ROOT, timeout=options.limit_s)
    except subprocess.TimeoutExpired:
        print(f"stopped after {options.limit_s:.0f} s; {options.out} has what was found so far")
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
