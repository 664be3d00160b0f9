"""`lockstep events` filters what a run has recorded, and its arguments say what is wrong with them."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.__main__ import main
from lockstep.commands.event_text import event_text
from lockstep.commands.events_command import step_range
from lockstep.commands.plain_text import age_text, cut, printable, size_text, table
from lockstep.commands.standard_output import ends_quietly
from lockstep.commands.stop_command import how_it_ended
from lockstep.commands.time_arguments import length_of_time, moment
from lockstep.errors import UsageError
from lockstep.launcher.run_status import read_status
from lockstep.launcher.worker_ranks import WorkerRanks
from lockstep.recording.writer import RecordingWriter
from tests.recordings import BEGIN, make_run, step_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 steps of four workers, of which one dies in step 60."""
    return make_run(tmp_path_factory.mktemp("runs") / "my run", steps=120, dies_at=60, replaced_at=80)


def events(run: Path, *words: str, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["events", str(run), *words]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_each_line_is_printed_once_in_the_order_of_time(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = events(run, capfd=capfd)
    times = [line.get("time", line.get("at")) for line in found]
    assert times == sorted(times)
    steps = [(line["worker"], line["step"]) for line in found if line["kind"] == "step"]
    assert len(steps) == len(set(steps)) > 300, "the files of the recording overlap"
    assert sum(line["kind"] == "metrics" for line in found) == 120
    assert {line["kind"] for line in found} >= {"begin", "event", "exited", "saved", "end"}


def test_filters_by_kind_worker_rank_steps_and_time(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = events(run, "--kind", "step", "--rank", "1", "--steps", "50:53", capfd=capfd)
    assert [(line["step"], line["rank"]) for line in found] == [(50, 1), (51, 1), (52, 1)]
    assert {line["kind"] for line in events(run, "--kind", "metrics,saved", "--kind", "end", capfd=capfd)} == {
        "metrics",
        "saved",
        "end",
    }
    assert {line["step"] for line in events(run, "--steps", "119:", "--kind", "step", capfd=capfd)} == {119, 120}
    about = events(run, "--worker", "2", capfd=capfd)
    assert {line.get("worker", 2) for line in about} == {2}
    early = events(run, "--until", str(BEGIN + 1), "--kind", "step", capfd=capfd)
    late = events(run, "--since", str(BEGIN + 1), "--kind", "step", capfd=capfd)
    assert early
    assert late
    assert len(early) + len(late) == len(events(run, "--kind", "step", capfd=capfd))


def test_an_event_of_membership_is_a_kind_too(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    died = events(run, "--kind", "Died", capfd=capfd)
    assert died
    assert all("Died" in line["event"] for line in died)


def test_as_text_each_line_is_one_sentence(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run), "--text"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any("exited    worker" in line and "SIGKILL" in line for line in lines)
    assert any("step 50, rank 1: " in line and " ms (data " in line for line in lines)
    assert all(line[:4] == time.strftime("%Y", time.localtime(BEGIN)) for line in lines)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kind", "setp"], "there is no kind setp. Did you mean step? The kinds are: begin, "),
        (["--kind", "died"], "there is no kind died. Did you mean Died?"),
        (["--steps", "a:b"], "argument --steps: 'a:b' is no range of steps. Type 100:110"),
        (["--steps", "9:3"], "argument --steps: '9:3' contains no step"),
        (["--since", "yesterday"], "argument --since: 'yesterday' is not a time. Type '10min' (ago)"),
        (["--rank", "-1"], "argument --rank: '-1' is not a whole number of at least 0"),
        (["--knid", "step"], "there is no option --knid. Did you mean --kind?"),
    ],
)
def test_a_wrong_filter_is_one_sentence(run: Path, words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run), *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"lockstep: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [{}, {"kind": "event"}, {"kind": "event", "event": {}}, {"kind": "step", "time": "soon"}, {"kind": 5}, {"kind": "exited"}]
    + [{"kind": "verdict"}, {"kind": "saved"}, {"kind": "end"}, {"kind": "metrics", "values": 3}, {"kind": "stopped", "time": 1}]
    + [{"kind": "event", "event": 5, "actions": 3}, {"kind": "summary", "lines": 5}, {"kind": "x", "text": "\x1b[2J"}],
)
def test_a_line_that_makes_no_sense_is_left_out(line: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in event_text(line)
    other = {"time": 1, "kind": "of a later version", "text": "\x1b[2J"}
    (tmp_path / "events.jsonl").write_text("damaged{\n[]\n" + json.dumps(line) + "\n" + json.dumps(other) + "\n")
    assert events(tmp_path, capfd=capfd) == [other]
    events(tmp_path, "--rank", "3", "--worker", "2", "--steps", "1", capfd=capfd)
    assert "\x1b" not in event_text(other)


# -- arguments, and text ---------------------------------------------------------------------------------------


def test_ranges_of_steps() -> None:
    assert step_range("100:110") == (100, 109)
    assert step_range("7") == (7, 7)
    assert step_range("7:") == (7, math.inf)
    assert step_range(":7") == (0, 6)
    for text in ("", ":", "1-2", "1:2:3", "-1:2", "1.5", "7:7"):
        with pytest.raises(argparse.ArgumentTypeError):
            step_range(text)


def test_times_are_moments_of_the_past_or_lengths() -> None:
    assert length_of_time("14 days") == 14 * 86400
    assert length_of_time("90min") == length_of_time("1.5h") == 5400
    assert abs(moment("10min") - (time.time() - 600)) < 5
    assert moment("1763500000.5") == 1763500000.5
    assert moment("2026-11-18 14:30") == time.mktime((2026, 11, 18, 14, 30, 0, 0, 0, -1))
    today = time.localtime()
    assert moment("00:00:01") == time.mktime((today.tm_year, today.tm_mon, today.tm_mday, 0, 0, 1, 0, 0, -1))
    for text in ("", "14", "days", "-1 day", "nan", "14 moons"):
        with pytest.raises(argparse.ArgumentTypeError):
            length_of_time(text)
    for text in ("", "25:00", "nan", "inf", "tomorrow"):
        with pytest.raises(argparse.ArgumentTypeError):
            moment(text)


def test_sizes_durations_and_tables_are_short() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 12_345, 999_999, 274_726_912, 3_400_000_000, 120e9)] == [
        "0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "275 MB", "3.40 GB", "120 GB",
    ]  # fmt: skip
    assert [age_text(s) for s in (0.4, 59.9, 60, 7199, 86400, 200_000)] == ["0 s", "59 s", "1 min", "1 h", "1 day", "2 days"]
    assert table(("A", "NAME"), [("1", "x"), ("10", "y z")]) == " A  NAME\n 1  x\n10  y z\n"
    assert cut("abcdef", 4) == "abc…"
    assert printable("a\x1b[2J\nb\té") == "a?[2J?b?é"


