# SPDX-License-Identifier: Apache-2.0
"""Start, readiness and end of a server process, with a small HTTP server in the host's place."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_dspark.cli.server import CPU_ENVIRONMENT, Server, ServerError, ServerOptions

# Answers /health after `delay` seconds; a child of it ignores SIGTERM, as a stuck engine would.
STAND_IN = """
import http.server, os, signal, subprocess, sys, time
port, delay = int(sys.argv[1]), float(sys.argv[2])
print("stand-in", os.environ.get("TRITON_INTERPRET"), flush=True)
subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
ready = time.monotonic() + delay
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() >= ready else 503)
        self.end_headers()
        self.wfile.write(b"text of " + self.path.encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

Make = Callable[..., Server]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Servers that run a script instead of vLLM."""

    def build(script: str, *arguments: str) -> Server:
        def command(server: Server) -> list[str]:
            given = [word.replace("PORT", str(server.port)) for word in arguments]
            return [sys.executable, "-c", script, *given]

        monkeypatch.setattr(Server, "command", property(command))
        return Server(ServerOptions("model", "name"), tmp_path / "server.log", on_gpu=False)

    return build


def living(group: int) -> list[int]:
    """Processes of a group, without those that ended and wait for their parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name before the last ")" may hold anything; state, parent and group follow it.
            state, _, group_id = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group_id) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_ready_server_answers_and_leaves_no_process(make: Make) -> None:
    seen: list[float] = []
    with make(STAND_IN, "PORT", "0.3") as server:
        took_s = server.wait_ready(20, seen.append)
        group = server.pid
        assert server.metrics_text() == "text of /metrics"
        assert 0.3 <= took_s < 20
        assert seen == sorted(seen)
        assert len(living(group)) == 2
    assert not living(group)
    server.stop()


def test_server_that_dies_shows_the_end_of_its_log(make: Make) -> None:
    script = "print(*range(1000), sep='\\n'); raise SystemExit(3)"
    with make(script) as server, pytest.raises(ServerError) as caught:
        server.wait_ready(20)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the server ended with exit code 3"
    assert lines[-1] == "999"
    assert "100" not in lines


def test_server_that_is_never_ready_is_given_up(make: Make) -> None:
    with make(STAND_IN, "PORT", "600") as server:
        group = server.pid
        with pytest.raises(ServerError, match="not ready after 1 s"):
            server.wait_ready(1)
    assert not living(group)


def test_stop_ends_a_server_that_ignores_the_signal(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_dspark.cli.server.STOP_LIMIT_S", 0.5)
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(600)"
    )
    server = make(script)
    server.start()
    group = server.pid
    while "deaf" not in server.log_path.read_text():
        time.sleep(0.05)
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < 10
    assert not living(group)


def test_server_gets_the_cpu_environment_and_the_operator_wins(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script = (
        "import os; print(os.environ['TRITON_INTERPRET'], os.environ['VLLM_CPU_KVCACHE_SPACE'])"
    )
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    with make(script) as server, pytest.raises(ServerError):
        server.wait_ready(20)
    assert server.log_path.read_text().split() == [CPU_ENVIRONMENT["TRITON_INTERPRET"], "3"]


def test_unstarted_server_has_no_process(make: Make) -> None:
    server = make("")
    server.stop()
    with pytest.raises(ServerError, match="not started"):
        _ = server.pid


def test_arguments_carry_speculation_and_options() -> None:
    options = ServerOptions(
        "target", "name", speculative={"method": "dspark"}, dspark={"records": 3}, extra=["--x"]
    )
    words = options.arguments(8123, on_gpu=False)
    pairs = dict(zip(words, words[1:], strict=False))
    assert pairs["--speculative-config"] == '{"method": "dspark"}'
    assert pairs["--additional-config"] == '{"dspark": {"records": 3}}'
    assert pairs["--port"] == "8123"
    assert "--enforce-eager" in words
    assert words[-1] == "--x"
    assert "--enforce-eager" not in options.arguments(8123, on_gpu=True)
    plain = ServerOptions("target", "name").arguments(1, on_gpu=True)
    assert not {"--speculative-config", "--additional-config"} & set(plain)
