"""What ``Run(track=...)`` was given, as trackers: names become objects, and mistakes are found before training begins."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.observe.tracker_csv import Csv
from lockstep.observe.tracker_mlflow import Mlflow
from lockstep.observe.tracker_tensorboard import TensorBoard
from lockstep.observe.tracker_wandb import Wandb
from lockstep.observe.trackers import Tracker

_KNOWN: dict[str, type[Any]] = {"csv": Csv, "tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
_ELSEWHERE = {
    "csv": 'another path: lockstep.track.Csv("other.csv")',
    "tensorboard": 'another folder: lockstep.track.TensorBoard("other")',
    "wandb": 'another id: lockstep.track.Wandb(id="other")',
    "mlflow": 'another experiment: lockstep.track.Mlflow(experiment="other")',
}
"""What to type if two trackers write to the same place."""


def make_trackers(given: Sequence[str | Tracker]) -> list[Any]:
    """Return a tracker for each name and object in ``given``.

    Raises:
        UsageError: A name is unknown, an object has no ``log``, two trackers write to one place, or a package is not installed.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        shown = f'["{given}"]' if isinstance(given, str) else '["csv"]'
        raise UsageError(f"track={given!r} is not a list. Pass a list of names or trackers: lockstep.Run(..., track={shown}).")
    trackers = [_make(each) for each in given]
    _require_different_places(trackers)
    for tracker in trackers:
        _require_packages(tracker)
    return trackers


def _make(each: Any) -> Any:
    if isinstance(each, str):
        if each not in _KNOWN:
            names = ", ".join(f'"{name}"' for name in _KNOWN)
            raise UsageError(f"track=[{each!r}]: no tracker has this name. Choose from {names}, or pass an object with log().")
        return _KNOWN[each]()
    if isinstance(each, type) or not callable(getattr(each, "log", None)):
        what = f"the class {each.__name__}: pass an object, {each.__name__}(...)" if isinstance(each, type) else f"{each!r:.80}"
        raise UsageError(f"track= has {what}. A tracker has a method log(step, values); a plain function is passed as on_log=.")
    return each


def _require_different_places(trackers: list[Any]) -> None:
    """Two trackers of one process cannot keep each other out by a lock: each step would be written twice."""
    seen: dict[Any, int] = {}
    for index, tracker in enumerate(trackers):
        is_ours = isinstance(tracker, tuple(_KNOWN.values()))
        place = (tracker.name, tracker.place) if is_ours else id(tracker)
        if place in seen:
            remedy = f"Give one of them {_ELSEWHERE[tracker.name]}." if is_ours else "Pass the object once."
            raise UsageError(
                f"track[{seen[place]}] and track[{index}], both {type(tracker).__name__}, write to the same place: each step would "
                f"be there twice. {remedy}"
            )
        seen[place] = index


def _require_packages(tracker: Any) -> None:
    if not isinstance(tracker, (TensorBoard, Wandb, Mlflow)):
        return
    for package in tracker.packages:
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"the tracker {tracker.name} needs the package {package}, which is not installed here. "
                f"Install it: pip install 'lockstep-ddp[{tracker.name}]'"
            )


def tracking_folder(checkpoint: str | os.PathLike[str] | None, run_dir: str | None) -> Path:
    """Return the folder below which each run has a folder for its curves.

    That is next to the checkpoints, so that a resumed run finds it; in the run folder if there are none; and in the working
    directory if checkpoints are in an object store, or without `lockstep run`.
    """
    if checkpoint is not None:
        scheme, separator, rest = os.fspath(checkpoint).partition("://")
        if not separator or scheme in ("file", "local"):
            return Path(rest if separator else scheme).absolute() / "tracking"
    elif run_dir is not None:
        return Path(run_dir) / "tracking"
    return Path("lockstep-tracking").absolute()
