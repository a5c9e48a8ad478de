# SPDX-License-Identifier: Apache-2.0
"""Measures at start-up what the planner may choose between.

The host times dummy steps while it captures graphs and hands the times back. We pick the shapes:
every captured uniform graph as the decode batch it serves (R requests of k+1 tokens each, with
context), because those are the steps that plans choose between. A dummy run fills every request
slot of its graph, and each of them reads its context: a varlen graph of 256 tokens reads that of
256 requests, where a served batch may hold 32. So the cost of a context token is told apart from
the cost of the graph, by timing the varlen graphs with a short context too. LM head and rejection
sampling run outside the timed forward, so a cost per logit row is timed on its own.

Totals past the largest graph run without one, up to the largest batch. They are timed too: the last
two graphs lie close together, and their difference says next to nothing of what comes after them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_dspark.core.cost_fit import StepSample, fit_cost_model
from vllm_dspark.core.cost_model import CostModel, Curve, CurveRule
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.tiers import ExecMode, TierLadder
from vllm_dspark.engine.graphs import thin

logger = logging.getLogger("vllm.dspark")

REPLAYS, LONG_REPLAYS = 3, 2
"""How often a batch is timed. What disturbs a replay takes as long in a long one, where it hardly
shows, and long ones are what start-up waits for."""
LONG_TOKENS = 128
"""Batches with more tokens are long."""
_DRAFT_POINTS_RATIO = 3.9
"""Request counts at which narrow blocks are timed lie so far apart: their cost is all but linear
between, and start-up should not take long."""
_SLOPE_POINTS_RATIO = 1.9
"""The same for batches that are timed for a slope only: by requests, or by context."""
CONTEXT_TOKENS = 1024
"""KV tokens behind every profiled request; enough for attention to cost what it costs in service.
"""
_SHORT_CONTEXT = 64
_LOGIT_ROWS = (64, 1024)
_VARLEN_QUERY_LENS = (2, 4)
"""Mean lengths that a trimmed batch has; the varlen graphs are timed with these."""


@dataclass(frozen=True)
class _Shape:
    """One dummy batch: equal requests, and the block drafted behind them."""

    query_len: int
    requests: int
    draft_width: int
    context_len: int = CONTEXT_TOKENS
    has_graph: bool = True

    @property
    def tokens(self) -> int:
        return self.query_len * self.requests

    @property
    def replays(self) -> int:
        return LONG_REPLAYS if self.tokens > LONG_TOKENS else REPLAYS


class StartupProfile:
    """Shapes to time, and the cost model that their times give.

    Args:
        core: whose ladders say what can run.
        runner: the host's model runner, captured.
        widths: block widths that may be drafted.
        set_width: tells the proposer the width of the next block.
    """

    def __init__(
        self,
        core: Planner,
        runner: Any,
        widths: Sequence[int],
        set_width: Callable[[int], None],
    ) -> None:
        self._core = core
        self._runner = runner
        self._widths = tuple(widths)
        self._set_width = set_width
        self._timed: list[_Shape] = []
        self._seconds = 0.0

    def batches(self) -> Iterator[dict[str, Any]]:
        """Arguments of the host's dummy runs; its decode width follows the shape being timed."""
        runner, usual = self._runner, self._runner.decode_query_len
        try:
            for shape in self._shapes():
                runner.decode_query_len = shape.query_len if shape.has_graph else usual
                self._set_width(shape.draft_width)
                for _ in range(shape.replays):
                    self._timed.append(shape)
                    begin = time.perf_counter()
                    yield {
                        "num_tokens": shape.tokens,
                        "uniform_decode": shape.has_graph,
                        "context_len": self._context_len(shape),
                    }
                    spent = time.perf_counter() - begin
                    self._seconds += spent
                    logger.debug("DSpark timed %s in %.1f ms", shape, 1e3 * spent)
        finally:
            runner.decode_query_len = usual
            self._set_width(self._widths[-1])

    def _context_len(self, shape: _Shape) -> int:
        """KV tokens behind each of the shape's requests."""
        return int(min(shape.context_len, self._runner.max_model_len - shape.query_len))

    def _shapes(self) -> Iterator[_Shape]:
        most, widest = self._runner.max_num_reqs, self._widths[-1]
        varlen = self._core.ladders[ExecMode.FULL].tokens.tolist()
        riders = {query_len: self._rider(query_len) for query_len in _VARLEN_QUERY_LENS}
        covered = {
            width
            for query_len, width in riders.items()
            if any(tokens == query_len * most for tokens in varlen)
        }
        apart = set(self._widths) - covered
        for width, ladder in sorted(self._core.width_ladders.items()):
            counts = [tokens // (width + 1) for tokens in ladder.tokens.tolist()]
            spread = set(thin(counts, _DRAFT_POINTS_RATIO))
            for requests in counts:
                every = width == 0 and requests in spread
                for draft_width in sorted(apart | {widest}) if every else (widest,):
                    yield _Shape(width + 1, requests, draft_width)
        for query_len, draft_width in riders.items():
            fitting = [t for t in varlen if t % query_len == 0 and t // query_len <= most]
            few = thin(fitting, _SLOPE_POINTS_RATIO)
            price_tiers = query_len == _VARLEN_QUERY_LENS[0]
            for tokens in fitting if price_tiers else few:
                shape = _Shape(query_len, tokens // query_len, draft_width)
                yield shape
                if price_tiers and tokens in few:
                    yield replace(shape, context_len=_SHORT_CONTEXT)
        yield from self._shapes_without_graph()

    def _shapes_without_graph(self) -> Iterator[_Shape]:
        """Batches past the largest graph, up to the largest there may be."""
        most_tokens = self._runner.max_num_tokens
        ladders = (*self._core.ladders.values(), *self._core.width_ladders.values())
        captured = max(ladder.limit for ladder in ladders)
        totals, total = {captured * 3 // 2}, captured
        while 0 < total < most_tokens:
            total = min(2 * total, most_tokens)
            totals.add(total)
        # At most so many that whole queries do not fall back below the largest graph.
        requests = max(min(self._runner.max_num_reqs, captured // 2), 1)
        width = self._widths[0]
        for total in sorted(t for t in totals if captured < t <= most_tokens):
            yield _Shape(total // requests, requests, width, _SHORT_CONTEXT, has_graph=False)

    def _rider(self, query_len: int) -> int:
        """Width that is timed along with a target forward: its graph has room for the context."""
        return max((w for w in self._widths if w < query_len), default=self._widths[0])

    def fit(self, samples: list[Any]) -> CostModel | None:
        """Cost model from the host's timings, or None if there is nothing to fit."""
        shapes, self._timed = self._timed, []
        logger.info("DSpark start-up profile: %d batches in %.1f s", len(shapes), self._seconds)
        if not samples or len(samples) != len(shapes):
            return None
        timed: dict[_Shape, list[Any]] = {}
        for shape, sample in zip(shapes, samples, strict=True):
            timed.setdefault(shape, []).append(sample)
        # Whatever disturbs a replay makes it longer: the shortest is the truest.
        steps = [
            StepSample(
                tokens=same[0].num_target_tokens,
                requests=same[0].num_reqs,
                verify_ms=min(sample.forward_ms for sample in same),
                context_tokens=same[0].num_reqs * self._context_len(shape),
                mode=_mode(shape, same[0]),
            )
            for shape, same in timed.items()
        ]
        # One cell per measured total: families share totals, and what they read differs.
        captured = TierLadder({shape.tokens for shape in timed if shape.has_graph})
        fitted = fit_cost_model(steps, {ExecMode.FULL: captured}, self._widths[-1])
        # A graph that was not timed itself costs something between its neighbours.
        between = {mode: replace(c, rule=CurveRule.LINEAR) for mode, c in fitted.verify.items()}
        return replace(
            fitted,
            verify=between,
            draft_width=self._widths[-1],
            draft_widths=_draft_curves(timed, self._drafted_counts()),
            logit_row_ms=self._logit_row_ms(),
        )

    def _drafted_counts(self) -> set[int]:
        """Request counts of the draft's graphs, which are those of the uniform ones."""
        return {
            tokens // (width + 1)
            for width, ladder in self._core.width_ladders.items()
            for tokens in ladder.tokens.tolist()
        }

    def _logit_row_ms(self) -> float:
        """Cost of one more row through LM head and greedy verification, from two sizes."""
        few, many = (self._time_rows(rows) for rows in _LOGIT_ROWS)
        return max((many - few) / (_LOGIT_ROWS[1] - _LOGIT_ROWS[0]), 0.0)

    def _time_rows(self, rows: int) -> float:
        runner = self._runner
        hidden = torch.zeros(
            rows, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device
        )
        times_ms = []
        for _ in range(REPLAYS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            logits = runner.model.compute_logits(hidden)
            logits.float().argmax(dim=-1)
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        return min(times_ms[1:])


def _mode(shape: _Shape, sample: Any) -> ExecMode:
    """Whose cost it is: a total past the graphs costs the same in every mode, and one curve holds
    both. A captured total that ran without its graph says nothing of those that do.
    """
    expected = sample.full_cudagraph or not shape.has_graph
    return ExecMode.FULL if expected else ExecMode.EAGER


def _draft_curves(timed: dict[_Shape, list[Any]], counts: set[int]) -> dict[int, Curve]:
    """Shortest draft time by requests for every width; a shape's target forward does not matter.
    Request counts that have graphs (`counts`) and lie between two timed ones are interpolated.
    """
    times: dict[int, dict[int, float]] = {}
    for shape, same in timed.items():
        if not same[0].full_cudagraph or shape.context_len < CONTEXT_TOKENS:
            continue
        by_requests = times.setdefault(shape.draft_width, {})
        requests, shortest = same[0].num_reqs, min(sample.drafter_ms for sample in same)
        by_requests[requests] = min(shortest, by_requests.get(requests, shortest))
    curves = {}
    for width, by_requests in times.items():
        measured = sorted(by_requests)
        between = {count for count in counts if measured[0] < count < measured[-1]}
        sizes = np.array(sorted({*measured, *between}), dtype=np.int64)
        ms = np.interp(sizes, measured, [by_requests[requests] for requests in measured])
        curves[width] = Curve(sizes, ms)
    return curves


def describe(cost: CostModel | None) -> str:
    """One line for the log: verify times by tokens, draft times by requests for every width."""
    if cost is None:
        return "none"
    verify = cost.verify_curve(ExecMode.FULL)
    parts = ["verify " + _points(verify)]
    parts += [f"draft {width} wide {_points(c)}" for width, c in sorted(cost.draft_widths.items())]
    parts.append(
        f"logit row {cost.logit_row_ms * 1e3:.2f} us, request {cost.request_ms * 1e3:.2f} us, "
        f"1000 context tokens {cost.context_token_ms * 1e6:.2f} us"
    )
    return "; ".join(parts)


def _points(curve: Curve) -> str:
    pairs = zip(curve.sizes.tolist(), curve.ms.tolist(), strict=True)
    return " ".join(f"{size}:{ms:.2f}ms" for size, ms in pairs)
