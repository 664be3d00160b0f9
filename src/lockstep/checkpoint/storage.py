"""Storage: where checkpoints are kept: a local folder, or anything that fsspec reaches. Writes, publishes, reads, removes.

A checkpoint is one folder. It exists once its manifest exists, which is written last:

    local    every file is written and fsynced, then both folders are; the manifest is written atomically (atomic_file.py)
    fsspec   every file is uploaded; the manifest is one upload, which object stores make visible completely or not at all
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from lockstep.checkpoint.atomic_file import Piece, create_file, write_atomically
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
        """Return the names of all folders, also of those that are no checkpoints. Links to folders are not among them."""

    def links(self) -> list[str]:
        """Return the names of all symbolic links."""

    def exists(self, folder: str, file: str) -> bool:
        """Return whether there is anything of that name: a file that cannot be read exists too."""

    def make_folder(self, folder: str) -> None:
        """Several workers may call it at once for the same folder."""

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        """Write a file. When this returns, its bytes survive a crash of the machine."""

    def publish(self, folder: str, manifest: bytes) -> None:
        """Make the folder a checkpoint. Rank 0 calls it when the files of all workers are written."""

    def read(self, folder: str, file: str, limit: int) -> bytes:
        """Return the content of a file. Raises ``OSError``, before it allocates, if the file has more than ``limit`` bytes."""

    def open(self, folder: str, file: str) -> StorageFile: ...

    def remove(self, folder: str) -> None:
        """Remove the manifest first, so that a folder with missing files is never a checkpoint; then the rest."""

    def exchange(self, file: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace the content of a small file next to the checkpoints, if it is ``old``; None stands for no file.

        Returns whether the content was ``old`` and is ``new`` now. Local storage does this atomically. Others do not: a process
        that writes at the same time may win, and both find that out when they read the file again.
        """


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
    """On a local (or mounted) file system.

    The folder that the user named may be a link. Everything below it is opened relative to the descriptor of its folder, without
    following links: a link in the place of a checkpoint, or of a file in it, leads neither a writer nor a remover elsewhere.
    """

    def __init__(self, path: str) -> None:
        self.url = str(Path(path).absolute())
        if os.path.exists(self.url) and not os.path.isdir(self.url):
            raise UsageError(f"checkpoint={path!r} is a file. Name a folder for the run's checkpoints.")

    def folders(self) -> list[str]:
        return self._list(lambda entry: entry.is_dir(follow_symlinks=False))

    def links(self) -> list[str]:
        return self._list(lambda entry: entry.is_symlink())

    def exists(self, folder: str, file: str) -> bool:
        try:
            with self._opened(folder) as opened:
                os.stat(file, dir_fd=opened, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def make_folder(self, folder: str) -> None:
        os.makedirs(self.url, exist_ok=True)
        with self._opened() as root, suppress(FileExistsError):
            os.mkdir(folder, dir_fd=root)

    def write(self, folder: str, file: str, pieces: Iterable[Piece]) -> None:
        with self._opened(folder) as opened:
            create_file(file, pieces, opened)

    def publish(self, folder: str, manifest: bytes) -> None:
        with self._opened() as root, self._opened(folder) as opened:
            os.fsync(opened)  # the names of the workers' files must be on disk before the manifest is
            os.fsync(root)
            write_atomically(NAME, [manifest], opened)

    def read(self, folder: str, file: str, limit: int) -> bytes:
        return _read_whole(self.open(folder, file), file, limit)

    def open(self, folder: str, file: str) -> StorageFile:
        with self._opened(folder) as opened:
            return _LocalFile(file, opened)

    def remove(self, folder: str) -> None:
        with self._opened() as root, self._opened(folder) as opened:
            names = os.listdir(opened)
            if NAME in names:
                names.remove(NAME)
                os.unlink(NAME, dir_fd=opened)
                os.fsync(opened)
            for name in names:
                os.unlink(name, dir_fd=opened)
            os.rmdir(folder, dir_fd=root)

    def exchange(self, file: str, old: bytes | None, new: bytes | None) -> bool:
        os.makedirs(self.url, exist_ok=True)
        with self._opened() as root:
            if old is None:
                return new is None or _create(file, new, root)
            if not _flock(root) or _content(self, file, len(old)) != old:
                return False
            if new is None:
                os.unlink(file, dir_fd=root)
            else:
                write_atomically(file, [new], root)
        return True

    def _list(self, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        try:
            with os.scandir(self.url) as entries:
                return sorted(entry.name for entry in entries if is_wanted(entry))
        except FileNotFoundError:
            return []

    @contextmanager
    def _opened(self, folder: str = "") -> Iterator[int]:
        """A descriptor of the place itself, or of a folder in it. A link to a folder raises ``NotADirectoryError``."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        root = descriptor = os.open(self.url, flags)
        try:
            if folder:
                descriptor = os.open(folder, flags | os.O_NOFOLLOW, dir_fd=root)
            yield descriptor
        finally:
            for each in {root, descriptor}:
                os.close(each)


class _LocalFile:
    """Raises ``OSError`` for all but regular files: to open a pipe would wait for a writer, and a device has no end."""

    def __init__(self, name: str, folder: int) -> None:
        self._descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, f"{name} is not a regular file")
        self.size = found.st_size

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


def _read_whole(file: StorageFile, name: str, limit: int) -> bytes:
    with closing(file):
        if file.size > limit:
            raise OSError(errno.EFBIG, f"{name} has {file.size} bytes, more than the {limit} that it can have")
        content = bytearray(file.size)
        return bytes(content[: file.read_into(0, memoryview(content))])


def _create(file: str, content: bytes, folder: int) -> bool:
    try:
        create_file(file, [content], folder)
    except FileExistsError:
        return False
    return True


def _flock(folder: int) -> bool:
    """Lock a folder until its descriptor is closed. Returns False if another process has it for a second, maybe stopped there."""
    for _ in range(20):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return True  # some network file systems cannot: there the file may change between comparison and replacement
    return False


def _content(storage: Storage, file: str, limit: int) -> bytes | None:
    """Return the content of a file next to the checkpoints: None if there is none, or if it has more than ``limit`` bytes."""
    try:
        return storage.read("", file, limit)
    except OSError:
        return None


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
        return self._list("directory")

    def links(self) -> list[str]:
        return self._list("link")

    def _list(self, kind: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == kind)

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

    def read(self, folder: str, file: str, limit: int) -> bytes:
        return _read_whole(self.open(folder, file), file, limit)

    def open(self, folder: str, file: str) -> StorageFile:
        return _FsspecFile(self._system, self._path(folder, file))

    def remove(self, folder: str) -> None:
        if self.exists(folder, NAME):
            self._system.rm_file(self._path(folder, NAME))
        self._system.rm(self._path(folder), recursive=True)

    def exchange(self, file: str, old: bytes | None, new: bytes | None) -> bool:
        self._system.invalidate_cache()
        if self.exists("", file) != (old is not None) or (old is not None and _content(self, file, len(old)) != old):
            return False
        if new is not None:
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(self._path("", file), new)
        elif old is not None:
            self._system.rm_file(self._path("", file))
        return True

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *filter(None, parts)))


class _FsspecFile:
    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        found = system.info(path)
        if found["type"] != "file":
            raise OSError(errno.EINVAL, f"{path} is not a regular file")
        self.size = int(found["size"])

    def read_into(self, begin: int, target: memoryview) -> int:
        data = self._system.cat_file(self._path, start=begin, end=begin + len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass
