# SPDX-License-Identifier: Apache-2.0
"""Closed-loop load and what is measured in its steady state. Knows no engine.

`concurrency` slots each send one request after another. The first request of slot s asks for
(s + 1) / concurrency of the output, so that later on requests of all ages are in flight, as with
independent users, instead of one batch that starts and ends together.

The window opens when the last of those first requests has ended (end of ramp-up) and closes when
the `requests`-th request ends and no successor is sent: the first moment with a free slot. What is
in flight then is cancelled. All sums are taken over the engine steps inside the window, so that
both its edges are step boundaries.

Times are seconds of one monotonic clock unless a name says `_ms`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

# (request number, output tokens) -> numbers of tokens, one per delivery
Stream = Callable[[int, int], AsyncIterator[int]]


@dataclass(slots=True)
class Step:
    """One engine step, as its results arrive in the frontend."""

    time_s: float
    tokens: int = 0  # committed, first tokens of requests included
    rows: int = 0  # requests that committed, without those that got their first token
    first_tokens: int = 0
    prompt_tokens: int = 0
    scheduled_drafts: int = 0  # drafts that the scheduler handed out
    accepted_drafts: int = 0
    batch_tokens: int | None = None  # tokens in the target's batch, padding excluded
    padded_tokens: int | None = None
    graph: str = ""
    latencies_s: list[float] = field(default_factory=list)
    """Per row, time since the step before of that request, by the engine's own clock."""

    @property
    def ran(self) -> bool:
        """False for bookkeeping without a batch, such as after an abort."""
        return self.tokens > 0 or self.batch_tokens is not None


@dataclass(slots=True)
class Served:
    """One request as its client saw it."""

    start_s: float
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    finished: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.deliveries)


@dataclass(frozen=True)
class Window:
    """Half-open interval (start_s, end_s]."""

    start_s: float
    end_s: float

    def __contains__(self, moment: float) -> bool:
        return self.start_s < moment <= self.end_s


