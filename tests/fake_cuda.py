"""FakeCuda: what CudaGraphs uses of torch.cuda, for tests on the host. It counts the graphs of pools, and raises as torch does.

device allocator        counts the graphs of each pool; forgets a pool of count 0 in empty_cache
allocator of pinned memory   counts the graphs of each pool; never forgets one
random generator        believes that it is recorded from capture_begin to a capture_end that succeeds
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch


class Pools:
    """One of torch's allocators: which pools it knows, and into which it records."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: dict[int, int] = {}
        self.underway: set[int] = set()

    def begin(self, pool: int) -> None:
        if self.counts.get(pool) == 0:
            raise RuntimeError(f'it->second->use_count > 0 INTERNAL ASSERT FAILED at "{self.name}"')
        if pool in self.underway:
            raise RuntimeError(f"{self.name}: already recording to mempool_id")
        self.counts[pool] = self.counts.get(pool, 0) + 1
        self.underway.add(pool)

    def end(self, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError(f"{self.name}: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, pool: int) -> None:
        self.counts[pool] -= 1
        assert self.counts[pool] >= 0


class FakeStream:
    def wait_stream(self, other: Any) -> None: ...


class FakeGenerator:
    is_recorded = False

    def clone_state(self) -> None: ...

    def graphsafe_set_state(self, state: None) -> None:
        self.is_recorded = False


class FakeCuda:
    """``invalidate()`` in a recorded function is what ``torch.cuda.synchronize()`` is on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.pinned = Pools("CUDACachingAllocator"), Pools("CachingHostAllocator")
        self.generator = FakeGenerator()
        self.graphs: list[Any] = []
        self.mending_fails = self.is_invalid = False
        handles, cuda = itertools.count(1), self

        class FakeGraph:
            is_complete = False

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                self.pool = pool
                cuda.graphs.append(self)
                cuda.generator.is_recorded, cuda.is_invalid = True, False
                cuda.device.begin(pool)
                cuda.pinned.begin(pool)

            def capture_end(self) -> None:
                if cuda.is_invalid or cuda.mending_fails:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                cuda.device.end(self.pool)
                cuda.pinned.end(self.pool)
                cuda.generator.is_recorded = False
                self.is_complete = True

            def replay(self) -> None:
                assert self.is_complete

            def reset(self) -> None:
                if self.is_complete:
                    self.is_complete = False
                    cuda.device.release(self.pool)
                    cuda.pinned.release(self.pool)

        def empty_cache() -> None:
            assert not self.device.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
            self.device.counts = {pool: count for pool, count in self.device.counts.items() if count}

        def rand(*size: int, **options: Any) -> torch.Tensor:
            if self.generator.is_recorded:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
            return torch.zeros(*size)

        current = FakeStream()
        for name, fake in {
            "CUDAGraph": FakeGraph,
            "Stream": FakeStream,
            "graph_pool_handle": lambda: next(handles),
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda: current,
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "empty_cache": empty_cache,
            "default_generators": [self.generator],
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "rand", rand)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.device.end(pool), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: self.device.release(pool), raising=False)

    def invalidate(self) -> None:
        """Do what cannot be recorded."""
        self.is_invalid = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def invalidate_unseen(self) -> None:
        """Do what cannot be recorded, and raise nothing."""
        self.is_invalid = True
