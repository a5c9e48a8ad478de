# SPDX-License-Identifier: Apache-2.0
"""A real engine with two ranks over gloo, one of them disturbed, used through the OpenAI client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_group import READY_S, WORLD, Disturbed, Group, server, write

from vllm_dspark.cli import demo
from vllm_dspark.cli.traffic import Client

pytestmark = pytest.mark.slow

TRIMMED: dict[str, Any] = {"strict": True, "verify": "compact", "min_gain": 0.0}
FAULTS = {
    "drift 1e-6": {"kind": "perturb", "ranks": [1], "size": 1e-6},
    "drift 1e-2": {"kind": "perturb", "ranks": [1], "size": 1e-2},
    "no confidences": {"kind": "missing", "ranks": [1], "every": 3},
    "NaN": {"kind": "nan", "ranks": [1], "every": 2},
    "flipped draft": {"kind": "flip", "ranks": [1], "every": 2},
    "late rank": {"kind": "late", "ranks": [1], "size": 0.02},
    "NaN on rank 0": {"kind": "nan", "ranks": [0], "every": 2},
}


@pytest.fixture(scope="module", params=["inputs", "outputs"])
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("group")
    disturbed = Disturbed(folder)
    dspark = TRIMMED | {"tp_sync": request.param}
    with server(disturbed, dspark, overlap=True, log=folder / "server.log") as running:
        running.wait_ready(READY_S)
        yield Group(disturbed, running)
        running.check_alive()


@pytest.mark.parametrize("name", FAULTS)
def test_a_disturbed_group_writes_the_same_tokens(group: Group, name: str) -> None:
    group.check_disturbed(FAULTS[name])


@pytest.mark.parametrize(
    ("dspark", "fault", "differs"),
    [
        pytest.param(
            {"tp_sync": "off"},
            {"kind": "perturb", "ranks": [1], "size": 0.3},
            "budget|tier_tokens|verify_lens",
            id="no sync",
        ),
        pytest.param(
            {"tp_sync_sites": ["plan", "lens"]},
            {"kind": "flip", "ranks": [1]},
            "drafts",
            id="drafts not synced",
        ),
        pytest.param(
            {"tp_sync_sites": ["plan", "lens", "draft"]},
            {"kind": "commit", "ranks": [1]},
            "committed",
            id="accepted tokens not synced",
        ),
    ],
)
def test_an_unsynced_group_stops_with_the_step_instead_of_hanging(
    tmp_path: Path, dspark: dict[str, Any], fault: dict[str, Any], differs: str
) -> None:
    """The control: trouble without its sync is a difference, and the checker says where."""
    disturbed, log = Disturbed(tmp_path), tmp_path / "server.log"
    disturbed.set_fault(fault)
    options = TRIMMED | {"consensus_interval": 1, **dspark}
    with server(disturbed, options, overlap=True, log=log) as running:
        running.wait_ready(READY_S)
        with pytest.raises(Exception, match="(?i)error|connection"):
            write(Client(running.url, demo.SERVED_NAME))
    text = log.read_text()
    found = re.search(r"ranks 0 and 1 of the tensor-parallel group differ in (\w+)", text)
    assert found and re.fullmatch(differs, found[1]), found
    dumps = [Path(path) for path in set(re.findall(r"\S+dspark-steps-\d+-rank\d\.jsonl", text))]
    assert len(dumps) == WORLD
    for dump in dumps:
        kinds = {json.loads(line)["kind"] for line in dump.read_text().splitlines()}
        assert kinds == {"decision", "outcome"}
        dump.unlink()
