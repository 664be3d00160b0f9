"""Child: a process that a command has started: it gets a secret on its standard input, and dies with the command.

A child leads a process group of its own, so that Ctrl-C reaches the command alone, which decides what to do.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from lockstep.launcher.linux import die_with_parent

_LAST_LINES = 20


class Child:
    """Starts at once. ``stdin_line`` is written to its standard input, which stays open if ``keep_stdin``.

    ``on_line(stream, line)`` is called for each line of its standard output (1) and error (2), from ``read``; None: both are those
    of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        stdin_line: str,
        *,
        keep_stdin: bool,
        on_line: Callable[[int, str], None] | None = None,
    ) -> None:
        parent = os.getpid()
        pipe = subprocess.PIPE if on_line is not None else None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=pipe,
            stderr=pipe,
            process_group=0,
            preexec_fn=lambda: die_with_parent(parent),
        )
        self._on_line = on_line
        self._partial = {1: b"", 2: b""}
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        """Of its standard error."""
        for stream in self.outputs.values():
            os.set_blocking(stream.fileno(), False)
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{stdin_line}\n".encode())
        except BrokenPipeError:
            pass  # it has ended
        if not keep_stdin:
            self.close_stdin()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def outputs(self) -> dict[int, IO[bytes]]:
        streams = {1: self._process.stdout, 2: self._process.stderr}
        return {number: stream for number, stream in streams.items() if stream is not None}

    def read(self, number: int) -> bool:
        """Read what the child has written to this stream. Returns False at its end."""
        try:
            data = os.read(self.outputs[number].fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._partial[number] = (self._partial[number] + (data or b"\n")).split(b"\n")
        for line in (line.decode(errors="replace").rstrip("\r") for line in lines):
            if not line:
                continue
            if number == 2:
                self.last_lines.append(line)
            if self._on_line is not None:
                self._on_line(number, line)
        return bool(data)

    def poll(self) -> int | None:
        """Returns the exit code, 128 + the number of the signal that killed the child, or None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def was_killed(self) -> bool:
        """Whether a signal has ended the child."""
        return (self._process.poll() or 0) < 0

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def close(self) -> None:
        """Kill the child if it runs, wait for its end and close its streams."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self.close_stdin()
        for stream in self.outputs.values():
            stream.close()
