# SPDX-License-Identifier: Apache-2.0
"""Options of the plugin: one typed, strict object.

Source order, later wins: defaults, the YAML or JSON file named by ``config_file``, the keys given
in ``--additional-config '{"dspark": {...}}'``. The environment carries process switches only
(``Switches``).

Every mistake is a ``ConfigError`` that names the option, the value and what would be valid. Nothing
is guessed: an unknown key is an error, ``"true"`` is not a boolean, and ``1`` (tokens) is not
``1.0`` (a fraction of the drafts).
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError

from vllm_dspark.parallel.sync_sites import objection, sites_for

NAMESPACE = "dspark"


class ConfigError(ValueError):
    """An option of the plugin is unknown, has the wrong type or is out of range."""


Tokens = Annotated[StrictInt, Field(ge=0)]
Fraction = Annotated[StrictFloat, Field(ge=0.0, le=1.0)]


class DSparkConfig(BaseModel):
    """Effective options of one server.

    A budget bound (``budget_floor``, ``budget_cap``, ``budget_pin``) is a number of draft tokens
    per step when it is an integer and a fraction of the scheduled drafts when it is a float.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    strict: bool = Field(
        False, description="Refuse to start, instead of falling back to the host's own DSpark."
    )
    verify: Literal["auto", "static", "cap-accept", "compact"] = Field(
        "auto",
        description="static verifies every draft, cap-accept verifies every draft and commits only "
        "the planned ones, compact runs only the planned ones, auto takes compact if it can run.",
    )
    lens: Literal["auto", "host", "uniform", "device"] = Field(
        "auto",
        description="Who fixes verify_lens in compact mode: the host from lagged confidences "
        "(exact lengths everywhere), the host with one length for all requests, or the device "
        "from the live block.",
    )
    budget_floor: Tokens | Fraction = Field(
        0, description="Fewest drafts to verify per step (tokens, or a fraction of the drafts)."
    )
    budget_cap: Tokens | Fraction | None = Field(
        None, description="Most drafts to verify per step (tokens, or a fraction of the drafts)."
    )
    budget_pin: Tokens | Fraction | None = Field(
        None, description="Verify exactly this many drafts per step; for profiling and tests."
    )
    draft_width: Literal["auto"] | Annotated[StrictInt, Field(ge=1)] = Field(
        "auto", description="Slots of a drafted block: chosen by the load, or always this many."
    )
    draft_weights: Literal["auto", "model", "fp8"] = Field(
        "auto",
        description="The draft's layers and its LM head: as loaded, or FP8 copies; auto takes FP8 "
        "for what the device and the host can run so. The target verifies with its own weights, so "
        "only the accepted length can change.",
    )
    folded_accept: Literal["auto", "off"] = Field(
        "auto",
        description="Accept greedy batches in a captured graph, or a kernel of ours where no graph "
        "fits; off leaves every batch to the host's sampler.",
    )
    fused_markov: Literal["auto", "off"] = Field(
        "auto",
        description="Sample a vanilla Markov head with fused kernels where they run, or always "
        "with the host's own loop.",
    )
    mixed_graphs: Literal["auto", "piecewise", "full"] = Field(
        "auto",
        description="Graphs for steps that mix prefill and decode: full ones where the attention "
        "backends replay any batch and no KV connector is configured, or the host's piecewise "
        "ones.",
    )
    block_attention: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Attention of verify blocks by a kernel with tiles of their size, instead of "
        "FlashAttention 3: in large batches with heads of 64, where it was measured to be faster, "
        "wherever it can compute it, or never.",
    )
    min_gain: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.02, description="Predicted gain in tokens per second that a trimmed step must promise."
    )
    hysteresis: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.01, description="Extra predicted gain before the choice between trimming and not flips."
    )
    latency_bound_ms: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="Highest predicted step time in milliseconds that a plan may have."
    )
    cost_table: str | None = Field(
        None, description="Cost table (JSON) to use instead of the one profiled at start-up."
    )
    cost_correction: bool = Field(
        True,
        description="Correct the cost table from the step times seen while serving, or fit one "
        "from them where nothing is profiled at start-up.",
    )
    calibration: str = Field(
        "online",
        description="'online' fits confidences while serving, 'off' uses them raw, anything else "
        "is the path of a calibration file.",
    )
    tp_sync: Literal["inputs", "outputs", "audit", "off"] = Field(
        "inputs",
        description="How a tensor-parallel group agrees: rank 0's confidences are broadcast, its "
        "plan is broadcast, differences are only counted, or nothing is done.",
    )
    tp_sync_sites: Literal["auto"] | list[Literal["plan", "lens", "draft", "accept"]] = Field(
        "auto",
        description="Values that rank 0 decides for the group: budget and graph tier, drafts per "
        "request, drafted ids, accepted tokens. auto takes all that the way of drafting needs; "
        "others are for measurements.",
    )
    consensus_interval: Annotated[int, Field(ge=0)] = Field(
        0, description="Compare the plans of all ranks every this many steps; 0 never."
    )
    records: Annotated[int, Field(ge=0)] = Field(
        0, description="Steps kept in the record ring; 0 keeps none."
    )
    records_path: str | None = Field(
        None,
        description="File (.jsonl or .parquet) that the records are written to whenever the server "
        "falls idle, and at exit.",
    )
    metrics: bool = Field(True, description="Publish vllm:dspark_* on the server's /metrics.")

    @classmethod
    def parse(cls, options: Any) -> DSparkConfig:
        """Options from ``additional_config["dspark"]``: a mapping, the path of a file, or None.

        Raises:
            ConfigError: unknown key, wrong type, out of range, or an unreadable file.
        """
        if options is None:
            return cls()
        if isinstance(options, str):
            options = {"config_file": options}
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"{NAMESPACE} = {options!r}: expected an object of options or the path of a file"
            )
        given = dict(options)
        path = given.pop("config_file", None)
        merged = {**(_load_file(path) if path is not None else {}), **given}
        try:
            config = cls.model_validate(merged)
        except ValidationError as error:
            raise ConfigError(_explain(error, merged)) from None
        # Of what a server drafts nothing is known yet; `check_drafting` looks again.
        config.check_drafting(probabilistic=False)
        return config

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> DSparkConfig:
        """Options carried by a host configuration's ``additional_config``."""
        additional = vllm_config.additional_config
        if not isinstance(additional, Mapping):
            return cls()
        return cls.parse(additional.get(NAMESPACE))

    def check_block(self, gamma: int) -> None:
        """Compare the options with the number of drafts per block.

        Raises:
            ConfigError: ``draft_width`` is wider than the block, or narrower where every slot of
                the block is verified whether it was drafted or not.
        """
        width = self.draft_width
        if width == "auto" or width == gamma:
            return
        given = f"{NAMESPACE}.draft_width = {width}: allowed: "
        if width > gamma:
            raise ConfigError(
                f"{given}'auto' or an integer from 1 to num_speculative_tokens = {gamma}"
            )
        if self.verify in ("static", "cap-accept"):
            raise ConfigError(
                f"{given}'auto' or {gamma} with verify = {self.verify!r}, which verifies every slot"
            )

    def check_drafting(self, *, probabilistic: bool) -> None:
        """Compare the options with the way of drafting.

        Raises:
            ConfigError: ``tp_sync_sites`` names sites that may not be synced alone.
        """
        chosen = self.tp_sync_sites
        if chosen == "auto":
            return
        allowed = objection(
            sites_for(chosen, probabilistic),
            protocol=self.tp_sync,
            checked=self.consensus_interval > 0,
            probabilistic=probabilistic,
        )
        if allowed:
            raise ConfigError(f"{NAMESPACE}.tp_sync_sites = {chosen!r}: allowed: {allowed}")


