# SPDX-License-Identifier: Apache-2.0
"""Small charts as SVG text, without a plotting library.

A `Chart` collects series in data coordinates and lays itself out when it is rendered. Non-finite
points are left out. The text is self-contained: no script, no font and no style sheet from outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

PALETTE = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#64748b")
INK, FAINT = "#334155", "#e2e8f0"
_WIDTH, _HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 46, 44
_TICKS = 5
_LETTER = 6.2
"""Usual width of a letter at the font size of labels."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class _Series:
    kind: str
    points: Points
    label: str
    color: str
    opacity: float = 1.0
    dashed: bool = False


@dataclass
class Chart:
    """One chart.

    Args:
        title, x_label, y_label: texts.
        x_range, y_range: fixed limits; None takes them from the data (bars start at 0).
        categories: names of the bars, which then lie at x = 0, 1, 2, …
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    categories: Sequence[str] = ()
    width: int = _WIDTH
    height: int = _HEIGHT
    _series: list[_Series] = field(default_factory=list, repr=False)

    def line(
        self, x: Iterable[float], y: Iterable[float], label: str = "", *, dashed: bool = False
    ) -> Chart:
        return self._add("line", x, y, label, dashed=dashed)

    def dots(
        self, x: Iterable[float], y: Iterable[float], label: str = "", opacity: float = 0.5
    ) -> Chart:
        return self._add("dots", x, y, label, opacity=opacity)

    def bars(self, heights: Iterable[float], label: str = "") -> Chart:
        values = list(heights)
        return self._add("bars", range(len(values)), values, label)

    def reference(self, x: Iterable[float], y: Iterable[float], label: str = "") -> Chart:
        """A thin dashed line that takes no colour of the palette."""
        points = list(zip(map(float, x), map(float, y), strict=True))
        self._series.append(_Series("line", points, label, "#94a3b8", dashed=True))
        return self

    def _add(
        self,
        kind: str,
        x: Iterable[float],
        y: Iterable[float],
        label: str,
        *,
        opacity: float = 1.0,
        dashed: bool = False,
    ) -> Chart:
        points = [
            (float(a), float(b))
            for a, b in zip(x, y, strict=True)
            if math.isfinite(a) and math.isfinite(b)
        ]
        used = sum(series.color in PALETTE for series in self._series)
        color = PALETTE[used % len(PALETTE)]
        self._series.append(_Series(kind, points, label, color, opacity, dashed))
        return self

    @property
    def empty(self) -> bool:
        """Nothing to show: no point, or bars without height."""
        return not any(
            any(y for _, y in series.points) if series.kind == "bars" else series.points
            for series in self._series
        )

    def svg(self) -> str:
        """The chart as one `<svg>` element."""
        frame = _Frame(self)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{escape(self.title, quote=True)}" '
            'font-family="system-ui, sans-serif" font-size="11">',
            f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600" fill="{INK}">'
            f"{escape(self.title)}</text>",
        ]
        if self.empty:
            parts.append(_text(self.width / 2, self.height / 2, "no data", "middle"))
        else:
            parts += frame.axes()
            bars = [series for series in self._series if series.kind == "bars"]
            for series in self._series:
                parts.append(_draw(series, frame, bars))
            parts += self._legend()
        return "\n".join([*parts, "</svg>"])

    def _legend(self) -> list[str]:
        named = [series for series in self._series if series.label]
        if len(named) < 2:
            return []
        parts, x = [], float(_LEFT)
        for series in named:
            parts.append(f'<rect x="{x:.1f}" y="28" width="9" height="9" ' + _fill(series))
            parts.append(_text(x + 13, 36, series.label))
            x += 26 + _LETTER * len(series.label)
        return parts


class _Frame:
    """Pixel positions of data coordinates, and the axes."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        points = [point for series in chart._series for point in series.points]
        bars = any(series.kind == "bars" for series in chart._series)
        xs, ys = [p[0] for p in points] or [0.0], [p[1] for p in points] or [0.0]
        count = max(len(chart.categories), int(max(xs)) + 1) if bars else 0
        self.x_range = chart.x_range or ((-0.6, count - 0.4) if bars else _span(xs))
        self.y_range = chart.y_range or _span([*ys, 0.0] if bars else ys, headroom=0.08)
        self.bottom = chart.height - _BOTTOM
        self.right = chart.width - _RIGHT

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - _TOP)

    def axes(self) -> list[str]:
        chart, parts = self.chart, []
        for value in ticks(*self.y_range):
            y = self.y(value)
            parts.append(_line(_LEFT, y, self.right, y, FAINT))
            parts.append(_text(_LEFT - 6, y + 4, _number(value), "end"))
        for value, name in self._x_ticks():
            parts.append(_text(self.x(value), self.bottom + 15, name, "middle"))
        parts.append(_line(_LEFT, self.bottom, self.right, self.bottom, INK))
        parts.append(_text((_LEFT + self.right) / 2, chart.height - 8, chart.x_label, "middle"))
        middle = (_TOP + self.bottom) / 2
        turned = f'transform="rotate(-90 14 {middle:.1f})"'
        parts.append(_text(14, middle, chart.y_label, "middle", turned))
        return parts

    def _x_ticks(self) -> list[tuple[float, str]]:
        names = self.chart.categories
        if not names:
            return [(value, _number(value)) for value in ticks(*self.x_range)]
        slot = (self.right - _LEFT) / (self.x_range[1] - self.x_range[0])
        every = math.ceil((max(map(len, names)) * _LETTER + 4) / slot)
        return [(float(i), name) for i, name in enumerate(names) if i % every == 0]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about five of them."""
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _span(values: Sequence[float], headroom: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    # An axis that nearly reaches zero should show it.
    if 0.0 < low < 0.5 * high:
        low = 0.0
    return low, high + headroom * (high - low)


def _draw(series: _Series, frame: _Frame, bars: list[_Series]) -> str:
    if series.kind == "bars":
        width = 0.8 / len(bars)
        offset = -0.4 + width * bars.index(series)
        return "".join(_bar(frame, x + offset, width, y, series) for x, y in series.points)
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    if series.kind == "dots":
        style = f'r="2.2" {_fill(series)}'
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" {style}' for x, y in places)
    dashes = ' stroke-dasharray="4 3"' if series.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    stroke = f'stroke="{series.color}" stroke-width="1.6"{dashes}'
    return f'<polyline points="{path}" fill="none" {stroke}/>'


def _bar(frame: _Frame, left: float, width: float, value: float, series: _Series) -> str:
    x0, x1 = frame.x(left), frame.x(left + width)
    y0, y1 = frame.y(max(frame.y_range[0], 0.0)), frame.y(value)
    return (
        f'<rect x="{x0:.1f}" y="{min(y0, y1):.1f}" width="{max(x1 - x0 - 1, 1):.1f}" '
        f'height="{abs(y0 - y1):.1f}" {_fill(series)}'
    )


def _fill(series: _Series) -> str:
    return f'fill="{series.color}" fill-opacity="{series.opacity:g}"/>'


def _line(x0: float, y0: float, x1: float, y1: float, color: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}" {more}>'
        f"{escape(text)}</text>"
    )


def _number(value: float) -> str:
    if value and abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{round(value, 10):g}"
