# SPDX-License-Identifier: Apache-2.0
"""Two ranks as Ray actors: the same tokens, the same sync, a clean end, and no hang without a rank.

The cluster is a real one of one node. Its workers inherit nothing from this process, so they have
the plugin only because it is installed where they run.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_group import READY_S, WORLD, Disturbed, Group, by_label, server, write
from openai import OpenAIError
from ray_cluster import RayCluster, wait_for_end

from vllm_dspark.cli import demo
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client, Greedy

pytestmark = pytest.mark.slow

DSPARK: dict[str, Any] = {"strict": True, "verify": "compact", "min_gain": 0.0}
RAY = ("--distributed-executor-backend", "ray")
FEW_PROMPTS = 4
LIMIT_S = 300.0
END_LIMIT_S = 30.0
FAILURE_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    return Disturbed(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def cluster(disturbed: Disturbed) -> Iterator[RayCluster]:
    with RayCluster(WORLD, disturbed.environment()) as running:
        yield running


@pytest.fixture(scope="module")
def without_ray(tmp_path_factory: pytest.TempPathFactory) -> list[Greedy]:
    """What two ranks write that vLLM's own executor has started."""
    folder = tmp_path_factory.mktemp("processes")
    with server(Disturbed(folder), DSPARK, overlap=True, log=folder / "server.log") as running:
        running.wait_ready(READY_S)
        return write(Client(running.url, demo.SERVED_NAME), FEW_PROMPTS)


@pytest.fixture
def served(cluster: RayCluster, disturbed: Disturbed, tmp_path: Path) -> Iterator[Server]:
    for trace in (disturbed.folder / "traces").glob("*"):
        trace.unlink()
    with server(
        disturbed,
        DSPARK,
        overlap=True,
        log=tmp_path / "server.log",
        extra=RAY,
        environment=cluster.environment,
    ) as running:
        running.wait_ready(READY_S)
        with cluster.limit(LIMIT_S, lambda: disturbed.pids().values()):
            yield running


def test_ray_workers_write_the_same_tokens_and_agree(
    served: Server, disturbed: Disturbed, without_ray: list[Greedy]
) -> None:
    group = Group(disturbed, served, FEW_PROMPTS)
    differences = group.client.differences(without_ray, group.undisturbed)
    assert all(difference.near_tie for difference in differences), differences
    group.check_disturbed({"kind": "perturb", "ranks": [1], "size": 1e-2})
    group.check_disturbed({"kind": "flip", "ranks": [1], "every": 2})

    assert "RayWorkerProc" in served.log_path.read_text()
    workers = disturbed.pids()
    assert len(workers) == WORLD, "each rank has loaded the plugin in a process of its own"
    ranks = {"0", "1"}
    messages = by_label(served, "vllm:dspark_sync_messages_total", "rank", ranks)
    assert messages["0"] == messages["1"] >= len(disturbed.steps()[0])
    disagreements = by_label(served, "vllm:dspark_rank_disagreements_total", "rank", {"1"})
    assert disagreements.keys() == {"1"}

    served.stop()
    assert wait_for_end([*workers.values()], END_LIMIT_S) == [], "actors outlive their server"


def test_a_worker_that_dies_is_an_error_and_not_a_hang(
    served: Server, disturbed: Disturbed
) -> None:
    client = Client(served.url, demo.SERVED_NAME)
    client.greedy("def", 4)
    workers, begin = disturbed.pids(), time.monotonic()
    killing = threading.Timer(1.0, os.kill, (workers[1], signal.SIGKILL))
    killing.start()
    with pytest.raises(OpenAIError):
        client.greedy("def", 900)
    killing.join()
    assert time.monotonic() - begin < FAILURE_LIMIT_S
    assert "rank=[1] died unexpectedly" in served.log_path.read_text()
    assert wait_for_end([workers[0], served.pid], END_LIMIT_S) == []
