"""The same bits on one GPU: 1 worker against 2 and 4 that share it over gloo. Standard unittest, as test_gpu.py."""

from __future__ import annotations

import unittest

import torch

from tests.lane_jobs import scenario
from tests.workers import run_workers


@unittest.skipUnless(torch.cuda.is_available(), "needs an NVIDIA GPU")
class Lanes(unittest.TestCase):
    def test_workers_that_share_a_gpu_end_with_the_bits_of_one(self) -> None:
        for name in ("mlp", "cnn", "transformer", "sparse", "scaled", "weighed", "partly_used", "halves"):
            with self.subTest(name):
                (alone,) = run_workers(scenario, 1, name, "cuda:0", deadline_s=120)
                for size in (2, 4):
                    self.assertEqual(set(run_workers(scenario, size, name, "cuda:0", deadline_s=120)), {alone})


if __name__ == "__main__":
    unittest.main()
