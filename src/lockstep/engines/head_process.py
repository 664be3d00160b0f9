"""HeadProcess: `lockstep head` as a child process. Knows how to start it, and to start it again at the same address."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster.address import Address
from lockstep.engines.child import Child

ADDRESS_FILE = "head.address"
"""In the run folder: where the head listens, HOST:PORT."""


class HeadProcess:
    """The head listens at ``host``, at a port that it chooses. ``options``: its other options. ``start`` must be called first."""

    def __init__(self, host: str, token: str, run_dir: Path, options: Sequence[str]) -> None:
        self._host, self._token, self._run_dir, self._options = host, token, run_dir, options
        self.port: int | None = None
        """None until the head listens."""
        self.starts = 0

    def start(self) -> None:
        """Start it, or start it again at the same port: the agents look for it there."""
        (self._run_dir / ADDRESS_FILE).unlink(missing_ok=True)
        self.starts += 1
        listen = str(Address(self._host, self.port or 0))
        command = [sys.executable, "-m", "lockstep", "head", "--listen", listen, "--token-file", "-"]
        self.child = Child([*command, "--run-dir", str(self._run_dir), *self._options], self._token, keep_stdin=False)

    def look_for_address(self) -> bool:
        """Returns whether the head listens. Sets ``port``."""
        try:
            address = (self._run_dir / ADDRESS_FILE).read_text()
        except OSError:
            return False
        self.port = Address.parse(address).port
        return True
