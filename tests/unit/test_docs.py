# SPDX-License-Identifier: Apache-2.0
"""The documents speak of things that exist: functions, options, commands, metrics, links."""

import re
from pathlib import Path

import pytest

from vllm_dspark.alarms import CHECKS
from vllm_dspark.cli import COMMANDS
from vllm_dspark.config import DSparkConfig
from vllm_dspark.core.plan import PlanReason
from vllm_dspark.metrics import CATALOGUE
from vllm_dspark.parallel.sync_sites import SyncSite

ROOT = Path(__file__).parents[2]
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
GUIDES = ("how-it-works.md", "several-ranks.md", "tuning.md", "troubleshooting.md")
CODE = "\n".join(
    path.read_text()
    for folder in ("engine", "core")
    for path in sorted((ROOT / "vllm_dspark" / folder).glob("*.py"))
)


def test_guides_are_there() -> None:
    assert set(GUIDES) <= set(DOCS)


def test_functions_of_the_diagram_exist() -> None:
    diagram = DOCS["how-it-works.md"].partition("```mermaid")[2].partition("```")[0]
    names = set(re.findall(r"(\w+)\(\)", diagram))
    assert len(names) >= 8
    assert [name for name in sorted(names) if f"    def {name}(" not in CODE] == []


def test_modules_named_in_the_diagrams_legend_exist() -> None:
    paths = re.findall(r"`((?:engine|core)/\w+\.py)`", DOCS["how-it-works.md"])
    assert paths
    assert all((ROOT / "vllm_dspark" / path).is_file() for path in paths)


@pytest.mark.parametrize("guide", GUIDES)
def test_options_exist(guide: str) -> None:
    """Keys of every dspark object in an example, and options named `dspark.x`."""
    text = DOCS[guide]
    keys = set()
    for example in re.findall(r'\{"dspark": \{(.*?)\}\}', text):
        keys |= set(re.findall(r'"(\w+)":', example))
    keys |= set(re.findall(r"`dspark\.(\w+) = ", text)) - {"x"}
    assert keys <= set(DSparkConfig.model_fields)
    if guide != "how-it-works.md":
        assert keys


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_exist(guide: str) -> None:
    named = set(re.findall(r"vllm-dspark (\w+)", DOCS[guide]))
    assert named <= set(COMMANDS)


def test_options_of_commands_exist() -> None:
    import argparse
    import importlib

    for text in (DOCS[guide] for guide in GUIDES):
        for command, rest in re.findall(r"vllm-dspark (\w+)([^\n`#|]*)", text):
            parser = argparse.ArgumentParser()
            importlib.import_module(f"vllm_dspark.cli.{command}").add_arguments(parser)
            known = {flag for action in parser._actions for flag in action.option_strings}
            assert set(re.findall(r" (--[\w-]+)", rest)) <= known, f"{command}{rest}"


@pytest.mark.parametrize("guide", GUIDES)
def test_metrics_exist(guide: str) -> None:
    exported = {metric.exported for metric in CATALOGUE}
    assert set(re.findall(r"`(vllm:dspark_\w+)`", DOCS[guide])) <= exported


def test_every_reason_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCS["tuning.md"], re.MULTILINE)
    assert set(rows) == {reason.value for reason in PlanReason}


def test_every_sync_site_is_explained() -> None:
    sites = DOCS["several-ranks.md"].partition("## Sites")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", sites, re.MULTILINE) == [str(site) for site in SyncSite]
    # Read and not imported: unit tests do without torch.
    checker = (ROOT / "vllm_dspark" / "parallel" / "consensus.py").read_text()
    seconds = re.findall(r"timeout_s: float = (\d+)", checker)[0] + " s"
    assert seconds in DOCS["several-ranks.md"] and seconds in DOCS["troubleshooting.md"]


def test_alarms_exist() -> None:
    named = set(re.findall(r"alarm `([\w-]+)`", DOCS["troubleshooting.md"]))
    assert named
    assert named <= set(CHECKS)


@pytest.mark.parametrize("name", sorted(DOCS))
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", DOCS[name]):
        assert (ROOT / "docs" / target).is_file(), target
