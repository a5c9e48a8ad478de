# SPDX-License-Identifier: Apache-2.0
"""Time of work on the device, as the device sees it."""

import statistics
from collections.abc import Callable

import torch

REPEATS = 20
_WARM_UP = 3


def median_ms(body: Callable[[], object]) -> float:
    """Median time of what `body` launches, in ms."""
    times = []
    for _ in range(_WARM_UP + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[_WARM_UP:])
