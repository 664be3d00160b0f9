"""Writes files that survive a crash of the machine, and replaces a file atomically. Follows no links. Knows nothing of checkpoints.

Files are named relative to a folder that is open as a descriptor, so that nobody can put another folder in its place meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

Piece = memoryview | bytes


def create_file(name: str, pieces: Iterable[Piece], folder: int) -> None:
    """Write ``pieces`` one after the other to a new file, and fsync it. The folder is not synced.

    Raises ``FileExistsError`` if there is anything of that name, also a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(name: str, pieces: Iterable[Piece], folder: int) -> None:
    """Write ``pieces`` to a new file next to ``name``, and rename it: a reader finds all of it, or what was there before.

    When this returns the file survives a crash of the machine. If this raises, no temporary file is left.
    """
    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        create_file(temporary, pieces, folder)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)
