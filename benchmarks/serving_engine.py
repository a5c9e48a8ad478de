# SPDX-License-Identifier: Apache-2.0
"""One system in one process: start vLLM's `AsyncLLM`, apply the load, write an event per result.

Run as a child with the path of a `Job` in JSON, see `serving_children`. Events are JSON lines,
written at once, so that a killed child keeps what it has measured: `ready`, then one `warm`,
`sweep` or `traced` per command. Engine and load generator are two processes, as in a server;
prompts are token ids and nothing is detokenised, so that the frontend costs the same for every
system.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving_load import ClosedLoop, Step, client_metrics, engine_metrics
from serving_memory import own_gib
from serving_prompts import load_texts, make_prompts


@dataclass(frozen=True)
class Job:
    """What a child is told to do."""

    arguments: dict[str, Any]  # of AsyncEngineArgs
    events: str
    prompts: str
    temperature: float
    concurrencies: tuple[int, ...]
    requests_per_slot: int
    requests: dict[int, int]  # of a measurement, by concurrency; others go by the slots
    output_tokens: int
    warmup_tokens: int
    longest_prompt: int
    seed: int
    plugin: bool  # whether the plugin counts what was verified
    adaptive: bool  # whether fewer drafts may be verified than were scheduled

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, path: Path) -> "Job":
        stored = json.loads(path.read_text())
        requests = {int(c): count for c, count in stored.pop("requests").items()}
        return cls(**stored, requests=requests)


def recorder(steps: list[Step]) -> Any:
    """Factory of a vLLM stat logger that appends one `Step` per engine step to `steps`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def log_engine_initialized(self) -> None: ...

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                steps.append(step_of(scheduler_stats, iteration_stats))

    return Recorder


def step_of(scheduler: Any, iteration: Any) -> Step:
    """`Step` of vLLM's `SchedulerStats` and `IterationStats` (None: nothing came out)."""
    step = Step(time.perf_counter())
    if iteration is not None:
        step.tokens = iteration.num_generation_tokens
        step.latencies_s = list(iteration.inter_token_latencies_iter)
        step.rows = len(step.latencies_s)
        step.first_tokens = len(iteration.time_to_first_tokens_iter)
        step.prompt_tokens = iteration.num_prompt_tokens
    if (drafts := scheduler.spec_decoding_stats) is not None:
        step.scheduled_drafts = drafts.num_draft_tokens
        step.accepted_drafts = drafts.num_accepted_tokens
    if (graph := scheduler.cudagraph_stats) is not None:
        step.batch_tokens, step.padded_tokens = graph.num_unpadded_tokens, graph.num_padded_tokens
        step.graph = graph.runtime_mode
    return step


