"""Removes run folders that are not needed any more. What Lockstep has not written is never removed: then the folder stays.

remove_run      one folder, if no run uses it and it has nothing but files of Lockstep
remove_oldest   the oldest of ./lockstep-runs, when a run begins
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.launcher.run_folder import last_written, take_lock
from lockstep.launcher.run_registry import forget_run, is_run_folder
from lockstep.launcher.run_status import ENDED, UNKNOWN, read_status
from lockstep.recording.text import printable

KEPT_RUNS = 50
"""How many folders a run leaves in ./lockstep-runs, unless `--keep-runs` says otherwise."""
_AUTOMATIC_NAME = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")
_EVENTS = "events.jsonl"
_RUN_FILES = "events.jsonl|agent.sock|agent.pid|zygote.txt|outcome.json|head.address|head.new|function.pickle"
_OWN = (  # patterns of paths in a run folder
    re.compile(_RUN_FILES),
    re.compile(r"recording(/every-\d+-\d+\.jsonl)?"),
    re.compile(r"workers(/\d+(/(log\.txt|log\.times|stack\.txt|result\.pickle))?)?"),
    re.compile(r"ledger(/\d+\.jsonl)?"),
)
_NESTED = re.compile(r"(machines/[^/]+|earlier-\d+)")
"""Folders that are run folders in turn: of the agent of a machine, and of an earlier run in the same folder."""
_CURVES = "tracking"
"""In a run folder: what the trackers of a script without ``checkpoint=`` have written. It is removed on request alone."""
_ABANDONED_S = 14 * 86400.0
"""A run of another machine that has written nothing for so long was killed."""


class NotRemovedError(Exception):
    """A run folder stays. The text says why: "a run uses it"."""


def remove_run(path: Path, *, with_curves: bool = False) -> int:
    """Remove a run folder. Returns how many bytes that has freed. Raises NotRemovedError if it stays, whole or in part.

    ``with_curves``: also if trackers have written there.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotRemovedError(f"it is a link, or cannot be opened ({error.strerror})") from error
    locked = [folder]
    try:
        _require_removable(path, folder, with_curves=with_curves)
        locked += _lock_machines(path)
        size = disk_bytes(path)
        for entry in sorted(path.iterdir(), key=lambda each: each.name == _EVENTS):  # last: it says that this is a run folder
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        path.rmdir()
    except OSError as error:
        raise NotRemovedError(f"{printable(str(error.filename or path))} cannot be removed ({error.strerror})") from error
    finally:
        for descriptor in locked:
            os.close(descriptor)
    forget_run(path)
    for machine in path.glob("machines/*"):
        forget_run(machine)
    return size


def check_removable(path: Path, *, with_curves: bool = False) -> None:
    """Raises NotRemovedError if ``remove_run`` would."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotRemovedError(f"it is a link, or cannot be opened ({error.strerror})") from error
    try:
        _require_removable(path, folder, with_curves=with_curves)
        for descriptor in _lock_machines(path):
            os.close(descriptor)
    except OSError as error:
        raise NotRemovedError(f"{printable(str(error.filename or path))} cannot be read ({error.strerror})") from error
    finally:
        os.close(folder)


def remove_oldest(parent: Path, keep: int) -> None:
    """Remove the oldest folders of ended runs that have a name made by Lockstep, so that ``keep`` are left. Never raises.

    A run of another machine that has not said that it ended counts as ended if nobody has written there for 14 days. Folders in
    which somebody else has put something stay, and count.
    """
    try:
        names = sorted(each.name for each in parent.iterdir() if _AUTOMATIC_NAME.fullmatch(each.name))
    except OSError:
        return
    for name in names[: max(0, len(names) - keep)]:
        path = parent / name
        try:
            state = read_status(path, ask=False).state if is_run_folder(path) else ""
            if state in ENDED or (state == UNKNOWN and time.time() - last_written(path) >= _ABANDONED_S):
                remove_run(path)
        except (OSError, NotRemovedError):
            continue


def foreign_files(path: Path, pattern_base: Path | None = None) -> list[Path]:
    """Returns what is in a run folder and was not written by Lockstep. Nothing below a foreign folder is listed."""
    base = path if pattern_base is None else pattern_base
    found = []
    for entry in sorted(path.iterdir()):
        name = entry.relative_to(base).as_posix()
        mode = entry.lstat().st_mode
        is_known = any(each.fullmatch(name) for each in _OWN)
        if stat.S_ISDIR(mode) and _NESTED.fullmatch(name):
            found += foreign_files(entry)
        elif stat.S_ISDIR(mode) and (is_known or name == "machines"):
            found += foreign_files(entry, base)
        elif not is_known or not (stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
            found.append(entry)
    return found


def disk_bytes(path: Path) -> int:
    """Returns how much space the files below ``path`` use."""
    return sum(entry.lstat().st_blocks * 512 for entry in (path, *path.rglob("*")))


def without_parts(runs: Sequence[Path]) -> list[Path]:
    """Returns ``runs`` without the folders of agents that are in the folder of a run: they are removed with it."""
    return [path for path in runs if not (path.parent.name == "machines" and is_run_folder(path.parent.parent))]


def _require_removable(path: Path, folder: int, *, with_curves: bool) -> None:
    if not is_run_folder(path) or (path / _EVENTS).is_symlink():
        raise NotRemovedError("it is no run folder: it has no events.jsonl")
    if os.fstat(folder).st_uid != os.geteuid():
        raise NotRemovedError("it belongs to another user")
    _lock(folder)
    foreign = foreign_files(path)
    results = [entry for entry in foreign if not _is_curves(entry)]
    if results:
        more = f" and {len(results) - 1} more" if len(results) > 1 else ""
        raise NotRemovedError(f"it has {printable(str(results[0].relative_to(path)))}{more}, which Lockstep did not write")
    if foreign and not with_curves:
        raise NotRemovedError(f"it has {_CURVES}, the files of track=. `lockstep clean --with-curves` removes these too")


def _is_curves(entry: Path) -> bool:
    """Whether a foreign entry is the folder of the trackers. It is in a run folder, because other folders have only known names."""
    return entry.name == _CURVES and stat.S_ISDIR(entry.lstat().st_mode) and is_run_folder(entry.parent)


def _lock_machines(path: Path) -> list[int]:
    """Returns descriptors of the folders of agents, which are locked. Raises NotRemovedError if an agent runs."""
    locked: list[int] = []
    try:
        for machine in path.glob("machines/*"):
            locked.append(os.open(machine, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
            _lock(locked[-1])
    except BaseException:
        for descriptor in locked:
            os.close(descriptor)
        raise
    return locked


def _lock(folder: int) -> None:
    """No run can begin in the folder while it is being removed."""
    try:
        take_lock(folder)
    except BlockingIOError:
        raise NotRemovedError("a run uses it") from None
