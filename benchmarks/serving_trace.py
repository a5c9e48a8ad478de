# SPDX-License-Identifier: Apache-2.0
"""Time by kernel from a torch profiler trace of the engine.

Durations of different kernels may overlap (streams), so that shares may add up to more than the
busy time, which counts overlapping moments once. A trace without kernels (CPU) is summed by
operator; operators nest, so their times contain those of the operators they call.
"""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_anatomy import PARTS, parts_of

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Profile:
    """Totals of the steps of one kind, in ms; `by_name` has (name, calls, ms), longest first,
    `by_part` the same by part of the step in its order, where steps are known.
    """

    device: bool
    kind: str
    steps: int
    span_ms: float
    busy_ms: float
    by_name: list[tuple[str, int, float]]
    by_part: list[tuple[str, int, float]]

    def text(self, rows: int = 40) -> str:
        """A table for people."""
        steps = max(1, self.steps)
        what = "kernel" if self.device else "operator"
        lines = [
            f"{self.steps} {self.kind} steps, {self.span_ms / steps:.3f} ms each, "
            f"{'device' if self.device else 'CPU'} busy {self.busy_ms / steps:.3f} ms "
            f"({self.busy_ms / self.span_ms:.1%})",
        ]
        for part, calls, ms in self.by_part:
            lines.append(
                f"{ms / steps:9.4f} {ms / self.span_ms:6.1%} {calls / steps:10.1f}  {part}"
            )
        lines.append(f"{'ms/step':>9} {'share':>6} {'calls/step':>10} {'us/call':>9}  {what}")
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


def summarize(events: Iterable[dict[str, Any]]) -> list[Profile]:
    """Totals by kernel for decode steps and for steps with a prefill, whichever there are.

    A step reaches from its start on the device to that of the next one, so drafting and idle time
    count to the step before them; the last step has no end and is left out. Without kernels all
    steps are one kind.

    Raises:
        ValueError: the trace has neither kernels nor operators.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in complete if event.get("cat") in _DEVICE]
    # vLLM marks each step in the worker's thread; the device's timeline repeats the marks.
    marks = {
        category: sorted(
            (event["ts"], event["name"])
            for event in complete
            if event.get("cat") == category and event["name"].startswith("execute_")
        )
        for category in ("user_annotation", "gpu_user_annotation")
    }
    starts = marks["gpu_user_annotation"]
    if len(starts) > 1 and kernels:
        return _by_kind(kernels, starts)
    chosen = kernels or [event for event in complete if event.get("cat") == "cpu_op"]
    if not chosen:
        raise ValueError("the trace has neither kernels nor operators")
    span_us = max(event["ts"] + event["dur"] for event in chosen) - min(e["ts"] for e in chosen)
    steps = len(marks["user_annotation"])
    return [_profile("traced", [chosen], steps, span_us, bool(kernels), parts=False)]


def _by_kind(kernels: list[dict[str, Any]], starts: Sequence[tuple[float, str]]) -> list[Profile]:
    times = [ts for ts, _ in starts]
    kinds = ["decode" if "context_0(" in name else "mixed" for _, name in starts[:-1]]
    steps: list[list[dict[str, Any]]] = [[] for _ in kinds]
    for event in sorted(kernels, key=lambda event: event["ts"]):
        step = bisect_right(times, event["ts"]) - 1
        if 0 <= step < len(kinds):
            steps[step].append(event)
    profiles = []
    for kind in sorted(set(kinds)):
        same = [i for i, other in enumerate(kinds) if other == kind]
        span_us = sum(times[i + 1] - times[i] for i in same)
        found = [steps[i] for i in same]
        profiles.append(_profile(kind, found, len(same), span_us, device=True, parts=True))
    return profiles


def _profile(
    kind: str,
    steps: list[list[dict[str, Any]]],
    count: int,
    span_us: float,
    device: bool,
    parts: bool,
) -> Profile:
    names: dict[str, tuple[int, float]] = {}
    sections = dict.fromkeys(PARTS, (0, 0.0)) if parts else {}
    for events in steps:
        labels = parts_of([event["name"] for event in events]) if parts else ()
        for event in events:
            _add(names, event["name"], event)
        for label, event in zip(labels, events, strict=parts):
            _add(sections, label, event)
    by_name = sorted(((n, c, ms) for n, (c, ms) in names.items()), key=lambda row: -row[2])
    by_part = [(part, calls, ms) for part, (calls, ms) in sections.items()]
    events = [event for step in steps for event in step]
    intervals = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    busy_ms = _covered(intervals) / 1e3
    return Profile(device, kind, count, span_us / 1e3, busy_ms, by_name, by_part)


def _add(sums: dict[str, tuple[int, float]], key: str, event: dict[str, Any]) -> None:
    calls, ms = sums.get(key, (0, 0.0))
    sums[key] = (calls + 1, ms + event["dur"] / 1e3)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals sorted by their start."""
    covered, reached = 0.0, float("-inf")
    for start, end in intervals:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
