# SPDX-License-Identifier: Apache-2.0
"""Host time of the plugin's part of a step, by what it was spent on.

Waiting for results of the device is told apart from work: it is long where the scheduler does not
overlap, whatever we do, and work is what makes a host-bound server slower.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Report = Callable[[str, float], None]
"""Takes a part and seconds."""


class HostTime:
    """Reports the seconds of each part; time spent in `waiting` counts to the part `wait` only."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._waited = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around work; parts do not nest."""
        start, waited = time.perf_counter(), self._waited
        try:
            yield
        finally:
            self._report(name, time.perf_counter() - start - (self._waited - waited))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for the device."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._waited += seconds
            self._report("wait", seconds)


def timed(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a method of an object with a `host_time` is work of this part."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.host_time.part(name):
                return method(self, *args, **kwargs)

        return call

    return decorate