class ClosedLoop:
    """Runs the load once.

    Raises:
        ValueError: fewer than two requests per slot, so that no window would be left.
    """

    def __init__(self, stream: Stream, concurrency: int, requests: int, output_tokens: int) -> None:
        if requests < 2 * concurrency or output_tokens < 2:
            raise ValueError(
                f"requests = {requests}, output_tokens = {output_tokens}: expected at least two "
                f"requests per slot ({2 * concurrency}) and two tokens"
            )
        self.stream, self.concurrency = stream, concurrency
        self.requests, self.output_tokens = requests, output_tokens
        self.served: list[Served] = []
        self._sent = self._ended = 0
        self._ramping = concurrency
        self._start_s = self._end_s = 0.0

    async def run(self, on_window: Callable[[], Awaitable[None]] | None = None) -> Window:
        """Send everything; `on_window` is awaited beside the load when the window opens."""
        self._steady, self._over = asyncio.Event(), asyncio.Event()
        slots = [asyncio.create_task(self._slot(s)) for s in range(self.concurrency)]
        watcher = asyncio.create_task(self._watch(on_window))
        over = asyncio.create_task(self._over.wait())
        try:
            # A slot or the watcher ends before the load only by an error.
            await asyncio.wait([over, *slots], return_when=asyncio.FIRST_COMPLETED)
            self._raise_errors(slots)
            await watcher
        finally:
            for task in (*slots, watcher, over):
                task.cancel()
            await asyncio.gather(*slots, watcher, over, return_exceptions=True)
        return Window(self._start_s, self._end_s)

    @staticmethod
    def _raise_errors(slots: "Sequence[asyncio.Task[None]]") -> None:
        for slot in slots:
            if slot.done() and not slot.cancelled() and (error := slot.exception()):
                raise error

    async def _watch(self, on_window: Callable[[], Awaitable[None]] | None) -> None:
        await self._steady.wait()
        if on_window:
            await on_window()

    async def _slot(self, slot: int) -> None:
        await self._request(max(2, self.output_tokens * (slot + 1) // self.concurrency))
        self._ramping -= 1
        if not self._ramping:
            self._start_s = time.perf_counter()
            self._steady.set()
        while not self._over.is_set():
            await self._request(self.output_tokens)
        await asyncio.Event().wait()  # until cancelled

    async def _request(self, output_tokens: int) -> None:
        number, self._sent = self._sent, self._sent + 1
        served = Served(time.perf_counter())
        self.served.append(served)
        async for tokens in self.stream(number, output_tokens):
            served.deliveries.append((time.perf_counter(), tokens))
        served.finished = True
        self._ended += 1
        # A long last ramp-up request must not close the window before it has opened.
        if self._ended >= self.requests and not self._ramping and not self._over.is_set():
            self._end_s = time.perf_counter()
            self._over.set()


def percentiles_ms(seconds: Sequence[float], name: str) -> dict[str, float | None]:
    """`{name}_p50_ms` and `{name}_p99_ms`; None without a value."""
    if not seconds:
        return {f"{name}_p50_ms": None, f"{name}_p99_ms": None}
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return {f"{name}_p50_ms": round(float(p50), 4), f"{name}_p99_ms": round(float(p99), 4)}


def client_metrics(served: Sequence[Served], window: Window) -> dict[str, Any]:
    """Latencies in the window.

    `itl`: time between two deliveries of a request, however many tokens the later one holds.
    `tpot`: per request, time from its first to its last delivery per token after the first one.
    `ttft`, `tpot` and `request_tok_s` (tokens over the whole life of a request, median) are of
    requests that were sent and ended inside the window.
    """
    gaps, ttft, tpot, rates = [], [], [], []
    for request in served:
        times = [moment for moment, _ in request.deliveries]
        gaps += [later - sooner for sooner, later in pairwise(times) if later in window]
        if request.finished and request.start_s in window and times[-1] in window:
            ttft.append(times[0] - request.start_s)
            rates.append(request.tokens / (times[-1] - request.start_s))
            later_tokens = request.tokens - request.deliveries[0][1]
            if later_tokens:
                tpot.append((times[-1] - times[0]) / later_tokens)
    return {
        "requests": len(rates),
        "request_tok_s": round(float(np.median(rates)), 3) if rates else None,
        **percentiles_ms(gaps, "itl"),
        **percentiles_ms(tpot, "tpot"),
        **percentiles_ms(ttft, "ttft"),
    }


def engine_metrics(steps: Sequence[Step], window: Window) -> dict[str, Any]:
    """Throughput and work per step, over the steps between the first and the last in the window.

    `accept_len`: tokens per request and step, bonus included, first tokens of requests excluded.
    `decode_step_p50_ms`: median time of steps in which no request got its first token.
    `engine_itl`: time between two steps of a request where the engine hands out its tokens, which
    is what vLLM publishes as inter-token latency; `itl` adds how late a busy frontend notices.
    `slowest_steps`: the longest steps and what they held, which says where a p99 comes from.

    Raises:
        ValueError: the window holds fewer than three steps.
    """
    inside = [step for step in steps if step.time_s in window and step.ran]
    if len(inside) < 3:
        raise ValueError(f"the window holds {len(inside)} engine steps; send more requests")
    first, counted = inside[0], inside[1:]
    seconds = counted[-1].time_s - first.time_s
    rows = sum(step.rows for step in counted)
    decoded = sum(step.tokens - step.first_tokens for step in counted)
    plain = [b.time_s - a.time_s for a, b in pairwise(inside) if not b.first_tokens]
    return {
        "tok_s": round(sum(step.tokens for step in counted) / seconds, 3),
        "window_s": round(seconds, 3),
        "steps": len(counted),
        "step_ms": round(seconds / len(counted) * 1e3, 4),
        "decode_step_p50_ms": percentiles_ms(plain, "x")["x_p50_ms"],
        **percentiles_ms([s for step in counted for s in step.latencies_s], "engine_itl"),
        "rows_per_step": round(rows / len(counted), 3),
        "accept_len": round(decoded / rows, 4) if rows else None,
        "scheduled_per_step": round(sum(s.scheduled_drafts for s in counted) / len(counted), 3),
        "accepted_per_step": round(sum(s.accepted_drafts for s in counted) / len(counted), 3),
        "slowest_steps": _slowest(inside),
        **_batch_metrics(counted, rows),
    }


def _slowest(steps: Sequence[Step], count: int = 8) -> list[dict[str, Any]]:
    """The `count` longest of the steps but the first, longest first."""
    timed = [(b.time_s - a.time_s, b) for a, b in pairwise(steps)]
    return [
        {
            "ms": round(seconds * 1e3, 2),
            "engine_ms": percentiles_ms(step.latencies_s, "x")["x_p50_ms"],
            "rows": step.rows,
            "prompts": step.first_tokens,
            "prompt_tokens": step.prompt_tokens,
            "batch_tokens": step.batch_tokens,
            "graph": step.graph,
        }
        for seconds, step in sorted(timed, key=lambda pair: -pair[0])[:count]
    ]


def _batch_metrics(steps: Sequence[Step], rows: int) -> dict[str, Any]:
    """What the target ran per step, where the engine tells: it does not for every runner.

    `verified_per_step` is the batch without prompts and anchors: the drafts that the target
    verified (and the few slots of requests that had ended when a further step was scheduled).
    """
    known = [step for step in steps if step.batch_tokens is not None]
    if len(known) < len(steps):
        return {"verified_per_step": None, "padded_per_step": None, "graphs": {}}
    batch = sum(step.batch_tokens or 0 for step in steps)
    padded = sum(step.padded_tokens or 0 for step in steps)
    drafts = batch - rows - sum(step.prompt_tokens for step in steps)
    return {
        "verified_per_step": round(max(0, drafts) / len(steps), 3),
        "padded_per_step": round((padded - batch) / len(steps), 3),
        "graphs": dict(Counter(step.graph for step in steps)),
    }
