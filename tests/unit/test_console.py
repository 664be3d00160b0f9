"""The console: how messages are formatted, and that writing them garbles nothing and never blocks."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pyte
import pytest

from lockstep.launcher import console as console_module
from lockstep.launcher.console import Console
from lockstep.launcher.failure_text import (
    Failure,
    crash_text,
    exception_text,
    first_line,
    same_failure_text,
    worker_name,
    workers_text,
)
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.progress_bar import Shown, render
from lockstep.launcher.progress_text import Pace, Progress, Trend, progress_text, value_texts
from lockstep.launcher.worker_messages import event_of, progress_of
from lockstep.plan.membership_events import JoinRequested
from lockstep.recording.causes import LINK
from lockstep.recording.stragglers import Straggler

FULL = Progress(145, 1, {"lr": 0.001, "loss": 0.53}, 8100.0, 3, 2, 4640, 344)


class Recorder(NonblockingOutput):
    """Keeps what is written, and shows it to a terminal that interprets it."""

    def __init__(self, columns: int = 100, lines: int = 24) -> None:
        super().__init__()
        self.written: list[tuple[int, bytes]] = []
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)

    def write(self, descriptor: int, data: bytes) -> None:
        self.written.append((descriptor, data))
        self._stream.feed(data.replace(b"\n", b"\r\n"))  # as a terminal in its usual mode

    def text(self) -> str:
        return b"".join(data for _, data in self.written).decode()

    def rows(self) -> list[str]:
        rows = [line.rstrip() for line in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(console_module, "_size", lambda: (100, 24))
    return Console(Recorder())


def recorder(console: Console) -> Recorder:
    assert isinstance(console._output, Recorder)
    return console._output


def rows(console: Console) -> list[str]:
    return recorder(console).rows()


# -- texts -------------------------------------------------------------------------------------------


def test_a_name_of_a_value_cannot_control_the_terminal() -> None:
    assert progress_text(Progress(1, values={"loss\x1b[2J\n\x9b": 1.0})) == "step 1 | loss?[2J?? 1 | 1 worker"


def test_of_many_values_the_loss_and_a_few_more_are_shown() -> None:
    values = {f"value-{number}": float(number) for number in range(40)} | {"loss": 0.5, "val_loss": 0.7, "x" * 50: 1.0}
    found = value_texts(values | {"loss": "nan"})
    assert found == ["loss nan", "val_loss 0.7", "value-0 0", "value-1 1", "and 39 more"]
    assert value_texts({"x" * 50: 1.0}) == ["x" * 31 + "… 1"]
    assert value_texts({}) == []
    shown = "step 3 | loss 0.5 | val_loss 0.7 | value-0 0 | value-1 1 | and 39 more | 1 worker"
    assert progress_text(Progress(3, values=values)) == shown


def test_the_plain_progress_line_shows_what_is_known() -> None:
    progress = Progress(120, 1, {"lr": 0.01, "loss": 0.532149}, 8100.0, 4, 2, total=344)
    shown = "step 120 of 344 (34%) | epoch 1 | loss 0.5321 | lr 0.01 | 8.1k samples/s | 4 workers | generation 2"
    assert progress_text(progress) == shown
    assert progress_text(Progress(3)) == "step 3 | 1 worker"


def test_an_exception_is_shown_with_the_users_own_line_first() -> None:
    trace = "Traceback:\n  x\nValueError: no\n"
    name = worker_name(3, 1, 47)
    failure = Failure(3, name, "ValueError: no\nmore", "/r/workers/3/log.txt", 41, trace, "node7", "train.py:12", "fit(x)")
    assert exception_text(failure, with_traceback=True).splitlines() == [
        "train.py:12: ValueError: no",
        "    fit(x)",
        "lockstep: raised by worker 3 (rank 1, pid 47) on node7 at step 41. The traceback:",
        "[worker 3] Traceback:",
        "[worker 3]   x",
        "[worker 3] ValueError: no",
    ]
    assert exception_text(failure, with_traceback=False).splitlines() == [
        "train.py:12: ValueError: no",
        "lockstep: raised by worker 3 (rank 1, pid 47) on node7 at step 41 (log: /r/workers/3/log.txt)",
    ]


def test_what_is_not_known_is_left_out() -> None:
    shown = exception_text(Failure(0, "worker 0", "E: x", "log", host="n"), with_traceback=True)
    assert shown == "E: x\nlockstep: raised by worker 0 on n\n"
    assert worker_name(4, None, None) == "worker 4"
    assert worker_name(4, None, 47) == "worker 4 (pid 47)"


def test_a_crash_is_shown_by_what_the_worker_wrote_last_or_not_at_all() -> None:
    failure = Failure(
        1, "worker 1 (rank 1, pid 5)", "killed by SIGABRT", "/r/log.txt", traceback="terminate called\n", is_crash=True
    )
    assert crash_text(failure).splitlines() == [
        "[worker 1] terminate called",
        "lockstep: the output of worker 1 (rank 1, pid 5) is in /r/log.txt",
    ]
    assert crash_text(replace(failure, traceback="")) == ""


def test_failures_of_one_cause_are_recognised() -> None:
    one = Failure(1, "worker 1", "ValueError: bad sample 7", "log")
    assert one.cause == replace(one, worker=2, error="ValueError: bad sample 12").cause
    assert replace(one, place="ValueError at t.py:3").cause != replace(one, place="ValueError at t.py:4").cause
    assert same_failure_text([0, 2, 3]) == "workers 0, 2 and 3 failed with the same error."
    assert same_failure_text([2]) == "worker 2 failed with the same error."
    assert workers_text(range(40)) == "workers 0, 1, 2, 3, 4, 5, 6 and 33 more"


def test_a_message_becomes_one_line() -> None:
    assert first_line("\n\n  a\nb") == "  a"
    assert first_line("") == "no message"
    assert len(first_line("x" * 1000)) == 300


# -- what follows from several reports ---------------------------------------------------------------


def test_the_pace_is_that_of_the_last_seconds_and_the_rest_is_foretold() -> None:
    pace = Pace()
    assert (pace.samples_per_s, pace.remaining_s(0.0)) == (None, None)
    for step in range(1, 41):
        pace.add(Progress(step, samples=32 * step, total=100), now=step * (1.0 if step <= 20 else 0.5) + (10 if step > 20 else 0))
    assert pace.samples_per_s == pytest.approx(64.0)
    assert pace.remaining_s(30.0) == pytest.approx(60 * 29 / 39)
    assert pace.remaining_s(31.0) == pytest.approx(60 * 29 / 39 - 1)
    assert pace.remaining_s(1e6) == 0.0


def test_the_pace_of_one_report_without_samples_or_total_is_not_known() -> None:
    pace = Pace()
    for step in (1, 2, 3):
        pace.add(Progress(step), now=float(step))
    assert (pace.samples_per_s, pace.remaining_s(3.0)) == (None, None)
    pace.add(Progress(1, samples=5, total=10), now=4.0)  # a second run in the same script
    assert pace.remaining_s(4.0) is None


def trend_of(values: list[float]) -> str:
    trend = Trend()
    for value in values:
        trend.add(value)
    return trend.arrow


def test_the_trend_compares_averages_and_not_single_values() -> None:
    noise = [0.1 * ((7 * k) % 11 - 5) / 5 for k in range(200)]
    assert trend_of([1.0] * 4) == ""
    assert trend_of([1.0] * 50) == "→"
    assert trend_of([3.0 - 0.01 * k + each for k, each in enumerate(noise)]) == "↓"
    assert trend_of([1.0 + 0.01 * k + each for k, each in enumerate(noise)]) == "↑"
    assert trend_of([1.0 + each for each in noise]) == "→"
    assert trend_of([float("nan")] * 10) == ""
    assert trend_of([*[1.0] * 30, float("inf")]) == "→"


# -- the lines at the bottom of a terminal -----------------------------------------------------------


def drawn(shown: Shown, width: int, height: int = 24) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", render(shown, width, height).decode()).split("\n")


def test_the_bar_shows_total_percentage_remaining_time_loss_trend_rate_workers_generation_and_the_last_event() -> None:
    shown = Shown(FULL, "", 42.0, 12.0, "↓", "worker 1 (pid 5) died: SIGKILL. 2 workers go on.", 7.0)
    bar, values, event = drawn(shown, 100)
    assert re.fullmatch(r" [━╺╸]{50}   42%  step 145 of 344  0:12 left", bar)
    assert values == " loss 0.5300 ↓  8.100k samples/s  3 workers  generation 2  epoch 1  lr 0.001000"
    assert event == " 0:07 ago: worker 1 (pid 5) died: SIGKILL. 2 workers go on."


def test_without_a_total_there_is_neither_bar_nor_percentage() -> None:
    assert drawn(Shown(replace(FULL, total=None), "", 42.0), 80)[0] == " step 145  epoch 1  0:42"


def test_every_line_is_narrower_than_the_terminal_at_any_width() -> None:
    event = "worker 1 died: 日本語 " * 10
    for width in range(3, 140):
        for shown in (Shown(FULL, "", 42.0, 12.0, "↓", event, 7.0), Shown(None, "starting 3 workers", 1.0)):
            screen = pyte.Screen(width, 24)
            pyte.ByteStream(screen).feed(render(shown, width, 24).replace(b"\n", b"\r\n"))
            lines = [line for line in screen.display if line.strip()]
            assert len(lines) == render(shown, width, 24).count(b"\n") + 1, (width, lines)  # no line is too long
            assert len(lines) <= 5, (width, lines)


def test_a_width_of_20_columns_shows_percentage_and_loss() -> None:
    bar, values, *event = drawn(Shown(FULL, "", 42.0, 12.0, "↓", "worker 1 died: SIGKILL. 2 workers go on; a replacement", 7.0), 20)
    assert bar.endswith("42%")
    assert values == " loss 0.5300 ↓"
    assert event == [" 0:07 ago: worker 1", " died: SIGKILL. 2", " workers go on; a …"]


def test_a_low_terminal_keeps_a_line_free() -> None:
    assert len(drawn(Shown(FULL, event="x"), 80, height=3)) == 2
    assert len(drawn(Shown(FULL, event="x"), 80, height=1)) == 1


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(rb"\x1b\[(3\d|38;5;\d+)m", render(Shown(FULL), 80, 24))
    monkeypatch.setenv("NO_COLOR", "1")
    codes = re.findall(rb"\x1b\[([0-9;]*)m", render(Shown(FULL, trend="↓", event="x"), 80, 24))
    assert set(codes) <= {b"0", b"1", b"2"}  # bold and dim are no colors


def test_control_characters_in_an_event_do_not_reach_the_terminal() -> None:
    assert b"\x1b[2J" not in render(Shown(FULL, event="died: \x1b[2J"), 80, 24)


def test_output_on_a_terminal_is_above_the_bar_and_the_cursor_rests_at_its_beginning(terminal: Console) -> None:
    terminal.show_progress(FULL, now=0.0)
    terminal.write_output(1, b"hello\nyou\n")
    shown = rows(terminal)
    assert shown[:2] == ["hello", "you"]
    assert "step 145 of 344" in shown[2]
    assert shown[3].startswith(" loss 0.5300")
    assert len(shown) == 4
    assert (recorder(terminal).screen.cursor.x, recorder(terminal).screen.cursor.y) == (0, 2)


def test_output_and_the_bar_below_it_are_one_write(terminal: Console) -> None:
    """Otherwise they flicker."""
    terminal.show_progress(FULL, now=0.0)
    before = len(recorder(terminal).written)
    terminal.write_output(1, b"hello\n")
    assert len(recorder(terminal).written) == before + 1


def test_a_line_that_is_not_complete_is_not_drawn_over(terminal: Console) -> None:
    terminal.show_progress(FULL, now=0.0)
    terminal.write_output(1, b"50%")
    terminal.redraw(1.0)
    assert rows(terminal) == ["50%"]
    terminal.write_output(1, b" done\n")
    terminal.redraw(2.0)
    assert rows(terminal)[0] == "50% done"
    assert "step 145 of 344" in rows(terminal)[1]


def test_a_message_after_an_incomplete_line_begins_a_new_line(terminal: Console) -> None:
    terminal.write_output(1, b"50%")
    terminal.say("a message.")
    assert rows(terminal) == ["50%", "lockstep: a message."]


def test_the_bar_is_drawn_at_most_five_times_a_second_and_only_if_it_has_changed(terminal: Console) -> None:
    for step in range(100):
        terminal.show_progress(replace(FULL, step=100 + step), now=step * 0.01)
    writes = len(recorder(terminal).written)
    assert 4 <= writes <= 6
    terminal.redraw(5.0)
    terminal.redraw(5.3)
    assert len(recorder(terminal).written) == writes + 1
    assert "step 199" in rows(terminal)[0]


def test_a_new_size_is_drawn_at_once(terminal: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.show_progress(FULL, now=0.0)
    monkeypatch.setattr(console_module, "_size", lambda: (30, 24))
    recorder(terminal).screen.resize(columns=30)
    terminal.redraw(0.01)
    assert [len(row) < 30 for row in rows(terminal)] == [True, True]
    assert rows(terminal)[0].endswith(" 42%  step 145 of 344")


def test_the_last_event_stays_in_the_bar_until_a_verdict_takes_its_place(terminal: Console) -> None:
    terminal.show_event("worker 1 died: SIGKILL.")
    terminal.show_progress(FULL, now=0.0)
    assert rows(terminal)[0] == "lockstep: worker 1 died: SIGKILL."
    assert rows(terminal)[-1].endswith("ago: worker 1 died: SIGKILL.")
    terminal.show_verdict("rank 2 is last in 94% of steps", True)
    terminal.redraw(1.0)
    assert rows(terminal)[-1] == " rank 2 is last in 94% of steps"
    terminal.show_verdict("", False)
    terminal.redraw(2.0)
    assert rows(terminal)[-1].endswith("ago: worker 1 died: SIGKILL.")


def test_the_numbers_of_a_verdict_change_in_place(terminal: Console) -> None:
    terminal.show_progress(FULL, now=0.0)
    for share in (94, 96):
        terminal.show_verdict(f"rank 2 is last in {share}% of steps", share == 94)
        terminal.redraw(share)
    assert [row for row in rows(terminal) if "rank 2" in row] == [" rank 2 is last in 96% of steps"]


def test_a_verdict_is_not_cut_on_a_terminal_of_80_columns(terminal: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "_size", lambda: (80, 24))
    recorder(terminal).screen.resize(columns=80)
    sentence = Straggler(2, 5, LINK, 0.94, 0.031, 0.11, 40).sentence()
    terminal.show_progress(FULL, now=0.0)
    terminal.show_verdict(sentence, True)
    terminal.redraw(1.0)
    assert " ".join(row.strip() for row in rows(terminal)[2:]) == sentence


def test_the_status_before_the_first_step_goes_when_the_script_says_something(terminal: Console) -> None:
    terminal.show_status("starting 3 workers", is_brief=True)
    terminal.redraw(0.0)
    assert rows(terminal)[0].startswith(" starting 3 workers")
    terminal.write_output(1, b"name? ")
    terminal.redraw(1.0)
    assert rows(terminal) == ["name?"]
    terminal.show_status("3 workers, before the first step")
    terminal.write_output(1, b"Ada\n")
    terminal.redraw(2.0)
    assert rows(terminal)[1].startswith(" 3 workers, before the first step")


def test_at_the_end_the_bar_is_gone_and_the_summary_stays(terminal: Console) -> None:
    terminal.show_progress(FULL, now=0.0)
    terminal.show_last_lines(["344 steps in 2.0 s."])
    terminal.redraw(9.0)
    terminal.close()
    assert rows(terminal) == ["lockstep: 344 steps in 2.0 s."]


@pytest.mark.parametrize("reason", ["--plain", "TERM=dumb"])
def test_a_plain_terminal_gets_whole_lines_alone(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setenv("TERM", "dumb" if reason == "TERM=dumb" else "xterm")
    console = Console(Recorder(), is_plain=reason == "--plain")
    console.show_status("starting 2 workers")
    console.write_output(1, b"50%")
    console.show_progress(FULL, now=0.0)
    console.show_verdict("rank 2 is slow.", True)
    console.show_verdict("rank 2 is slower.", False)
    console.close()
    assert recorder(console).text().splitlines() == [
        "50%",
        "lockstep: step 145 of 344 (42%) | epoch 1 | loss 0.53 | lr 0.001 | 3 workers | generation 2",
        "lockstep: rank 2 is slow.",
    ]


def test_a_pipe_gets_a_plain_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    console = Console(Recorder())
    for step in range(120):
        values = {"loss": 1.5} if step >= 10 else {}
        console.show_progress(Progress(step, values=values, workers=2, generation=0, samples=32 * step), now=step * 0.1)
    console.close()
    assert recorder(console).text().splitlines() == [
        "lockstep: step 10 | loss 1.5 | 320 samples/s | 2 workers | generation 0",
        "lockstep: step 60 | loss 1.5 | 320 samples/s | 2 workers | generation 0",
        "lockstep: step 110 | loss 1.5 | 320 samples/s | 2 workers | generation 0",
    ]


def test_a_run_of_seconds_without_values_shows_no_progress_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    console = Console(Recorder())
    for step in range(40):
        console.show_progress(Progress(step), now=step * 0.1)
    assert recorder(console).text() == ""
    console.show_progress(Progress(50), now=5.0)
    assert recorder(console).text() == "lockstep: step 50 | 1 worker\n"


def test_rich_is_imported_only_when_a_terminal_is_drawn_on() -> None:
    """It takes a tenth of a second, in which `lockstep run` would do nothing else."""
    code = """
