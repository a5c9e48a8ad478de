# SPDX-License-Identifier: Apache-2.0
"""Time by kernel from a torch profiler trace of the engine.

Durations of different kernels may overlap (streams), so that shares may add up to more than the
busy time, which counts overlapping moments once. What is neither is idle: it counts to the part
whose kernel ended it, or to "next step" at the end of a step. A trace without kernels (CPU) is
summed by operator; operators nest, so their times contain those of the operators they call.
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
_AFTERWARDS = "next step"

Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """Kernels of one step, by their start, and its first and last moment in us."""

    events: Sequence[Event]
    start: float
    end: float


@dataclass
class PartTotal:
    """A part of the step in all steps: kernels, their time, and the idle time before them."""

    calls: int = 0
    ms: float = 0.0
    idle_ms: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Totals of the steps of one kind, in ms; `by_name` has (name, calls, ms), longest first,
    `by_part` the parts of a step in its order, where steps are known.
    """

    device: bool
    kind: str
    steps: int
    span_ms: float
    busy_ms: float
    by_name: list[tuple[str, int, float]]
    by_part: dict[str, PartTotal]

    def figures(self, kernels: int = 30) -> dict[str, Any]:
        """Means per step for a result file; times in ms."""
        steps = max(1, self.steps)

        def per_step(value: float) -> float:
            return round(value / steps, 4)

        return {
            "kind": self.kind,
            "steps": self.steps,
            "step_ms": per_step(self.span_ms),
            "busy_ms": per_step(self.busy_ms),
            "parts": {
                part: {
                    "ms": per_step(total.ms),
                    "idle_ms": per_step(total.idle_ms),
                    "calls": per_step(total.calls),
                }
                for part, total in self.by_part.items()
            },
            "kernels": [
                {"name": name[:140], "ms": per_step(ms), "calls": per_step(calls)}
                for name, calls, ms in self.by_name[:kernels]
            ],
        }

    def text(self, rows: int = 40) -> str:
        """A table for people."""
        steps = max(1, self.steps)
        what = "kernel" if self.device else "operator"
        lines = [
            f"{self.steps} {self.kind} steps, {self.span_ms / steps:.3f} ms each, "
            f"{'device' if self.device else 'CPU'} busy {self.busy_ms / steps:.3f} ms "
            f"({self.busy_ms / self.span_ms:.1%})",
        ]
        if self.by_part:
            lines.append(f"{'ms/step':>9} {'share':>6} {'calls/step':>10} {'idle ms':>9}  part")
        for part, total in self.by_part.items():
            lines.append(
                f"{total.ms / steps:9.4f} {total.ms / self.span_ms:6.1%} "
                f"{total.calls / steps:10.1f} {total.idle_ms / steps:9.4f}  {part}"
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


def read_trace(path: Path) -> list[Event]:
    """Events of a Chrome trace, compressed or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def summarize(events: Iterable[Event]) -> list[Profile]:
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
    whole = Span(chosen, min(e["ts"] for e in chosen), max(e["ts"] + e["dur"] for e in chosen))
    steps = len(marks["user_annotation"])
    return [_profile("traced", [whole], steps, bool(kernels), parts=False)]


def _by_kind(kernels: list[Event], starts: Sequence[tuple[float, str]]) -> list[Profile]:
    times = [ts for ts, _ in starts]
    kinds = ["decode" if "context_0(" in name else "mixed" for _, name in starts[:-1]]
    steps: list[list[Event]] = [[] for _ in kinds]
    for event in sorted(kernels, key=lambda event: event["ts"]):
        step = bisect_right(times, event["ts"]) - 1
        if 0 <= step < len(kinds):
            steps[step].append(event)
    spans = [Span(events, times[i], times[i + 1]) for i, events in enumerate(steps)]
    profiles = []
    for kind in sorted(set(kinds)):
        same = [span for span, other in zip(spans, kinds, strict=True) if other == kind]
        profiles.append(_profile(kind, same, len(same), device=True, parts=True))
    return profiles


def _profile(kind: str, spans: list[Span], count: int, device: bool, parts: bool) -> Profile:
    events = [event for span in spans for event in span.events]
    names: dict[str, tuple[int, float]] = {}
    for event in events:
        calls, ms = names.get(event["name"], (0, 0.0))
        names[event["name"]] = (calls + 1, ms + event["dur"] / 1e3)
    by_name = sorted(((n, c, ms) for n, (c, ms) in names.items()), key=lambda row: -row[2])
    by_part = {part: PartTotal() for part in (*PARTS, _AFTERWARDS)} if parts else {}
    for span in spans if parts else ():
        _add_parts(by_part, span)
    intervals = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    busy_ms = _covered(intervals) / 1e3
    span_ms = sum(span.end - span.start for span in spans) / 1e3
    return Profile(device, kind, count, span_ms, busy_ms, by_name, by_part)


def _add_parts(totals: dict[str, PartTotal], span: Span) -> None:
    reached = span.start
    for part, event in zip(
        parts_of([event["name"] for event in span.events]), span.events, strict=True
    ):
        total = totals[part]
        total.calls += 1
        total.ms += event["dur"] / 1e3
        total.idle_ms += max(0.0, event["ts"] - reached) / 1e3
        reached = max(reached, event["ts"] + event["dur"])
    totals[_AFTERWARDS].idle_ms += max(0.0, span.end - reached) / 1e3


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals sorted by their start."""
    covered, reached = 0.0, float("-inf")
    for start, end in intervals:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
