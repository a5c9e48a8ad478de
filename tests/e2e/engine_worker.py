# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven by JSON lines (see `engines.py`).

The engine core runs in this process, so that a test can look at the plugin's counters, move the
budget pin between two runs, and plant a fault.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Worker:
    """Answers calls on an engine that it owns."""

    def __init__(self, engine: dict[str, Any]) -> None:
        from vllm import LLM

        if engine.get("async_scheduling"):
            _allow_overlap_on_cpus()
        self._llm = LLM(**engine)
        self._adapters: dict[str, int] = {}
        self._jit_events: list[str] = []
        _watch_compiler(self._jit_events)

    def generate(self, requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Outputs of every request, in order; all of them are in the engine at once."""
        prompts = [
            {"prompt_token_ids": request["prompt"]}
            if isinstance(request["prompt"], list)
            else request["prompt"]
            for request in requests
        ]
        params = [_sampling_params(request["sampling"]) for request in requests]
        adapters = [self._adapter(request.get("adapter")) for request in requests]
        finished = self._llm.generate(
            prompts, params, use_tqdm=False, lora_request=adapters if any(adapters) else None
        )
        return [[_as_json(answer, choice) for choice in answer.outputs] for answer in finished]

    def _adapter(self, path: str | None) -> Any:
        """The LoRA adapter of a folder, None without one."""
        if path is None:
            return None
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(path, len(self._adapters) + 1)
        return LoRARequest(path, number, path)

    def pin(self, budget: int | float | None) -> None:
        """Fix the verify budget from now on; None lets the policy choose again."""
        from dataclasses import replace

        core = _planner().core
        core.policy = replace(core.policy, pin=budget)

    def mode(self) -> str:
        return str(_session().mode)

    def pieces(self) -> dict[str, str]:
        """Modules of the classes that serve this engine, by what they do."""
        executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        runner = executor.driver_worker.worker.model_runner
        served = {
            "drafts": runner.speculator,
            "plans": runner.adaptive_verification,
            "verifies": runner.rejection_sampler,
        }
        return {task: type(piece).__module__ for task, piece in served.items() if piece is not None}

    def counters(self) -> dict[str, float]:
        """Counters of the engine and of the plugin, labels left out and summed over."""
        totals: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                totals[metric.name] = totals.get(metric.name, 0.0) + value
        session = _session(required=False)
        if session is not None and session.writer is not None:
            _planner()._read_results()
            for series, value in session.writer.snapshot().items():
                name = str(series).partition("{")[0]
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def accept_paths(self) -> dict[str, int]:
        """Verification steps by what accepted them."""
        paths: dict[str, int] = {}
        for series, value in _session().writer.snapshot().items():
            if series.name == "vllm:dspark_accept_steps_total":
                path = dict(series.labels)["path"]
                paths[path] = paths.get(path, 0) + int(value)
        return paths

    def overlaps(self) -> bool:
        return bool(self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling)

    def jit_events(self) -> list[str]:
        return self._jit_events

    def plant(self, fault: str | None) -> None:
        """Break the verification rule on purpose; None repairs it.

        keep-rejected: a block whose first draft is rejected commits that draft instead of the
        token drawn in its place.
        """
        from vllm_dspark.engine.verifier import Verifier

        sound = getattr(Verifier.__call__, "sound", Verifier.__call__)
        if fault not in (None, "keep-rejected"):
            raise ValueError(f"fault={fault!r}: allowed: 'keep-rejected' or None")
        Verifier.__call__ = sound if fault is None else _keep_rejected(sound)


def _allow_overlap_on_cpus() -> None:
    """The host's CPU platform turns the overlapping scheduler off, since its model runs where the
    scheduler does; what the two do to each other's data can be tested all the same.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(keep)


def _watch_compiler(events: list[str]) -> None:
    """Note every kernel that Triton compiles from now on, loaded from its cache or not."""
    from triton import knobs
    from triton.runtime import jit

    # Triton describes a kernel to its hooks as JSON, which some of the host's constants are not.
    describe = jit.serialize_specialization_data

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return describe(*args, **kwargs)
        except (TypeError, ValueError):
            return None

    jit.serialize_specialization_data = guarded
    before = knobs.runtime.jit_post_compile_hook

    def note(*args: Any, **event: Any) -> Any:
        events.append(f"{event['fn'].module}.{event['fn'].name}")
        return before(*args, **event) if before is not None else None

    knobs.runtime.jit_post_compile_hook = note


def _keep_rejected(sound: Any) -> Any:
    def verify(self: Any, logits: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        output = sound(self, logits, batch, *args, **kw)
        drafts = batch.input_ids[batch.logits_indices]
        starts, ends = batch.cu_num_logits[:-1].tolist(), batch.cu_num_logits[1:].tolist()
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end - start > 1 and output.num_sampled[row] == 1:
                output.sampled_token_ids[row, 0] = drafts[start + 1]
        return output

    verify.sound = sound
    return verify


def _session(required: bool = True) -> Any:
    from vllm_dspark.engine import session

    sessions = list(session._sessions.values())
    if not sessions and not required:
        return None
    (only,) = sessions
    return only


def _planner() -> Any:
    return _session().planner


def _sampling_params(options: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(options)
    structured = given.pop("structured", None)
    if structured is not None:
        given["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**given)


def _as_json(answer: Any, choice: Any) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = [
            sorted(([token, entry.logprob] for token, entry in place.items()), key=lambda e: -e[1])
            for place in choice.logprobs
        ]
    return {
        "prompt_ids": list(answer.prompt_token_ids),
        "token_ids": list(choice.token_ids),
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "cached_tokens": answer.num_cached_tokens,
        "logprobs": logprobs,
    }


def main() -> None:
    # Whatever the engine prints goes to the log; the pipe carries answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    worker = Worker(json.loads(sys.stdin.readline()))
    answer({"result": "ready"})
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer({"result": getattr(worker, call["name"])(*call["arguments"])})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
