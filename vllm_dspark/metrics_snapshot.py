# SPDX-License-Identifier: Apache-2.0
"""Values of many series at one moment, and the questions that reports and alarms ask of them.

A `Snapshot` maps a `Series` (sample name and sorted labels) to its value, whatever it was read
from: a `MetricsWriter`, the files of a running server, or the text of `/metrics`. All functions
are pure; histograms are cumulative as Prometheus exports them.
"""

from collections.abc import Iterable
from typing import NamedTuple

PREFIX = "vllm:dspark_"
"""Of every series of the plugin."""

GAUGE_SAMPLES = frozenset({PREFIX + "budget_tokens"})


class Series(NamedTuple):
    """One exported series; `str()` gives its Prometheus text form."""

    name: str
    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, labels: Iterable[tuple[str, str]] = ()) -> "Series":
        return cls(name, tuple(sorted(labels)))

    def __str__(self) -> str:
        if not self.labels:
            return self.name
        inner = ",".join(f'{key}="{value}"' for key, value in self.labels)
        return f"{self.name}{{{inner}}}"


Snapshot = dict[Series, float]


def total(snapshot: Snapshot, name: str, **labels: str) -> float:
    """Sum of the series called `name` whose labels include `labels`; 0.0 if there are none."""
    wanted = set(labels.items())
    return sum(
        value
        for series, value in snapshot.items()
        if series.name == name and wanted.issubset(series.labels)
    )


def by_label(snapshot: Snapshot, name: str, label: str, **labels: str) -> dict[str, float]:
    """Like `total`, split by the values of `label`."""
    wanted = set(labels.items())
    sums: dict[str, float] = {}
    for series, value in snapshot.items():
        if series.name == name and wanted.issubset(series.labels):
            for key, text in series.labels:
                if key == label:
                    sums[text] = sums.get(text, 0.0) + value
    return sums


def difference(new: Snapshot, old: Snapshot) -> Snapshot:
    """What was added from `old` to `new`. Gauges keep the new value; a counter that fell (the
    process was restarted) counts from zero."""
    result: Snapshot = {}
    for series, value in new.items():
        before = 0.0 if series.name in GAUGE_SAMPLES else old.get(series, 0.0)
        result[series] = value - before if value >= before else value
    return result


def calibration_errors(snapshot: Snapshot) -> dict[int, float]:
    """Expected calibration error of the predicted survival, by position (from 0).

    Mean over verified drafts of |predicted - observed| taken per bin; positions without a
    verified draft are absent. Biased upwards when few drafts fall into a bin.
    """
    cells: dict[tuple[int, str], dict[str, float]] = {}
    prefix = PREFIX + "reliability_"
    for series, value in snapshot.items():
        if series.name.startswith(prefix):
            tags = dict(series.labels)
            cell = cells.setdefault((int(tags["position"]), tags["bin"]), {})
            part = series.name.removeprefix(prefix)
            cell[part] = cell.get(part, 0.0) + value
    gaps: dict[int, float] = {}
    drafts: dict[int, float] = {}
    for (position, _), cell in cells.items():
        gap = abs(cell.get("predicted_total", 0.0) - cell.get("observed_total", 0.0))
        gaps[position] = gaps.get(position, 0.0) + gap
        drafts[position] = drafts.get(position, 0.0) + cell.get("drafts_total", 0.0)
    return {p: gaps[p] / drafts[p] for p in sorted(gaps) if drafts[p] > 0}


def parse_exposition(text: str) -> Snapshot:
    """The plugin's series from the text of `/metrics`.

    Errors: `ValueError` if the text is not in the Prometheus format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return {
            Series.of(sample.name, sample.labels.items()): float(sample.value)
            for family in text_string_to_metric_families(text)
            if family.name.startswith(PREFIX)
            for sample in family.samples
        }
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"not a Prometheus text page: {error}") from error


def format_exposition(snapshot: Snapshot) -> str:
    """One `series value` line per series, sorted; for people and logs."""
    return "".join(f"{series} {value:g}\n" for series, value in sorted(snapshot.items()))
