# SPDX-License-Identifier: Apache-2.0
"""Where Triton looks for the compiler of the `cpu` backend: the one concrete class shown here."""

from vllm_dspark.cpu import backend

_real = backend.real_cpu_backend()
Compiler = _real[0] if _real else backend.InterpreterBackend
