# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel server on a Ray cluster of one node: tokens, a clean end, a killed worker."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from openai import OpenAIError
from tp_servers import GPU_ENVIRONMENT, Disturbed, RayCluster, Servers, wait_for_end

from vllm_dspark.cli import demo
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client, Greedy

RAY = ("--distributed-executor-backend", "ray")
PROMPTS, TOKENS, CONCURRENCY = 8, 64, 4
LONG_TOKENS, KILL_AFTER_S = 900, 1.0
END_S, FAILURE_S, RAY_LIMIT_S = 30.0, 90.0, 600.0


def ray_part(
    servers: Servers,
    prompts: Sequence[str],
    options: Mapping[str, Any],
    expected: list[Greedy] | None,
) -> dict[str, Any]:
    """Compares with the same server outside Ray; `ray_ok` if everything is as it should be.

    Args:
        expected: what `write` gave outside Ray; None starts a server for it.
    """
    if expected is None:
        with servers.plugin(options) as (running, _):
            expected = write(running, prompts)
    found = _served(servers, options, prompts, expected) | _killed(servers, options, prompts[0])
    found["ray_ok"] = (
        found["wrong"] == found["mismatches"] == 0
        and found["steps"] > 0
        and found["workers_left"] == found["workers_left_after_kill"] == 0
        and found["killed_worker"] == "error"
    )
    print(json.dumps(found), flush=True)
    return found


def write(running: Server, prompts: Sequence[str]) -> list[Greedy]:
    """Greedy tokens after the first prompts."""
    client = Client(running.url, demo.SERVED_NAME)
    return client.greedy_all(list(prompts[:PROMPTS]), TOKENS, CONCURRENCY)[0]


def _served(
    servers: Servers, options: Mapping[str, Any], prompts: Sequence[str], expected: list[Greedy]
) -> dict[str, Any]:
    """Tokens and steps of a server on Ray, and what is left of it after its end."""
    with _on_ray(servers, options) as (cluster, running, disturbed):
        with cluster.limit(RAY_LIMIT_S, lambda: disturbed.pids().values()):
            got = write(running, prompts)
            differences = Client(running.url, demo.SERVED_NAME).differences(expected, got)
        compared, workers = disturbed.compare(), list(disturbed.pids().values())
        running.stop()
        left = wait_for_end(workers, END_S)
    return {
        "steps": compared.steps,
        "mismatches": compared.differing,
        "near_ties": sum(difference.near_tie for difference in differences),
        "wrong": sum(not difference.near_tie for difference in differences),
        "workers_left": len(left),
    }


def _killed(servers: Servers, options: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """What a client sees when a worker dies while it waits: an error, or nothing (a hang)."""
    with _on_ray(servers, options) as (cluster, running, disturbed):
        client = Client(running.url, demo.SERVED_NAME)
        client.greedy(prompt, 4)
        workers, begin = disturbed.pids(), time.monotonic()
        last = workers[servers.world - 1]
        killing = threading.Timer(KILL_AFTER_S, os.kill, (last, signal.SIGKILL))
        killing.start()
        seen = "an answer"
        with cluster.limit(FAILURE_S, lambda: workers.values()):
            try:
                client.greedy(prompt, LONG_TOKENS)
            except OpenAIError:
                seen = "error"
        killing.join()
        seconds = time.monotonic() - begin
        left = wait_for_end([pid for pid in workers.values() if pid != last], END_S)
    return {
        "killed_worker": seen,
        "killed_worker_seconds": round(seconds, 1),
        "workers_left_after_kill": len(left),
    }


@contextmanager
def _on_ray(
    servers: Servers, options: Mapping[str, Any]
) -> Iterator[tuple[RayCluster, Server, Disturbed]]:
    """A ready server whose ranks are workers of a cluster of its own."""
    disturbed = servers.new_folder()
    environment = disturbed.environment()
    if servers.on_gpu:
        environment = GPU_ENVIRONMENT | environment
    with (
        RayCluster(servers.world, environment, servers.on_gpu) as cluster,
        servers.plugin(
            options, extra=RAY, environment=cluster.environment, disturbed=disturbed
        ) as (running, _),
    ):
        yield cluster, running, disturbed
