# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind in one batch of a small engine: all finish, greedy ones as without drafts.

The engine is made so small that prompts run in chunks, requests are preempted and resumed, and some
reach the end of the context.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from engines import STEADY, Engine, Output, assert_same_tokens, demo_prompts, request

pytestmark = pytest.mark.slow

MAX_LEN = 160
SMALL = {
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 72,
    "enable_prefix_caching": True,
    "block_size": 32,
    "structured_outputs_config": {"backend": "xgrammar"},
}
# A request of the crowd below fills four blocks of cache in the end.
FEW_BLOCKS = 16
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
}
KINDS = {
    "logprobs": {"logprobs": 2, "max_tokens": 16, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "stop token": {"max_tokens": 60},
    "json": {"structured": {"json": SCHEMA}, "max_tokens": 60},
    "regex": {"structured": {"regex": "[a-z]{4}=[0-9]{3};"}, "max_tokens": 30},
    "choice": {"structured": {"choice": ["positive", "negative"]}, "max_tokens": 30},
    "long prompt": {"max_tokens": 12, "ignore_eos": True},
    "end of context": {"max_tokens": None, "ignore_eos": True},
    "penalties": {"max_tokens": 16, "repetition_penalty": 1.3, "ignore_eos": True},
    "minimum": {"max_tokens": 16, "min_tokens": 12},
}
TRIMMED = {
    "host": ({"verify": "compact", "lens": "host"}, False),
    "host, overlap": ({"verify": "compact", "lens": "host"}, True),
    "cap-accept": ({"verify": "cap-accept"}, False),
}
"""Options, and whether the scheduler overlaps."""
SAMPLED = {"temperature": 1.0, "n": 2, "seed": 5, "max_tokens": 12, "ignore_eos": True}


def prompt_ids(count: int) -> list[list[int]]:
    """Prompts as ids, longer than one chunk."""
    from transformers import AutoTokenizer

    from vllm_dspark.cli.demo import DEMO_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    return [tokenizer(prompt).input_ids for prompt in demo_prompts(count)]


def requests_of(stop_token: int, **more: Any) -> dict[str, dict[str, Any]]:
    """One request per kind; `stop_token` occurs in the greedy continuation of its prompt, `more` is
    added to the greedy ones.
    """
    ids = prompt_ids(len(KINDS) + 1)
    found = {}
    for (kind, sampling), prompt in zip(KINDS.items(), ids, strict=False):
        prompt = prompt[:40]
        if kind == "long prompt":
            prompt = (ids[0] + ids[1])[:140]
        if kind == "end of context":
            prompt = (ids[2] + ids[3])[: MAX_LEN - 30]
        given = {"stop_token_ids": [stop_token]} if kind == "stop token" else {}
        found[kind] = request(prompt, **{**more, **sampling, **given})
    found["sampled"] = request(ids[-1][:40], **SAMPLED)
    return found


@dataclass(frozen=True)
class Served:
    """What one engine answered."""

    mixed: dict[str, list[Output]]
    again: list[Output]
    crowd: list[Output]
    counters: dict[str, float]


def serve(engine: Engine, stop_token: int, **more: Any) -> Served:
    wanted = requests_of(stop_token, **more)
    with engine.counting() as counters:
        mixed = dict(zip(wanted, engine.run(list(wanted.values())), strict=True))
        # Twice: what the first run left in the cache may have been evicted since.
        for _ in range(2):
            (again,) = engine.run([wanted["long prompt"]])
        # Eight requests that together need more cache than there is.
        crowd = engine.greedy([p[:40] for p in prompt_ids(8)], 80, **more)
    return Served(mixed, again, crowd, counters)


@pytest.fixture(scope="module")
def stop_token() -> int:
    """A token that the demo target writes within the first tokens after the third prompt."""
    with Engine(max_model_len=MAX_LEN) as engine:
        kind = list(KINDS).index("stop token")
        (output,) = engine.greedy([prompt_ids(kind + 1)[kind][:40]], 30)
    return output.token_ids[20]


@pytest.fixture(scope="module")
def plain(stop_token: int) -> Served:
    with Engine(**SMALL) as engine:
        # Logprobs of every greedy request: a differing token must be told from a near-tie. Where
        # drafts are verified, they would send every batch to the host's sampler.
        return serve(engine, stop_token, logprobs=2)


@pytest.fixture(scope="module", params=TRIMMED)
def served(request: pytest.FixtureRequest, stop_token: int) -> Iterator[Served]:
    mode, overlap = TRIMMED[request.param]
    dspark = {"strict": True, "budget_pin": 0.6, **STEADY, **mode}
    small = {**SMALL, "num_gpu_blocks_override": FEW_BLOCKS, "async_scheduling": overlap}
    with Engine(dspark, **small) as engine:
        found = serve(engine, stop_token)
        # Batches that one request sends to the host's sampler, and those that none does.
        assert set(engine.accept_paths()) == {"host", "kernel"}
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_requests_are_answered_as_without_drafts(
    served: Served, plain: Served, kind: str
) -> None:
    assert_same_tokens(plain.mixed[kind], served.mixed[kind])
    (want,), (have,) = plain.mixed[kind], served.mixed[kind]
    assert have.finish_reason == want.finish_reason
    assert have.text == want.text


def test_every_kind_did_what_it_is_there_for(served: Served, stop_token: int) -> None:
    def only(kind: str) -> Output:
        (output,) = served.mixed[kind]
        return output

    assert [len(place) >= 2 for place in only("logprobs").logprobs] == [True] * 16
    assert len(only("one token").token_ids) == 1
    assert only("stop token").finish_reason == "stop"
    assert only("stop token").token_ids[-1] == stop_token
    assert len(only("stop token").token_ids) <= 21
    document = json.loads(only("json").text)
    assert set(document) == {"name", "size"}
    assert re.fullmatch("[a-z]{4}=[0-9]{3};", only("regex").text)
    assert only("choice").text in ("positive", "negative")
    assert len(only("long prompt").prompt_ids) > SMALL["max_num_batched_tokens"]
    end = only("end of context")
    assert end.finish_reason == "length"
    assert len(end.prompt_ids) + len(end.token_ids) == MAX_LEN


def test_logprobs_are_those_without_drafts(served: Served, plain: Served) -> None:
    (want,), (have,) = plain.mixed["logprobs"], served.mixed["logprobs"]
    for expected, got in zip(want.logprobs, have.logprobs, strict=True):
        assert dict(got).keys() == dict(expected).keys()
        for token, value in dict(expected).items():
            assert dict(got)[token] == pytest.approx(value, abs=2e-3)


def test_sampled_choices_finish_and_differ(served: Served) -> None:
    first, second = served.mixed["sampled"]
    assert len(first.token_ids) == len(second.token_ids) == SAMPLED["max_tokens"]
    assert first.token_ids != second.token_ids


def test_a_cached_prompt_gives_the_same_answer(served: Served, plain: Served) -> None:
    (again,) = served.again
    assert again.cached_tokens > 0
    assert_same_tokens(plain.again, served.again)


def test_preempted_requests_resume(served: Served, plain: Served) -> None:
    assert served.counters["vllm:num_preemptions"] > 0
    assert_same_tokens(plain.crowd, served.crowd)
