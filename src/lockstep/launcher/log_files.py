"""Where the logs of a run's workers are on this machine, and how people read them. Knows nothing of processes, changes nothing.

`lockstep logs`, the page and the report find logs here alone. The files are those of logs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.launcher.file_ends import first_events

_FIRST_BYTES = 1 << 18
"""Agents register at the beginning of a run."""
_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]?"  # colours, and moves of the cursor
    rb"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # titles and links
    rb"|\x1b[ -/]*[0-~]?"
    rb"|[\x00-\x08\x0b-\x1f\x7f]"  # other control characters, but not tabs and line ends
)
"""What a terminal obeys instead of showing it, also if its end was not written yet."""


def log_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Returns each worker that has a log on this machine, and the log, by worker.

    They are in the folder of the run and, if the run has agents on this machine, in their folders below it. If a worker of an
    earlier run has left a log there, it comes before that of the run itself.
    """
    paths = [*run_dir.glob("workers/*/log.txt"), *run_dir.glob("machines/*/workers/*/log.txt")]
    return sorted((int(path.parent.name), path) for path in paths if path.parent.name.isdecimal())


def why_no_logs(run_dir: Path) -> str:
    """Says why no worker has a log here: none was started yet, or the workers are on other machines."""
    if any(line["kind"] == "registered" for line in first_events(run_dir, _FIRST_BYTES)):
        return "The logs are in the run folders of its agents: ask `lockstep ls` on their machines."
    return "None has been started yet, or its folder could not be written."


def last_state(line: bytes) -> bytes:
    """Returns what a terminal shows at last of a line that a progress bar has overwritten: the text behind the last \\r."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def plain_text(lines: bytes) -> bytes:
    """Returns the last state of each of these lines, without what only a terminal understands."""
    return b"\n".join(_ESCAPES.sub(b"", last_state(line)) for line in lines.split(b"\n"))
