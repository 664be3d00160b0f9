"""RunStatus: the state of a run as another process sees it: from the lock of its folder, from its files, and from its agent.

starting     no worker has a process yet, or a head waits for its machines
running      the workers run
recovering   a worker was lost, and the others form the next generation; or all workers are started again
stopping     the run has ended or was told to, and its workers are about to exit
silent       a process holds the folder and does not answer: it is stopped, or its disk or machine hangs
finished     the script reached its end everywhere: code 0
failed       it ended with another code
stopped      Ctrl-C, a signal or `lockstep stop` ended it
lost         the process that supervised it is gone, and has not said how the run ended: it was killed
unknown      the files are those of a run on another machine, or do not say on which machine it began: it may still run there
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.launcher.control_client import ControlClient, NoAnswerError, RefusedError
from lockstep.launcher.file_ends import first_events, last_events, last_objects
from lockstep.launcher.run_folder import is_in_use
from lockstep.recording.records import parse
from lockstep.recording.text import printable

STARTING, RUNNING, RECOVERING, STOPPING = "starting", "running", "recovering", "stopping"
"""States that an agent answers (live_status.py)."""
SILENT, FINISHED, FAILED, STOPPED, LOST, UNKNOWN = "silent", "finished", "failed", "stopped", "lost", "unknown"
ENDED = (FINISHED, FAILED, STOPPED, LOST)
"""States of a run that is over."""
_ANSWER_S = 0.5
_LAST_KINDS = ("end", "summary", "saved", "verdict")
_FIRST_BYTES, _LAST_BYTES = 1 << 14, 1 << 16
"""Of events.jsonl. What begins and what ends a run is there."""


@dataclass(frozen=True)
class RunStatus:
    """What is not known has its default value."""

    path: Path
    state: str
    role: str = "run"
    """What supervises the run: "run", "launch" or "head"; "agent": it is one machine of a run on several."""
    words: tuple[str, ...] = ()
    """The script or module, with its arguments."""
    began: float = 0.0
    ended: float | None = None
    """When it ended; for a run that was lost: when its agent wrote last."""
    pid: int | None = None
    """Of the process that supervises it."""
    host: str = ""
    """The machine on which it began; empty if its files do not say it."""
    code: int | None = None
    why: str = ""
    step: int = -1
    stopped_after: int | None = None
    """The step after which the workers stopped because they were told to."""
    checkpoint: tuple[int, str] | None = None
    verdict: str = ""
    """Which worker slows the run down, in a sentence."""
    summary: tuple[str, ...] = ()
    """What it has come to, in sentences."""
    live: dict[str, Any] | None = None
    """What the agent answers (live_status.py)."""

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def is_here(self) -> bool:
        """Whether its files say that it began on this machine."""
        return self.host == socket.gethostname()

    @property
    def origin(self) -> str:
        """ "it began on host-b", for sentences about runs that are not of this machine."""
        return f"it began on {printable(self.host)}" if self.host else "its files do not say on which machine it began"

    @property
    def command(self) -> str:
        return " ".join(self.words)


def read_status(path: Path, *, ask: bool = True, timeout_s: float = _ANSWER_S) -> RunStatus:
    """Returns the status of the run in ``path``. ``ask``: ask its agent too, if it has one.

    Raises OSError if the folder cannot be read.
    """
    in_use = is_in_use(path)
    status = _from_events(path, first_events(path, _FIRST_BYTES), last_events(path, _LAST_BYTES, _LAST_KINDS))
    if not in_use:
        return status
    status = replace(status, state=STARTING, ended=None)
    if status.role == "agent":  # the head knows more
        return replace(status, state=RUNNING)
    if not ask:
        return status
    try:
        with ControlClient(path, timeout_s) as client:
            live = client.status()
    except RefusedError:  # another version of Lockstep
        return replace(status, state=RUNNING)
    except NoAnswerError:
        if not is_in_use(path):  # it has ended meanwhile
            return read_status(path, ask=False)
        if status.code is not None:
            return replace(status, state=STOPPING)
        if not status.is_here:  # it holds the lock, and its socket works on its machine alone
            return replace(status, state=UNKNOWN)
        return replace(status, state=SILENT if (path / "agent.sock").exists() else STARTING)
    verdict = (live.get("verdict") or {}).get("sentence", "")
    saved = live.get("checkpoint") or status.checkpoint
    checkpoint = None if saved is None else (int(saved[0]), str(saved[1]))
    status = replace(status, verdict=verdict, summary=tuple(live.get("summary", ())), checkpoint=checkpoint)
    return replace(status, state=live["state"], pid=live["pid"], step=max(live["step"], -1), live=live)


def last_recorded_step(path: Path) -> int:
    """Returns the last step of which the recording of the run in ``path`` has a record; -1 if there is none."""
    files = sorted((path / "recording").glob("every-1-*.jsonl"))
    records = map(parse, last_objects(files[-1], 1 << 16)) if files else ()
    return max((record.step for record in records if record is not None), default=-1)


def _from_events(path: Path, first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> RunStatus:
    """The status of a run that does not run any more. ``first`` and ``last``: lines of events.jsonl."""
    begin = next((line for line in first if line["kind"] in ("begin", "continue")), {})
    command = next((line for line in first if line["kind"] == "command"), {})
    newest = {line["kind"]: line for line in last}
    end, saved = newest.get("end"), newest.get("saved")
    step = end.get("step") if end is not None else None
    status = RunStatus(
        path,
        LOST,
        role=command.get("role") or ("agent" if "command" in begin else "run"),
        words=tuple(command.get("words") or filter(None, [begin.get("command")])) or _words_of_machines(path),
        began=first[0]["time"] if first else 0.0,
        ended=max((line["time"] for line in last), default=None),
        pid=begin.get("pid") or command.get("pid"),
        host=command.get("host") or "",
        step=last_recorded_step(path) if step is None else step,
        checkpoint=(saved["step"], saved["where"]) if saved else None,
        verdict=newest.get("verdict", {}).get("sentence") or "",
    )
    if end is None:
        return status if status.is_here else replace(status, state=UNKNOWN, ended=None)
    has_stopped = end.get("signal") is not None or end.get("stopped_after") is not None
    code, saved_last = end["code"], end.get("checkpoint")
    return replace(
        status,
        state=STOPPED if has_stopped else FINISHED if code == 0 else FAILED,
        code=code,
        summary=tuple(newest.get("summary", {}).get("lines", ())),
        why=end.get("why") or "",
        stopped_after=end.get("stopped_after"),
        checkpoint=(saved_last[0], saved_last[1]) if saved_last else status.checkpoint,
    )


def _words_of_machines(path: Path) -> tuple[str, ...]:
    """A head does not know what its agents run. Those that `lockstep run --hosts` has started on this machine do."""
    for events in sorted(path.glob("machines/*/events.jsonl"))[:1]:
        for line in first_events(events.parent, 1 << 16):
            if line["kind"] == "command":
                return tuple(line.get("words") or ())
    return ()
