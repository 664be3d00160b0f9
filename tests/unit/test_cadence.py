"""When checkpoints are due, and who writes what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.plan.interval import Interval, parse
from lockstep.plan.parts import spread


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
def test_words_are_understood(text: str, expected: Interval) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "10", "min", "-1 steps", "0 s", "0.5 steps", "10 weeks", "1 epoch 2", None, 500])
def test_other_words_get_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="rhythm"):
        parse(text)


def test_steps_and_epochs_are_facts_of_the_run_and_seconds_of_a_clock() -> None:
    assert [step for step in range(1, 9) if parse("3 steps").is_due(step, 0, ends_epoch=False)] == [3, 6]
    assert [epoch for epoch in range(6) if parse("2 epochs").is_due(9, epoch, ends_epoch=True)] == [1, 3, 5]
    assert not parse("1 epoch").is_due(9, 0, ends_epoch=False)
    assert parse("10 s").is_late(10.0)
    assert not parse("10 s").is_late(9.9)
    assert not parse("10 s").is_due(10, 0, ends_epoch=True)
    assert not parse("1 step").is_late(1e9)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_parts_cover_all_once_and_none_is_much_larger(sizes: list[int], writers: int) -> None:
    parts = spread(sizes, writers)
    assert len(parts) == writers
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    held = [sum(sizes[index] for index in part) for part in parts]
    assert max(held) - min(held) <= max(sizes, default=0)
