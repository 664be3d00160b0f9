"""events.jsonl stays small in a run of weeks: lines that come again and again are thinned, faults never."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.launcher.event_thinning import EventThinning, Spacing
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.straggler_reports import StragglerReports

DAY = 86400


def saved(step: int) -> dict[str, Any]:
    return {"time": float(step), "kind": "saved", "step": step, "where": f"step-{step}"}


def event(name: str, *actions: str) -> dict[str, Any]:
    return {"time": 1.0, "kind": "event", "event": {name: {}}, "actions": [{action: {}} for action in actions], "why": ""}


def after(lines: list[dict[str, Any]], every_s: float = 1.0) -> list[Any]:
    """What is written if these lines come one after the other."""
    thinning = EventThinning()
    return [found for number, line in enumerate(lines) for found in thinning.add(line, number * every_s)]


def test_a_run_that_saves_each_second_for_four_weeks_writes_few_lines() -> None:
    written = after([saved(step) for step in range(28 * DAY)])
    assert 10_000 < len(written) < 18_000
    assert [line["step"] for line in written[:1000]] == list(range(1000))
    assert sum(1 + line.get("left_out", 0) for line in written) > 28 * DAY - 300
    assert written[-1]["step"] > 28 * DAY - 300


def test_a_run_that_saves_every_ten_minutes_for_eight_weeks_writes_each_line() -> None:
    lines = [saved(step) for step in range(56 * DAY // 600)]
    assert after(lines, 600.0) == lines


def test_faults_and_changes_of_the_workers_are_always_written() -> None:
    lines = [{"time": 1.0, "kind": "exited", "worker": 1, "pid": 2, "how": "SIGKILL"}, event("Died"), event("PeersLost", "Abort")]
    lines += [event("JoinRequested", "Form"), event("StageEntered", "SkipLoop", "Form"), {"time": 1.0, "kind": "machine lost"}]
    assert after(lines * 5000, 0.0) == lines * 5000


def test_what_a_loop_or_a_checkpoint_makes_is_thinned_for_each_kind_alone() -> None:
    lines = [
        event("StageEntered"),
        event("AloneBegan", "PostponeTimeouts"),
        event("AloneEnded"),
        event("JoinRequested", "SkipLoop"),
    ]
    written = after([*lines * 5000, event("RankRead")], 0.0)
    assert len(written) == 4 * 1000 + 1


def test_a_line_that_waits_is_written_when_it_is_time_and_says_what_is_missing() -> None:
    thinning = EventThinning()
    for step in range(1000):
        assert thinning.add(saved(step), 0.0) == [saved(step)]
    for step in (1000, 1001, 1002):
        assert thinning.add(saved(step), 0.5) == []
    assert thinning.due(0.9) == []
    assert thinning.due(1.0) == [saved(1002) | {"left_out": 2}]
    assert thinning.due(9.0) == []


def test_lines_that_have_waited_are_written_in_the_order_of_time() -> None:
    thinning = EventThinning()
    lines = [event("AloneBegan"), event("AloneEnded")]
    for _ in range(1000):
        for line in lines:
            thinning.add(line, 0.0)
    for time, name in ((3.0, "AloneEnded"), (2.0, "AloneBegan")):
        thinning.add(event(name) | {"time": time}, 0.5)
    assert [line["time"] for line in thinning.due(10.0)] == [2.0, 3.0]


def test_the_newest_line_is_written_before_the_end_and_when_the_folder_is_closed(tmp_path: Path) -> None:
    for name, ends in (("a", True), ("b", False)):
        folder = RunFolder.create(str(tmp_path / name), 0.0)
        for step in range(1005):
            folder.append(saved(step))
        if ends:
            folder.record("end", code=0, why="")
        folder.close()
        lines = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        assert len(lines) == 1001 + ends
        assert lines[1000] == saved(1004) | {"left_out": 4}
        assert lines[-1]["kind"] == ("end" if ends else "saved")


def test_stops_that_come_again_and_again_are_added_up_and_none_is_lost() -> None:
    written: list[dict[str, Any]] = []
    reports = StragglerReports(lambda kind, **facts: written.append(facts), lambda text: None)
    for second in range(10_000):
        reports.add_stop(3, 0.25)
        reports.on_time(float(second))
    assert len(written) < 5000
    assert 10_000 - sum(line["times"] for line in written) < 20
    reports.write_stops()
    assert sum(line["times"] for line in written) == 10_000
    assert sum(line["seconds"] for line in written) == 2500.0


def test_spacing_doubles_after_each_thousand_lines() -> None:
    spacing = Spacing()
    found = []
    for _ in range(5):
        found.append(spacing.seconds)
        spacing.count(1000)
    assert found == [0.0, 1.0, 2.0, 4.0, 8.0]
