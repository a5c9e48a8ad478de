# SPDX-License-Identifier: Apache-2.0
"""Real tensor-parallel servers for the runs of this folder, on a CPU or on several GPUs.

Every server is traced and may be disturbed (`tests/distributed/engine_faults.py`), with the plugin
or with vLLM's own DSpark.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

from engine_faults import synced_twice  # noqa: E402
from engine_group import Disturbed  # noqa: E402
from ray_cluster import RayCluster, wait_for_end  # noqa: E402
from serving_systems import ENVIRONMENT, SHAPES, prepare_pair  # noqa: E402

from vllm_dspark.cli import demo  # noqa: E402
from vllm_dspark.cli.server import Server, ServerOptions  # noqa: E402

__all__ = [
    "DRIFT",
    "GPU_ENVIRONMENT",
    "Disturbed",
    "RayCluster",
    "Servers",
    "add_arguments",
    "from_arguments",
    "synced_twice",
    "wait_for_end",
]

# Dense where decisions fall, for ranks to have something to disagree on.
CAPTURE_SIZES = (
    *(1, 2, 4, 8, 16, 32, 64, 96, 128, 144, 160, 192, 240, 256),
    *(384, 512, 768, 1024, 2048),
)
GPU_ENVIRONMENT = {
    **ENVIRONMENT,
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
DRIFT = 1e-3


@dataclass
class Servers:
    """Starts servers of one pair on one machine, one after the other.

    Args:
        folder: logs and traces, one folder per server.
        world: tensor-parallel ranks.
        pair: holds `target` and `draft`.
        max_num_seqs: requests that run at a time.
        max_model_len: longest request.
        ready_s: limit of a start.
    """

    folder: Path
    world: int
    on_gpu: bool
    pair: Path
    max_num_seqs: int
    max_model_len: int
    ready_s: float
    started: int = field(default=0, init=False)

    @contextmanager
    def plugin(
        self,
        dspark: Mapping[str, Any],
        *,
        overlap: bool = True,
        alternate: int = 0,
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        disturbed: Disturbed | None = None,
    ) -> Iterator[tuple[Server, Disturbed]]:
        """A ready server with the plugin.

        Args:
            dspark: the plugin's options.
            overlap: asynchronous scheduling.
            alternate: see `engine_faults.ALTERNATE`.
            disturbed: from `new_folder`, where others need it before the server starts.
        """
        where = disturbed or self.new_folder()
        with self._serve(where, {}, dspark, overlap, alternate, extra, environment) as running:
            yield running, where

    @contextmanager
    def native(
        self,
        speculative: Mapping[str, Any],
        *,
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[Server, Disturbed]]:
        """A ready server with vLLM's own DSpark, with more keys of its speculative options."""
        variables = {"VLLM_DSPARK_ENABLED": "0", **(environment or {})}
        where = self.new_folder()
        with self._serve(where, speculative, None, True, 0, extra, variables) as running:
            yield running, where

    def new_folder(self) -> Disturbed:
        """Where the next server is disturbed and traced."""
        self.started += 1
        folder = self.folder / f"server{self.started}"
        folder.mkdir()
        return Disturbed(folder, self.world, "" if self.on_gpu else "gloo")

    @contextmanager
    def _serve(
        self,
        disturbed: Disturbed,
        speculative: Mapping[str, Any],
        dspark: Mapping[str, Any] | None,
        overlap: bool,
        alternate: int,
        extra: Sequence[str],
        environment: Mapping[str, str] | None,
    ) -> Iterator[Server]:
        scheduling = "--async-scheduling" if overlap else "--no-async-scheduling"
        options = ServerOptions(
            str(self.pair / "target"),
            demo.SERVED_NAME,
            speculative={**demo.speculative_config(self.pair / "draft"), **speculative},
            dspark=dspark,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            extra=(
                *("--tensor-parallel-size", str(self.world), scheduling),
                *("--no-enable-prefix-caching", *self._gpu_arguments(), *extra),
            ),
        )
        variables = {
            **(GPU_ENVIRONMENT if self.on_gpu else {}),
            **disturbed.environment(alternate),
            **(environment or {}),
        }
        log = disturbed.folder / "server.log"
        with Server(options, log, on_gpu=self.on_gpu, environment=variables) as running:
            running.wait_ready(self.ready_s)
            yield running

    def _gpu_arguments(self) -> tuple[str, ...]:
        if not self.on_gpu:
            return ()
        return (
            *("--gpu-memory-utilization", "0.85", "--max-num-batched-tokens", "8192"),
            *("--compilation-config", json.dumps({"cudagraph_capture_sizes": CAPTURE_SIZES})),
            "--kernel-config",
            json.dumps({"enable_jit_warmup": False, "enable_flashinfer_autotune": False}),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that `from_arguments` reads."""
    add = parser.add_argument
    add("--tp", type=int, default=2, help="tensor-parallel ranks")
    add("--gpu", action="store_true", help="on GPUs; CPU ranks over gloo without it")
    add("--shape", choices=SHAPES, help="of the pair; default: 8b on GPUs, else what has the heads")
    add("--ready-s", type=float, default=600.0, help="limit of a server's start")
    add("--out", type=Path, help="JSON file; none is written without it")
    add("--logs", type=Path, help="new folder for logs and traces that stays")
    add("--commit", help="commit of the tree, where there is no git")


def from_arguments(
    options: argparse.Namespace, folder: Path, max_num_seqs: int, max_model_len: int
) -> Servers:
    """Servers for the options given; makes the pair if its shape is not the demo's."""
    few_heads = "demo" if options.tp <= 4 else "demo-8kv"
    shape = options.shape or ("8b" if options.gpu else few_heads)
    pair = prepare_pair(shape, ROOT / "demo", folder, HERE / "widen_pair.py")
    return Servers(
        folder, options.tp, options.gpu, pair, max_num_seqs, max_model_len, options.ready_s
    )
