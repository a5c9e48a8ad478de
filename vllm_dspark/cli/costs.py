# SPDX-License-Identifier: Apache-2.0
"""Cost models for the operator's commands: from recorded step times, from the header of records,
from a table.

Measured step times run from one decision to the next, so they contain drafting and host work. Steps
that replayed a graph are priced per graph, as they were measured; steps without one by a plane
(fixed + tokens + requests), since a few noisy steps per size carry no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dspark.cli import CommandError
from vllm_dspark.cli.recorded import UNTRIMMED_MODES, Floats, Ints
from vllm_dspark.core.cost_fit import StepSample, fit_cost_model, line_model
from vllm_dspark.core.cost_io import Fingerprint, FingerprintMismatch, cost_from_dict
from vllm_dspark.core.cost_model import CostModel
from vllm_dspark.core.foreign_cost import is_foreign
from vllm_dspark.core.tiers import ExecMode, TierLadder
from vllm_dspark.records import StepRecord

MIN_STEPS = 24
_TRIM_ROUNDS = 4
_TRIM_SPREADS = 4.0


@dataclass(frozen=True)
class StepTimes:
    """Measured steps, `[n]` each."""

    tokens: Ints
    """Tokens that ran, padding included."""
    requests: Ints
    ms: Floats
    graph: Ints
    """Token count of the replayed graph, 0 without one."""
    predicted_ms: Floats
    """NaN where the server had no cost model."""

    def __len__(self) -> int:
        return len(self.ms)


def step_times(records: Sequence[StepRecord]) -> StepTimes:
    """Steps of `records` whose time is known and that verified or sampled something."""
    kept = [
        r for r in records if r.measured_ms is not None and r.measured_ms > 0 and r.num_sampling > 0
    ]
    return StepTimes(
        tokens=np.array([r.tier_tokens or step_tokens(r) for r in kept], dtype=np.int64),
        requests=np.array([r.num_reqs for r in kept], dtype=np.int64),
        ms=np.array([r.measured_ms for r in kept], dtype=np.float64),
        graph=np.array([r.tier_tokens for r in kept], dtype=np.int64),
        predicted_ms=np.array(
            [np.nan if r.predicted_ms is None else r.predicted_ms for r in kept], dtype=np.float64
        ),
    )


def step_tokens(record: StepRecord) -> int:
    """Tokens that ran in a recorded step, padding left out."""
    drafts = record.scheduled.sum()
    if record.mode not in UNTRIMMED_MODES and record.verify_lens is not None:
        drafts = (record.verify_lens - 1).sum()
    return record.base_tokens + int(drafts)


def fit_times(times: StepTimes, gamma: int) -> CostModel:
    """Cost model of the measured steps.

    Raises:
        CommandError: too few steps, or all of one size.
    """
    if len(times) < MIN_STEPS:
        raise CommandError(
            f"only {len(times)} steps have a measured time, at least {MIN_STEPS} are needed; "
            "record while the server is busy"
        )
    if len(np.unique(times.tokens)) < 2:
        raise CommandError(
            f"all {len(times)} measured steps ran {times.tokens[0]} tokens, so nothing says what "
            "a token costs; record under different numbers of concurrent requests"
        )
    graphs, eager = times.graph > 0, times.graph == 0
    if not graphs.any():
        return _plane(times, eager)
    samples = [
        StepSample(tokens=int(t), requests=int(r), verify_ms=float(ms))
        for t, r, ms in zip(
            times.tokens[graphs], times.requests[graphs], times.ms[graphs], strict=True
        )
    ]
    ladder = TierLadder(np.unique(times.graph[graphs]).tolist())
    model = fit_cost_model(samples, {ExecMode.FULL: ladder}, gamma)
    if len(np.unique(times.tokens[eager])) < 2 or np.count_nonzero(eager) < MIN_STEPS:
        return model
    line = _plane(times, eager, request_ms=model.request_ms)
    return replace(model, verify={**model.verify, **line.verify})


def _plane(times: StepTimes, rows: Any, request_ms: float | None = None) -> CostModel:
    """Least squares without outliers; `request_ms` None fits it where requests vary."""
    tokens = times.tokens[rows].astype(np.float64)
    requests = times.requests[rows].astype(np.float64)
    ms = times.ms[rows] - (request_ms or 0.0) * requests
    columns = [np.ones_like(tokens), tokens]
    if request_ms is None and _tell_apart(tokens, requests):
        columns.append(requests)
    found = _robust(np.stack(columns, axis=1), ms)
    if len(found) == 3 and found[2] < 0.0:
        found = _robust(np.stack(columns[:2], axis=1), ms)
    slope = max(float(found[1]), 0.0)
    per_request = float(found[2]) if len(found) == 3 else 0.0
    rest = ms - slope * tokens - per_request * requests
    return line_model(tokens, rest, ms, slope, request_ms or per_request)


def _tell_apart(tokens: Floats, requests: Floats) -> bool:
    """Whether tokens and requests vary independently enough to price both."""
    if requests.std() == 0.0 or tokens.std() == 0.0:
        return False
    return abs(float(np.corrcoef(tokens, requests)[0, 1])) < 0.98


def _robust(x: Floats, y: Floats) -> Floats:
    keep = y <= 3.0 * np.median(y)
    found: Floats = np.zeros(x.shape[1])
    for _ in range(_TRIM_ROUNDS):
        found = np.linalg.lstsq(x[keep], y[keep], rcond=None)[0]
        residual = np.abs(y - x @ found)
        spread = 1.4826 * float(np.median(residual)) + 1e-9
        keep = residual <= _TRIM_SPREADS * spread
    return found


def predict_ms(cost: CostModel, times: StepTimes) -> Floats:
    """Step times `[n]` that `cost` gives for measured steps, drafting included."""
    found = np.empty(len(times))
    for i, (tokens, requests, graph) in enumerate(
        zip(times.tokens.tolist(), times.requests.tolist(), times.graph.tolist(), strict=True)
    ):
        mode = ExecMode.FULL if graph else ExecMode.EAGER
        verify = cost.step_ms(np.array([tokens]), requests, logit_rows=tokens, mode=mode)
        found[i] = float(verify[0]) + cost.draft_ms(requests)
    return found


# -- headers and tables ------------------------------------------------------------------------


def recorded_fingerprint(meta: Mapping[str, Any]) -> Fingerprint | None:
    """Fingerprint in the header of records, None if it carries none (a trace, an older server)."""
    given = meta.get("fingerprint")
    if not isinstance(given, Mapping) or set(given) != {f.name for f in fields(Fingerprint)}:
        return None
    return Fingerprint(**{**given, "graph_ladder": tuple(given["graph_ladder"])})


def recorded_cost(meta: Mapping[str, Any]) -> CostModel | None:
    """Cost model that the server used when the records were written, None if it had none."""
    given = meta.get("cost")
    try:
        return None if given is None else cost_from_dict(given)
    except ValueError as error:
        raise CommandError(f"the cost model in the header of the records: {error}") from None


@dataclass(frozen=True)
class Table:
    """A cost model for a replay, and the graph tiers that belong to it."""

    name: str
    cost: CostModel | None
    ladder: TierLadder

    @classmethod
    def of(cls, name: str, cost: CostModel | None, fingerprint: Fingerprint | None) -> Table:
        return cls(name, cost, TierLadder(fingerprint.graph_ladder if fingerprint else ()))


def read_table(path: Path, expected: Fingerprint | None) -> Table:
    """A cost table to replay with: another GPU is a fair question, another model is a mistake.

    Raises:
        CommandError: missing, damaged, or of another model or gamma than `expected`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, Mapping):
            raise ValueError(f"must be an object, got {type(data).__name__}")
        cost = cost_from_dict(data)
        fingerprint = None if is_foreign(data) else _fingerprint(data)
        if expected is not None and fingerprint is not None:
            _same_model(fingerprint, expected)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise CommandError(f"{path}: not JSON ({error}); is the file complete?") from None
    except (ValueError, TypeError) as error:
        raise CommandError(f"{path}: {error}") from None
    return Table.of(path.name, cost, fingerprint)


def _fingerprint(data: Mapping[str, Any]) -> Fingerprint:
    found = recorded_fingerprint(data)
    if found is None:
        raise ValueError("its fingerprint is missing or incomplete")
    return found


def _same_model(fingerprint: Fingerprint, expected: Fingerprint) -> None:
    for name in ("model", "gamma"):
        there, here = getattr(fingerprint, name), getattr(expected, name)
        if there != here:
            raise FingerprintMismatch(
                f"cost table was measured with {name}={there!r}, the records come from "
                f"{name}={here!r}"
            )
