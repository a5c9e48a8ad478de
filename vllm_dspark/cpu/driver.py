# SPDX-License-Identifier: Apache-2.0
"""Where Triton looks for the driver of the `cpu` backend: the one concrete class shown here."""

from vllm_dspark.cpu import backend, ray_key

_real = backend.real_cpu_backend()
Driver = _real[1] if _real else backend.InterpreterDriver
if not _real:
    backend.hide_when_idle()
ray_key.give()
