# SPDX-License-Identifier: Apache-2.0
"""The synchronous loop, the overlapping one, the host's sampler and ours do the same.

An outcome that a later step overwrites before it is read costs acceptance and no token (SGLang
#42465: 2.42 instead of 3.09 accepted, bytes equal), so both are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engines import (
    COMPARED_TOKENS,
    CPU_MODES,
    STEADY,
    Engine,
    assert_same_tokens,
    demo_prompts,
    plain_greedy,
)

pytestmark = pytest.mark.slow

PROMPTS = 8
PINS: list[float] = [1.0, 0.5]
SAME_ACCEPTANCE = {1.0: 0.02, 0.5: 0.06}
"""By pin. Where a step is trimmed, the last one of a request depends on what its loop knows of the
request's end, which counts in continuations as short as these."""
LOOPS = {
    "sync": (False, "auto"),
    "overlap": (True, "auto"),
    "overlap, host sampler": (True, "off"),
}


@dataclass(frozen=True)
class Loop:
    """What one loop did, by budget pin."""

    tokens: dict[float, list[list[int]]]
    accept_len: dict[float, float]


def run(mode: str, loop: str) -> Loop:
    overlap, folded = LOOPS[loop]
    dspark = {"strict": True, **STEADY, **CPU_MODES[mode], "folded_accept": folded}
    tokens, accept_len = {}, {}
    with Engine(dspark, async_scheduling=overlap) as engine:
        assert engine.overlaps() is overlap
        for pin in PINS:
            engine.pin(pin)
            with engine.counting() as counted:
                got = engine.greedy(demo_prompts(PROMPTS), COMPARED_TOKENS)
            assert_same_tokens(plain_greedy()[:PROMPTS], got)
            tokens[pin] = [output.token_ids for output in got]
            drafted = counted["vllm:spec_decode_num_drafts"]
            accept_len[pin] = 1 + counted["vllm:spec_decode_num_accepted_tokens"] / drafted
        assert set(engine.accept_paths()) == {"host" if folded == "off" else "kernel"}
    return Loop(tokens, accept_len)


@pytest.fixture(scope="module", params=CPU_MODES)
def loops(request: pytest.FixtureRequest) -> Iterator[dict[str, Loop]]:
    wanted = [loop for loop in LOOPS if request.param == "static" or "host" not in loop]
    yield {loop: run(request.param, loop) for loop in wanted}


@pytest.mark.parametrize("pin", PINS)
def test_loops_write_the_same(loops: dict[str, Loop], pin: float) -> None:
    first, *others = (loop.tokens[pin] for loop in loops.values())
    assert all(other == first for other in others)


@pytest.mark.parametrize("pin", PINS)
def test_loops_accept_the_same(loops: dict[str, Loop], pin: float) -> None:
    lengths = {name: loop.accept_len[pin] for name, loop in loops.items()}
    assert max(lengths.values()) <= min(lengths.values()) * (1 + SAME_ACCEPTANCE[pin]), lengths
    assert min(lengths.values()) > 1.5
