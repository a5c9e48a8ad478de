# SPDX-License-Identifier: Apache-2.0
"""One OpenAI server of vLLM in a process group of its own.

Contract: a server that did not become ready in time, or that died, is a `ServerError` that carries
the end of its log; after `stop()` no process of its group is left, whatever state it was in.

vLLM is started as a module, since the CPU build has no `vllm` metadata and its console script
fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_dspark.cli import CommandError

HOST = "127.0.0.1"
READY_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0
KILL_LIMIT_S = 5.0
LOG_TAIL_LINES = 40

# What vLLM needs to run its V2 runner without a GPU. Values of the operator's own win.
CPU_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The pair is too small for threads to share its work, and bound threads that wait for each
    # other are slow beside anything else that runs.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
COMMON_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

Progress = Callable[[float], None]


class ServerError(CommandError):
    """The server is not ready or not alive; the message ends with the tail of its log."""


@dataclass(frozen=True)
class ServerOptions:
    """What one server runs.

    `speculative` is vLLM's `--speculative-config` (None: no speculation), `dspark` the plugin's
    part of `--additional-config` (None: not given).
    """

    model: str
    served_name: str
    speculative: Mapping[str, Any] | None = None
    dspark: Mapping[str, Any] | None = None
    max_model_len: int = 1024
    max_num_seqs: int = 8
    extra: Sequence[str] = ()

    def arguments(self, port: int, *, on_gpu: bool) -> list[str]:
        """Arguments of `vllm serve`; the only ones that depend on the device are eager's."""
        given = {
            "--model": self.model,
            "--served-model-name": self.served_name,
            "--host": HOST,
            "--port": str(port),
            "--max-model-len": str(self.max_model_len),
            "--max-num-seqs": str(self.max_num_seqs),
        }
        if self.speculative is not None:
            given["--speculative-config"] = json.dumps(self.speculative)
        if self.dspark is not None:
            given["--additional-config"] = json.dumps({"dspark": self.dspark})
        arguments = [word for pair in given.items() for word in pair]
        return [*arguments, *([] if on_gpu else ["--enforce-eager"]), *self.extra]


@dataclass
class Server:
    """A server process; use it as a context manager, or call `start` and `stop`."""

    options: ServerOptions
    log_path: Path
    on_gpu: bool
    port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group.

        Raises:
            ServerError: the server was not started.
        """
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process.pid

    @property
    def command(self) -> list[str]:
        module = "vllm.entrypoints.openai.api_server"
        arguments = self.options.arguments(self.port, on_gpu=self.on_gpu)
        return [sys.executable, "-m", module, *arguments]

    def start(self) -> None:
        """Start the process; returns at once."""
        self.port = self.port or free_port()
        defaults = COMMON_ENVIRONMENT | ({} if self.on_gpu else CPU_ENVIRONMENT)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**defaults, **os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, limit_s: float = READY_LIMIT_S, progress: Progress | None = None) -> float:
        """Wait until `/health` answers; returns the seconds it took.

        Raises:
            ServerError: the process ended, or `limit_s` passed.
        """
        begin = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - begin
            if progress is not None:
                progress(elapsed_s)
            self.check_alive()
            if self._healthy():
                return elapsed_s
            if elapsed_s > limit_s:
                raise ServerError(self.with_log(f"the server is not ready after {limit_s:.0f} s"))
            time.sleep(0.5)

    def show_start(self, limit_s: float) -> float:
        """`wait_ready` behind a progress bar."""
        from tqdm import tqdm

        # A bar of the time limit: nothing else about a start-up is known beforehand. None hides it
        # when stderr is no terminal.
        with tqdm(
            total=limit_s,
            desc="     starting",
            bar_format="{desc} {bar} {n:.0f} of at most {total:.0f} s",
            leave=False,
            disable=None,
        ) as bar:
            return self.wait_ready(limit_s, lambda elapsed_s: bar.update(elapsed_s - bar.n))

    @contextlib.contextmanager
    def requests(self) -> Iterator[None]:
        """A request that fails inside becomes a `ServerError` that shows the server's log."""
        from openai import OpenAIError

        try:
            yield
        except OpenAIError as error:
            raise ServerError(self.with_log(f"a request failed: {error}")) from error

    def check_alive(self) -> None:
        """Raises `ServerError` if the process has ended."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise ServerError(self.with_log(f"the server ended with exit code {code}"))

    def metrics_text(self) -> str:
        """The server's `/metrics` in Prometheus's text format."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def stop(self) -> None:
        """End the server and every process that it started; safe to call twice."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        # The group outlives its leader if an engine process hangs; it ends here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._wait_for_group()
        self._process = None

    def _wait_for_group(self) -> None:
        """Wait for killed processes to be gone; raises ProcessLookupError once they are."""
        limit = time.monotonic() + KILL_LIMIT_S
        # Without an init process that reaps, ended processes stay in the group: hence the limit.
        while time.monotonic() < limit:
            os.killpg(self.pid, 0)
            time.sleep(0.02)

    def with_log(self, message: str) -> str:
        """`message`, and below it the last lines of the server's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        tail = "\n".join(lines[-LOG_TAIL_LINES:])
        return f"{message}\n--- end of {self.log_path} ---\n{tail}"

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
