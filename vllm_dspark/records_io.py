# SPDX-License-Identifier: Apache-2.0
"""Files of step records: JSONL and Parquet, written whole and validated when read.

JSONL: the first line is the header `{"format", "version", "meta"}`, then one record a line; null
stands for NaN. Parquet (needs pyarrow): one row per record, the header in the schema's metadata.
A file is replaced in one piece, so a reader never sees half of it; nothing is unpickled.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.records import StepRecord

FORMAT = "vllm-dspark-records"
VERSION = 1


class RecordError(ValueError):
    """A record file that cannot be used; the message names the file and the line."""


class MissingParquetError(ImportError):
    """Parquet was asked for and pyarrow is not installed."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path}: Parquet needs pyarrow, which is not installed; "
            "use `pip install vllm-dspark[parquet]` or a path that ends in .jsonl"
        )


@dataclass(frozen=True)
class RecordFile:
    """Records of one engine in step order; `meta` says what they belong to (gamma, model, …)."""

    meta: dict[str, Any]
    records: list[StepRecord] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)


_ARRAYS = {
    "scheduled": 1,
    "verify_lens": 1,
    "accepted": 1,
    "regimes": 1,
    "survivals": 2,
    "confidence": 2,
}
_INTS = ("step", "num_reqs", "num_sampling", "base_tokens", "budget", "lag_steps", "tier_tokens")
_TIMES = ("predicted_ms", "measured_ms", "sync_ms")
_OPTIONAL = {*_ARRAYS, "request_ids", *_TIMES} - {"scheduled"}
_NAMES = tuple(f.name for f in fields(StepRecord))


