# SPDX-License-Identifier: Apache-2.0
"""One process that all tests of this folder fork their ranks from."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launcher import Launcher


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("ranks")) as launcher:
        yield launcher
