"""The state of plan/membership.py: which workers there are, what each one does, and the current generation. Pure values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import InvariantError


class Status(enum.Enum):
    STARTING = "starting"  # spawned, has not asked to join
    WAITING = "waiting"  # has asked to join, holds no training state
    MEMBER = "member"  # belongs to the current generation
    READY = "ready"  # has left the current generation, holds the training state, waits for the next generation


@dataclass(frozen=True)
class Worker:
    id: int
    status: Status = Status.STARTING
    pid: int | None = None
    leaving: bool = False
    finished: bool = False
    hung: bool = False
    """The agent was told to kill the worker because it hangs."""

    @property
    def name(self) -> str:
        return f"worker {self.id}" if self.pid is None else f"worker {self.id} (pid {self.pid})"


@dataclass(frozen=True)
class Policy:
    """What the options of `lockstep run` say about lost workers. At most ``max_respawns`` are replaced within ``window_s``."""

    respawn: bool = True
    max_respawns: int = 10
    window_s: float = 300.0
    hang_timeout_s: float = 30.0


@dataclass(frozen=True)
class State:
    """``workers`` are alive. ``members`` are the live members of generation ``generation`` (-1: none yet) in rank order."""

    size: int
    """How many workers the run should have."""
    policy: Policy = field(default_factory=Policy)
    workers: tuple[Worker, ...] = ()
    next_id: int = 0
    max_members: int = 0
    """How many members a generation may have; 0: any number."""
    generation: int = -1
    members: tuple[int, ...] = ()
    broken_at: float | None = None
    """When the current generation broke, or when a member last left it since then; None: it is not broken."""
    broken_by: str = ""
    departed: tuple[str, ...] = ()
    """How members were lost since the current generation was formed, for people: "worker 2 died (SIGKILL)"."""
    arrived_at: float | None = None
    """Before the first generation: when a worker last asked to join or was respawned."""
    changing: bool = False
    """The members were told to leave the current generation after the same step."""
    left_at: float | None = None
    """When a member last left the current generation for a change. It waits for the other members."""
    finishing: bool = False
    """A worker has reached the end of the script."""
    ended: bool = False
    respawned_at: tuple[float, ...] = ()
    """Within ``policy.window_s``."""
    failed_steps: tuple[int, ...] = ()
    """The steps at which scripts raised."""

    def __post_init__(self) -> None:
        alive = {worker.id for worker in self.workers}
        if not set(self.members) <= alive:
            raise InvariantError(f"members {self.members} are not all alive: {sorted(alive)}")

    def find(self, id: int) -> Worker | None:
        return next((worker for worker in self.workers if worker.id == id), None)

    def worker(self, id: int) -> Worker:
        found = self.find(id)
        assert found is not None
        return found

    def with_status(self, *statuses: Status) -> list[int]:
        """The ids of all workers that have one of these statuses."""
        return [worker.id for worker in self.workers if worker.status in statuses]

    def update(self, id: int, **changes: Any) -> State:
        """Returns the state in which these fields of one worker have changed."""
        return replace(self, workers=tuple(replace(each, **changes) if each.id == id else each for each in self.workers))
