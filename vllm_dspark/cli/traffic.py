# SPDX-License-Identifier: Apache-2.0
"""Requests that the demo and the end-to-end tests send through the `openai` client.

Token ids come from vLLM's `return_token_ids` extension, so a comparison never depends on text.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dspark.cli import CommandError

if TYPE_CHECKING:
    from openai import OpenAI

REQUEST_LIMIT_S = 300.0

# Two logits this close may change places when a batch has another shape: it is one step of a
# bfloat16 number between 16 and 32, where the largest logits of a language model lie.
NEAR_TIE_LOGIT_GAP = 0.125

CHAT = [{"role": "user", "content": "import os\nimport sys\n"}]
PROMPT = "def __init__(self, name, value=None):\n"


class AnswerError(CommandError):
    """The server answered, but not what the request asks for."""


@dataclass(frozen=True)
class Greedy:
    """Greedy continuation of one prompt, as token ids."""

    prompt_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class Difference:
    """First difference of two greedy continuations of a prompt.

    `logit_gap` is the distance of the two tokens in the target's logits, None if one of them is not
    among its best two.
    """

    prompt: int
    position: int
    expected: int
    got: int
    logit_gap: float | None

    @property
    def near_tie(self) -> bool:
        return self.logit_gap is not None and self.logit_gap <= NEAR_TIE_LOGIT_GAP


def openai_client(url: str, limit_s: float = REQUEST_LIMIT_S) -> OpenAI:
    """A client that retries nothing, so that what fails is seen.

    It opens a connection per request: a server closes an idle one when it likes, and a request that
    goes out at that moment would fail though nothing is wrong.
    """
    from openai import OpenAI

    return OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=limit_s,
        max_retries=0,
        default_headers={"Connection": "close"},
    )


class Client:
    """One served model."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self._openai = openai_client(url)

    def checks(self) -> dict[str, Callable[[], str]]:
        """Kinds of request; each call sends one and returns a line about the answer.

        A call raises `AnswerError` when the answer is not what was asked for.
        """
        return {
            "completion": self.completion,
            "streamed chat": self.streamed_chat,
            "sampled": self.sampled,
            "n=2": self.two_choices,
            "logprobs": self.logprobs,
        }

    def completion(self) -> str:
        choice = self._complete(max_tokens=16, temperature=0).choices[0]
        _require(choice.text, "completion: empty text")
        return _shorten(choice.text)

    def streamed_chat(self) -> str:
        stream = self._openai.chat.completions.create(
            model=self.model, messages=CHAT, max_tokens=16, temperature=0, stream=True
        )
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        _require(text, "streamed chat: empty text")
        _require(len(chunks) > 1, "streamed chat: the answer came in one piece")
        _require(chunks[-1].finish_reason, "streamed chat: no finish reason")
        return f"{len(chunks)} chunks: {_shorten(text)}"

    def sampled(self) -> str:
        """Temperature 0.8 with a seed: the same seed must give the same tokens."""
        first, again = (
            self._complete(max_tokens=16, temperature=0.8, top_p=0.95, seed=7).choices[0].text
            for _ in range(2)
        )
        _require(first, "sampled: empty text")
        _require(first == again, "sampled: the same seed gave another text")
        return _shorten(first)

    def two_choices(self) -> str:
        choices = self._complete(max_tokens=16, temperature=0.8, n=2, seed=11).choices
        _require(len(choices) == 2, f"n=2: {len(choices)} choices")
        _require({c.index for c in choices} == {0, 1}, "n=2: wrong indices")
        return " | ".join(_shorten(choice.text, 24) for choice in choices)

    def logprobs(self) -> str:
        """Greedy with the best two: each chosen token must be the best one."""
        got = self._complete(max_tokens=16, temperature=0, logprobs=2).choices[0].logprobs
        _require(got is not None and got.token_logprobs, "logprobs: none in the answer")
        for chosen, best in zip(got.token_logprobs, got.top_logprobs, strict=True):
            finite = math.isfinite(chosen) and chosen <= 0
            _require(finite, f"logprobs: {chosen} is no log-probability")
            _require(chosen >= max(best.values()), "logprobs: a chosen token is not the best one")
        return f"{len(got.token_logprobs)} tokens, first {got.token_logprobs[0]:.3f}"

    def greedy(self, prompt: str, tokens: int) -> Greedy:
        """Exactly `tokens` greedy tokens after `prompt`."""
        choice = self._complete(
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).choices[0]
        _require(len(choice.token_ids) == tokens, f"greedy: {len(choice.token_ids)} tokens")
        return Greedy(list(choice.prompt_token_ids), list(choice.token_ids))

    def greedy_all(
        self, prompts: Sequence[str], tokens: int, concurrency: int
    ) -> tuple[list[Greedy], float]:
        """Continuations in the order of `prompts`, and the wall-clock seconds of all."""
        begin = time.monotonic()
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(lambda prompt: self.greedy(prompt, tokens), prompts))
        return answers, time.monotonic() - begin

    def logit_gap(self, context: list[int], one: int, other: int) -> float | None:
        """Distance of two tokens' logits after `context`, None unless they are the best two.

        The one token is computed by a prefill, where nothing is drafted or verified.
        """
        choice = self._complete(
            prompt=context,
            max_tokens=1,
            temperature=0,
            logprobs=2,
            extra_body={"return_tokens_as_token_ids": True},
        ).choices[0]
        best = choice.logprobs.top_logprobs[0]
        pair = [best.get(f"token_id:{token}") for token in (one, other)]
        return None if None in pair else abs(pair[0] - pair[1])

    def differences(self, expected: Iterable[Greedy], got: Iterable[Greedy]) -> list[Difference]:
        """Prompts whose continuations differ, with the logit gap where they part."""
        found = []
        for prompt, (a, b) in enumerate(zip(expected, got, strict=True)):
            position = first_difference(a.token_ids, b.token_ids)
            if position is not None:
                pair = a.token_ids[position], b.token_ids[position]
                context = a.prompt_ids + a.token_ids[:position]
                gap = self.logit_gap(context, *pair)
                found.append(Difference(prompt, position, *pair, gap))
        return found

    def _complete(self, prompt: str | list[int] = PROMPT, **options: Any) -> Any:
        # vLLM's extensions (token_ids and such) are not in the client's types.
        return self._openai.completions.create(model=self.model, prompt=prompt, **options)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first pair of unequal tokens of two equally long sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def read_prompts(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a JSON-lines file with a `prompt` key.

    Raises:
        CommandError: the file is missing, malformed or too short.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines[:count]]
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise CommandError(f'{path}: every line must be a JSON object with "prompt"') from None
    if len(prompts) < count:
        raise CommandError(f"--prompts {count}: {path} has {len(prompts)} prompts")
    return prompts


def _require(condition: object, message: str) -> None:
    if not condition:
        raise AnswerError(message)


def _shorten(text: str, width: int = 48) -> str:
    shown = repr(text)
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."
