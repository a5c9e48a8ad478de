# SPDX-License-Identifier: Apache-2.0
"""Builds the planner of a runner from its session and what the host hands over."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from vllm_dspark.config import DSparkConfig
from vllm_dspark.core.draft_width import WidthChoice
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.policy import PolicyConfig, SearchMode
from vllm_dspark.engine.graphs import VerifyGraphManager
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.planner import OrderRequests, StepDecision, StepPlanner
from vllm_dspark.engine.session import Session
from vllm_dspark.metrics import MetricsWriter

logger = logging.getLogger("vllm.dspark")

_SEARCH = {
    VerifyMode.STATIC: SearchMode.STATIC,
    VerifyMode.CAP_ACCEPT: SearchMode.RAGGED,
    VerifyMode.HOST: SearchMode.RAGGED,
    VerifyMode.UNIFORM: SearchMode.UNIFORM,
    VerifyMode.DEVICE: SearchMode.RAGGED,
}


def build_planner(
    session: Session, host: dict[str, Any], order: OrderRequests, answers_admitted: bool
) -> StepPlanner:
    """Planner for the runner that calls the manager factory with arguments ``host``."""
    from vllm.distributed.parallel_state import get_tp_group

    states = host["req_states"]
    core = Planner(policy_of(session.config, session.mode), states.num_speculative_steps)
    if session.writer is None:
        parallel = host["vllm_config"].parallel_config
        session.writer = MetricsWriter(
            parallel.data_parallel_index,
            get_tp_group().rank_in_group,
            states.num_speculative_steps,
            enabled=session.config.metrics,
        )
    return StepPlanner(
        core,
        session.mode,
        states,
        host["query_start_loc"],
        host["num_bonus_tokens"],
        host["max_total_logits"],
        order,
        answers_admitted,
        observer=Accounting(session.writer, session.mode),
        has_confidence=session.has_confidence,
        widths=WidthChoice(session.widths),
        share=lambda value: get_tp_group().broadcast_object(value, src=0),
    )


def policy_of(config: DSparkConfig, mode: VerifyMode) -> PolicyConfig:
    """The policy core's view of the options."""
    return PolicyConfig(
        search=_SEARCH[mode],
        pin=config.budget_pin,
        floor=config.budget_floor,
        cap=config.budget_cap,
        min_gain=config.min_gain,
        hysteresis=min(config.hysteresis, config.min_gain),
        step_bound_ms=config.latency_bound_ms,
    )


def adopt_ladders(planner: StepPlanner, graphs: VerifyGraphManager) -> None:
    """Give the policy the tiers that this host will capture."""
    planner.core.ladders.update(graphs.ladders())
    planner.core.width_ladders = graphs.width_ladders()


class Accounting:
    """Turns decisions and their outcomes into metrics."""

    def __init__(self, writer: MetricsWriter, mode: VerifyMode) -> None:
        self._writer = writer
        self._mode = mode

    def __call__(self, decision: StepDecision, accepted: np.ndarray) -> None:
        plan, writer = decision.plan, self._writer
        graph = decision.graph_tokens or 0
        writer.observe_plan(
            mode=self._label(plan.uniform_k is not None),
            reason=str(plan.reason),
            scheduled_tokens=int(decision.eligible.sum()),
            budget_tokens=-1 if plan.budget is None else plan.budget,
            tier_tokens=graph,
            padded_tokens=max(graph - decision.num_tokens, 0),
        )
        for doubt, rows in plan.doubts.items():
            writer.observe_doubt(doubt.name.lower(), rows)
        sampled = decision.samples
        assert decision.admitted is not None and decision.predicted is not None, "settled"
        writer.observe_accept(
            decision.eligible[sampled],
            decision.admitted[sampled],
            accepted[sampled],
            np.cumprod(decision.predicted[sampled], axis=1),
        )

    def _label(self, uniform: bool) -> str:
        if not self._mode.trims:
            return str(self._mode)
        return "uniform" if uniform else "compact"
