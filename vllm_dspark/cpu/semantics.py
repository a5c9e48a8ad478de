# SPDX-License-Identifier: Apache-2.0
"""Give interpreted kernels the meaning that compiled ones have, where Triton's interpreter differs.

* A comparison yields `int1`. The interpreter labels its result with the operands' type, so a scalar
  comparison becomes an integer block once it is broadcast, and masked loads and stores refuse it.
* `bfloat16` is compared, computed and multiplied as matrices by value, and rounded to nearest even.
  The interpreter keeps the bits in a `uint16` and works on those: negative numbers compare the
  wrong way round.
* libdevice functions compute. Their Python bodies are empty until a compiler backend binds them, so
  interpreted kernels get `None`.

Every function here takes the module `triton.runtime.interpreter` and is to be called once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np


def make_comparisons_int1(interpreter: Any) -> None:
    import triton.language as tl

    def as_int1(compare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compare)
        def compare_int1(self: Any, lhs: Any, rhs: Any) -> Any:
            return interpreter.TensorHandle(compare(self, lhs, rhs).data, tl.int1)

        return compare_int1

    builder = interpreter.InterpreterBuilder
    for name, method in list(vars(builder).items()):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, as_int1(method))


def compute_bfloat16_by_value(interpreter: Any) -> None:
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    convert, binary_op, dot = interpreter._convert_float, builder.binary_op, builder.create_dot
    toward_zero = interpreter._ir.ROUNDING_MODE.RTZ

    @functools.wraps(convert)
    def convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if input_dtype == tl.bfloat16 and output_dtype == tl.float32:
            return input.astype(np.uint32) << 16
        narrowing = input_dtype == tl.float32 and output_dtype == tl.bfloat16
        # A plain cast arrives without a rounding mode; compiled code rounds it to nearest.
        if narrowing and rounding_mode != toward_zero:
            return _nearest_bfloat16_bits(input)
        return convert(input, input_dtype, output_dtype, rounding_mode)

    @functools.wraps(binary_op)
    def binary_op_by_value(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype != np.uint16 or lhs.dtype.scalar != tl.bfloat16:
            return binary_op(self, lhs, rhs, op)
        wide = [self.cast_impl(operand, tl.float32) for operand in (lhs, rhs)]
        result = binary_op(self, *wide, op)
        return result if result.data.dtype == np.bool_ else self.cast_impl(result, tl.bfloat16)

    @functools.wraps(dot)
    def dot_by_value(self: Any, a: Any, b: Any, *args: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(operand, tl.float32) for operand in (a, b))
        return dot(self, a, b, *args)

    interpreter._convert_float = convert_float
    builder.binary_op = binary_op_by_value
    builder.create_dot = dot_by_value


def _nearest_bfloat16_bits(values: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even, of a float32 array; NaN stays a quiet NaN."""
    bits = values.view(np.uint32)
    high = bits >> 16
    rounded = (bits + (0x7FFF + (high & 1))) >> 16
    return np.where(np.isnan(values), high | 0x40, rounded).astype(np.uint16)


def implement_libdevice(interpreter: Any) -> None:
    import triton.language as tl
    from triton.language.extra import libdevice

    def elementwise(original: Callable[..., Any], compute: Callable[..., Any], out: Any) -> Any:
        @functools.wraps(original)
        def call(arg0: Any) -> Any:
            arg = interpreter.interpreter_semantic.to_tensor(arg0)
            if arg.dtype not in (tl.float32, tl.float64):
                name = original.__name__
                raise TypeError(f"libdevice.{name} takes fp32 or fp64, got {arg.dtype}")
            dtype = out or arg.dtype
            with np.errstate(all="ignore"):  # compiled kernels do not warn of NaN and infinity
                data = compute(arg.handle.data).astype(interpreter._get_np_dtype(dtype))
            kind = tl.block_type(dtype, list(arg.shape)) if arg.type.is_block() else dtype
            return tl.tensor(interpreter.TensorHandle(data, dtype), kind)

        return call

    for name, compute, out in (
        ("erf", np.vectorize(math.erf, otypes=[np.float64]), None),
        ("exp", np.exp, None),
        ("isnan", np.isnan, tl.int32),
        ("log1p", np.log1p, None),
        ("round", _round_half_away, None),
        ("tanh", np.tanh, None),
    ):
        setattr(libdevice, name, elementwise(getattr(libdevice, name), compute, out))


def _round_half_away(x: Any) -> Any:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole)
