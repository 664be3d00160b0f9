"""An agent that ends when the command that started it ends. ssh and srun connect its standard input with that command.

    python -m lockstep.engines.attached_agent HOST:PORT[,HOST:PORT...] RUN_DIR OPTIONS-OF-AGENT script.py args...

The first line of the standard input is the token: it is in no command line and in no variable. Then nothing more comes, and the end
of the standard input means that the command, ssh or srun is gone: the agent gets SIGTERM, and is killed if it does not end in time.
An agent that is killed by somebody else is started again. Its exit code is the exit code of this process.

In RUN_DIR, {node} stands for the name that Slurm has for this machine, because srun starts the same command on all nodes.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from lockstep.cluster.token import read_token
from lockstep.errors import UsageError
from lockstep.launcher.arguments import write
from lockstep.launcher.linux import die_with_parent

STARTED = "started"
"""The line on the standard output that says: the token has arrived, and the agent has been started."""
STOPPED = "stopped by "
"""How the line begins that says which signal this process got. The name of the signal follows."""
_MAX_STARTS = 5
_START_AGAIN_S = 1.0
_GRACE_S = 10.0
"""How long the agent may take to end after the standard input has ended."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class AttachedAgent:
    """``command``: of the agent, which reads the token from its standard input. Call ``run`` once, in the main thread."""

    def __init__(self, command: Sequence[str], token: bytes) -> None:
        self._command, self._token = command, token
        self._starts = 0
        self._is_ending = False
        self._start_at = self._kill_at = math.inf
        self._agent: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Block until the agent has ended. Returns its exit code, or 128 + the number of the signal that killed it."""
        wakeup, signals = socket.socketpair()
        wakeup.setblocking(False)
        signals.setblocking(False)
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the number arrives at the wakeup socket
        self._start()
        write(1, f"{STARTED}\n")
        with selectors.DefaultSelector() as selector:
            selector.register(wakeup, selectors.EVENT_READ)
            selector.register(0, selectors.EVENT_READ)
            while (code := self._exit_code()) is None:
                timeout_s = min(self._start_at, self._kill_at) - time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(max(0.0, timeout_s) if timeout_s < math.inf else None)]
                if wakeup in ready:
                    self._on_signals(wakeup.recv(4096))
                if 0 in ready and not _read_stdin():
                    selector.unregister(0)
                    self._kill_at = time.monotonic() + _GRACE_S
                    self._end(signal.SIGTERM)
        return code

    def _start(self) -> None:
        self._starts, self._start_at = self._starts + 1, math.inf
        parent = os.getpid()
        self._agent = subprocess.Popen(self._command, stdin=subprocess.PIPE, preexec_fn=lambda: die_with_parent(parent))
        assert self._agent.stdin is not None
        try:
            self._agent.stdin.write(f"{self._token.hex()}\n".encode())
            self._agent.stdin.close()
        except BrokenPipeError:
            pass  # it has ended

    def _exit_code(self) -> int | None:
        """Returns None while the agent runs, or is to run again."""
        now = time.monotonic()
        if now >= self._start_at:
            self._start()
        assert self._agent is not None
        code = self._agent.poll()
        if code is None:
            if now >= self._kill_at:
                self._kill_at = math.inf
                self._agent.kill()
            return None
        if code >= 0 or self._is_ending or self._starts == _MAX_STARTS:
            return code if code >= 0 else 128 - code
        if self._start_at == math.inf:
            name = signal.Signals(-code).name
            write(2, f"lockstep: the agent on {socket.gethostname()} was killed by {name} and is started again.\n")
            self._start_at = now + _START_AGAIN_S
        return None

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _STOP_SIGNALS:
                write(1, f"{STOPPED}{signal.Signals(number).name}\n")
                self._end(number)

    def _end(self, number: int) -> None:
        """Pass a signal on to the agent, which is not started again."""
        self._is_ending, self._start_at = True, math.inf
        if self._agent is not None:
            self._agent.send_signal(number)


def with_launch_address(heads: str, environ: Mapping[str, str]) -> str:
    """Add the address from which this process was started, as this machine sees it, to the addresses of the head.

    ``heads``: HOST:PORT[,HOST:PORT...]. ssh and srun run beside the head, and their connection shows that this address works.
    """
    launched_from = environ.get("SLURM_LAUNCH_NODE_IPADDR") or environ.get("SSH_CONNECTION", "").partition(" ")[0]
    port = heads.rpartition(":")[2]
    if not launched_from:
        return heads
    address = f"[{launched_from}]:{port}" if ":" in launched_from else f"{launched_from}:{port}"
    return heads if address in heads.split(",") else f"{heads},{address}"


def _read_stdin() -> bytes:
    try:
        return os.read(0, 1 << 16)
    except OSError:  # the other end is gone
        return b""


def main() -> int:
    heads, run_dir, *options = sys.argv[1:]
    try:
        token = read_token("-", {})
    except UsageError as error:
        write(2, f"lockstep: {error}\n")
        return 1
    head = with_launch_address(heads, os.environ)
    run_dir = run_dir.replace("{node}", os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    command = [sys.executable, "-m", "lockstep", "agent", "--head", head, "--token-file", "-", "--run-dir", run_dir, *options]
    return AttachedAgent(command, token).run()


if __name__ == "__main__":
    sys.exit(main())
