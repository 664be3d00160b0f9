"""What the page knows of a run, without server and browser: in bounded memory, in increments, and right with thinned recordings."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.dashboard.log_parts import read_log, workers_with_logs
from lockstep.dashboard.prometheus_text import prometheus_text
from lockstep.dashboard.run_history import RunHistory
from lockstep.dashboard.run_list import RunList
from lockstep.dashboard.run_view import MAX_METRICS, RunView
from lockstep.dashboard.step_groups import StepGroup
from lockstep.dashboard.step_tiers import StepTiers
from lockstep.dashboard.watched_run import WatchedRun
from lockstep.dashboard.watched_runs import WatchedRuns
from lockstep.errors import UsageError
from lockstep.recording import records
from lockstep.recording.reader import NewRecords, RecordingReader
from lockstep.recording.records import Metrics, Span
from lockstep.recording.writer import RecordingWriter
from tests.growing_run import GrowingRun
from tests.recordings import BEGIN, make_run, step_of

STEP_S = 0.0922


def view_of(folder: Path) -> RunView:
    view = RunView("run")
    view.feed(RecordingReader(folder).poll())
    return view


def json_of(changes: dict[str, Any]) -> Any:
    """As the page gets it. Numbers that JSON does not have raise ValueError."""
    return json.loads(json.dumps(changes, allow_nan=False))


def tiers_with(steps: list[int], **limits: int) -> StepTiers[StepGroup]:
    tiers = StepTiers(StepGroup, **limits)
    for version, step in enumerate(steps, 1):
        record = step_of(step, 0, 1, at=BEGIN + step * STEP_S)
        tiers.add(step, version, lambda group, record=record: group.add(record))  # type: ignore[misc]
    return tiers


def test_the_last_step_is_shown_also_if_it_was_too_short_to_be_recorded() -> None:
    view = RunView("run")
    view.feed(NewRecords(steps=[step_of(48, 0, 1, at=BEGIN)], metrics=[Metrics(50, BEGIN, {"loss": 1.0})]))
    assert view.step == 50
    view.feed(NewRecords(steps=[replace(step_of(56, 0, 1, at=BEGIN), kind="pause")]))
    assert view.step == 56
    view.feed(NewRecords(events=[{"kind": "end", "time": BEGIN + 9, "code": 0, "why": "finished", "step": 60}]))
    assert view.step == 60


def test_a_long_run_takes_no_more_groups_than_a_short_one() -> None:
    tiers = tiers_with(list(range(1, 5001)), max_groups=64, window=32)
    coarse, fine = list(tiers.coarse()), list(tiers.fine())
    assert len(coarse) <= 64
    assert tiers.width == 128
    assert [group.first for group in fine] == list(range(4969, 5001))
    assert sum(group.commits for group in coarse) == 5000


def test_many_workers_make_fewer_groups() -> None:
    tiers = StepTiers(StepGroup, max_groups=512, window=8, max_cells=20_000)
    for step in range(1, 101):
        for rank in range(50):
            record = step_of(step, rank, 50)
            tiers.add(step, step, lambda group, record=record: group.add(record))  # type: ignore[misc]
    assert sum(group.cells for group in tiers.coarse()) <= 20_000


def test_the_order_of_the_records_does_not_matter() -> None:
    steps = list(range(1, 701))

    def groups(tiers: StepTiers[StepGroup]) -> list[Any]:
        return [group.to_json(BEGIN) for group in (*tiers.coarse(), *tiers.fine())]

    # As the reader gives them: the thin rows of the recording first.
    assert groups(tiers_with(steps)) == groups(tiers_with([*range(256, 701, 256), *(step for step in steps if step % 256)]))


def test_only_what_has_changed_is_sent() -> None:
    tiers = tiers_with(list(range(1, 101)))
    changes = tiers.changes(98, lambda group: group.first)
    assert changes is not None
    assert changes["coarse"] == changes["fine"] == [99, 100]
    assert not changes["reset"]
    assert tiers.changes(100, lambda group: group.first) is None


def test_all_groups_are_sent_again_when_steps_are_regrouped() -> None:
    tiers = tiers_with(list(range(1, 66)), max_groups=64)
    changes = tiers.changes(64, lambda group: group.first)
    assert changes is not None
    assert changes["reset"]
    assert changes["width"] == 2
    assert len(changes["coarse"]) == 33
    assert changes["fine"] == [65]


def test_throughput_is_right_while_the_records_of_a_worker_are_missing() -> None:
    group = StepGroup()
    group.add(step_of(1, 0, 4))
    alone = group.samples_per_s
    for rank in (1, 2, 3):
        group.add(step_of(1, rank, 4))
    assert alone == pytest.approx(group.samples_per_s)
    assert group.samples_per_s == pytest.approx(4 * 32 / STEP_S, rel=0.01)


def test_a_repeated_step_costs_time_and_adds_no_samples() -> None:
    group = StepGroup()
    group.add(step_of(1, 0, 1, committed=False))
    group.add(step_of(1, 0, 1))
    assert group.samples_per_s == pytest.approx(32 / (2 * STEP_S), rel=0.01)
    assert group.phase_seconds["forward"] == pytest.approx(0.06)


def test_a_run_is_shown_with_its_slow_and_its_dead_worker(tmp_path: Path) -> None:
    shown = json_of(view_of(make_run(tmp_path / "run")).changes())
    assert shown["run"]["step"] == 200
    assert shown["run"]["members"] == [0, 1, 2, 4]
    assert shown["run"]["failures"] == 1
    assert shown["lives"]["3"][:2] == ["died", "SIGKILL"]
    group = next(group for group in shown["steps"]["fine"] if group["s"] == 130)
    assert set(group["w"]) == {"0", "1", "2"}
    assert group["w"]["2"][0] / group["w"]["0"][0] == pytest.approx(119 / 89, rel=0.03)
    said = [entry["text"] for entry in shown["entries"]]
    assert "worker 3 (pid 4803) died: SIGKILL" in said
    assert "3 workers go on, generation 1" in said
    assert "worker 4 joined; 4 workers train, generation 2" in said


def test_the_page_says_how_long_each_worker_waits_and_for_whom(tmp_path: Path) -> None:
    shown = json_of(view_of(make_run(tmp_path / "run")).changes())
    waits = {worker["id"]: worker["waits"] for worker in shown["workers"] if worker["id"] != 3}
    assert {id: whom for id, (_, whom) in waits.items()} == {0: 2, 1: 2, 2: None, 4: 2}
    assert waits[0][0] == pytest.approx(33 / 122, abs=0.02)
    assert waits[2][0] == pytest.approx(3 / 122, abs=0.01)
    assert "(most for rank 2)" in shown["run"]["costs"]


def test_the_page_says_that_the_steps_wait_for_workers_with_more_lanes(tmp_path: Path) -> None:
    shown = json_of(view_of(make_run(tmp_path / "run", workers=3, dies_at=None)).changes())
    assert "workers have 2 or 3 lanes, and the steps wait for those that have most" in shown["run"]["costs"]


def test_samples_are_counted_also_where_steps_are_not_recorded(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "recording", file_bytes=20_000)
    for step in range(1, 3001):
        writer.write([step_of(step, rank, 2, at=BEGIN + step * STEP_S).to_json() for rank in range(2)])
    writer.close()
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": BEGIN, "kind": "begin"}) + "\n")
    view = view_of(tmp_path)
    recorded = sum(group.commits for group in view.steps.coarse()) // 2
    assert recorded < 1000
    assert view.samples == pytest.approx(3000 * 64, rel=0.005)


def test_a_long_recording_that_is_read_in_parts_shows_its_newest_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.dashboard.watched_run._POLL_BYTES", 8_000)
    writer = RecordingWriter(tmp_path / "recording", file_bytes=100_000)
    for step in range(1, 3001):
        lanes = ((0, 2), (2, 4)) if step > 2700 else ((0, 1), (1, 4))
        values = {"loss": 1 / step} | ({"accuracy": step / 3000} if step % 100 == 0 else {})
        writer.write([step_of(step, rank, 2, at=BEGIN + step * STEP_S, lanes=lanes[rank]).to_json() for rank in range(2)])
        writer.write([Metrics(step, BEGIN + step * STEP_S, values).to_json()])
    writer.close()
    said = ["3000 steps in 277 s, 694 samples/s, loss 0.0003333"]
    lines = [{"time": BEGIN, "kind": "begin"}, {"time": BEGIN + 277, "kind": "end", "code": 0, "why": "the script has ended"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    watched = WatchedRun("run", tmp_path)
    watched.read_all()
    shown = watched.changes()[1]
    assert shown["run"]["values"] == {"loss": "0.00033333", "accuracy": "1"}
    assert "lanes" not in shown["run"]["costs"]  # they are equal since step 2701
    assert "loss 0.0003333" in shown["summary"][0]
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": BEGIN + 277, "kind": "summary", "lines": said}) + "\n")
    watched.poll()
    assert watched.changes()[1]["summary"] == said  # what was removed from the recording is counted there


def test_seconds_in_phases_never_fall(tmp_path: Path) -> None:
    """Of a run that was resumed at step 1000 and whose first step took long. Every second step is recorded."""
    view, seconds = RunView("run"), list[float]()
    for step in range(1002, 3000, 2):
        own = {records.FORWARD: 10_000_000 if step == 1002 else 30_000}
        found = [step_of(step, rank, 2, at=BEGIN + step, own_us=own, stride=2) for rank in range(2)]
        if step == 2000:
            found += [replace(each, kind="pause", spans=(Span("evaluate", 0, 5_000_000),)) for each in found]
        view.feed(NewRecords(steps=found))
        seconds.append(view.phase_seconds["forward"])
    assert seconds == sorted(seconds)
    assert view.phase_seconds["forward"] == pytest.approx(20 + 0.03 * 2 * 998)
    assert view.phase_seconds["evaluate"] == pytest.approx(5)


def test_only_lives_that_have_changed_are_sent() -> None:
    view = RunView("run")
    begin = {"time": 1, "kind": "begin", "settings": {"size": 500}}
    view.feed(
        NewRecords(
            events=[begin, {"time": 1, "kind": "event", "event": {}, "actions": [{"Form": {"number": 0, "members": [7, 8]}}]}]
        )
    )
    version = view.changes()["version"]
    assert len(view.changes()["lives"]) == 500
    view.feed(NewRecords(events=[{"time": 3, "kind": "exited", "worker": 7, "pid": 9, "how": "SIGKILL"}]))
    assert view.changes(version)["lives"] == {7: ["died", "SIGKILL", 2]}


def test_values_that_are_not_finite_reach_the_page(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.steps(3, {"loss": 1.0})
    run.steps(1, {"loss": float("nan"), "grad": float("inf")})
    run.close()
    shown = json_of(view_of(run.folder).changes())
    assert shown["run"]["values"] == {"loss": "nan", "grad": "inf"}
    assert [group["v"]["loss"] for group in shown["metrics"]["fine"]] == [[1, 1, 1]] * 3 + [None]


def test_a_script_that_logs_thousands_of_names_does_not_fill_the_memory() -> None:
    view = RunView("run")
    for step in range(1, 50):
        view.feed(NewRecords(metrics=[Metrics(step, BEGIN, {f"value-{step}-{k}": 1.0 for k in range(100)})]))
    assert len(view.values) == MAX_METRICS


def test_workers_that_end_because_the_run_was_told_to_stop_are_no_faults() -> None:
    history = RunHistory()
    for line in (
        {"time": 1, "kind": "begin", "settings": {"size": 1}},
        {"time": 2, "kind": "signal", "signal": 15},
        {"time": 3, "kind": "exited", "worker": 0, "pid": 9, "how": "SIGTERM"},
    ):
        history.add(line, 1)
    assert "fault" not in [entry.level for entry in history.entries]


def test_new_numbers_of_a_verdict_are_shown_and_not_listed_again() -> None:
    history = RunHistory()
    for share in (94, 95, 96):
        line = {
            "time": share,
            "kind": "verdict",
            "sentence": f"rank 2 is last in {share}% of steps",
            "worker": 2,
            "cause": "loader",
        }
        history.add(line, 1)
    assert [entry.text for entry in history.entries] == ["rank 2 is last in 94% of steps"]
    assert history.verdict is not None
    assert history.verdict["sentence"] == "rank 2 is last in 96% of steps"
    history.add({"time": 97, "kind": "verdict", "sentence": ""}, 1)
    assert history.verdict is None
    assert len(history.entries) == 2


def test_torn_lines_are_left_out_and_read_when_they_are_whole(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.steps(5)
    watched = WatchedRun("run", run.folder)
    watched.read_all()
    newest = tmp_path / "run" / "recording" / "every-1-000001.jsonl"
    line = json.dumps(step_of(6, 0, 4).to_json()).encode()
    with open(newest, "ab") as file:
        file.write(line[:100])
        file.flush()
        watched.poll()
        assert watched.changes()[1]["run"]["step"] == 5
        file.write(line[100:] + b"\n")
    watched.poll()
    assert watched.changes()[1]["run"]["step"] == 6
    run.close()


def test_a_removed_folder_is_said_and_what_was_read_stays(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.steps(5)
    watched = WatchedRun("run", run.folder)
    watched.read_all()
    run.close()
    run.folder.rename(tmp_path / "elsewhere")
    watched.poll()
    _, shown = watched.changes()
    assert (shown["run"]["state"], shown["run"]["step"]) == ("removed", 5)


def test_another_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    """`rm -r run; lockstep run --run-dir run`: the new files may get the inodes of the old ones, and be longer or shorter."""
    watched = WatchedRun("run", make_run(tmp_path / "run", steps=5, workers=2))
    watched.read_all()
    version, _ = watched.changes()
    for number, steps in enumerate((2, 20)):
        new = make_run(tmp_path / f"new-{number}", steps=steps, workers=2, begin=BEGIN + 60 * (number + 1))
        for path in (path.relative_to(new) for path in new.rglob("*.jsonl")):
            shutil.copyfile(new / path, tmp_path / "run" / path)  # into the same inode
        watched.read_all()
        version, shown = watched.changes(version)
        assert shown["reset"]
        assert shown["run"]["step"] == steps
        assert len(shown["entries"]) == len(view_of(new).history.entries)


def test_the_states_of_runs_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=10)
    GrowingRun(tmp_path / "b").close()
    running = GrowingRun(tmp_path / "c")
    running.steps(3)
    GrowingRun(tmp_path / "d").end(1, "the script of worker 1 failed")
    (tmp_path / "no-run").mkdir()
    entries = {entry.name: entry for entry in RunList(tmp_path).entries()}
    assert {name: entry.state for name, entry in entries.items()} == {"a": "finished", "b": "lost", "c": "running", "d": "failed"}
    assert entries["c"].step == 3
    running.close()


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "whole", steps=10)
    for name, line in {
        "saved": {"time": 1, "kind": "saved", "step": 3},
        "form": {"time": 1, "kind": "event", "actions": [{"Form": {}}, 5]},
        "words": {"time": 1, "kind": "command", "words": 7},
        "time": {"time": float("nan"), "kind": "begin"},
        "step": {"time": 1, "kind": "end", "step": [], "code": "x"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "loop").symlink_to("loop")
    entries = {entry.name: entry for entry in RunList(tmp_path).entries()}
    assert set(entries) == {"whole", "saved", "form", "words", "time", "step"}
    assert (entries["whole"].state, entries["whole"].step) == ("finished", 10)
    assert entries["saved"].state == entries["words"].state == entries["time"].state == "unknown"
    json.dumps([entry.to_json() for entry in entries.values()], allow_nan=False)
    for name in entries:
        WatchedRun(name, tmp_path / name).read_all()


def test_the_number_of_workers_is_known_long_after_they_changed(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.steps(3)
    for step in range(1000):
        run.event("saved", step=step, where="checkpoints/" + "x" * 80)
    assert RunList(tmp_path).entries()[0].workers == 4
    run.close()


def test_a_run_that_could_not_be_read_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", steps=10)
    monkeypatch.setattr("lockstep.dashboard.watched_runs._RETRY_S", 0.01)
    poll, calls = WatchedRun.poll, []

    def poll_fails_once(run: WatchedRun) -> bool:
        calls.append(run)
        if len(calls) == 1:
            raise FileNotFoundError("every-1-000001.jsonl")
        return poll(run)

    monkeypatch.setattr(WatchedRun, "poll", poll_fails_once)

    async def look() -> None:
        runs = WatchedRuns(RunList(tmp_path))
        first = await runs.get("run")
        end = time.monotonic() + 20
        while (now := await runs.get("run")) is first or now is None or not now.is_current:
            assert time.monotonic() < end
            await runs.changed(0.01)
        assert first is not None
        assert now.changes(first.version)[1]["reset"]
        assert now.changes()[1]["run"]["step"] == 10
        await runs.close()

    asyncio.run(look())
    assert "the run run could not be read: FileNotFoundError" in capfd.readouterr().err


def test_runs_that_are_in_use_are_kept_and_idle_ones_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.dashboard.watched_runs.MAX_WATCHED", 2)
    for name in "abcd":
        make_run(tmp_path / name, steps=3)

    async def look() -> None:
        runs = WatchedRuns(RunList(tmp_path))
        found = {name: await runs.get(name) for name in "abc"}
        assert None not in found.values()
        assert await runs.get("a") is found["a"]
        assert await asyncio.gather(runs.get("none"), runs.get("none")) == [None, None]
        monkeypatch.setattr("lockstep.dashboard.watched_runs._IN_USE_S", 0.0)
        assert await runs.get("d") is not None
        assert await runs.get("a") is found["a"]  # "b" and "c" were used longer ago
        assert await runs.get("b") is not found["b"]
        await runs.close()

    asyncio.run(look())


def test_a_run_is_found_by_its_own_name_alone(tmp_path: Path) -> None:
    runs = RunList(make_run(tmp_path / "a", steps=3).parent)
    assert runs.path("a") == tmp_path / "a"
    for name in (".", "..", "../a", "a/..", "", "b", "/etc", "a\0"):
        assert runs.path(name) is None
    with pytest.raises(UsageError, match="is not a folder"):
        RunList(tmp_path / "missing")


def test_the_end_of_a_long_log_is_read_in_whole_lines_and_characters(tmp_path: Path) -> None:
    log = tmp_path / "workers" / "3" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_bytes("".join(f"line {number} ä\n" for number in range(1000)).encode())
    part = read_log(tmp_path, 3, max_bytes=100)
    assert part is not None
    assert part.skipped
    assert part.text.startswith("line 99")
    with open(log, "ab") as file:
        file.write("ö".encode()[:1])
    more = read_log(tmp_path, 3, part.end)
    assert more is not None
    assert (more.text, more.unfinished, more.end) == ("", "", part.end)
    with open(log, "ab") as file:
        file.write("ö".encode()[1:] + b"\n")
    more = read_log(tmp_path, 3, part.end)
    assert more is not None
    assert more.text == "ö\n"
    assert read_log(tmp_path, 4) is None


def test_logs_are_found_in_the_folders_of_agents_too(tmp_path: Path) -> None:
    for folder in ("workers/0", "machines/a/workers/10", "machines/b/workers/2"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "log.txt").write_text(f"{folder}\n")
    assert workers_with_logs(tmp_path) == [0, 2, 10]
    part = read_log(tmp_path, 2)
    assert part is not None
    assert part.text == "machines/b/workers/2\n"


def test_a_log_that_shows_a_progress_bar_has_its_last_state_alone(tmp_path: Path) -> None:
    log = tmp_path / "workers" / "3" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"\x1b[1;31mbegin\x1b[0m\r\n\r  0%|\r 10%|\r 20%|")
    part = read_log(tmp_path, 3)
    assert part is not None
    assert (part.text, part.unfinished) == ("begin\n", " 20%|")
    with open(log, "ab") as file:
        file.write(b"\r 30%|" + b"\r 40%|\x1b[" * 10_000)
    part = read_log(tmp_path, 3, part.end, max_bytes=1000)
    assert part is not None
    assert (part.text, part.unfinished) == ("", " 40%|")
    with open(log, "ab") as file:
        file.write(b"K\r100%|\r\nend")
    part = read_log(tmp_path, 3, part.end)
    assert part is not None
    assert (part.text, part.unfinished, part.skipped) == ("100%|\n", "end", False)


def test_the_prometheus_text_is_what_its_parser_reads(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    run = GrowingRun(tmp_path / "run")
    run.steps(10, {"loss": 0.5, 'a "strange"\\name\n': float("nan")})
    run.event("verdict", sentence="rank 2 is last", rank=2, worker=2, cause="loader", speedup=0.11)
    run.kill(3)
    view = view_of(run.folder)
    view.name = 'run "1"\\x'
    text = prometheus_text([(view, "running"), (view_of(make_run(tmp_path / "other", steps=150)), "finished")])
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    found = {
        (s.name, s.labels["run"], *(v for k, v in s.labels.items() if k != "run")): s.value
        for f in families.values()
        for s in f.samples
    }
    name = view.name
    assert found["lockstep_steps_total", name] == 10
    assert found["lockstep_samples_total", name] == 10 * 4 * 32
    assert found["lockstep_workers", name] == 3
    assert found["lockstep_generation", name] == 1
    assert found["lockstep_failures_total", name] == 1
    assert found["lockstep_logged_value", name, "loss"] == 0.5
    assert found["lockstep_logged_value", name, 'a "strange"\\name\n'] != found["lockstep_logged_value", name, "loss"]
    assert found["lockstep_straggler_speedup_ratio", name, "2", "2", "loader"] == 0.11
    assert found["lockstep_phase_seconds_total", name, "forward"] == pytest.approx(0.3, rel=0.05)
    assert found["lockstep_worker_memory_bytes", name, "0", "0"] == 800 << 20
    assert found["lockstep_running", "run"] == 0
    assert found["lockstep_steps_total", "run"] == 150
    for family in families.values():
        assert family.documentation
        assert family.type in ("counter", "gauge")
    run.close()
