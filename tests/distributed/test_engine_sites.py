# SPDX-License-Identifier: Apache-2.0
"""The places where ranks may part, one by one, in a real engine with two ranks.

Drafts are sampled here, so the tokens that rank 0 accepts count on all ranks. `test_engine_tp` has
the control with accepted tokens that are not synced.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_group import CONCURRENCY, READY_S, Disturbed, Group, by_label, server, write

from vllm_dspark.cli import demo
from vllm_dspark.cli.traffic import Client, openai_client, read_prompts

pytestmark = pytest.mark.slow

MESSAGES = "vllm:dspark_sync_messages_total"
FEW_PROMPTS, SAMPLED_TOKENS = 4, 16
COMMIT = {"kind": "commit", "ranks": [1], "every": 2}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("sampled")
    disturbed = Disturbed(folder)
    with server(
        disturbed,
        {"strict": True, "verify": "compact", "min_gain": 0.0},
        overlap=True,
        log=folder / "server.log",
        speculative={"draft_sample_method": "probabilistic"},
    ) as running:
        running.wait_ready(READY_S)
        yield Group(disturbed, running)
        running.check_alive()


@pytest.mark.parametrize(
    "fault", [COMMIT, {"kind": "flip", "ranks": [1]}], ids=["committed", "drafts"]
)
def test_greedy_tokens_stay_the_same(group: Group, fault: dict[str, object]) -> None:
    group.check_disturbed(fault)


@pytest.mark.parametrize(
    "fault",
    [COMMIT, {"kind": "flip", "ranks": [1]}, {"kind": "perturb", "ranks": [1], "size": 1e-2}],
    ids=["committed", "drafts", "confidences"],
)
def test_sampled_tokens_are_those_of_rank_0_everywhere(
    group: Group, fault: dict[str, object]
) -> None:
    start = group.disturbed.last_step() + 1
    group.disturbed.set_fault(fault)
    try:
        lengths = sampled(group.running.url)
    finally:
        group.disturbed.set_fault(None)
    assert lengths == [SAMPLED_TOKENS] * FEW_PROMPTS
    found = group.disturbed.compare(since=start)
    assert found.steps > SAMPLED_TOKENS / 8
    assert found.differing == 0, found
    steps = group.disturbed.steps()[1]
    assert any(len(ids) > 1 for s in steps if s >= start for ids in steps[s]["committed"])


def test_messages_of_both_ranks_are_counted(group: Group) -> None:
    """One message with rank 0's rows and one with its tokens, in every step that verifies."""
    messages = by_label(group.running, MESSAGES, "rank")
    assert messages["0"] == messages["1"]
    assert messages["0"] > 1.5 * len(group.disturbed.steps()[0])


def test_an_audit_counts_every_site(tmp_path: Path) -> None:
    """Every draft is verified, so ranks with other plans run the same shapes and do not hang."""
    counter, every_site = (
        "vllm:dspark_rank_disagreements_total",
        {"plan", "lens", "draft", "accept"},
    )
    disturbed, log = Disturbed(tmp_path), tmp_path / "server.log"
    dspark = {"strict": True, "verify": "cap-accept", "tp_sync": "audit", "min_gain": 0.0}
    with server(disturbed, dspark, overlap=True, log=log) as running:
        running.wait_ready(READY_S)
        client = Client(running.url, demo.SERVED_NAME)
        write(client, FEW_PROMPTS)
        assert by_label(running, counter, "site") == {}
        for fault in ({"kind": "perturb", "size": 0.3}, {"kind": "flip"}, COMMIT):
            disturbed.set_fault({"ranks": [1], **fault})
            write(client, FEW_PROMPTS)
        sites = by_label(running, counter, "site", every_site)
        ranks = by_label(running, counter, "rank")
        messages = by_label(running, MESSAGES, "rank")
    assert set(sites) == every_site
    assert set(ranks) == {"1"}, "rank 0 is what the others are compared with"
    assert not any(messages.values()), "an audit syncs nothing"
    assert "audit: rank 1 differs from rank 0 in" in log.read_text()


def sampled(url: str) -> list[int]:
    """Tokens of every answer at temperature 1."""
    client = openai_client(url, 120.0)

    def one(prompt: str) -> int:
        answer = client.completions.create(
            model=demo.SERVED_NAME,
            prompt=prompt,
            max_tokens=SAMPLED_TOKENS,
            temperature=1.0,
            seed=len(prompt),
            extra_body={"ignore_eos": True},
        )
        return int(answer.usage.completion_tokens)

    prompts = read_prompts(demo.DEMO_FOLDER / "prompts.jsonl", FEW_PROMPTS)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(one, prompts))
