# SPDX-License-Identifier: Apache-2.0
"""One plot per shape and sampling: throughput over concurrency, all systems of all runs.

Needs matplotlib (the extra `bench`). Throughput spans two decades, so the left panel shows it on
logarithmic axes, and the right one relative to the plugin, where differences of some percent can be
seen. Ratios are formed inside a run; systems that several runs hold are drawn once, at the
geometric mean of their runs. Bars mark the smallest and the largest sample.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from serving_results import Document, Row, best_native, groups

_FIXED = re.compile(r"fixed(\d+)$")


@dataclass
class Point:
    """A system at one concurrency: throughput of each run, and of each sample."""

    runs: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)

    def add(self, row: Row, base: float) -> None:
        self.runs.append(row["tok_s"] / base)
        self.samples += [sample / base for sample in row["samples_tok_s"]]


Line = dict[int, Point]
"""Points of a system by concurrency."""


def plot(document: Document, folder: Path, stem: str) -> list[Path]:
    """Write `{stem}_{shape}_{sampling}.png` files; returns their paths."""
    paths = []
    for shape, sampling in dict.fromkeys((r["shape"], r["sampling"]) for r in document["rows"]):
        rows = [r for r in document["rows"] if (r["shape"], r["sampling"]) == (shape, sampling)]
        machines = [r["machine"] for r in document["runs"] if r["id"] in {x["run"] for x in rows}]
        names = {m.get("gpu") or m.get("name") or m.get("cpu", "") for m in machines}
        title = f"{', '.join(sorted(names))}, shape {shape}, {sampling}"
        paths.append(_figure(rows, title, folder / f"{stem}_{shape}_{sampling}.png"))
    return paths


def _figure(rows: Sequence[Row], title: str, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), layout="constrained")
    absolute, relative, against = lines(rows)
    variants = 0
    for system, plugin in sorted({(row["system"], bool(row["plugin"])) for row in rows}, key=_rank):
        style = _style(system, plugin, variants)
        variants += plugin and system != "plugin"
        _draw(left, absolute[system], style)
        _draw(right, relative.get(system, {}), style)
    concurrencies = sorted({row["concurrency"] for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, [str(c) for c in concurrencies])
        axes.set_xlabel("requests in flight")
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    left.set_ylabel("output tokens per second")
    right.set_ylabel(f"throughput relative to {against} of the same run")
    right.axhline(1.0, color="black", linewidth=0.8)
    handles, labels = left.get_legend_handles_labels()
    right.legend(handles, labels, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def lines(rows: Sequence[Row]) -> tuple[dict[str, Line], dict[str, Line], str]:
    """Lines of all systems, absolute and relative, and what the latter are relative to: the plugin
    in runs that hold it, and if none does, the best native setting (the slowest system if no run
    has one).
    """
    absolute: dict[str, Line] = {}
    relative: dict[str, Line] = {}
    has_plugin = any(row["system"] == "plugin" for row in rows)
    has_native = any(best_native(members) for members in groups(rows).values())
    for (*_, concurrency), members in groups(rows).items():
        plugin = next((row for row in members if row["system"] == "plugin"), None)
        native = best_native(members) or min(members, key=lambda row: row["tok_s"])
        base = plugin if has_plugin else native
        for row in members:
            _point(absolute, row["system"], concurrency).add(row, 1.0)
            if base is not None:
                _point(relative, row["system"], concurrency).add(row, base["tok_s"])
    otherwise = "the best native setting" if has_native else "the slowest system"
    return absolute, relative, "the plugin" if has_plugin else otherwise


def _point(found: dict[str, Line], system: str, concurrency: int) -> Point:
    return found.setdefault(system, {}).setdefault(concurrency, Point())


def _rank(named: tuple[str, bool]) -> tuple[int, str]:
    """Order of the legend: the plugin, its variants, native settings, no speculation."""
    system, plugin = named
    return (0 if system == "plugin" else 1 if plugin else 3 if system == "none" else 2, system)


def _draw(axes: Any, line: Line, style: dict[str, Any]) -> None:
    points = sorted(line.items())
    y = [geometric_mean(point.runs) for _, point in points]
    spread = [
        [max(0.0, mean - min(p.samples)) for mean, (_, p) in zip(y, points, strict=True)],
        [max(0.0, max(p.samples) - mean) for mean, (_, p) in zip(y, points, strict=True)],
    ]
    axes.errorbar([concurrency for concurrency, _ in points], y, yerr=spread, **style)


def _style(system: str, plugin: bool, variant: int) -> dict[str, Any]:
    """Fixed lengths share one colour scale; the plugin stands out."""
    from matplotlib import colormaps

    style: dict[str, Any] = {"label": system[:40], "capsize": 2, "markersize": 5, "linewidth": 1.3}
    if plugin:
        color = "crimson" if system == "plugin" else colormaps["RdPu"](0.65 - 0.1 * (variant % 4))
        return {**style, "color": color, "marker": "o", "linewidth": 2.6, "zorder": 5}
    if fixed := _FIXED.match(system):
        k = int(fixed[1])
        marker = "v^<>spP"[(k - 1) % 7]
        return {**style, "color": colormaps["viridis"](min(0.9, (k - 1) / 7)), "marker": marker}
    known = {
        "none": ("black", "x"),
        "schedule": ("royalblue", "*"),
        "adaptive": ("darkorange", "D"),
    }
    color, marker = known.get(system, ("grey", "|"))
    return {**style, "color": color, "marker": marker, "linestyle": "--", "linewidth": 1.8}