def test_ranks_follow_the_generations() -> None:
    ranks = WorkerRanks()
    ranks.add({"kind": "started", "ranks": {"0": 0, "1": 1}, "are_spares": False})
    ranks.add({"kind": "started", "ranks": {"2": 5}, "are_spares": True})
    ranks.add({"kind": "event", "event": {}, "actions": [{"Form": {"number": 1, "members": [0, 2]}}]})
    assert ranks.rank_of == {0: 0, 1: 1, 2: 1}
    assert ranks.workers_of(1) == {1, 2}
    assert ranks.ranks == [0, 1]


# -- what the commands print --------------------------------------------------------------------------------


NASTY = "ValueError: \x1b[31mred\x9b\ud800 \udcff\nsecond line"


@pytest.fixture
def nasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has ended with an exception of the user that has control characters and lone surrogates in its message."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    lines = [
        {"time": 1.0, "kind": "command", "role": "run", "words": ["train.py", "\ud800"], "pid": 4711},
        {"time": 2.0, "kind": "end", "code": 1, "why": NASTY, "checkpoint": [3, "/saved\x1b/step-3"]},
    ]
    (tmp_path / "lockstep-runs" / "run").mkdir(parents=True)
    (tmp_path / "lockstep-runs" / "run" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "lockstep-runs" / "run"


@pytest.mark.parametrize("command", ["status", "stop", "top", "events", "events --text", "ls", "clean --all"])
def test_what_is_printed_cannot_control_the_terminal(nasty: Path, capfd: pytest.CaptureFixture[str], command: str) -> None:
    (nasty / "\x1b.pt").touch()
    words = command.split()
    code = main([words[0], *(["run"] if words[0] not in ("ls", "clean") else []), *words[1:]])
    out, err = capfd.readouterr()
    assert code == (1 if words[0] in ("top", "clean") else 0), err
    printed = (out + err).replace("\n", "")
    assert printed
    assert printed.isprintable()
    if words[0] in ("status", "stop", "top"):
        assert "ValueError: ?[31mred??" in printed
        assert "second line" not in printed
    elif command == "events":
        assert json.loads(out.splitlines()[1])["why"] == NASTY


def test_how_a_run_ended_in_one_sentence(nasty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = read_status(nasty)
    assert (
        how_it_ended(ended)
        == "the run has ended: failed (ValueError: ?[31mred?? ?). The newest checkpoint is of step 3 (/saved?/step-3)."
    )
    assert how_it_ended(replace(ended, checkpoint=None, why="")) == "the run has ended: failed. This run has saved no checkpoint."
    assert how_it_ended(replace(ended, stopped_after=3)) == "stopped at step 3, which is saved (/saved?/step-3)."


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError(2, "No such file", "/runs/1/events.jsonl"), "/runs/1/events.jsonl is gone: its folder was removed"),
        (PermissionError(13, "Permission denied", "/runs/1"), "/runs/1 cannot be read (Permission denied)."),
        (OSError(116, "Stale file handle"), "a file of the run cannot be read (Stale file handle)."),
        (OSError("timed out"), "a file of the run cannot be read (timed out)."),
    ],
)
def test_files_that_cannot_be_read_are_one_sentence(error: OSError, sentence: str) -> None:
    @ends_quietly
    def command(given: argparse.Namespace) -> int:
        raise error

    with pytest.raises(UsageError, match=re.escape(sentence)):
        command(argparse.Namespace())


