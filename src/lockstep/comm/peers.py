"""The other workers of this machine as process descriptors: whether one has ended is known at once."""

from __future__ import annotations

import os
import select

import torch.distributed as dist


class Peers:
    """The other workers' processes, as descriptors that become readable when they end."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        for other in range(size):
            if other != rank and hasattr(os, "pidfd_open"):
                try:
                    fd = os.pidfd_open(int(store.get(f"here/{other}")))
                except OSError:
                    continue  # an old kernel: the timeout finds it
                self._poll.register(fd, select.POLLIN)
                self._ranks[fd] = other

    def dead(self) -> list[int]:
        return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0)) if self._ranks else []

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks = {}
