# SPDX-License-Identifier: Apache-2.0
"""Fewer drafts than the draft model was trained for: less is accepted, nothing changes."""

import pytest
from engines import (
    COMPARED_TOKENS,
    STEADY,
    Engine,
    EngineFailure,
    assert_same_tokens,
    demo_prompts,
    plain_greedy,
)

pytestmark = pytest.mark.slow

PROMPTS = 6


@pytest.mark.parametrize("drafts", [1, 3])
def test_short_blocks(drafts: int) -> None:
    """vLLM #50012: three drafts of a block of seven."""
    dspark = {"strict": True, **STEADY}
    with (
        Engine(dspark, {"num_speculative_tokens": drafts}) as engine,
        engine.counting() as counted,
    ):
        got = engine.greedy(demo_prompts(PROMPTS), COMPARED_TOKENS)
    assert_same_tokens(plain_greedy()[:PROMPTS], got)
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    assert 0.3 < accepted / counted["vllm:spec_decode_num_drafts"] <= drafts


def test_a_block_longer_than_trained_is_refused() -> None:
    with pytest.raises(EngineFailure, match=r"num_speculative_tokens: expected at most 7"):
        Engine({"strict": True}, {"num_speculative_tokens": 9})
