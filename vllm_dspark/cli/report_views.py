# SPDX-License-Identifier: Apache-2.0
"""Charts and figures of a report, from counters (`Snapshot`) and from recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dspark.cli.charts import Chart
from vllm_dspark.cli.costs import step_times, step_tokens
from vllm_dspark.cli.recorded import Blocks
from vllm_dspark.metrics_snapshot import PREFIX, Snapshot, by_label, calibration_errors, total
from vllm_dspark.records import StepRecord

D = PREFIX
_MOST_POINTS = 600

REASONS = {
    "trimmed": "The search found a smaller budget that pays.",
    "full_best": "Verifying everything is best at this load: there is nothing to win by trimming.",
    "gain_too_small": "A smaller budget would win less than min_gain and hysteresis ask for.",
    "latency_bound": "Verifying everything would take longer than latency_bound_ms.",
    "pinned": "budget_pin fixes the budget.",
    "static": "Nothing may be trimmed here: verify is static, or the start-up log line "
    '"DSpark verify mode" says what stands in the way.',
    "no_drafts": "Nothing had been drafted yet: the first step of a request.",
    "no_cost_model": "No step costs are known yet: give a cost_table, or leave cost_correction on.",
    "no_confidence": "The drafter publishes no confidences, so only a pin or a cap can trim.",
    "all_doubtful": "Every request was in doubt: confidences are new, stale or broken.",
    "mode_unavailable": "The host cannot run a trimmed batch in such a step.",
    "capped": "budget_cap, or a limit of the host, holds the budget and nothing was searched.",
}
"""What decided the budget of a step, by the label `reason`."""

DOUBTS = {
    "fresh": "no confidence of this request yet; expected once per request",
    "stale": "the confidences are too old or of another request",
    "non_finite": "the confidence head gave NaN or infinity",
    "out_of_range": "a confidence was outside 0 to 1",
}


@dataclass(frozen=True)
class Totals:
    """Draft tokens of the report, and what they came to."""

    blocks: float
    scheduled: float
    verified: float
    accepted: float
    steps: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> Totals:
        return cls(
            blocks=total(snapshot, D + "position_scheduled_total", position="0"),
            scheduled=total(snapshot, D + "draft_tokens_scheduled_total"),
            verified=total(snapshot, D + "draft_tokens_admitted_total"),
            accepted=total(snapshot, D + "draft_tokens_accepted_total"),
            steps=total(snapshot, D + "steps_total"),
        )

    @property
    def accept_len(self) -> float:
        return 1.0 + self.accepted / self.blocks if self.blocks else 1.0

    @property
    def verified_share(self) -> float:
        return self.verified / self.scheduled if self.scheduled else 0.0

    @property
    def accepted_share(self) -> float:
        return self.accepted / self.verified if self.verified else 0.0


@dataclass(frozen=True)
class Position:
    """One position of the block, counted from 1; rates are NaN without a draft."""

    number: int
    scheduled: float
    verified: float
    accepted: float
    conditional: float
    """Accepted over those verified whose predecessors were accepted; NaN where drafts were trimmed
    and only counters are known, which do not tell."""
    predicted: float
    observed: float
    ece: float


def positions(snapshot: Snapshot, blocks: Blocks | None = None) -> list[Position]:
    """Positions that were ever scheduled; `blocks` are the same drafts, one by one."""
    counts = {
        name: by_label(snapshot, D + f"position_{name}_total", "position")
        for name in ("scheduled", "admitted", "accepted")
    }
    sums = {
        name: by_label(snapshot, D + f"reliability_{name}_total", "position")
        for name in ("drafts", "predicted", "observed")
    }
    errors = calibration_errors(snapshot)
    found = []
    for key in sorted(counts["scheduled"], key=int):
        if not counts["scheduled"][key]:
            continue
        k = int(key)
        drafts = sums["drafts"].get(key, 0.0)
        found.append(
            Position(
                number=k + 1,
                scheduled=counts["scheduled"][key],
                verified=counts["admitted"].get(key, 0.0),
                accepted=counts["accepted"].get(key, 0.0),
                conditional=_from_counts(counts, k) if blocks is None else _from_blocks(blocks, k),
                predicted=_rate(sums["predicted"].get(key, 0.0), drafts),
                observed=_rate(sums["observed"].get(key, 0.0), drafts),
                ece=errors.get(k, float("nan")),
            )
        )
    return found


def _from_counts(counts: dict[str, dict[str, float]], k: int) -> float:
    """Conditional acceptance at position `k` (from 0) if nothing was trimmed there."""
    key = str(k)
    if counts["admitted"].get(key, 0.0) < counts["scheduled"][key]:
        return float("nan")
    before = counts["accepted"].get(str(k - 1), 0.0) if k else counts["scheduled"][key]
    return _rate(counts["accepted"].get(key, 0.0), before)


def _from_blocks(blocks: Blocks, k: int) -> float:
    reached = (blocks.verified > k) & (blocks.accepted >= k)
    return _rate(float((blocks.accepted[reached] > k).sum()), float(reached.sum()))


def mean_ece(snapshot: Snapshot) -> float:
    """Mean calibration error over positions, weighted by verified drafts; NaN without any."""
    errors = calibration_errors(snapshot)
    drafts = by_label(snapshot, D + "reliability_drafts_total", "position")
    weight = sum(drafts[str(k)] for k in errors)
    return _rate(sum(error * drafts[str(k)] for k, error in errors.items()), weight)


def reasons(snapshot: Snapshot) -> list[tuple[str, float]]:
    """What decided the budget, and its share of the steps, most frequent first."""
    return _shares(by_label(snapshot, D + "steps_total", "reason"))


def fallbacks(snapshot: Snapshot) -> list[tuple[str, float]]:
    """Cause of a full verification in doubt, and requests, most frequent first."""
    causes = by_label(snapshot, D + "full_verify_rows_total", "reason")
    return sorted(((c, n) for c, n in causes.items() if n), key=lambda item: -item[1])


# -- charts from counters ----------------------------------------------------------------------


def verify_len_chart(snapshot: Snapshot) -> Chart:
    buckets = _buckets(snapshot, "verify_len")
    return Chart(
        "Verify length",
        "tokens verified of a request in a step, anchor included",
        "requests",
        categories=[f"{edge:g}" for edge, _ in buckets],
    ).bars([count for _, count in buckets])


def tier_chart(snapshot: Snapshot) -> Chart:
    steps = by_label(snapshot, D + "tier_steps_total", "tokens")
    named = sorted(steps.items(), key=lambda item: _as_number(item[0]))
    return Chart(
        "Graph tiers",
        "token count of the replayed graph",
        "steps",
        categories=["none" if tokens == "0" else tokens for tokens, _ in named],
    ).bars([count for _, count in named])


def acceptance_chart(found: Sequence[Position]) -> Chart:
    where = range(len(found))
    return (
        Chart(
            "Acceptance by position",
            "position in the block",
            "share",
            x_range=(-0.3, len(found) - 0.7),
            y_range=(0.0, 1.0),
            categories=[str(p.number) for p in found],
        )
        .line(where, [p.conditional for p in found], "accepted if all before were")
        .line(where, [_rate(p.accepted, p.verified) for p in found], "accepted of verified")
        .line(where, [_rate(p.verified, p.scheduled) for p in found], "verified", dashed=True)
    )


def reliability_chart(snapshot: Snapshot) -> Chart:
    """Observed survival over predicted, all positions together."""
    sums = {
        name: by_label(snapshot, D + f"reliability_{name}_total", "bin")
        for name in ("drafts", "predicted", "observed")
    }
    bins = [key for key in sorted(sums["drafts"], key=float) if sums["drafts"][key] > 0]
    unit = (0.0, 1.0)
    return (
        Chart("Calibration", "predicted survival", "observed survival", x_range=unit, y_range=unit)
        .reference(unit, unit)
        .line(
            [sums["predicted"][key] / sums["drafts"][key] for key in bins],
            [sums["observed"][key] / sums["drafts"][key] for key in bins],
        )
        .dots(
            [sums["predicted"][key] / sums["drafts"][key] for key in bins],
            [sums["observed"][key] / sums["drafts"][key] for key in bins],
            opacity=1.0,
        )
    )


def reason_chart(snapshot: Snapshot) -> Chart:
    shares = reasons(snapshot)[:6]
    return Chart(
        "What decided the budget",
        "reason",
        "share of the steps",
        y_range=(0.0, 1.0),
        categories=[name for name, _ in shares],
    ).bars([share for _, share in shares])


def time_error_chart(snapshot: Snapshot) -> Chart:
    buckets = _buckets(snapshot, "step_time_relative_error")
    names = [f"≤{edge:.0%}" if np.isfinite(edge) else "more" for edge, _ in buckets]
    return Chart(
        "Step-time error", "|predicted - measured| over measured", "steps", categories=names
    ).bars([count for _, count in buckets])


def budget_fraction_chart(snapshot: Snapshot) -> Chart:
    buckets = _buckets(snapshot, "budget_fraction")
    names = [f"≤{edge:.0%}" for edge, _ in buckets if np.isfinite(edge)]
    return Chart("Verify budget", "budget over scheduled drafts", "steps", categories=names).bars(
        [count for edge, count in buckets if np.isfinite(edge)]
    )


# -- charts from records -----------------------------------------------------------------------


def budget_time_chart(records: Sequence[StepRecord]) -> Chart:
    """Scheduled and verified drafts of a step over time."""
    drafted = [r for r in records if r.verify_lens is not None and r.scheduled.sum() > 0]
    kept = drafted[:: max(len(drafted) // _MOST_POINTS, 1)]
    start = kept[0].time_s if kept else 0.0
    seconds = [r.time_s - start for r in kept]
    verified = [float((r.verify_lens - 1).sum()) for r in kept if r.verify_lens is not None]
    return (
        Chart("Budget over time", "seconds", "drafts of a step", width=940)
        .line(seconds, [float(r.scheduled.sum()) for r in kept], "scheduled", dashed=True)
        .line(seconds, verified, "verified")
    )


def tokens_chart(records: Sequence[StepRecord]) -> Chart:
    """How many steps ran how many tokens, where no graph fixes the number."""
    tokens = np.array([step_tokens(r) for r in records], dtype=np.int64)
    counts, edges = np.histogram(tokens, bins=min(16, max(len(np.unique(tokens)), 1)))
    return Chart(
        "Tokens of a step", "tokens, up to", "steps", categories=[f"{e:.0f}" for e in edges[1:]]
    ).bars(counts.astype(float))


def step_time_chart(records: Sequence[StepRecord]) -> Chart:
    """Measured and predicted time of a step over the tokens that ran."""
    times = step_times(records)
    chart = Chart("Step time", "tokens that run", "ms")
    if not len(times):
        return chart
    every = max(len(times) // _MOST_POINTS, 1)
    usual = np.flatnonzero(times.ms <= 4.0 * np.median(times.ms))[::every]
    chart.dots(times.tokens[usual], times.ms[usual], "measured", 0.35)
    if np.isfinite(times.predicted_ms[usual]).any():
        chart.dots(times.tokens[usual], times.predicted_ms[usual], "predicted", 0.35)
    return chart


# -- small things ------------------------------------------------------------------------------


def _buckets(snapshot: Snapshot, name: str) -> list[tuple[float, float]]:
    """Upper edge and count of every bucket of a histogram; the open one only if it holds any."""
    running = by_label(snapshot, D + name + "_bucket", "le")
    edges = sorted(running, key=float)
    values = [running[edge] for edge in edges]
    counts = np.diff(np.array([0.0, *values])).tolist()
    pairs = [(float(edge), count) for edge, count in zip(edges, counts, strict=True)]
    return [(edge, count) for edge, count in pairs if np.isfinite(edge) or count]


def _shares(counts: dict[str, float]) -> list[tuple[str, float]]:
    whole = sum(counts.values())
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return [(name, count / whole) for name, count in ranked if count] if whole else []


def _rate(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _as_number(text: str) -> float:
    return float(text) if text.isdigit() else float("inf")
