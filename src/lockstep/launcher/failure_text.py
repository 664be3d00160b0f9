"""Failure: how a worker failed, and how people are told. Pure text: knows neither processes nor the terminal."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """How a worker failed. ``step`` is -1 if it is not known. ``log`` is the path of the worker's output.

    ``where``: the innermost line of the user's own files that the exception came through, as "train.py:41"; ``source``: its text.
    ``place`` is the same on all workers that failed for the same reason (launcher/user_frame.py).
    """

    worker: int
    name: str
    error: str
    log: str
    step: int = -1
    traceback: str = ""
    host: str = field(default_factory=socket.gethostname)
    where: str = ""
    source: str = ""
    place: str = ""
    is_crash: bool = False
    """It was killed, or has exited without a word: ``traceback`` is what it wrote last."""

    @property
    def is_peer_error(self) -> bool:
        """Whether the worker failed because another one was lost."""
        return "PeerError" in self.error.split(":")[0]

    @property
    def cause(self) -> str:
        """Equal for workers that failed for the same reason: messages may name ranks or samples."""
        return self.place or re.sub("[0-9]+", "#", first_line(self.error))


def worker_name(id: int, rank: int | None, pid: int | None) -> str:
    """ "worker 5 (rank 2, pid 4711)", with what is known."""
    known = [f"{key} {value}" for key, value in (("rank", rank), ("pid", pid)) if value is not None]
    return f"worker {id} ({', '.join(known)})" if known else f"worker {id}"


def exception_text(failure: Failure, *, with_traceback: bool) -> str:
    """What is shown of an exception: first the user's own line, then who raised it, then the traceback.

    Without the traceback: one line, and the path of the log.
    """
    error, at = first_line(failure.error), "" if failure.step < 0 else f" at step {failure.step}"
    first = f"{failure.where}: {error}" if failure.where else error
    on = f"{failure.name} on {failure.host}"
    if not with_traceback:
        return f"{first}\nlockstep: raised by {on}{at} (log: {failure.log})\n"
    lines = [first, *([f"    {failure.source}"] if failure.source else [])]
    trace = _prefixed(failure.worker, failure.traceback)
    lines.append(f"lockstep: raised by {on}{at}{'. The traceback:' if trace else ''}")
    return "\n".join([*lines, *trace]) + "\n"


def crash_text(failure: Failure) -> str:
    """What is shown of a worker that was killed or has exited without a word: the last lines that it wrote to stderr, if any."""
    lines = _prefixed(failure.worker, failure.traceback)
    return "\n".join([*lines, f"lockstep: the output of {failure.name} is in {failure.log}"]) + "\n" if lines else ""


def same_failure_text(workers: Sequence[int]) -> str:
    """ "workers 1, 2 and 3 failed with the same error."."""
    return f"{workers_text(workers)} failed with the same error."


def workers_text(workers: Sequence[int]) -> str:
    """ "worker 1"; "workers 1, 2 and 3"; "workers 1, 2, 3 and 29 more"."""
    names = [str(worker) for worker in workers]
    if len(names) > 8:
        names = [*names[:7], f"{len(names) - 7} more"]
    return f"workers {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"worker {names[0]}"


def _prefixed(worker: int, text: str) -> list[str]:
    return [f"[worker {worker}] {line}" for line in text.rstrip("\n").splitlines()]


def first_line(text: str, max_chars: int = 300) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
