# SPDX-License-Identifier: Apache-2.0
"""HTML of a report: sections as text, without a template engine and without anything external."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from vllm_dspark.cli import report_views as views
from vllm_dspark.cli.charts import Chart
from vllm_dspark.metrics_snapshot import Snapshot, by_label, total
from vllm_dspark.records import StepRecord

if TYPE_CHECKING:
    from vllm_dspark.cli.recorded import Recording
    from vllm_dspark.cli.report import Comparison

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1e293b; max-width: 980px;
  margin: 2rem auto; padding: 0 1rem; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.sub { color: #64748b; margin-top: .2rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { border: 1px solid #e2e8f0; border-radius: 8px; padding: .6rem 1rem; min-width: 125px; }
.tile b { display: block; font-size: 1.45rem; }
.tile span { color: #64748b; font-size: .85rem; }
.alarm, .good, .quiet { padding: .5rem .9rem; margin: .4rem 0; }
.alarm { border-left: 4px solid #dc2626; background: #fef2f2; }
.good { border-left: 4px solid #059669; background: #ecfdf5; }
.quiet { border-left: 4px solid #94a3b8; background: #f8fafc; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #e2e8f0; text-align: right; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.wide { grid-column: 1 / -1; }
figure { margin: 0; border: 1px solid #e2e8f0; border-radius: 8px; padding: .5rem; }
figcaption { color: #64748b; font-size: .85rem; padding: 0 .5rem .3rem; }
@media (max-width: 700px) { .grid { grid-template-columns: 1fr; } }
"""


