# SPDX-License-Identifier: Apache-2.0
"""One log line when something that outputs cannot show goes wrong.

Every check is a pure function of the counters added in a window (`metrics_snapshot.difference`) and
answers with a severity (1.0 = at the threshold) and a sentence, or None when the window holds too
little to judge. `Alarms` turns severities into few messages: an alarm is raised when its severity
reaches 1, said again every `remind_s` while it lasts, and over only when the severity fell below
`Thresholds.rearm`, so a value that wavers at the threshold is one event. Whatever happens, an alarm
speaks at most every `repeat_s`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_dspark.metrics_snapshot import (
    PREFIX,
    Snapshot,
    by_label,
    calibration_errors,
    difference,
    total,
)

D = PREFIX

# Doubt that every server has: the first block of a request has no confidence yet.
_EXPECTED_DOUBT = frozenset({"fresh"})
_BROKEN_CONFIDENCE = ("non_finite", "out_of_range")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When an alarm is raised. Shares are between 0 and 1; `min_*` is what a window must hold."""

    min_steps: int = 100
    min_drafts: int = 500
    """Verified drafts at a position before its acceptance is judged."""
    dead_acceptance: float = 0.05
    """Acceptance at position 0 below this: the drafts have nothing to do with the target."""
    healthy_acceptance: float = 0.3
    """Acceptance at position 0 from which a collapse behind it is worth an alarm."""
    collapse_ratio: float = 0.1
    """Acceptance at position 1 over that at position 0."""
    calibration_error: float = 0.15
    """Mean expected calibration error over positions, weighted by their drafts."""
    step_time_bias: float = 0.25
    """|predicted / measured - 1| of the step times of a window."""
    graph_miss_share: float = 0.05
    fallback_share: float = 0.2
    """Requests verified in full because in doubt (the first block of a request aside)."""
    broken_confidence_share: float = 0.0
    rearm: float = 0.8
    """Severity below which a raised alarm is over."""


Finding = tuple[float, str]
Check = Callable[[Snapshot, Thresholds], Finding | None]


def _over(value: float, threshold: float) -> float:
    """Severity of a value that should stay at or below a threshold."""
    if threshold > 0.0:
        return value / threshold
    return 2.0 if value > 0.0 else 0.0


def _acceptance(delta: Snapshot, position: int) -> tuple[float, float]:
    """Acceptance at a position and the drafts that it is measured on."""
    where = {"position": str(position)}
    admitted = total(delta, D + "position_admitted_total", **where)
    accepted = total(delta, D + "position_accepted_total", **where)
    return (accepted / admitted if admitted else 0.0), admitted


