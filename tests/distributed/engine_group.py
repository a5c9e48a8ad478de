# SPDX-License-Identifier: Apache-2.0
"""A real server with two tensor-parallel ranks on a CPU that can be disturbed and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_faults

from vllm_dspark.cli import demo
from vllm_dspark.cli.server import Server

WORLD = 2
# Each rank computes on its own core; one thread more and they steal from each other.
CORES = "0|1"
MAX_NUM_SEQS = 8


@dataclass
class Disturbed:
    """Folder of one server: the fault of the moment, and the traces."""

    folder: Path

    @property
    def fault_file(self) -> Path:
        return self.folder / "fault.json"

    def set_fault(self, fault: Mapping[str, Any] | None) -> None:
        """Disturb from the next step on; None leaves the ranks alone."""
        if fault is None:
            self.fault_file.unlink(missing_ok=True)
            return
        written = self.fault_file.with_suffix(".new")
        written.write_text(json.dumps(fault))
        written.rename(self.fault_file)

    def environment(self, alternate: int = 0) -> dict[str, str]:
        """What the server's processes need to find the plugin and its files."""
        info = self.folder / "plugin" / "dspark_test_faults-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: dspark-test-faults\nVersion: 0\n"
        )
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\ndspark_test_faults = engine_faults:register\n"
        )
        traces = self.folder / "traces"
        traces.mkdir(exist_ok=True)
        paths = [str(info.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            engine_faults.FAULT_FILE: str(self.fault_file),
            engine_faults.TRACE_FOLDER: str(traces),
            engine_faults.ALTERNATE: str(alternate),
            "VLLM_CPU_OMP_THREADS_BIND": CORES,
        }

    def steps(self) -> list[dict[int, dict[str, Any]]]:
        """What each rank did, by step; one list entry per rank."""
        ranks = []
        for rank in range(WORLD):
            files = list((self.folder / "traces").glob(f"rank{rank}-*.jsonl"))
            lines = [line for file in files for line in file.read_text().splitlines()]
            # The last line of a server that was killed may be cut off.
            steps = [json.loads(line) for line in lines if line.endswith("}")]
            ranks.append({step["step"]: step for step in steps})
        return ranks

    def divergences(self, since: int = 0) -> tuple[int, int]:
        """Steps that differ between the ranks from step `since` on, and steps compared."""
        one, other = self.steps()
        common = [step for step in one.keys() & other.keys() if step >= since]
        fields = ("budget", "tokens", "graph", "lens", "drafts")
        differing = sum(any(one[s][f] != other[s][f] for f in fields) for s in common)
        return differing, len(common)

    def last_step(self) -> int:
        """Latest step that rank 0 has traced, -1 before the first."""
        return max(self.steps()[0], default=-1)


def server(
    disturbed: Disturbed,
    dspark: Mapping[str, Any],
    *,
    overlap: bool,
    log: Path,
    alternate: int = 0,
) -> Server:
    """A server with the demo pair.

    Args:
        overlap: asynchronous scheduling.
        alternate: steps with and without sync in turn, see `engine_faults`; 0 for always.
    """
    scheduling = "--async-scheduling" if overlap else "--no-async-scheduling"
    options = demo.pair_options(
        dspark=dspark,
        max_num_seqs=MAX_NUM_SEQS,
        extra=("--tensor-parallel-size", str(WORLD), scheduling),
    )
    return Server(options, log, on_gpu=False, environment=disturbed.environment(alternate))
