"""NcclGroup with a backend that fails as NCCL does: every failure becomes the error of the comm, and nothing blocks for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import nccl_group, peer_health
from lockstep.comm.nccl_group import NcclGroup
from lockstep.comm.peer_health import PeerHealth
from lockstep.errors import PeerError, UsageError
from tests.waiting import wait_until

CPU = torch.device("cpu")


class Result:
    def __init__(self, work: Work) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.error

    def value(self) -> int:
        return 2


class Work:
    """A work of NCCL: an error of the communicator makes it "complete" although the device has not ended it."""

    def __init__(self, done: bool = True) -> None:
        self.is_done, self.error = done, False
        self.raises: Exception | None = None

    def block_current_stream(self) -> None:
        if self.raises is not None:
            raise self.raises

    def wait(self) -> None:
        raise AssertionError("a group that was built for blocking waits would block the host here")

    def is_completed(self) -> bool:
        if self.raises is not None:
            raise self.raises
        return self.is_done or self.error

    def get_future_result(self) -> Result:
        return Result(self)


class Backend:
    """``fails`` is raised by every call. ``hangs``: every call blocks until ``abort``, and then raises; ``shutdown_hangs``: so does
    a shutdown.
    """

    def __init__(
        self, fails: Exception | None = None, *, hangs: bool = False, shutdown_hangs: bool = False, abort_takes_s: float = 0.0
    ) -> None:
        self.fails, self.hangs, self._shutdown_hangs, self._abort_takes_s = fails, hangs, shutdown_hangs, abort_takes_s
        self.calls: list[str] = []
        self.aborted, self.shut_down, self.inside = threading.Event(), threading.Event(), threading.Event()
        self.works: list[Work] = []

    def __getattr__(self, name: str) -> Callable[..., Work]:
        return lambda *arguments: self._call(name)

    def _call(self, name: str) -> Work:
        self.calls.append(name)
        if self.hangs:
            self.inside.set()
            assert self.aborted.wait(10)
            raise RuntimeError("NCCL Error 6: remote process exited or there was a network error")
        if self.fails is not None:
            raise self.fails
        self.works.append(Work(done=False))
        return self.works[-1]

    def abort(self) -> None:
        time.sleep(self._abort_takes_s)
        self.aborted.set()
        for work in self.works:
            work.is_done = True  # the kernel has ended, and its output is not what it should be

    def shutdown(self) -> None:
        self.shut_down.set()
        if self._shutdown_hangs:
            assert self.aborted.wait(10)
            raise RuntimeError("NCCL Error 6: remote process exited or there was a network error")


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_health, "ANSWER_TIMEOUT_S", 0.05)


@pytest.fixture
def healths() -> Iterator[Callable[..., PeerHealth]]:
    made: list[PeerHealth] = []

    def make(timeout_s: float = 5.0) -> PeerHealth:
        made.append(PeerHealth(dist.HashStore(), 0, 2, timeout_s))
        made[-1]._poll_s = 0.02
        return made[-1]

    yield make
    for health in made:
        health.close()


def ready(health: PeerHealth, backend: Any, timeout_s: float = 5.0) -> NcclGroup:
    group = NcclGroup(health, 0, 2, CPU, timeout_s, build=lambda: backend)
    wait_until(lambda: group.is_ready, "the communicator is built", 5)
    return group


FAILURES = [
    RuntimeError("NCCL Error 6: remote process exited or there was a network error"),
    RuntimeError("NCCL Error 3: internal error - please report this issue to the NCCL developers"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0."),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("operation", ["allreduce", "broadcast", "allgather"])
def test_a_call_that_fails_is_a_lost_peer(operation: str, failure: Exception, healths: Callable[..., PeerHealth]) -> None:
    health = healths()
    group = ready(health, Backend(failure))
    with pytest.raises(PeerError, match="bucket 3 of step 41"):
        group.issue(operation, (), health.begin("bucket 3 of step 41"), "bucket 3 of step 41")
    with pytest.raises(PeerError):
        health.begin("the next operation")


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
def test_a_wait_that_fails_is_a_lost_peer(failure: Exception, healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend()
    pending = ready(health, backend).issue("allreduce", (), health.begin("bucket 3"), "bucket 3")
    backend.works[-1].raises = failure
    with pytest.raises(PeerError):
        pending.wait()


def test_too_little_memory_is_not_a_lost_peer(healths: Callable[..., PeerHealth]) -> None:
    health = healths()
    group = ready(health, Backend(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")))
    with pytest.raises(torch.OutOfMemoryError):
        group.issue("allreduce", (), 1, "bucket 3")
    assert health.error is None


class Cuda:
    """Streams and events that are complete when ``is_complete`` is set."""

    def __init__(self) -> None:
        self.is_complete = False

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> Cuda:
        return self

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        return self.is_complete


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(nccl_group, "fold_stream", lambda device: fake)
    monkeypatch.setattr(nccl_group, "fold_on_stream", lambda calls, *_: calls.alltoall_base(None, None, [], []).wait())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return fake


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
def test_a_fold_that_fails_is_a_lost_peer(failure: Exception, cuda: Cuda, healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend(failure)
    with pytest.raises(PeerError, match="bucket 3"):
        ready(health, backend).fold(torch.zeros(4), None, None, health.begin("bucket 3"), "bucket 3")  # type: ignore[arg-type]


def test_a_fold_on_a_broken_device_is_a_failure_of_the_comm(
    cuda: Cuda, healths: Callable[..., PeerHealth], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(nccl_group, "fold_on_stream", raise_)
    health = healths()
    with pytest.raises(PeerError, match="device-side assert"):
        ready(health, Backend()).fold(torch.zeros(4), None, None, health.begin("bucket 3"), "bucket 3")  # type: ignore[arg-type]


def test_a_result_is_believed_only_if_it_was_complete_before_the_comm_failed(
    cuda: Cuda, healths: Callable[..., PeerHealth]
) -> None:
    health, backend = healths(), Backend()
    group = ready(health, backend)
    group.fold(torch.zeros(4), None, None, health.begin("bucket 3"), "bucket 3").wait()  # type: ignore[arg-type]
    cuda.is_complete = True
    group.await_device()
    cuda.is_complete = False
    group.fold(torch.zeros(4), None, None, health.begin("bucket 4"), "bucket 4").wait()  # type: ignore[arg-type]

    def abort() -> None:
        health.fail(PeerError("worker 1 died"))
        assert backend.aborted.wait(5)
        cuda.is_complete = True  # as the stream of an operation that was aborted

    threading.Timer(0.05, abort).start()
    with pytest.raises(PeerError, match="worker 1 died"):
        group.await_device()
    wait_until(lambda: cuda.is_complete, "the device has ended the operation", 5)
    with pytest.raises(PeerError, match="worker 1 died"):
        group.await_device()


def test_waiting_for_the_device_ends_after_the_timeout_and_names_the_operation(
    cuda: Cuda, healths: Callable[..., PeerHealth]
) -> None:
    health = healths()
    group = ready(health, Backend(), timeout_s=0.2)
    group.fold(torch.zeros(4), None, None, health.begin("bucket 3 of step 41"), "bucket 3 of step 41")  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 1 never sent bucket 3 of step 41"):
        group.await_device()
    assert time.monotonic() - began < 2


def test_an_error_that_nccl_reports_to_nobody_is_found(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend()
    group = ready(health, backend)
    group.issue("allreduce", (), health.begin("bucket 3"), "bucket 3").wait()
    backend.works[-1].error = True  # torch's work calls that complete
    wait_until(lambda: health.error is not None, "the health thread has found it", 5)
    assert "bucket 3" in str(health.error) or "operations on the device" in str(health.error)
    with pytest.raises(PeerError):
        group.await_device()


def test_a_work_with_an_error_is_not_taken_for_complete(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend()
    group = ready(health, backend)
    health._checks.clear()  # only this thread looks
    group.issue("allreduce", (), health.begin("bucket 3"), "bucket 3").wait()
    backend.works[-1].error = True
    with pytest.raises(PeerError, match="NCCL reported an error"):
        group.await_device()


def test_an_abort_never_blocks_the_thread_that_asks_for_it(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend(abort_takes_s=1.0)
    group = ready(health, backend)
    began = time.monotonic()
    health.fail(PeerError("worker 1 died"))
    group.abort()
    assert time.monotonic() - began < 0.5
    group.close()  # waits for it
    assert backend.aborted.is_set()
    assert not backend.shut_down.is_set()


def test_a_call_that_hangs_is_ended_by_an_abort(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend(hangs=True)
    group = ready(health, backend)
    threading.Thread(target=lambda: backend.inside.wait(5) and health.fail(PeerError("worker 1 died"))).start()
    began = time.monotonic()
    with pytest.raises(PeerError, match="worker 1 died"):
        group.issue("allreduce", (), 1, "bucket 3")
    assert time.monotonic() - began < 2


def test_no_call_begins_when_the_communicator_is_about_to_be_aborted(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend()
    group = ready(health, backend)
    health.fail(PeerError("worker 1 died"))
    with pytest.raises(PeerError):
        group.issue("allreduce", (), 1, "bucket 3")
    assert backend.calls == []


def test_an_end_without_a_failure_is_a_shutdown(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend()
    group = ready(health, backend)
    group.close()
    group.close()
    assert backend.shut_down.is_set()
    assert not backend.aborted.is_set()


def test_an_end_that_hangs_is_left_alone(healths: Callable[..., PeerHealth], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_group, "END_S", 0.1)
    health, backend = healths(), Backend(abort_takes_s=1.5)
    group = ready(health, backend)
    health.fail(PeerError("worker 1 died"))
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < 1.0
    assert backend.aborted.wait(5)


def test_a_shutdown_that_hangs_is_ended_by_an_abort(healths: Callable[..., PeerHealth], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_group, "SHUTDOWN_S", 0.1)
    backend = Backend(shutdown_hangs=True)
    group = ready(healths(), backend)
    began = time.monotonic()
    group.close()
    assert backend.shut_down.is_set()
    assert backend.aborted.is_set()
    assert time.monotonic() - began < 2


def test_a_shutdown_is_ended_by_an_abort_when_the_comm_fails(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend(shutdown_hangs=True)
    group = ready(health, backend)
    health.close()  # it tells nobody of a failure any more
    threading.Thread(target=lambda: backend.shut_down.wait(5) and health.fail(PeerError("worker 1 died"))).start()
    began = time.monotonic()
    group.close()
    assert backend.aborted.is_set()
    assert time.monotonic() - began < nccl_group.SHUTDOWN_S / 2


def test_a_communicator_is_shut_down_when_the_device_has_ended_its_operations(healths: Callable[..., PeerHealth]) -> None:
    health, backend = healths(), Backend()
    group = ready(health, backend)
    group.issue("allreduce", (), health.begin("bucket 3"), "bucket 3").wait()
    closing = threading.Thread(target=group.close)
    closing.start()
    assert not backend.shut_down.wait(0.2)
    backend.works[-1].is_done = True
    closing.join(5)
    assert backend.shut_down.is_set()
    assert not backend.aborted.is_set()


def test_operations_that_never_end_are_aborted_at_the_close_and_named(
    healths: Callable[..., PeerHealth], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_group, "END_S", 0.2)
    health, backend = healths(), Backend()
    group = ready(health, backend)
    group.issue("allreduce", (), health.begin("bucket 3 of step 41"), "bucket 3 of step 41").wait()
    group.close()
    assert backend.aborted.is_set()
    assert not backend.shut_down.is_set()
    assert "bucket 3 of step 41" in caplog.text


def test_an_end_that_has_taken_too_long_is_not_waited_for_again(
    healths: Callable[..., PeerHealth], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_group, "END_S", 0.4)
    health, backend = healths(), Backend(abort_takes_s=2.0)
    group = ready(health, backend)
    health.fail(PeerError("worker 1 died"))
    group.close()
    began = time.monotonic()
    ready(healths(), Backend())
    ready(healths(), Backend())
    assert time.monotonic() - began < 0.3
    assert backend.aborted.wait(5)


# -- building ------------------------------------------------------------------------------------------


def test_a_build_that_hangs_ends_with_the_generation(healths: Callable[..., PeerHealth]) -> None:
    health, connected, backend = healths(), threading.Event(), Backend()

    def build() -> Backend:
        assert connected.wait(10)  # of a rank that is dead
        return backend

    group = NcclGroup(health, 0, 2, CPU, 5.0, build=build)
    threading.Timer(0.1, lambda: health.fail(PeerError("worker 1 died"))).start()
    began = time.monotonic()
    with pytest.raises(PeerError, match="worker 1 died"):
        group.await_ready(1, "bucket 0")
    group.close()
    assert time.monotonic() - began < 1
    connected.set()
    assert backend.aborted.wait(5)  # it is of no use to anybody
    assert not group.is_ready


def test_a_build_that_takes_too_long_is_a_lost_peer(healths: Callable[..., PeerHealth]) -> None:
    health, never = healths(), threading.Event()
    group = NcclGroup(health, 0, 2, CPU, 0.2, build=lambda: never.wait(10) and Backend())
    with pytest.raises(PeerError, match="NCCL did not connect the ranks"):
        group.await_ready(1, "bucket 0")
    never.set()


def test_a_build_that_takes_too_long_is_noticed_if_nobody_waits_for_it(
    healths: Callable[..., PeerHealth], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_group, "CONNECT_S", 0.3)
    health, never = healths(), threading.Event()
    NcclGroup(health, 0, 2, CPU, 0.2, build=lambda: never.wait(10) and Backend())
    wait_until(lambda: health.error is not None, "the health thread has found it", 5)
    never.set()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("NCCL error: unhandled system error", PeerError), ("Duplicate GPU detected : rank 0 and rank 1", UsageError)],
)
def test_a_build_that_fails_says_why(text: str, kind: type[Exception], healths: Callable[..., PeerHealth]) -> None:
    def build() -> None:
        raise dist.DistBackendError(text)

    group = NcclGroup(healths(), 0, 2, CPU, 5.0, build=build)
    with pytest.raises(kind):
        group.await_ready(1, "bucket 0")


def test_a_communicator_is_built_when_the_one_before_has_ended(healths: Callable[..., PeerHealth]) -> None:
    first, backend = healths(), Backend(abort_takes_s=0.5)
    ready(first, backend)
    first.fail(PeerError("worker 1 died"))
    began = time.monotonic()
    ready(healths(), Backend())
    assert time.monotonic() - began > 0.3  # its memory is free only then
    assert backend.aborted.is_set()


# -- a communicator of the script ----------------------------------------------------------------------


class OtherWork(Work):
    def wait(self) -> None:
        pass


class OtherBackend(Backend):
    def _call(self, name: str) -> Work:
        self.works.append(OtherWork(done=False))
        return self.works[-1]


def test_a_communicator_of_the_script_is_never_shut_down(healths: Callable[..., PeerHealth]) -> None:
    backend = OtherBackend()
    group = NcclGroup(healths(), 0, 2, CPU, 5.0, backend=backend)
    group.close()
    assert not backend.shut_down.is_set()
    assert not backend.aborted.is_set()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_communicator_of_the_script_is_aborted_only_if_an_operation_hangs_on_it(
    hangs: bool, healths: Callable[..., PeerHealth]
) -> None:
    health, backend = healths(), OtherBackend()
    group = NcclGroup(health, 0, 2, CPU, 5.0, backend=backend)
    group.issue("allreduce", (), health.begin("bucket 3"), "bucket 3").wait()
    backend.works[-1].is_done = not hangs
    health.fail(PeerError("rank 1 never sent bucket 3"))
    group.close()
    assert backend.aborted.is_set() == hangs
