# SPDX-License-Identifier: Apache-2.0
"""One server with the demo pair and the plugin for all end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_dspark.cli import demo
from vllm_dspark.cli.server import Server
from vllm_dspark.cli.traffic import Client

# A pinned budget below the block makes every step with drafts a trimmed one.
DSPARK = {"strict": True, "verify": "compact", "budget_pin": 0.75}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server; its log is in the error if it does not become ready."""
    options = demo.pair_options(dspark=DSPARK)
    log: Path = tmp_path_factory.mktemp("server") / "server.log"
    with Server(options, log, on_gpu=demo.gpu_present()) as running:
        running.wait_ready()
        yield running
        running.check_alive()


@pytest.fixture(scope="session")
def client(server: Server) -> Client:
    return Client(server.url, demo.SERVED_NAME)
