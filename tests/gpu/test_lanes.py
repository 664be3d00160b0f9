"""The same bits on GPUs: 1 worker against 2 and 4, over gloo and over NCCL. Standard unittest, as test_gpu.py."""

from __future__ import annotations

import functools
import unittest
from typing import Any

from tests.gpu.ranks import HAS_GPU, use_gpu, why_no_nccl
from tests.lane_jobs import scenario
from tests.workers import run_workers

NAMES = ("mlp", "cnn", "transformer", "sparse", "scaled", "weighed", "partly_used", "halves")


def digests(rank: int, size: int) -> dict[str, str]:
    """Train all scenarios, one after the other: starting a process with a GPU takes longer than training."""
    device = str(use_gpu())
    return {name: scenario(rank, size, name, device) for name in NAMES}


@functools.cache
def digests_of_one() -> dict[str, str]:
    (found,) = run_workers(digests, 1, deadline_s=240)
    return found


class Lanes:
    """Compares the digests of several workers with those of one. ``carrier``: over what they meet."""

    carrier: str

    def compare(self: Any, size: int) -> None:
        alone = digests_of_one()
        found = run_workers(digests, size, deadline_s=300, env={"LOCKSTEP_COMM": self.carrier})
        for name in NAMES:
            with self.subTest(name):
                self.assertEqual({each[name] for each in found}, {alone[name]})

    def test_two_workers_end_with_the_bits_of_one(self) -> None:
        self.compare(2)

    def test_four_workers_end_with_the_bits_of_one(self) -> None:
        self.compare(4)


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
class LanesOverGloo(Lanes, unittest.TestCase):
    carrier = "gloo"


@unittest.skipUnless(HAS_GPU, "no NVIDIA GPU on this machine")
class LanesOverNccl(Lanes, unittest.TestCase):
    carrier = "nccl"

    def compare(self, size: int) -> None:
        if reason := why_no_nccl(size):
            self.skipTest(reason)
        super().compare(size)


if __name__ == "__main__":
    unittest.main()