def save_records(path: str, records: Sequence[StepRecord], meta: Mapping[str, Any]) -> None:
    """Write records and header; replaces the file in one piece.

    Errors: `ValueError` for the file name, `MissingParquetError`, `OSError`.
    """
    header = {"format": FORMAT, "version": VERSION, "meta": dict(meta)}
    temporary = f"{path}.{os.getpid()}.part"
    try:
        if _is_parquet(path):
            _write_parquet(path, temporary, header, [_to_json(record) for record in records])
        else:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(json.dumps(header) + "\n")
                for record in records:
                    file.write(json.dumps(_to_json(record), allow_nan=False) + "\n")
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def load_records(path: str) -> RecordFile:
    """Read and validate a file that `dump` wrote.

    Errors: `FileNotFoundError`; `RecordError` for an empty or truncated file, another format or
    version, and a missing, unknown or wrong field; `MissingParquetError`.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such record file")
    if _is_parquet(path):
        header, rows = _read_parquet(path)
        where = "row"
    else:
        header, rows = _read_jsonl(path)
        where = "line"
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordError(f"{path}: not a record file (its header does not say {FORMAT!r})")
    if header.get("version") != VERSION:
        raise RecordError(f"{path}: version {header.get('version')!r}; readable: {VERSION}")
    if not rows:
        raise RecordError(f"{path}: holds no records; was a request served while they were on?")
    first = 1 if where == "row" else 2
    records = [
        _from_json(row, f"{path}, {where} {number}") for number, row in enumerate(rows, first)
    ]
    return RecordFile(dict(header.get("meta") or {}), records)


# -- one record as JSON ------------------------------------------------------------------------


def _number(value: float | None) -> float | None:
    """JSON has no NaN; it is written as null."""
    return None if value is None or not math.isfinite(value) else float(value)


def _probability_lists(values: npt.NDArray[np.floating]) -> list[list[float | None]]:
    """Rows rounded to five digits, far below what a calibration can resolve."""
    rows: list[list[float | None]] = np.round(values.astype(np.float64), 5).tolist()
    if not np.isfinite(values).all():
        rows = [[_number(value) for value in row] for row in rows]
    return rows


def _to_json(record: StepRecord) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in _NAMES:
        value = getattr(record, name)
        if value is not None and _ARRAYS.get(name) == 2:
            value = _probability_lists(value)
        elif name in _ARRAYS and value is not None:
            value = np.asarray(value).tolist()
        elif name in _TIMES or name == "time_s":
            value = _number(value)
        elif name in _INTS:
            value = int(value)
        row[name] = value
    return row


def _from_json(row: Any, where: str) -> StepRecord:
    if not isinstance(row, dict):
        raise RecordError(f"{where}: expected an object, found {type(row).__name__}")
    missing = [n for n in _NAMES if n not in row and n not in _OPTIONAL]
    unknown = sorted(set(row) - set(_NAMES))
    if missing:
        raise RecordError(f"{where}: field {missing[0]!r} is missing")
    if unknown:
        raise RecordError(f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(_NAMES)}")
    values: dict[str, Any] = {name: row.get(name) for name in _NAMES}
    for name in _INTS:
        if type(values[name]) is not int:
            raise RecordError(f"{where}: {name} is {values[name]!r}; allowed: an integer")
    for name in ("mode", "reason"):
        if not isinstance(values[name], str):
            raise RecordError(f"{where}: {name} is {values[name]!r}; allowed: a string")
    for name in ("time_s", *_TIMES):
        value = values[name]
        if type(value) not in (int, float) and not (name in _OPTIONAL and value is None):
            raise RecordError(f"{where}: {name} is {value!r}; allowed: a number")
    for name, dimensions in _ARRAYS.items():
        if values[name] is not None or name not in _OPTIONAL:
            values[name] = _array(values[name], name, dimensions, values["num_sampling"], where)
    return StepRecord(**values)


def _array(value: Any, name: str, dimensions: int, rows: int, where: str) -> npt.NDArray[Any]:
    dtype = np.int32 if dimensions == 1 else np.float64
    try:
        array = np.array(value, dtype=np.float64)  # null becomes NaN
    except (TypeError, ValueError):
        array = np.empty(0)
    if rows == 0 and array.size == 0:
        return np.zeros((0,) * dimensions, dtype=dtype)
    if array.ndim != dimensions or len(array) != rows:
        raise RecordError(
            f"{where}: {name} must be a list of {rows} "
            + ("integers" if dimensions == 1 else "equally long lists of numbers")
            + " (num_sampling)"
        )
    if dimensions == 1 and not (array == np.floor(array)).all():
        raise RecordError(f"{where}: {name} holds something that is not an integer")
    return array.astype(dtype)


# -- files -------------------------------------------------------------------------------------


def _is_parquet(path: str) -> bool:
    suffix = os.path.splitext(path)[1]
    if suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: the name ends in {suffix!r}; allowed: .jsonl, .parquet")
    return suffix == ".parquet"


def _read_jsonl(path: str) -> tuple[Any, list[Any]]:
    rows: list[Any] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                cut = "" if line.endswith("\n") else "; the file looks truncated"
                raise RecordError(f"{path}, line {number}: not JSON ({error.msg}){cut}") from None
    if not rows:
        raise RecordError(f"{path}: the file is empty")
    return rows[0], rows[1:]


def _pyarrow(path: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingParquetError(path) from None
    return pyarrow, pyarrow.parquet


def _write_parquet(
    path: str, temporary: str, header: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    pa, parquet = _pyarrow(path)
    types = dict.fromkeys(_INTS, pa.int64()) | dict.fromkeys(("time_s", *_TIMES), pa.float64())
    types |= dict.fromkeys(("mode", "reason"), pa.string())
    types["request_ids"] = pa.list_(pa.string())
    flat, nested = pa.list_(pa.int32()), pa.list_(pa.list_(pa.float64()))
    types |= {name: flat if dimensions == 1 else nested for name, dimensions in _ARRAYS.items()}
    schema = pa.schema([(name, types[name]) for name in _NAMES])
    schema = schema.with_metadata({FORMAT: json.dumps(header)})
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)


def _read_parquet(path: str) -> tuple[Any, list[Any]]:
    pa, parquet = _pyarrow(path)
    try:
        table = parquet.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise RecordError(f"{path}: not a readable Parquet file ({error})") from None
    text = (table.schema.metadata or {}).get(FORMAT.encode(), b"null")
    return json.loads(text), table.to_pylist()
