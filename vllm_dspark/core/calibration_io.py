# SPDX-License-Identifier: Apache-2.0
"""Calibration files: our JSON, and the STS tables of SGLang and TensorRT-LLM.

Ours: `{"format": "vllm-dspark-calibration", "gamma": 7, "regimes": {"greedy/T<=0": {"scale": [...],
"bias": [...]}}}`, regimes left out are identities. An STS table is an object with one list under
`temperatures` or `sts_temperatures`. Everything is validated; an error names the field.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dspark.core.arrays import FloatArray
from vllm_dspark.core.calibration import REGIME_NAMES, CalibrationTable
from vllm_dspark.core.json_fields import json_object

FORMAT = "vllm-dspark-calibration"
STS_KEYS = ("temperatures", "sts_temperatures")


def calibration_to_dict(table: CalibrationTable) -> dict[str, Any]:
    """JSON form, regimes that change nothing left out."""
    regimes = {
        REGIME_NAMES[regime]: {
            "scale": [float(x) for x in table.scale[regime]],
            "bias": [float(x) for x in table.bias[regime]],
        }
        for regime in table.changed
    }
    return {
        "format": FORMAT,
        "gamma": table.gamma,
        "version": table.version,
        "regimes": regimes,
    }


def calibration_from_dict(data: Mapping[str, Any], gamma: int) -> CalibrationTable:
    """Read our form or an STS table (which then holds for every regime).

    Raises:
        ValueError: on an unknown shape, a wrong length or a value out of range.
    """
    keys = [key for key in STS_KEYS if key in data]
    if len(keys) > 1:
        raise ValueError(f"calibration has both {keys[0]!r} and {keys[1]!r}: keep one")
    if keys:
        temperatures = _numbers(data[keys[0]], keys[0], gamma)
        return CalibrationTable.from_temperatures([float(t) for t in temperatures])
    if data.get("format") != FORMAT:
        raise ValueError(
            f"not a calibration: expected format={FORMAT!r} or a list under one of {STS_KEYS}, "
            f"got keys {sorted(data)}"
        )
    if data.get("gamma") != gamma:
        raise ValueError(f"gamma={data.get('gamma')!r} of the calibration: this draft has {gamma}")
    rows = {}
    for name, entry in json_object(data.get("regimes", {}), "regimes").items():
        if name not in REGIME_NAMES:
            raise ValueError(f"regime {name!r}: must be one of {list(REGIME_NAMES)}")
        fields = json_object(entry, name)
        rows[REGIME_NAMES.index(name)] = (
            _numbers(fields.get("scale"), f"{name}.scale", gamma),
            _numbers(fields.get("bias"), f"{name}.bias", gamma),
        )
    return CalibrationTable.identity(gamma).with_regimes(rows, int(data.get("version", 0)))


def save_calibration(table: CalibrationTable, path: str | Path) -> None:
    """Write our form."""
    Path(path).write_text(json.dumps(calibration_to_dict(table), indent=1) + "\n")


def load_calibration(path: str | Path, gamma: int) -> CalibrationTable:
    """Read a calibration file for blocks of `gamma` drafts; errors name the file."""
    try:
        data = json.loads(Path(path).read_text())
        return calibration_from_dict(json_object(data, "calibration"), gamma)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _numbers(value: Any, name: str, length: int) -> FloatArray:
    if not isinstance(value, list) or any(
        isinstance(x, bool) or not isinstance(x, int | float) for x in value
    ):
        raise ValueError(f"{name}: must be a list of numbers, got {value!r}")
    if len(value) != length:
        raise ValueError(f"{name}: must have {length} values (gamma), got {len(value)}")
    return np.asarray(value, dtype=np.float64)
