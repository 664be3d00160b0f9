"""EngineRun: one head and the processes that start agents (ssh, srun), watched until the head ends. Knows no engine.

One loop, no threads. The exit code is that of the head. Everything that was started ends before ``run`` returns, and also if this
process is killed: its children die with it, and the agents elsewhere see the end of their standard input.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.engines.attached_agent import STARTED
from lockstep.engines.child import Child
from lockstep.engines.head_process import HeadProcess
from lockstep.errors import UsageError
from lockstep.launcher.event_loop import STOP_SIGNALS, EventLoop
from lockstep.launcher.nonblocking_output import NonblockingOutput

_MAX_HEAD_STARTS = 4
_AGENTS_END_S = 5.0
"""When the head has ended, agents have this long to end before they are told to, and as long again before they are killed."""
_NO_AGENTS_S = 600.0
"""How long the head waits while no agent is there."""
_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 30.0
"""An ssh that has lost its connection is started again after the first delay, which doubles each time."""


@dataclass(frozen=True)
class AgentStart:
    """How agents are started by one child process.

    ``name``: for messages: the host. ``explain(last_line, code)`` returns the sentence for a child that ended before an agent had
    started. ``outlives``: whether agents continue if the child is killed: the tasks of an srun do.
    """

    name: str
    command: tuple[str, ...]
    explain: Callable[[str, int], str]
    outlives: bool = False


@dataclass
class _Agents:
    """The state of one ``AgentStart``."""

    start: AgentStart
    child: Child | None = None
    starts: int = 0
    has_started: bool = False
    is_up: bool = False
    """Whether ``child`` has started an agent that may still run."""
    start_at: float = -math.inf
    delay_s: float = _FIRST_DELAY_S


class EngineRun:
    """``agents(port)`` returns how to start the agents when the head listens at ``port``. Call ``run`` once, in the main thread."""

    def __init__(self, head: HeadProcess, token: str, agents: Callable[[int], Sequence[AgentStart]]) -> None:
        self._head, self._token, self._make_agents = head, token, agents
        self._agents: list[_Agents] = []
        self._loop = EventLoop(self._on_signal)
        self._output = NonblockingOutput()
        self._erases = os.isatty(2) and os.environ.get("TERM") not in (None, "", "dumb", "unknown")
        self._signal: int | None = None
        self._end_at = math.inf  # if no agent has come back by then

    def run(self) -> int:
        """Block until the head has ended and everything is gone. Returns the exit code of the run.

        Raises UsageError if the agents of a host could not be started.
        """
        with self._loop:
            try:
                self._head.start()
                while (code := self._head_code()) is None:
                    self._loop.run_once(math.inf)
                    self._on_time(time.monotonic())
                self._wait_for_agents()
                return code
            finally:
                self._close()

    # -- the loop ---------------------------------------------------------------------------------

    def _on_time(self, now: float) -> None:
        self._output.flush()
        if self._head.port is None and self._head.look_for_address():
            assert self._head.port is not None
            self._agents = [_Agents(start) for start in self._make_agents(self._head.port)]
        for agents in self._agents:
            self._watch(agents, now)
        self._end_without_agents(now)

    def _end_without_agents(self, now: float) -> None:
        """A head that no agent can reach any more would wait for ever."""
        if not self._agents or any(agents.is_up for agents in self._agents):
            self._end_at = math.inf
            return
        none_comes_back = all(agents.start_at == math.inf and agents.child is None for agents in self._agents)
        self._end_at = min(self._end_at, now + (_AGENTS_END_S if none_comes_back else _NO_AGENTS_S))
        if now >= self._end_at and self._signal is None:
            self._say("no agent is left, and none could be started again. The head is told to end.")
            self._on_signal(signal.SIGTERM)

    def _head_code(self) -> int | None:
        """Returns the exit code of the run when it is over. A head that was killed is started again: the agents wait for it."""
        head = self._head
        code = head.child.poll()
        if code is None or not head.child.was_killed() or self._signal is not None or head.port is None:
            return code
        if head.starts == _MAX_HEAD_STARTS:
            return code
        self._say(f"the head was killed by {signal.Signals(code - 128).name} and is started again.")
        head.child.close()
        head.start()
        return None

    def _watch(self, agents: _Agents, now: float) -> None:
        if agents.child is None:
            if now >= agents.start_at and self._signal is None:
                self._start(agents)
            return
        code = agents.child.poll()
        if code is None:
            return
        self._drain(agents.child)
        was_killed = agents.child.was_killed()
        last_line = agents.child.last_lines[-1] if agents.child.last_lines else f"exit code {code}"
        self._forget(agents)
        if not agents.has_started and self._signal is None:
            raise UsageError(agents.start.explain(last_line, code))
        if code == 2 and agents.starts == 1 and self._signal is None:
            raise UsageError(f"the agent on {agents.start.name} could not work: {last_line.removeprefix('lockstep: ')}")
        if was_killed and agents.start.outlives:
            agents.is_up = True
            return
        # 0: the run is over, or somebody on that machine has asked the agent to leave.
        agents.start_at = math.inf if code == 0 else now + agents.delay_s
        agents.delay_s = min(2 * agents.delay_s, _MAX_DELAY_S)

    def _start(self, agents: _Agents) -> None:
        if agents.has_started:
            self._say(f"the agent on {agents.start.name} has ended and is started again.")

        def on_line(number: int, line: str) -> None:
            self._on_line(agents, number, line)

        child = Child(agents.start.command, self._token, keep_stdin=True, on_line=on_line)
        agents.child, agents.start_at, agents.starts = child, math.inf, agents.starts + 1
        for number, stream in child.outputs.items():
            self._loop.selector.register(stream, selectors.EVENT_READ, lambda n=number, s=stream: self._read(child, n, s))

    def _read(self, child: Child, number: int, stream: object) -> None:
        if not child.read(number):
            self._loop.selector.unregister(stream)  # type: ignore[arg-type]

    def _on_line(self, agents: _Agents, number: int, line: str) -> None:
        if number == 2:
            if agents.has_started:
                self._write(f"[{agents.start.name}] {line}\n")
        elif line == STARTED:
            agents.has_started, agents.is_up, agents.delay_s = True, True, _FIRST_DELAY_S

    def _on_signal(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self._signal = self._signal or number
            self._head.child.send_signal(number)

    # -- the end ----------------------------------------------------------------------------------

    def _wait_for_agents(self) -> None:
        """The head has told the agents that the run is over. An agent that does not end is told so by its standard input."""
        self._wait_for_children(_AGENTS_END_S)
        self._close_inputs()
        self._wait_for_children(_AGENTS_END_S)

    def _wait_for_children(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(each.child is not None and each.child.poll() is None for each in self._agents):
            self._loop.run_once(deadline)
            self._output.flush()

    def _close_inputs(self) -> None:
        for agents in self._agents:
            if agents.child is not None:
                agents.child.close_stdin()

    def _drain(self, child: Child) -> None:
        """Read what the child has written before it ended."""
        for number, stream in child.outputs.items():
            if stream in self._loop.selector.get_map():
                child.read(number)

    def _forget(self, agents: _Agents) -> None:
        assert agents.child is not None
        for stream in agents.child.outputs.values():
            if stream in self._loop.selector.get_map():
                self._loop.selector.unregister(stream)
        agents.child.close()
        agents.child, agents.is_up = None, False

    def _close(self) -> None:
        self._close_inputs()
        for agents in self._agents:
            if agents.child is not None:
                self._forget(agents)
        self._head.child.close()
        self._output.flush(1.0)

    def _say(self, sentence: str) -> None:
        self._write(f"lockstep: {sentence}\n")

    def _write(self, text: str) -> None:
        """The head, a process of its own, may have drawn its progress on the same terminal: erase it; the head draws it again."""
        erase = b"\x1b[J" if self._erases else b""
        self._output.write(2, erase + text.encode())
