"""A rank of benchmarks.gpu in which two variants fail: one raises, one dies. For tests of the supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from benchmarks.gpu import variants, worker
from benchmarks.gpu.models import Case
from benchmarks.gpu.variants import BARE, TORCH, Kernels, Site, Variant


def raises_on_the_last_rank(case: Case, site: Site) -> Iterator[None]:
    for step, _ in enumerate(TORCH(case, site)):
        if site.rank == site.size - 1 and step == 12:  # behind the warm-up
            raise RuntimeError("a planted failure")
        yield


def dies(case: Case, site: Site) -> Iterator[None]:
    for _ in BARE(case, site):
        if site.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield


variants.VARIANTS[:] = [
    Variant("bare", Kernels.ANY, BARE, averages=False),
    Variant("torch DDP", Kernels.ANY, raises_on_the_last_rank),
    Variant("Lockstep DDP", Kernels.ANY, dies, averages=False),
    Variant("bare, deterministic", Kernels.DETERMINISTIC, BARE, averages=False),
]

if __name__ == "__main__":
    worker.main()
