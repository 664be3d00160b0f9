"""Console: what a person sees of a run: output, messages, and progress below them. Knows no sockets and no decisions.

stdout gets rank 0's stdout and nothing else. stderr gets rank 0's stderr, errors of every worker, messages ("lockstep: ...") and
progress: on a terminal a few lines at its bottom that are drawn again in place (launcher/progress_bar.py), elsewhere a plain line
every few seconds. Nothing here waits for the terminal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.launcher.failure_text import Failure, crash_text, exception_text
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.progress_text import Pace, Progress, Trend, loss_first, progress_text

if TYPE_CHECKING:
    from lockstep.launcher.progress_bar import Shown  # imports rich, which takes a while

_REDRAW_S = 0.2
_PLAIN_S = 5.0
_ERASE = b"\r\x1b[J"
_DUMB = ("", "dumb", "unknown")
"""Values of TERM: the cursor cannot be moved."""


class Console:
    """Writes to descriptors 1 and 2. Whether they are terminals is looked up once.

    ``shows_progress``: False if a debugger writes to the same terminal. ``is_plain``: plain lines on a terminal too.
    """

    def __init__(self, output: NonblockingOutput, *, shows_progress: bool = True, is_plain: bool = False) -> None:
        self._output, self._shows_progress = output, shows_progress
        self._is_terminal = {number: os.isatty(number) for number in (1, 2)}
        self._draws = not is_plain and can_draw(2)
        self._at_line_start = True
        self._latest: Progress | None = None
        self._is_new = False
        self._pace = Pace()
        self._trend: tuple[str, Trend] = ("", Trend())  # of the first value that is shown
        self._began = time.monotonic()
        self._status, self._is_brief = "", False
        self._event: tuple[str, float] = ("", 0.0)  # (what, when)
        self._verdict = ""
        self._drawn = b""  # what is at the bottom of the terminal
        self._drawn_at, self._drawn_size = float("-inf"), (0, 0)
        self._shown: Shown | None = None
        self._plain_at: float | None = None  # when the next plain line is due
        self._has_shown_values = False

    # -- what is shown -----------------------------------------------------------------------------

    def write_output(self, stream: int, data: bytes) -> None:
        """Pass on output of rank 0. ``stream``: 1 for stdout, 2 for stderr."""
        if not data:
            return
        if not self._is_terminal[stream]:
            self._output.write(stream, data)
            return
        if self._is_brief:
            self._status = ""  # the script itself says now what it does
        self._above(stream, data, at_line_start=data.endswith(b"\n"))

    def say(self, text: str) -> None:
        """Show a sentence about the run."""
        self._lines(f"lockstep: {text}\n")

    def show_event(self, text: str) -> None:
        """Show a sentence about the workers. On a terminal it is also the last event in the progress."""
        self._event = (text, time.monotonic())
        self.say(text)

    def show_status(self, text: str, *, is_brief: bool = False) -> None:
        """What the run does before its first step. Only on a terminal. ``is_brief``: until rank 0 writes something."""
        self._status, self._is_brief = text, is_brief

    def show_verdict(self, sentence: str, is_new: bool) -> None:
        """Show which worker is slow, in place of the last event; an empty sentence: no worker is slow any more.

        Elsewhere than on a terminal: a line if it is new, and none if only its numbers have changed.
        """
        self._verdict = sentence
        if sentence and is_new and not self._draws:
            self.say(sentence)

    def show_exception(self, failure: Failure, *, with_traceback: bool) -> None:
        self._lines(exception_text(failure, with_traceback=with_traceback))

    def show_crash(self, failure: Failure) -> None:
        """Show what a worker wrote before it was killed, or exited without a word."""
        if text := crash_text(failure):
            self._lines(text)

    def show_progress(self, progress: Progress, now: float) -> None:
        """``progress`` is from a worker: rates are computed here."""
        self._pace.add(progress, now)
        if self._latest is None or progress.values != self._latest.values:  # the newest that are known may be known already
            self._add_to_trend(progress)
        self._latest, self._is_new = replace(progress, samples_per_s=self._pace.samples_per_s), True
        self.redraw(now)

    def _add_to_trend(self, progress: Progress) -> None:
        for name, value in loss_first(progress.values)[:1]:
            if name != self._trend[0]:
                self._trend = (name, Trend())
            self._trend[1].add(value)

    def redraw(self, now: float) -> None:
        """Show the latest progress if it is time. The process that supervises the run calls this often."""
        if not self._shows_progress:
            return
        if self._draws:
            self._draw(now)
        elif self._latest is not None and self._is_new:
            self._draw_plain(self._latest, now)

    def _draw_plain(self, progress: Progress, now: float) -> None:
        """A line every few seconds, each progress once. The first waits for values: a run of seconds says little."""
        if self._plain_at is None:
            self._plain_at = now + _PLAIN_S
        if now >= self._plain_at or (progress.values and not self._has_shown_values):
            self._plain_at, self._is_new, self._has_shown_values = now + _PLAIN_S, False, bool(progress.values)
            self._lines(f"lockstep: {progress_text(progress)}\n")

    def close(self) -> None:
        """The progress is erased: what the run came to is said in words."""
        self._erase()
        self._latest, self._status, self._shows_progress = None, "", False
        self._output.flush(timeout_s=2.0)

    def show_last_lines(self, lines: Sequence[str]) -> None:
        """What the run came to."""
        self._erase()
        self._latest, self._status, self._shows_progress = None, "", False
        for line in lines:
            self.say(line)

    # -- the lines at the bottom of a terminal -----------------------------------------------------

    def _draw(self, now: float) -> None:
        """Not below a line that rank 0 has not ended, and not while the terminal takes nothing."""
        if not self._at_line_start or self._output.has_unsent:
            return
        if self._latest is None and not self._status:
            self._erase()
            return
        size = _size()
        if now - self._drawn_at < _REDRAW_S and size == self._drawn_size:
            return
        from lockstep.launcher.progress_bar import render

        shown = self._to_show(now)
        self._drawn_at = now
        if not self._drawn or shown != self._shown or size != self._drawn_size:
            self._drawn, self._drawn_size, self._shown = render(shown, *size), size, shown
            self._output.write(2, _ERASE + _resting(self._drawn))

    def _to_show(self, now: float) -> Shown:
        """Times in whole seconds: what does not change is not drawn again."""
        from lockstep.launcher.progress_bar import Shown

        (event, at), left_s = self._event, self._pace.remaining_s(now)
        return Shown(
            self._latest,
            self._status,
            int(now - self._began) if self._latest is None or not self._latest.total else 0,
            None if left_s is None else round(left_s),
            self._trend[1].arrow,
            self._verdict or event,
            None if self._verdict or not event else int(now - at),
        )

    def _lines(self, text: str) -> None:
        """Whole lines on stderr."""
        if self._is_terminal[2] and not self._at_line_start:
            text = "\n" + text
        self._above(2, text.encode(errors="replace"), at_line_start=True)

    def _above(self, stream: int, data: bytes, *, at_line_start: bool) -> None:
        """Write above the lines at the bottom, which are drawn again below, in one go: they do not flicker."""
        self._at_line_start = at_line_start
        if not self._drawn:
            self._output.write(stream, data)
            return
        if at_line_start and not self._output.has_unsent:
            self._output.write(stream, _ERASE + data + _resting(self._drawn))
        else:
            self._drawn, self._drawn_size = b"", (0, 0)
            self._output.write(stream, _ERASE + data)

    def _erase(self) -> None:
        if self._drawn:
            self._drawn, self._drawn_size = b"", (0, 0)
            self._output.write(2, _ERASE)


def _resting(lines: bytes) -> bytes:
    """The lines, then back to the beginning of the first."""
    up = lines.count(b"\n")
    return lines + (b"\r\x1b[%dA" % up if up else b"\r")


def can_draw(descriptor: int) -> bool:
    """Whether it is a terminal whose cursor can be moved."""
    return os.isatty(descriptor) and os.environ.get("TERM", "") not in _DUMB


def _size() -> tuple[int, int]:
    """(columns, lines)."""
    try:
        width, height = os.get_terminal_size(2)
    except OSError:
        return 80, 24
    return width or 80, height or 24
