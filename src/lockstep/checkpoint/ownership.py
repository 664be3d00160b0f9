"""Ownership: what the workers of one run share about its checkpoints (ids, hyperparameters), and the lock that rank 0 holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.checkpoint.background_task import BackgroundTask
from lockstep.checkpoint.place_lock import Attempt, PlaceLock
from lockstep.checkpoint.storage import Storage
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.errors import UsageError
from lockstep.observe.notice import print_notice

_POLL_S = 1.0


@dataclass(frozen=True)
class RunIdentity:
    """The same on all workers."""

    launch: str
    """Random, made when the workers were started. A run that is resumed gets another one."""
    run: str
    """Random, made when the run began. A run that is resumed keeps it."""
    hyperparameters: dict[str, Any]
    """The hyperparameters in the script with which the run began (hyperparameters.py)."""


class Ownership:
    """``Checkpoints`` calls it. ``identity`` is None until the workers have agreed on one."""

    def __init__(self, storage: Storage, comm: Callable[[], Comm], hyperparameters: dict[str, Any]) -> None:
        self._comm, self._hyperparameters = comm, hyperparameters
        self._url = storage.url
        self._lock = PlaceLock(storage)
        self.identity: RunIdentity | None = None

    def agree(self) -> RunIdentity:
        """Return the identity that a worker knows already, or a new one. All workers must call it."""
        return self._agree()[1]

    def new_generation(self) -> None:
        """Tell newcomers who they belong to. All workers of a new generation must call it.

        Rank 0 begins to hold the lock, in the background, if the run was under way: the worker that held it may be gone.
        """
        is_known, identity = self._agree()
        if is_known and self._comm().rank == 0 and not self._lock.is_held:
            BackgroundTask(lambda: self._lock.require(identity.launch, identity.run), "lock")

    def _agree(self) -> tuple[bool, RunIdentity]:
        """Returns also whether a worker knew the identity already."""
        proposed = RunIdentity(os.urandom(8).hex(), os.urandom(8).hex(), self._hyperparameters)
        mine = json.dumps([self.identity is not None, asdict(self.identity or proposed)]).encode()
        everyone = [json.loads(each) for each in gather_bytes(self._comm(), mine, "the identity of the run")]
        is_known, values = next((each for each in everyone if each[0]), everyone[0])
        self.identity = RunIdentity(**values)
        return is_known, self.identity

    def acquire(self) -> RunIdentity:
        """Take the lock, before a checkpoint is loaded. All workers must call it. Returns their identity.

        A storage that fails is reported by rank 0; the run trains without the lock, and cannot save while that lasts.

        Raises:
            UsageError: On every worker, if another run uses the storage.
        """
        comm, identity = self._comm(), self.agree()
        while True:
            mine = self._try(identity) if comm.rank == 0 else Attempt()
            if mine.notice:
                print_notice(mine.notice)
            answer = json.dumps([mine.is_held, mine.refusal]).encode()
            is_held, refusal = json.loads(gather_bytes(comm, answer, "whether the checkpoint place is free")[0])
            if refusal:
                raise UsageError(refusal)
            if is_held:
                return identity
            if comm.rank == 0:
                time.sleep(_POLL_S)

    def _try(self, identity: RunIdentity) -> Attempt:
        try:
            return self._lock.try_acquire(identity.launch, identity.run)
        except Exception as error:  # noqa: BLE001 - a storage may raise anything
            text = f"{type(error).__name__}: {error}"
            return Attempt(is_held=True, notice=f"the checkpoint place {self._url} cannot be locked ({text}).")

    def resumed(self, identity: RunIdentity) -> None:
        """The workers have loaded a checkpoint of this run. Every worker calls it."""
        self.identity = identity
        if self._lock.is_held:
            BackgroundTask(lambda: self._lock.beat(identity.run), "lock")

    def require(self) -> None:
        """Raise ``OSError`` if another run has taken over the storage. Rank 0 calls it before each publication."""
        assert self.identity is not None
        self._lock.require(self.identity.launch, self.identity.run)

    def release(self) -> None:
        self._lock.release()
