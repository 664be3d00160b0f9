"""Writes files that survive a crash of the machine, and replaces a file atomically. Knows nothing of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Piece = memoryview | bytes


def write_file(path: Path, pieces: Iterable[Piece]) -> None:
    """Write ``pieces`` one after the other, and fsync the file. Its folder is not synced: see ``sync_folder``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, pieces: Iterable[Piece]) -> None:
    """Write ``pieces`` to a file next to ``path``, and rename it: a reader finds all of it at ``path``, or what was there before.

    When this returns the file survives a crash of the machine. If this raises, no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(temporary, pieces)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names of the files in ``folder`` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
