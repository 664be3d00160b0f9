"""The ends of the logs of a run's workers, as plain text for the page and the report. Reads never more than it is asked for."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.log_files import log_files, plain_text, why_no_logs

MAX_BYTES = 128 << 10
"""So much is read at once."""


@dataclass(frozen=True)
class LogPart:
    """A part of a log: whole lines, and the line behind them that may change or grow, as a progress bar does."""

    text: str
    """The whole lines, each with its end."""
    unfinished: str
    """What the last line shows now, if it has no end yet. The next part has it again."""
    end: int
    """From where to read on."""
    skipped: bool
    """Whether older text was left out."""


def workers_with_logs(run_dir: Path) -> list[int]:
    """The ids of all workers that have a log on this machine."""
    return sorted({worker for worker, _ in log_files(run_dir)})


def note_on_logs(run_dir: Path) -> str:
    """What the page says instead of logs if there are none; empty if there are some."""
    return "" if log_files(run_dir) else f"no worker has a log in this run folder. {why_no_logs(run_dir)}"


def read_log(run_dir: Path, worker: int, start: int = -1, max_bytes: int = MAX_BYTES) -> LogPart | None:
    """Return the log of a worker from byte ``start``, or its last ``max_bytes`` if there is more or if ``start`` is negative.

    None if there is no such log.
    """
    path = dict(log_files(run_dir)).get(worker)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if start > size:  # the file was replaced
                start = -1
            begin = max(start, size - max_bytes, 0)
            file.seek(begin)
            data = file.read(max_bytes)
    except OSError:
        return None
    skipped = begin > max(start, 0)
    if skipped:  # begin with a whole line
        after = data.find(b"\n") + 1
        data, begin = data[after:], begin + after
    whole = data.rfind(b"\n") + 1
    state = data.rstrip(b"\r").rfind(b"\r", whole) + 1 or whole  # what the last line showed before is not needed any more
    return LogPart(_decoded(data[:whole]), _decoded(data[state:]), begin + state, skipped)


def _decoded(lines: bytes) -> str:
    """Without a character of UTF-8 at the end that was written in part."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(plain_text(lines))
