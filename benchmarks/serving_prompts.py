# SPDX-License-Identifier: Apache-2.0
"""Prompts of mixed lengths from the demo texts: the same for every system, run and concurrency."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

SHORTEST, LONGEST = 32, 512


def load_texts(path: Path) -> list[str]:
    """Prompt texts of a JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def make_prompts(
    texts: Sequence[Sequence[int]], count: int, seed: int, longest: int = LONGEST
) -> list[list[int]]:
    """`count` token-id prompts; request i gets the same one whatever `count` is.

    Each starts with its own text and goes on with further ones until a length is reached that is
    drawn evenly on a logarithmic scale from `SHORTEST` to `longest` tokens.
    """
    source = random.Random(seed)
    prompts = []
    for _ in range(count):
        length = round(SHORTEST * (longest / SHORTEST) ** source.random())
        prompt: list[int] = []
        while len(prompt) < length:
            prompt += texts[source.randrange(len(texts))]
        prompts.append(prompt[:length])
    return prompts
