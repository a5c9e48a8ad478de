# SPDX-License-Identifier: Apache-2.0
"""Act on a module when it is first imported, or at once if it already is.

``register()`` runs in every process of a server, most of which never import the model runner.
Waiting for the import keeps those processes untouched and start-up free of imports that nobody
asked for.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and runs the waiting action after execution."""

    def __init__(self) -> None:
        self.waiting: dict[str, Action] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        action = self.waiting.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _ActingLoader(spec.loader, action)
        return spec


class _ActingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Leave the module as it would be without us: tools read its loader (inspect, pickle).
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)


_finder = _Finder()


def on_import(name: str, action: Action) -> None:
    """Run ``action(module)`` once, right after ``name`` has been executed."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting[name] = action
