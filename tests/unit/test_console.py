"""What a person sees: formatted purely, and written so that nothing is garbled and nobody waits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lockstep.launch.console import (
    Console,
    Failure,
    Progress,
    failure_line,
    failure_text,
    first_line,
    number,
    progress_of,
    progress_text,
)
from lockstep.launch.nonblocking_output import NonblockingOutput


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
    recorder = console._outlet
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
def test_numbers_have_four_digits_that_matter(value: float, text: str) -> None:
    assert number(value) == text


def test_the_progress_line_says_all_there_is() -> None:
    progress = Progress(120, 1, {"loss": 0.532149}, 8100.0, 4, 2)
    assert progress_text(progress) == "step 120 | epoch 1 | loss 0.5321 | 8.1k samples/s | 4 workers | generation 2"
    assert progress_text(Progress(3)) == "step 3 | 1 worker"


def test_the_progress_line_fits_the_terminal() -> None:
    progress = Progress(120, 1, {"loss": 0.532149}, 8100.0, 4, 2)
    for width in range(1, 100):
        assert len(progress_text(progress, width)) < max(width, 2)


def test_a_failure_is_told_with_host_rank_step_and_log() -> None:
    failure = Failure("rank 1", "ValueError: no\nmore", "/r/workers/1/log.txt", 41, "Traceback:\n  x\nValueError: no\n", "node7")
    assert failure_text(failure).splitlines() == [
        "[rank 1] Traceback:",
        "[rank 1]   x",
        "[rank 1] ValueError: no",
        "lockstep: rank 1 on node7 failed at step 41: ValueError: no",
        "lockstep: its whole output is in /r/workers/1/log.txt",
    ]
    assert failure_line(failure) == "[rank 1] failed at step 41: ValueError: no (log: /r/workers/1/log.txt)\n"


def test_a_step_that_is_not_known_is_not_told() -> None:
    assert "at step" not in failure_text(Failure("rank 0", "E: x", "log"))


def test_a_message_becomes_one_line() -> None:
    assert first_line("\n\n  a\nb") == "  a"
    assert first_line("") == "no message"
    assert len(first_line("x" * 1000)) == 300


def test_output_on_a_terminal_erases_the_progress_line_and_it_is_drawn_again_below(terminal: Console) -> None:
    terminal.progress(Progress(1, workers=2, generation=0), now=0.0)
    terminal.show(1, b"hello\n")
    terminal.redraw(0.01)
    assert written(terminal) == "\r\x1b[Kstep 1 | 2 workers | generation 0\r\x1b[Khello\n\r\x1b[Kstep 1 | 2 workers | generation 0"


def test_a_line_that_is_not_complete_is_not_drawn_over(terminal: Console) -> None:
    terminal.show(1, b"50%")
    terminal.progress(Progress(1, workers=2, generation=0), now=0.0)
    assert written(terminal) == "50%"
    terminal.show(1, b"\n")
    terminal.redraw(0.0)
    assert written(terminal).startswith("50%\n\r\x1b[Kstep 1")


def test_a_sentence_after_an_incomplete_line_begins_a_new_one(terminal: Console) -> None:
    terminal.show(1, b"50%")
    terminal.say("news.")
    assert written(terminal) == "50%\nlockstep: news.\n"


def test_the_progress_line_is_not_redrawn_at_every_step(terminal: Console) -> None:
    for step in range(100):
        terminal.progress(Progress(step), now=step * 0.001)
    assert written(terminal).count("step") == 1
    terminal.redraw(0.2)
    assert "step 99" in written(terminal)


def test_a_pipe_gets_a_plain_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    console = Console(Recorder())
    for step in range(120):
        console.progress(Progress(step, workers=2, generation=0, samples=32 * step), now=step * 0.1)
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


def test_a_pipe_that_nobody_reads_never_blocks_and_what_is_left_out_is_said(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    outlet = NonblockingOutput()
    for _ in range(400):
        outlet.write(writer, b"x" * 10_000)
    os.set_blocking(reader, False)
    got = bytearray()
    while outlet.has_unsent:
        got += os.read(reader, 1 << 20)
        outlet.flush()
    got += os.read(reader, 1 << 20)
    assert b"output is left out here" in got
    assert 1 << 20 < len(got) < 2 << 20
    outlet.write(writer, b"after")
    assert os.read(reader, 100) == b"after"


def test_a_closed_pipe_is_given_up(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    outlet = NonblockingOutput()
    outlet.write(writer, b"nobody")
    outlet.write(writer, b"nobody")
    assert not outlet.has_unsent


def test_progress_is_read_from_a_packet_and_nonsense_is_none() -> None:
    packet = {"type": "progress", "step": 3, "epoch": 1, "values": {"loss": 0.5}, "samples": 96}
    assert progress_of(packet) == Progress(3, 1, {"loss": 0.5}, samples=96)
    assert progress_of({"type": "progress", "step": 3}) == Progress(3)
    for nonsense in ({}, {"type": "join"}, {"type": "progress"}, {**packet, "values": 3}, {**packet, "values": {"a": None}}):
        assert progress_of(nonsense) is None
