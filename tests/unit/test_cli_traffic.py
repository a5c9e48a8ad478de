# SPDX-License-Identifier: Apache-2.0
"""The client of the commands and tests, against a server that answers every completion alike."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_dspark.cli.traffic import Client

ANSWER = {
    "id": "a",
    "object": "text_completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "text": "t", "finish_reason": "length", "logprobs": None}],
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections that are not asked to be closed

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.ports.append(self.client_address[1])  # type: ignore[attr-defined]
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.ports = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join(10)


def test_every_request_has_a_connection_of_its_own(server: ThreadingHTTPServer) -> None:
    client = Client(f"http://127.0.0.1:{server.server_port}", "m")
    for _ in range(3):
        assert client._complete("prompt", max_tokens=1).choices[0].text == "t"
    ports: list[int] = server.ports  # type: ignore[attr-defined]
    assert len(set(ports)) == 3