def document(subtitle: str, parts: Sequence[str]) -> str:
    """The whole page."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>DSpark report</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>DSpark report</h1><p class="sub">{escape(subtitle)}</p>\n{body}\n</body></html>\n'
    )


def summary(snapshot: Snapshot, recording: Recording | None, comparison: Comparison | None) -> str:
    """Is it helping?"""
    totals = views.Totals.of(snapshot)
    tiles = [
        (f"{totals.accept_len:.2f}", "tokens per request and step"),
        (f"{totals.verified_share:.0%}", "of the drafts verified"),
        (f"{totals.accepted_share:.0%}", "of those accepted"),
        (_number(views.mean_ece(snapshot), ".3f"), "calibration error"),
        (f"{totals.steps:.0f}", "steps"),
    ]
    boxes = "".join(
        f'<div class="tile"><b>{big}</b><span>{small}</span></div>' for big, small in tiles
    )
    text = (
        f"<p>Speculation commits {totals.accept_len:.2f} tokens per request and step, where "
        f"decoding without it commits 1. Of {totals.scheduled:.0f} scheduled drafts "
        f"{totals.verified:.0f} were verified and {totals.accepted:.0f} accepted.</p>"
    )
    top = views.reasons(snapshot)[:1]
    rest = (
        _no_comparison(recording)
        if recording is None or comparison is None
        else _comparison(recording, comparison, top[0][0] if top else "")
    )
    return f'<h2>Is it helping?</h2><div class="tiles">{boxes}</div>{text}{rest}'


def _no_comparison(recording: Recording | None) -> str:
    why = (
        "Metrics hold no step times by batch, so speed is not compared here: give step records "
        "(dspark.records) too."
        if recording is None
        else "Too few step times were recorded to compare speeds: record under different numbers "
        "of concurrent requests."
    )
    return f'<p class="quiet">{why}</p>'


def _verdict(comparison: Comparison, reason: str) -> tuple[str, str]:
    """Class and text of the answer."""
    rate = comparison.recorded_rate
    all_, none = (
        comparison.others[name].tokens_per_s for name in ("verify everything", "verify nothing")
    )
    over_none = f"{rate / none - 1:+.0%} over verifying nothing"
    if none > rate:
        return "alarm", f"No: verifying nothing would be {none / rate - 1:.0%} faster."
    if all_ > 1.02 * rate:
        return "quiet", (
            f"Yes ({over_none}), but verifying everything would be {all_ / rate - 1:.0%} faster. "
            f"What holds the budget down is “{escape(reason)}”, see below."
        )
    return "good", f"Yes: {over_none}, {rate / all_ - 1:+.0%} over verifying everything."


def _comparison(recording: Recording, comparison: Comparison, reason: str) -> str:
    blocks = recording.blocks
    rows = [
        ("as recorded", blocks.accept_len, float(blocks.verified.mean()), comparison.recorded_rate)
    ]
    rows += [
        (name, result.accept_length, result.drafts_per_request, result.tokens_per_s)
        for name, result in comparison.others.items()
    ]
    lines = "".join(
        f"<tr><td>{name}</td><td>{accept:.2f}</td><td>{drafts:.2f}</td><td>{rate:.1f}</td>"
        f"<td>{rate / comparison.recorded_rate - 1:+.0%}</td></tr>"
        for name, accept, drafts, rate in rows
    )
    kind, verdict = _verdict(comparison, reason)
    measured = (
        f"; the recorded decoding steps really made {comparison.measured_rate:.1f} tokens/s"
        if math.isfinite(comparison.measured_rate)
        else ""
    )
    return (
        f'<p class="{kind}">{verdict}</p>'
        "<table><tr><th>policy</th><th>accept length</th><th>drafts verified per request</th>"
        f"<th>tokens/s</th><th>to recorded</th></tr>{lines}</table>"
        f'<p class="sub">Predicted for {comparison.requests} requests side by side from the '
        f"recorded blocks and this server's step costs{measured}. “Verify nothing” still pays for "
        "drafting: only a run without --speculative-config shows what a server without "
        "speculation would do.</p>"
    )


def alarms(messages: Sequence[str], steps: float, needed: int) -> str:
    """What is wrong, if anything."""
    if messages:
        shown = "".join(f'<p class="alarm">{escape(message)}</p>' for message in messages)
    elif steps < needed:
        shown = f'<p class="quiet">Too little to judge: {steps:.0f} steps, {needed} are needed.</p>'
    else:
        shown = '<p class="good">None of the alarms is raised.</p>'
    return f"<h2>Alarms</h2>{shown}"


def limits(snapshot: Snapshot) -> str:
    """What decides the budget, and where doubt verified everything."""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td>{share:.1%}</td><td class="text">'
        f"{escape(views.REASONS.get(name, 'not known to this version'))}</td></tr>"
        for name, share in views.reasons(snapshot)
    )
    text = (
        "<h2>What limits the budget?</h2><table><tr><th>reason</th><th>steps</th>"
        f'<th class="text">meaning</th></tr>{rows}</table>'
    )
    causes = views.fallbacks(snapshot)
    if not causes:
        return text
    listed = "".join(
        f'<tr><td>{escape(cause)}</td><td>{count:.0f}</td><td class="text">'
        f"{escape(views.DOUBTS.get(cause, 'not known to this version'))}</td></tr>"
        for cause, count in causes
    )
    return text + (
        "<p>Requests verified in full because their confidences could not be trusted:</p>"
        '<table><tr><th>cause</th><th>requests</th><th class="text">meaning</th></tr>'
        f"{listed}</table>"
    )


def _per_step(seconds: Mapping[str, float], steps: float) -> str:
    """Host time by part, in microseconds per step."""
    return ", ".join(f"{k} {1e6 * v / steps:.0f} µs" for k, v in sorted(seconds.items()))


def ranks(snapshot: Snapshot) -> str:
    """Agreement of tensor-parallel ranks, graph misses and the cost of observing."""
    d = views.D
    misses = by_label(snapshot, d + "graph_misses_total", "reason")
    disagreed = total(snapshot, d + "rank_disagreements_total")
    messages = total(snapshot, d + "sync_messages_total")
    sync_ms = 1e3 * total(snapshot, d + "sync_seconds_total") / messages if messages else 0.0
    settled = total(snapshot, d + "steps_settled_total")
    rows = [
        (
            "steps that found no graph",
            ", ".join(f"{k}: {v:.0f}" for k, v in misses.items()) or "none",
        ),
        ("values that differed between ranks", f"{disagreed:.0f}"),
        ("host time of a TP sync", f"{sync_ms:.3f} ms" if messages else "no sync took place"),
    ]
    if settled:
        overhead = by_label(snapshot, d + "overhead_seconds_total", "part")
        host = by_label(snapshot, d + "host_seconds_total", "part", rank="0")
        rows.append(("observing, per step", _per_step(overhead, settled)))
        rows.append(("deciding, per step", _per_step(host, settled) or "nothing was decided"))
    lines = "".join(f'<tr><td>{k}</td><td class="text">{escape(v)}</td></tr>' for k, v in rows)
    return f"<h2>Host</h2><table>{lines}</table>"


def charts(
    snapshot: Snapshot, found: Sequence[views.Position], records: Sequence[StepRecord]
) -> str:
    """All charts with a sentence each; those without data are left out."""
    tiers = by_label(snapshot, views.D + "tier_steps_total", "tokens")
    eager = bool(records) and not any(count for tokens, count in tiers.items() if tokens != "0")
    shown: list[tuple[Chart, str]] = [
        (
            views.verify_len_chart(snapshot),
            "All at the right: nothing is trimmed. Length 1 is also a step that ends a prompt.",
        ),
        (
            views.tokens_chart(records) if eager else views.tier_chart(snapshot),
            "No step replayed a graph (eager): the tokens that ran."
            if eager
            else "The graph that a step replayed; spare slots of it are free.",
        ),
        (
            views.acceptance_chart(found),
            "Acceptance that falls off a cliff behind position 1 is a bug, not bad luck.",
        ),
        (
            views.reliability_chart(snapshot),
            "Below the diagonal: overconfident. `vllm-dspark calibrate` fits it.",
        ),
        (views.reason_chart(snapshot), "Explained in the table above."),
        (
            views.time_error_chart(snapshot),
            "Steps far off make the search choose badly; `vllm-dspark profile` measures again.",
        ),
        (views.budget_fraction_chart(snapshot), "Only steps that had a budget."),
    ]
    if records:
        shown.insert(6, (views.step_time_chart(records), "Slow outliers are left out."))
        shown.insert(
            0, (views.budget_time_chart(records), "Where the two lines part, drafts are trimmed.")
        )
    figures = "".join(_figure(chart, note) for chart, note in shown if not chart.empty)
    return f'<h2>Steps</h2><div class="grid">{figures}</div>'


def _figure(chart: Chart, note: str) -> str:
    kind = ' class="wide"' if chart.width > 600 else ""
    return f"<figure{kind}>{chart.svg()}<figcaption>{escape(note)}</figcaption></figure>"


def position_table(found: Sequence[views.Position]) -> str:
    """Numbers behind the acceptance and calibration charts."""
    rows = "".join(
        f"<tr><td>{p.number}</td><td>{p.scheduled:.0f}</td><td>{p.verified:.0f}</td>"
        f"<td>{p.accepted:.0f}</td><td>{_number(p.conditional, '.1%')}</td>"
        f"<td>{_number(p.predicted, '.3f')}</td><td>{_number(p.observed, '.3f')}</td>"
        f"<td>{_number(p.ece, '.3f')}</td></tr>"
        for p in found
    )
    return (
        "<h2>Positions</h2><table><tr><th>position</th><th>scheduled</th><th>verified</th>"
        "<th>accepted</th><th>if all before were</th><th>predicted survival</th><th>observed</th>"
        f"<th>ECE</th></tr>{rows}</table>"
    )


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"
