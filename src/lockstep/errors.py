"""The exceptions that Lockstep raises, sorted by whose fault the error is.

LockstepError
  UsageError       the user's: an argument, a variable or a model that cannot work as given
  PeerError        another worker's: it died, hangs, or left
  DeviceError      this worker's GPU: it failed, and the process cannot use it any more
  CorruptionError  the hardware's: replicas that must be equal differ
  WorkerError      the function's of lockstep.launch: it failed on a worker
  InvariantError   Lockstep's: a state that its code must never reach
"""

from __future__ import annotations

from collections.abc import Iterable


class LockstepError(Exception):
    """The base class of all exceptions that Lockstep raises on purpose. Catch it to catch them all."""


class UsageError(LockstepError, ValueError):
    """Raised if Lockstep was called in a way that cannot work.

    The message says what is wrong, with the evidence, and what to write instead. Correct the script or the command; a retry
    raises the same error. If workers disagree (about the model, the data, an argument), every worker raises it.
    """


class TorchUsageError(UsageError, RuntimeError, TypeError):
    """A UsageError of ``DistributedDataParallel``, under every type that torch's class of that name raises for wrong use.

    A script that catches torch's ``RuntimeError``, ``ValueError`` or ``TypeError`` catches it too. Catch ``UsageError``.
    """


class PeerError(LockstepError, RuntimeError):
    """Raised if another worker died, hangs or left while this worker waited for it.

    Also raised by ``join(raise_early=True)`` on every rank, if a rank ran out of data.

    Under ``lockstep run``, ``Run`` recovers from it and the script does not see it. Elsewhere (``torchrun``, ``replicate``,
    ``DistributedDataParallel``) let it end the process, and let the launcher restart all workers from a checkpoint: the
    connections of this process cannot be used again.

    Attributes:
        ranks: The ranks that failed; empty if none could be named.
        hung: True if the ranks did not respond within the timeout, False if a process or a connection was seen to fail.
    """

    def __init__(self, message: str, ranks: Iterable[int] = (), *, hung: bool = False) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.hung = hung

    def copy(self) -> PeerError:
        """Return an equal exception without a traceback, so that the same failure can be raised in several places."""
        return PeerError(str(self), self.ranks, hung=self.hung)


class DeviceError(LockstepError, RuntimeError):
    """Raised if this worker cannot use its GPU any more: the GPU or its driver failed, or a kernel did something illegal.

    CUDA reports such an error again at every later call of the process. Let it end the process: ``lockstep run`` starts another
    one in its place. If a kernel of the script is the cause, for example an index out of range, the same happens there, and the run
    ends with this error.
    """


class CorruptionError(LockstepError, RuntimeError):
    """Raised if replicas that must hold the same bits differ, and no majority shows which of them is right.

    A bit has changed in the memory of some worker, or something outside the step writes to the model on some workers only. The
    message names the step after which all replicas were still equal: start again from a checkpoint of that step or before.
    """


class WorkerError(LockstepError, RuntimeError):
    """Raised by ``lockstep.launch`` if the function failed on a worker, or if a worker was lost and could not be replaced.

    The message has the traceback of the worker that failed first, and names the folder with the output of all workers.
    """


class InvariantError(LockstepError, AssertionError):
    """Raised if Lockstep reached a state that its own code must never reach: a bug. Please report it with the message."""
