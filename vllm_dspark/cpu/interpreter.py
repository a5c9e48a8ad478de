# SPDX-License-Identifier: Apache-2.0
"""Make Triton's interpreter run the kernels of vLLM's V2 runner, and run them faster.

`install()` replaces the symbols in `HOST_SYMBOLS` (`ray_key` fills its own one), in processes that
interpret kernels for want of a GPU and nowhere else. `semantics` holds the replacements that change
results, without which sampling fails. Top-k and top-p go to vLLM's own PyTorch code for CPUs,
because their kernel calls methods of a loop variable, which is a plain number to the interpreter.
The rest saves time and leaves results alone.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

from vllm_dspark.compat import HostSymbol
from vllm_dspark.cpu import ray_key
from vllm_dspark.cpu.host import interpreting_on_cpu
from vllm_dspark.late_binding import on_import

_INTERPRETER = "triton.runtime.interpreter"
_LIBDEVICE = "triton.language.extra.libdevice"
_TOP_K_TOP_P = "vllm.v1.sample.ops.topk_topp_sampler"
_TRITON = "https://github.com/triton-lang/triton/"
_INTERPRETER_SOURCE = _TRITON + "blob/main/python/triton/runtime/interpreter.py"

HOST_SYMBOLS: tuple[HostSymbol, ...] = (
    HostSymbol(
        _INTERPRETER,
        "InterpreterBuilder.create_icmpSGE",
        (),
        "wrapped",
        "Comparisons (all create_icmp* and create_fcmp*) must be int1: broadcast scalar ones became"
        " integer masks, which stores refuse.",
        _TRITON + "issues/10919",
        "the interpreter's comparisons return int1 handles",
    ),
    HostSymbol(
        _INTERPRETER,
        "InterpreterBuilder.binary_op",
        ("lhs", "rhs", "op"),
        "wrapped",
        "bfloat16 operands are compared and computed by value; logprob ranks were wrong.",
        _TRITON + "pull/10945",
        "the interpreter computes bfloat16 by value",
    ),
    HostSymbol(
        _INTERPRETER,
        "InterpreterBuilder.create_dot",
        ("a", "b"),
        "wrapped",
        "Products of bfloat16 matrices are taken of their values, not of their bits as integers.",
        _TRITON + "pull/10945",
        "the interpreter computes bfloat16 by value",
    ),
    HostSymbol(
        _INTERPRETER,
        "_convert_float",
        ("input", "input_dtype", "output_dtype", "rounding_mode"),
        "wrapped",
        "Casts to bfloat16 round to nearest even, as compiled ones do; casts from it are a shift.",
        _TRITON + "pull/10945",
        "the interpreter rounds casts to bfloat16",
    ),
    *(
        HostSymbol(
            _LIBDEVICE,
            name,
            ("arg0",),
            "wrapped",
            "Rejection sampling calls libdevice, whose functions return None when interpreted.",
            _TRITON + "issues/8825",
            "the interpreter implements libdevice",
        )
        for name in ("erf", "exp", "isnan", "log1p", "round", "tanh")
    ),
    HostSymbol(
        _TOP_K_TOP_P,
        "apply_top_k_top_p_triton",
        ("logits", "k", "p"),
        "wrapped",
        "The kernel calls .to() on a loop variable, which is a plain number when interpreted.",
        _INTERPRETER_SOURCE,
        "the interpreter's loop variables are tensors, and fast",
    ),
    HostSymbol(
        _INTERPRETER,
        "_patch_lang",
        ("fn",),
        "wrapped",
        "Each call of a device function scans triton.language anew, the largest cost of a step.",
        _INTERPRETER_SOURCE,
        "the interpreter patches triton.language once per kernel",
    ),
    HostSymbol(
        _INTERPRETER,
        "_get_np_dtype",
        ("tt_dtype",),
        "wrapped",
        "Builds its table of types on each of the many calls that one kernel makes.",
        _INTERPRETER_SOURCE,
        "the interpreter keeps its table of types",
    ),
    HostSymbol(
        _INTERPRETER,
        "interpreter_builder",
        (),
        "extended",
        "Overflow checks of integers are computed and then dropped, for want of debug mode.",
        _INTERPRETER_SOURCE,
        "the interpreter skips overflow checks that it does not report",
    ),
    ray_key.KEY,
)

_installed = False


def install() -> bool:
    """Put the replacements in place once; True if they are in place.

    False, and nothing is imported, in a process that does not set `TRITON_INTERPRET`; False too on
    a machine with a GPU.
    """
    global _installed
    if not _installed and interpreting_on_cpu():
        from triton.runtime import interpreter

        from vllm_dspark.cpu import semantics
        from vllm_dspark.cpu.patch_cache import LanguagePatches

        semantics.make_comparisons_int1(interpreter)
        semantics.compute_bfloat16_by_value(interpreter)
        semantics.implement_libdevice(interpreter)
        _skip_dropped_overflow_checks(interpreter)
        _remember_np_dtypes(interpreter)
        interpreter._patch_lang = LanguagePatches(interpreter).patch
        on_import(_TOP_K_TOP_P, _use_pytorch_top_k_top_p)
        _installed = True
    return _installed


def _skip_dropped_overflow_checks(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_np_dtypes(interpreter: Any) -> None:
    original = interpreter._get_np_dtype
    by_name: dict[str, Any] = {}

    @functools.wraps(original)
    def get_np_dtype(tt_dtype: Any) -> Any:
        # Types are equal if their names are; pointer types cannot be hashed.
        known = by_name.get(tt_dtype.name)
        if known is None:
            known = by_name[tt_dtype.name] = original(tt_dtype)
        return known

    interpreter._get_np_dtype = get_np_dtype


def _use_pytorch_top_k_top_p(sampler: ModuleType) -> None:
    original = getattr(sampler, "apply_top_k_top_p_triton", None)
    if original is None:  # vLLM did not find Triton: it takes the PyTorch code by itself
        return

    @functools.wraps(original)
    def apply_top_k_top_p(logits: Any, k: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
        if logits.device.type != "cpu":
            return original(logits, k, p, *args, **kwargs)
        return sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    sampler.apply_top_k_top_p_triton = apply_top_k_top_p  # type: ignore[attr-defined]
