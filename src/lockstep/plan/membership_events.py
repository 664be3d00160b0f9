"""The events and actions of plan/membership.py: what happened to the workers, and what the agent must do about it. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

# -- events ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinRequested:
    """A worker asks to become a member: ``stage`` -1 from ``Run(...)``, k from a newcomer at the entry of loop k of its script.

    ``max_members``: how many workers the run can use, which is its number of lanes. More workers wait as spares. 0: as before.
    ``device``: the GPU or the machine that the worker computes on, if only ``device_room`` members may; empty: as before.
    """

    worker: int
    max_members: int = 0
    pid: int | None = None
    stage: int = -1
    device: str = ""
    device_room: int = 0


@dataclass(frozen=True)
class StageEntered:
    """Rank 0 has entered loop ``stage`` of the script."""

    worker: int
    stage: int


@dataclass(frozen=True)
class Committed:
    """A member reports that ``step`` steps have committed. Not every step is reported."""

    worker: int
    step: int


@dataclass(frozen=True)
class Ready:
    """A member has left ``generation`` after ``step`` committed steps and waits for the next generation."""

    worker: int
    generation: int
    step: int = 0


@dataclass(frozen=True)
class PeersLost:
    """A member got a PeerError. ``hung``: it waited the whole timeout for the workers in ``blamed``."""

    worker: int
    generation: int
    blamed: tuple[int, ...] = ()
    hung: bool = False
    why: str = ""


@dataclass(frozen=True)
class AloneBegan:
    """A worker announces work that the others may have to wait for, for up to ``limit_s``: ``run.alone(what)``."""

    worker: int
    what: str
    limit_s: float


@dataclass(frozen=True)
class AloneEnded:
    """The work that a worker has announced is done."""

    worker: int


@dataclass(frozen=True)
class LeaveRequested:
    """A worker wants to leave after the current step: it got SIGTERM.

    ``cannot_join``: it is a newcomer that needs a result of the past which was not kept. No later newcomer can join either.
    """

    worker: int
    cannot_join: bool = False


@dataclass(frozen=True)
class ScriptRaised:
    """The script of a worker raised an exception. Its process still exists and is about to exit.

    ``place``: the exception's type and the line of the script, "ValueError at train.py:12"; empty if it is not known.
    """

    worker: int
    step: int
    error: str
    place: str = ""


@dataclass(frozen=True)
class ScriptFinished:
    """The script of a worker ran to its end, after ``step`` steps (-1: unknown). Its process still exists and is about to exit."""

    worker: int
    step: int = -1


@dataclass(frozen=True)
class Died:
    """The process of a worker is gone.

    ``how``: "SIGKILL", "exit code 1". ``exited``: the process itself exited; False: a signal ended it, or it never started.
    ``pid``: its process, if it had one.
    """

    worker: int
    how: str
    exited: bool = False
    pid: int | None = None


@dataclass(frozen=True)
class ScaleRequested:
    """A person wants ``size`` workers: `lockstep scale`."""

    size: int


@dataclass(frozen=True)
class MachineJoined:
    """A machine has come that has room for ``workers`` workers."""

    name: str
    workers: int


@dataclass(frozen=True)
class MachineLost:
    """A machine with room for ``room`` workers is gone, and ``workers`` with it. ``how``: "machine b does not answer"."""

    workers: tuple[int, ...]
    room: int
    how: str


@dataclass(frozen=True)
class RankRead:
    """The script of a worker has read its rank. ``needs_peers``: in order to connect to other workers."""

    worker: int
    needs_peers: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed. ``idle_s``: for workers that are watched, how long each has used no CPU time."""

    idle_s: tuple[tuple[int, float], ...] = ()


Event = (
    JoinRequested
    | StageEntered
    | Committed
    | Ready
    | PeersLost
    | AloneBegan
    | AloneEnded
    | LeaveRequested
    | ScriptRaised
    | ScriptFinished
    | Died
    | ScaleRequested
    | MachineJoined
    | MachineLost
    | RankRead
    | Tick
)


# -- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """Tell ``members``, in rank order, that they are generation ``number``."""

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Prepare:
    """Tell a newcomer that a generation of ``size`` members exists: it sets up without being a member."""

    worker: int
    size: int


@dataclass(frozen=True)
class SkipLoop:
    """Tell a newcomer that waits at the entry of loop ``stage`` that the run has passed this loop."""

    worker: int
    stage: int


@dataclass(frozen=True)
class Abort:
    """Tell ``workers`` to abort the current step: ``generation`` is broken."""

    workers: tuple[int, ...]
    generation: int
    why: str


@dataclass(frozen=True)
class Change:
    """Tell ``workers`` to leave ``generation`` together, after the same step: a worker joins or leaves."""

    workers: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class PostponeTimeouts:
    """Tell ``workers`` that ``alone`` has announced work: for ``for_s`` no wait for it times out. Then the timeout begins anew."""

    workers: tuple[int, ...]
    alone: int
    for_s: float


@dataclass(frozen=True)
class Stop:
    """Tell ``workers`` to save and to exit together, after the same step."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class Spawn:
    """Start processes for ``workers`` after ``delay_s``. ``are_spares``: besides the workers for which the machines have room."""

    workers: tuple[int, ...]
    delay_s: float = 0.0
    are_spares: bool = False


@dataclass(frozen=True)
class StopAll:
    """Stop ``workers``, because another worker has failed and all will be started again."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class StartAgain:
    """All workers are gone, and others are about to be started in their place, for the ``restarts``-th time."""

    restarts: int


@dataclass(frozen=True)
class Kill:
    """Kill a worker that hangs."""

    worker: int
    why: str


@dataclass(frozen=True)
class Dismiss:
    """Tell a worker that waits for a generation to exit."""

    worker: int
    why: str


@dataclass(frozen=True)
class Report:
    """Show a sentence to the person who started the run."""

    text: str


@dataclass(frozen=True)
class End:
    """The run is over. ``code``: 0 if it succeeded, else 1. ``notes``: further sentences for the person who started the run."""

    code: int
    why: str
    notes: tuple[str, ...] = ()


Action = (
    Form
    | Prepare
    | SkipLoop
    | Abort
    | Change
    | PostponeTimeouts
    | Stop
    | Spawn
    | StopAll
    | StartAgain
    | Kill
    | Dismiss
    | Report
    | End
)
