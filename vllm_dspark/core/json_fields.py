# SPDX-License-Identifier: Apache-2.0
"""Checked fields of parsed JSON files; every error names the field and what it holds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_dspark.core.arrays import Float64Array


def json_object(value: Any, name: str) -> Mapping[str, Any]:
    """An object of a parsed file.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: must be an object, got {type(value).__name__}")
    return value


def number(value: Any, name: str) -> float:
    """A finite number of a parsed file.

    Raises:
        ValueError: naming the field.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be a finite number")
    return float(value)


def numbers(value: Any, name: str) -> Float64Array:
    """A non-empty list of finite numbers `[n]` of a parsed file.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: must be a non-empty list of numbers, got {value!r}")
    return np.array([number(x, name) for x in value], dtype=np.float64)
