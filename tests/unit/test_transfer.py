"""How workers that enter a generation from different places are brought together."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.elastic.transfer import Aligned, Place, Verdict, align
from tests.threads import on_threads

CPU = torch.device("cpu")


def aligned(places: list[Place], results: list[Any], verdicts: list[dict[int, Verdict]] | None = None) -> list[Aligned]:
    def body(comm: Comm) -> Aligned:
        rank = comm.rank
        state = {"of": rank, "tensor": torch.full((3,), float(rank))}
        return align(comm, places[rank], lambda: state, results[rank], (verdicts or [{}] * len(places))[rank], CPU)

    return on_threads(len(places), body)


def test_nobody_is_behind() -> None:
    for each in aligned([Place(5, 2, 3, 0)] * 3, ["r"] * 3):
        assert each.state is None
        assert each.verdict.acts == 3


def test_whoever_missed_a_commit_or_is_new_receives_the_state() -> None:
    found = aligned([Place(5, 2, 1, 0), Place(6, 2, 1, 0), Place()], [None] * 3)
    assert [each.state["of"] if each.state else None for each in found] == [1, None, 1]
    assert found[0].state["tensor"].tolist() == [1.0] * 3


def test_an_act_that_one_has_completed_counts_for_those_who_are_in_it() -> None:
    """It needed all of them to complete, so nobody would answer if they repeated it."""
    result = {"right": 17, "sums": torch.arange(3)}
    found = aligned([Place(5, 2, 3, 0), Place(5, 2, 4, 0), Place(5, 2, 3, 1), Place()], ["old", result, "old", None])
    for rank in (0, 2):
        assert found[rank].verdict.acts == 4
        assert found[rank].verdict.result["right"] == 17
        assert found[rank].verdict.result["sums"].tolist() == [0, 1, 2]
    assert found[1].verdict == Verdict(4, result)


def test_who_could_not_enter_the_latest_generation_hears_how_the_one_before_ended() -> None:
    """Rank 0 was in act 3 of generation 2 and never entered generation 3; rank 1 is new since then, rank 2 was there."""
    places = [Place(5, 2, 3, 0), Place(5, 3, 0, 3), Place(5, 3, 0, 0)]
    found = aligned(places, [None] * 3, [{}, {}, {1: Verdict(9), 2: Verdict(4, {"n": 69})}])
    assert found[0].verdict == Verdict(4, {"n": 69})
    assert found[1].verdict.acts == found[2].verdict.acts == 0


def test_acts_of_different_generations_are_not_compared() -> None:
    found = aligned([Place(5, 2, 30, 0), Place(5, 3, 1, 0)], [None, "second"], [{}, {2: Verdict(30)}])
    assert found[0].verdict == Verdict(30, None)
    assert found[1].verdict == Verdict(1, "second")
