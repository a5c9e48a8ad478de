# SPDX-License-Identifier: Apache-2.0
"""Recorded blocks: what the head predicted, what the target accepted, what the step cost.

One JSON object per line: `confidence` (gamma numbers) and `accepted` are required; `verified`
(drafts that were verified, default all), `request` (any id, default one per line order) and
`step_ms` are optional. Blocks of one request are in decoding order.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_dspark.core.arrays import Float32Array, Float64Array, IntArray


@dataclass(frozen=True, slots=True)
class Trace:
    """Blocks in the order they were recorded."""

    confidence: Float32Array
    """`[n, gamma]`."""
    accepted: IntArray
    """`[n]` accepted drafts."""
    verified: IntArray
    """`[n]` verified drafts; an accepted count equal to it hides what would have followed."""
    step_ms: Float64Array | None = None
    """`[n]` measured time of the block's step."""

    @property
    def gamma(self) -> int:
        return int(self.confidence.shape[1])

    def streams(self, count: int) -> IntArray:
        """Block indices `[steps, count]`: the trace cut into `count` requests of equal length.

        Raises:
            ValueError: if there are fewer blocks than requests.
        """
        steps = len(self.accepted) // count if count > 0 else 0
        if steps == 0:
            raise ValueError(f"{len(self.accepted)} blocks cannot make {count} requests")
        return np.arange(steps * count).reshape(count, steps).T


def parse_trace(lines: Iterable[str]) -> Trace:
    """Read a trace; blank lines are skipped.

    Raises:
        ValueError: naming the line and the field.
    """
    blocks: list[tuple[list[float], int, int, float | None]] = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            blocks.append(_block(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"trace line {line_number}: {error!r}") from error
        if len(blocks[-1][0]) != len(blocks[0][0]):
            raise ValueError(f"trace line {line_number}: confidence has another length")
    if not blocks:
        raise ValueError("the trace has no blocks")
    times = [t for *_, t in blocks]
    return Trace(
        np.array([b[0] for b in blocks], dtype=np.float32),
        np.array([b[1] for b in blocks], dtype=np.int64),
        np.array([b[2] for b in blocks], dtype=np.int64),
        None if any(t is None for t in times) else np.array(times, dtype=np.float64),
    )


def _block(data: dict[str, Any]) -> tuple[list[float], int, int, float | None]:
    confidence = [float(x) for x in data["confidence"]]
    accepted = int(data["accepted"])
    verified = int(data.get("verified", len(confidence)))
    if not 0 <= accepted <= verified <= len(confidence):
        raise ValueError(f"accepted={accepted} and verified={verified} do not fit the block")
    step_ms = data.get("step_ms")
    return confidence, accepted, verified, None if step_ms is None else float(step_ms)
