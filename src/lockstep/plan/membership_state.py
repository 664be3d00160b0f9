"""The state of plan/membership.py: which workers there are, what each one does, and the current generation. Pure values."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lockstep.errors import InvariantError


class Status(enum.Enum):
    STARTING = "starting"  # spawned, has not asked to join
    WAITING = "waiting"  # has asked to join, holds no training state
    PREPARING = "preparing"  # a newcomer that runs its script towards the loop that the members are in
    MEMBER = "member"  # belongs to the current generation
    READY = "ready"  # has left the current generation, holds the training state, waits for the next generation


@dataclass(frozen=True)
class Worker:
    id: int
    status: Status = Status.STARTING
    pid: int | None = None
    leaving: bool = False
    surplus: bool = False
    """The run was scaled down, and this worker is one too many. It stays if another worker dies before it has left."""
    finished: bool = False
    hung: bool = False
    """The agent was told to kill the worker because it hangs."""
    is_replacement: bool = False
    is_spare: bool = False
    """It was started as a spare, or stands by as one (plan/membership_spares.py). Of a member: it was one."""
    has_stood_by: bool = False
    """People were told that it stands by."""
    device: str = ""
    """The GPU or the machine that it computes on, if only ``device_room`` members may; empty: any number may."""
    device_room: int = 0
    has_committed: bool = False
    """Whether it was a member when a step committed."""
    stage: int = -1
    """WAITING: the loop of the script at whose entry it waits; -1: it waits in ``Run(...)``."""
    steps: int = -1
    """How many steps it had committed when it last left a generation; -1: it has not left one, or holds no state."""
    alone: str = ""
    """The work that it has announced and not ended: ``run.alone(what)``."""
    alone_limit_s: float = 0.0
    alone_until: float = -math.inf
    """When the limit of that work passes; when the work is done: when it ended. The hang timeout begins then."""
    lost_because: str = ""
    """What it reported when it last lost its peers."""

    @property
    def name(self) -> str:
        return f"worker {self.id}" if self.pid is None else f"worker {self.id} (pid {self.pid})"


@dataclass(frozen=True)
class Policy:
    """What the options of `lockstep run` say about lost workers.

    At most ``max_respawns`` workers are replaced within ``window_s``, and at most as many in a row that never reach a commit.
    The same holds for ``spares``, which are counted apart: how many of them stand by. One is started ``spares_after_s`` after the
    last change of the members: a process that starts would slow that change down.
    All workers of a script without ``lockstep.Run`` are started again at most ``max_restarts`` times.
    """

    respawn: bool = True
    max_respawns: int = 10
    window_s: float = 300.0
    hang_timeout_s: float = 30.0
    max_restarts: int = 3
    spares: int = 0
    spares_after_s: float = 0.5


@dataclass(frozen=True)
class Respawns:
    """Replacements in the past, which limit those of the future."""

    at: tuple[float, ...] = ()
    """When they were started, within ``Policy.window_s``."""
    failed: int = 0
    """How many have died since a replacement last took part in a commit."""


@dataclass(frozen=True)
class State:
    """``workers`` are alive. ``members`` are the live members of generation ``generation`` (-1: none yet) in rank order."""

    size: int
    """How many workers the run should have."""
    policy: Policy = field(default_factory=Policy)
    room: int = 0
    """How many workers the machines can run; 0: any number."""
    wanted: int = 0
    """How many workers a person has asked for, by `lockstep scale`; 0: as many as there is room for."""
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
    ended_at: tuple[tuple[int, int], ...] = ()
    """(worker, step) of each member whose script has ended."""
    unfinished: tuple[str, ...] = ()
    """The workers that died since then before their script had ended. The next generation makes up for them; the end does not."""
    formed: tuple[int, ...] = ()
    """The members of the current generation when it was formed."""
    formed_at_step: int = 0
    """How many steps had committed then."""
    fruitless: int = 0
    """How many generations before this one ended with neither a commit nor a change of members, without a break."""
    committed: int = 0
    """The greatest number of committed steps that a member has reported."""
    stage: int = -1
    """The loop of the script that the members are in, or were in last; -1: none yet."""
    ready_at: float | None = None
    """When a member last left the current generation; None: none has."""
    arrived_at: float | None = None
    """Before the first generation: when a worker last asked to join or was respawned."""
    changing: bool = False
    """The members were told to leave the current generation after the same step."""
    finishing: bool = False
    """A worker has reached the end of the script."""
    ended: bool = False
    has_joined: bool = False
    """A worker has asked to join: the script uses ``lockstep.Run``."""
    reads_rank: bool = False
    """The script has read its rank on a worker."""
    needs_peers: bool = False
    """It has done so in order to connect to the other workers, since they were last started."""
    restarting: bool = False
    """All workers were told to stop, and are started again when they are gone."""
    restarting_for: str = ""
    """The exception, as in ``failed_places``, because of which all workers were told to stop; empty: another reason."""
    restarts: int = 0
    """How often all workers were started again."""
    respawns: Respawns = Respawns()
    """Of members."""
    spare_respawns: Respawns = Respawns()
    """Of spares that died while they stood by or were starting."""
    spares: int = 0
    """How many spares should stand by. Less than ``policy.spares`` if some may not be replaced."""
    spares_at: float = -math.inf
    """When missing spares may be started."""
    calm_since: float | None = None
    """Since when spares have been missing while no worker joined or left; None: that is not so."""
    not_replaced: tuple[str, ...] = ()
    """The workers that died and were not replaced because of ``policy.max_respawns``."""
    failed_steps: tuple[int, ...] = ()
    """The steps at which scripts raised."""
    failed_places: tuple[str, ...] = ()
    """The exceptions that scripts raised, and where: "ValueError at train.py:12: ValueError: bad sample #"."""

    def __post_init__(self) -> None:
        if self.members and not self._by_id.keys() >= set(self.members):
            raise InvariantError(f"members {self.members} are not all alive: {sorted(self._by_id)}")

    @cached_property
    def _by_id(self) -> dict[int, Worker]:
        """There may be thousands of workers, and each event asks for several of them."""
        return {worker.id: worker for worker in self.workers}

    def find(self, id: int) -> Worker | None:
        return self._by_id.get(id)

    def worker(self, id: int) -> Worker:
        found = self.find(id)
        assert found is not None
        return found

    @property
    def alone_until(self) -> float:
        """The hang timeout of members that wait for each other begins then, at the earliest: some work alone until then."""
        return max((self.worker(id).alone_until for id in self.members), default=-math.inf)

    def with_status(self, *statuses: Status) -> list[int]:
        """The ids of all workers that have one of these statuses."""
        return [worker.id for worker in self.workers if worker.status in statuses]

    def with_room(self, room: int) -> State:
        """Returns the state in which the machines can run ``room`` workers."""
        return replace(self, room=room, size=max(1, min(self.wanted or room, room)))

    def update(self, id: int, **changes: Any) -> State:
        """Returns the state in which these fields of one worker have changed."""
        return self.update_all((id,), **changes)

    def update_all(self, ids: Collection[int], **changes: Any) -> State:
        """Returns the state in which these fields of several workers have changed."""
        changed = dict(self._by_id)  # has the order of the workers
        for id in ids:
            if id in changed:
                changed[id] = replace(changed[id], **changes)
        return replace(self, workers=tuple(changed.values()))
