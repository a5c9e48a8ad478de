# SPDX-License-Identifier: Apache-2.0
"""Interpreted kernels mean what compiled ones mean, once `interpreter.install()` has run.

Triton decides when a kernel is defined whether it is interpreted, so the kernels run in a second
process: this file, executed as a script. It runs with and without the fixes. A kernel that works
without them names a fix that Triton no longer needs.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def scalar_condition_in_mask(row_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.load(row_ptr)
    block = tl.arange(0, BLOCK)
    tl.store(out_ptr + block, block, mask=(block < 3) & (row >= 0))


@triton.jit
def float_condition_in_mask(temperature_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    tl.store(out_ptr + block, block, mask=(tl.load(temperature_ptr) > 0.5) & (block < 3))


@triton.jit
def optional_pointer(cache_ptr, out_ptr, HAS_CACHE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    value = block
    if cache_ptr is not None:
        value += tl.load(cache_ptr + block)
    if HAS_CACHE:
        value += tl.load(cache_ptr + block)
    tl.store(out_ptr + block, value)


@triton.jit
def residual_log(x_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + block)
    tl.store(out_ptr + block, tl.where(x < 1.0, x + libdevice.log1p(-x), -1.0))


@triton.jit
def libdevice_rest(x_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + block)
    tl.store(out_ptr + block, libdevice.round(x))
    tl.store(out_ptr + BLOCK + block, libdevice.isnan(x).to(tl.float32))
    tl.store(out_ptr + 2 * BLOCK + block, libdevice.erf(libdevice.tanh(libdevice.exp(x))))


@triton.jit
def bfloat16_rank(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum((x >= tl.load(x_ptr)).to(tl.int32)))


@triton.jit
def bfloat16_add(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    tl.store(out_ptr + block, tl.load(x_ptr + block) + tl.load(y_ptr + block))


@triton.jit
def bfloat16_store(x_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    tl.store(out_ptr + block, tl.load(x_ptr + block))


@triton.jit
def bfloat16_dot(x_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    cells = block[:, None] * BLOCK + block[None, :]
    x = tl.load(x_ptr + cells)
    tl.store(out_ptr + cells, tl.dot(x, tl.trans(x)))


@triton.jit
def wrapping_hash(x_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    h = tl.load(x_ptr + block).to(tl.uint32)
    h *= 0xCC9E2D51
    h = (h << 15) | (h >> 17)
    tl.store(out_ptr + block, (h * 5 + 0xE6546B64).to(tl.int64))


def _scalar_condition() -> Any:
    out = torch.full((4,), -1)
    scalar_condition_in_mask[(1,)](torch.tensor([0]), out, BLOCK=4)
    return out.tolist()


def _float_condition() -> Any:
    out = torch.full((4,), -1)
    float_condition_in_mask[(1,)](torch.tensor([0.7]), out, BLOCK=4)
    return out.tolist()


def _optional_pointer() -> Any:
    out = torch.zeros(4, dtype=torch.int64)
    optional_pointer[(1,)](None, out, HAS_CACHE=False, BLOCK=4)
    return out.tolist()


def _residual_log() -> Any:
    out = torch.zeros(4)
    residual_log[(1,)](torch.tensor([0.0, 0.25, 0.5, 2.0]), out, BLOCK=4)
    return [round(v, 5) for v in out.tolist()]


def _libdevice_rest() -> Any:
    out = torch.zeros(12)
    libdevice_rest[(1,)](torch.tensor([0.5, -2.5, 0.4, math.nan]), out, BLOCK=4)
    return [None if math.isnan(v) else round(v, 5) for v in out.tolist()]


def _bfloat16_rank() -> Any:
    out = torch.zeros(1, dtype=torch.int32)
    bfloat16_rank[(1,)](torch.tensor([-2.0, -5.0, -1.0, 3.0]).bfloat16(), out, BLOCK=4)
    return out.item()


def _bfloat16_add() -> Any:
    out = torch.zeros(2).bfloat16()
    x, y = torch.tensor([2.5, -1.0]).bfloat16(), torch.tensor([2.0, 0.5]).bfloat16()
    bfloat16_add[(1,)](x, y, out, BLOCK=2)
    return out.tolist()


def _bfloat16_store() -> Any:
    x = torch.tensor([1.00390625, 1.01171875, 1.99999, -3.3e38, math.inf, -math.inf, math.nan, 0.1])
    out = torch.zeros(8).bfloat16()
    bfloat16_store[(1,)](x, out, BLOCK=8)
    return torch.equal(out.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))


def _bfloat16_dot() -> Any:
    x, out = (torch.arange(256.0).view(16, 16) / 64 - 2).bfloat16(), torch.zeros(16, 16)
    bfloat16_dot[(1,)](x, out, BLOCK=16)
    return torch.equal(out, x.float() @ x.float().T)


def _wrapping_hash() -> Any:
    out = torch.zeros(2, dtype=torch.int64)
    wrapping_hash[(1,)](torch.tensor([1, 0xFFFFFFFF]), out, BLOCK=2)
    return out.tolist()


def _python_hash(x: int) -> int:
    h = x * 0xCC9E2D51 % 2**32
    h = (h << 15 | h >> 17) % 2**32
    return (h * 5 + 0xE6546B64) % 2**32


def _erf_tanh_exp(x: float) -> float:
    return round(math.erf(math.tanh(math.exp(x))), 5)


# Triton 3.7 stores with such a mask, 3.9 refuses it.
MASK_REFUSED = "InterpreterError: ValueError('mask has unsupported dtype')"

# Kernel, what it must give, and whether it gives that without the fixes; else what some of the
# supported versions of Triton give instead.
CASES: dict[str, tuple[Callable[[], Any], Any, bool | str]] = {
    "scalar_condition": (_scalar_condition, [0, 1, 2, -1], MASK_REFUSED),
    "float_condition": (_float_condition, [0, 1, 2, -1], False),
    "optional_pointer": (_optional_pointer, [0, 1, 2, 3], True),
    "residual_log": (_residual_log, [0.0, -0.03768, -0.19315, -1.0], False),
    "libdevice_rest": (
        _libdevice_rest,
        [1.0, -3.0, 0.0, None, 0.0, 0.0, 0.0, 1.0]
        + [_erf_tanh_exp(0.5), _erf_tanh_exp(-2.5), _erf_tanh_exp(0.4), None],
        False,
    ),
    "bfloat16_rank": (_bfloat16_rank, 3, False),
    "bfloat16_add": (_bfloat16_add, [4.5, -0.5], False),
    "bfloat16_store": (_bfloat16_store, True, False),
    "bfloat16_dot": (_bfloat16_dot, True, False),
    "wrapping_hash": (_wrapping_hash, [_python_hash(1), _python_hash(0xFFFFFFFF)], True),
}


def _language() -> dict[str, Any]:
    """Everything the interpreter replaces while a kernel runs, by name and identity."""
    owners = {"tl": tl, "core": tl.core, "tensor": tl.tensor, "math": tl.math, "dtype": tl.dtype}
    return {f"{o}.{name}": v for o, owner in owners.items() for name, v in vars(owner).items()}


def _check_language_is_restored() -> Any:
    before = _language()
    _scalar_condition()
    _wrapping_hash()  # from the remembered list
    after_success = [k for k, v in _language().items() if before.get(k) is not v]
    try:
        residual_log[(1,)](torch.zeros(4), torch.zeros(4), BLOCK=3)  # not a power of two
    except triton.runtime.errors.InterpreterError:
        after_failure = [k for k, v in _language().items() if before.get(k) is not v]
        return [after_success, after_failure, _scalar_condition()]
    return "the kernel with a bad block size did not fail"


def _check_install_twice() -> Any:
    from triton.runtime import interpreter as host

    from vllm_dspark.cpu import interpreter

    before = {**vars(host), **vars(host.InterpreterBuilder), **vars(libdevice)}
    again = interpreter.install()
    return again and before == {
        **vars(host),
        **vars(host.InterpreterBuilder),
        **vars(libdevice),
    }


def _main(install: bool) -> None:
    results: dict[str, Any] = {}
    checks: dict[str, Callable[[], Any]] = {name: case[0] for name, case in CASES.items()}
    if install:
        from vllm_dspark.cpu import interpreter

        results["installed"] = interpreter.install()
        checks["restored"] = _check_language_is_restored
        checks["twice"] = _check_install_twice
    for name, check in checks.items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


def _run_as_script(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warning" not in done.stderr, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def fixed() -> dict[str, Any]:
    return _run_as_script("--install")


@pytest.fixture(scope="module")
def unfixed() -> dict[str, Any]:
    return _run_as_script()


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel(fixed: dict[str, Any], name: str) -> None:
    assert fixed["installed"] is True
    assert fixed[name] == CASES[name][1]


@pytest.mark.parametrize("name", CASES)
def test_the_fix_is_still_needed(unfixed: dict[str, Any], name: str) -> None:
    _, expected, without = CASES[name]
    if isinstance(without, str):
        assert unfixed[name] in (expected, without)
    else:
        assert (unfixed[name] == expected) is without, unfixed[name]


def test_triton_language_is_restored_after_each_kernel(fixed: dict[str, Any]) -> None:
    assert fixed["restored"] == [[], [], CASES["scalar_condition"][1]]


def test_installing_twice_changes_nothing(fixed: dict[str, Any]) -> None:
    assert fixed["twice"] is True


if __name__ == "__main__":
    _main(install="--install" in sys.argv[1:])
