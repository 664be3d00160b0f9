"""RayRun: the actors of one run on Ray, watched by the driver until the head has ended. Knows no membership.

    driver            reads what the actors report, and tells each agent where the head is
      |- head         `lockstep head`: an actor that Ray restarts, on another node if it must
      |- agent 0      `lockstep agent`: an actor in a bundle of a placement group. Ray restarts it where there is room
      `- agent 1      ...

No actor is detached: Ray ends them all when the driver ends, however it ends.
"""

from __future__ import annotations

import codecs
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from lockstep.cluster.token import new_token
from lockstep.engines.ray_actors import AgentActor, HeadActor, News, Places
from lockstep.engines.ray_placement import Resources
from lockstep.errors import UsageError, WorkerError
from lockstep.launcher.event_loop import STOP_SIGNALS

_READ_S = 10.0
"""How long an actor waits for something to tell."""
_POLL_S = 0.2
"""How long a signal may wait."""
_SAY_AFTER_S, _SAY_AGAIN_S = 10.0, 60.0
_AGENTS_END_S = 5.0
"""When the head has ended, agents have this long to end before they are killed."""
_CANNOT_WORK = 2
_MOST_SIGNALS = 3
_HEAD_NODE = "node:__internal_head__"
"""A resource that only the node with Ray's own control process has. The cluster does not outlive this node."""
_HEAD_BYTES = 64 << 20
"""Ray places an actor that needs nothing on any node, whatever node was asked for."""


@dataclass(frozen=True)
class RayJob:
    """What is run.

    ``bundles``: what Ray reserves for each agent. ``agents``: the options of each agent, with the script. ``function``: pickled,
    or None for a script. ``threads``: of each worker; None: what the runtime environment sets. ``runtime_env``: of the actors.
    """

    head_options: Sequence[str]
    agents: Sequence[Sequence[str]]
    bundles: Sequence[Resources]
    places: Places
    function: bytes | None = None
    threads: int | None = None
    runtime_env: dict[str, Any] | None = None


@dataclass
class _Watched:
    """An actor, and what is known of it."""

    name: str
    handle: Any
    news: News | None = None
    told_head: str = ""
    decoders: dict[int, Any] = field(default_factory=dict)

    def read(self) -> Any:
        """Returns a reference to the next news."""
        known = (self.news.actor, self.news.position) if self.news is not None else ("", 0)
        return self.handle.read.remote(*known, _READ_S)


