"""Workers die over NCCL at known places. Standard unittest, as test_gpu.py; the cases are in tests/recovery_cases.py."""

from __future__ import annotations

import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from tests import chaos_gpu, recovery_cases
from tests.gpu.ranks import HAS_GPU, why_no_nccl


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
class RecoveryOverNccl(unittest.TestCase):
    folder: Any
    want: str
    before_mb: int

    @classmethod
    def setUpClass(cls) -> None:
        if reason := why_no_nccl(3):
            raise unittest.SkipTest(reason)
        cls.folder = tempfile.TemporaryDirectory(prefix="lockstep-recovery-", ignore_cleanup_errors=True)
        cls.addClassCleanup(cls.folder.cleanup)
        cls.before_mb = chaos_gpu.free_mb()
        cls.want = recovery_cases.result_of_one(Path(cls.folder.name, "alone"), cpu=False)

    def survive(self, fault: str, workers: int) -> None:
        began = time.monotonic()
        recovery_cases.require_survival(Path(self.folder.name, fault), fault, workers, self.want, cpu=False)
        print(f"{fault}: {time.monotonic() - began:.1f} s", end=" ", flush=True)

    def test_a_worker_dies_in_its_forward(self) -> None:
        self.survive("forward", 3)

    def test_a_worker_dies_with_a_fold_pending(self) -> None:
        self.survive("fold", 3)

    def test_a_worker_dies_behind_the_barrier_before_its_gpu_has_sent_anything(self) -> None:
        """The others have heard from it on the host, and must not believe the averages that they do not have."""
        self.survive("barrier", 2)

    def test_a_worker_dies_while_the_communicator_is_built(self) -> None:
        self.survive("connecting", 3)

    def test_a_worker_whose_kernel_did_something_illegal_is_replaced(self) -> None:
        self.survive("assert", 2)

    def test_a_kernel_that_does_something_illegal_on_every_worker_ends_the_run(self) -> None:
        recovery_cases.require_end(Path(self.folder.name, "everywhere"), cpu=False)

    def test_a_dead_generation_leaves_no_memory_in_the_survivors(self) -> None:
        """NCCL's memory is none of torch's tensors, so the memory of the whole GPU is compared, while the run goes on."""
        used = recovery_cases.memory_after_recoveries(Path(self.folder.name, "memory"), 2, 6, cpu=False)
        print(f"MB used after each recovery: {[each >> 20 for each in used]}", end=" ", flush=True)
        self.assertLessEqual(used[-1] - used[0], chaos_gpu.LEFT_MB << 20)

    def test_zzz_nothing_is_left_on_the_gpu(self) -> None:
        """Whatever ran before: the name of this test makes it one of the last."""
        self.assertLessEqual(chaos_gpu.memory_left(self.before_mb), chaos_gpu.LEFT_MB)


if __name__ == "__main__":
    unittest.main()