import sys
from lockstep.launcher.local_run import LocalRun
from lockstep.launcher.console import Console, Progress
from lockstep.launcher.nonblocking_output import NonblockingOutput
console = Console(NonblockingOutput())
console.show_progress(Progress(1, values={"loss": 1.0}), now=0.0)
console.show_last_lines(["over."])
assert not [name for name in sys.modules if name.partition(".")[0] in ("rich", "torch")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["lockstep: step 1 | loss 1 | 1 worker", "lockstep: over."]


# -- output that cannot be written -------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass  # the test closed it


def test_a_pipe_that_nobody_reads_never_blocks_and_a_line_says_what_is_left_out(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    output = NonblockingOutput()
    for _ in range(400):
        output.write(writer, b"x" * 10_000)
    os.set_blocking(reader, False)
    got = bytearray()
    while output.has_unsent:
        got += os.read(reader, 1 << 20)
        output.flush()
    got += os.read(reader, 1 << 20)
    assert b"output is left out here" in got
    assert 1 << 20 < len(got) < 2 << 20
    output.write(writer, b"after")
    assert os.read(reader, 100) == b"after"


def test_a_terminal_that_nobody_reads_never_blocks_and_gets_whole_lines_in_order_later() -> None:
    """As if a laptop sleeps at the other end of ssh. A terminal polls writable if it takes one byte more."""
    code = """
import os, sys
from lockstep.launcher.nonblocking_output import NonblockingOutput
output = NonblockingOutput()
for number in range(2000):
    output.write(1 + number % 2, b"%d %s\\n" % (number, b"x" * (number * 37 % 500)))
assert output.has_unsent
assert os.get_blocking(1) and os.get_blocking(2), "the shell has the same terminal"
os.write(int(sys.argv[1]), b"written")
output.flush(timeout_s=60)
"""
    keyboard, screen = os.openpty()
    told, tell = os.pipe()
    words = [sys.executable, "-c", code, str(tell)]
    with subprocess.Popen(words, stdout=screen, stderr=screen, pass_fds=[tell]) as process:
        os.close(screen)
        os.close(tell)
        try:
            assert select.select([told], [], [], 30)[0], "it waits for the terminal"
            assert os.read(told, 100) == b"written"
            got = bytearray()
            while not got.endswith(b"\r\n") or got.count(b"\n") < 2000:
                assert select.select([keyboard], [], [], 30)[0], bytes(got[-2000:])
                got += os.read(keyboard, 65536)
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(keyboard)
            os.close(told)
    assert got.decode().split("\r\n") == [*(f"{number} {'x' * (number * 37 % 500)}" for number in range(2000)), ""]


def test_output_to_a_closed_pipe_is_discarded(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    output = NonblockingOutput()
    output.write(writer, b"nobody")
    output.write(writer, b"nobody")
    assert not output.has_unsent


# -- packets of workers ------------------------------------------------------------------------------


def test_progress_is_read_from_a_packet_and_nonsense_is_none() -> None:
    packet = {"type": "progress", "step": 3, "epoch": 1, "values": {"loss": 0.5}, "samples": 96, "total": 100}
    assert progress_of(packet) == Progress(3, 1, {"loss": 0.5}, samples=96, total=100)
    assert progress_of({"type": "progress", "step": 3}) == Progress(3)
    infinite = {"type": "progress", "step": float("inf")}
    for nonsense in (
        {},
        {"type": "join"},
        {"type": "progress"},
        infinite,
        {**packet, "values": 3},
        {**packet, "values": {"a": None}},
        {**packet, "total": "many"},
        {**packet, "total": -5},
    ):
        assert progress_of(nonsense) is None


def test_an_event_is_read_from_a_packet_and_nonsense_is_none() -> None:
    assert event_of(2, 47, {"type": "join", "most": 8}) == JoinRequested(2, 8, 47)
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for nonsense in ({}, {"type": "fly"}, {"type": "join", "most": float("inf")}, {"type": "failed", "step": 1, "error": nested}):
        assert event_of(2, 47, nonsense) is None
