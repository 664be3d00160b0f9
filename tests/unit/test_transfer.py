"""How workers that enter a generation with different progress are brought to the same point."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from lockstep.comm.base import Comm
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.recovery import Recovery
from lockstep.elastic.transfer import Aligned, WorkerProgress, align
from lockstep.errors import DeviceError, InvariantError, PeerError
from tests.threads import on_threads

CPU = torch.device("cpu")
AVERAGES = WorkerProgress(5, 1, has_averages=True)


def aligned(progress: list[WorkerProgress], results: list[dict[int, Any]] | None = None) -> list[Aligned]:
    def body(comm: Comm) -> Aligned:
        rank = comm.rank
        state = {"of": rank, "tensor": torch.full((3,), float(rank))}
        return align(comm, progress[rank], lambda: state, results[rank] if results else {}, CPU)

    return on_threads(len(progress), body)


def test_workers_at_the_same_point_receive_nothing() -> None:
    assert aligned([WorkerProgress(5, 2, 3)] * 3) == [Aligned()] * 3  # all are in the same collective point, and repeat it
    assert aligned([WorkerProgress(5, 2)] * 3) == [Aligned()] * 3


def test_a_newcomer_receives_the_state_of_a_worker_that_is_furthest() -> None:
    found = aligned([AVERAGES, WorkerProgress(6, 2), WorkerProgress()])
    assert [each.state["of"] if each.state else None for each in found] == [None, None, 1]
    assert found[2].state["tensor"].tolist() == [1.0] * 3
    assert found[2].passed == 2  # the newcomer counts from where the others are


def test_a_step_that_one_worker_has_committed_is_confirmed_for_all_that_have_its_averages() -> None:
    found = aligned([AVERAGES, WorkerProgress(6, 0, 1), AVERAGES])
    assert [each.confirmed for each in found] == [True, False, True]


def test_a_step_whose_averages_all_have_is_confirmed() -> None:
    assert [each.confirmed for each in aligned([AVERAGES] * 3)] == [True] * 3


def test_a_step_whose_averages_one_worker_lacks_is_repeated_by_all() -> None:
    found = aligned([AVERAGES, WorkerProgress(5, 1), AVERAGES])
    assert [each.confirmed for each in found] == [False] * 3


def test_a_commit_without_the_averages_of_all_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="rank 0 has committed 5 phases and lacks averages"):
        aligned([WorkerProgress(5, 1), WorkerProgress(6, 0)])


def test_a_worker_inside_a_collective_point_receives_the_result_of_one_that_has_completed_it() -> None:
    """It needed all of them to complete, so no other worker would take part if it repeated the point."""
    result = {"right": 17, "sums": torch.arange(3)}
    inside, outside = WorkerProgress(5, 2, 3), WorkerProgress(5, 3, 0)
    found = aligned([inside, outside, inside, WorkerProgress()], [{2: "old"}, {2: "old", 3: result}, {}, {}])
    for rank in (0, 2):
        assert found[rank].has_result
        assert found[rank].result["right"] == 17
        assert found[rank].result["sums"].tolist() == [0, 1, 2]
    assert not found[1].has_result
    assert not found[3].has_result


def test_the_result_belongs_to_the_point_that_the_worker_is_in() -> None:
    """A worker that has passed later points since does not send its latest result."""
    found = aligned([WorkerProgress(5, 0, 1), WorkerProgress(5, 3, 4)], [{}, {1: {"n": 69}, 3: "later"}])
    assert found == [Aligned(has_result=True, result={"n": 69}), Aligned()]


def test_some_workers_may_be_in_one_point_and_some_in_the_next() -> None:
    found = aligned([WorkerProgress(5, 1, 2), WorkerProgress(5, 2, 3), WorkerProgress(5, 2, 3)], [{}, {2: "two"}, {2: "two"}])
    assert found == [Aligned(has_result=True, result="two"), Aligned(), Aligned()]


def test_collective_points_are_counted_from_the_last_commit() -> None:
    journal = CollectiveJournal()
    journal.skip()
    journal.enter()
    assert journal.inside == 2
    journal.complete("result")
    assert (journal.passed, journal.inside, journal.results) == (2, 0, {2: "result"})
    journal.reset()
    assert (journal.passed, journal.inside, journal.results) == (0, 0, {})


def test_a_device_that_has_failed_is_named_before_anything_else_is_done_on_it() -> None:
    workers, callbacks = Mock(), Mock()
    workers.comm.close.side_effect = DeviceError("cuda:1 cannot be used by this process any more")
    callbacks.has_averages.return_value = False
    callbacks.discard_step.side_effect = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    recovery = Recovery(workers, CollectiveJournal(), cast(Any, None), CPU, callbacks)
    with pytest.raises(DeviceError, match="cuda:1"):
        recovery.recover(PeerError("rank 1 is silent"))
