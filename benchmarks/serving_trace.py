# SPDX-License-Identifier: Apache-2.0
"""Time by kernel from a torch profiler trace of the engine.

Durations of different kernels may overlap (streams), so that shares may add up to more than the
busy time, which counts overlapping moments once. A trace without kernels (CPU) is summed by
operator; operators nest, so their times contain those of the operators they call.
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Profile:
    """Totals of a trace, in ms; `by_name` has (name, calls, ms), longest first."""

    device: bool
    steps: int
    prefill_steps: int
    span_ms: float
    busy_ms: float
    by_name: list[tuple[str, int, float]]

    def text(self, rows: int = 40) -> str:
        """A table for people."""
        steps = max(1, self.steps)
        kind = "kernel" if self.device else "operator"
        lines = [
            f"{self.steps} steps ({self.prefill_steps} with a prefill), "
            f"{self.span_ms / steps:.3f} ms each, "
            f"{'device' if self.device else 'CPU'} busy {self.busy_ms / steps:.3f} ms "
            f"({self.busy_ms / self.span_ms:.1%})",
            f"{'ms/step':>9} {'share':>6} {'calls/step':>10} {'us/call':>9}  {kind}",
        ]
        for name, calls, ms in self.by_name[:rows]:
            lines.append(
                f"{ms / steps:9.4f} {ms / self.span_ms:6.1%} {calls / steps:10.1f} "
                f"{ms / calls * 1e3:9.2f}  {name[:140]}"
            )
        rest = self.by_name[rows:]
        if rest:
            lines.append(f"{sum(row[2] for row in rest) / steps:9.4f} in {len(rest)} others")
        return "\n".join(lines) + "\n"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace, compressed or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def summarize(events: Iterable[dict[str, Any]]) -> Profile:
    """Totals by kernel. Raises `ValueError` if the trace has neither kernels nor operators."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    chosen = [event for event in complete if event.get("cat") in _DEVICE]
    device = bool(chosen)
    chosen = chosen or [event for event in complete if event.get("cat") == "cpu_op"]
    if not chosen:
        raise ValueError("the trace has neither kernels nor operators")
    # vLLM marks each step in the worker's thread; the device's timeline repeats the marks.
    steps = [
        event["name"]
        for event in complete
        if event.get("cat") == "user_annotation" and event["name"].startswith("execute_")
    ]
    prefills = sum("context_0(" not in name for name in steps)
    sums: dict[str, tuple[int, float]] = {}
    for event in chosen:
        calls, ms = sums.get(event["name"], (0, 0.0))
        sums[event["name"]] = (calls + 1, ms + event["dur"] / 1e3)
    by_name = sorted(((n, c, ms) for n, (c, ms) in sums.items()), key=lambda row: -row[2])
    intervals = sorted((event["ts"], event["ts"] + event["dur"]) for event in chosen)
    span_ms = (max(end for _, end in intervals) - intervals[0][0]) / 1e3
    busy_ms = _covered(intervals) / 1e3
    return Profile(device, len(steps), prefills, span_ms, busy_ms, by_name)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals sorted by their start."""
    covered, reached = 0.0, float("-inf")
    for start, end in intervals:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
