"""The logs of several workers are read in the order of time, from the end if they are large, whatever bytes they have."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lockstep.launcher.log_files import plain_text
from lockstep.launcher.logs import TIME_RECORD, Logs
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.worker_logs import LogLine, WorkerLogs


def write(run: Path, worker: int, *pieces: tuple[float, bytes], times: bool = True) -> Path:
    """Append pieces of output, each with its time."""
    folder = run / "workers" / str(worker)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("ab") as log, (folder / "log.times").open("ab") as index:
        for at, data in pieces:
            if times:
                index.write(TIME_RECORD.pack(at, log.tell()))
            log.write(data)
            log.flush()
    return folder / "log.txt"


def read(logs: WorkerLogs, *, to_end: bool = True) -> list[tuple[int, bytes]]:
    return [(line.worker, line.text) for line in logs.read(to_end=to_end)]


def every(worker: int) -> bool:
    return True


def test_lines_of_several_workers_come_in_the_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, 0, (1.0, b"a\nb\n"), (3.0, b"e\n"))
    write(tmp_path, 1, (2.0, b"c\nd\n"), (4.0, b"f\n"))
    write(tmp_path, 10, (2.5, b"d and a half\n"))
    found = list(WorkerLogs(tmp_path, every).read(to_end=True))
    assert [line.text for line in found] == [b"a", b"b", b"c", b"d", b"d and a half", b"e", b"f"]
    assert found[0] == LogLine(1.0, 0, b"a")


def test_without_times_the_logs_come_one_after_the_other(tmp_path: Path) -> None:
    write(tmp_path, 1, (0.0, b"c\n"), times=False)
    write(tmp_path, 0, (0.0, b"a\nb\n"), times=False)
    assert read(WorkerLogs(tmp_path, every)) == [(0, b"a"), (0, b"b"), (1, b"c")]


def test_a_line_is_read_when_it_is_complete_and_at_the_end_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, 0, (1.0, b"one\ntw"))
    logs = WorkerLogs(tmp_path, every)
    assert read(logs, to_end=False) == [(0, b"one")]
    assert read(logs, to_end=False) == []
    write(tmp_path, 0, (2.0, b"o\nthree"))
    write(tmp_path, 1, (3.0, b"new\n"))
    assert read(logs, to_end=False) == [(0, b"two"), (1, b"new")]
    assert read(logs, to_end=True) == [(0, b"three")]
    assert read(logs, to_end=True) == []


def test_bytes_that_are_no_text_are_passed_on(tmp_path: Path) -> None:
    data = bytes(range(256)).replace(b"\n", b"")
    write(tmp_path, 0, (1.0, data + b"\n\n\r\n"))
    assert read(WorkerLogs(tmp_path, every)) == [(0, data), (0, b""), (0, b"\r")]


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
def test_a_line_of_any_length_loses_no_byte(tmp_path: Path, size: int) -> None:
    data = b"x" * size
    write(tmp_path, 0, (1.0, data + b"\nshort\n"))
    found = read(WorkerLogs(tmp_path, every), to_end=False)
    assert b"".join(text for _, text in found[:-1]) == data
    assert found[-1] == (0, b"short")


@pytest.mark.parametrize("count", [0, 1, 2, 5, 100])
def test_the_last_lines_of_all_logs_together(tmp_path: Path, count: int) -> None:
    write(tmp_path, 0, *((float(i), b"%d\n" % i) for i in range(0, 10, 2)))
    write(tmp_path, 1, *((float(i), b"%d\n" % i) for i in range(1, 10, 2)), (10.0, b"part"))
    found = [line.text for line in WorkerLogs(tmp_path, every).read_last(count, to_end=True)]
    assert found == ([b"%d" % i for i in range(10)] + [b"part"])[max(0, 11 - count) : 11 if count else 0]


def test_what_follows_the_last_lines_is_read_next(tmp_path: Path) -> None:
    write(tmp_path, 0, (1.0, b"one\ntwo\nthr"))
    logs = WorkerLogs(tmp_path, every)
    assert [line.text for line in logs.read_last(1, to_end=False)] in ([b"two"], [])
    write(tmp_path, 0, (2.0, b"ee\nfour\n"))
    assert read(logs)[-2:] == [(0, b"three"), (0, b"four")]


def test_the_end_of_a_large_log_is_read_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, 0, (1.0, b"first\n"))
    with path.open("r+b") as log:
        log.truncate(20 << 30)  # sparse: 20 GB of zero bytes
        log.seek(0, os.SEEK_END)
        log.write(b"\none\ntwo\nthree\n")
    began = time.monotonic()
    found = WorkerLogs(tmp_path, every).read_last(2, to_end=True)
    assert [line.text for line in found] == [b"two", b"three"]
    assert time.monotonic() - began < 1.0


def test_only_the_wanted_workers_are_read_also_below_machines(tmp_path: Path) -> None:
    write(tmp_path, 0, (1.0, b"a\n"))
    write(tmp_path / "machines" / "b", 3, (2.0, b"b\n"))
    (tmp_path / "workers" / "notes").mkdir()
    (tmp_path / "workers" / "notes" / "log.txt").write_text("a user's file\n")
    assert read(WorkerLogs(tmp_path, every)) == [(0, b"a"), (3, b"b")]
    assert read(WorkerLogs(tmp_path, lambda worker: worker == 3)) == [(3, b"b")]
    assert WorkerLogs(tmp_path, lambda worker: False).workers() == [0, 3]


def test_a_log_that_was_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, 0, (1.0, b"one\ntwo\n"))
    logs = WorkerLogs(tmp_path, every)
    assert len(read(logs)) == 2
    path.write_bytes(b"new\n")
    assert read(logs) == [(0, b"new")]


def test_the_agent_notes_when_output_came(tmp_path: Path) -> None:
    run_folder = RunFolder.create(str(tmp_path / "run"), 0.0)
    said: list[str] = []
    logs = Logs(run_folder, said.append)
    before = time.time()
    for worker in (0, 1):
        logs.open(worker)
    for number in range(500):
        logs.write(number % 2, 1 + number % 3 % 2, b"%d\n" % number)
    logs.close_all()
    run_folder.close()
    found = list(WorkerLogs(tmp_path / "run", every).read(to_end=True))
    assert sorted(int(line.text) for line in found) == list(range(500))
    assert all(before <= line.time <= time.time() for line in found)
    index = tmp_path / "run" / "workers" / "0" / "log.times"
    assert index.stat().st_size < 16 * 100, "one record in 50 ms at most"
    assert not said


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\r 1%\r 2%\r\n", b" 2%\n"),
        (b"50%\r", b"50%"),
        (b"one\r\ntwo\n\n", b"one\ntwo\n\n"),
        (b"\x1b[1;31mred\x1b[0m\tblue\x1b[K", b"red\tblue"),
        (b"\x1b]0;a title\x07a\x1b]8;;http://b\x1b\\link\x1b]8;;\x1b\\", b"alink"),
        (b"a\x1b(Bb\x07\x08\x00c\x1b[3", b"abc"),
        ("grün \N{FULL BLOCK}".encode(), "grün \N{FULL BLOCK}".encode()),
    ],
)
def test_people_read_what_a_terminal_would_show(written: bytes, shown: bytes) -> None:
    assert plain_text(written) == shown