class Bench:
    """An engine under load."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps: list[Step] = []
        self._requests = 0

    def emit(self, event: str, **values: Any) -> None:
        with open(self.job.events, "a", encoding="utf-8") as events:
            events.write(json.dumps({"event": event, **values}) + "\n")

    async def run(self) -> None:
        job = self.job
        self.prompts = self._prompts()
        began = time.perf_counter()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**job.arguments)
        self.engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[recorder(self.steps)])
        try:
            await self._burst(1)
            start_s = round(time.perf_counter() - began, 2)
            blocks = self.engine.vllm_config.cache_config.num_gpu_blocks
            self.emit("ready", start_s=start_s, kv_blocks=blocks)
            while line := await asyncio.to_thread(sys.stdin.readline):
                await self._obey(**json.loads(line))
        finally:
            self.engine.shutdown()

    async def _obey(
        self, concurrency: int | None = None, sweep: int = 0, trace: bool = False
    ) -> None:
        """Measure with `concurrency` requests in flight; without one, warm up for all of them."""
        if concurrency is None:
            for each in self.job.concurrencies:
                await self._burst(each)
            gc.collect()
            gc.freeze()
            self.emit("warm")
            return
        result = await self._sweep(concurrency, trace)
        event = "traced" if trace else "sweep"
        self.emit(event, sweep=sweep, concurrency=concurrency, **result)

    def _prompts(self) -> list[list[int]]:
        from tokenizers import Tokenizer

        job = self.job
        tokenizer = Tokenizer.from_file(os.path.join(job.arguments["model"], "tokenizer.json"))
        texts = [tokenizer.encode(text).ids for text in load_texts(Path(job.prompts))]
        # A closed loop sends at most one further request per slot after the last one it waits for.
        count = max(self._request_count(each) + each for each in job.concurrencies)
        return make_prompts(texts, count, job.seed, job.longest_prompt)

    def _request_count(self, concurrency: int) -> int:
        return self.job.requests.get(concurrency, self.job.requests_per_slot * concurrency)

    async def _stream(self, number: int, output_tokens: int) -> AsyncIterator[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=self.job.temperature,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": self.prompts[number % len(self.prompts)]}
        self._requests += 1
        async for output in self.engine.generate(prompt, sampling, f"bench-{self._requests}"):
            if tokens := len(output.outputs[0].token_ids):
                yield tokens

    async def _burst(self, concurrency: int) -> None:
        """`concurrency` short requests at once: compiles what this batch size needs."""

        async def drain(number: int) -> None:
            async for _ in self._stream(number, self.job.warmup_tokens):
                pass

        await asyncio.gather(*map(drain, range(concurrency)))

    async def _sweep(self, concurrency: int, trace: bool) -> dict[str, Any]:
        job = self.job
        loop = ClosedLoop(
            self._stream, concurrency, self._request_count(concurrency), job.output_tokens
        )
        self.steps.clear()
        before: list[Any] = []

        async def on_window() -> None:
            if trace:
                await self.engine.start_profile(f"c{concurrency}")
            before.append(await asyncio.to_thread(self._plugin_counters))

        # A collection in the load generator would look like a slow step of the engine.
        gc.disable()
        try:
            window = await loop.run(on_window)
        finally:
            gc.enable()
        after = await asyncio.to_thread(self._plugin_counters)
        if trace:
            await self.engine.stop_profile()
        await self._wait_until_idle()
        plugin = plugin_metrics(before[0], after) if job.plugin else {}
        result = {**client_metrics(loop.served, window), **engine_metrics(self.steps, window)}
        return {
            **result,
            **verified(result, plugin, adaptive=job.adaptive),
            "gpu_mem_gib": await asyncio.to_thread(own_gib),
            "plugin": plugin,
        }

    async def _wait_until_idle(self) -> None:
        """Cancelled requests leave the engine one step after their abort."""
        while self.engine.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)

    def _plugin_counters(self) -> dict[Any, float]:
        if not self.job.plugin:
            return {}
        from vllm_dspark.metrics_export import metrics_dir, read_snapshot

        return read_snapshot(metrics_dir() or "")


def plugin_metrics(before: dict[Any, float], after: dict[Any, float]) -> dict[str, Any]:
    """Counters of the plugin over the window, whose edges its flush interval blurs."""
    from vllm_dspark.metrics_snapshot import by_label, difference, total

    change = difference(after, before)

    def count(name: str) -> float:
        return total(change, f"vllm:dspark_{name}_total")

    def split(name: str, label: str) -> dict[str, float]:
        values = by_label(change, f"vllm:dspark_{name}_total", label)
        return {key: value for key, value in values.items() if value}

    settled = count("steps_settled")
    per_step = {
        f"{name}_per_step": round(count(f"draft_tokens_{name}") / settled, 3) if settled else None
        for name in ("scheduled", "admitted", "trimmed", "accepted")
    }
    host = split("host_seconds", "part")
    return {
        "steps_settled": settled,
        "host_us_per_step": {
            part: round(1e6 * seconds / settled, 1) for part, seconds in host.items() if settled
        },
        **per_step,
        "modes": split("steps", "mode"),
        "reasons": split("steps", "reason"),
        "bypass_steps": count("bypass_steps"),
        "full_verify_rows": split("full_verify_rows", "reason"),
        "graph_misses": split("graph_misses", "reason"),
        "tiers": split("tier_steps", "tokens"),
        "predicted_step_s": round(count("predicted_step_seconds"), 4),
        "measured_step_s": round(count("measured_step_seconds"), 4),
    }


def verified(result: dict[str, Any], plugin: dict[str, Any], *, adaptive: bool) -> dict[str, Any]:
    """Drafts verified per step and who says so: batch, plugin or scheduler."""
    if result["verified_per_step"] is not None:
        return {"verified_source": "batch"}
    if plugin.get("admitted_per_step") is not None:
        return {"verified_per_step": plugin["admitted_per_step"], "verified_source": "plugin"}
    if adaptive:
        return {"verified_source": None}
    return {"verified_per_step": result["scheduled_per_step"], "verified_source": "scheduled"}


if __name__ == "__main__":
    asyncio.run(Bench(Job.read(Path(sys.argv[1]))).run())
