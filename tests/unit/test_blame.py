"""The error of a failed wait names the ranks that did not send, and what is known of them."""

from __future__ import annotations

from dataclasses import replace

from lockstep.comm.blame import FINISHED, FailedWait, Status, blame, different_calls, first_difference
from lockstep.errors import UsageError

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


def at(number: int, *names: str, place: str = "", first: int = 1) -> Status:
    return Status(number, names[-1], "12:00:00", place=place, first=first, names=names)


def test_ranks_at_different_numbers_make_no_different_calls() -> None:
    statuses = {0: at(3, "a", "b", "c"), 1: at(2, "a", "b"), 2: at(9, "c", "d", first=3)}
    assert first_difference(statuses) == 0
    assert different_calls(FAILED, statuses, 3) is None


def test_one_number_with_two_names_is_an_error_of_the_script_that_names_each_call_and_place() -> None:
    statuses = {
        0: at(2, "a", "the sums", place="run.evaluate(...) at train.py:41"),
        1: at(4, "a", "bucket 0", "bucket 1", "bucket 2", place="step 13 of loop 0"),
        2: at(3, "a", "bucket 0", "bucket 1", place="step 13 of loop 0"),
        3: at(1, "a", place="step 12 of loop 0"),
    }
    error = different_calls(FAILED, statuses, 5)
    assert isinstance(error, UsageError)
    assert str(error).startswith(
        "the workers are in different calls: rank 0 is in the sums (run.evaluate(...) at train.py:41); ranks 1, 2 are in bucket 0 "
        "(step 13 of loop 0); rank 3 is not there yet: it was last in a (step 12 of loop 0); rank 4 is in an unknown call"
    )


def test_one_name_with_two_sizes_is_an_error_of_the_script_too() -> None:
    statuses = {rank: at(1, "the sums", place="train.py:41") for rank in range(2)}
    error = different_calls(replace(FAILED, differs=True), statuses, 2)
    assert "sent different amounts of data as bucket 3 of step 41 (train.py:41)" in str(error)
