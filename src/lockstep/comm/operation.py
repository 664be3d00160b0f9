"""Operations in flight as generators: an operation yields instead of blocking, and later calls into the comm advance it.

Knows nothing of how bytes travel. A comm is the ``Driver`` of its operations: it keeps those in flight, advances all of them
whenever it is called, and knows how to wait for one.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

from lockstep.comm.peer_health import PeerHealth

OpGenerator = Generator[Any, None, None]
"""The body of an operation. Yields the torch work it waits for (or a ``FinalWork``), or None if it must be polled."""


class FinalWork(NamedTuple):
    """A torch work after which the operation has nothing left to do: it completes even if this thread does not advance it."""

    work: Any


class Driver(Protocol):
    """What an operation needs from its comm."""

    health: PeerHealth

    def start(self, body: OpGenerator, number: int, what: str) -> Operation:
        """Put an operation in flight and run it until it would block."""

    def advance(self) -> bool:
        """Advance every operation in flight without blocking; whether any is still in flight."""

    def wait_for(self, operation: Operation, timeout_s: float | None) -> None:
        """Block until ``operation`` is done, and advance all others meanwhile. Raises ``PeerError``."""


class Operation:
    """An operation in flight: the ``Pending`` of a generator."""

    __slots__ = ("_body", "_done", "_driver", "_error", "done_ns", "number", "waits_for", "what")

    def __init__(self, driver: Driver, body: OpGenerator, number: int, what: str) -> None:
        self._driver, self._body, self.number, self.what = driver, body, number, what
        self.waits_for: Any = None
        self.done_ns = 0
        """When the operation was seen to be done (time.monotonic_ns); 0 before."""
        self._done = False
        self._error: RuntimeError | None = None

    def advance(self) -> bool:
        """Run until the operation would block or is done; whether it is done."""
        if not self._done:
            try:
                self.waits_for = next(self._body)
            except StopIteration:
                self._done, self.done_ns = True, time.monotonic_ns()
            except RuntimeError as error:  # raised by this operation's wait, not by the unrelated call that advanced it
                self._error, self._done = error, True
                self._explain(error)
        return self._done

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._done:
            self._driver.wait_for(self, timeout_s)
        if self._error is not None:
            raise self._explain(self._error) from self._error

    def done(self) -> bool:
        return self._done

    def _explain(self, error: RuntimeError) -> Exception:
        return self._driver.health.explain(self.number, self.what, 0.0, error)


class Done:
    """The ``Pending`` of an operation that was done when it was issued."""

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True


def tag_of(what: str, nbytes: int) -> int:
    """A number by which ranks compare the name and the size of an operation: equal exactly if both are equal, but for chance."""
    return zlib.crc32(what.encode()) << 31 ^ nbytes


class InOrder:
    """Makes operations take a stage in the order in which they were issued: a group matches collectives by their order."""

    def __init__(self) -> None:
        self._tickets = self._now = 0

    def take_ticket(self) -> int:
        """Called when an operation is issued."""
        self._tickets += 1
        return self._tickets - 1

    def wait_for(self, ticket: int) -> OpGenerator:
        """Yield until every earlier ticket's operation has called ``next_ticket``."""
        while self._now != ticket:
            yield

    def next_ticket(self) -> None:
        """Called when an operation has issued the last collective of the stage."""
        self._now += 1


def wait_for_works(works: Sequence[Any], final: bool = False) -> OpGenerator:
    """Yield until torch works are complete; raises their errors. ``final``: the operation ends with them."""
    for work in works:
        while not work.is_completed():
            yield FinalWork(work) if final else work
        work.wait()
