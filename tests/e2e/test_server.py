# SPDX-License-Identifier: Apache-2.0
"""A real OpenAI server with the plugin and trimmed verification, used through `openai`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dspark.cli import demo
from vllm_dspark.cli.counters import settled
from vllm_dspark.cli.figures import ACCEPT_LEN_WANTED
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client, read_prompts

GAMMA = 7
KINDS = ("completion", "streamed chat", "sampled", "n=2", "logprobs")


@pytest.mark.parametrize("kind", KINDS)
def test_request(client: Client, kind: str) -> None:
    checks = client.checks()
    assert set(checks) == set(KINDS)
    assert checks[kind]()


def test_greedy_tokens_do_not_depend_on_concurrency(client: Client) -> None:
    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", 8)
    alone, _ = client.greedy_all(prompts, 24, concurrency=1)
    together, _ = client.greedy_all(prompts, 24, concurrency=8)
    assert all(d.near_tie for d in client.differences(alone, together))


def test_metrics_add_up(server: Server, client: Client) -> None:
    client.greedy_all(read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", 4), 24, concurrency=4)
    counters = settled(server.metrics_text)
    assert counters.from_plugin
    assert counters.blocks > 0
    assert counters.trimmed > 0, "the pinned budget trimmed nothing"
    text = server.metrics_text()
    plugin = totals(text, "vllm:dspark_draft_tokens_")
    assert plugin["scheduled"] == plugin["admitted"] + plugin["trimmed"]
    assert plugin["admitted"] == plugin["accepted"] + plugin["rejected"]
    # The plugin may owe the last step, of at most four requests here.
    host = totals(text, "vllm:spec_decode_num_")
    assert 0 <= host["draft_tokens"] - plugin["scheduled"] <= 4 * GAMMA
    assert 0 <= host["accepted_tokens"] - plugin["accepted"] <= 4 * GAMMA


def totals(text: str, prefix: str) -> dict[str, int]:
    found = re.findall(rf"^{prefix}(\w+)_total\{{.*\}} (\S+)$", text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


@pytest.mark.slow
def test_demo_command(tmp_path: Path) -> None:
    """The README's first command on 64 prompts: equal tokens, long enough accepted length."""
    report = tmp_path / "demo.json"
    command = [sys.executable, "-m", "vllm_dspark.cli", "demo", "--json", str(report)]
    done = subprocess.run(
        [*command, "--prompts", "64", "--tokens", "64"],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(report.read_text())
    assert record["lossless"]
    assert record["accept_len"] >= ACCEPT_LEN_WANTED
    assert record["prompts"] == 64
    assert "demo passed" in done.stdout
