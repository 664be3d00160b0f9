"""How workers that enter a generation with different progress are brought together."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.transfer import Aligned, WorkerProgress, align
from tests.threads import on_threads

CPU = torch.device("cpu")


def aligned(progress: list[WorkerProgress], results: list[dict[int, Any]] | None = None) -> list[Aligned]:
    def body(comm: Comm) -> Aligned:
        rank = comm.rank
        state = {"of": rank, "tensor": torch.full((3,), float(rank))}
        return align(comm, progress[rank], lambda: state, results[rank] if results else {}, CPU)

    return on_threads(len(progress), body)


def test_nobody_is_behind() -> None:
    assert aligned([WorkerProgress(5, 2, 3)] * 3) == [Aligned()] * 3  # all are in the same act, and repeat it
    assert aligned([WorkerProgress(5, 2), WorkerProgress(5, 2), WorkerProgress(5, 2)]) == [Aligned()] * 3


def test_whoever_missed_a_commit_or_is_new_receives_the_state() -> None:
    found = aligned([WorkerProgress(5, 1), WorkerProgress(6, 2), WorkerProgress()])
    assert [each.state["of"] if each.state else None for each in found] == [1, None, 1]
    assert found[0].state["tensor"].tolist() == [1.0] * 3
    assert found[2].passed == 2  # a newcomer comes to where the others are


def test_an_act_that_one_has_completed_counts_for_those_who_are_in_it() -> None:
    """It needed all of them to complete, so nobody would answer if they repeated it."""
    result = {"right": 17, "sums": torch.arange(3)}
    found = aligned(
        [WorkerProgress(5, 2, 3), WorkerProgress(5, 3, 0), WorkerProgress(5, 2, 3), WorkerProgress()],
        [{2: "old"}, {2: "old", 3: result}, {}, {}],
    )
    for rank in (0, 2):
        assert found[rank].has_result
        assert found[rank].result["right"] == 17
        assert found[rank].result["sums"].tolist() == [0, 1, 2]
    assert not found[1].has_result
    assert not found[3].has_result


def test_who_is_ahead_may_have_passed_other_sites_since() -> None:
    """It gives the result of the act that the other is in, not of its own last one."""
    found = aligned([WorkerProgress(5, 0, 1), WorkerProgress(5, 3, 4)], [{}, {1: {"n": 69}, 3: "later"}])
    assert found == [Aligned(has_result=True, result={"n": 69}), Aligned()]


def test_some_in_one_act_and_some_in_the_next() -> None:
    found = aligned([WorkerProgress(5, 1, 2), WorkerProgress(5, 2, 3), WorkerProgress(5, 2, 3)], [{}, {2: "two"}, {2: "two"}])
    assert found == [Aligned(has_result=True, result="two"), Aligned(), Aligned()]


def test_sites_are_counted_from_the_last_commit() -> None:
    acts = CollectiveJournal()
    acts.skip()
    acts.enter()
    assert acts.inside == 2
    acts.complete("result")
    assert (acts.passed, acts.inside, acts.results) == (2, 0, {2: "result"})
    acts.reset()
    assert (acts.passed, acts.inside, acts.results) == (0, 0, {})
