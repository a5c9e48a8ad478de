# SPDX-License-Identifier: Apache-2.0
"""Acting on a module when it is imported: once, after it ran, and without a trace in the module."""

import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_dspark import late_binding
from vllm_dspark.late_binding import on_import

_numbers = itertools.count()
MakeModule = Callable[..., str]


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeModule:
    """Writes an importable module and returns its name, new in every call."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source: str = "VALUE = 1\n", package: str | None = None) -> str:
        name = f"late_{next(_numbers)}"
        folder = tmp_path
        if package is not None:
            folder = tmp_path / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name if package is None else f"{package}.{name}"

    return make


@pytest.fixture(autouse=True)
def nothing_left_waiting() -> None:
    yield
    late_binding._finder.waiting.clear()


def test_acts_once_after_the_module_ran(make_module: MakeModule) -> None:
    name = make_module()
    seen: list[tuple[ModuleType, int]] = []
    on_import(name, lambda module: seen.append((module, module.VALUE)))
    assert seen == []
    module = importlib.import_module(name)
    assert importlib.import_module(name) is module
    assert seen == [(module, 1)]


def test_acts_at_once_if_the_module_is_there(make_module: MakeModule) -> None:
    module = importlib.import_module(make_module())
    seen: list[ModuleType] = []
    on_import(module.__name__, seen.append)
    assert seen == [module]


def test_what_the_action_binds_is_what_importers_get(make_module: MakeModule) -> None:
    name = make_module("def answer():\n    return 1\n")
    on_import(name, lambda module: setattr(module, "answer", lambda: 2))
    namespace: dict[str, Callable[[], int]] = {}
    exec(f"from {name} import answer", namespace)
    assert namespace["answer"]() == 2


def test_the_module_looks_as_if_nobody_had_acted(make_module: MakeModule) -> None:
    name = make_module("def answer():\n    return 41 + 1\n")
    on_import(name, lambda module: None)
    module = importlib.import_module(name)
    assert type(module.__loader__) is SourceFileLoader
    assert type(module.__spec__.loader) is SourceFileLoader
    assert "41 + 1" in inspect.getsource(module.answer)


def test_a_submodule_imported_twice_is_acted_on_once(make_module: MakeModule) -> None:
    package = f"late_package_{next(_numbers)}"
    name = make_module(package=package)
    seen: list[str] = []
    on_import(name, lambda module: seen.append(module.__name__))
    importlib.import_module(package)
    assert seen == [], "the package alone is not the module"
    importlib.import_module(name)
    exec(f"from {package} import {name.rpartition('.')[2]}", {})
    assert seen == [name]


def test_an_action_may_import_another_waited_module(make_module: MakeModule) -> None:
    first, second = make_module(), make_module()
    seen: list[str] = []
    on_import(second, lambda module: seen.append("second"))

    def act(module: ModuleType) -> None:
        importlib.import_module(second)
        seen.append("first")

    on_import(first, act)
    importlib.import_module(first)
    assert seen == ["second", "first"]


def test_a_missing_module_fails_as_usual(make_module: MakeModule) -> None:
    seen: list[ModuleType] = []
    on_import("late_nowhere", seen.append)
    with pytest.raises(ModuleNotFoundError, match="No module named 'late_nowhere'"):
        importlib.import_module("late_nowhere")
    assert seen == []


def test_an_error_in_the_module_stays_its_own_and_a_second_try_acts(
    make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_module("import os\nVALUE = int(os.environ['LATE_VALUE'])\n")
    seen: list[int] = []
    on_import(name, lambda module: seen.append(module.VALUE))
    with pytest.raises(KeyError, match="LATE_VALUE"):
        importlib.import_module(name)
    assert name not in sys.modules
    assert seen == []
    monkeypatch.setenv("LATE_VALUE", "7")
    importlib.import_module(name)
    assert seen == [7]


def test_asking_for_the_spec_does_not_use_the_action_up(make_module: MakeModule) -> None:
    name = make_module()
    seen: list[ModuleType] = []
    on_import(name, seen.append)
    assert importlib.util.find_spec(name) is not None
    module = importlib.import_module(name)
    assert seen == [module]


def test_two_actions_on_one_module_both_run(make_module: MakeModule) -> None:
    name = make_module()
    seen: list[str] = []
    on_import(name, lambda module: seen.append("first"))
    on_import(name, lambda module: seen.append("second"))
    importlib.import_module(name)
    assert seen == ["first", "second"]


def test_one_finder_however_many_wait(make_module: MakeModule) -> None:
    for _ in range(3):
        on_import(make_module(), lambda module: None)
    assert sys.meta_path.count(late_binding._finder) == 1


def test_an_action_that_fails_costs_the_plugin_and_not_the_import(
    make_module: MakeModule, dspark_log: Any
) -> None:
    name = make_module()
    seen: list[str] = []

    def fail(module: ModuleType) -> None:
        raise AttributeError("the host has changed")

    on_import(name, fail)
    on_import(name, lambda module: seen.append("other"))
    assert importlib.import_module(name).VALUE == 1
    assert seen == ["other"]
    (error,) = dspark_log.errors()
    assert name in error
