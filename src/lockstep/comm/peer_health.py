"""Watches the other workers of one comm, and turns every failure into one error on all ranks.

No collective can say which rank did not take part. Therefore each worker counts the operations it has issued. If a wait times
out or breaks, the waiting rank writes the failed wait to the store. A thread on every rank polls the store; it sees the failed
wait, publishes the status of its rank, collects the others' statuses, decides who is to blame (comm/blame.py) and ends all waits of
its comm. A rank without a status is dead or stopped; a rank that has issued fewer operations is behind.

    rank whose wait fails     another waiting rank     a busy rank             a dead rank
    writes "failed"  -------> sees "failed"            sees "failed"           (does not answer)
    publishes its status      publishes its status     publishes its status
    collects statuses         collects statuses        collects statuses
    raises PeerError          raises PeerError         raises it at its next operation

Ranks that make different calls wait for each other. Therefore a rank that waits longer than ``PATIENCE_S`` publishes the names of
its operations and compares them with those of other ranks that wait. If an operation has two names, all ranks raise the same
``UsageError``. A rank that is merely behind publishes no other name, so a slow rank is never mistaken for a wrong one.

While training goes well this costs one request to the store per poll. Knows nothing of how bytes travel.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from lockstep.comm.blame import FINISHED, DifferentCalls, FailedWait, Status, again, blame, different_calls, first_difference
from lockstep.errors import PeerError, UsageError

ANSWER_TIMEOUT_S = 1.0
"""How long to wait for the status of every rank. A live worker answers within one poll."""
PATIENCE_S = 0.5
"""How long a wait lasts before the rank compares its operations with the others'. Doubles with each such wait: a store in a file
grows with each status that is published."""
_LONGEST_PATIENCE_S = 30.0
_KEPT_NAMES = 1024
_PUBLISHED_NAMES = 32


class PeerHealth:
    """The health of one comm on one rank.

    A transport calls ``begin`` before each operation, ``compare_calls`` during a long wait, and ``explain`` if a wait fails. It
    registers with ``on_failure`` how to end its waits.

    Args:
        store: The store of the comm.
        rank, size: This worker's number, and how many workers there are.
        timeout_s: How long a wait may take.
        place: Returns where the script is now, for example "run.evaluate(...) at train.py:41". Any thread may call it.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout_s: float = 600.0, place: Callable[[], str] = lambda: ""
    ) -> None:
        self.error: PeerError | UsageError | None = None
        """Why the comm failed; ``None`` while it works."""
        self.postponed_until = -math.inf
        """No wait times out before this time of the monotonic clock."""
        self.count = 0
        """How many operations this rank has issued."""
        self._rank, self._size, self._place = rank, size, place
        # A store client serves one caller at a time, and the polling thread must not wait for the worker's own calls.
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("health", own)
        self._poll_s = 0.2 * max(1.0, size / 32)
        self._issued: deque[tuple[int, str]] = deque([(0, "the start")], maxlen=_KEPT_NAMES)  # numbers and names
        self._last_at = time.time()
        self._patience_s, self._longest_patience_s = PATIENCE_S, min(_LONGEST_PATIENCE_S, timeout_s / 8)
        self._compared, self._compare_at = 0, 0.0
        self._partners = sorted({(rank + (1 << k)) % size for k in range(size.bit_length())} - {rank})
        self._end_waits: list[Callable[[], None]] = []
        self._checks: list[Callable[[], None]] = []
        self._closed, self._failed = threading.Event(), threading.Event()
        self._investigating = threading.Lock()
        self._found: PeerError | UsageError | None = None
        self._thread = threading.Thread(target=self._poll, name=f"lockstep-peer-health-{rank}", daemon=True)
        self._thread.start()

    def begin(self, what: str) -> int:
        """Count an operation and return its number. Raises the comm's error if it has failed, ``UsageError`` if it is closed."""
        self.raise_if_failed()
        if self._closed.is_set():
            raise UsageError(f"rank {self._rank} used its comm for {what} after closing it.")
        self.count += 1
        self._issued.append((self.count, what))
        self._last_at = time.time()
        return self.count

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise again(self.error)

    def time_left_s(self, began: float, limit_s: float) -> float:
        """How long a wait that ``began`` then may still take, if its timeout is ``limit_s``."""
        return max(began, self.postponed_until) + limit_s - time.monotonic()

    def compare_calls(self, number: int, waited_s: float) -> None:
        """Called every now and then during a wait for operation ``number``. If other ranks are in another call, the comm fails.

        Does nothing if the wait is short or if the last comparison was less than a poll ago.
        """
        now = time.monotonic()
        is_new = number != self._compared
        if self.error is not None or (waited_s < self._patience_s if is_new else now < self._compare_at):
            return
        self._compare_at = now + self._poll_s
        try:
            mine = self._status(number)
            if is_new:
                self._compared, self._patience_s = number, max(PATIENCE_S, min(2 * self._patience_s, self._longest_patience_s))
                self._store.set(f"waiting/{self._rank}", json.dumps(asdict(mine)))
            others = {rank: self._read(f"waiting/{rank}") for rank in self._partners if self._store.check([f"waiting/{rank}"])}
        except RuntimeError:
            return  # the store has ended: the wait ends by its timeout
        if first_difference({self._rank: mine, **others}):
            what = mine.name_of(number) or mine.what
            self._investigate(FailedWait(self._rank, number, what, waited_s, "the ranks are in different calls", differs=True))

    def explain(self, number: int, what: str, waited_s: float, cause: str | Exception = "") -> PeerError | UsageError:
        """Return the error of a failed wait for operation ``number``; the first failure of a comm is the error of all waits.

        Blocks for the answers of the other ranks, ``ANSWER_TIMEOUT_S`` or a few polls.
        """
        if self.error is None:
            text = cause if isinstance(cause, str) else (str(cause).splitlines() or [type(cause).__name__])[0][:160]
            self._investigate(FailedWait(self._rank, number, what, waited_s, text, isinstance(cause, DifferentCalls)))
        assert self.error is not None
        return again(self.error)

    def fail(self, error: PeerError | UsageError) -> None:
        """End the comm with ``error``, unless it has failed before. Any thread may call it."""
        self.error = self.error or self._found or error
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
                self._publish(self.count, FINISHED if error is None else f"{type(error).__name__}: {error}"[:200])
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
                if isinstance(self._found, UsageError):
                    self._await_agreement()
                self.fail(self._found)

    def _find_cause(self, failed: FailedWait | None) -> PeerError | UsageError:
        try:
            if failed is not None and not self._store.check(["failed"]):
                self._store.set("failed", json.dumps(asdict(failed)))
            else:
                failed = FailedWait(**json.loads(self._store.get("failed")))
            self._publish(failed.number)
            statuses = self._collect()
            return different_calls(failed, statuses, self._size) or blame(failed, statuses, self._size, self._rank)
        except RuntimeError as error:
            assert failed is not None
            reason = str(error).splitlines()[0]
            if failed.differs:
                return UsageError(
                    f"the workers are in different calls: rank {self._rank} is in {failed.what} ({self._place()}), and the other "
                    f"ranks cannot say where they are, because the store of this run does not answer ({reason})."
                )
            return PeerError(
                f"rank {self._rank} waited {failed.waited_s:.1f} s for {failed.what} ({failed.cause}) and cannot ask which rank is "
                f"missing, because the store of this run does not answer ({reason}). The process that serves the store (the "
                "launcher or rank 0) has ended: see the end of its log.",
                ranks=(0,) if self._rank != 0 else (),
            )

    def _await_agreement(self) -> None:
        """Wait until every rank knows that this is a ``UsageError``.

        The first rank that raises it ends; an agent would then make the others recover from the loss of that rank.
        """
        try:
            self._store.set(f"agreed/{self._rank}", "1")
            deadline = time.monotonic() + max(ANSWER_TIMEOUT_S, 4 * self._poll_s)
            while not self._store.check([f"agreed/{rank}" for rank in range(self._size)]):
                if time.monotonic() > deadline or self._failed.wait(0.01):
                    break
        except RuntimeError:
            pass  # the store has ended: every rank finds out by itself

    def _publish(self, number: int, ended: str = "") -> None:
        self._store.set(f"status/{self._rank}", json.dumps(asdict(self._status(number, ended))))

    def _status(self, number: int, ended: str = "") -> Status:
        """The status of this rank, with the names of its operations around ``number``."""
        issued = list(self._issued)
        around = [(n, name) for n, name in issued if n > max(0, number - _PUBLISHED_NAMES // 2)][:_PUBLISHED_NAMES]
        at = time.strftime("%H:%M:%S", time.localtime(self._last_at))
        first = around[0][0] if around else 1
        return Status(*issued[-1], at, ended, self._place(), first, [name for _, name in around])

    def _read(self, key: str) -> Status:
        return Status(**json.loads(self._store.get(key)))

    def _collect(self) -> dict[int, Status]:
        deadline = time.monotonic() + max(ANSWER_TIMEOUT_S, 4 * self._poll_s)
        statuses: dict[int, Status] = {}
        while len(statuses) < self._size:
            for rank in range(self._size):
                if rank not in statuses and self._store.check([f"status/{rank}"]):
                    statuses[rank] = self._read(f"status/{rank}")
            if time.monotonic() > deadline or self._failed.wait(0.01):
                break
        return statuses


class PeerProcesses:
    """The processes of the other workers of this machine, by process descriptors that become readable when a process ends.

    Reads the process ids that ``await_ranks`` wrote to the store. ``ids``: those of all workers, by rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self.ids = [os.getpid() if other == rank else int(store.get(f"pid/{other}")) for other in range(size)]
        for other in range(size):
            if other != rank and hasattr(os, "pidfd_open"):
                try:
                    fd = os.pidfd_open(self.ids[other])
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
