"""A damaged line of events.jsonl counts as a line that is not there, for every reader, and stops no command and no run."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.__main__ import main
from lockstep.commands.event_text import event_text
from lockstep.commands.events_command import step_in, time_of, workers_in
from lockstep.commands.list_command import as_json
from lockstep.dashboard.run_view import RunView
from lockstep.launcher.run_registry import began_at
from lockstep.launcher.run_removal import remove_oldest
from lockstep.launcher.run_status import read_status
from lockstep.launcher.worker_ranks import WorkerRanks
from lockstep.recording.event_lines import is_event
from lockstep.recording.reader import RecordingReader
from lockstep.recording.records import parse
from lockstep.recording.trace import make_trace
from tests.recordings import step_of

FORM, SPAWN = {"Form": {"number": 2, "members": [0, 2]}}, {"Spawn": {"workers": [3], "are_spares": False, "delay_s": 0.0}}
EVENTS: list[dict[str, Any]] = [
    {"JoinRequested": {"worker": 1, "pid": None}},
    {"MachineLost": {"workers": [0], "room": 2, "how": "machine b does not answer"}},
    {"MachineJoined": {"name": "b", "workers": 2}},
    {"ScaleRequested": {"size": 3}},
    {"ScriptRaised": {"worker": 0, "step": 3, "error": "ValueError: x", "place": "ValueError at train.py:3"}},
]
VERDICT = {"sentence": "rank 1 is last", "rank": 1, "worker": 1, "cause": "loader", "share": 0.9, "speedup": 0.1, "detail": ""}
LINES: list[dict[str, Any]] = [
    {"time": 1.0, "kind": "command", "role": "run", "words": ["train.py"], "host": "host-a", "pid": 4711},
    {"time": 2.0, "kind": "begin", "settings": {"size": 2}, "pid": 4711},
    {"time": 2.0, "kind": "begin", "command": "train.py", "pid": 4711},
    {"time": 2.0, "kind": "continue", "generation": 1, "workers": [0, 1]},
    {"time": 2.0, "kind": "started", "ranks": {"0": 0, "1": 1}, "are_spares": False},
    {"time": 2.0, "kind": "not started", "workers": [1], "why": "no room"},
    *({"time": 3.0, "kind": "event", "event": event, "actions": [FORM, SPAWN], "why": "so it is"} for event in EVENTS),
    {"time": 3.0, "kind": "event", "event": {"Tick": {}}, "actions": [{"Kill": {"worker": 0, "why": "it hangs"}}], "why": ""},
    {"time": 3.0, "kind": "event", "event": {"Tick": {}}, "actions": [{"StartAgain": {"restarts": 1}}, {"End": {}}], "why": ""},
    {"time": 4.0, "kind": "exited", "worker": 1, "pid": 4712, "how": "SIGKILL"},
    {"time": 4.0, "kind": "exited", "worker": 1, "pid": 4712, "status": -9},
    {"time": 4.0, "kind": "stopped", "worker": 0, "at": 3.9, "seconds": 0.5, "times": 1},
    {"time": 5.0, "kind": "saved", "step": 3, "where": "checkpoints/step-3"},
    {"time": 5.0, "kind": "verdict", **VERDICT},
    {"time": 6.0, "kind": "signal", "signal": 15},
    {"time": 6.0, "kind": "stop requested", "kill": False},
    {"time": 6.0, "kind": "zygote hung", "why": "it hung"},
    {"time": 6.0, "kind": "machine lost", "machine": "b", "why": "it is gone"},
    {"time": 7.0, "kind": "end", "code": 0, "why": "", "step": 3, "stopped_after": None, "signal": None, "checkpoint": [3, "x"]},
    {"time": 7.0, "kind": "summary", "lines": ["3 steps"]},
    {"time": 7.0, "kind": "of a later version", "worker": 0},
]

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, 1e300, -1, 1 << 60, float("nan"), float("inf")])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.sampled_from(["0", "Form"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything that is in a line, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*place, name)
        yield from places_in(inner, (*place, name))


def with_value(line: dict[str, Any], place: tuple[Any, ...], value: Any, *, is_removed: bool) -> dict[str, Any]:
    found = copy.deepcopy(line)
    inner: Any = found
    for name in place[:-1]:
        inner = inner[name]
    if is_removed:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return found


@st.composite
def damaged_lines(draw: st.DrawFn) -> dict[str, Any]:
    line = draw(st.sampled_from(LINES))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(list(places_in(line))))
        line = with_value(line, place, draw(JSON), is_removed=draw(st.booleans()))
        if not line:
            break
    return line


def run_with(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "20261118-221500-4711"
    (path / "recording").mkdir(parents=True)
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [step_of(step, 0, 1, at=float(step)).to_json() for step in range(1, 4)]
    recorded = [line | {"at": line.get("time", 0.0)} for line in lines]  # what is no record there is left out too
    (path / "recording" / "every-1-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*records, *recorded)))
    return path


def read_all(path: Path) -> None:
    """Everything that reads events.jsonl."""
    json.dumps(as_json(read_status(path, ask=False)))
    assert 0.0 <= began_at(path) < 1e12
    found, view, ranks = RecordingReader(path).poll(), RunView("run"), WorkerRanks()
    view.feed(found)
    json.dumps(view.changes(), allow_nan=False)
    json.dumps(make_trace(found.steps, found.events, 1, 3))
    for line in RecordingReader(path).poll_lines(lambda line: True):
        if is_event(line):
            ranks.add(line)
        assert event_text(line).isprintable()
        time_of(line), step_in(line), workers_in(line)
    remove_oldest(path.parent, keep=0)


def test_every_line_that_a_run_writes_is_an_event() -> None:
    assert [line for line in LINES if not is_event(line)] == []


@settings(max_examples=200, deadline=None)
@given(damaged_lines(), damaged_lines())
@example({"kind": "saved", "time": 1}, {"kind": "verdict", "time": 1e300})
@example({"kind": "command", "time": 1, "words": 5, "role": {}}, {"kind": "summary", "time": 1, "lines": 5})
def test_whatever_a_line_has_in_its_fields_every_reader_goes_on(one: dict[str, Any], other: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        read_all(run_with(Path(folder), one, *LINES[:12], other, *LINES[-3:]))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["kind", "time", "at", "worker", "step", "values", "spans", "event", "lanes"]), JSON))
def test_whatever_a_line_of_the_recording_has_in_its_fields_it_is_a_record_or_left_out(line: dict[str, Any]) -> None:
    for kind in ("step", "metrics", "pause"):
        parse(line | {"kind": kind})
        assert event_text(line | {"kind": kind}).isprintable()


DAMAGED: list[dict[str, Any]] = [
    {},
    {"kind": 5, "time": 1},
    {"kind": "saved", "time": 1},
    {"kind": "saved", "time": 1, "step": True, "where": "x"},
    {"kind": "saved", "time": 1, "step": 10**400, "where": "x"},
    {"kind": "saved", "time": float("nan"), "step": 1, "where": "x"},
    {"kind": "saved", "time": 1e300, "step": 1, "where": "x"},
    {"kind": "saved", "time": -1, "step": 1, "where": "x"},
    {"kind": "command", "time": 1, "words": 5},
    {"kind": "summary", "time": 1, "lines": 5},
    {"kind": "verdict", "time": 1, "sentence": 4},
    {"kind": "verdict", "time": 1, "sentence": "x", "speedup": float("inf")},
    {"kind": "event", "time": 1},
    {"kind": "event", "time": 1, "event": "x", "actions": []},
    {"kind": "event", "time": 1, "event": {}, "actions": 5},
    {"kind": "event", "time": 1, "event": {}, "actions": [{"Form": {}}]},
    {"kind": "started", "time": 1, "ranks": {"x": 0}},
    {"kind": "stopped", "time": 1, "worker": 1, "seconds": 1, "at": float("inf")},
    {"kind": "exited", "time": 1},
    {"kind": "end", "time": 1, "code": 0, "checkpoint": [3]},
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_no_event(line: dict[str, Any]) -> None:
    assert not is_event(line)


@pytest.mark.parametrize(
    "command", ["ls", "ls --json", "status last", "status --json", "clean --all", "events last --text", "logs last"]
)
def test_a_run_with_damaged_lines_stops_no_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    run_with(tmp_path / "lockstep-runs", *DAMAGED)
    assert main(command.split()) in (0, 1)
    assert "Traceback" not in capfd.readouterr().err
