# SPDX-License-Identifier: Apache-2.0
"""Result files: rows from events, merging of runs, the table and its means.

A file is `{"runs": [...], "rows": [...]}`. A row is one (run, shape, sampling, concurrency,
system); its figures are medians over the samples in `samples_tok_s`, `spread` is (largest -
smallest) / median of the throughput. Ratios are formed between rows of one run, shape, sampling and
concurrency only.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

Row = dict[str, Any]
Document = dict[str, Any]
GROUP = ("run", "shape", "sampling", "concurrency")
NOT_NATIVE = ("none",)  # and every system with `plugin` set

_MEDIANS = (
    "tok_s",
    "request_tok_s",
    "accept_len",
    "step_ms",
    "decode_step_p50_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "engine_itl_p50_ms",
    "engine_itl_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "rows_per_step",
    "scheduled_per_step",
    "accepted_per_step",
    "verified_per_step",
    "padded_per_step",
)
# Lines of the engine's log; absent ones (another version, a CPU) leave the figure out.
_LOG_FIGURES = {
    "graph_mem_gib": re.compile(r"Graph capturing finished in .* took (-?[\d.]+) GiB"),
    "kv_cache_gib": re.compile(r"Available KV cache memory: (-?[\d.]+) GiB"),
}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of one start; a last line that a killed child left unfinished is dropped."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events


def log_figures(log: Path) -> dict[str, float]:
    """Memory figures that the engine only writes to its log, in GiB."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = {name: pattern.findall(text) for name, pattern in _LOG_FIGURES.items()}
    return {name: float(values[-1]) for name, values in found.items() if values}


def make_rows(labels: Row, starts: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    """Rows of one system from the events of all its starts, by concurrency."""
    ready = [event for events in starts for event in events if event["event"] == "ready"]
    sweeps = [event for events in starts for event in events if event["event"] == "sweep"]
    rows = []
    for concurrency in sorted({event["concurrency"] for event in sweeps}):
        samples = [event for event in sweeps if event["concurrency"] == concurrency]
        rates = [event["tok_s"] for event in samples]
        memory = [event["gpu_mem_gib"] for event in sweeps if event["gpu_mem_gib"] is not None]
        rows.append(
            {
                **labels,
                "concurrency": concurrency,
                **{name: _median(event.get(name) for event in samples) for name in _MEDIANS},
                "spread": round((max(rates) - min(rates)) / median(rates), 4),
                "samples_tok_s": rates,
                "starts": len(starts),
                "verified_source": samples[-1].get("verified_source"),
                "graphs": samples[-1]["graphs"],
                "slowest_steps": samples[-1]["slowest_steps"],
                "plugin_counters": samples[-1]["plugin"],
                "start_s": _median(event["start_s"] for event in ready),
                "peak_gpu_mem_gib": max(memory, default=None),
                "kv_blocks": ready[-1]["kv_blocks"] if ready else None,
            }
        )
    return rows


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` on anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r}: expected a JSON object")
    return value


def load(path: Path) -> Document:
    """A result file. Raises `ValueError` on anything else."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not {"runs", "rows"} <= document.keys():
        raise ValueError(f"{path}: expected an object with `runs` and `rows`")
    return document


def merge(documents: Sequence[Document]) -> Document:
    """All runs and rows. Raises `ValueError` if two documents share a run."""
    runs = [run for document in documents for run in document["runs"]]
    names = [run["id"] for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"runs {', '.join(twice)} occur in more than one file")
    return {"runs": runs, "rows": [row for document in documents for row in document["rows"]]}


def is_native(row: Row) -> bool:
    """Whether the row is a speculating setting of vLLM without the plugin."""
    return not row["plugin"] and row["system"] not in NOT_NATIVE


def groups(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that may be compared with each other."""
    result: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        result.setdefault(tuple(row[key] for key in GROUP), []).append(row)
    return result


def best_native(rows: Iterable[Row]) -> Row | None:
    """The fastest native setting among comparable rows."""
    return max(filter(is_native, rows), key=lambda row: row["tok_s"], default=None)


def ratios(rows: Iterable[Row], against: str) -> dict[tuple[Any, ...], dict[int, float]]:
    """Throughput of every system over that of `against` (`best` or a system), by
    (run, shape, sampling, system) and concurrency."""
    result: dict[tuple[Any, ...], dict[int, float]] = {}
    for (run, shape, sampling, concurrency), members in groups(rows).items():
        named = (row for row in members if row["system"] == against)
        base = best_native(members) if against == "best" else next(named, None)
        if base is None:
            continue
        for row in members:
            cells = result.setdefault((run, shape, sampling, row["system"]), {})
            cells[concurrency] = row["tok_s"] / base["tok_s"]
    return result


def table(document: Document) -> str:
    """The runs in text: one line per row, then ratios and their geometric means per system."""
    lines = []
    for (run, shape, sampling, concurrency), members in sorted(groups(document["rows"]).items()):
        best = best_native(members)
        lines += [f"\n{run}  shape {shape}  {sampling}  c = {concurrency}", _HEADER]
        lines += [_line(row, best) for row in members]
    for against in ("best", "adaptive", "none"):
        title = "the best native setting" if against == "best" else against
        means = [
            f"  {' '.join(map(str, key)):44}{geometric_mean(cells.values()):7.3f}  ("
            + ", ".join(f"{c}: {value:.3f}" for c, value in sorted(cells.items()))
            + ")"
            for key, cells in ratios(document["rows"], against).items()
        ]
        if means:
            lines += [f"\nThroughput over {title}, geometric mean over c:", *means]
    return "\n".join(lines).lstrip("\n")


_COLUMNS = (
    ("tok_s", 9, 0),
    ("spread", 7, 3),
    ("accept_len", 11, 2),
    ("step_ms", 9, 2),
    ("verified_per_step", 9, 1),
    ("itl_p50_ms", 9, 2),
    ("itl_p99_ms", 9, 2),
    ("tpot_p50_ms", 9, 3),
    ("tpot_p99_ms", 9, 3),
    ("start_s", 8, 0),
    ("peak_gpu_mem_gib", 8, 2),
)
_SHORT = {
    "accept_len": "accept",
    "verified_per_step": "verified",
    "itl_p50_ms": "itl p50",
    "itl_p99_ms": "itl p99",
    "tpot_p50_ms": "tpot p50",
    "tpot_p99_ms": "tpot p99",
    "peak_gpu_mem_gib": "GiB",
}
_TITLES = "".join(f"{_SHORT.get(name, name):>{width}}" for name, width, _ in _COLUMNS)
_HEADER = f"{'system':28}{_TITLES}   /best"


def _line(row: Row, best: Row | None) -> str:
    cells = [
        f"{'-':>{width}}" if row[name] is None else f"{row[name]:>{width}.{digits}f}"
        for name, width, digits in _COLUMNS
    ]
    ratio = f"{row['tok_s'] / best['tok_s']:8.3f}" if best else f"{'-':>8}"
    return f"{row['system'][:27]:28}{''.join(cells)}{ratio}"
