# SPDX-License-Identifier: Apache-2.0
"""Builds the planner of a runner from its session and what the host hands over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_dspark import __version__
from vllm_dspark.config import ConfigError, DSparkConfig
from vllm_dspark.core.calibration import DraftMethod, regime_of
from vllm_dspark.core.calibration_io import load_calibration
from vllm_dspark.core.cost_io import load_cost
from vllm_dspark.core.draft_width import WidthChoice
from vllm_dspark.core.planner import Planner
from vllm_dspark.core.policy import PolicyConfig, SearchMode
from vllm_dspark.engine.accounting import start_accounting
from vllm_dspark.engine.agreement import Agreement
from vllm_dspark.engine.batch_order import OrderRequests
from vllm_dspark.engine.cost_learning import CostLearning
from vllm_dspark.engine.decision import Observer
from vllm_dspark.engine.deployment import fingerprint_of
from vllm_dspark.engine.graphs import VerifyGraphManager
from vllm_dspark.engine.learning import OnlineLearning
from vllm_dspark.engine.modes import VerifyMode
from vllm_dspark.engine.planner import RegimesOf, StepPlanner
from vllm_dspark.engine.session import Session
from vllm_dspark.metrics import MetricsWriter
from vllm_dspark.parallel.consensus import ConsensusOptions, open_checker
from vllm_dspark.parallel.decision_log import open_decision_log
from vllm_dspark.parallel.roll_call import call_roll, default_store
from vllm_dspark.parallel.sync_sites import sites_for
from vllm_dspark.parallel.tp_sync import connect, open_tp_sync

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
    fingerprint = fingerprint_of(host["vllm_config"])
    observers: list[Observer] = [
        start_accounting(
            session.config, host["vllm_config"], session.mode, session.writer, core, fingerprint
        )
    ]
    if session.config.cost_table is not None:
        core.adopt(cost=_load(load_cost, "cost_table", session.config.cost_table, fingerprint))
    calibration = session.config.calibration
    if calibration == "online":
        observers.append(OnlineLearning(core))
    elif calibration != "off":
        core.adopt(calibration=_load(load_calibration, "calibration", calibration, core.gamma))

    def share(value: Any) -> Any:
        return get_tp_group().broadcast_object(value, src=0)

    if session.config.cost_correction:
        observers.append(CostLearning(core, share))
    return StepPlanner(
        core,
        session.mode,
        states,
        host["query_start_loc"],
        host["num_bonus_tokens"],
        host["max_total_logits"],
        order,
        answers_admitted,
        observers=observers,
        regimes_of=regimes_of(session, host["vllm_config"]),
        has_confidence=session.has_confidence,
        widths=WidthChoice(session.widths),
        share=share,
        agreement=open_agreement(session, get_tp_group(), host["vllm_config"].speculative_config),
        overlaps=bool(host["vllm_config"].scheduler_config.async_scheduling),
        on_host_time=session.writer.observe_host,
    )


def meet(config: DSparkConfig, group: Any, device: Any) -> None:
    """Make sure of the other ranks of ``group`` before anything is loaded; every rank calls this.

    Raises:
        RollCallError: a rank lacks the plugin, or has another version or other options.
    """
    badge = f"version {__version__}, {config.model_dump_json()}"
    call_roll(default_store(), group.ranks, group.rank_in_group, badge)
    if config.verify != "static" and config.tp_sync in ("inputs", "outputs"):
        connect(group, device)


def open_agreement(session: Session, group: Any, speculative_config: Any) -> Agreement:
    """How the ranks of ``group`` take one decision; every rank calls this.

    Raises:
        ConfigError: the sites that are to be synced do not suit the way of drafting.
    """
    writer, config = session.writer, session.config
    assert writer is not None, "made before the planner"
    probabilistic = speculative_config.draft_sample_method != "greedy"
    config.check_drafting(probabilistic=probabilistic)
    if session.mode.trims and group.world_size > 1 and group.rank_in_group == 0:
        _warn_if_unsynced(config)
    return Agreement(
        open_tp_sync(
            # Where every draft is verified there is nothing to agree on.
            "off" if session.mode is VerifyMode.STATIC else config.tp_sync,
            group,
            sites_for(config.tp_sync_sites, probabilistic),
            on_sync=writer.observe_sync,
            on_disagreement=writer.observe_disagreement,
        ),
        open_checker(config.tp_sync, config.consensus_interval, group, writer.observe_disagreement),
        open_decision_log(group.rank_in_group),
    )


def _warn_if_unsynced(config: DSparkConfig) -> None:
    """Tell the operator if ranks that decide differently are neither mended nor stopped."""
    if config.consensus_interval or config.tp_sync in ("inputs", "outputs"):
        return
    bound = "only vLLM's VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS ends such a step, without the reason"
    if config.tp_sync == "audit":
        bound = f"the server ends after {ConsensusOptions.timeout_s:g} s in such a step"
    logger.warning(
        "dspark.tp_sync = %r mends nothing: ranks that decide differently add up rows of different "
        "tokens, or wait for each other in a step, and %s. Keep 'inputs' in service, or set "
        "dspark.consensus_interval to stop at the first difference",
        config.tp_sync,
        bound,
    )


def policy_of(config: DSparkConfig, mode: VerifyMode) -> PolicyConfig:
    """The policy core's view of the options."""
    return PolicyConfig(
        search=_SEARCH[mode],
        pin=config.budget_pin,
        floor=config.budget_floor,
        cap=config.budget_cap,
        min_gain=config.min_gain,
        hysteresis=config.hysteresis,
        step_bound_ms=config.latency_bound_ms,
    )


def regimes_of(session: Session, vllm_config: Any) -> RegimesOf | None:
    """Reads each request's sampling regime from the host's sampler, None if there is none."""
    temperatures = session.temperatures
    if temperatures is None:
        return None
    method = DraftMethod(vllm_config.speculative_config.draft_sample_method)

    def regimes(slots: np.ndarray) -> np.ndarray | int:
        found = temperatures()[slots]
        # A batch that samples alike has one, which is looked up and applied faster than a column.
        if len(found) and bool((found == found[0]).all()):
            return int(regime_of(method, found[0]))
        return regime_of(method, found)

    return regimes


def _load(load: Callable[..., Any], option: str, path: str, *args: Any) -> Any:
    """Read a file that an option names.

    Raises:
        ConfigError: the file is missing, damaged or made for something else.
    """
    try:
        return load(path, *args)
    except OSError as error:
        raise ConfigError(f"dspark.{option} = {path!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"dspark.{option} = {path!r}: {error}") from None


def adopt_ladders(planner: StepPlanner, graphs: VerifyGraphManager) -> None:
    """Give the policy the tiers that this host will capture."""
    planner.core.ladders.update(graphs.ladders())
    planner.core.width_ladders = graphs.width_ladders()
