"""Finds out who is missing, and makes sure that everybody stops waiting. One thread per comm.

No collective can say who did not come. So each worker counts the operations it has launched, and
when a wait runs out or breaks, the waiter puts an *alarm* into the store; every worker's watch
thread sees it, publishes how far that worker has come, reads the others' answers, and hands the
verdict to the comm, which ends all waits. A worker without an answer is dead or stopped; one with
fewer operations is behind. Nothing of this happens while training goes well, but for one look at
the store now and then.

    waiting rank        other waiting rank        busy rank            dead rank
    wait runs out
    alarm ------------> sees alarm                sees alarm           (silent)
    status              status                    status
    verdict             verdict                   verdict, comm broken

The watch owns its own store connection: a store client serves one caller at a time.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from lockstep.errors import PeerError

FINISHED = "finished"
GRACE_S = 1.0
"""How long an investigation waits for answers. A live worker answers within one poll."""


@dataclass(frozen=True)
class Status:
    """How far one worker has come: its last launched operation, and when; ``left`` says how it ended, if it did."""

    count: int
    what: str
    at: str
    left: str = ""


@dataclass(frozen=True)
class Alarm:
    """What somebody waited for in vain: operation number ``count``."""

    by: int
    count: int
    what: str
    waited_s: float
    cause: str
    """Empty: nothing happened, and the timeout passed."""


def blame(alarm: Alarm, statuses: Mapping[int, Status], size: int, me: int) -> PeerError:
    """The verdict that rank ``me`` raises. Pure."""
    silent = [r for r in range(size) if r not in statuses]
    behind = [r for r in range(size) if r in statuses and statuses[r].count < alarm.count]
    there = [r for r in range(size) if r not in silent and r not in behind]
    missing = sorted(silent + behind)
    if not missing:
        return PeerError(
            f"the connection broke during {alarm.what} although every rank is alive and has sent it ({alarm.cause}). "
            "A network fault, or ranks whose tensors for it differ in size."
        )
    head = (
        f"{_ranks(missing)} never sent {alarm.what} "
        f"({_ranks([alarm.by])} waited {alarm.waited_s:.1f} s; there: {_ranks(there) if there else 'nobody'})."
    )
    tail = []
    for rank in missing:
        status = statuses.get(rank)
        if status is None:
            tail.append(f"Rank {rank} gives no sign of life: it died, was killed or is stopped; see the end of its log.")
        elif status.left == FINISHED:
            tail.append(
                f"Rank {rank} finished after {status.what} ({status.at}): its loop was shorter. "
                "Give every rank as many batches, or wrap the loop in join()."
            )
        elif status.left:
            tail.append(f"Rank {rank} ended with {status.left} after {status.what} ({status.at}); its log has the traceback.")
        else:
            whose = "This rank" if rank == me else f"Rank {rank}"
            tail.append(f"{whose} is alive; it last reached {status.what} at {status.at} and then did something else.")
    if alarm.cause:
        tail.append(f"({alarm.cause})")
    return PeerError(" ".join([head, *tail]), missing, hung=not alarm.cause)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Watch:
    """Counts this worker's operations and answers alarms. ``on_verdict`` is called once, from any thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, on_verdict: Callable[[PeerError], None]) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._on_verdict = on_verdict
        self._poll_s = 0.2 * max(1.0, size / 32)
        self.count = 0
        self._what, self._when = "the start", time.time()
        self._stop = threading.Event()
        self._settled = threading.Event()
        self._investigating = threading.Lock()
        self._verdict: PeerError | None = None
        self._checks: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name=f"lockstep-watch-{rank}", daemon=True)
        self._thread.start()

    def launched(self, what: str) -> int:
        """Called for every operation: its number. The hot path: two assignments and a clock read."""
        self.count += 1
        self._what, self._when = what, time.time()
        return self.count

    def each_poll(self, check: Callable[[], None]) -> None:
        """Also call ``check`` at every poll (for transports whose waits do not block the host)."""
        self._checks.append(check)

    def alarm(self, count: int, what: str, waited_s: float, cause: str) -> PeerError:
        """Tell everybody, find out who is missing. Blocks for the grace time at most, plus the store's answer."""
        return self._investigate(Alarm(self._rank, count, what, waited_s, cause))

    def settle(self) -> None:
        """The comm knows why it ended: an investigation under way need not wait for answers."""
        self._settled.set()

    def close(self) -> None:
        """Say goodbye, so that whoever still waits for us knows that we left on purpose."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=5.0)
        if self._verdict is None:
            try:
                error = getattr(sys, "last_value", None)  # what ended the interpreter, if anything did
                self._publish(FINISHED if error is None else f"{type(error).__name__}: {error}"[:200])
            except RuntimeError:
                pass  # the store is gone: nobody is left to read it

    def _run(self) -> None:
        store_is_there = True
        while not self._stop.wait(self._poll_s):
            for check in self._checks:
                check()
            try:
                if store_is_there and self._store.check(["alarm"]):
                    self._investigate(None)
                    return
            except RuntimeError:
                # The store is gone, and with it the side channel: waits now end by their own timeout.
                store_is_there = False

    def _investigate(self, alarm: Alarm | None) -> PeerError:
        with self._investigating:
            if self._verdict is None:
                self._verdict = self._find_verdict(alarm)
                self._on_verdict(self._verdict)
            return self._verdict

    def _find_verdict(self, alarm: Alarm | None) -> PeerError:
        try:
            self._publish()
            if alarm is not None and not self._store.check(["alarm"]):
                self._store.set("alarm", json.dumps(asdict(alarm)))
            else:
                alarm = Alarm(**json.loads(self._store.get("alarm")))
            return blame(alarm, self._collect(), self._size, self._rank)
        except RuntimeError as error:
            assert alarm is not None
            reason = str(error).splitlines()[0]
            return PeerError(
                f"rank {self._rank} waited {alarm.waited_s:.1f} s for {alarm.what} ({alarm.cause}), and cannot ask who is "
                f"missing: the store where the workers met is gone ({reason}). Whoever serves it has ended "
                "(the launcher, or rank 0): see the end of its log.",
                ranks=(0,) if self._rank != 0 else (),
            )

    def _publish(self, left: str = "") -> None:
        at = time.strftime("%H:%M:%S", time.localtime(self._when))
        self._store.set(f"status/{self._rank}", json.dumps(asdict(Status(self.count, self._what, at, left))))

    def _collect(self) -> dict[int, Status]:
        deadline = time.monotonic() + max(GRACE_S, 4 * self._poll_s)
        statuses: dict[int, Status] = {}
        while len(statuses) < self._size:
            for rank in range(self._size):
                if rank not in statuses and self._store.check([f"status/{rank}"]):
                    statuses[rank] = Status(**json.loads(self._store.get(f"status/{rank}")))
            if time.monotonic() > deadline or self._settled.wait(0.01):
                break
        return statuses
