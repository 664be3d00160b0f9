"""Storage: where checkpoints lie: a local folder, or anything that fsspec reaches. Writes, publishes, reads, removes.

A checkpoint is one folder. What makes it one is its manifest, the last thing written:

    local    every file is written and fsynced, then the folders; the manifest is written aside, fsynced, and renamed
    fsspec   every file is uploaded; the manifest is one upload, which object stores make visible whole or not at all
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from lockstep.checkpoint.manifest import NAME
from lockstep.errors import UsageError

Piece = memoryview | bytes


class Source(Protocol):
    """One file, to be read in pieces, by several threads at once."""

    size: int

    def read_into(self, begin: int, target: memoryview) -> int:
        """Returns how many bytes came: fewer than ``target`` takes at the file's end."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Every method raises ``OSError`` where the storage does."""

    url: str

    def folders(self) -> list[str]: ...

    def holds(self, folder: str, file: str) -> bool: ...

    def make(self, folder: str) -> None:
        """May be called by several workers at once."""

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        """Returns when it would survive a crash of the machine."""

    def publish(self, folder: str, manifest: bytes) -> None:
        """All files are written: make the folder a checkpoint."""

    def read(self, folder: str, file: str) -> bytes: ...

    def open(self, folder: str, file: str) -> Source: ...

    def remove(self, folder: str) -> None:
        """First it ceases to be a checkpoint, then its files go."""


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """A path, or a URL of any file system that fsspec knows."""
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise UsageError(f"checkpoint={url!r} names no folder. Pass a folder, or a URL such as s3://bucket/run.")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Folder(text)
    if scheme in ("file", "local"):
        return Folder(rest)
    return Remote(text)


class Folder:
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

    def holds(self, folder: str, file: str) -> bool:
        return (self._root / folder / file).is_file()

    def make(self, folder: str) -> None:
        os.makedirs(self._root / folder, exist_ok=True)

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        descriptor = os.open(self._root / folder / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self, folder: str, manifest: bytes) -> None:
        aside = f"{NAME}.new"
        self.write(folder, aside, [manifest])
        self._sync(self._root / folder)
        self._sync(self._root)
        os.rename(self._root / folder / aside, self._root / folder / NAME)
        self._sync(self._root / folder)

    def read(self, folder: str, file: str) -> bytes:
        return (self._root / folder / file).read_bytes()

    def open(self, folder: str, file: str) -> Source:
        return _Descriptor(self._root / folder / file)

    def remove(self, folder: str) -> None:
        there = self._root / folder
        if self.holds(folder, NAME):
            os.unlink(there / NAME)
            self._sync(there)
        for entry in os.listdir(there):
            os.unlink(there / entry)
        os.rmdir(there)

    def _sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Descriptor:
    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._number).st_size

    def read_into(self, begin: int, target: memoryview) -> int:
        done = 0
        while done < len(target):
            count = os.preadv(self._number, [target[done:]], begin + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._number)


class Remote:
    """Through fsspec, which torch brings along; the file system's own package (s3fs, gcsfs, ...) is the user's to install."""

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self.url = url.rstrip("/")
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"checkpoint={url!r} cannot be reached: {error}. Correct the URL, or install what it needs.") from None

    def folders(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def holds(self, folder: str, file: str) -> bool:
        return bool(self._system.exists(self._path(folder, file)))

    def make(self, folder: str) -> None:
        self._system.makedirs(self._path(folder), exist_ok=True)

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        with self._system.open(self._path(folder, file), "wb") as there:
            for piece in pieces:
                there.write(piece)

    def publish(self, folder: str, manifest: bytes) -> None:
        self._system.pipe_file(self._path(folder, NAME), manifest)

    def read(self, folder: str, file: str) -> bytes:
        return bytes(self._system.cat_file(self._path(folder, file)))

    def open(self, folder: str, file: str) -> Source:
        return _Object(self._system, self._path(folder, file))

    def remove(self, folder: str) -> None:
        if self.holds(folder, NAME):
            self._system.rm_file(self._path(folder, NAME))
        self._system.rm(self._path(folder), recursive=True)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))


class _Object:
    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self.size = int(system.size(path))

    def read_into(self, begin: int, target: memoryview) -> int:
        data = self._system.cat_file(self._path, start=begin, end=begin + len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


def in_pieces(whole: memoryview, most: int, stop: Callable[[], bool]) -> Iterable[memoryview]:
    """Piece after piece; ``Stopped`` where ``stop()`` says so in between."""
    for begin in range(0, len(whole), most):
        if stop():
            raise Stopped
        yield whole[begin : begin + most]


class Stopped(Exception):
    """Writing was given up: what was written so far is nobody's."""
