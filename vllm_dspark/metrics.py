# SPDX-License-Identifier: Apache-2.0
"""Owner of every Prometheus name of the plugin, and the in-process counters behind them.

The workers decide and count; the API server exposes. `MetricsWriter` keeps plain integers and small
arrays in the worker, and one background thread copies them (never more often than
`flush_interval_s`) to files that `metrics_export` turns into `vllm:dspark_*` on the server's own
`/metrics`. The hot path does no I/O, no allocation per request and no vLLM import.

Invariants
* Decisions are counted by TP rank 0 only; the other ranks write what is theirs (sync time,
  disagreements, overhead), told apart by the label `rank`.
* Token counters are taken together, a step's in one `observe_accept` or `observe_accepts`, so that
  at rest `scheduled = admitted + trimmed` and `admitted = accepted + rejected` hold exactly. An
  outcome that breaks them is dropped whole and counted in `invalid_observations`.
* A published series never decreases, except gauges. Labels have bounded cardinality
  (`MAX_LABEL_SETS` per metric, then `other`).
* Nothing here raises into a serving step because of a value it was given.
"""

import logging
import math
import multiprocessing.util
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vllm_dspark.metrics_export import MmapStore, open_store
from vllm_dspark.metrics_snapshot import PREFIX, Series, Snapshot
from vllm_dspark.metrics_sums import FloatArray, Histogram, IntArray, Key, Lengths, Reliability

logger = logging.getLogger(__name__)

MAX_LABEL_SETS = 128

_FRACTION_BUCKETS = tuple(i / 10 for i in range(11))
_ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `name` without prefix and `_total`; `labels` beside `engine` (the DP rank)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        return PREFIX + self.name

    @property
    def exported(self) -> str:
        """Name to type into a query (histograms: add `_bucket`, `_sum` or `_count`)."""
        return self.family + ("_total" if self.kind == "counter" else "")


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


CATALOGUE: tuple[Metric, ...] = (
    # Outcome of a step: draft tokens from proposal to commit.
    _counter("draft_tokens_scheduled", "Draft tokens that the scheduler handed to verification."),
    _counter("draft_tokens_admitted", "Scheduled draft tokens that the target verified."),
    _counter("draft_tokens_trimmed", "Scheduled draft tokens left out by the verify budget."),
    _counter("draft_tokens_accepted", "Admitted draft tokens that the target accepted."),
    _counter("draft_tokens_rejected", "Admitted draft tokens that the target did not accept."),
    _counter("committed_tokens", "Tokens committed by verification, bonus tokens included."),
    Metric("verify_len", "histogram", "Verify length of a request in a step, anchor included."),
    _counter("position_scheduled", "Draft tokens scheduled at a position (from 0).", "position"),
    _counter("position_admitted", "Draft tokens verified at a position (from 0).", "position"),
    _counter("position_accepted", "Draft tokens accepted at a position (from 0).", "position"),
    _counter("steps_settled", "Steps whose outcome was counted in the token counters."),
    _counter("invalid_observations", "Outcomes dropped for contradicting themselves.", "what"),
    # Reliability: predicted survival against what the target did, on verified drafts only.
    _counter(
        "reliability_drafts",
        "Verified drafts by position and by predicted survival (lower edge of the bin).",
        "position",
        "bin",
    ),
    _counter(
        "reliability_predicted",
        "Sum of the predicted survival of the drafts in reliability_drafts.",
        "position",
        "bin",
    ),
    _counter(
        "reliability_observed",
        "Drafts of reliability_drafts that survived (were accepted).",
        "position",
        "bin",
    ),
    _counter("unusable_survivals", "Predicted survivals that were unknown or outside [0, 1]."),
    # Plan of a step.
    _counter("steps", "Verification steps by mode and by what decided it.", "mode", "reason"),
    _counter("bypass_steps", "Steps in which no draft was verified although there were some."),
    _counter("full_verify_rows", "Requests verified in full because in doubt, by cause.", "reason"),
    Metric("budget_tokens", "gauge", "Verify budget of the last planned step; -1 means none."),
    Metric(
        "budget_fraction",
        "histogram",
        "Verify budget of a step over its scheduled draft tokens (steps with a budget).",
        buckets=_FRACTION_BUCKETS,
    ),
    _counter("tier_steps", "Steps by token count of the replayed graph (0: no graph).", "tokens"),
    _counter("graph_misses", "Steps that wanted a graph and ran without one, by cause.", "reason"),
    _counter(
        "accept_steps",
        "Verification steps by what accepted (graph, kernel, host) and why nothing faster did.",
        "path",
        "reason",
    ),
    _counter("verify_tokens_padded", "Token slots of replayed graphs that held no real token."),
    _counter("verify_tokens_filled", "Draft tokens admitted above the budget into spare slots."),
    # Cost model.
    _counter("predicted_step_seconds", "Predicted time of the steps that were also measured."),
    _counter("measured_step_seconds", "Measured time of the steps that were also predicted."),
    Metric(
        "step_time_relative_error",
        "histogram",
        "Absolute error of a predicted step time over the measured time.",
        buckets=_ERROR_BUCKETS,
    ),
    # Per rank.
    _counter("sync_seconds", "Host time in the TP sync of decisions.", "rank"),
    _counter("sync_messages", "Messages of the TP sync of decisions.", "rank"),
    _counter(
        "rank_disagreements",
        "Values that differed from rank 0's (mended, but for audit mode).",
        "rank",
        "site",
    ),
    _counter(
        "host_seconds",
        "Host time of the plugin's part of a step, TP sync included; wait is for the device.",
        "rank",
        "part",
    ),
    _counter("overhead_seconds", "Time the plugin spent to observe itself.", "rank", "part"),
)
METRICS = {metric.name: metric for metric in CATALOGUE}

