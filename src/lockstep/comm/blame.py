"""Decides which ranks made a wait fail, and words the error. Pure: knows no store, no clock and no thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import PeerError

FINISHED = "finished"


@dataclass(frozen=True)
class Status:
    """How far one rank has come: how many operations it has issued, the last of them, and when."""

    count: int
    what: str
    at: str
    ended: str = ""
    """How the rank ended: empty while it runs, ``FINISHED``, or the exception that ended it."""


@dataclass(frozen=True)
class FailedWait:
    """The wait of ``rank`` for operation ``number``, which failed."""

    rank: int
    number: int
    what: str
    waited_s: float
    cause: str
    """The transport's error; empty if the timeout passed without one."""


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
            "Give every rank the same number of batches, or wrap the loop in join()."
        )
    if status.ended:
        return f"Rank {rank} ended with {status.ended} after {status.what} ({status.at}); its log has the traceback."
    return f"{subject} is alive; it last reached {status.what} at {status.at} and has issued no operation since."