@dataclass(frozen=True)
class Switches:
    """Process switches, read from the environment once per call."""

    enabled: bool
    debug_scheduler: bool
    log_graph_key: bool

    @classmethod
    def from_env(cls) -> Switches:
        """Raises ``ConfigError`` on a value that is neither 0 nor 1."""
        return cls(
            enabled=_flag("VLLM_DSPARK_ENABLED", default=True),
            debug_scheduler=_flag("VLLM_DSPARK_DEBUG_SCHEDULER", default=False),
            log_graph_key=_flag("VLLM_DSPARK_LOG_GRAPH_KEY", default=False),
        )


def _flag(name: str, *, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None or value == "":
        return default
    if value in ("0", "1"):
        return value == "1"
    raise ConfigError(f"{name}={value!r}: expected 0 or 1")


def _load_file(path: Any) -> dict[str, Any]:
    if not isinstance(path, str):
        raise ConfigError(f"{NAMESPACE}.config_file = {path!r}: expected the path of a file")
    try:
        text = Path(path).read_text(encoding="utf-8")
        # JSON is a subset of YAML, but its own parser gives positions that match the file.
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            f"{NAMESPACE}.config_file = {path!r}: {error.strerror or error}"
        ) from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{NAMESPACE}.config_file = {path!r}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{NAMESPACE}.config_file = {path!r}: expected a mapping of options")
    if "config_file" in content:
        raise ConfigError(f"{NAMESPACE}.config_file = {path!r}: a file cannot name another file")
    return content


def _explain(error: ValidationError, given: Mapping[str, Any]) -> str:
    """One line per mistake: option, value, what is allowed."""
    valid = sorted([*DSparkConfig.model_fields, "config_file"])
    lines: dict[str, str] = {}
    for item in error.errors():
        option = str(item["loc"][0]) if item["loc"] else "?"
        if option in lines:
            continue
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(option, valid, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            lines[option] = (
                f"{NAMESPACE}.{option}: unknown option{hint}; valid options: {', '.join(valid)}"
            )
        else:
            lines[option] = (
                f"{NAMESPACE}.{option} = {given.get(option)!r}: allowed: {allowed_values(option)}"
            )
    return "\n".join(lines.values())


def allowed_values(option: str) -> str:
    """Valid values of an option in words, derived from its JSON schema."""
    schema = DSparkConfig.model_json_schema()["properties"][option]
    return " or ".join(_describe(part) for part in schema.get("anyOf", [schema]))


def _describe(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return ", ".join(repr(value) for value in schema["enum"])
    if schema["type"] == "array":
        return f"a list of {_describe(schema['items'])}"
    if schema["type"] == "null":
        return "null"
    words = {"boolean": "true or false", "string": "a string", "integer": "an integer"}
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="))
        if key in schema
    ]
    return " ".join([words.get(schema["type"], "a number"), " and ".join(bounds)]).strip()
