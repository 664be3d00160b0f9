"""The registry: which run folders this user has on this machine, and which one a person means. Small files, one for each run.

    $XDG_STATE_HOME/lockstep/runs/HASH.json     {"path": "/home/ada/lockstep-runs/20261116-162517-27391", "at": 1763310317.2}

HASH is made from the path. A run goes on if nothing can be written there; then the commands find it by its folder alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.launcher.arguments import did_you_mean
from lockstep.launcher.file_ends import first_events

RUNS_FOLDER = "lockstep-runs"
"""In the current directory: the folders of runs without ``--run-dir``."""
LAST = "last"
_SHOWN = 5
_FIRST_BYTES = 4096
"""Of events.jsonl. When the run began is there."""
_FOLLOWERS = ("machines", "heads")
"""In the folder of a run on several machines: folders with the folders of its parts."""


def register(path: Path, environ: Mapping[str, str] | None = None) -> None:
    """Note that ``path`` is the folder of a run. Does nothing if that cannot be written, or if there is no home directory."""
    folder = registry_folder(os.environ if environ is None else environ)
    if folder is None:
        return
    entry = folder / _name(path)
    temporary = entry.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"path": str(path), "at": time.time()}))
        temporary.rename(entry)
    except OSError:
        pass  # a home that is read-only or full must not stop a run


def registry_folder(environ: Mapping[str, str]) -> Path | None:
    """Returns where the entries are; None if this user has no home directory."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = environ.get("HOME") or _home_of_user()
        if not os.path.isabs(home):
            return None
        state = os.path.join(home, ".local", "state")
    return Path(state, "lockstep", "runs")


def registered_runs(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Returns the folders in the registry. Entries whose folder is gone are dropped."""
    folder = registry_folder(os.environ if environ is None else environ)
    found = []
    for entry in _listing(folder) if folder is not None else ():
        path = _path_in(entry)
        if path is not None and is_run_folder(path):
            found.append(path)
        elif path is not None and not os.path.lexists(path):
            _remove(entry)
    return found


def forget_run(path: Path, environ: Mapping[str, str] | None = None) -> None:
    """The folder was removed: drop its entry."""
    folder = registry_folder(os.environ if environ is None else environ)
    if folder is not None:
        _remove(folder / _name(path))


def is_run_folder(path: Path) -> bool:
    """Whether a run has been started in ``path``. False if that cannot be seen."""
    try:
        return (path / "events.jsonl").is_file()
    except OSError:
        return False


def known_runs() -> list[Path]:
    """Returns the folders in the registry and those in ./lockstep-runs, newest first."""
    local = [path for path in _listing(Path(os.path.abspath(RUNS_FOLDER))) if is_run_folder(path)]
    return sorted({*registered_runs(), *local}, key=began_at, reverse=True)


def began_at(path: Path) -> float:
    """When the run in ``path`` began, in seconds since 1970; 0 if that is not known."""
    return next((float(line["time"]) for line in first_events(path, _FIRST_BYTES)), 0.0)


def find_run(text: str) -> Path:
    """Returns the folder of the run that a person means by ``text``.

    ``text`` is the path of a folder, the name of a run in ./lockstep-runs or in the registry, the beginning of such a name, or
    "last": the run below the current directory that was started last; if there is none, that of this machine. Raises UsageError
    if no run is meant, or more than one.
    """
    if not text:
        raise UsageError("the name of the run is empty. `lockstep ls` lists the runs.")
    path = Path(os.path.abspath(text))
    if is_run_folder(path):
        return path
    known = known_runs()
    if text == LAST:
        return _last(known)
    if os.sep not in text.rstrip(os.sep):
        name = text.rstrip(os.sep)
        for same in ([each for each in known if each.name == name], [each for each in known if each.name.startswith(name)]):
            if len(same) == 1:
                return same[0]
            if same:
                raise UsageError(f"{text} may be any of {len(same)} runs: {_names(same)}. Type more of the name, or its folder.")
    raise UsageError(f"there is no run {text}{_explain(path)}. {_hint(text, known)}")


def _last(known: list[Path]) -> Path:
    if not known:
        raise UsageError(f"there is no run on this machine yet, and none in ./{RUNS_FOLDER}. Name the folder of a run.")
    whole = [path for path in known if path.parent.name not in _FOLLOWERS] or known
    here = Path(os.path.abspath(os.curdir))
    return next((path for path in whole if path.is_relative_to(here)), whole[0])


def _explain(path: Path) -> str:
    if not path.is_dir():
        return ""
    inside = sorted(each.name for each in _listing(path) if is_run_folder(each))
    if inside:
        return f": the folder has runs in it, {path.name}/{inside[-1]} for example"
    return ": the folder exists, but has no events.jsonl"


def _hint(text: str, known: list[Path]) -> str:
    near = did_you_mean(Path(text).name, [path.name for path in known] + [LAST])
    none = "" if known else f" There is none on this machine yet, and none in ./{RUNS_FOLDER}."
    return f"{near}`lockstep ls` lists the runs.{none}"


def _names(paths: Iterable[Path]) -> str:
    """Names, or paths if several runs have the same name."""
    paths = list(paths)
    is_enough = len({path.name for path in paths}) == len(paths)
    shown = [path.name if is_enough else str(path) for path in paths[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(paths) > _SHOWN else "")


def _home_of_user() -> str:
    """As the system knows it; empty if it does not know this user: in a container, for example."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _name(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:24] + ".json"


def _path_in(entry: Path) -> Path | None:
    """Returns the path that an entry holds; None if the file is no entry."""
    if entry.suffix != ".json":
        return None
    try:
        path = json.loads(entry.read_text())["path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Path(path) if isinstance(path, str) and os.path.isabs(path) else None


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _remove(entry: Path) -> None:
    try:
        entry.unlink(missing_ok=True)
    except OSError:
        pass  # the home is read-only
