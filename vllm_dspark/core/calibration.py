# SPDX-License-Identifier: Apache-2.0
"""Calibrated confidences: `c' = sigmoid(scale * logit(c) + bias)`, per slot and sampling regime.

Sequential temperature scaling (DSpark paper, section 3.2.1) is the case `scale = 1/T, bias = 0`. A
bias is needed where drafting is greedy and the target samples: `sigmoid(z/T)` cannot cross 0.5.
Invariants: `scale >= 0`, so the head's order at a slot is never reversed; the result lies strictly
inside (0, 1), so survivals stay non-increasing and scheduling stays lossless.

A table is immutable and carries a version: ranks adopt a version on the same step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from vllm_dspark.core.arrays import Float32Array, FloatArray, IntArray

LOGIT_LIMIT = 16.0
"""Largest |logit| that is used: sigmoid(16) is still below 1 in float32."""
_ONE = np.float32(1.0)
_EDGE = np.float32(2.0**-23)
_ABOVE_ONE = np.float32(1.0 + 2.0**-23)

TEMPERATURE_EDGES = (0.0, 0.5, 0.9, 1.1)
"""Upper edges of the temperature buckets; the last bucket is open."""


class DraftMethod(StrEnum):
    """How draft tokens are chosen, which decides what a confidence means."""

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


NUM_BUCKETS = len(TEMPERATURE_EDGES) + 1
NUM_REGIMES = len(DraftMethod) * NUM_BUCKETS


def regime_of(method: DraftMethod, temperature: FloatArray | float) -> IntArray:
    """Regime index of each target temperature, 0..NUM_REGIMES-1 (same shape, int64).

    Greedy targets (T = 0) have a bucket of their own; NaN falls into the last bucket.
    """
    bucket = np.searchsorted(np.asarray(TEMPERATURE_EDGES), np.asarray(temperature), side="left")
    return np.asarray(bucket + list(DraftMethod).index(method) * NUM_BUCKETS, dtype=np.int64)


def regime_name(regime: int) -> str:
    """Readable key of a regime, e.g. `greedy/T<=0.5`; the spelling used in files."""
    method = list(DraftMethod)[regime // NUM_BUCKETS]
    bucket = regime % NUM_BUCKETS
    if bucket == len(TEMPERATURE_EDGES):
        return f"{method}/T>{TEMPERATURE_EDGES[-1]:g}"
    return f"{method}/T<={TEMPERATURE_EDGES[bucket]:g}"


REGIME_NAMES = tuple(regime_name(r) for r in range(NUM_REGIMES))


def logit(confidence: FloatArray) -> Float32Array:
    """Log odds, clipped to +-LOGIT_LIMIT, float32."""
    c = np.clip(np.asarray(confidence, dtype=np.float32), _EDGE, 1 - _EDGE)
    return np.asarray(np.clip(np.log(c / (1 - c)), -LOGIT_LIMIT, LOGIT_LIMIT), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class CalibrationTable:
    """Scale and bias for every regime and slot.

    Args:
        scale: `[NUM_REGIMES, gamma]`, not negative.
        bias: `[NUM_REGIMES, gamma]`.
        version: adoption order; a table replaces only older ones.

    Raises:
        ValueError: on shapes, non-finite values or a negative scale.
    """

    scale: FloatArray
    bias: FloatArray
    version: int = 0
    _identity: tuple[bool, ...] = field(init=False, repr=False)
    _scale_columns: list[Float32Array] = field(init=False, repr=False)
    _bias_columns: list[Float32Array] = field(init=False, repr=False)
    _steep: bool = field(init=False, repr=False)
    """Some confidence could leave (0, 1) in float32, so results are clipped."""

    def __post_init__(self) -> None:
        scale = np.asarray(self.scale, dtype=np.float32)
        bias = np.asarray(self.bias, dtype=np.float32)
        if scale.ndim != 2 or scale.shape[0] != NUM_REGIMES or scale.shape != bias.shape:
            raise ValueError(
                f"scale {scale.shape} and bias {bias.shape} must both be [{NUM_REGIMES}, gamma]"
            )
        if not (np.isfinite(scale).all() and np.isfinite(bias).all() and (scale >= 0).all()):
            raise ValueError("calibration needs finite values and scale >= 0")
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "bias", bias)
        identity = ((scale == 1.0) & (bias == 0.0)).all(axis=1)
        object.__setattr__(self, "_identity", tuple(bool(x) for x in identity))
        object.__setattr__(self, "_scale_columns", [row[:, None] for row in scale])
        object.__setattr__(self, "_bias_columns", [row[:, None] for row in bias])
        reach = scale * -math.log(_EDGE) + np.abs(bias)
        object.__setattr__(self, "_steep", bool((reach > LOGIT_LIMIT).any()))

    @classmethod
    def identity(cls, gamma: int) -> "CalibrationTable":
        """Confidences as they are."""
        return cls(np.ones((NUM_REGIMES, gamma)), np.zeros((NUM_REGIMES, gamma)))

    @classmethod
    def from_temperatures(cls, temperatures: Sequence[float]) -> "CalibrationTable":
        """STS temperatures `[gamma]` for every regime.

        Raises:
            ValueError: unless every temperature is finite and positive.
        """
        values = np.asarray(temperatures, dtype=np.float64)
        if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"temperatures={temperatures!r}: must be finite and positive")
        scale = np.tile(1.0 / values, (NUM_REGIMES, 1))
        return cls(scale, np.zeros_like(scale))

    def with_regimes(
        self, rows: Mapping[int, tuple[FloatArray, FloatArray]], version: int
    ) -> "CalibrationTable":
        """A copy in which the named regimes have new (scale, bias) `[gamma]`."""
        scale, bias = np.array(self.scale), np.array(self.bias)
        for regime, (new_scale, new_bias) in rows.items():
            scale[regime], bias[regime] = new_scale, new_bias
        return CalibrationTable(scale, bias, version)

    @property
    def gamma(self) -> int:
        return int(self.scale.shape[1])

    @property
    def changed(self) -> list[int]:
        """Regimes that are not the identity."""
        return [regime for regime, same in enumerate(self._identity) if not same]

    def apply(self, confidence: FloatArray, regimes: IntArray | int = 0) -> Float32Array:
        """Calibrated confidences, position-major.

        Args:
            confidence: `[gamma, num_reqs]`, trusted values in [0, 1].
            regimes: `[num_reqs]`, or one regime for all.

        Returns:
            `[gamma, num_reqs]` float32; the input itself where the regime changes nothing.
        """
        if isinstance(regimes, int):
            if self._identity[regimes]:
                return np.asarray(confidence, dtype=np.float32)
            scale, bias = self._scale_columns[regimes], self._bias_columns[regimes]
        else:
            scale, bias = self.scale.T[:, regimes], self.bias.T[:, regimes]
        # Odds lifted off zero on both sides instead of clipped; in place, as this runs each step.
        z: Float32Array = np.subtract(_ABOVE_ONE, confidence, dtype=np.float32)
        np.divide(z, np.add(confidence, _EDGE, dtype=np.float32), out=z)
        np.log(z, out=z)
        np.multiply(z, scale, out=z)
        np.subtract(z, bias, out=z)
        if self._steep:
            np.minimum(z, LOGIT_LIMIT, out=z)
            np.maximum(z, -LOGIT_LIMIT, out=z)
        np.exp(z, out=z)
        np.add(z, _ONE, out=z)
        np.reciprocal(z, out=z)
        return z
