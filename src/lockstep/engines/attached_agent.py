"""An agent that ends when the command that started it ends. ssh and srun connect its standard input with that command.

    python -m lockstep.engines.attached_agent HOST:PORT[,HOST:PORT...] RUN_DIR OPTIONS-OF-AGENT script.py args...

The first line of the standard input is the token: it is in no command line and in no variable. Then nothing more comes, and the end
of the standard input means that the command, ssh or srun is gone: the agent ends. An agent that is killed is started again.

All addresses are those of one head, and the first that answers is used. In RUN_DIR, {node} stands for the name that Slurm has for
this machine, because srun starts the same command on all nodes.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from lockstep.cluster.address import Address
from lockstep.cluster.token import read_token
from lockstep.engines.child import Child
from lockstep.errors import UsageError
from lockstep.launcher.arguments import write
from lockstep.launcher.event_loop import STOP_SIGNALS, EventLoop
from lockstep.world import machine_label

STARTED = "started"
"""The line on the standard output that says: the token has arrived, and the agent has been started."""
_MAX_STARTS = 5
_START_AGAIN_S = 1.0
_END_S = 10.0
"""How long the agent may take to end after the standard input has ended."""
_ANSWER_S = 3.0


class AttachedAgent:
    """``command``: of the agent, which reads the token from its standard input. Call ``run`` once, in the main thread."""

    def __init__(self, command: Sequence[str], token: str) -> None:
        self._command, self._token = command, token
        self._loop = EventLoop(self._on_signal)
        self._starts = 0
        self._is_ending = False
        self._start_at = self._kill_at = math.inf
        self._start()

    def run(self) -> int:
        """Block until the agent has ended. Returns its exit code, or 128 + the number of the signal that killed it."""
        write(1, f"{STARTED}\n")
        with self._loop:
            self._loop.selector.register(0, selectors.EVENT_READ, self._read_stdin)
            while (code := self._exit_code(time.monotonic())) is None:
                self._loop.run_once(min(self._start_at, self._kill_at))
        return code

    def _start(self) -> None:
        self._starts, self._start_at = self._starts + 1, math.inf
        self._agent = Child(self._command, self._token, keep_stdin=True)

    def _exit_code(self, now: float) -> int | None:
        """Returns None while the agent runs, or is to run again."""
        if now >= self._start_at:
            self._agent.close()
            self._start()
        code = self._agent.poll()
        if code is None and now >= self._kill_at:
            self._kill_at = math.inf
            self._agent.send_signal(signal.SIGKILL)
        if code is None or not self._agent.was_killed() or self._is_ending or self._starts == _MAX_STARTS:
            return code
        if self._start_at == math.inf:
            name = signal.Signals(code - 128).name
            write(2, f"lockstep: the agent on {machine_label()} was killed by {name} and is started again.\n")
            self._start_at = now + _START_AGAIN_S
        return None

    def _on_signal(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self._is_ending, self._start_at = True, math.inf
            self._agent.send_signal(number)

    def _read_stdin(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except OSError:  # the other end is gone
            data = b""
        if not data:
            self._loop.selector.unregister(0)
            self._is_ending, self._start_at, self._kill_at = True, math.inf, time.monotonic() + _END_S
            self._agent.close_stdin()  # --ends-with-stdin


def with_launch_address(heads: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the addresses of the head, and the one from which this process was started, as this machine sees it.

    ``heads``: HOST:PORT[,HOST:PORT...]. ssh and srun run beside the head, and their connection shows that this address works.
    """
    launched_from = environ.get("SLURM_LAUNCH_NODE_IPADDR") or environ.get("SSH_CONNECTION", "").partition(" ")[0]
    addresses = heads.split(",")
    if launched_from:
        addresses.append(str(Address(launched_from, Address.parse(addresses[0]).port)))
    return list(dict.fromkeys(addresses))


def first_that_answers(addresses: Sequence[str]) -> str:
    """Returns the first address at which something listens, or the first one if there is none: the agent says why."""
    for text in addresses if len(addresses) > 1 else ():
        address = Address.parse(text)
        try:
            socket.create_connection((address.host, address.port), timeout=_ANSWER_S).close()
        except OSError:
            continue
        return text
    return addresses[0]


def main() -> int:
    heads, run_dir, *options = sys.argv[1:]
    try:
        token = read_token("-", {})
        head = first_that_answers(with_launch_address(heads, os.environ))
    except UsageError as error:
        write(2, f"lockstep: {error}\n")
        return 1
    run_dir = run_dir.replace("{node}", os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    command = [sys.executable, "-m", "lockstep", "agent", "--head", head, "--token-file", "-", "--ends-with-stdin"]
    return AttachedAgent([*command, "--run-dir", run_dir, *options], token.hex()).run()


if __name__ == "__main__":
    sys.exit(main())
