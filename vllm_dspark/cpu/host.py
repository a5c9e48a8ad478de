# SPDX-License-Identifier: Apache-2.0
"""Does this process interpret its Triton kernels because there is no GPU?

Cheap unless the answer may be yes: without `TRITON_INTERPRET` in the environment neither Triton
nor torch is imported.
"""

from __future__ import annotations

import os


def interpreter_requested() -> bool:
    """True if `TRITON_INTERPRET` holds a value that Triton itself reads as true."""
    if not os.environ.get("TRITON_INTERPRET"):
        return False
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def gpu_present() -> bool:
    """True if torch sees a device that another Triton backend would drive."""
    import torch

    # ROCm builds report their devices as CUDA ones.
    return torch.cuda.is_available() or torch.xpu.is_available()


def interpreting_on_cpu() -> bool:
    """True if every Triton kernel of this process runs in the interpreter on host tensors."""
    return interpreter_requested() and not gpu_present()
