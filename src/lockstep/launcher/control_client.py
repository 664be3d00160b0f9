"""ControlClient: what a command asks the agent of a running run, over the control socket in the run folder."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from lockstep.launcher import packets
from lockstep.launcher.run_folder import connect

ANSWER_S = 2.0
"""An agent that runs answers within milliseconds."""


class NoAnswerError(Exception):
    """Nobody answers at the control socket: there is no agent, it has just ended, or its process is stopped."""


class RefusedError(Exception):
    """The agent has refused the request. The text says why."""


class ControlClient:
    """A connection to the agent of the run in ``run_dir``; use it in a ``with``. Raises NoAnswerError if there is no agent."""

    def __init__(self, run_dir: Path, timeout_s: float = ANSWER_S) -> None:
        try:
            self._connection: socket.socket = connect(run_dir, timeout_s)
        except OSError as error:
            raise NoAnswerError(f"{error.strerror or error}: agent.sock") from error

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def ask(self, request: packets.Packet) -> Any:
        """Returns the value that the agent answers. Raises RefusedError, or NoAnswerError if no answer comes in time."""
        try:
            packets.send(self._connection, request)
            answer = packets.receive(self._connection)
        except (OSError, ValueError) as error:
            raise NoAnswerError(str(error)) from error
        if answer is None:
            raise NoAnswerError("it has closed the connection")
        if not answer.get("ok"):
            raise RefusedError(str(answer.get("error", "the agent has refused the request")))
        return answer.get("value")

    def status(self) -> dict[str, Any]:
        """Returns the status of the run with all workers, which takes several requests if they are many."""
        status: dict[str, Any] = self.ask({"type": "status"})
        while len(status["workers"]) < status["worker_count"]:
            more = self.ask({"type": "status", "first": len(status["workers"])})["workers"]
            if not more:  # some have ended meanwhile
                break
            status["workers"] += more
        return status