# What a store takes: metric, suffix of the sample name, labels, value (buckets not cumulated).
Sample = tuple[Metric, str, tuple[tuple[str, str], ...], float]


@dataclass(slots=True)
class _Timer:
    due: float
    interval_s: float
    callback: Callable[[], object]


class MetricsWriter:
    """Counters of one worker process.

    Args:
        engine_index: DP rank, exported as the label `engine`.
        tp_rank: TP rank; only rank 0 counts decisions.
        gamma: most draft tokens per request.
        enabled: False makes every call a no-op.
        directory: where to publish; None takes it from the environment (see `metrics_export`),
            "" keeps the counters in this process.
        flush_interval_s: least time between two publications.
        reliability_every: the reliability sums look at one step in this many.

    Errors: `ValueError` for a bad argument of the constructor; observers never raise.
    Thread safety: any method may be called from any thread.
    """

    def __init__(
        self,
        engine_index: int,
        tp_rank: int,
        gamma: int,
        *,
        enabled: bool = True,
        directory: str | None = None,
        flush_interval_s: float = 0.5,
        reliability_every: int = 4,
    ) -> None:
        for name, value, least in (
            ("engine_index", engine_index, 0),
            ("tp_rank", tp_rank, 0),
            ("gamma", gamma, 1),
            ("reliability_every", reliability_every, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value!r}; allowed: integers from {least}")
        if not flush_interval_s > 0:
            raise ValueError(f"flush_interval_s is {flush_interval_s!r}; allowed: above 0")
        self.engine_index, self.tp_rank, self.gamma = engine_index, tp_rank, gamma
        self.enabled = enabled
        self._decides = enabled and tp_rank == 0
        self._interval_s, self._every = flush_interval_s, reliability_every
        self._engine = ("engine", str(engine_index))
        self._rank = (str(tp_rank),)
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._dirty = True  # so that the zeros are visible before the first step
        self._counts: dict[Key, float] = {}
        self._label_sets: dict[str, int] = {}
        self._lengths = Lengths(gamma)
        self._reliability = Reliability(gamma)
        self._budget = -1
        self._fraction = Histogram(_FRACTION_BUCKETS)
        self._error = Histogram(_ERROR_BUCKETS)
        self._settled = 0
        self._key_metrics: Key = ("overhead_seconds", (*self._rank, "metrics"))
        self._key_flush: Key = ("overhead_seconds", (*self._rank, "flush"))
        self._zero_known_series()
        self._timers: list[_Timer] = []
        self._gather: Callable[[], object] = lambda: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: MmapStore | None = open_store(directory) if enabled else None
        self._finalizer: multiprocessing.util.Finalize | None = None
        if enabled:
            # atexit does not run in forked workers; multiprocessing's own finalizers do.
            self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=10)
            self._thread = threading.Thread(target=self._run, name="dspark-metrics", daemon=True)
            self._thread.start()

    def _zero_known_series(self) -> None:
        if not self.enabled:
            return
        for key in (self._key_metrics, self._key_flush, ("sync_seconds", self._rank)):
            self._bump(key, 0.0)
        self._bump(("sync_messages", self._rank), 0)
        if self._decides:
            for metric in CATALOGUE:
                if metric.kind == "counter" and not metric.labels:
                    self._bump((metric.name, ()), 0)

    def _bump(self, key: Key, amount: float) -> None:
        counts = self._counts
        if key not in counts:
            name, labels = key
            known = self._label_sets.get(name, 0)
            if known >= MAX_LABEL_SETS:
                key = (name, ("other",) * len(labels))
            if key not in counts:
                self._label_sets[name] = known + 1
                counts[key] = 0
        counts[key] += amount

    # -- what the engine calls ---------------------------------------------------------------

    def observe_plan(
        self,
        *,
        mode: str,
        reason: str = "none",
        scheduled_tokens: int = 0,
        budget_tokens: int = -1,
        tier_tokens: int = 0,
        padded_tokens: int = 0,
        filled_tokens: int = 0,
        graph_miss: str = "",
        bypass: bool = False,
    ) -> None:
        """Count the plan of one step, once, when it is final.

        `mode`: verify mode, any short string; `reason`: what decided it (short, from a fixed set);
        `scheduled_tokens`: drafts of the whole batch; `budget_tokens`: -1 for none;
        `tier_tokens`: size of the graph, 0 if eager; `padded_tokens`: its slots without a token;
        `filled_tokens`: drafts above the budget; `graph_miss`: cause, if one was wanted;
        `bypass`: no draft was verified although there were some.
        """
        if not self._decides:
            return
        start = time.perf_counter()
        with self._lock:
            self._bump(("steps", (mode, reason)), 1)
            if bypass:
                self._bump(("bypass_steps", ()), 1)
            self._budget = int(budget_tokens)
            if budget_tokens >= 0 and scheduled_tokens > 0:
                self._fraction.observe(min(budget_tokens / scheduled_tokens, 1.0))
            self._bump(("tier_steps", (str(tier_tokens),)), 1)
            if graph_miss:
                self._bump(("graph_misses", (graph_miss,)), 1)
            self._bump(("verify_tokens_padded", ()), int(padded_tokens))
            self._bump(("verify_tokens_filled", ()), int(filled_tokens))
            self._done(start)

    @property
    def decides(self) -> bool:
        """Decisions and outcomes are counted here; other processes ignore them."""
        return self._decides

    def observe_accept(
        self,
        scheduled: IntArray,
        admitted: IntArray,
        accepted: IntArray,
        survivals: FloatArray | None = None,
        *,
        committed_tokens: int | None = None,
    ) -> None:
        """Count the outcome of one step over the requests that sampled in it.

        `scheduled`, `admitted`, `accepted`: draft tokens of each request, [num_reqs];
        `survivals`: predicted survival of the verified block, [num_reqs, gamma];
        `committed_tokens`: of the whole step, by default accepted + 1 per request.
        The arrays are read before return and not kept.
        """
        if not self._decides or not len(accepted):
            return
        start = time.perf_counter()
        with self._lock:
            if self._count_lengths(1, scheduled, admitted, accepted, committed_tokens):
                self._settled += 1
                if survivals is not None and self._settled % self._every == 0:
                    self._count_reliability(survivals, admitted, accepted)
            self._done(start)

    def observe_accepts(
        self,
        steps: Sequence[tuple[IntArray, IntArray, IntArray]],
        survivals_of: Callable[[int], FloatArray],
    ) -> None:
        """Count several steps at a fraction of the time that `observe_accept` takes for each.

        `steps`: scheduled, admitted and accepted draft tokens of every step, each [num_reqs] of
        that step; `survivals_of(i)`: [num_reqs, gamma] of step i, asked for the steps that the
        reliability sums look at. With a contradiction among them the steps are counted one by one.
        """
        if not self._decides:
            return
        numbered = [(number, step) for number, step in enumerate(steps) if len(step[2])]
        if not numbered:
            return
        start = time.perf_counter()
        with self._lock:
            columns = map(np.concatenate, zip(*(step for _, step in numbered), strict=True))
            together = self._count_lengths(len(numbered), *columns, report=False)
            for number, step in numbered:
                if together or self._count_lengths(1, *step):
                    self._settled += 1
                    if self._settled % self._every == 0:
                        self._count_reliability(survivals_of(number), *step[1:])
            self._done(start)

    def _count_lengths(
        self,
        steps: int,
        scheduled: IntArray,
        admitted: IntArray,
        accepted: IntArray,
        committed_tokens: int | None = None,
        report: bool = True,
    ) -> bool:
        """Count the lengths of `steps` steps; false, and no change, if they contradict each other.

        `report`: count the contradiction.
        """
        fault = self._lengths.add(scheduled, admitted, accepted)
        if fault:
            if report:
                self._bump(("invalid_observations", (fault,)), 1)
            return False
        self._bump(("steps_settled", ()), steps)
        if committed_tokens is None:
            committed_tokens = int(accepted.sum()) + len(accepted)
        self._bump(("committed_tokens", ()), int(committed_tokens))
        return True

    def observe_accept_path(self, path: str, reason: str) -> None:
        """Count a step by what accepted its drafts; `reason`: why nothing faster did."""
        if self._decides:
            self._add(("accept_steps", (path, reason)), 1)

    def observe_timing(self, predicted_s: float | None, measured_s: float) -> None:
        """Compare the cost model with one measured step; ignored unless both are positive."""
        if not self._decides or predicted_s is None:
            return
        if not (0.0 < predicted_s < math.inf and 0.0 < measured_s < math.inf):
            return
        with self._lock:
            self._bump(("predicted_step_seconds", ()), predicted_s)
            self._bump(("measured_step_seconds", ()), measured_s)
            self._error.observe(abs(predicted_s - measured_s) / measured_s)
            self._dirty = True

    def observe_doubt(self, reason: str, rows: int = 1) -> None:
        """Count requests that were verified in full because an input was missing or wrong."""
        if self._decides and rows > 0:
            self._add(("full_verify_rows", (reason,)), rows)

    def observe_disagreement(self, site: str, count: int = 1) -> None:
        """Count values that differed between this rank and rank 0."""
        if self.enabled and count > 0:
            self._add(("rank_disagreements", (*self._rank, site)), count)

    def observe_sync(self, seconds: float, messages: int = 1) -> None:
        """Count the host time and the messages of one sync of this rank."""
        if self.enabled and seconds >= 0.0:
            self._add(("sync_seconds", self._rank), seconds)
            self._add(("sync_messages", self._rank), messages)

    def observe_host(self, part: str, seconds: float) -> None:
        """Count host time of this rank's decisions, e.g. `part="plan"`."""
        self._spend("host_seconds", part, seconds)

    def observe_overhead(self, part: str, seconds: float) -> None:
        """Count time spent on observing itself, e.g. `part="records"`."""
        self._spend("overhead_seconds", part, seconds)

    def _spend(self, name: str, part: str, seconds: float) -> None:
        if self.enabled and seconds >= 0.0:
            self._add((name, (*self._rank, part)), seconds)

    def _add(self, key: Key, amount: float) -> None:
        with self._lock:
            self._bump(key, amount)
            self._dirty = True

    def _done(self, start: float) -> None:
        self._bump(self._key_metrics, time.perf_counter() - start)
        self._dirty = True

    def _count_reliability(
        self, survivals: FloatArray, admitted: IntArray, accepted: IntArray
    ) -> None:
        if survivals.shape != (len(accepted), self.gamma):
            self._bump(("invalid_observations", ("survivals_shape",)), 1)
            return
        unusable = self._reliability.add(survivals, admitted, accepted)
        self._bump(("unusable_survivals", ()), unusable)

    # -- publication -------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Every series of this process, as the server would export it."""
        result: Snapshot = {}
        running: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for metric, suffix, labels, value in self._samples():
            if suffix == "_bucket":
                owner = (metric.family, labels[:-1])
                running[owner] = value = running.get(owner, 0.0) + value
                result[Series.of(metric.family + "_count", labels[:-1])] = value
            result[Series.of(metric.family + suffix, labels)] = float(value)
        return result

    def flush(self) -> None:
        """Publish now. A store that fails is given up with one warning; serving goes on."""
        store = self._store
        if store is None:
            return
        with self._flush_lock:
            start = time.perf_counter()
            self._dirty = False
            try:
                store.write(self._samples())
            except Exception as error:
                self._store = None
                logger.warning("DSpark metrics are no longer published: %s", error)
            with self._lock:
                self._bump(self._key_flush, time.perf_counter() - start)

    def before_publishing(self, gather: Callable[[], object]) -> None:
        """Have `gather()` called, by any thread, before counters are read: it counts what its
        owner has put off, and said so with `touch`.
        """
        self._gather = gather

    def touch(self) -> None:
        """There is something to publish, whether or not it is counted yet."""
        self._dirty = True

    def every(self, interval_s: float, callback: Callable[[], object]) -> None:
        """Call `callback()` on the background thread about every `interval_s`."""
        if not interval_s > 0:
            raise ValueError(f"interval_s is {interval_s!r}; allowed: above 0")
        self._timers.append(_Timer(time.monotonic() + interval_s, interval_s, callback))

    def close(self) -> None:
        """Stop the thread and publish a last time. Safe to call twice."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.cancel()
        self.flush()
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            if self._dirty:
                self.flush()
            for timer in list(self._timers):
                if time.monotonic() < timer.due:
                    continue
                timer.due = time.monotonic() + timer.interval_s
                try:
                    timer.callback()
                except Exception:
                    self._timers.remove(timer)
                    logger.exception("DSpark metrics: a periodic callback failed and was removed")

    def _samples(self) -> list[Sample]:
        """Consistent copy of all counters, in export form."""
        if not self.enabled:
            return []
        self._gather()
        with self._lock:
            counts, lengths = self._counts.copy(), self._lengths.copy()
            reliability = self._reliability.copy()
            fraction, error = self._fraction.copy(), self._error.copy()
            budget = self._budget
        if self._decides:
            counts.update(lengths.counts())
            counts.update(reliability.counts())
        samples: list[Sample] = []
        for (name, values), count in counts.items():
            metric = METRICS[name]
            labels = (self._engine, *zip(metric.labels, values, strict=True))
            samples.append((metric, "_total", labels, float(count)))
        if self._decides:
            samples.append((METRICS["budget_tokens"], "", (self._engine,), float(budget)))
            for name, histogram in (
                ("verify_len", lengths.verify_len()),
                ("budget_fraction", fraction),
                ("step_time_relative_error", error),
            ):
                samples += self._histogram_samples(METRICS[name], histogram)
        return samples

    def _histogram_samples(self, metric: Metric, histogram: Histogram) -> list[Sample]:
        edges = [str(float(edge)) for edge in histogram.edges] + ["+Inf"]
        samples: list[Sample] = [
            (metric, "_bucket", (self._engine, ("le", edge)), float(count))
            for edge, count in zip(edges, histogram.counts, strict=True)
        ]
        samples.append((metric, "_sum", (self._engine,), histogram.sum))
        return samples