def acceptance(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """Position 0 is never accepted: wrong draft weights, layout or target layers."""
    rate, drafts = _acceptance(delta, 0)
    if drafts < limits.min_drafts:
        return None
    severity = 2.0 - rate / limits.dead_acceptance if limits.dead_acceptance > 0 else 0.0
    return max(severity, 0.0), (
        f"only {rate:.1%} of {drafts:.0f} drafts at position 0 were accepted: the drafter does not "
        "follow this target (check the checkpoint pair and `vllm-dspark doctor`)"
    )


def collapse(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """Acceptance collapses behind position 0: a position bug or a wrong block layout."""
    first, _ = _acceptance(delta, 0)
    second, drafts = _acceptance(delta, 1)
    if drafts < limits.min_drafts:
        return None
    if first < limits.healthy_acceptance or limits.collapse_ratio <= 0:
        return 0.0, ""
    severity = 2.0 - second / first / limits.collapse_ratio
    return max(severity, 0.0), (
        f"acceptance falls from {first:.1%} at position 0 to {second:.1%} at position 1: positions "
        "of the draft block are probably shifted"
    )


def calibration(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """Predicted survivals no longer say what the target does."""
    errors = calibration_errors(delta)
    drafts = by_label(delta, D + "reliability_drafts_total", "position")
    weight = sum(drafts.values())
    if weight < limits.min_drafts or not errors:
        return None
    mean = sum(error * drafts[str(k)] for k, error in errors.items()) / weight
    worst = max(errors, key=lambda k: errors[k])
    where = {"position": str(worst)}
    count = drafts[str(worst)]
    predicted = total(delta, D + "reliability_predicted_total", **where) / count
    observed = total(delta, D + "reliability_observed_total", **where) / count
    return _over(mean, limits.calibration_error), (
        f"confidences are off by {mean:.3f} on average (position {worst}: predicted survival "
        f"{predicted:.2f}, observed {observed:.2f}); refit with `vllm-dspark calibrate`"
    )


def cost_model(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """Step times are predicted too high or too low."""
    steps = total(delta, D + "step_time_relative_error_count")
    measured = total(delta, D + "measured_step_seconds_total")
    if steps < limits.min_steps or measured <= 0.0:
        return None
    bias = total(delta, D + "predicted_step_seconds_total") / measured - 1.0
    return _over(abs(bias), limits.step_time_bias), (
        f"step times are predicted {abs(bias):.0%} too {'high' if bias > 0 else 'low'} over "
        f"{steps:.0f} steps; measure again with `vllm-dspark profile`"
    )


def graph_misses(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """Steps that should replay a graph run without one."""
    steps = total(delta, D + "steps_total")
    if steps < limits.min_steps:
        return None
    causes = by_label(delta, D + "graph_misses_total", "reason")
    share = sum(causes.values()) / steps
    return _over(share, limits.graph_miss_share), (
        f"{share:.1%} of {steps:.0f} steps found no graph ({_ranked(causes)}); look at the capture "
        "sizes"
    )


def fallbacks(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """Many requests are verified in full because an input was missing, stale or broken."""
    rows = total(delta, D + "verify_len_count")
    if rows < limits.min_drafts:
        return None
    causes = by_label(delta, D + "full_verify_rows_total", "reason")
    causes = {cause: n for cause, n in causes.items() if cause not in _EXPECTED_DOUBT}
    share = min(sum(causes.values()) / rows, 1.0)
    return _over(share, limits.fallback_share), (
        f"{share:.1%} of verified requests fell back to the full block ({_ranked(causes)})"
    )


def broken_confidences(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """The confidence head produced NaN, infinity or values outside [0, 1]."""
    rows = total(delta, D + "verify_len_count")
    if rows <= 0:
        return None
    causes = by_label(delta, D + "full_verify_rows_total", "reason")
    broken = sum(causes.get(cause, 0.0) for cause in _BROKEN_CONFIDENCE)
    return _over(broken / rows, limits.broken_confidence_share), (
        f"{broken:.0f} of {rows:.0f} verified requests had NaN or impossible confidences: the "
        "confidence head or its inputs are broken"
    )


def disagreements(delta: Snapshot, limits: Thresholds) -> Finding | None:
    """Tensor-parallel ranks would have decided differently (seen by audit and consensus checks)."""
    sites = by_label(delta, D + "rank_disagreements_total", "site")
    return _over(sum(sites.values()), 0.0), (
        f"ranks of a tensor-parallel group disagreed ({_ranked(sites)}); keep `tp_sync` on"
    )


def _ranked(causes: dict[str, float]) -> str:
    ranked = sorted(causes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{cause}: {count:.0f}" for cause, count in ranked if count)


CHECKS: dict[str, Check] = {
    "acceptance": acceptance,
    "acceptance-collapse": collapse,
    "calibration": calibration,
    "cost-model": cost_model,
    "graph-misses": graph_misses,
    "fallbacks": fallbacks,
    "broken-confidences": broken_confidences,
    "rank-disagreement": disagreements,
}


@dataclass(slots=True)
class _State:
    raised: bool = False
    said_at: float | None = None


class Alarms:
    """Messages worth a log line, from one window of counters after the other.

    Args:
        thresholds: when an alarm is raised.
        repeat_s: least seconds between two messages of the same alarm.
        remind_s: seconds after which an alarm that never ended is told again.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        *,
        repeat_s: float = 300.0,
        remind_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = thresholds or Thresholds()
        self._repeat_s, self._remind_s = repeat_s, max(repeat_s, remind_s)
        self._clock = clock
        self._states = {name: _State() for name in CHECKS}

    @property
    def raised(self) -> list[str]:
        """Names of the alarms that are on."""
        return [name for name, state in self._states.items() if state.raised]

    def check(self, snapshot_delta: Snapshot) -> list[str]:
        """Messages for what was added in a window (`difference(now, before)`), one per alarm."""
        now = self._clock()
        messages: list[str] = []
        for name, check in CHECKS.items():
            finding = check(snapshot_delta, self._limits)
            if finding is None:
                continue
            severity, text = finding
            state = self._states[name]
            if severity >= 1.0:
                wait_s = self._remind_s if state.raised else self._repeat_s
                state.raised = True
                if state.said_at is None or now - state.said_at >= wait_s:
                    state.said_at = now
                    messages.append(f"{name}: {text}")
            elif severity < self._limits.rearm:
                state.raised = False
        return messages


class AlarmLog:
    """Feeds snapshots to `Alarms` and logs what comes out.

    The window grows until there is enough in it to judge, so that a server with little traffic is
    judged too, only later.
    """

    def __init__(
        self,
        alarms: Alarms | None = None,
        logger: logging.Logger | None = None,
        *,
        thresholds: Thresholds | None = None,
    ) -> None:
        self._alarms = alarms or Alarms()
        self._logger = logger or logging.getLogger("vllm.dspark")
        self._limits = thresholds or Thresholds()
        self._before: Snapshot = {}

    def __call__(self, snapshot: Snapshot) -> None:
        delta = difference(snapshot, self._before)
        if not self._enough(delta):
            return
        self._before = snapshot
        for message in self._alarms.check(delta):
            self._logger.warning("DSpark alarm, %s", message)

    def _enough(self, delta: Snapshot) -> bool:
        steps = total(delta, D + "steps_total")
        if steps < self._limits.min_steps:
            return False
        # Behind position 0 there are fewer drafts than requests; a server that does not verify
        # any must not wait for them.
        rows = total(delta, D + "verify_len_count")
        return rows >= 2 * self._limits.min_drafts or steps >= 20 * self._limits.min_steps
