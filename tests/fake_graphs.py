"""FakeGraphs: a GraphRecorder for tests without a GPU. A "replay" calls the recorded function again, on the same tensors.

As a CUDA graph it does nothing when it records, writes its results to the same memory at each replay, and reads what lies at the
addresses of the recording. Before each replay the results are overwritten by NaN, and those of the recordings that were made after
it too, since they may lie where it had its activations: who still uses them is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import lockstep
from lockstep.data.seeding import preserved_randomness
from lockstep.gradients.cuda_graph import Results


class FakeRecording:
    def __init__(self, body: Callable[[], Results], results: Results, pool: list[FakeRecording]) -> None:
        self.results, self._body, self._pool, self.is_closed = results, body, pool, False
        pool.append(self)

    def replay(self) -> None:
        assert not self.is_closed
        for recording in self._pool[self._pool.index(self) :]:
            recording.spoil()
        with torch.enable_grad():
            new = self._body()
        with torch.no_grad():
            for tensor, value in zip(self.results, new, strict=True):
                assert (tensor is None) == (value is None)
                if tensor is not None and value is not None:
                    tensor.copy_(value)

    def spoil(self) -> None:
        with torch.no_grad():
            for tensor in self.results:
                if tensor is not None:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    def close(self) -> None:
        self.is_closed, self.results = True, []


class FakeGraphs:
    runs_on_host = True
    generator = 0

    def __init__(self, tensors: Callable[[], list[Tensor]]) -> None:
        self._tensors = tensors
        self.recorded: list[FakeRecording] = []
        self.waits: list[str] = []
        self.fail: Exception | None = None
        self.fail_rehearsals: Exception | None = None

    def record(self, body: Callable[[], Results]) -> FakeRecording:
        before = [(tensor, tensor.detach().clone()) for tensor in self._tensors()]
        try:
            with preserved_randomness():
                results = body()
            if self.fail is not None:
                raise self.fail
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
        FakeRecording(body, results, self.recorded).spoil()
        return self.recorded[-1]

    def rehearse(self, body: Callable[[], Results]) -> None:
        self.record(body)
        self.recorded.pop().close()
        if self.fail_rehearsals is not None:
            raise self.fail_rehearsals

    @contextmanager
    def watching(self, transparent: str) -> Iterator[list[str]]:
        yield self.waits


def capture_on_host(run: lockstep.Run) -> FakeGraphs:
    """Let ``run.capture`` record on the host. Call it before the loop."""

    def tensors() -> list[Tensor]:
        parts = run._parts
        found = [*run.model.parameters(), *run.model.buffers()]
        found += [param.grad for param in run.model.parameters() if param.grad is not None]
        for optimizer in parts.gate.optimizers:
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, Tensor)]
        for scaler in parts.gate.enabled_scalers:
            found += [each for each in (scaler._scale, scaler._growth_tracker) if each is not None]
        return found

    recorder = FakeGraphs(tensors)
    run._parts.captures.recorder = recorder
    return recorder