class RayRun:
    """Call ``run`` once, then ``result`` and ``close``. Ray must be initialized. ``stdout``: gets what rank 0 prints."""

    def __init__(self, job: RayJob, stdout: TextIO) -> None:
        self._job, self._token, self._stdout = job, new_token(), stdout
        self._signals: list[int] = []
        self._passed_on = 0
        self._agents: list[_Watched] = []
        self._pending: dict[Any, _Watched] = {}
        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 4}
        if job.runtime_env:
            options["runtime_env"] = job.runtime_env
        self._options = options
        self._function = [] if job.function is None else [ray.put(job.function)]
        head = ray.remote(HeadActor).options(num_cpus=0, memory=_HEAD_BYTES, **_on_head_node(), **options)
        self._head = _Watched("the head", head.remote(self._token, job.head_options, job.places))
        self._group = placement_group(list(job.bundles), strategy="SPREAD")
        self._say_at = time.monotonic() + _SAY_AFTER_S

    def run(self) -> dict[str, Any]:
        """Block until the head has ended. Returns the outcome of the run: its exit code, who has finished, and why it failed.

        Raises UsageError if the agents cannot work on their nodes, WorkerError if Ray has lost an actor for good, and
        KeyboardInterrupt if a signal has come before there was a head that could stop the run.
        """
        ready = self._group.ready()
        self._read(self._head)
        with self._stop_signals():
            while self._head.news is None or self._head.news.code is None:
                self._pass_on_signals()
                waiting = [*self._pending, *([ready] if not self._agents else [])]
                for each in ray.wait(waiting, num_returns=1, timeout=_POLL_S)[0]:
                    if each == ready:
                        self._start_agents()
                    else:
                        self._on_news(self._pending.pop(each), each)
                if not self._agents:
                    self._say_what_is_missing()
        self._wait_for_agents()
        return self._head.news.outcome or {"code": self._head.news.code, "finished": {}, "cause": None}

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C has stopped the run."""
        return signal.SIGINT in self._signals

    def result(self, worker: int) -> bytes | None:
        """Returns what the function has returned on a worker, pickled; None if no node has it any more."""
        answers = ray.get([agent.handle.result.remote(worker) for agent in self._agents])
        return next((answer for answer in answers if answer is not None), None)

    def close(self) -> None:
        """End all actors and their processes, and give back what Ray has reserved."""
        for watched in (*self._agents, self._head):
            with suppress(RayError):
                ray.kill(watched.handle, no_restart=True)
        with suppress(RayError):
            remove_placement_group(self._group)

    # -- actors -----------------------------------------------------------------------------------

    def _start_agents(self) -> None:
        job = self._job
        for index, (words, bundle) in enumerate(zip(job.agents, job.bundles, strict=True)):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            resources = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            actor = ray.remote(AgentActor).options(scheduling_strategy=where, **resources, **self._options)
            agent = _Watched(f"agent {index}", actor.remote(self._token, words, self._function, job.places, job.threads))
            self._agents.append(agent)
            self._read(agent)

    def _read(self, watched: _Watched) -> None:
        self._pending[watched.read()] = watched

    def _on_news(self, watched: _Watched, reference: Any) -> None:
        try:
            news: News = ray.get(reference)
        except RayError as error:
            if watched.news is not None:
                raise WorkerError(f"Ray has lost {watched.name} and does not restart it: {_last_line(error)}.") from error
            raise UsageError(
                f"Ray could not start {watched.name}: {_last_line(error)}. All nodes need the same versions of Lockstep, torch and "
                "Python; a runtime environment can install them."
            ) from error
        if watched.news is None or news.actor != watched.news.actor:
            watched.told_head, watched.decoders = "", {}
        watched.news = news
        for stream, data in news.output:
            self._show(watched, stream, data)
        if watched is self._head:
            for agent in self._agents:
                self._tell_head(agent)
        elif news.code == _CANNOT_WORK:
            raise UsageError(f"the agent on {news.node} could not work; its last message says why.")
        else:
            self._tell_head(watched)
        if news.code is None:
            self._read(watched)

    def _tell_head(self, agent: _Watched) -> None:
        """Tell an agent where the head is, if it does not know."""
        head = self._head.news.head if self._head.news is not None else ""
        if head and agent.news is not None and agent.told_head != head:
            agent.told_head = head
            agent.handle.set_head.remote(head)

    def _show(self, watched: _Watched, stream: int, data: bytes) -> None:
        if stream == 0:
            return
        decoder = watched.decoders.setdefault(stream, codecs.getincrementaldecoder("utf-8")("replace"))
        text: str = decoder.decode(data)
        if watched is not self._head:
            assert watched.news is not None
            text = "".join(f"[{watched.news.node}] {line}\n" for line in text.splitlines() if line)
            stream = 2  # the standard output is that of rank 0
        output = self._stdout if stream == 1 else sys.stderr
        output.write(text)
        output.flush()

    def _say_what_is_missing(self) -> None:
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + _SAY_AGAIN_S
            bundles = ", ".join(" and ".join(f"{n:g} {name}" for name, n in each.items()) for each in self._job.bundles)
            print(
                f"lockstep: waiting until Ray has free resources for {len(self._job.bundles)} agents: {bundles}.", file=sys.stderr
            )

    def _wait_for_agents(self) -> None:
        """The head has told the agents that the run is over."""
        told = [agent.handle.set_over.remote() for agent in self._agents]
        deadline = time.monotonic() + _AGENTS_END_S
        while (left := deadline - time.monotonic()) > 0:
            running = [each for each, watched in self._pending.items() if watched is not self._head]
            if not running:
                if told:  # if an actor is killed before it has answered, Ray prints an error among the output of rank 0
                    ray.wait(told, num_returns=len(told), timeout=left)
                return
            for each in ray.wait(running, num_returns=1, timeout=left)[0]:
                with suppress(UsageError, WorkerError):
                    self._on_news(self._pending.pop(each), each)

    # -- signals ----------------------------------------------------------------------------------

    @contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """Signals by which people end programs are passed on to the head. Outside of the main thread, Python has no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for stop_signal, handler in before.items():
                signal.signal(stop_signal, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)
        if len(self._signals) > _MOST_SIGNALS:
            raise KeyboardInterrupt

    def _pass_on_signals(self) -> None:
        if self._signals and (self._head.news is None or not self._head.news.head):
            raise KeyboardInterrupt
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            self._head.handle.send_signal.remote(number)


def _on_head_node() -> dict[str, Any]:
    """The options of an actor that Ray places on the node of its control process, or on another one if that is not possible."""
    found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD_NODE in node["Resources"]]
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(found[0], soft=True)} if found else {}


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
