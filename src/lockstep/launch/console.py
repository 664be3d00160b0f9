"""Console: what a person sees of a run. Formats lines and keeps the progress line below them; knows no sockets and no decisions.

stdout gets rank 0's stdout and nothing else. stderr gets rank 0's stderr, errors of every rank, news of the run
("lockstep: ...") and progress: one line redrawn in place on a terminal, a plain line now and then elsewhere.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.launch.nonblocking_output import NonblockingOutput

_REDRAW_S = 0.1
_PLAIN_S = 5.0
_CLEAR = b"\r\x1b[K"


@dataclass(frozen=True)
class Progress:
    step: int
    epoch: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    rate: float | None = None
    """Samples per second."""
    workers: int = 1
    generation: int | None = None
    samples: int | None = None
    """All since the run began."""


@dataclass(frozen=True)
class Failure:
    """How one worker ended, if not well. ``name``: "rank 2", or "worker 5" where it had no rank."""

    name: str
    error: str
    log: str
    step: int = -1
    """-1: not known."""
    traceback: str = ""
    host: str = field(default_factory=socket.gethostname)


def progress_of(packet: Mapping[str, Any]) -> Progress | None:
    """What a worker's packet tells about its progress; None where it tells nothing."""
    if packet.get("type") != "progress":
        return None
    try:
        values = {str(name): float(value) for name, value in packet.get("values", {}).items()}
        epoch, samples = packet.get("epoch"), packet.get("samples")
        return Progress(
            int(packet["step"]),
            None if epoch is None else int(epoch),
            values,
            samples=None if samples is None else int(samples),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def progress_text(progress: Progress, width: int | None = None) -> str:
    """ "step 120 | epoch 1 | loss 0.5321 | 8.1k samples/s | 4 workers | generation 2", cut to fit ``width`` columns."""
    parts = [f"step {progress.step}"]
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch}")
    parts += [f"{name} {number(value)}" for name, value in progress.values.items()]
    if progress.rate is not None:
        parts.append(f"{number(progress.rate)} samples/s")
    parts.append(f"{progress.workers} worker{'' if progress.workers == 1 else 's'}")
    if progress.generation is not None:
        parts.append(f"generation {progress.generation}")
    text = " | ".join(parts)
    return text if width is None or len(text) < width else text[: max(0, width - 2)] + "…"


def number(value: float) -> str:
    """Four digits that matter: 0.5321, 12.35, 8100 -> 8.1k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit * 0.99995 <= abs(value) < 1e12:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def failure_text(failure: Failure) -> str:
    """Everything about the first failure: who, where, when, what, and where more is to be read."""
    prefix = f"[{failure.name}] "
    lines = failure.traceback.rstrip("\n").splitlines()
    head = f"lockstep: {failure.name} on {failure.host} failed{_at(failure.step)}: {first_line(failure.error)}"
    return "\n".join([*(prefix + line for line in lines), head, f"lockstep: its whole output is in {failure.log}"]) + "\n"


def failure_line(failure: Failure) -> str:
    """A failure after the first, in one line."""
    return f"[{failure.name}] failed{_at(failure.step)}: {first_line(failure.error)} (log: {failure.log})\n"


def first_line(text: str, most: int = 300) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= most else line[: most - 1] + "…"


def _at(step: int) -> str:
    return "" if step < 0 else f" at step {step}"


class Console:
    """``now`` is passed in. Descriptors 1 and 2 are written to; what they are is looked at once."""

    def __init__(self, outlet: NonblockingOutput) -> None:
        self._outlet = outlet
        self._is_terminal = {number: os.isatty(number) for number in (1, 2)}
        self._drawn = False
        self._at_line_start = True
        self._latest: Progress | None = None
        self._last_shown = float("-inf")
        self._samples: tuple[float, int] | None = None
        self._rate: float | None = None

    def show(self, stream: int, data: bytes) -> None:
        """Output of rank 0, as it is."""
        if not data:
            return
        if self._is_terminal[stream]:
            self._erase()
            self._at_line_start = data.endswith(b"\n")
        self._outlet.write(stream, data)

    def say(self, text: str) -> None:
        """A sentence about the run."""
        self._lines(f"lockstep: {text}\n")

    def failed(self, failure: Failure, *, whole: bool) -> None:
        self._lines(failure_text(failure) if whole else failure_line(failure))

    def progress(self, news: Progress, now: float) -> None:
        """News of a step; the rate is computed here, from the samples."""
        self._measure(news.samples, now)
        self._latest = replace(news, rate=self._rate)
        self.redraw(now)

    def redraw(self, now: float) -> None:
        """Show the latest progress if it is time. Called often."""
        if self._latest is None:
            return
        if not self._is_terminal[2]:
            if now - self._last_shown >= _PLAIN_S:
                self._last_shown = now
                self._outlet.write(2, f"lockstep: {progress_text(self._latest)}\n".encode())
                self._latest = None  # said once
        elif self._at_line_start and not self._outlet.has_unsent and (not self._drawn or now - self._last_shown >= _REDRAW_S):
            self._last_shown = now
            self._drawn = True
            self._outlet.write(2, _CLEAR + progress_text(self._latest, _width()).encode())

    def close(self) -> None:
        """Leave the last progress standing on a line of its own."""
        if self._drawn:
            self._drawn = False
            self._outlet.write(2, b"\n")
        self._latest = None
        self._outlet.flush(timeout_s=2.0)

    def _lines(self, text: str) -> None:
        if self._is_terminal[2]:
            self._erase()
            if not self._at_line_start:
                text = "\n" + text
            self._at_line_start = True
        self._outlet.write(2, text.encode(errors="replace"))

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._outlet.write(2, _CLEAR)

    def _measure(self, samples: int | None, now: float) -> None:
        if samples is None:
            return
        if self._samples is not None and samples > self._samples[1] and now > self._samples[0]:
            self._rate = (samples - self._samples[1]) / (now - self._samples[0])
        self._samples = (now, samples)


def _width() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80
