"""The files of a recording: bounded, thinned by age, readable while they are written and after any end."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.recording.json_lines import LONGEST_LINE, JsonLinesFile, JsonLinesTail
from lockstep.recording.reader import RecordingReader
from lockstep.recording.records import Metrics, StepRecord, parse
from lockstep.recording.writer import RecordingWriter
from tests.recordings import make_run, step_of


def records(first: int, last: int, size: int = 2) -> list[dict[str, Any]]:
    return [step_of(step, rank, size, at=1000.0 + step).to_json() for step in range(first, last) for rank in range(size)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").touch()
    return tmp_path


def steps(reader: RecordingReader) -> list[tuple[int, int]]:
    return sorted((each.step, each.rank) for each in reader.poll().steps)


def test_a_record_is_the_same_after_writing_and_reading(run_dir: Path) -> None:
    record = step_of(7, 1, 4, epoch=2, page_faults=3, committed=False)
    assert parse(record.to_json()) == record
    writer = RecordingWriter(run_dir / "recording")
    writer.write([record.to_json(), Metrics(7, 3.5, {"loss": 0.25}).to_json()])
    found = RecordingReader(run_dir).poll()
    assert found.steps == [record]
    assert found.metrics == [Metrics(7, 3.5, {"loss": 0.25})]


def test_each_record_is_read_once_although_it_is_in_several_files(run_dir: Path) -> None:
    RecordingWriter(run_dir / "recording").write(records(1, 601))
    assert steps(RecordingReader(run_dir)) == [(step, rank) for step in range(1, 601) for rank in (0, 1)]


def test_a_reader_that_polls_gets_what_is_new(run_dir: Path) -> None:
    writer, reader = RecordingWriter(run_dir / "recording"), RecordingReader(run_dir)
    assert steps(reader) == []
    writer.write(records(1, 20))
    assert len(steps(reader)) == 38
    writer.write(records(20, 40))
    assert steps(reader)[0] == (20, 0)
    assert steps(reader) == []


def test_the_files_stay_small_and_old_steps_get_thinner(run_dir: Path) -> None:
    writer = RecordingWriter(run_dir / "recording", file_bytes=20_000)
    for first in range(1, 20_001, 100):
        writer.write(records(first, first + 100))
    size = sum(path.stat().st_size for path in (run_dir / "recording").iterdir())
    assert size < 4 * 4 * (20_000 + 100_000)  # rows x files x (limit + one batch)
    found = sorted({step for step, _ in steps(RecordingReader(run_dir))})
    assert found[-300:] == list(range(19_701, 20_001))
    old = [step for step in found if step < 15_000]
    assert old
    assert all(step % 16 == 0 for step in old)
    assert min(found) <= 8192


def test_a_line_that_was_written_in_part_is_left_out(run_dir: Path) -> None:
    RecordingWriter(run_dir / "recording").write(records(1, 4))
    path = run_dir / "recording" / "every-1-000001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    reader = RecordingReader(run_dir)
    assert len(steps(reader)) == 5
    with open(path, "ab") as file:
        file.write(whole[-40:])
    assert steps(reader) == [(3, 1)]


@pytest.mark.parametrize("line", [{}, {"kind": "step"}, {"kind": "step", "spans": 3}, {"kind": "metrics", "step": 1, "values": []}])
def test_a_damaged_record_is_none(line: dict[str, Any]) -> None:
    assert parse(line) is None


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no run in .*lockstep ls"):
        RecordingReader(tmp_path)


def test_a_full_disk_is_remembered_and_does_not_raise(run_dir: Path) -> None:
    (run_dir / "recording").write_text("a file where the folder should be")
    writer = RecordingWriter(run_dir / "recording")
    writer.write(records(1, 2))
    assert writer.error is not None


def test_a_made_up_run_can_be_read(tmp_path: Path) -> None:
    found = RecordingReader(make_run(tmp_path / "run", steps=150)).poll()
    assert {each.generation for each in found.steps} == {0, 1, 2}
    assert all(isinstance(each, StepRecord) for each in found.steps)
    assert [each.step for each in found.metrics] == list(range(1, 151))


# -- a disk that is full for a while -------------------------------------------------------------------


class Disk:
    """Has room for some more bytes, from ``limit`` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write, self.room = os.write, 1 << 40
        monkeypatch.setattr(os, "write", self._write_some)

    def _write_some(self, file: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        count = self._write(file, bytes(data[: self.room]))
        self.room -= count
        return count


def test_a_full_disk_removes_nothing_of_a_recording(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, writer = Disk(monkeypatch), RecordingWriter(run_dir / "recording", file_bytes=20_000)
    writer.write(records(1, 101))
    before = steps(RecordingReader(run_dir))
    disk.room = 0
    for first in range(101, 5001, 100):
        writer.write(records(first, first + 100))
    assert writer.error is not None
    assert steps(RecordingReader(run_dir)) == before
    disk.room = 1 << 40
    writer.write(records(5001, 5011))
    assert steps(RecordingReader(run_dir)) == before + [(step, rank) for step in range(5001, 5011) for rank in (0, 1)]


def test_a_line_that_was_written_in_part_takes_no_other_line_along(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file = Disk(monkeypatch), JsonLinesFile(run_dir / "events.jsonl")
    disk.room = 10
    with pytest.raises(OSError, match="No space left"):
        file.append(json.dumps({"kind": "exited", "worker": 1}) + "\n")
    disk.room = 1 << 40
    file.append(json.dumps({"kind": "end", "code": 0}) + "\n")
    assert JsonLinesTail(run_dir / "events.jsonl").read() == [{"kind": "end", "code": 0}]


# -- numbers -------------------------------------------------------------------------------------------


def test_a_value_that_is_no_number_is_valid_json_and_is_read_back() -> None:
    metrics = Metrics(3, 1.0, {"loss": math.nan, "most": math.inf, "least": -math.inf, "lr": 0.1})
    text = json.dumps(metrics.to_json(), allow_nan=False)
    assert repr(parse(json.loads(text))) == repr(metrics)


def test_a_damaged_number_is_left_out() -> None:
    line = step_of(7, 1, 4).to_json()
    assert parse(line | {"spans": [["data", 0, math.inf, 0, 0]]}) is None
    assert parse({"kind": "metrics", "step": math.inf, "at": 0.0, "values": {}}) is None


def test_a_reader_of_lines_does_not_grow_with_the_run(run_dir: Path) -> None:
    writer, reader = RecordingWriter(run_dir / "recording"), RecordingReader(run_dir)
    for first in range(1, 130_001, 1000):
        writer.write([{"kind": "metrics", "step": step, "at": 1.0, "values": {}} for step in range(first, first + 1000)])
        assert len(list(reader.poll_lines(lambda line: True))) == 1000
    assert len(reader._seen) + len(reader._seen_before) < 110_000


def test_a_file_that_became_shorter_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "begin"}\n{"kind": "end"}\n')
    tail = JsonLinesTail(path)
    assert len(tail.read()) == 2
    path.write_text('{"kind": "new"}\n')
    assert tail.read() == [{"kind": "new"}]


# -- in parts --------------------------------------------------------------------------------------------


def test_events_are_read_in_parts_too(run_dir: Path) -> None:
    lines = [{"time": float(step), "kind": "saved", "step": step, "where": "x" * 100} for step in range(100)]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader, found, polls, more = RecordingReader(run_dir), list[dict[str, Any]](), 0, True
    while more:
        new = reader.poll(max_bytes=1000)
        found, polls, more = found + new.events, polls + 1, new.more
    assert found == lines
    assert polls > 10


def test_a_line_that_is_longer_than_a_part_is_read_whole_and_one_beyond_the_limit_is_left_out(run_dir: Path) -> None:
    path = run_dir / "events.jsonl"
    path.write_text(
        '{"a": 1}\n{"long": "' + "x" * 5000 + '"}\n{"damaged": "' + "y" * 2 * LONGEST_LINE + '"}\n{"b": 1}\n{"torn": "' + "z" * 500
    )
    tail, found, more = JsonLinesTail(path), list[str](), True
    while more:
        found += [name for line in tail.read(100) for name in line]
        more = tail.has_more
    assert found == ["a", "long", "b"]
    with open(path, "a") as file:
        file.write('"}\n')
    assert [list(line) for line in tail.read(100)] == [["torn"]]
