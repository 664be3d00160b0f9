"""Checkpoints of a model on a GPU: resumed on another number of workers to the same bits; checksums on GPU and host are equal."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from tests.gpu.ranks import use_gpu
from tests.workers import run_workers


def train(rank: int, size: int, folder: str | None, stop_at: int, flip_at: int = -1) -> str:
    """Train a CNN on the GPU of this rank for at most ``stop_at`` steps. Returns a digest of model and optimizer."""
    import lockstep
    from lockstep.comm.plain_state import digest, flatten
    from tests.lane_jobs import CNN, dataset

    use_gpu()
    torch.manual_seed(11)
    model = CNN().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = lockstep.Run(model, opt, lanes=4, checkpoint=folder, every="3 steps", verify_every=5)
    for x, y in run.shard(dataset(), global_batch=16, shuffle=True, epochs=3):
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
        opt.zero_grad()
        if run.committed and run.step == flip_at and rank == 1:
            next(model.parameters()).detach().view(torch.int32).view(-1)[5] ^= 1 << 11
        if run.committed and run.step == stop_at:
            break
    state = {"model": model.state_dict(), "opt": opt.state_dict()}
    found = f"{run.step} {digest(*flatten(state, 'state')).hex()}"
    run.close()
    return found


@unittest.skipUnless(torch.cuda.is_available(), "needs an NVIDIA GPU")
class Checkpoints(unittest.TestCase):
    def test_a_resumed_run_has_the_bits_of_one_that_was_never_interrupted(self) -> None:
        (alone,) = run_workers(train, 1, None, -1, deadline_s=120)
        with tempfile.TemporaryDirectory() as folder:
            run_workers(train, 2, folder, 8, deadline_s=120)
            self.assertEqual(run_workers(train, 1, folder, -1, deadline_s=120), [alone])

    def test_a_flipped_bit_is_repaired(self) -> None:
        (alone,) = run_workers(train, 1, None, -1, deadline_s=120)
        self.assertEqual(set(run_workers(train, 3, None, -1, 10, deadline_s=120)), {alone})

    def test_checksums_on_a_gpu_equal_those_on_the_host(self) -> None:
        from lockstep.checkpoint.checksum import checksums

        tensors = [torch.randn(n) for n in (0, 1, 7, 2048, 300_001)] + [torch.randn(65, 33).t(), torch.arange(5).to(torch.bfloat16)]
        self.assertEqual(checksums([t.cuda() for t in tensors]), checksums(tensors))

    def test_what_training_changes_after_a_copy_through_the_device_is_not_in_it(self) -> None:
        snapshot, tensors = copy_and_overwrite()
        self.assertIsNotNone(snapshot._device_copy)
        self.assertFalse(torch.cuda.current_stream().query(), "the host has waited for the device")
        self.assertEqual(stored(snapshot), tensors)

    def test_without_memory_to_spare_the_copy_is_direct(self) -> None:
        with mock.patch("lockstep.checkpoint.device_copy.CudaDevice.free_bytes", return_value=0):
            snapshot, tensors = copy_and_overwrite()
        self.assertIsNone(snapshot._device_copy)
        self.assertEqual(stored(snapshot), tensors)

    def test_an_allocation_that_fails_makes_the_copy_direct(self) -> None:
        with mock.patch("lockstep.checkpoint.device_copy.CudaDevice.allocate", side_effect=torch.OutOfMemoryError("full")):
            snapshot, tensors = copy_and_overwrite()
        self.assertIsNone(snapshot._device_copy)
        self.assertEqual(stored(snapshot), tensors)

    def test_a_copy_through_the_device_gives_its_memory_back(self) -> None:
        from lockstep.checkpoint.snapshot import Snapshot
        from lockstep.checkpoint.state_layout import lay_out_state

        weight, snapshot = torch.ones(20_000_000, device="cuda"), Snapshot()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            snapshot.copy(lay_out_state({"state": {"weight": weight}}, set(), 1), 0)
            self.assertGreaterEqual(torch.cuda.memory_allocated() - before, weight.nbytes)
            snapshot.wait()
            self.assertEqual(torch.cuda.memory_allocated(), before)


def copy_and_overwrite() -> tuple[Any, dict[str, bytes]]:
    """Copy tensors of many kinds behind work of the device, and overwrite them at once. Returns the snapshot and the old bytes."""
    from lockstep.checkpoint.snapshot import Snapshot
    from lockstep.checkpoint.state_layout import lay_out_state
    from tests.snapshots import bytes_of, tensors_of_many_kinds

    tensors = tensors_of_many_kinds("cuda")
    old = bytes_of(tensors)
    snapshot = Snapshot()
    layout = lay_out_state({"parameters": {}, "state": tensors}, set(), 1)
    snapshot.copy(layout, 0)  # gets the memory
    snapshot.wait()
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = torch.nn.functional.normalize(busy @ busy)
    snapshot.copy(layout, 0)
    for tensor in tensors.values():
        tensor.zero_()
    return snapshot, old


def stored(snapshot: Any) -> dict[str, bytes]:
    from lockstep.comm.plain_state import buffer_of

    snapshot.wait()
    return {
        entry.name.removeprefix("state."): bytes(buffer_of(snapshot.tensor(plan, entry)))
        for plan in snapshot.file_plans
        for entry in plan.entries
    }


if __name__ == "__main__":
    unittest.main()
