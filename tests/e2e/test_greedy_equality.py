# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens equal decoding without speculation, on 64 demo prompts."""

from collections.abc import Iterator

import pytest
from engines import (
    COMPARED_PROMPTS,
    COMPARED_TOKENS,
    STEADY,
    Engine,
    assert_same_tokens,
    demo_prompts,
    plain_greedy,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The plugin as it comes: `auto` takes exact host lengths on a CPU."""
    with Engine({"strict": True, **STEADY}) as running:
        yield running


def test_64_prompts(engine: Engine) -> None:
    assert engine.mode() == "host"
    with engine.counting() as counted:
        got = engine.greedy(demo_prompts(COMPARED_PROMPTS), COMPARED_TOKENS)
    assert_same_tokens(plain_greedy(), got)
    # Equality means little if nothing was accepted.
    steps = counted["vllm:spec_decode_num_drafts"]
    assert steps > COMPARED_PROMPTS
    assert counted["vllm:spec_decode_num_accepted_tokens"] / steps > 1.5


def test_trimmed_to_half(engine: Engine) -> None:
    engine.pin(0.5)
    try:
        with engine.counting() as counted:
            got = engine.greedy(demo_prompts(16), COMPARED_TOKENS)
    finally:
        engine.pin(None)
    assert_same_tokens(plain_greedy()[:16], got)
    assert counted["vllm:dspark_draft_tokens_trimmed_total"] > 0


def test_a_wrong_token_is_noticed(engine: Engine) -> None:
    """The same comparison fails when rejected drafts are kept."""
    engine.plant("keep-rejected")
    try:
        got = engine.greedy(demo_prompts(4), COMPARED_TOKENS)
    finally:
        engine.plant(None)
    with pytest.raises(AssertionError, match="instead of"):
        assert_same_tokens(plain_greedy()[:4], got)
