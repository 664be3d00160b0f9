"""CudaGraphs on the host, with tests/fake_cuda.py: recordings that fail leave nothing behind, and no pool is used after its end."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.gradients import cuda_graph
from lockstep.gradients.cuda_graph import CannotRecord, CudaGraphs
from tests.fake_cuda import FakeCuda

HOST = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(cuda_graph, "_abandoned", [])
    return FakeCuda(monkeypatch)


def of_the_user() -> Any:
    raise ValueError("of the user")


def failures(cuda: FakeCuda) -> dict[str, Callable[[], Any]]:
    return {"invalidated": cuda.invalidate, "unseen": lambda: [cuda.invalidate_unseen()], "raised": of_the_user}


KINDS = ["invalidated", "unseen", "raised"]


def fail(recorder: CudaGraphs, body: Callable[[], Any]) -> str:
    with pytest.raises(CannotRecord) as caught:
        recorder.record(body)
    torch.cuda.empty_cache()
    torch.rand(1)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_alone", [True, False])
def test_recordings_that_fail_leave_recorder_generator_and_memory_usable(cuda: FakeCuda, kind: str, is_alone: bool) -> None:
    recorder = CudaGraphs(HOST)
    older = recorder.record(lambda: [torch.ones(1)])
    if is_alone:
        older.close()
    texts = {fail(recorder, failures(cuda)[kind]) for _ in range(4)}
    assert len(texts) == 1, "each time for the same reason"
    newer = recorder.record(lambda: [torch.ones(1)])
    newer.replay()
    if not is_alone:
        older.replay()
    assert recorder.generator == 0
    for recording in (older, newer):
        recording.close()
    torch.cuda.empty_cache()
    assert cuda.device.counts == {}, "all memory is free"
    assert cuda.device.underway == set()


@pytest.mark.parametrize("close_newest_first", [True, False])
def test_a_pool_is_shared_while_it_has_a_recording_and_not_used_again_afterwards(cuda: FakeCuda, close_newest_first: bool) -> None:
    recorder = CudaGraphs(HOST)
    first, second = (recorder.record(lambda: []) for _ in range(2))
    (pool,) = cuda.device.counts
    for recording in [second, first] if close_newest_first else [first, second]:
        recording.close()
        recording.close()  # may be called twice
    third = recorder.record(lambda: [])
    assert cuda.device.counts.keys() == {cuda.graphs[-1].pool}
    assert cuda.graphs[-1].pool != pool
    third.close()


def test_a_recording_that_is_dropped_without_close_is_not_counted(cuda: FakeCuda) -> None:
    recorder = CudaGraphs(HOST)
    recording = recorder.record(lambda: [])
    cuda.graphs[-1].reset()  # as its destructor does
    del recording
    gc.collect()
    recorder.record(lambda: []).close()


def test_a_generator_that_stays_broken_is_replaced_and_its_recordings_are_out_of_date(cuda: FakeCuda) -> None:
    recorder = CudaGraphs(HOST)
    older = recorder.record(lambda: [])
    cuda.mending_fails = True
    fail(recorder, cuda.invalidate)
    cuda.mending_fails = False
    assert recorder.generator == 1
    recorder.record(lambda: []).close()
    older.close()
    assert len(cuda_graph._abandoned) == 2, "the allocator of pinned memory still asks the failed graphs"


def test_an_interrupt_is_passed_on_and_leaves_nothing_behind(cuda: FakeCuda) -> None:
    recorder = CudaGraphs(HOST)

    def body() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder.record(body)
    recorder.record(lambda: []).close()


def test_the_first_use_of_cublas_on_a_stream_is_before_the_recording(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    multiply, begin = torch.Tensor.__matmul__, torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: happened.append("matmul") or multiply(a, b))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda *a, **k: happened.append("begin") or begin(*a, **k))
    recorder = CudaGraphs(HOST)
    recorder.record(lambda: []).close()
    recorder.record(lambda: []).close()
    assert happened == ["matmul", "begin", "begin"]


def test_a_failure_is_explained_with_the_line_of_the_user(cuda: FakeCuda) -> None:
    text = fail(CudaGraphs(HOST), of_the_user)
    assert text.startswith("ValueError: of the user (test_cuda_graph.py:")
    assert '`raise ValueError("of the user")`' in text


def test_a_wait_is_noted_with_the_line_of_the_user(cuda: FakeCuda) -> None:
    with CudaGraphs(HOST).watching("") as places:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    (place,) = places
    assert place.startswith(" (test_cuda_graph.py:")
    assert "`warnings.warn(" in place
    assert Path(warnings.__file__).name not in place


def test_other_warnings_are_passed_on(cuda: FakeCuda) -> None:
    with pytest.warns(UserWarning, match="something else"), CudaGraphs(HOST).watching("") as places:
        warnings.warn("something else", stacklevel=1)
    assert places == []


def test_a_rehearsal_leaves_nothing(cuda: FakeCuda) -> None:
    recorder, calls = CudaGraphs(HOST), []
    recorder.rehearse(lambda: [torch.ones(len(calls)) for _ in range(2) if not calls.append(1)])
    assert len(calls) == 2
    torch.cuda.empty_cache()
    assert cuda.device.counts == {}
    recorder.record(lambda: []).close()


def test_a_reason_that_is_a_sentence_is_passed_on_with_the_line(cuda: FakeCuda) -> None:
    def body() -> Any:
        raise CannotRecord("it does what nobody may")

    assert fail(CudaGraphs(HOST), body).startswith("it does what nobody may (test_cuda_graph.py:")
