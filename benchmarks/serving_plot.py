# SPDX-License-Identifier: Apache-2.0
"""One plot per run, shape and sampling: throughput over concurrency, all systems.

Needs matplotlib (the extra `bench`). Throughput spans two decades, so the left panel shows it on
logarithmic axes, and the right one relative to the best native setting of each concurrency, where
differences of some percent can be seen. Bars mark the smallest and the largest sample.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_results import Document, Row, best_native, groups

_FIXED = re.compile(r"fixed(\d+)$")


def plot(document: Document, folder: Path, stem: str) -> list[Path]:
    """Write `{stem}_{shape}_{sampling}[_{run}].png` files; returns their paths."""
    keys = dict.fromkeys((r["run"], r["shape"], r["sampling"]) for r in document["rows"])
    several = len({key[1:] for key in keys}) < len(keys)
    paths = []
    for run, shape, sampling in keys:
        rows = [
            row
            for row in document["rows"]
            if (row["run"], row["shape"], row["sampling"]) == (run, shape, sampling)
        ]
        machine = next(r["machine"] for r in document["runs"] if r["id"] == run)
        title = f"{machine.get('name') or machine.get('cpu', '')}, shape {shape}, {sampling}"
        name = f"{stem}_{shape}_{sampling}" + (f"_{run}" if several else "")
        paths.append(_figure(rows, title, folder / f"{name}.png"))
    return paths


def _figure(rows: Sequence[Row], title: str, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), layout="constrained")
    base = _base(rows)
    variants = 0
    for system, plugin in sorted({(row["system"], bool(row["plugin"])) for row in rows}, key=_rank):
        mine = sorted((r for r in rows if r["system"] == system), key=lambda r: r["concurrency"])
        style = _style(system, plugin, variants)
        variants += plugin and system != "plugin"
        _line(left, mine, dict.fromkeys(base, 1.0), style)
        _line(right, mine, base, style)
    concurrencies = sorted({row["concurrency"] for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, [str(c) for c in concurrencies])
        axes.set_xlabel("requests in flight")
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    left.set_ylabel("output tokens per second")
    right.set_ylabel("throughput relative to the best native setting")
    right.axhline(1.0, color="black", linewidth=0.8)
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _rank(named: tuple[str, bool]) -> tuple[int, str]:
    """Order of the legend: the plugin, its variants, native settings, no speculation."""
    system, plugin = named
    return (0 if system == "plugin" else 1 if plugin else 3 if system == "none" else 2, system)


def _base(rows: Sequence[Row]) -> dict[int, float]:
    """Throughput that counts as 1, by concurrency; without a native setting the slowest."""
    base = {}
    for (*_, concurrency), members in groups(rows).items():
        slowest = min(members, key=lambda row: row["tok_s"])
        base[concurrency] = (best_native(members) or slowest)["tok_s"]
    return base


def _line(axes: Any, rows: Sequence[Row], base: dict[int, float], style: dict[str, Any]) -> None:
    x = [row["concurrency"] for row in rows]
    y = [row["tok_s"] / base[row["concurrency"]] for row in rows]
    low = [(row["tok_s"] - min(row["samples_tok_s"])) / base[row["concurrency"]] for row in rows]
    high = [(max(row["samples_tok_s"]) - row["tok_s"]) / base[row["concurrency"]] for row in rows]
    axes.errorbar(x, y, yerr=[[max(0.0, v) for v in low], [max(0.0, v) for v in high]], **style)


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
