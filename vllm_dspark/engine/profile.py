# SPDX-License-Identifier: Apache-2.0
"""Measures at start-up what the planner may choose between.

The host times dummy steps while it captures graphs and hands the times back. We pick the shapes: every
captured uniform graph as the decode batch it serves (R requests of k+1 tokens each, with context),
because those are the steps that plans choose between. LM head and rejection sampling run outside the
timed forward, so a cost per logit row is timed on its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_dspark.core.cost_fit import StepSample, fit_cost_model
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.tiers import ExecMode

logger = logging.getLogger("vllm.dspark")

REPLAYS = 3
CONTEXT_TOKENS = 1024
"""KV tokens behind every profiled request; enough for attention to cost what it costs in service."""
_LOGIT_ROWS = (64, 1024)


class StartupProfile:
    """Shapes to time, and the cost model that their times give."""

    def __init__(self, core: Planner, runner: Any) -> None:
        self._core = core
        self._runner = runner

    def batches(self) -> Iterator[dict[str, Any]]:
        """Arguments of the host's dummy runs; its decode width follows the family being timed."""
        runner = self._runner
        usual = runner.decode_query_len
        try:
            for width, ladder in sorted(self._core.width_ladders.items()):
                runner.decode_query_len = width + 1
                for tokens in ladder.tokens.tolist():
                    for _ in range(REPLAYS):
                        yield {
                            "num_tokens": tokens,
                            "uniform_decode": True,
                            "context_len": min(CONTEXT_TOKENS, runner.max_model_len - width - 1),
                        }
        finally:
            runner.decode_query_len = usual

    def fit(self, samples: list[Any]) -> CostModel | None:
        """Cost model from the host's timings, or None if there is nothing to fit."""
        steps = [
            StepSample(
                tokens=sample.num_target_tokens,
                requests=sample.num_reqs,
                verify_ms=sample.forward_ms,
                draft_ms=sample.drafter_ms,
                mode=ExecMode.FULL if sample.full_cudagraph else ExecMode.EAGER,
            )
            for sample in samples
        ]
        if not steps:
            return None
        gamma = self._core.gamma
        # One cell per measured total: families share totals, and their request counts differ.
        model = fit_cost_model(steps, {}, gamma)
        return replace(model, logit_row_ms=self._logit_row_ms())

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
        return float(np.median(times_ms[1:]))
