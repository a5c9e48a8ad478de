# SPDX-License-Identifier: Apache-2.0
"""Options: what is accepted, and what a mistake is answered with."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dspark.config import ConfigError, DSparkConfig, Switches
from vllm_dspark.parallel.sync_sites import SyncSite, sites_for

DEFAULTS = DSparkConfig()


def message_of(options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        DSparkConfig.parse(options)
    return str(caught.value)


def test_no_options_are_the_defaults() -> None:
    assert DSparkConfig.parse(None) == DSparkConfig.parse({}) == DEFAULTS
    assert not DEFAULTS.strict
    assert DEFAULTS.verify == "auto"


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DEFAULTS.strict = True  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "static", "lens": "host", "strict": True},
        {"budget_floor": 3, "budget_cap": 0.5, "budget_pin": None},
        {"latency_bound_ms": 12.5, "min_gain": 0.0, "hysteresis": 1.0},
        {"calibration": "off", "tp_sync": "outputs", "consensus_interval": 10, "records": 4},
    ],
)
def test_valid_options_arrive_unchanged(options: dict[str, Any]) -> None:
    parsed = DSparkConfig.parse(options).model_dump()
    assert {name: parsed[name] for name in options} == options
    assert {k: v for k, v in parsed.items() if k not in options} == {
        k: v for k, v in DEFAULTS.model_dump().items() if k not in options
    }


def test_one_token_is_not_the_whole_block() -> None:
    """An integer counts tokens and a float is a fraction: 1 and 1.0 must stay what they are."""
    assert isinstance(DSparkConfig.parse({"budget_pin": 1}).budget_pin, int)
    assert isinstance(DSparkConfig.parse({"budget_pin": 1.0}).budget_pin, float)


def test_unknown_option_lists_the_valid_ones() -> None:
    message = message_of({"turbo": True})
    assert "dspark.turbo" in message
    for option in DSparkConfig.model_fields:
        assert option in message
    assert "config_file" in message


def test_misspelt_option_is_suggested() -> None:
    assert "did you mean 'min_gain'" in message_of({"min_gian": 0.1})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        # wrong type
        ("strict", "true", "true or false"),
        ("strict", 1, "true or false"),
        ("metrics", None, "true or false"),
        ("records", "64", "an integer"),
        ("records", 1.5, "an integer"),
        ("records", True, "an integer"),
        ("min_gain", "0.1", "a number"),
        ("calibration", 3, "a string"),
        ("cost_table", {}, "a string or null"),
        ("budget_cap", [1], "an integer"),
        # not one of the choices
        ("verify", "fast", "'compact'"),
        ("lens", "Host", "'host'"),
        ("tp_sync", "", "'inputs'"),
        ("tp_sync_sites", "plan", "'auto' or a list of 'plan', 'lens', 'draft', 'accept'"),
        ("tp_sync_sites", ["plans"], "'auto' or a list of 'plan', 'lens', 'draft', 'accept'"),
        ("fused_markov", "on", "'off'"),
        # out of range
        ("min_gain", 1.01, "<= 1.0"),
        ("min_gain", -0.1, ">= 0.0"),
        ("hysteresis", 2, "<= 1.0"),
        ("latency_bound_ms", 0, "> 0"),
        ("records", -1, ">= 0"),
        ("consensus_interval", -5, ">= 0"),
        ("budget_floor", -1, ">= 0"),
        ("budget_pin", 1.5, "<= 1.0"),
        ("budget_cap", -0.5, ">= 0.0"),
        # not finite
        ("min_gain", float("nan"), "a number"),
        ("budget_cap", float("nan"), "a number"),
    ],
)
def test_bad_value_names_option_value_and_allowed(option: str, value: Any, allowed: str) -> None:
    message = message_of({option: value})
    assert message.startswith(f"dspark.{option} = {value!r}: allowed: ")
    assert allowed in message


def test_every_mistake_gets_a_line() -> None:
    lines = message_of({"verify": "fast", "records": -1, "turbo": 1}).splitlines()
    assert sorted(line.split(" ")[0].rstrip(":") for line in lines) == [
        "dspark.records",
        "dspark.turbo",
        "dspark.verify",
    ]


@pytest.mark.parametrize("options", [3, True, ["strict"]])
def test_options_must_be_an_object(options: Any) -> None:
    message = message_of(options)
    assert repr(options) in message
    assert "object" in message


DEFAULT_SITES = ["plan", "lens", "draft"]


@pytest.mark.parametrize(
    ("sites", "others", "allowed"),
    [
        ([], {}, "'auto' or at least one site"),
        (["plan", "draft"], {"consensus_interval": 1}, "both of 'plan' and 'lens' or neither"),
        (["lens"], {"consensus_interval": 1}, "both of 'plan' and 'lens' or neither"),
        (["plan", "lens", "accept"], {"consensus_interval": 1}, "'accept' only with 'draft'"),
        (["plan", "lens"], {}, "'draft' as well, or consensus_interval above 0"),
        (["draft", "accept"], {}, "'plan' as well, or consensus_interval above 0"),
        (DEFAULT_SITES, {"tp_sync": "off"}, "'auto' with tp_sync = 'off'"),
        (DEFAULT_SITES, {"tp_sync": "audit"}, "'auto' with tp_sync = 'audit'"),
    ],
)
def test_sites_that_may_not_be_synced_alone(
    sites: list[str], others: dict[str, Any], allowed: str
) -> None:
    message = message_of({"tp_sync_sites": sites, **others})
    assert message.startswith(f"dspark.tp_sync_sites = {sites!r}: allowed: {allowed}")


@pytest.mark.parametrize("tp_sync", ["inputs", "outputs"])
def test_sites_that_may_be_synced(tp_sync: str) -> None:
    for sites in ("auto", DEFAULT_SITES, [*DEFAULT_SITES, "accept"]):
        assert DSparkConfig.parse({"tp_sync": tp_sync, "tp_sync_sites": sites})
    for sites in (["plan", "lens"], ["draft"], ["accept", "draft"]):
        assert DSparkConfig.parse(
            {"tp_sync": tp_sync, "tp_sync_sites": sites, "consensus_interval": 8}
        )


def test_replaced_drafts_need_accepted_tokens_where_drafts_are_sampled() -> None:
    named = DSparkConfig.parse({"tp_sync_sites": DEFAULT_SITES})
    named.check_drafting(probabilistic=False)
    with pytest.raises(ConfigError, match="'draft' only with 'accept'"):
        named.check_drafting(probabilistic=True)
    DSparkConfig.parse({"tp_sync_sites": [*DEFAULT_SITES, "accept"]}).check_drafting(
        probabilistic=True
    )
    DSparkConfig().check_drafting(probabilistic=True)
    assert sites_for("auto", probabilistic=True) == set(SyncSite)
    assert sites_for("auto", probabilistic=False) == set(DEFAULT_SITES)
    assert sites_for(["draft"], probabilistic=True) == {SyncSite.DRAFT}


class TestFile:
    """Options from a file named by `config_file` or by a string in place of the object."""

    def test_yaml_and_json_say_the_same(self, tmp_path: Path) -> None:
        yaml_file, json_file = tmp_path / "a.yaml", tmp_path / "a.json"
        yaml_file.write_text("verify: static\nrecords: 7\n")
        json_file.write_text(json.dumps({"verify": "static", "records": 7}))
        expected = DSparkConfig(verify="static", records=7)
        assert DSparkConfig.parse({"config_file": str(yaml_file)}) == expected
        assert DSparkConfig.parse({"config_file": str(json_file)}) == expected
        assert DSparkConfig.parse(str(yaml_file)) == expected

    def test_given_options_win_over_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("verify: static\nrecords: 7\n")
        parsed = DSparkConfig.parse({"config_file": str(file), "records": 9})
        assert (parsed.verify, parsed.records) == ("static", 9)

    def test_empty_file_is_the_defaults(self, tmp_path: Path) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("# nothing\n")
        assert DSparkConfig.parse(str(file)) == DEFAULTS

    def test_mistake_in_a_file_is_reported_like_any_other(self, tmp_path: Path) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("verify: fast\n")
        assert "dspark.verify = 'fast'" in message_of(str(file))

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("- a\n- b\n", "mapping"),
            ("verify: [unclosed", "config_file"),
            ("verify: !!python/object/apply:os.getcwd []", "config_file"),
            ("config_file: other.yaml\n", "cannot name another file"),
        ],
    )
    def test_unusable_file(self, tmp_path: Path, content: str, complaint: str) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(content)
        message = message_of(str(file))
        assert str(file) in message
        assert complaint in message

    def test_broken_json_and_missing_file(self, tmp_path: Path) -> None:
        broken = tmp_path / "a.json"
        broken.write_text('{"verify": ')
        assert str(broken) in message_of(str(broken))
        missing = str(tmp_path / "none.yaml")
        assert missing in message_of(missing)

    def test_file_name_must_be_a_string(self) -> None:
        assert "dspark.config_file = 5" in message_of({"config_file": 5})


@pytest.mark.parametrize("additional", [{}, {"other": 1}, None, "hash"])
def test_host_configuration_without_our_options(additional: Any) -> None:
    host = SimpleNamespace(additional_config=additional)
    assert DSparkConfig.from_vllm_config(host) == DEFAULTS


def test_host_configuration_with_our_options() -> None:
    host = SimpleNamespace(additional_config={"dspark": {"records": 3}, "other": 1})
    assert DSparkConfig.from_vllm_config(host).records == 3


class TestSwitches:
    def test_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ENABLED", "DEBUG_SCHEDULER", "LOG_GRAPH_KEY"):
            monkeypatch.delenv(f"VLLM_DSPARK_{name}", raising=False)
        expected = Switches(enabled=True, debug_scheduler=False, log_graph_key=False)
        assert Switches.from_env() == expected

    def test_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_DSPARK_ENABLED", "0")
        monkeypatch.setenv("VLLM_DSPARK_DEBUG_SCHEDULER", "1")
        monkeypatch.setenv("VLLM_DSPARK_LOG_GRAPH_KEY", "")
        expected = Switches(enabled=False, debug_scheduler=True, log_graph_key=False)
        assert Switches.from_env() == expected

    @pytest.mark.parametrize("value", ["false", "yes", "2", " 1"])
    def test_anything_else_is_an_error(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("VLLM_DSPARK_ENABLED", value)
        with pytest.raises(ConfigError, match="VLLM_DSPARK_ENABLED=.*expected 0 or 1"):
            Switches.from_env()
