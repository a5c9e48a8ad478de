# SPDX-License-Identifier: Apache-2.0
"""A real engine with two ranks over gloo, one of them disturbed, used through the OpenAI client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_group import WORLD, Disturbed, server

from vllm_dspark.cli import demo
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client, Greedy, read_prompts

pytestmark = pytest.mark.slow

PROMPTS, TOKENS, CONCURRENCY = 8, 32, 4
READY_S = 240.0
FAULTS = {
    "drift 1e-6": {"kind": "perturb", "rank": 1, "size": 1e-6},
    "drift 1e-2": {"kind": "perturb", "rank": 1, "size": 1e-2},
    "no confidences": {"kind": "missing", "rank": 1, "every": 3},
    "NaN": {"kind": "nan", "rank": 1, "every": 2},
    "flipped draft": {"kind": "flip", "rank": 1, "every": 2},
    "late rank": {"kind": "late", "rank": 1, "size": 0.02},
    "NaN on rank 0": {"kind": "nan", "rank": 0, "every": 2},
}


class Group:
    """A running server, its client, and what it writes undisturbed."""

    def __init__(self, disturbed: Disturbed, running: Server) -> None:
        self.disturbed, self.running = disturbed, running
        self.client = Client(running.url, demo.SERVED_NAME)
        self.undisturbed = self.write()

    def write(self) -> list[Greedy]:
        prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", PROMPTS)
        return self.client.greedy_all(prompts, TOKENS, CONCURRENCY)[0]


@pytest.fixture(scope="module", params=["inputs", "outputs"])
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("group")
    dspark = {"strict": True, "verify": "compact", "tp_sync": request.param, "min_gain": 0.0}
    disturbed = Disturbed(folder)
    with server(disturbed, dspark, overlap=True, log=folder / "server.log") as running:
        running.wait_ready(READY_S)
        yield Group(disturbed, running)
        running.check_alive()


@pytest.mark.parametrize("name", FAULTS)
def test_a_disturbed_group_writes_the_same_tokens(group: Group, name: str) -> None:
    start = group.disturbed.last_step() + 1
    group.disturbed.set_fault(FAULTS[name])
    try:
        written = group.write()
    finally:
        group.disturbed.set_fault(None)
    differences = group.client.differences(group.undisturbed, written)
    assert all(difference.near_tie for difference in differences), differences
    different, compared = group.disturbed.divergences(since=start)
    assert compared > TOKENS / 8
    assert different == 0
    steps = group.disturbed.steps()[0].values()
    assert sum(step["budget"] is not None for step in steps) > len(steps) / 2, "nothing trimmed"


def test_an_unsynced_group_stops_with_the_step_instead_of_hanging(tmp_path: Path) -> None:
    """The control: the same drift without a sync is a difference, and the checker says where."""
    disturbed, log = Disturbed(tmp_path), tmp_path / "server.log"
    dspark = {
        "strict": True,
        "verify": "compact",
        "tp_sync": "off",
        "consensus_interval": 1,
        "min_gain": 0.0,
    }
    disturbed.set_fault({"kind": "perturb", "rank": 1, "size": 0.3})
    with server(disturbed, dspark, overlap=True, log=log) as running:
        running.wait_ready(READY_S)
        client = Client(running.url, demo.SERVED_NAME)
        prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", PROMPTS)
        with pytest.raises(Exception, match="(?i)error|connection"):
            client.greedy_all(prompts, TOKENS, CONCURRENCY)
    text = log.read_text()
    assert "ranks 0 and 1 of the tensor-parallel group differ" in text
    dumps = [Path(path) for path in set(re.findall(r"\S+dspark-steps-\d+-rank\d\.jsonl", text))]
    assert len(dumps) == WORLD
    for dump in dumps:
        kinds = {json.loads(line)["kind"] for line in dump.read_text().splitlines()}
        assert kinds == {"decision", "outcome"}
        dump.unlink()
