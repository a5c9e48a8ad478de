# SPDX-License-Identifier: Apache-2.0
"""Workloads of the stability run: fixed lists of requests, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from openai import APITimeoutError, OpenAI

REQUEST_LIMIT_S = 300.0
"""A request that takes longer is a hang."""


@dataclass(frozen=True)
class Request:
    """Exactly `tokens` tokens after a prompt."""

    prompt: str
    tokens: int
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """`outcome` is ok, hang, error or truncated."""

    outcome: str
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    detail: str = ""


Workload = Callable[[Sequence[str]], list[Request]]


def even(prompts: Sequence[str]) -> list[Request]:
    """Greedy, all equally long."""
    return [Request(prompt, 32) for prompt in prompts]


def uneven(prompts: Sequence[str]) -> list[Request]:
    """Greedy, from 4 to 60 tokens, so that batches grow and shrink and prefills mix in."""
    return [Request(prompt, 4 + 8 * (i % 8)) for i, prompt in enumerate(prompts)]


def long_prompts(prompts: Sequence[str]) -> list[Request]:
    """Greedy after several prompts in one: steps that verify and prefill together."""
    return [
        Request("\n".join([*prompts[i:], *prompts[:i]])[:1200], 24) for i in range(len(prompts))
    ]


def sampled(prompts: Sequence[str]) -> list[Request]:
    """Temperature 0.8; every other request is greedy."""
    return [
        Request(prompt, 32, 0.8 if i % 2 else 0.0, seed=i if i % 2 else None)
        for i, prompt in enumerate(prompts)
    ]


WORKLOADS: dict[str, Workload] = {
    "even": even,
    "uneven": uneven,
    "long prompts": long_prompts,
    "sampled": sampled,
}


def send(url: str, model: str, requests: Sequence[Request], concurrency: int) -> list[Answer]:
    """What became of `requests`, `concurrency` of them at a time."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_LIMIT_S, max_retries=0)
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: _one(client, model, request), requests))


def _one(client: Any, model: str, request: Request) -> Answer:
    try:
        choice = client.completions.create(
            model=model,
            prompt=request.prompt,
            max_tokens=request.tokens,
            temperature=request.temperature,
            seed=request.seed,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).choices[0]
    except APITimeoutError as error:
        return Answer("hang", detail=str(error))
    except Exception as error:
        return Answer("error", detail=f"{type(error).__name__}: {error}")
    complete = len(choice.token_ids) == request.tokens
    return Answer(
        "ok" if complete else "truncated", tuple(choice.token_ids), tuple(choice.prompt_token_ids)
    )
