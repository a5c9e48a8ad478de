# SPDX-License-Identifier: Apache-2.0
"""Files that commands write: a path that cannot be written is a mistake, not a crash."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vllm_dspark.cli import CommandError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Raises `CommandError` naming `path` if writing it fails."""
    try:
        yield path
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file.

    Raises:
        CommandError: it cannot be written.
    """
    with writing(path):
        path.write_text(text, encoding="utf-8")
