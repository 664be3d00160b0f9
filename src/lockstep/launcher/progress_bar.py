"""ProgressBar: the lines at the bottom of a terminal, drawn by rich. Imported when the first line is drawn: rich takes a while.

     ━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━  42%  step 145 of 344  0:12 left
     loss 0.5321 ↓  8.100k samples/s  3 workers  generation 2  epoch 1
     0:07 ago: worker 1 (pid 27908) died: SIGKILL. 2 workers go on; a replacement is starting.

rich renders into a string, and the console writes it, because nothing may wait for a terminal. The cursor rests at the beginning of
the first line, and all below it is erased before the lines are drawn again. So they are erased whole whatever a terminal does with
long lines when its size changes.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.progress_bar import ProgressBar as Bar
from rich.text import Text

from lockstep.launcher.progress_text import Progress, loss_first, percent
from lockstep.recording.text import clock, plural, printable, steady_number

_MIN_BAR, _MAX_BAR = 5, 50
_EVENT_LINES = 3
"""A sentence is not cut on a terminal of 80 columns."""
_GAP = "  "
_TREND_STYLES = {"↓": "green", "↑": "yellow"}
"""Of a loss: of other values nobody knows which direction is good."""


@dataclass(frozen=True)
class Shown:
    """What is drawn. ``status``: what is said before the first step. ``event``: the last event and its age, or a verdict."""

    progress: Progress | None = None
    status: str = ""
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    trend: str = ""
    """The arrow of the first value."""
    event: str = ""
    event_age_s: float | None = None


class _Buffer(io.StringIO):
    @property
    def encoding(self) -> str:  # type: ignore[override]
        """rich draws with ASCII characters alone if the terminal has no others."""
        return getattr(sys.stderr, "encoding", None) or "utf-8"


def render(shown: Shown, width: int, height: int) -> bytes:
    """The lines, without a line end behind the last. Each is narrower than ``width``; there are fewer of them than ``height``."""
    buffer = _Buffer()
    console = Console(file=buffer, force_terminal=True, width=max(2, width), highlight=False, emoji=False, markup=False)
    room = max(1, width - 2)  # the first column is for the cursor, and a full last one would move it
    lines = [[_status_line(shown, room)]] if shown.progress is None else [_bar_line(shown, shown.progress, room)]
    if shown.progress is not None:
        lines.append([_values_line(shown, shown.progress, room)])
    if shown.event:
        age = "" if shown.event_age_s is None else f"{clock(shown.event_age_s)} ago: "
        lines += [[line] for line in _wrap(Text(age + printable(shown.event), style="dim"), console, room)]
    for line in lines[: max(1, height - 1)]:
        console.print(" ", end="")
        for part in line:
            console.print(part, end="", no_wrap=True, overflow="crop", soft_wrap=isinstance(part, Text))
        console.print()
    return buffer.getvalue().rstrip("\n").encode(buffer.encoding, errors="replace")


def _status_line(shown: Shown, room: int) -> Text:
    return _fit([(shown.status, "bold"), (clock(shown.elapsed_s), "dim")], room)


def _bar_line(shown: Shown, progress: Progress, room: int) -> list[Text | Bar]:
    """As much beside the bar as there is room for. Without a total there is no bar."""
    if not progress.total:
        epoch = [] if progress.epoch is None else [(f"epoch {progress.epoch}", "")]
        return [_fit([(f"step {progress.step}", "bold"), *epoch, (clock(shown.elapsed_s), "dim")], room)]
    done, left = f"{percent(progress):3d}%", "" if shown.remaining_s is None else clock(shown.remaining_s)
    steps = f"{progress.step:{len(str(progress.total))}d}"
    long = [(done, "bold"), (f"step {steps} of {progress.total}", ""), *([(f"{left} left", "cyan")] if left else [])]
    short = [(done, "bold"), (f"{steps}/{progress.total}", ""), *([(left, "cyan")] if left else [])]
    for parts in (long, short, short[:2], short[:1]):
        text = Text(_GAP).join(Text(each, style) for each, style in parts)
        bar = min(_MAX_BAR, room - text.cell_len - len(_GAP))
        if bar >= _MIN_BAR:
            return [Bar(total=progress.total, completed=progress.step, width=bar, complete_style="green"), Text(_GAP), text]
    return [_fit(short[:1], room)]


def _values_line(shown: Shown, progress: Progress, room: int) -> Text:
    values = [(f"{printable(name)} {steady_number(value)}", "") for name, value in loss_first(progress.values)]
    if values and shown.trend:
        values[0] = (f"{values[0][0]} {shown.trend}", _TREND_STYLES.get(shown.trend, "") if "loss" in values[0][0].lower() else "")
    facts = [(plural(progress.workers, "worker"), "")]
    if progress.samples_per_s is not None:
        facts.insert(0, (f"{steady_number(progress.samples_per_s)} samples/s", ""))
    if progress.generation is not None:
        facts.append((f"generation {progress.generation}", ""))
    if progress.total and progress.epoch is not None:
        facts.append((f"epoch {progress.epoch}", ""))
    return _fit([*values[:1], *facts, *values[1:]], room)


def _fit(parts: list[tuple[str, str]], room: int) -> Text:
    """The first parts, as many as there is room for."""
    found = Text(parts[0][0], parts[0][1])
    for part, style in parts[1:]:
        if found.cell_len + len(_GAP) + cell_len(part) > room:
            break
        found = Text.assemble(found, _GAP, (part, style))
    return _cut(found, room)


def _wrap(text: Text, console: Console, room: int) -> list[Text]:
    lines = list(text.wrap(console, room))
    for line in lines:
        line.rstrip()
    if len(lines) > _EVENT_LINES:
        lines[_EVENT_LINES - 1 :] = [_cut(Text(" ").join(lines[_EVENT_LINES - 1 :]), room)]
    return lines


def _cut(text: Text, room: int) -> Text:
    text.truncate(room, overflow="ellipsis")
    return text
