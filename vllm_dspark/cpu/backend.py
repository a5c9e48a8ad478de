# SPDX-License-Identifier: Apache-2.0
"""The `cpu` Triton backend: present only where Triton has no device at all.

* **Active** only under `TRITON_INTERPRET=1` on a machine where torch sees no CUDA, ROCm or XPU
  device, so a GPU host always has exactly one active driver.
* **Absent** without `TRITON_INTERPRET=1`. vLLM's CPU build takes the mere name `cpu` in Triton's
  table for "kernels can run here" and prefers them to its C++ code, so the entry leaves the table
  before anybody reads it.
* **Yields** to a real Triton CPU backend: when another distribution registers `cpu`, Triton gets
  that backend's classes, whichever of the two entry points it reads last.

Nothing here raises on import; torch is imported only when a driver is asked whether it is active.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import time
import types
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget, Language
from triton.backends.driver import DriverBase

from vllm_dspark.cpu.host import interpreter_requested, interpreting_on_cpu

BACKEND_NAME = "cpu"
_OWN_PACKAGE = __name__.rpartition(".")[0]
_BENCHMARK_RUNS = 3


class InterpreterBackend(BaseBackend):
    """The compiler half: it has a name and a hash, and nothing to compile."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == BACKEND_NAME

    def hash(self) -> str:
        return f"{_OWN_PACKAGE}-interpreter"

    def parse_options(self, options: dict[str, Any]) -> Any:
        return types.SimpleNamespace(**options)

    def add_stages(self, stages: dict[str, Any], options: Any, language: Language) -> None:
        raise NotImplementedError(
            "the cpu backend only interprets kernels: set TRITON_INTERPRET=1 before the first "
            "import of triton"
        )

    def load_dialects(self, context: Any) -> None:
        """No MLIR is built."""

    def get_module_map(self) -> dict[str, types.ModuleType]:
        return {}


class InterpreterDriver(DriverBase):
    """What Triton asks of a driver, for a process whose kernels are all interpreted."""

    @classmethod
    def is_active(cls) -> bool:
        try:
            return interpreting_on_cpu()
        except Exception:
            # Triton asks every driver when it looks for the active one; an odd torch build must
            # not take the others down.
            return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(f"the cpu backend only interprets kernels: no C++ type for {ty}")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(BACKEND_NAME, "interpreter", 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return _wall_clock_ms


def _wall_clock_ms(
    kernel_call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **_: Any
) -> list[float]:
    """Wall-clock quantiles of a few calls, in ms: enough to rank autotuner configurations."""
    times_ms = []
    for _run in range(_BENCHMARK_RUNS):
        start = time.perf_counter()
        kernel_call()
        times_ms.append((time.perf_counter() - start) * 1e3)
    times_ms.sort()
    return [times_ms[round(q * (_BENCHMARK_RUNS - 1))] for q in quantiles]


@functools.cache
def real_cpu_backend() -> tuple[type[BaseBackend], type[DriverBase]] | None:
    """Compiler and driver class of another distribution's `cpu` backend, if one is installed."""
    for entry in entry_points(group="triton.backends", name=BACKEND_NAME):
        if entry.value.partition(":")[0].startswith(_OWN_PACKAGE):
            continue
        try:
            compiler = _concrete_class(f"{entry.value}.compiler", BaseBackend)
            driver = _concrete_class(f"{entry.value}.driver", DriverBase)
        except Exception:
            # Triton imports that entry point itself and reports what is wrong with it.
            continue
        if compiler is not None and driver is not None:
            return compiler, driver
    return None


def _concrete_class(module_name: str, base: type) -> Any:
    for value in vars(importlib.import_module(module_name)).values():
        if isinstance(value, type) and issubclass(value, base) and not inspect.isabstract(value):
            return value
    return None


class _TableWithoutIdleBackend(types.ModuleType):
    """The module `triton.backends` until its table is first read, which drops the idle entry.

    Triton imports this file in the middle of its discovery and enters us into the table after
    that, so there is no later moment of our own at which the entry could be taken out again.
    """

    @property
    def backends(self) -> dict[str, Any]:
        try:
            table: dict[str, Any] = self.__dict__["backends"]
        except KeyError:
            raise AttributeError("triton.backends is still discovering its backends") from None
        entry = table.get(BACKEND_NAME)
        if entry is not None and entry.driver is InterpreterDriver:
            del table[BACKEND_NAME]
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        return table


def hide_when_idle() -> None:
    """Keep the entry out of Triton's table if this process does not interpret its kernels."""
    discovering = sys.modules.get("triton.backends")
    if (
        type(discovering) is types.ModuleType
        and "backends" not in vars(discovering)
        and not interpreter_requested()
    ):
        discovering.__class__ = _TableWithoutIdleBackend
