# SPDX-License-Identifier: Apache-2.0
"""Workloads of the tensor-parallel runs: fixed lists of requests, and what became of each.

A workload is a function of prompts and of the longest output; it gives one request per prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from openai import APITimeoutError

from vllm_dspark.cli.traffic import Client, Greedy, openai_client

REQUEST_LIMIT_S = 300.0
LONG_PROMPT_CHARACTERS = 1200


@dataclass(frozen=True)
class Request:
    """Exactly `tokens` tokens after a prompt."""

    prompt: str
    tokens: int
    temperature: float = 0.0
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """More keys of the completion request."""
    delay_s: float = 0.0
    """It is sent so long after its turn."""
    leaves: bool = False
    """The client goes away after the first piece of the answer."""


@dataclass(frozen=True)
class Answer:
    """`outcome` is ok, hang, error, truncated or left (the client went away as planned)."""

    outcome: str
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    detail: str = ""


Workload = Callable[[Sequence[str], int], list[Request]]


def even(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy, all equally long."""
    return [Request(prompt, tokens) for prompt in prompts]


def uneven(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy, from an eighth of the tokens to all, so that batches shrink and prefills mix in."""
    return [Request(prompt, max(tokens * (1 + i % 8) // 8, 1)) for i, prompt in enumerate(prompts)]


def long_prompts(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy after several prompts in one: steps that verify and prefill together."""
    joined = ["\n".join([*prompts[i:], *prompts[:i]]) for i in range(len(prompts))]
    return [Request(text[:LONG_PROMPT_CHARACTERS], max(tokens // 2, 1)) for text in joined]


def short(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy, one to four tokens: requests come and go in every step."""
    return [Request(prompt, 1 + i % 4) for i, prompt in enumerate(prompts)]


def staggered(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy, one after the other, so that the batch grows request by request."""
    return [Request(prompt, tokens, delay_s=0.02 * i) for i, prompt in enumerate(prompts)]


def one_prompt(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy, the same prompt everywhere: confidences tie between requests."""
    return [Request(prompts[0], tokens) for _ in prompts]


def sampled(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Temperature 0.8; every other request is greedy."""
    return [
        Request(prompt, tokens, 0.8 if i % 2 else 0.0, seed=i if i % 2 else None)
        for i, prompt in enumerate(prompts)
    ]


def nucleus(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Sampled from the 40 best tokens with 0.9 of the mass."""
    options = {"top_p": 0.9, "extra_body": {"top_k": 40}}
    return [Request(prompt, tokens, 1.0, i, options) for i, prompt in enumerate(prompts)]


def logprobs(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy; every other request wants the three best tokens."""
    return [
        Request(prompt, tokens, options={"logprobs": 3} if i % 2 else {})
        for i, prompt in enumerate(prompts)
    ]


def leaving(prompts: Sequence[str], tokens: int) -> list[Request]:
    """Greedy; the clients of every third request go away early."""
    return [Request(prompt, tokens, leaves=i % 3 == 2) for i, prompt in enumerate(prompts)]


WORKLOADS: dict[str, Workload] = {
    "even": even,
    "uneven": uneven,
    "long prompts": long_prompts,
    "short": short,
    "staggered": staggered,
    "one prompt": one_prompt,
    "sampled": sampled,
    "nucleus": nucleus,
    "logprobs": logprobs,
    "leaving": leaving,
}


def build(name: str, prompts: Sequence[str], count: int, tokens: int) -> list[Request]:
    """`count` requests of a workload; prompts come again where there are fewer.

    They are the first ones of any larger count, so that answers can be compared.
    """
    most = max(count, len(prompts))
    return WORKLOADS[name](list(islice(cycle(prompts), most)), tokens)[:count]


def send(
    url: str,
    model: str,
    requests: Sequence[Request],
    concurrency: int,
    limit_s: float = REQUEST_LIMIT_S,
) -> list[Answer]:
    """What became of `requests`, `concurrency` of them at a time; one of `limit_s` is a hang."""
    client = openai_client(url, limit_s)
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: _one(client, model, request), requests))


def _one(client: Any, model: str, request: Request) -> Answer:
    time.sleep(request.delay_s)
    options = dict(request.options)
    body = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
    try:
        answer = client.completions.create(
            model=model,
            prompt=request.prompt,
            max_tokens=request.tokens,
            temperature=request.temperature,
            seed=request.seed,
            stream=request.leaves,
            extra_body=body,
            **options,
        )
        if request.leaves:
            next(iter(answer))
            answer.close()
            return Answer("left")
    except APITimeoutError as error:
        return Answer("hang", detail=str(error))
    except Exception as error:
        return Answer("error", detail=f"{type(error).__name__}: {error}")
    choice = answer.choices[0]
    complete = len(choice.token_ids) == request.tokens
    return Answer(
        "ok" if complete else "truncated", tuple(choice.token_ids), tuple(choice.prompt_token_ids)
    )


def other_tokens(
    client: Client, expected: Sequence[Answer], got: Sequence[Answer]
) -> dict[str, int]:
    """Greedy answers whose tokens differ, by whether the first difference is a near tie.

    Answers that failed on either side are not compared; others count them.

    Raises:
        ValueError: answers to different prompts.
    """
    answered = [
        (one, other)
        for one, other in zip(expected, got, strict=True)
        if one.outcome == other.outcome == "ok"
    ]
    for one, other in answered:
        if one.prompt_ids != other.prompt_ids:
            raise ValueError(f"different prompts: {one.prompt_ids[:8]}…, {other.prompt_ids[:8]}…")
    pairs = [
        [Greedy(list(answer.prompt_ids), list(answer.token_ids)) for answer in both]
        for both in answered
    ]
    differences = client.differences(*zip(*pairs, strict=True)) if pairs else []
    near = sum(difference.near_tie for difference in differences)
    return {"compared": len(pairs), "near_ties": near, "wrong": len(differences) - near}
