"""Checkpoints of a model on a GPU: resumed on another number of workers to the same bits; checksums on GPU and host are equal."""

from __future__ import annotations

import tempfile
import unittest

import torch
import torch.nn.functional as F

from tests.workers import run_workers


def train(rank: int, size: int, folder: str | None, stop_at: int, flip_at: int = -1) -> str:
    """Train a CNN on one GPU, over gloo, for at most ``stop_at`` steps. Returns a digest of model and optimizer."""
    import lockstep
    from lockstep.comm.plain_state import digest, flatten
    from tests.lane_jobs import CNN, dataset

    torch.cuda.set_device(0)
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


if __name__ == "__main__":
    unittest.main()
