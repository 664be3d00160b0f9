"""Decides why a wait failed, and words the error. Pure: knows no store, no clock and no thread.

Two kinds of failure: a rank did not send (``PeerError``, which a run recovers from), or the ranks made different calls
(``UsageError``, which is the script's fault and would come again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import PeerError, UsageError

FINISHED = "finished"


@dataclass(frozen=True)
class Status:
    """How far one rank has come: how many operations it has issued, the last of them, and when."""

    count: int
    what: str
    at: str
    ended: str = ""
    """How the rank ended: empty while it runs, ``FINISHED``, or the exception that ended it."""
    place: str = ""
    """Where the script of the rank is, for example "run.evaluate(...) at train.py:41"; empty if not known."""
    first: int = 1
    names: Sequence[str] = ()
    """The names of some operations of the rank in order; ``first`` is the number of the first of them."""

    def name_of(self, number: int) -> str | None:
        """The name of operation ``number``; None if it is not among ``names``."""
        at = number - self.first
        return self.names[at] if 0 <= at < len(self.names) else None


class DifferentCalls(RuntimeError):
    """Raised by a transport that sees that the ranks are in different operations, or send different amounts of data."""


@dataclass(frozen=True)
class FailedWait:
    """The wait of ``rank`` for operation ``number``, which failed."""

    rank: int
    number: int
    what: str
    waited_s: float
    cause: str
    """The transport's error; empty if the timeout passed without one."""
    differs: bool = False
    """Whether the transport raised ``DifferentCalls``."""


def blame(failed: FailedWait, statuses: Mapping[int, Status], size: int, rank: int) -> PeerError:
    """Return the error that ``rank`` raises for a failed wait, given the status of every rank that answered."""
    behind = [r for r in range(size) if r not in statuses or statuses[r].count < failed.number]
    if not behind:
        return PeerError(
            f"the connection broke during {failed.what} although every rank is alive and has sent it ({failed.cause}). "
            "Either the network failed, or the ranks passed tensors of different sizes."
        )
    sentences = [never_sent(failed, behind, [r for r in range(size) if r not in behind])]
    sentences += [_describe(r, statuses.get(r), "This rank" if r == rank else f"Rank {r}") for r in behind]
    if failed.cause:
        sentences.append(f"({failed.cause})")
    return PeerError(" ".join(sentences), behind, hung=not failed.cause)


def first_difference(statuses: Mapping[int, Status]) -> int:
    """The smallest number of an operation that has different names on two ranks; 0 if no name differs.

    All ranks issue the same operations in the same order, so equal numbers must have equal names. How far the ranks have come does
    not matter: a name that was published once stays true.
    """
    numbers = sorted({status.first + at for status in statuses.values() for at in range(len(status.names))})
    for number in numbers:
        if len({status.name_of(number) for status in statuses.values()} - {None}) > 1:
            return number
    return 0


def different_calls(failed: FailedWait, statuses: Mapping[int, Status], size: int) -> UsageError | None:
    """Return the error that names each rank's call if the ranks made different calls; None if they did not."""
    number = first_difference(statuses)
    if not number and not failed.differs:
        return None
    if not number and len(statuses) == size:
        places = sorted({status.place for status in statuses.values() if status.place})
        where = f" ({'; '.join(places)})" if places else ""
        return UsageError(
            f"the workers sent different amounts of data as {failed.what}{where}. Pass data of the same number and kind on every "
            "worker."
        )
    calls: dict[str, list[int]] = {}
    for rank in range(size):
        calls.setdefault(_call_of(statuses.get(rank), number), []).append(rank)
    each = "; ".join(f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {call}" for call, ranks in calls.items())
    return UsageError(
        f"the workers are in different calls: {each}. All workers must make the same calls in the same order: look for a call that "
        "only some workers reach (behind an `if`, a `break` or an `except`), and let all workers make it."
    )


def again(error: PeerError | UsageError) -> PeerError | UsageError:
    """Return an equal exception without a traceback, so that the same failure can be raised in several places."""
    return error.copy() if isinstance(error, PeerError) else UsageError(str(error))


def _call_of(status: Status | None, number: int) -> str:
    """Completes "rank 2 is ..."."""
    if status is None:
        return "in an unknown call (it does not answer)"
    place = f" ({status.place})" if status.place else ""
    name = status.name_of(number)
    return f"in {name}{place}" if name is not None else f"not there yet: it was last in {status.what}{place}"


def never_sent(failed: FailedWait, missing: Sequence[int], sent: Sequence[int]) -> str:
    """The first sentence of the error: who did not send, who waited for how long, and who sent."""
    others = name_ranks(sent) if sent else "no rank"
    return f"{name_ranks(missing)} never sent {failed.what} (rank {failed.rank} waited {failed.waited_s:.1f} s; {others} sent it)."


def name_ranks(ranks: Sequence[int]) -> str:
    """For example "rank 3" or "ranks 0, 1, 3"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _describe(rank: int, status: Status | None, subject: str) -> str:
    """One sentence about a rank that did not send: what is known of it, and where to look."""
    if status is None:
        return f"Rank {rank} does not answer: it died, was killed or is stopped; see the end of its log."
    if status.ended == FINISHED:
        return (
            f"Rank {rank} finished after {status.what} ({status.at}): its loop was shorter. "
            "Every rank needs the same number of steps (in a loop of your own: of batches, or wrap the loop in join())."
        )
    if status.ended:
        return f"Rank {rank} ended with {status.ended} after {status.what} ({status.at}); its log has the traceback."
    return f"{subject} is alive; it last reached {status.what} at {status.at} and has issued no operation since."
