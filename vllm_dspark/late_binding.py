# SPDX-License-Identifier: Apache-2.0
"""Act on a module when it is first imported, or at once if it already is.

``register()`` runs in every process of a server, most of which never import the model runner.
Waiting for the import keeps those processes untouched and start-up free of imports that nobody
asked for.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]

logger = logging.getLogger("vllm.dspark")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find; the loader runs the waiting actions after execution.

    Actions wait until a module has really been executed: looking for it uses up nothing, and an
    import that failed may be tried again.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self)
        return spec

    def act(self, module: ModuleType) -> None:
        """Run what waits for ``module``; a failure is ours and must not break the import."""
        for action in self.waiting.pop(module.__name__, ()):
            try:
                action(module)
            except Exception:
                logger.exception(
                    "vllm-dspark could not act on %s; the host's own DSpark stays in place",
                    module.__name__,
                )


class _ActingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Leave the module as it would be without us: tools read its loader (inspect, pickle).
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.act(module)


_finder = _Finder()


def on_import(name: str, action: Action) -> None:
    """Run ``action(module)`` once, right after ``name`` has been executed."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(action)
