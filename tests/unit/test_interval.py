"""Interval: which texts are intervals, and when a checkpoint is due."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.plan.interval import Interval


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10min", Interval(600, "seconds")),
        (" 1.5 h ", Interval(5400, "seconds")),
        ("30 s", Interval(30, "seconds")),
        ("500 steps", Interval(500, "steps")),
        ("1 step", Interval(1, "steps")),
        ("2 epochs", Interval(2, "epochs")),
    ],
)
def test_an_interval_is_read(text: str, expected: Interval) -> None:
    assert Interval.parse(text) == expected


@pytest.mark.parametrize("text", ["", "10", "min", "-1 steps", "0 s", "0.5 steps", "10 weeks", "1 epoch 2", None, 500])
def test_what_is_not_an_interval_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an interval"):
        Interval.parse(text)


def test_steps_and_epochs_are_counted_and_seconds_are_measured() -> None:
    assert [step for step in range(1, 9) if Interval.parse("3 steps").is_due(step, 0, ends_epoch=False)] == [3, 6]
    assert [epoch for epoch in range(6) if Interval.parse("2 epochs").is_due(9, epoch, ends_epoch=True)] == [1, 3, 5]
    assert not Interval.parse("1 epoch").is_due(9, 0, ends_epoch=False)
    assert Interval.parse("10 s").has_passed(10.0)
    assert not Interval.parse("10 s").has_passed(9.9)
    assert not Interval.parse("10 s").is_due(10, 0, ends_epoch=True)
    assert not Interval.parse("1 step").has_passed(1e9)
