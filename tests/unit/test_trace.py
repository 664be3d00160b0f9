"""Traces are valid trace events, and every bucket's deposit leads to its completion."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.__main__ import main
from lockstep.recording.reader import RecordingReader
from lockstep.recording.records import UNKNOWN, BucketTimes
from lockstep.recording.trace import make_trace
from tests.recordings import make_run, step_of


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def require_valid(events: list[dict[str, Any]]) -> None:
    """The rules of the trace event format, and that slices of a thread are nested, which Perfetto requires."""
    names = {(each["pid"], each["tid"]) for each in events if each["ph"] == "M" and each["name"] == "thread_name"}
    processes = {each["pid"] for each in events if each["ph"] == "M" and each["name"] == "process_name"}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in events:
        assert each["ph"] in "MXisf", each
        assert isinstance(each["pid"], int)
        assert isinstance(each["tid"], int)
        assert isinstance(each["name"], str)
        if each["ph"] == "M":
            continue
        assert isinstance(each["ts"], int)
        assert each["ts"] >= 0
        assert each["pid"] in processes
        assert (each["pid"], each["tid"]) in names
        if each["ph"] == "X":
            assert each["dur"] > 0
            slices.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
        if each["ph"] == "i":
            assert each["s"] in "gpt"
    for mine in slices.values():
        open_until: list[int] = []
        for begin, end in sorted(mine, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], (begin, end, open_until)
            open_until.append(end)
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = Counter(each["id"] for each in events if each["ph"] == "f")
    assert set(starts) == set(ends)
    assert len(starts) == sum(each["ph"] == "s" for each in events)
    for each in events:
        if each["ph"] in "sf":  # a flow is bound to the slice in which it begins or ends
            assert any(begin <= each["ts"] < end for begin, end in slices[each["pid"], each["tid"]]), each
        if each["ph"] == "f":
            assert each["ts"] >= starts[each["id"]]["ts"]
            assert each["name"] == starts[each["id"]]["name"]


def test_a_trace_of_a_run_with_a_death_and_a_replacement_is_valid(run_dir: Path) -> None:
    found = RecordingReader(run_dir).poll()
    trace = make_trace(found.steps, found.events, 110, 150)
    require_valid(trace["traceEvents"])
    names = {each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"}
    assert names == {"run", "rank 0 (worker 0)", "rank 1 (worker 1)", "rank 2 (worker 2)", "rank 3 (worker 3)", "rank 3 (worker 4)"}
    instants = [each["name"] for each in trace["traceEvents"] if each["ph"] == "i"]
    assert "worker 3 ended: SIGKILL" in instants
    assert "generation 1: 3 workers" in instants
    json.dumps(trace, allow_nan=False)


def test_every_step_and_phase_is_a_slice_and_every_deposit_leads_to_every_completion() -> None:
    records = [step_of(step, rank, 3, at=1000.0 + 0.12 * step, slowest_us=90_000) for step in (1, 2, 3) for rank in range(3)]
    events = make_trace(records, [], 2, 2)["traceEvents"]
    require_valid(events)
    slices = Counter(each["name"] for each in events if each["ph"] == "X")
    assert slices["step 2"] == 3
    assert slices["forward"] == slices["backward"] == slices["exchange"] == 3
    assert "step 1" not in slices
    assert slices["bucket 0"] == slices["bucket 0 complete"] == 3
    assert sum(each["ph"] == "s" for each in events) == 4 * 3 * 3
    (first,) = {each["ts"] for each in events if each.get("name") == "step 2"}
    assert first == 0


def test_repeated_steps_and_overlapping_clocks_are_shown() -> None:
    one = step_of(5, 0, 1, at=1000.0)
    again = step_of(5, 0, 1, at=1000.0 + one.seconds - 2e-6)
    events = make_trace([replace(one, committed=False), again], [], 1, 9)["traceEvents"]
    require_valid(events)
    assert [each["name"] for each in events if each.get("cat") == "step"] == ["step 5 (repeated)", "step 5"]


def test_each_phase_of_a_step_has_its_own_flows() -> None:
    """A loop over run.steps with two calls of backward deposits each bucket twice in a step."""
    once = [step_of(1, rank, 2, at=1000.0 + 0.001 * rank, slowest_us=90_000) for rank in range(2)]
    earlier = [each.buckets[0]._replace(sent_us=each.buckets[0].sent_us - 30_000, done_us=each.buckets[0].sent_us) for each in once]
    twice = [replace(each, buckets=(first, each.buckets[0])) for each, first in zip(once, earlier)]
    events = make_trace(twice, [], 1, 1)["traceEvents"]
    require_valid(events)
    assert sum(each["ph"] == "s" for each in events) == 2 * 2 * 2, "phases x sources x targets"


def test_no_records_make_an_empty_trace() -> None:
    assert make_trace([], [], 1, 9)["traceEvents"] == []


def test_the_command_writes_the_last_20_steps_or_those_that_are_named(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main(["trace", str(run_dir), "-o", str(out)]) == 0
    assert capfd.readouterr().out.startswith(f"{out}  20 steps on 4 workers")
    steps = {each["args"]["step"] for each in json.loads(out.read_text())["traceEvents"] if each.get("cat") == "step"}
    assert steps == set(range(181, 201))
    assert main(["trace", str(run_dir), "--steps", "100:110", "-o", str(out)]) == 0
    steps = {each["args"]["step"] for each in json.loads(out.read_text())["traceEvents"] if each.get("cat") == "step"}
    assert steps == set(range(100, 110))


@pytest.mark.parametrize("text", ["", ":", "a:b", "10:10", "20:10", "-3:4", "1:2:3", "900:910", "900"])
def test_a_range_that_makes_no_sense_gets_one_sentence(
    text: str, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["trace", str(run_dir), f"--steps={text}", "-o", str(tmp_path / "no.json")])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert "--steps" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "no.json").exists()


def test_a_file_that_cannot_be_written_is_named(run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir), "-o", str(tmp_path / "none" / "trace.json")]) == 2
    assert "cannot be written" in capfd.readouterr().err


def test_a_bucket_whose_completion_is_not_known_has_no_slice() -> None:
    record = step_of(1, 0, 1)
    made = make_trace([replace(record, buckets=(BucketTimes(0, 10, UNKNOWN, 1),))], [], 1, 1)
    assert not [each for each in made["traceEvents"] if each.get("cat") in ("bucket", "flow")]
