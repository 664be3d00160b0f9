"""Console: what a person sees of a run: output, messages, and a progress line below them. Knows no sockets and no decisions.

stdout gets rank 0's stdout and nothing else. stderr gets rank 0's stderr, errors of every worker, messages ("lockstep: ...") and
progress: one line that is redrawn in place on a terminal, a plain line every few seconds elsewhere.
Hand-written, because progress bar libraries write to the terminal with blocking calls, and nothing in the agent may block.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lockstep.launcher.nonblocking_output import NonblockingOutput

_REDRAW_S = 0.1
_PLAIN_S = 5.0
_CLEAR = b"\r\x1b[K"


@dataclass(frozen=True)
class Progress:
    step: int
    epoch: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float | None = None
    workers: int = 1
    generation: int | None = None
    samples: int | None = None
    """How many samples the run has committed."""


@dataclass(frozen=True)
class Failure:
    """How a worker failed. ``step`` is -1 if it is not known. ``log`` is the path of the worker's output."""

    worker: int
    name: str
    error: str
    log: str
    step: int = -1
    traceback: str = ""
    host: str = field(default_factory=socket.gethostname)


def worker_name(id: int, rank: int | None, pid: int | None) -> str:
    """ "worker 5 (rank 2, pid 4711)", with what is known."""
    known = [f"{key} {value}" for key, value in (("rank", rank), ("pid", pid)) if value is not None]
    return f"worker {id} ({', '.join(known)})" if known else f"worker {id}"


def progress_text(progress: Progress, width: int | None = None) -> str:
    """ "step 120 | epoch 1 | loss 0.5321 | 8.1k samples/s | 4 workers | generation 2", cut to fit ``width`` columns."""
    parts = [f"step {progress.step}"]
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch}")
    parts += [f"{name} {number(value)}" for name, value in progress.values.items()]
    if progress.samples_per_s is not None:
        parts.append(f"{number(progress.samples_per_s)} samples/s")
    parts.append(f"{progress.workers} worker{'' if progress.workers == 1 else 's'}")
    if progress.generation is not None:
        parts.append(f"generation {progress.generation}")
    text = " | ".join(parts)
    return text if width is None or len(text) < width else text[: max(0, width - 2)] + "…"


def number(value: float) -> str:
    """Four significant digits: 0.5321, 12.35, 8100 -> 8.1k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit * 0.99995 <= abs(value) < 1e12:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def failure_text(failure: Failure, *, with_traceback: bool) -> str:
    """One line about a failure, or its traceback, that line, and a line that says where the log is."""
    line = f"lockstep: {failure.name} on {failure.host} failed{'' if failure.step < 0 else f' at step {failure.step}'}: "
    line += first_line(failure.error)
    if not with_traceback:
        return f"{line} (log: {failure.log})\n"
    trace = [f"[worker {failure.worker}] {each}" for each in failure.traceback.rstrip("\n").splitlines()]
    return "\n".join([*trace, line, f"lockstep: the output of worker {failure.worker} is in {failure.log}"]) + "\n"


def first_line(text: str, max_chars: int = 300) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


class Console:
    """Writes to descriptors 1 and 2. Whether they are terminals is looked up once.

    ``shows_progress``: False if a debugger writes to the same terminal.
    """

    def __init__(self, output: NonblockingOutput, *, shows_progress: bool = True) -> None:
        self._output, self._shows_progress = output, shows_progress
        self._is_terminal = {number: os.isatty(number) for number in (1, 2)}
        self._drawn = False
        self._at_line_start = True
        self._latest: Progress | None = None
        self._last_shown = float("-inf")
        self._samples: tuple[float, int] | None = None  # (when, how many)
        self._samples_per_s: float | None = None

    def write_output(self, stream: int, data: bytes) -> None:
        """Pass on output of rank 0. ``stream``: 1 for stdout, 2 for stderr."""
        if not data:
            return
        if self._is_terminal[stream]:
            self._erase()
            self._at_line_start = data.endswith(b"\n")
        self._output.write(stream, data)

    def say(self, text: str) -> None:
        """Show a sentence about the run."""
        self._lines(f"lockstep: {text}\n")

    def show_failure(self, failure: Failure, *, with_traceback: bool) -> None:
        self._lines(failure_text(failure, with_traceback=with_traceback))

    def show_progress(self, progress: Progress, now: float) -> None:
        """``progress`` is from a worker: the rate is computed here, from the samples."""
        self._measure_rate(progress.samples, now)
        self._latest = replace(progress, samples_per_s=self._samples_per_s)
        self.redraw(now)

    def redraw(self, now: float) -> None:
        """Show the latest progress if it is time. The agent calls this often."""
        if self._latest is None or not self._shows_progress:
            return
        if not self._is_terminal[2]:
            if now - self._last_shown >= _PLAIN_S:
                self._last_shown = now
                self._output.write(2, f"lockstep: {progress_text(self._latest)}\n".encode())
                self._latest = None  # each progress is shown once
        elif self._at_line_start and not self._output.has_unsent and (not self._drawn or now - self._last_shown >= _REDRAW_S):
            self._last_shown = now
            self._drawn = True
            self._output.write(2, _CLEAR + progress_text(self._latest, _width()).encode())

    def close(self) -> None:
        """The last progress line stays visible."""
        if self._drawn:
            self._drawn = False
            self._output.write(2, b"\n")
        self._latest = None
        self._output.flush(timeout_s=2.0)

    def _lines(self, text: str) -> None:
        if self._is_terminal[2]:
            self._erase()
            if not self._at_line_start:
                text = "\n" + text
            self._at_line_start = True
        self._output.write(2, text.encode(errors="replace"))

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._output.write(2, _CLEAR)

    def _measure_rate(self, samples: int | None, now: float) -> None:
        if samples is None:
            return
        if self._samples is not None and samples > self._samples[1] and now > self._samples[0]:
            self._samples_per_s = (samples - self._samples[1]) / (now - self._samples[0])
        self._samples = (now, samples)


def _width() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80
