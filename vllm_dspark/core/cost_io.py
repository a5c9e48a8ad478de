# SPDX-License-Identifier: Apache-2.0
"""Cost files: our JSON with a fingerprint, and foreign tables.

A table measured on another deployment misleads silently, so ours carries a `Fingerprint` and
loading refuses on the first field that differs. Foreign tables carry none and are taken as they
are; which one a file is follows from its fields (see `foreign_cost`). Everything is validated;
errors name the field.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_dspark.core.cost_model import CostModel, Curve, CurveRule
from vllm_dspark.core.foreign_cost import foreign_cost_from_dict, is_foreign
from vllm_dspark.core.json_fields import json_object, number, numbers
from vllm_dspark.core.tiers import ExecMode

FORMAT = "vllm-dspark-cost"
_TERMS = ("draft_slot_ms", "context_token_ms", "logit_row_ms", "request_ms", "ragged_ms")


class FingerprintMismatch(ValueError):
    """The table was measured on another deployment."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a cost table depends on."""

    gpu: str
    model: str
    tp: int
    graph_ladder: tuple[int, ...]
    gamma: int
    dtype: str

    def check(self, recorded: Mapping[str, Any]) -> None:
        """Compare with the fingerprint of a file.

        Raises:
            FingerprintMismatch: naming the first field that differs, its value here and there.
        """
        for item in fields(self):
            here, there = getattr(self, item.name), recorded.get(item.name)
            if isinstance(here, tuple):
                here = list(here)
            if here != there:
                raise FingerprintMismatch(
                    f"cost table was measured with {item.name}={there!r}, this deployment has "
                    f"{item.name}={here!r}; profile again or remove the table"
                )


def cost_to_dict(model: CostModel, fingerprint: Fingerprint) -> dict[str, Any]:
    """JSON form of a model."""
    return {
        "format": FORMAT,
        "fingerprint": {**asdict(fingerprint), "graph_ladder": list(fingerprint.graph_ladder)},
        "verify": {mode.value: _curve_to_dict(curve) for mode, curve in model.verify.items()},
        "draft": None if model.draft is None else _curve_to_dict(model.draft),
        "draft_width": model.draft_width,
        "draft_widths": {
            str(width): _curve_to_dict(curve) for width, curve in model.draft_widths.items()
        },
        "requests": None if model.requests is None else _curve_to_dict(model.requests),
        **{name: getattr(model, name) for name in _TERMS},
    }


def cost_from_dict(data: Mapping[str, Any], expected: Fingerprint | None = None) -> CostModel:
    """Read our form or a foreign table.

    Args:
        data: the parsed file.
        expected: this deployment; None skips the check (inspection only).

    Raises:
        FingerprintMismatch: see `Fingerprint.check`.
        ValueError: on an unknown form or an invalid value.
    """
    if is_foreign(data):
        return foreign_cost_from_dict(data)
    if data.get("format") != FORMAT:
        raise ValueError(f"not a cost table: unknown fields {sorted(data)}")
    if expected is not None:
        expected.check(json_object(data.get("fingerprint"), "fingerprint"))
    verify = json_object(data.get("verify"), "verify")
    unknown = set(verify) - {mode.value for mode in ExecMode}
    if unknown:
        raise ValueError(f"verify: unknown modes {sorted(unknown)}, allowed {list(ExecMode)}")
    return CostModel(
        verify={ExecMode(name): _curve(curve, f"verify.{name}") for name, curve in verify.items()},
        draft=_optional_curve(data.get("draft"), "draft"),
        draft_width=int(number(data.get("draft_width", 0), "draft_width")),
        draft_widths={
            int(width): _curve(curve, f"draft_widths.{width}")
            for width, curve in json_object(data.get("draft_widths", {}), "draft_widths").items()
        },
        requests=_optional_curve(data.get("requests"), "requests"),
        **{name: number(data.get(name, 0.0), name) for name in _TERMS},
    )


def save_cost(model: CostModel, fingerprint: Fingerprint, path: str | Path) -> None:
    """Write our form."""
    Path(path).write_text(json.dumps(cost_to_dict(model, fingerprint), indent=1) + "\n")


def load_cost(path: str | Path, expected: Fingerprint | None = None) -> CostModel:
    """Read a cost file; errors keep their type and name the file."""
    try:
        data = json.loads(Path(path).read_text())
        return cost_from_dict(json_object(data, "cost table"), expected)
    except FingerprintMismatch as error:
        raise FingerprintMismatch(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _curve_to_dict(curve: Curve) -> dict[str, Any]:
    return {
        "sizes": [int(x) for x in curve.sizes],
        "ms": [float(x) for x in curve.ms],
        "limit": curve.limit,
        "rule": curve.rule.value,
    }


def _curve(data: Any, name: str) -> Curve:
    entry = json_object(data, name)
    limit, rule = entry.get("limit"), entry.get("rule", CurveRule.NEXT.value)
    if rule not in list(CurveRule):
        raise ValueError(f"{name}.rule={rule!r}: must be one of {[r.value for r in CurveRule]}")
    try:
        return Curve(
            numbers(entry.get("sizes"), f"{name}.sizes").astype(int),
            numbers(entry.get("ms"), f"{name}.ms"),
            None if limit is None else int(number(limit, f"{name}.limit")),
            CurveRule(rule),
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _optional_curve(data: Any, name: str) -> Curve | None:
    return None if data is None else _curve(data, name)
