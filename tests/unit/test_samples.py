"""The order of the samples and their division over steps, lanes and workers, for any dataset, batch, lanes and workers."""

from __future__ import annotations

import tracemalloc
from array import array
from collections import Counter
from itertools import pairwise, permutations
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InvariantError, UsageError
from lockstep.plan.lanes import assign_lanes, cut, plan_micro_batches
from lockstep.plan.samples import (
    COLLATE,
    EVALUATION,
    LARGE,
    MODEL,
    SAMPLE,
    SAMPLER,
    SMALL,
    STREAM,
    Order,
    Permutation,
    batch_positions,
    lane_seed,
    sample_seed,
    steps_per_epoch,
)

seeds = st.integers(-(1 << 63), 1 << 70)
epochs = st.integers(0, 10_000)


def samples_in_steps(
    order: Order, global_batch: int, drop_last: bool, lanes: int, workers: int, first: int, last: int
) -> list[int]:
    """The samples that all workers together get in steps [first, last)."""
    samples = []
    for step in range(first, last):
        start, stop = batch_positions(len(order), global_batch, step, drop_last)
        for mine in assign_lanes(lanes, workers):
            for plan in plan_micro_batches(mine, cut(stop - start, lanes)):
                samples += order.window(start + plan.start, start + plan.stop)
    return samples


@given(seeds, epochs, st.integers(1, 3 * SMALL))
@settings(max_examples=60, deadline=None)
def test_an_order_holds_every_sample_once(seed: int, epoch: int, n: int) -> None:
    assert sorted(Permutation(seed, epoch, n).window(0, n)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, SMALL - 1, SMALL, SMALL + 1, 70 * 70 - 1, 70 * 70, 70 * 70 + 1, 70 * 71, 70 * 71 + 1])
def test_an_order_holds_every_sample_once_at_the_edges(n: int) -> None:
    assert sorted(Permutation(7, 1, n)) == list(range(n))


@given(seeds, epochs, st.integers(1, 3 * SMALL), st.data())
@settings(max_examples=40, deadline=None)
def test_any_window_is_a_slice_of_the_order(seed: int, epoch: int, n: int, data: st.DataObject) -> None:
    order = Permutation(seed, epoch, n)
    start, stop = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    whole = list(order)
    assert order.window(start, stop) == whole[start:stop]
    at = data.draw(st.integers(0, n - 1))
    assert order[at] == whole[at]
    assert len(order) == n


