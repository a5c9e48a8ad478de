# SPDX-License-Identifier: Apache-2.0
"""When the `cpu` Triton backend is seen, when it is active, and to whom it yields."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from triton.backends import Backend

from vllm_dspark.cpu import backend, compiler, driver, host, ray_key

ROOT = Path(__file__).resolve().parents[2]
TABLE = """
from triton.backends import backends
entry = backends.get("cpu")
print("missing" if entry is None else f"{entry.compiler.__module__} {entry.driver.__module__}")
"""


def run_python(code: str, *paths: Path, **env: str) -> str:
    """Standard output of `code` in a fresh interpreter that finds `paths` and the plugin first."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    search = [str(p) for p in (*paths, ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, "PYTHONPATH": os.pathsep.join(search), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def add_entry_point(folder: Path, distribution: str, package: str) -> Path:
    """Metadata of an installed distribution that registers `package` as the `cpu` backend."""
    info = folder / f"{distribution}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {package}\n")
    return folder


@pytest.fixture
def plugin_entry(tmp_path: Path) -> Path:
    return add_entry_point(tmp_path / "plugin", "dspark_entry_for_tests", "vllm_dspark.cpu")


@pytest.fixture
def real_backend(tmp_path: Path) -> Path:
    folder = add_entry_point(tmp_path / "real", "real_cpu_backend", "realcpu")
    package = folder / "realcpu"
    package.mkdir()
    (package / "__init__.py").touch()
    # Derived from ours only to be short; what counts is the module that they are defined in.
    for module, base in (("compiler", "InterpreterBackend"), ("driver", "InterpreterDriver")):
        (package / f"{module}.py").write_text(
            f"import vllm_dspark.cpu.backend as b\nclass Real(b.{base}): pass\n"
        )
    return folder


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_active_when_interpreting_without_gpu(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setattr(host, "gpu_present", lambda: False)
    assert backend.InterpreterDriver.is_active()


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_inactive_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setattr(host, "gpu_present", lambda: False)
    assert not backend.InterpreterDriver.is_active()


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_inactive_on_a_gpu_host(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    import torch

    for name in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda name=name: name == device)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not backend.InterpreterDriver.is_active()
    monkeypatch.setattr(getattr(torch, device), "is_available", lambda: False)
    assert backend.InterpreterDriver.is_active()


def test_inactive_when_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("no driver library")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(host, "gpu_present", broken)
    assert not backend.InterpreterDriver.is_active()


KEY = """
import triton
from vllm.platforms.cpu import CpuPlatform
print(repr(CpuPlatform.ray_device_key))
"""
GPU_FOUND = "import torch; torch.cuda.is_available = lambda: True\n"


@pytest.mark.parametrize(
    ("interpret", "before", "key"),
    [("1", "", "'GPU'"), ("0", "", "''"), ("1", GPU_FOUND, "''")],
)
def test_ray_has_a_name_for_cpus_only_when_interpreting(
    plugin_entry: Path, interpret: str, before: str, key: str
) -> None:
    assert run_python(before + KEY, plugin_entry, TRITON_INTERPRET=interpret) == key


def test_a_name_that_the_host_gives_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for given, kept in (("", "GPU"), ("HOST", "HOST")):
        platforms = ModuleType(ray_key.KEY.module)
        platforms.CpuPlatform = type("CpuPlatform", (), {"ray_device_key": given})
        monkeypatch.setitem(sys.modules, ray_key.KEY.module, platforms)
        ray_key.give()
        assert platforms.CpuPlatform.ray_device_key == kept


def test_triton_accepts_the_classes() -> None:
    """Both halves are concrete, fit each other, and are the only candidates in their module."""
    from triton.backends import BaseBackend, DriverBase, _find_concrete_subclasses

    found = Backend(
        _find_concrete_subclasses(compiler, BaseBackend),
        _find_concrete_subclasses(driver, DriverBase),
    )
    target = found.driver().get_current_target()
    assert found.compiler(target).hash()
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        found.compiler(target).add_stages({}, None, None)


def test_benchmarker_gives_one_time_per_quantile() -> None:
    calls: list[int] = []
    times_ms = backend.InterpreterDriver().get_benchmarker()(
        lambda: calls.append(1), quantiles=[0.5, 0.2, 0.8]
    )
    assert calls
    assert len(times_ms) == 3
    assert times_ms[1] <= times_ms[0] <= times_ms[2]


def test_table_lists_the_backend_only_when_interpreting(plugin_entry: Path) -> None:
    listed = "vllm_dspark.cpu.backend vllm_dspark.cpu.backend"
    assert run_python(TABLE, plugin_entry, TRITON_INTERPRET="1") == listed
    assert run_python(TABLE, plugin_entry) == "missing"
    assert run_python(TABLE, plugin_entry, TRITON_INTERPRET="0") == "missing"


def test_hiding_leaves_triton_backends_as_it_was(plugin_entry: Path) -> None:
    code = """
import sys, types
import triton.backends
assert type(triton.backends) is types.ModuleType
assert sys.modules["triton.runtime.driver"].backends is triton.backends.backends
assert {"nvidia", "amd"} <= set(triton.backends.backends)
print("ok")
"""
    assert run_python(code, plugin_entry) == "ok"


@pytest.mark.parametrize("plugin_last", [True, False])
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_yields_to_a_real_cpu_backend(
    plugin_entry: Path, real_backend: Path, plugin_last: bool, interpret: str
) -> None:
    paths = (real_backend, plugin_entry) if plugin_last else (plugin_entry, real_backend)
    shown = run_python(TABLE, *paths, TRITON_INTERPRET=interpret)
    assert shown == "realcpu.compiler realcpu.driver"


def test_a_broken_real_backend_is_not_ours_to_report(
    plugin_entry: Path, real_backend: Path
) -> None:
    (real_backend / "realcpu" / "driver.py").write_text("raise ImportError('broken')\n")
    code = "from vllm_dspark.cpu import driver; print(driver.Driver.__module__)"
    # Triton's own discovery is kept out: it would fail on the broken entry, as without the plugin.
    shown = run_python(code, plugin_entry, real_backend, TRITON_BACKENDS_IN_TREE="1")
    assert shown == "vllm_dspark.cpu.backend"


@pytest.mark.parametrize(("interpret", "usable"), [("1", "True"), ("0", "False")])
def test_vllm_uses_triton_only_when_interpreting(
    plugin_entry: Path, interpret: str, usable: str
) -> None:
    code = "from vllm.triton_utils import HAS_TRITON; print(HAS_TRITON)"
    shown = run_python(code, plugin_entry, TRITON_INTERPRET=interpret, VLLM_PLUGINS="")
    assert shown.splitlines()[-1] == usable


def test_install_imports_nothing_unless_asked() -> None:
    code = """
import sys
from vllm_dspark.cpu import interpreter
assert interpreter.install() is False
print([m for m in ("torch", "triton", "vllm") if m in sys.modules])
"""
    assert run_python(code) == "[]"


def test_install_is_inert_on_a_gpu_host() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True
from triton.runtime import interpreter as host
before = {**vars(host), **vars(host.InterpreterBuilder)}
from vllm_dspark.cpu import interpreter
assert interpreter.install() is False
assert {**vars(host), **vars(host.InterpreterBuilder)} == before
print("ok")
"""
    assert run_python(code, TRITON_INTERPRET="1") == "ok"
