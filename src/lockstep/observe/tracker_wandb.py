"""Wandb: Weights & Biases, by its package."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.observe.wandb_file import WandbFile

_FLUSH_S = 0.05
_LIMITS_S = {"init_timeout": 30.0, "finish_timeout": 60.0}
"""By default wandb waits 90 s for a server that does not answer, and without a limit for an upload."""
_UPLOAD_S = 60.0
_WRITER_LIMIT_S = 20.0
_SETTLE_S = 20.0
_POLL_S = 0.02


class Wandb:
    """Sends logged values to Weights & Biases.

    In wandb's offline mode (``WANDB_MODE=offline`` or ``mode="offline"``) each worker that becomes rank 0 writes into a folder of
    its own, with the same run id, and together they hold each step once. ``wandb sync`` uploads them.

    ``wandb.run`` is not set: it stays free for a run of your script's own.

    wandb waits 30 s at most for the server (``init_timeout``), and 60 s at most for the upload at the end (``finish_timeout``),
    unless you give these settings: by ``settings=wandb.Settings(...)`` or by ``WANDB_INIT_TIMEOUT`` and ``WANDB_FINISH_TIMEOUT``.

    Args:
        **options: Arguments of ``wandb.init``, such as ``project``, ``entity``, ``name``, ``config`` and ``mode``. Without ``id``,
            Lockstep gives the run id: it stays the same after a resume.

    Example:
        >>> run = lockstep.Run(model, opt, track=[lockstep.track.Wandb(project="small", config={"lr": 0.1})])
    """

    name = "wandb"
    packages = ("wandb",)

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None
        self._is_broken = False
        """Whether wandb has failed to begin or to end a run: then its process holds the run id until it ends."""
        self._file: WandbFile | None = None
        self._last = 0
        self._unsure: list[tuple[float, int]] = []  # when a step was logged online, until it was uploaded, as far as can be known

    @property
    def place(self) -> str | None:
        """The id of its run, to compare trackers: wandb's process takes an id once. None: that of Lockstep."""
        return self._options.get("id")

    def open(self, run_id: str, folder: Path) -> None:
        import wandb

        self._end_earlier()
        given = dict(self._options)
        run_id = given.pop("id", run_id)
        place = Path(given.pop("dir", folder))
        place.mkdir(parents=True, exist_ok=True)
        known = wandb.setup().settings.model_fields_set  # by variables and files of the user
        limits = {name: limit_s for name, limit_s in _LIMITS_S.items() if name not in known}
        settings = wandb.Settings(x_transaction_log_flush_interval=_FLUSH_S, **limits)
        mine = given.pop("settings", None) or {}
        settings.update_from_settings(wandb.Settings(**mine) if isinstance(mine, dict) else mine)
        earlier = _files_of(place, run_id)
        for path in earlier:
            _wait_for_writer(path)
        arguments = {"id": run_id, "resume": "allow", "reinit": "create_new", "dir": str(place), "settings": settings, **given}
        self._is_broken = True
        self._run = wandb.init(**arguments)
        self._is_broken = False
        self._unsure = []
        if self._is_offline:
            self._last = max((WandbFile(path).read_on() for path in earlier), default=0)
            self._file = WandbFile(Path(self._run.settings.sync_file))
        else:
            self._last, self._file = max(0, self._run.starting_step - 1), None

    @property
    def _is_offline(self) -> bool:
        return bool(self._run.settings.mode in ("offline", "dryrun"))

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step, commit=True)
        self._unsure.append((time.monotonic(), step))

    def held(self) -> int:
        """Offline: what the file holds. Online: what was logged a minute ago, since nothing says what was uploaded."""
        if self._file is not None:
            self._last = max(self._last, self._file.read_on())
        else:
            until = time.monotonic() - _UPLOAD_S
            self._last = max([self._last, *(step for logged, step in self._unsure if logged <= until)])
        self._unsure = [entry for entry in self._unsure if entry[1] > self._last]
        return self._last

    def settle(self) -> None:
        """Wait until the file holds what was logged. Online nothing is waited for."""
        until = time.monotonic() + _SETTLE_S
        while self._file is not None and self._unsure and time.monotonic() < until:
            self.held()
            if self._unsure:
                time.sleep(_POLL_S)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._is_broken = True
            run.finish()
            self._is_broken = False

    def _end_earlier(self) -> None:
        """End the run that was opened before. If wandb cannot end it, end wandb's process: the next run starts another."""
        import wandb

        with suppress(Exception):  # wandb-core has died
            self.close()
        if not self._is_broken:
            return
        if wandb.run is not None:
            raise RuntimeError(
                "the script has a W&B run of its own, which another try would end. The tracker works again after wandb.finish()"
            )
        with suppress(Exception, SystemExit):  # wandb-core has died, perhaps with an exit code
            wandb.teardown()
        self._is_broken = False


def _files_of(folder: Path, run_id: str) -> list[Path]:
    """The files of this run, each in the folder of one process. ``latest-run`` is a link to one of them."""
    return sorted(path for path in (folder / "wandb").glob(f"*run-*/run-{run_id}.wandb") if not path.parent.is_symlink())


def _wait_for_writer(path: Path) -> None:
    """Wait until no process of this machine has the file open: wandb-core outlives the worker that was killed by a moment.

    Raises:
        TimeoutError: A process has the file open for longer than ``_WRITER_LIMIT_S``.
    """
    until = time.monotonic() + _WRITER_LIMIT_S
    while writers := _writers(path):
        if time.monotonic() > until:
            raise TimeoutError(f"process {writers[0]} still writes {path}. End it: it is a wandb-core whose worker has ended")
        time.sleep(_POLL_S)


def _writers(path: Path) -> list[int]:
    """The processes of this user that have the file open. wandb-core is the only one that may."""
    wanted = path.stat()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _has_open(process, wanted):
            found.append(int(process.name))
    return found


def _has_open(process: Path, wanted: os.stat_result) -> bool:
    try:
        for descriptor in (process / "fd").iterdir():
            try:
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
            except OSError:
                continue  # closed meanwhile
    except OSError:
        pass  # the process has ended, or belongs to another user
    return False
