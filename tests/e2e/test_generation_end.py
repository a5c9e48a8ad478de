# SPDX-License-Identifier: Apache-2.0
"""Blocks at the end of the context and of the generation, in both scheduler loops.

Tokens equal plain decoding at every length around one block, and the last token of the context is
reached exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import (
    GAMMA,
    STEADY,
    Engine,
    Output,
    assert_same_tokens,
    demo_prompts,
    request,
)

pytestmark = pytest.mark.slow

# A multiple of the cache's block size: past it, a request's table has no place at all.
MAX_LEN = 96
SMALL = {"max_model_len": MAX_LEN, "block_size": 32, "max_num_seqs": 8}
FEW = list(range(1, GAMMA + 3))
LEFT = [1, 2, GAMMA - 1, GAMMA, GAMMA + 1, GAMMA + 2, 20]
"""Tokens that fit behind a prompt."""
MODES = {
    "host, sync": ({"verify": "compact", "lens": "host", "budget_pin": 0.6}, False),
    "host, overlap": ({"verify": "compact", "lens": "host", "budget_pin": 0.6}, True),
    "static, overlap": ({"verify": "static"}, True),
    "cap-accept, sync": ({"verify": "cap-accept", "budget_pin": 0.5}, False),
}


def prompt_ids() -> list[int]:
    from transformers import AutoTokenizer

    from vllm_dspark.cli.demo import DEMO_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    return [token for text in demo_prompts(4) for token in tokenizer(text).input_ids]


def requests(**more: Any) -> dict[str, Any]:
    """Requests of `FEW` tokens, and such that reach the end of the context after `LEFT`."""
    ids, greedy = prompt_ids(), {"ignore_eos": True, **more}
    few = {f"{count} tokens": request(ids[:30], max_tokens=count, **greedy) for count in FEW}
    ends = {
        f"{left} left": request(ids[: MAX_LEN - left], max_tokens=None, **greedy) for left in LEFT
    }
    return few | ends


def serve(engine: Engine, **more: Any) -> dict[str, Output]:
    wanted = requests(**more)
    alone = {name: engine.run([wanted[name]])[0][0] for name in wanted}
    together = dict(zip(wanted, engine.run(list(wanted.values())), strict=True))
    return alone | {f"{name}, in a batch": choices[0] for name, choices in together.items()}


@pytest.fixture(scope="module")
def plain() -> dict[str, Output]:
    with Engine(**SMALL) as engine:
        return serve(engine, logprobs=2)


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest) -> Iterator[dict[str, Output]]:
    dspark, overlap = MODES[request.param]
    with Engine({"strict": True, **STEADY, **dspark}, async_scheduling=overlap, **SMALL) as engine:
        assert engine.overlaps() is overlap
        yield serve(engine)


def test_every_end_is_reached_as_by_plain_decoding(
    served: dict[str, Output], plain: dict[str, Output]
) -> None:
    for name, want in plain.items():
        have = served[name]
        assert len(have.token_ids) == len(want.token_ids), name
        assert have.finish_reason == want.finish_reason == "length", name
        assert_same_tokens([want], [have])


def test_the_context_is_filled_to_its_last_token(served: dict[str, Output]) -> None:
    for name, output in served.items():
        if "left" in name:
            assert len(output.prompt_ids) + len(output.token_ids) == MAX_LEN, name
        else:
            assert len(output.token_ids) == int(name.split()[0]), name
