# SPDX-License-Identifier: Apache-2.0
"""Kernel tests: compiled where there is a GPU, interpreted elsewhere.

On a GPU machine every test of this folder carries the mark `gpu`. Elsewhere those that cannot run
without one carry it, and the default selection leaves them out.
"""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def by_value() -> None:
    """Interpreted kernels multiply 16-bit floats as compiled ones do, not their bits."""
    if not torch.cuda.is_available():
        from vllm_dspark.cpu import interpreter

        assert interpreter.install()
