"""The summation tree: the result has the same bits, whichever worker adds."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InvariantError, UsageError
from lockstep.gradients.partial_sums import PartialSums, Value
from lockstep.plan.lanes import assign_lanes, cut, plan_micro_batches
from lockstep.plan.tree import Fold, carries, cover, fold, halves, nodes

lanes_ = st.integers(1, 64)


def in_one_place(values: list[float], node: tuple[int, int]) -> float:
    if node[1] - node[0] == 1:
        return values[node[0]]
    left, right = halves(node)
    return in_one_place(values, left) + in_one_place(values, right)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Any contiguous assignment, not only even ones."""
    lanes = draw(lanes_)
    cuts = sorted(draw(st.sets(st.integers(1, lanes - 1), max_size=min(15, lanes - 1)))) if lanes > 1 else []
    ends = [0, *cuts, lanes]
    return lanes, list(itertools.pairwise(ends))


@settings(deadline=None, max_examples=300)
@given(assignments(), st.integers(0, 2**32).map(Random))
def test_any_assignment_gives_the_bits_of_the_tree_in_one_place(
    assignment: tuple[int, list[tuple[int, int]]], random: Random
) -> None:
    lanes, ranges = assignment
    values = [random.gauss(0, 1) * 10 ** random.randint(-8, 8) for _ in range(lanes)]
    plan = fold(lanes, ranges)
    partials: list[float] = []
    for (first, last), held in zip(ranges, plan.held, strict=True):
        stack: list[float] = []
        for lane, carry in zip(range(first, last), carries(lanes, first, last), strict=True):
            stack.append(values[lane])
            for _ in range(carry):
                top = stack.pop()
                stack[-1] += top
        assert len(stack) == len(held)
        partials += stack
    for to, from_ in plan.adds:
        partials[to] += partials[from_]
    assert partials[plan.root] == in_one_place(values, (0, lanes))


@settings(deadline=None, max_examples=100)
@given(assignments(), st.integers(0, 2**32).map(Random), st.data())
def test_groups_of_workers_may_add_among_themselves_first(
    assignment: tuple[int, list[tuple[int, int]]], random: Random, data: st.DataObject
) -> None:
    lanes, ranges = assignment
    values = [random.gauss(0, 1) for _ in range(lanes)]
    plan = fold(lanes, ranges)
    where = [data.draw(st.integers(0, 2)) for _ in ranges]
    groups = [group for group in ([r for r in range(len(ranges)) if where[r] == g] for g in range(3)) if group]
    held = {node: in_one_place(values, node) for mine in plan.held for node in mine}
    merged = plan.merged(groups)
    partials = []
    for group, nodes_ in zip(groups, merged.held, strict=True):
        mine = [held[node] for holder in group for node in plan.held[holder]]
        adds, ends = plan.among(group)
        for to, from_ in adds:
            mine[to] += mine[from_]
        assert len(ends) == len(nodes_)
        partials += [mine[end] for end in ends]
    for to, from_ in merged.adds:
        partials[to] += partials[from_]
    assert partials[merged.root] == in_one_place(values, (0, lanes))


@given(lanes_)
def test_the_tree_splits_at_the_largest_power_of_two_below(lanes: int) -> None:
    assert len(nodes(lanes)) == 2 * lanes - 1
    for node in nodes(lanes):
        if node[1] - node[0] > 1:
            left, right = halves(node)
            size = left[1] - left[0]
            assert size & (size - 1) == 0
            assert size < node[1] - node[0] <= 2 * size
            assert (left[0], left[1], right[1]) == (node[0], right[0], node[1])


def test_a_fold_that_does_not_hold_every_lane_once_cannot_exist() -> None:
    for held in ([(0, 2)], [(2, 4)]), ([(0, 2)], [(0, 2)], [(2, 4)]), ([(0, 1)], [(2, 4)]), ([(0, 1), (1, 3)], [(3, 4)]):
        if held != ([(0, 2)], [(2, 4)]):
            with pytest.raises(InvariantError):
                Fold(4, tuple(tuple(h) for h in held))
    assert Fold(4, (((0, 2),), ((2, 4),))).adds == ((0, 1),)


@settings(deadline=None)
@given(assignments(), st.integers(0, 200))
def test_every_lane_and_every_sample_is_assigned_once(assignment: tuple[int, list[tuple[int, int]]], samples: int) -> None:
    lanes, ranges = assignment
    seen = []
    for mine in ranges:
        micro_batches = plan_micro_batches(mine, cut(samples, lanes))
        assert micro_batches
        seen += [sample for each in micro_batches for sample in range(each.start, each.stop)]
    assert seen == list(range(samples))


@given(lanes_, lanes_)
def test_lanes_are_assigned_evenly_and_more_workers_than_lanes_are_an_error(lanes: int, workers: int) -> None:
    if workers > lanes:
        with pytest.raises(UsageError, match=f"{workers} workers cannot share {lanes} lane"):
            assign_lanes(lanes, workers)
        return
    sizes = [last - first for first, last in assign_lanes(lanes, workers)]
    assert sum(sizes) == lanes
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=100)
@given(assignments(), st.data())
def test_partial_sums_add_tensors_and_lanes_that_have_none(
    assignment: tuple[int, list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Zeros are added, not skipped: -0.0 + 0.0 is 0.0 wherever that addition takes place."""
    lanes, ranges = assignment
    known = [-0.0, 1.5, 1e-30, -3.0, 1e8]
    kinds = [data.draw(st.sampled_from(["zeros", "skipped", *range(len(known))])) for _ in range(lanes)]
    values = [torch.full((3,), known[k] if isinstance(k, int) else 0.0) for k in kinds]
    plan = fold(lanes, ranges)
    expected = values[0].clone() if lanes == 1 else _sum(values, (0, lanes))
    rows: list[torch.Tensor] = []
    for (first, last), held in zip(ranges, plan.held, strict=True):
        sums = PartialSums(1, carries(lanes, first, last))
        full = [lane for lane in range(first, last) if kinds[lane] != "skipped"] or [first]
        out = [[torch.full((3,), 9.0)] for _ in held]
        at = first
        for lane in full:
            while at < lane:
                sums.skip_lane()
                at += 1
            sums.start_lane()
            at += 1
            value: Value = values[lane].clone() if isinstance(kinds[lane], int) else None
            if lane == full[-1]:
                sums.write_totals([0], [value], out, None)
            else:
                sums.add([0], [value])
                sums.end_lane()
        rows += [row[0] for row in out]
    for to, from_ in plan.adds:
        rows[to].add_(rows[from_])
    assert torch.equal(rows[plan.root].view(torch.int32), expected.view(torch.int32))


def _sum(values: list[torch.Tensor], node: tuple[int, int]) -> torch.Tensor:
    if node[1] - node[0] == 1:
        return values[node[0]]
    left, right = halves(node)
    return _sum(values, left) + _sum(values, right)


def test_the_cover_is_made_of_maximal_subtrees() -> None:
    assert cover(8, 0, 8) == ((0, 8),)
    assert cover(8, 2, 5) == ((2, 4), (4, 5))
    assert cover(8, 1, 8) == ((1, 2), (2, 4), (4, 8))
    assert cover(8, 3, 3) == ()
