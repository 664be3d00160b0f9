"""Properties of the bucket plan, for any parameters in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InvariantError, UsageError
from lockstep.plan.buckets import ALIGN_BYTES, BucketPlan, BucketSpec, ParamSpec, Slot, plan_buckets

specs = st.lists(
    st.builds(
        lambda numel, kind, device: ParamSpec("p", numel, kind[1], kind[0], device),
        st.integers(0, 5000),
        st.sampled_from([("float32", 4), ("float64", 8), ("bfloat16", 2), ("complex64", 8)]),
        st.sampled_from(["cuda:0", "cpu"]),
    ),
    min_size=1,
    max_size=40,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], int, int]:
    chosen = draw(specs)
    order = draw(st.permutations(range(len(chosen))))
    kept = draw(st.integers(1, len(order)))
    return chosen, list(order[:kept]), draw(st.integers(1, 30000)), draw(st.integers(1, 30000))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_planned_parameter_lies_in_exactly_one_slot_of_its_own_kind(
    case: tuple[list[ParamSpec], list[int], int, int],
) -> None:
    chosen, order, cap, edge = case
    plan = plan_buckets(chosen, order, cap, edge)
    placed = [slot.param for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(placed) == sorted(order)
    for bucket in plan.buckets:
        for slot in bucket.slots:
            assert (chosen[slot.param].dtype, chosen[slot.param].device) == (bucket.dtype, bucket.device)
            assert slot.numel == chosen[slot.param].numel
            assert slot.offset * bucket.itemsize % ALIGN_BYTES == 0


@settings(max_examples=300, deadline=None)
@given(cases())
def test_buckets_respect_the_cap_and_the_ready_order(case: tuple[list[ParamSpec], list[int], int, int]) -> None:
    chosen, order, cap, edge = case
    plan = plan_buckets(chosen, order, cap, edge)
    position = {param: at for at, param in enumerate(order)}
    ends = []
    for bucket in plan.buckets:
        assert bucket.slots[-1].offset * bucket.itemsize < cap, "closed by the parameter that reached the cap"
        places = [position[slot.param] for slot in bucket.slots]
        assert places == sorted(places)
        ends.append(places[-1])
    assert ends == sorted(ends)
    assert plan.buckets[0].slots[-1].offset * plan.buckets[0].itemsize < min(edge, cap) or len(plan.buckets) == 1


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_plan_depends_on_nothing_but_its_inputs(case: tuple[list[ParamSpec], list[int], int, int]) -> None:
    chosen, order, cap, edge = case
    first = plan_buckets(chosen, order, cap, edge)
    assert first == plan_buckets(list(chosen), list(order), cap, edge)
    if len(order) > 1:
        assert plan_buckets(chosen, order[:-1], cap, edge) != first


def mb(n: float) -> ParamSpec:
    return ParamSpec("p", int(n * (1 << 20) / 4), 4, "float32", "cpu")


def test_a_large_model_gets_a_small_first_bucket_full_ones_and_a_ramp_down_to_a_small_last_one() -> None:
    plan = plan_buckets([mb(0.5)] * 200, range(200), 25 << 20)
    sizes = [bucket.numel * 4 / (1 << 20) for bucket in plan.buckets]
    assert sizes == [1.0, 25.0, 25.0, 25.0, 3.0, 16.0, 4.0, 1.0], sizes
    assert [bucket.presence for bucket in plan.buckets] == [0] * 7 + [200]


def test_a_small_model_is_one_bucket() -> None:
    assert len(plan_buckets([mb(0.1)] * 5, range(5), 25 << 20).buckets) == 1


def test_a_parameter_larger_than_the_cap_closes_its_bucket() -> None:
    plan = plan_buckets([mb(1), mb(100), mb(1)], range(3), 25 << 20)
    assert [len(bucket.slots) for bucket in plan.buckets] == [1, 1, 1]


def test_a_giant_at_the_end_gets_no_ramp_before_it() -> None:
    plan = plan_buckets([mb(10)] * 10 + [mb(150)], range(11), 25 << 20)
    assert [round(bucket.numel * 4 / (1 << 20)) for bucket in plan.buckets] == [10, 30, 30, 30, 150]


def test_a_wrong_plan_cannot_exist() -> None:
    slot = Slot(0, 0, 16)
    good = BucketSpec("float32", "cpu", 4, (slot,), 16, presence=1)
    BucketPlan((0,), (good,))
    for wrong in (
        lambda: BucketPlan((0, 1), (good,)),
        lambda: BucketPlan((0,), (good, good)),
        lambda: BucketPlan((0,), (BucketSpec("float32", "cpu", 4, (slot,), 16),)),
        lambda: BucketSpec("float32", "cpu", 4, (slot, Slot(1, 8, 16)), 64),
        lambda: BucketSpec("float32", "cpu", 4, (Slot(0, 3, 4),), 64),
        lambda: BucketSpec("float32", "cpu", 4, (slot,), 8),
        lambda: plan_buckets([mb(1)], [0, 0], 1),
        lambda: plan_buckets([mb(1)], [1], 1),
    ):
        with pytest.raises(InvariantError):
            wrong()
    with pytest.raises(UsageError):
        plan_buckets([mb(1)], [0], 0)
