"""The copy of a state through a device: what lies between, who waits, and what happens if the device has no memory or fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.checkpoint.device_copy import RESERVE_BYTES, SMALL_BYTES, plan_ranges
from lockstep.checkpoint.part_writer import PartWriter
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.state_layout import lay_out_state
from lockstep.checkpoint.storage import LocalStorage, open_storage
from lockstep.comm.plain_state import buffer_of
from lockstep.errors import InvariantError
from tests.snapshots import bytes_of, tensors_of_many_kinds


class FakeDevice:
    """A device on the host that holds the tensors it is given, and sends when it is waited for."""

    def __init__(self, tensors: Sequence[Tensor], free_bytes: int = 1 << 40) -> None:
        self._held, self._free_bytes = {tensor.data_ptr() for tensor in tensors if tensor.numel()}, free_bytes
        self.allocated: list[int] = []
        self.fails_with: Exception | None = None

    def holds(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._held

    def free_bytes(self) -> int:
        return self._free_bytes

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        def end() -> None:
            if self.fails_with is not None:
                raise self.fails_with
            for to, source in pairs:
                to.copy_(source)

        return end


ON_HOST = {"steps", "large on the host", "bytes of the host"}


def start(free_bytes: int = 1 << 40) -> tuple[Snapshot, FakeDevice, dict[str, Tensor], dict[str, bytes]]:
    tensors = tensors_of_many_kinds("cpu")
    device = FakeDevice([tensor for name, tensor in tensors.items() if name not in ON_HOST], free_bytes)
    snapshot, old = Snapshot(device), bytes_of(tensors)
    snapshot.copy(lay_out_state({"state": tensors}, set(), 1), 0)
    return snapshot, device, tensors, old


def stored(snapshot: Snapshot) -> dict[str, bytes]:
    plans = [(plan, entry) for plan in snapshot.file_plans for entry in plan.entries]
    return {entry.name.removeprefix("state."): bytes(buffer_of(snapshot.tensor(plan, entry))) for plan, entry in plans}


def test_what_changes_after_the_copy_is_not_in_it() -> None:
    snapshot, device, tensors, old = start()
    assert len(device.allocated) == 2  # the large tensor of the host ends a range
    for tensor in tensors.values():
        tensor.zero_()
    snapshot.wait()
    assert stored(snapshot) == old
    layout = lay_out_state({"state": tensors}, set(), 1)
    snapshot.copy(layout, 0)
    snapshot.wait()
    assert stored(snapshot) == bytes_of(tensors)


def test_a_snapshot_is_not_read_before_it_is_complete() -> None:
    snapshot, *_ = start()
    for read in (lambda: snapshot.data(snapshot.file_plans[0]), lambda: stored(snapshot)):
        with pytest.raises(InvariantError, match="before wait"):
            read()


def test_without_memory_to_spare_the_copy_is_direct() -> None:
    snapshot, device, _, old = start(free_bytes=RESERVE_BYTES)
    assert device.allocated == []
    assert stored(snapshot) == old


def test_an_allocation_that_fails_makes_the_copy_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: FakeDevice, nbytes: int) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(FakeDevice, "allocate", refuse)
    snapshot, _, _, old = start()
    assert stored(snapshot) == old


def test_a_device_that_fails_is_a_failure_of_the_checkpoint(tmp_path: Path) -> None:
    snapshot, device, tensors, _ = start()
    device.fails_with = RuntimeError("CUDA error: unspecified launch failure")
    writer = PartWriter(open_storage(tmp_path), "one", snapshot, None)
    assert writer.wait(10.0)
    assert "unspecified launch failure" in writer.result()["error"]
    device.fails_with = None
    snapshot.copy(lay_out_state({"state": tensors}, set(), 1), 0)
    snapshot.wait()
    assert stored(snapshot) == bytes_of(tensors)


def test_the_copy_has_ended_when_a_writer_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next copy could use the memory while the device still writes to it."""

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalStorage, "make_folder", refuse)
    snapshot, _, _, old = start()
    writer = PartWriter(open_storage(tmp_path), "one", snapshot, None)
    assert writer.wait(10.0)
    assert "Permission denied" in writer.result()["error"]
    assert stored(snapshot) == old


sizes = st.one_of(st.integers(0, 100), st.integers(SMALL_BYTES - 1, SMALL_BYTES + 1))


@given(st.lists(st.lists(st.tuples(sizes, st.booleans()), max_size=8), max_size=3))
def test_ranges_hold_each_tensor_once_and_no_large_one_of_the_host(files: list[list[tuple[int, bool]]]) -> None:
    places, at, index = [], 0, 0
    for file in files:
        places.append([])
        for nbytes, on_device in file:
            places[-1].append((index, at, at + nbytes, on_device))
            index, at = index + 1, at + nbytes
        at = -(-at // 4096) * 4096
    plan = plan_ranges(places)
    every = [place for file in places for place in file]
    ranged = [number for each in plan.ranges for number, _ in each.tensors]
    empty = [number for number, begin, end, on_device in every if on_device and begin == end]
    assert sorted([*ranged, *plan.small, *plan.large, *empty]) == list(range(index))
    for number in plan.large:
        _, begin, end, _ = every[number]
        assert all(end <= each.begin or begin >= each.end for each in plan.ranges)
    for each in plan.ranges:
        assert all(each.begin <= begin and every[number][2] <= each.end for number, begin in each.tensors)
