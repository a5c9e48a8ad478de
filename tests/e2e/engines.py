# SPDX-License-Identifier: Apache-2.0
"""Engines with the demo pair, each in a process of its own, for tests that compare tokens.

A process per engine keeps global state apart and makes a hang a failure: every call has a limit,
after which the process reports its stacks and dies, and the error carries its log.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from vllm_dspark.cli.demo import DEMO_FOLDER
from vllm_dspark.cli.server import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from vllm_dspark.cli.traffic import first_difference, read_prompts

GAMMA = 7
COMPARED_PROMPTS, COMPARED_TOKENS = 64, 24
LOG_TAIL = 6000
# The engines compute in float32: only rounding of the last bits may change places.
NEAR_TIE_LOGIT_GAP = 1e-3
# Options of every verify mode, and those of them that a CPU can run.
VERIFY_MODES = {
    "static": {"verify": "static"},
    "cap-accept": {"verify": "cap-accept"},
    "host": {"verify": "compact", "lens": "host"},
    "uniform": {"verify": "compact", "lens": "uniform"},
    "device": {"verify": "compact", "lens": "device"},
}
CPU_MODES = {name: options for name, options in VERIFY_MODES.items() if name != "device"}
# Budgets that depend on nothing but the pin and the confidences: no step times.
STEADY = {"cost_correction": False}


@dataclass(frozen=True)
class Place:
    """Where engines run: environment, options of `LLM`, and the limits of their calls."""

    environment: dict[str, str]
    options: dict[str, Any]
    start_limit_s: float
    call_limit_s: float


_ENVIRONMENT = {
    **COMMON_ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONFAULTHANDLER": "1",
}
_OPTIONS = {
    "model": str(DEMO_FOLDER / "target"),
    "max_model_len": 512,
    "disable_log_stats": False,
}
ON_CPU = Place(
    {**_ENVIRONMENT, **CPU_ENVIRONMENT},
    {
        **_OPTIONS,
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
    },
    start_limit_s=240.0,
    call_limit_s=300.0,
)
ON_GPU = Place(
    # FlashInfer's sampler compiles for a minute and a half when it is first used.
    {**_ENVIRONMENT, "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    {
        **_OPTIONS,
        "dtype": "bfloat16",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.2,
        # Neighbours on the GPU come and go, so what is free says nothing.
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "compilation_config": {
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256],
            "max_cudagraph_capture_size": 256,
        },
        "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
    },
    start_limit_s=240.0,
    call_limit_s=90.0,
)


class EngineFailure(AssertionError):
    """The engine died, hung or refused; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Output:
    """One finished continuation."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    cached_tokens: int | None
    logprobs: list[list[tuple[int, float]]] | None
    """Per token the best tokens with their log-probabilities, best first."""


class Engine:
    """A running engine; use as a context manager."""

    def __init__(
        self,
        dspark: dict[str, Any] | None = None,
        speculative: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        place: Place = ON_CPU,
        **llm: Any,
    ) -> None:
        """`dspark` None: no speculation. `speculative` adds to vLLM's own speculative config."""
        self._place = place
        engine = {**place.options, **llm}
        if dspark is not None:
            engine["speculative_config"] = {
                "method": "dspark",
                "model": str(DEMO_FOLDER / "draft"),
                "num_speculative_tokens": GAMMA,
                **(speculative or {}),
            }
            engine["additional_config"] = {"dspark": dspark}
        self._log: IO[bytes] = TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **place.environment, **(environment or {})},
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self._send(engine)
            self._receive(place.start_limit_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def run(self, requests: Sequence[dict[str, Any]]) -> list[list[Output]]:
        """All continuations of every request (see `request`)."""
        answers = self._call("generate", list(requests))
        return [[Output(**choice) for choice in choices] for choices in answers]

    def greedy(
        self,
        prompts: Sequence[Any],
        tokens: int,
        adapters: Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[Output]:
        """One greedy continuation of `tokens` tokens per prompt, by the adapter of each if any."""
        options = {"max_tokens": tokens, "ignore_eos": True, **sampling}
        chosen = adapters or [None] * len(prompts)
        requests = [
            request(prompt, adapter=adapter, **options)
            for prompt, adapter in zip(prompts, chosen, strict=True)
        ]
        return [choices[0] for choices in self.run(requests)]

    def pin(self, budget: int | float | None) -> None:
        self._call("pin", budget)

    def plant(self, fault: str | None) -> None:
        self._call("plant", fault)

    def mode(self) -> str:
        """Verify mode of the plugin's session."""
        return self._call("mode")

    def pieces(self) -> dict[str, str]:
        """Modules of the classes that draft, plan and verify in this engine."""
        return self._call("pieces")

    def counters(self) -> dict[str, float]:
        return self._call("counters")

    def accept_paths(self) -> dict[str, int]:
        """Verification steps so far by what accepted: `graph`, `kernel` or `host`."""
        return self._call("accept_paths")

    def overlaps(self) -> bool:
        """The scheduler works while the model runs."""
        return self._call("overlaps")

    def jit_events(self) -> list[str]:
        """Kernels (module and name) that were compiled since the engine has started."""
        return self._call("jit_events")

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, float]]:
        """Increments of all counters during the block, filled in at its end."""
        increments: dict[str, float] = {}
        before = self.counters()
        yield increments
        for name, value in self.counters().items():
            increments[name] = value - before.get(name, 0.0)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._send({"name": name, "arguments": arguments})
        return self._receive(self._place.call_limit_s)

    def _send(self, content: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("the engine is gone") from None

    def _receive(self, limit_s: float) -> Any:
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._process.send_signal(signal.SIGABRT)
            self._process.wait(30)
            raise self._failure(f"no answer within {limit_s} s") from None
        if not line:
            raise self._failure("the engine died")
        answer = json.loads(line)
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer["result"]

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _failure(self, what: str) -> EngineFailure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").splitlines(keepends=True)
        # A stack dump ends with this list, which would leave no room for the stacks.
        tail = "".join(line for line in log if not line.startswith("Extension modules:"))
        return EngineFailure(f"{what}\n--- log of the engine ---\n{tail[-LOG_TAIL:]}")


def request(prompt: Any, *, adapter: str | None = None, **sampling: Any) -> dict[str, Any]:
    """A request for `Engine.run`: text or token ids, and `SamplingParams` options.

    `structured` holds the options of `StructuredOutputsParams`, `adapter` is the folder of a LoRA
    adapter. Greedy unless told otherwise.
    """
    return {
        "prompt": prompt,
        "adapter": adapter,
        "sampling": {"temperature": 0.0, **sampling},
    }


def demo_prompts(count: int) -> list[str]:
    return read_prompts(DEMO_FOLDER / "prompts.jsonl", count)


@functools.cache
def plain_greedy() -> list[Output]:
    """Greedy continuations of the demo prompts without speculation, computed once per session."""
    with Engine() as engine:
        return engine.greedy(demo_prompts(COMPARED_PROMPTS), COMPARED_TOKENS, logprobs=2)


@dataclass(frozen=True)
class Difference:
    """The first token in which a continuation differs from the expected one."""

    prompt: int
    place: int
    wanted: int
    found: int
    gap: float
    """How much better the target likes the wanted token, as a difference of logits; infinite if
    the other one is not among its best."""

    def __str__(self) -> str:
        what = f"{self.found} instead of {self.wanted}, logit gap {self.gap:.4g}"
        return f"prompt {self.prompt}, token {self.place}: {what}"


def differences(expected: Sequence[Output], got: Sequence[Output]) -> list[Difference]:
    """One entry per continuation that differs; `expected` must carry at least two logprobs."""
    found = []
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        shared = min(len(want.token_ids), len(have.token_ids))
        place = first_difference(want.token_ids[:shared], have.token_ids[:shared])
        if place is None:
            assert len(want.token_ids) == len(have.token_ids), (
                f"prompt {number}: {len(have.token_ids)} tokens, expected {len(want.token_ids)}"
            )
            continue
        best = dict(want.logprobs[place])
        wanted, other = want.token_ids[place], have.token_ids[place]
        gap = best[wanted] - best[other] if other in best else math.inf
        found.append(Difference(number, place, wanted, other, gap))
    return found


def assert_same_tokens(
    expected: Sequence[Output], got: Sequence[Output], bound: float = NEAR_TIE_LOGIT_GAP
) -> list[Difference]:
    """Equal tokens, except after a place where the target's best two are a near-tie: their logits
    differ by at most `bound`. Returns what differs all the same.
    """
    found = differences(expected, got)
    for difference in found:
        assert difference.gap <= bound, str(difference)
    return found