@pytest.mark.parametrize("n", [20, 1000, SMALL + 1, 100_000])
def test_epochs_and_seeds_give_different_orders(n: int) -> None:
    orders = {tuple(Permutation(seed, epoch, n).window(0, 20)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_an_order_is_the_same_on_every_machine() -> None:
    assert Permutation(1, 2, 10).window(0, 10) == [0, 9, 6, 8, 4, 2, 1, 3, 7, 5]
    assert Permutation(1, 2, 10_000).window(0, 5) == [4906, 2100, 3472, 7995, 6751]
    assert Permutation(1, 2, 10**12).window(0, 3) == [773932436532, 832648264176, 939934395409]


@pytest.mark.parametrize("n", [4, 5])
def test_every_permutation_is_equally_likely(n: int) -> None:
    kinds = list(permutations(range(n)))
    draws = 60 * len(kinds)
    seen = Counter(tuple(Permutation(seed, 0, n)) for seed in range(draws))
    assert set(seen) == set(kinds)
    assert chi_square([seen[kind] for kind in kinds]) < 5


@pytest.mark.parametrize(("n", "draws"), [(100, 5000), (SMALL + 900, 1500)])
def test_a_sample_may_be_at_any_position(n: int, draws: int) -> None:
    at, cells = Counter[int](), 25
    for seed in range(draws):
        order = Permutation(seed, 0, n)
        at[(order.window(0, n).index(0) if n <= SMALL else order[0]) * cells // n] += 1
    assert chi_square([at[cell] for cell in range(cells)]) < 5


def test_neighbouring_positions_are_unrelated_in_a_large_order() -> None:
    n = 1_000_000
    order = Permutation(3, 0, n).window(0, 20_000)
    gaps = Counter((after - before) % n * 20 // n for before, after in pairwise(order))
    assert chi_square([gaps[cell] for cell in range(20)]) < 5
    assert abs(sum(a < b for a, b in pairwise(order)) / len(order) - 0.5) < 0.02


def chi_square(counts: list[int]) -> float:
    """The statistic in standard deviations from its mean: about N(0, 1) if all are equally likely."""
    mean, freedom = sum(counts) / len(counts), len(counts) - 1
    return (sum((count - mean) ** 2 / mean for count in counts) - freedom) / sqrt(2 * freedom)


@pytest.mark.parametrize("n", [LARGE - 1, LARGE, 10**13])
def test_a_huge_order_stays_within_its_bounds_and_has_no_doubles(n: int) -> None:
    order = Permutation(5, 0, n)
    found = order.window(n - 500, n) + order.window(0, 500)
    assert len(set(found)) == 1000
    assert all(0 <= value < n for value in found)


def test_twenty_million_samples_need_no_list_of_them() -> None:
    tracemalloc.start()
    order = Permutation(5, 0, 20_000_000)
    order.window(10_000_000, 10_000_100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_positions_outside_are_refused_and_windows_are_clipped() -> None:
    order = Permutation(0, 0, 10)
    for position in (-1, 10):
        with pytest.raises(IndexError):
            order[position]
    assert order.window(8, 99) == [order[8], order[9]]
    with pytest.raises(InvariantError):
        Permutation(0, 0, 0)


def test_an_order_may_be_a_range_or_a_list() -> None:
    assert Order(range(9)).window(3, 6) == [3, 4, 5]
    listed = Order(array("q", [7, 7, 0, 2]))
    assert listed.window(1, 4) == [7, 0, 2]
    assert len(listed) == 4
    shuffled = Order(Permutation(1, 0, 50))
    assert sorted(shuffled.window(0, 50)) == list(range(50))
    assert len(shuffled) == 50


worlds = st.integers(1, 64).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes), st.integers(1, lanes)))


@given(st.integers(1, 800), st.integers(1, 200), st.booleans(), worlds, st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_every_sample_is_assigned_once_also_if_the_workers_change(
    n: int, global_batch: int, drop_last: bool, world: tuple[int, int, int], shuffle: bool, data: st.DataObject
) -> None:
    lanes, before, after = world
    order = Order(Permutation(1, 0, n) if shuffle else range(n))
    steps = steps_per_epoch(n, global_batch, drop_last)
    change = data.draw(st.integers(0, steps))
    early = samples_in_steps(order, global_batch, drop_last, lanes, before, 0, change)
    late = samples_in_steps(order, global_batch, drop_last, lanes, after, change, steps)
    assert early == order.window(0, min(change * global_batch, n))
    kept = n // global_batch * global_batch if drop_last else n
    assert early + late == order.window(0, kept)
    assert len(set(early + late)) == kept


def test_the_last_batch_is_short_or_dropped() -> None:
    assert [batch_positions(10, 4, step, drop_last=False) for step in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert steps_per_epoch(10, 4, drop_last=True) == 2
    assert steps_per_epoch(3, 4, drop_last=True) == 0
    assert steps_per_epoch(8, 4, drop_last=True) == steps_per_epoch(8, 4, drop_last=False) == 2
    for step, drop_last in ((3, False), (2, True), (-1, False)):
        with pytest.raises(InvariantError, match="no step"):
            batch_positions(10, 4, step, drop_last)
    for n, global_batch in ((0, 4), (4, 0)):
        with pytest.raises(UsageError, match="make no step"):
            steps_per_epoch(n, global_batch, drop_last=False)


def test_different_uses_get_different_seeds() -> None:
    salts = (SAMPLE, COLLATE, SAMPLER, STREAM, MODEL, EVALUATION)
    numbers = (0, 1, 2, 3, 255, 256, 1 << 20, 1 << 40)
    found = [sample_seed(seed, epoch, index, salt) for seed in numbers for epoch in numbers for index in numbers for salt in salts]
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 1 << 63 for seed in found)
    assert sample_seed(1, 2, 3) != lane_seed(1, 2, 3)
    assert lane_seed(1, 2, 3) == sample_seed(1, 2, 3, MODEL)


@given(seeds, epochs, st.integers(0, 1 << 40), st.integers(0, 62), st.sampled_from(["seed", "epoch", "index"]))
@settings(max_examples=200)
def test_one_bit_changes_about_half_of_a_seed(seed: int, epoch: int, index: int, bit: int, which: str) -> None:
    numbers = {"seed": seed, "epoch": epoch, "index": index}
    numbers[which] ^= 1 << bit
    assert 8 <= (sample_seed(seed, epoch, index) ^ sample_seed(**numbers)).bit_count() <= 55


@pytest.mark.parametrize("which", ["seed", "epoch", "index"])
def test_low_and_high_bits_of_neighbouring_seeds_look_random(which: str) -> None:
    numbers = {"seed": 1, "epoch": 2, "index": 3}
    found = [sample_seed(**{**numbers, which: at}) for at in range(4000)]
    for shift in (0, 31, 59):
        seen = Counter((seed >> shift) & 15 for seed in found)
        assert chi_square([seen[cell] for cell in range(16)]) < 5
