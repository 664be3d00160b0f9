"""The error of a failed wait names the ranks that did not send, and what is known of them."""

from __future__ import annotations

from lockstep.comm.blame import FINISHED, FailedWait, Status, blame

FAILED = FailedWait(rank=0, number=9, what="bucket 3 of step 41", waited_s=30.0, cause="")
SENT = Status(9, "bucket 3 of step 41", "12:04:09")


def test_a_silent_rank_is_dead_or_stopped() -> None:
    error = blame(FAILED, {0: SENT, 1: SENT, 3: SENT}, 4, rank=0)
    assert error.ranks == (2,)
    assert str(error).startswith("rank 2 never sent bucket 3 of step 41 (rank 0 waited 30.0 s; ranks 0, 1, 3 sent it).")
    assert "does not answer" in str(error)


def test_a_rank_that_is_behind_is_named_with_its_last_operation() -> None:
    error = blame(FAILED, {0: SENT, 1: Status(8, "bucket 2 of step 41", "12:04:07")}, 2, rank=0)
    assert error.ranks == (1,)
    assert "Rank 1 is alive; it last reached bucket 2 of step 41 at 12:04:07" in str(error)
    mine = blame(FAILED, {0: SENT, 1: Status(8, "bucket 2 of step 41", "12:04:07")}, 2, rank=1)
    assert "This rank is alive" in str(mine)


def test_a_rank_that_finished_is_distinguished_from_a_rank_that_raised() -> None:
    finished = blame(FAILED, {0: SENT, 1: Status(8, "bucket 2 of step 40", "12:00:00", FINISHED)}, 2, rank=0)
    assert "Rank 1 finished after bucket 2 of step 40" in str(finished)
    raised = blame(FAILED, {0: SENT, 1: Status(8, "bucket 2 of step 40", "12:00:00", "ValueError: no")}, 2, rank=0)
    assert "Rank 1 ended with ValueError: no" in str(raised)


def test_a_broken_connection_blames_no_rank_if_every_rank_is_alive() -> None:
    error = blame(FailedWait(0, 9, "bucket 3", 0.1, "Connection reset"), {0: SENT, 1: SENT}, 2, rank=0)
    assert error.ranks == ()
    assert "every rank is alive" in str(error)
