"""Storage: where checkpoints are kept: a local folder, or anything that fsspec reaches. Writes, publishes, reads, removes.

A checkpoint is one folder. It exists once its manifest exists, which is written last:

    local    every file is written and fsynced, then both folders are; the manifest is written atomically (atomic_file.py)
    fsspec   every file is uploaded; the manifest is one upload, which object stores make visible completely or not at all
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lockstep.checkpoint.atomic_file import Piece, sync_folder, write_atomically, write_file
from lockstep.checkpoint.manifest import NAME
from lockstep.errors import UsageError


class StorageFile(Protocol):
    """One file, open for reading. Several threads may read it at once."""

    size: int

    def read_into(self, begin: int, target: memoryview) -> int:
        """Fill ``target`` from byte ``begin`` on. Returns how many bytes were read: fewer than asked for at the file's end."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Every method raises ``OSError`` if the storage fails."""

    url: str

    def folders(self) -> list[str]:
        """Return the names of all folders, also of those that are no checkpoints."""

    def exists(self, folder: str, file: str) -> bool: ...

    def make_folder(self, folder: str) -> None:
        """Several workers may call it at once for the same folder."""

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        """Write a file. When this returns, its bytes survive a crash of the machine."""

    def publish(self, folder: str, manifest: bytes) -> None:
        """Make the folder a checkpoint. Rank 0 calls it when the files of all workers are written."""

    def read(self, folder: str, file: str) -> bytes: ...

    def open(self, folder: str, file: str) -> StorageFile: ...

    def remove(self, folder: str) -> None:
        """Remove the manifest first, so that a folder with missing files is never a checkpoint; then the rest."""


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """Open the ``checkpoint`` argument of ``Run``: a path, or a URL. Raises ``UsageError`` if that is not possible."""
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise UsageError(f"checkpoint={url!r} names no folder. Pass a folder, or a URL such as s3://bucket/run.")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(text)
    if scheme in ("file", "local"):
        return LocalStorage(rest)
    return FsspecStorage(text)


class LocalStorage:
    """On a local (or mounted) file system."""

    def __init__(self, path: str) -> None:
        self._root = Path(path).absolute()
        self.url = str(self._root)
        if self._root.exists() and not self._root.is_dir():
            raise UsageError(f"checkpoint={path!r} is a file. Name a folder for the run's checkpoints.")

    def folders(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._root) if entry.is_dir())
        except FileNotFoundError:
            return []

    def exists(self, folder: str, file: str) -> bool:
        return (self._root / folder / file).is_file()

    def make_folder(self, folder: str) -> None:
        os.makedirs(self._root / folder, exist_ok=True)

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        write_file(self._root / folder / file, pieces)

    def publish(self, folder: str, manifest: bytes) -> None:
        sync_folder(self._root / folder)  # the names of the workers' files must be on disk before the manifest is
        sync_folder(self._root)
        write_atomically(self._root / folder / NAME, [manifest])

    def read(self, folder: str, file: str) -> bytes:
        return (self._root / folder / file).read_bytes()

    def open(self, folder: str, file: str) -> StorageFile:
        return _LocalFile(self._root / folder / file)

    def remove(self, folder: str) -> None:
        path = self._root / folder
        if self.exists(folder, NAME):
            os.unlink(path / NAME)
            sync_folder(path)
        for entry in os.listdir(path):
            os.unlink(path / entry)
        os.rmdir(path)


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, begin: int, target: memoryview) -> int:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], begin + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)


class FsspecStorage:
    """Through fsspec, which torch installs. Users install the package of their file system (s3fs, gcsfs, ...) themselves."""

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self.url = url.rstrip("/")
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"checkpoint={url!r} cannot be reached: {error}. Correct the URL, or install the package that it needs."
            ) from None

    def folders(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def exists(self, folder: str, file: str) -> bool:
        return bool(self._system.exists(self._path(folder, file)))

    def make_folder(self, folder: str) -> None:
        self._system.makedirs(self._path(folder), exist_ok=True)

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        with self._system.open(self._path(folder, file), "wb") as opened:
            for piece in pieces:
                opened.write(piece)

    def publish(self, folder: str, manifest: bytes) -> None:
        self._system.pipe_file(self._path(folder, NAME), manifest)

    def read(self, folder: str, file: str) -> bytes:
        return bytes(self._system.cat_file(self._path(folder, file)))

    def open(self, folder: str, file: str) -> StorageFile:
        return _FsspecFile(self._system, self._path(folder, file))

    def remove(self, folder: str) -> None:
        if self.exists(folder, NAME):
            self._system.rm_file(self._path(folder, NAME))
        self._system.rm(self._path(folder), recursive=True)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))


class _FsspecFile:
    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self.size = int(system.size(path))

    def read_into(self, begin: int, target: memoryview) -> int:
        data = self._system.cat_file(self._path, start=begin, end=begin + len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass
