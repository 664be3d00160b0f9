"""WorkerGroup: the workers of the current generation, as this worker sees them: the comm, and the agent's link if there is one."""

from __future__ import annotations

from dataclasses import replace

from lockstep.comm.base import Comm
from lockstep.comm.loopback import loopback
from lockstep.comm.open_comm import open_comm, own_gpu
from lockstep.elastic.agent_link import AgentLink, CommOptions
from lockstep.gradients.control_word import CHANGE, STOP
from lockstep.world import AgentEndpoint, World


class WorkerGroup:
    """``comm`` connects the workers of this generation. ``link`` is None without an agent: then the group never changes.

    ``start_size`` is the number of workers that the run began with. A newcomer must use it instead of today's number.
    """

    def __init__(self, comm: Comm, start_size: int, link: AgentLink | None = None, *, is_newcomer: bool = False) -> None:
        self.comm, self.start_size, self.link = comm, start_size, link
        self.is_newcomer = is_newcomer
        """Whether this worker runs its script up to the loop that the others are in. Until then ``comm`` connects it to nobody."""

    @property
    def rank(self) -> int:
        """This worker's rank; for a newcomer, the rank that it will probably have."""
        return self.link.run_size if self.is_newcomer and self.link is not None else self.comm.rank

    @property
    def size(self) -> int:
        return self.link.run_size + 1 if self.is_newcomer and self.link is not None else self.comm.size

    @property
    def generation(self) -> int:
        return self.link.generation if self.link is not None else 0

    def requests(self) -> int:
        """Return what the agent has asked of this worker, as bits for the control word (gradients/control_word.py)."""
        if self.link is None:
            return 0
        return (CHANGE if self.link.wants_change else 0) | (STOP if self.link.stopping else 0)

    def report(self, **packet: object) -> None:
        """Send a packet to the agent from rank 0. It does nothing on other ranks or without an agent."""
        if self.link is not None and self.rank == 0:
            self.link.send(**packet)


def join_workers(endpoint: AgentEndpoint | None, options: CommOptions, max_workers: int | None) -> WorkerGroup:
    """Connect this worker with the others. All workers must call it.

    Args:
        endpoint: The agent's socket. None without an agent: the launcher's variables say who the others are.
        options: How comms are opened.
        max_workers: How many workers the run can use, if the user has fixed the number of lanes.
    """
    if endpoint is None:
        comm = open_comm(
            options.device,
            timeout_s=options.timeout_s,
            kind=options.kind,
            need_bytes=options.bucket_bytes(World.detect().size),
            place=options.place,
        )
        return WorkerGroup(comm, comm.size)
    limit_s = endpoint.hang_timeout_s  # very long, if the others must wait for a person
    options = replace(options, timeout_s=limit_s if endpoint.is_debugged else min(options.timeout_s, limit_s))
    link = AgentLink(endpoint, options)
    joined = link.join(max_workers or endpoint.start_size, own_gpu(options.device, options.kind, World.detect()))
    if joined is None:  # the run is under way: this worker joins at the loop that the others are in
        return WorkerGroup(loopback(1, options.timeout_s)[0], endpoint.start_size, link, is_newcomer=True)
    return WorkerGroup(joined, endpoint.start_size or joined.size, link)
