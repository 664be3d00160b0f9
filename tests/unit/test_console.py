"""The console: how messages are formatted, and that writing them garbles nothing and never blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lockstep.launcher.console import Console, Failure, Progress, failure_text, first_line, number, progress_text, worker_name
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.worker_messages import event_of, progress_of
from lockstep.plan.membership_events import JoinRequested


class Recorder(NonblockingOutput):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[int, bytes]] = []

    def write(self, descriptor: int, data: bytes) -> None:
        self.written.append((descriptor, data))

    def text(self) -> str:
        return b"".join(data for _, data in self.written).decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    return Console(Recorder())


def written(console: Console) -> str:
    recorder = console._output
    assert isinstance(recorder, Recorder)
    return recorder.text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.532149, "0.5321"),
        (12.3456, "12.35"),
        (999.99, "1k"),
        (8100, "8.1k"),
        (2_500_000, "2.5M"),
        (float("nan"), "nan"),
        (0, "0"),
        (-1e300, "-1e+300"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_progress_line_shows_what_is_known() -> None:
    progress = Progress(120, 1, {"loss": 0.532149}, 8100.0, 4, 2)
    assert progress_text(progress) == "step 120 | epoch 1 | loss 0.5321 | 8.1k samples/s | 4 workers | generation 2"
    assert progress_text(Progress(3)) == "step 3 | 1 worker"


def test_the_progress_line_fits_the_terminal() -> None:
    progress = Progress(120, 1, {"loss": 0.532149}, 8100.0, 4, 2)
    for width in range(1, 100):
        assert len(progress_text(progress, width)) < max(width, 2)


def test_a_failure_is_shown_with_worker_host_step_and_log() -> None:
    trace = "Traceback:\n  x\nValueError: no\n"
    failure = Failure(3, worker_name(3, 1, 47), "ValueError: no\nmore", "/r/workers/3/log.txt", 41, trace, "node7")
    assert failure_text(failure, with_traceback=True).splitlines() == [
        "[worker 3] Traceback:",
        "[worker 3]   x",
        "[worker 3] ValueError: no",
        "lockstep: worker 3 (rank 1, pid 47) on node7 failed at step 41: ValueError: no",
        "lockstep: the output of worker 3 is in /r/workers/3/log.txt",
    ]
    line = "lockstep: worker 3 (rank 1, pid 47) on node7 failed at step 41: ValueError: no (log: /r/workers/3/log.txt)\n"
    assert failure_text(failure, with_traceback=False) == line


def test_what_is_not_known_is_left_out() -> None:
    assert "at step" not in failure_text(Failure(0, "worker 0", "E: x", "log"), with_traceback=False)
    assert worker_name(4, None, None) == "worker 4"
    assert worker_name(4, None, 47) == "worker 4 (pid 47)"


def test_a_message_becomes_one_line() -> None:
    assert first_line("\n\n  a\nb") == "  a"
    assert first_line("") == "no message"
    assert len(first_line("x" * 1000)) == 300


def test_output_on_a_terminal_erases_the_progress_line_and_it_is_drawn_again_below(terminal: Console) -> None:
    terminal.show_progress(Progress(1, workers=2, generation=0), now=0.0)
    terminal.write_output(1, b"hello\n")
    terminal.redraw(0.01)
    assert written(terminal) == "\r\x1b[Kstep 1 | 2 workers | generation 0\r\x1b[Khello\n\r\x1b[Kstep 1 | 2 workers | generation 0"


def test_a_line_that_is_not_complete_is_not_drawn_over(terminal: Console) -> None:
    terminal.write_output(1, b"50%")
    terminal.show_progress(Progress(1, workers=2, generation=0), now=0.0)
    assert written(terminal) == "50%"
    terminal.write_output(1, b"\n")
    terminal.redraw(0.0)
    assert written(terminal).startswith("50%\n\r\x1b[Kstep 1")


def test_a_message_after_an_incomplete_line_begins_a_new_line(terminal: Console) -> None:
    terminal.write_output(1, b"50%")
    terminal.say("a message.")
    assert written(terminal) == "50%\nlockstep: a message.\n"


def test_the_progress_line_is_not_redrawn_at_every_step(terminal: Console) -> None:
    for step in range(100):
        terminal.show_progress(Progress(step), now=step * 0.001)
    assert written(terminal).count("step") == 1
    terminal.redraw(0.2)
    assert "step 99" in written(terminal)


def test_a_pipe_gets_a_plain_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    console = Console(Recorder())
    for step in range(120):
        console.show_progress(Progress(step, workers=2, generation=0, samples=32 * step), now=step * 0.1)
    console.close()
    lines = written(console).splitlines()
    assert lines == [
        "lockstep: step 0 | 2 workers | generation 0",
        "lockstep: step 50 | 320 samples/s | 2 workers | generation 0",
        "lockstep: step 100 | 320 samples/s | 2 workers | generation 0",
    ]


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


def test_output_to_a_closed_pipe_is_discarded(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    output = NonblockingOutput()
    output.write(writer, b"nobody")
    output.write(writer, b"nobody")
    assert not output.has_unsent


def test_progress_is_read_from_a_packet_and_nonsense_is_none() -> None:
    packet = {"type": "progress", "step": 3, "epoch": 1, "values": {"loss": 0.5}, "samples": 96}
    assert progress_of(packet) == Progress(3, 1, {"loss": 0.5}, samples=96)
    assert progress_of({"type": "progress", "step": 3}) == Progress(3)
    infinite = {"type": "progress", "step": float("inf")}
    for nonsense in (
        {},
        {"type": "join"},
        {"type": "progress"},
        infinite,
        {**packet, "values": 3},
        {**packet, "values": {"a": None}},
    ):
        assert progress_of(nonsense) is None


def test_an_event_is_read_from_a_packet_and_nonsense_is_none() -> None:
    assert event_of(2, 47, {"type": "join", "most": 8}) == JoinRequested(2, 8, 47)
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for nonsense in ({}, {"type": "fly"}, {"type": "join", "most": float("inf")}, {"type": "failed", "step": 1, "error": nested}):
        assert event_of(2, 47, nonsense) is None
