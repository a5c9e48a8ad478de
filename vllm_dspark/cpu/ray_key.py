# SPDX-License-Identifier: Apache-2.0
"""Let vLLM's Ray executor place workers that interpret their kernels on a CPU.

vLLM asks its platform under which name Ray counts the devices, and gives up where the name is
empty, as it is on CPUs. Ray refuses `CPU` as the name of a resource of one's own, and tells a
worker its ids only for accelerators that it knows. So such workers count as GPUs that the operator
declares: `TRITON_INTERPRET=1 ray start --head --num-gpus 2` offers room for two.

Touches one attribute of one class of the host, `KEY`, where the host left it empty, and only in
processes that interpret their kernels for want of a GPU. A Ray worker asks for the name before it
loads vLLM's plugins, so `give()` is called where Triton looks for backends, which is earlier.
"""

from __future__ import annotations

from types import ModuleType

from vllm_dspark.compat import HostSymbol
from vllm_dspark.cpu.host import interpreter_requested, interpreting_on_cpu
from vllm_dspark.late_binding import on_import

KEY = HostSymbol(
    "vllm.platforms.cpu",
    "CpuPlatform.ray_device_key",
    (),
    "filled",
    "Ray's executor needs a name for the devices that it places workers on; CPUs have none.",
    "https://github.com/vllm-project/vllm/blob/main/vllm/platforms/interface.py",
    "CpuPlatform names a resource of Ray's",
)


def give() -> None:
    """Fill in the name when the host defines its CPU platform; nothing without the interpreter."""
    if interpreter_requested():
        on_import(KEY.module, _fill)


def _fill(module: ModuleType) -> None:
    platform = getattr(module, "CpuPlatform", None)
    if platform is not None and not platform.ray_device_key and interpreting_on_cpu():
        platform.ray_device_key = "GPU"
