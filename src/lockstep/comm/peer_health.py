"""Watches the other workers of one comm, and turns every failure into one ``PeerError`` on all ranks.

No collective can say which rank did not take part. Therefore each worker counts the operations it has issued. If a wait times
out or breaks, the waiting rank writes the failed wait to the store. A thread on every rank polls the store; it sees the failed
wait, publishes the status of its rank, collects the others' statuses, decides who is to blame (comm/blame.py) and ends all waits of
its comm. A rank without a status is dead or stopped; a rank that has issued fewer operations is behind.

    rank whose wait fails     another waiting rank     a busy rank             a dead rank
    writes "failed"  -------> sees "failed"            sees "failed"           (does not answer)
    publishes its status      publishes its status     publishes its status
    collects statuses         collects statuses        collects statuses
    raises PeerError          raises PeerError         raises it at its next operation

While training goes well this costs one request to the store per poll. Knows nothing of how bytes travel.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from lockstep.comm.blame import FINISHED, FailedWait, Status, blame
from lockstep.errors import PeerError, UsageError

ANSWER_TIMEOUT_S = 1.0
"""How long to wait for the status of every rank. A live worker answers within one poll."""


class PeerHealth:
    """The health of one comm on one rank.

    A transport calls ``begin`` before each operation and ``explain`` if a wait fails. It registers with ``on_failure`` how to end
    its waits.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.error: PeerError | None = None
        """Why the comm failed; ``None`` while it works."""
        self.count = 0
        """How many operations this rank has issued."""
        self._rank, self._size = rank, size
        # A store client serves one caller at a time, and the polling thread must not wait for the worker's own calls.
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("health", own)
        self._poll_s = 0.2 * max(1.0, size / 32)
        self._last, self._last_at = "the start", time.time()
        self._end_waits: list[Callable[[], None]] = []
        self._checks: list[Callable[[], None]] = []
        self._closed, self._failed = threading.Event(), threading.Event()
        self._investigating = threading.Lock()
        self._found: PeerError | None = None
        self._thread = threading.Thread(target=self._poll, name=f"lockstep-peer-health-{rank}", daemon=True)
        self._thread.start()

    def begin(self, what: str) -> int:
        """Count an operation and return its number. Raises ``PeerError`` if the comm has failed, ``UsageError`` if it is closed."""
        self.raise_if_failed()
        if self._closed.is_set():
            raise UsageError(f"rank {self._rank} used its comm for {what} after closing it.")
        self.count += 1
        self._last, self._last_at = what, time.time()
        return self.count

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error.copy()

    def explain(self, number: int, what: str, waited_s: float, cause: str | Exception = "") -> PeerError:
        """Return the error of a failed wait for operation ``number``; the first failure of a comm is the error of all waits.

        Blocks for the answers of the other ranks, ``ANSWER_TIMEOUT_S`` or a few polls.
        """
        if self.error is None:
            text = cause if isinstance(cause, str) else (str(cause).splitlines() or [type(cause).__name__])[0][:160]
            self._investigate(FailedWait(self._rank, number, what, waited_s, text))
        assert self.error is not None
        return self.error.copy()

    def fail(self, error: PeerError) -> None:
        """End the comm with ``error``, unless it has failed before. Any thread may call it."""
        self.error = self.error or error
        self._failed.set()
        for end_waits in list(self._end_waits):
            end_waits()

    def on_failure(self, end_waits: Callable[[], None]) -> None:
        """Call ``end_waits`` when the comm fails, or now if it has failed; perhaps twice. It must not keep the comm alive."""
        self._end_waits.append(end_waits)
        if self.error is not None:
            end_waits()

    def on_poll(self, check: Callable[[], None]) -> None:
        """Also call ``check`` at every poll, for transports whose waits do not block the host."""
        self._checks.append(check)

    def close(self) -> None:
        """Publish how this rank ended, so that ranks that still wait for it can say so. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        self._end_waits = []  # release what the callbacks refer to
        if self._found is None:
            error = getattr(sys, "last_value", None)  # the exception that ended the interpreter, if one did
            try:
                self._publish(FINISHED if error is None else f"{type(error).__name__}: {error}"[:200])
            except RuntimeError:
                pass  # the store has ended, so no rank can read the status

    def _poll(self) -> None:
        store_answers = True
        while not self._closed.wait(self._poll_s):
            for check in self._checks:
                check()
            try:
                if store_answers and self._store.check(["failed"]):
                    self._investigate(None)
                    return
            except RuntimeError:
                store_answers = False  # from now on a wait ends by its own timeout alone

    def _investigate(self, failed: FailedWait | None) -> None:
        """Find out once why the comm failed. ``failed`` is this rank's wait, or ``None`` to read the wait of another rank."""
        with self._investigating:
            if self._found is None:
                self._found = self._find_cause(failed)
                self.fail(self._found)

    def _find_cause(self, failed: FailedWait | None) -> PeerError:
        try:
            self._publish()
            if failed is not None and not self._store.check(["failed"]):
                self._store.set("failed", json.dumps(asdict(failed)))
            else:
                failed = FailedWait(**json.loads(self._store.get("failed")))
            return blame(failed, self._collect(), self._size, self._rank)
        except RuntimeError as error:
            assert failed is not None
            reason = str(error).splitlines()[0]
            return PeerError(
                f"rank {self._rank} waited {failed.waited_s:.1f} s for {failed.what} ({failed.cause}) and cannot ask which rank is "
                f"missing, because the store of this run does not answer ({reason}). The process that serves the store (the "
                "launcher or rank 0) has ended: see the end of its log.",
                ranks=(0,) if self._rank != 0 else (),
            )

    def _publish(self, ended: str = "") -> None:
        at = time.strftime("%H:%M:%S", time.localtime(self._last_at))
        self._store.set(f"status/{self._rank}", json.dumps(asdict(Status(self.count, self._last, at, ended))))

    def _collect(self) -> dict[int, Status]:
        deadline = time.monotonic() + max(ANSWER_TIMEOUT_S, 4 * self._poll_s)
        statuses: dict[int, Status] = {}
        while len(statuses) < self._size:
            for rank in range(self._size):
                if rank not in statuses and self._store.check([f"status/{rank}"]):
                    statuses[rank] = Status(**json.loads(self._store.get(f"status/{rank}")))
            if time.monotonic() > deadline or self._failed.wait(0.01):
                break
        return statuses


class PeerProcesses:
    """The processes of the other workers of this machine, by process descriptors that become readable when a process ends.

    Reads the process ids that ``await_ranks`` wrote to the store.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        for other in range(size):
            if other != rank and hasattr(os, "pidfd_open"):
                try:
                    fd = os.pidfd_open(int(store.get(f"pid/{other}")))
                except OSError:
                    continue  # an old kernel: a dead worker is then found by timeout
                self._poll.register(fd, select.POLLIN)
                self._ranks[fd] = other

    def dead(self) -> list[int]:
        """The ranks whose processes have ended. Never blocks."""
        return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0)) if self._ranks else []

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks = {}