@pytest.mark.parametrize("words", [["scale", "RUN", "3"], ["trace", "RUN"], ["stop", "RUN"], ["ls"]])
def test_ctrl_c_ends_each_command_without_a_word(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for module in ("commands.trace_command", "commands.stop_command", "launcher.command_line"):
        monkeypatch.setattr(f"lockstep.{module}.find_run", interrupted)
    monkeypatch.setattr("lockstep.commands.list_command.known_runs", interrupted)
    assert main([str(run) if word == "RUN" else word for word in words]) == 130
    assert capfd.readouterr() == ("", "")


# -- long recordings ----------------------------------------------------------------------------------------


def peak_bytes(act: Callable[[], object]) -> int:
    """How much memory Python objects need at most while this is executed."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 1 MB, of which every worker's records come later than those of the others that began at the same time."""
    folder = tmp_path_factory.mktemp("runs") / "long"
    folder.mkdir()
    (folder / "events.jsonl").write_text(json.dumps({"time": BEGIN, "kind": "begin"}) + "\n")
    writer = RecordingWriter(folder / "recording")
    for first in range(1, 601, 10):
        for rank in range(4):
            writer.write([step_of(step, rank, 4, at=BEGIN + step).to_json() for step in range(first, first + 10)])
    writer.close()
    return folder


def test_a_long_recording_is_printed_in_the_order_of_time_and_never_in_memory_at_once(
    long_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = sum(path.stat().st_size for path in (long_run / "recording").iterdir())
    assert size > 1e6
    for words in ((), ("--rank", "1"), ("--kind", "step", "--steps", "5:10")):
        assert peak_bytes(lambda words=words: main(["events", str(long_run), *words])) < 5e6, words  # type: ignore[misc]
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    steps = [(line["at"], line["rank"]) for line in lines[: 4 * 600 + 1] if line["kind"] == "step"]
    assert [at for at, _ in steps] == sorted(at for at, _ in steps)
    assert len(set(steps)) == len(steps) == 4 * 600


def test_a_trace_of_a_long_recording_has_only_the_chosen_steps_in_memory(long_run: Path, tmp_path: Path) -> None:
    for words in ((), ("--steps", "5:10")):
        command = ["trace", str(long_run), "-o", str(tmp_path / "trace.json"), *words]
        assert peak_bytes(lambda command=command: main(command)) < 10e6  # type: ignore[misc]
        steps = {
            each["args"]["step"]
            for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
            if each.get("cat") == "step"
        }
        assert steps == (set(range(5, 10)) if words else set(range(581, 601)))
