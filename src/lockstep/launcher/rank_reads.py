"""Notices when a script reads its rank from ``os.environ``: then it knows that there are other workers. Does not know who is told.

Every way to the other workers begins there: torch.distributed's ``env://``, frameworks, ``lockstep.replicate``. The class of
``os.environ`` is exchanged until the script has read a variable that connects workers; the mapping itself and its values stay.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_CONNECTING = frozenset(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_STORE"))
"""A script reads these in order to connect to the other workers."""
_RANKS = frozenset(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCKSTEP_RANK", "LOCKSTEP_SIZE", "LOCKSTEP_WORKER", "LOCKSTEP_AGENT_FD"))
"""A script that reads these knows that it is one of several workers."""


def watch(on_read: Callable[[bool], object]) -> None:
    """Call ``on_read(False)`` when the script first reads its rank, and ``on_read(True)`` when it first connects to others."""
    plain: Any = type(os.environ)
    has_read_rank = False
    listed: deque[str] = deque()  # names that were listed and whose values may be read next: dict(os.environ), os.environ.items()

    class WatchedEnvironment(plain):  # type: ignore[misc]
        def __iter__(self) -> Iterator[str]:
            listed.clear()
            listed.extend(plain.__iter__(self))
            return iter(list(listed))

        def __getitem__(self, name: str) -> Any:
            nonlocal has_read_rank
            if listed and listed[0] == name:
                listed.popleft()
            else:
                listed.clear()
                if name in _CONNECTING:
                    os.environ.__class__ = plain
                    on_read(True)
                elif name in _RANKS and not has_read_rank:
                    has_read_rank = True
                    on_read(False)
            return plain.__getitem__(self, name)

    WatchedEnvironment.__name__ = plain.__name__
    os.environ.__class__ = WatchedEnvironment
