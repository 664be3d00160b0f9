"""The verdict of an investigation names who is missing, and what is known of them."""

from __future__ import annotations

from lockstep.comm.watch import FINISHED, Alarm, Status, blame

ALARM = Alarm(by=0, count=9, what="bucket 3 of step 41", waited_s=30.0, cause="")
THERE = Status(9, "bucket 3 of step 41", "12:04:09")


def test_a_silent_rank_is_dead_or_stopped() -> None:
    error = blame(ALARM, {0: THERE, 1: THERE, 3: THERE}, 4, me=0)
    assert error.ranks == (2,)
    assert str(error).startswith("rank 2 never sent bucket 3 of step 41 (rank 0 waited 30.0 s; there: ranks 0, 1, 3).")
    assert "no sign of life" in str(error)


def test_a_rank_behind_is_told_with_its_last_place() -> None:
    error = blame(ALARM, {0: THERE, 1: Status(8, "bucket 2 of step 41", "12:04:07")}, 2, me=0)
    assert error.ranks == (1,)
    assert "Rank 1 is alive; it last reached bucket 2 of step 41 at 12:04:07" in str(error)
    mine = blame(ALARM, {0: THERE, 1: Status(8, "bucket 2 of step 41", "12:04:07")}, 2, me=1)
    assert "This rank is alive" in str(mine)


def test_a_rank_that_finished_is_told_from_one_that_raised() -> None:
    finished = blame(ALARM, {0: THERE, 1: Status(8, "bucket 2 of step 40", "12:00:00", FINISHED)}, 2, me=0)
    assert "Rank 1 finished after bucket 2 of step 40" in str(finished)
    raised = blame(ALARM, {0: THERE, 1: Status(8, "bucket 2 of step 40", "12:00:00", "ValueError: no")}, 2, me=0)
    assert "Rank 1 ended with ValueError: no" in str(raised)


def test_a_broken_connection_with_everybody_there_blames_nobody() -> None:
    error = blame(Alarm(0, 9, "bucket 3", 0.1, "Connection reset"), {0: THERE, 1: THERE}, 2, me=0)
    assert error.ranks == ()
    assert "every rank is alive" in str(error)
