# SPDX-License-Identifier: Apache-2.0
"""Patch `triton.language` once per interpreted kernel, from a remembered list.

Triton's interpreter replaces the members of `triton.language` while a kernel runs. It finds them
anew, by scanning five namespaces, for every kernel and again for every device function that the
kernel calls, though the answer depends only on which language modules the function can see.

Invariant: while a kernel runs, the same members are replaced as without this cache, and when it
ends all of them are what they were before. Device functions add what they need to the scope of the
kernel that called them; the interpreter itself never undoes theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_Seen = tuple[int, ...]


class LanguagePatches:
    """Stands in for `triton.runtime.interpreter._patch_lang`, which it calls on first sight."""

    def __init__(self, interpreter: Any) -> None:
        import triton.language as tl

        self._original = interpreter._patch_lang
        self._scope_class = interpreter._LangPatchScope
        self._languages = (tl, tl.core)
        self._seen_by: dict[tuple[Callable[..., Any], int], _Seen] = {}
        self._patches: dict[_Seen, list[tuple[Any, str, Any]]] = {}
        self._open: Any = None
        self._applied: set[_Seen] = set()

    def patch(self, fn: Callable[..., Any]) -> Any:
        """A scope whose `restore()` undoes the patches; empty if an outer kernel made them."""
        seen = self._languages_seen_by(fn)
        if self._open is None:
            return self._patch_for_kernel(fn, seen)
        if seen not in self._applied:
            self._applied.add(seen)
            if seen in self._patches:
                self._apply(self._open, seen)
            else:
                # Incomplete as a list of its own: members the kernel replaced already are missing.
                self._open._changes.extend(self._original(fn)._changes)
        return self._scope_class()

    def _patch_for_kernel(self, fn: Callable[..., Any], seen: _Seen) -> Any:
        scope = self._closing_scope()
        if seen in self._patches:
            self._apply(scope, seen)
        else:
            scope._changes = self._original(fn)._changes
            self._patches[seen] = [(o, name, vars(o)[name]) for o, name, _ in scope._changes]
        self._open = scope
        self._applied = {seen}
        return scope

    def _apply(self, scope: Any, seen: _Seen) -> None:
        for owner, name, value in self._patches[seen]:
            scope.set_attr(owner, name, value)

    def _languages_seen_by(self, fn: Callable[..., Any]) -> _Seen:
        # Rewriting a function adds names to its module, hence the length.
        key = (fn, len(fn.__globals__))
        seen = self._seen_by.get(key)
        if seen is None:
            modules = [m for m in fn.__globals__.values() if inspect.ismodule(m)]
            seen = tuple(i for i, lang in enumerate(self._languages) if lang in modules)
            self._seen_by[key] = seen
        return seen

    def _closing_scope(self) -> Any:
        patches = self

        class KernelScope(self._scope_class):  # type: ignore[name-defined,misc]
            def restore(self) -> None:
                super().restore()
                patches._open = None

        return KernelScope()
