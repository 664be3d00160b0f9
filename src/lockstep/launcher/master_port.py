"""MasterPort: a TCP port on this machine that no other program takes before the script listens on it. Knows nothing of workers.

The port is outside the range from which the kernel picks ports for programs that ask for any port. A socket of the agent is bound
to it without listening: a program that wants the port for itself is refused. A socket with SO_REUSEADDR, which torch's store has,
may be bound to the same port as long as no socket listens there.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_PORTS = range(20000, 32768)
_ATTEMPTS = 200


class MasterPort:
    """``number`` is the port. ``close`` frees it. ``host``: "0.0.0.0" for any address of this machine."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = _bind(host)
        self.number: int = random.choice(_PORTS) if self._socket is None else self._socket.getsockname()[1]

    def close(self) -> None:
        """May be called twice."""
        if self._socket is not None:
            self._socket.close()


def _bind(host: str) -> socket.socket | None:
    """A socket that is bound to a free port. If all ports that were tried are in use, the kernel picks one.

    Returns None on a machine without a network: scripts that need no port must run there.
    """
    low, high = _ports_of_the_kernel()
    candidates = [port for port in _PORTS if not low <= port <= high]
    for port in [*random.sample(candidates, min(_ATTEMPTS, len(candidates))), 0]:
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.bind((host, port))  # without SO_REUSEADDR: it fails if another agent is bound to the port
        except OSError:
            bound.close()
            continue
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return bound
    return None


def _ports_of_the_kernel() -> tuple[int, int]:
    """The range from which the kernel picks ports."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999
