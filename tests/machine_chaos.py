"""Plays random schedules of faults against runs on three hosts. Every run must end with the bits of one process, and leave nothing.

make chaos                                             two hundred schedules, after those of tests/chaos.py
python -m tests.machine_chaos FIRST COUNT [--jobs N]   the schedules FIRST to FIRST + COUNT - 1, N at a time

Each of the hosts a, b and c (tests/hosts.py) has an agent with two workers; there is one head, or one on a and another one on b.
The script is tests/scripts/chaos.py. A fault has a begin and, unless it is the death of a worker, an end: the host is connected
again, the processes continue, the agent or the head is started again. Faults overlap.

No schedule takes the training state away: a fault that would leave no member with it is left out, and with two heads a fault
that would leave no majority for ever. "cut two hosts" leaves no majority for a while: the run must wait, and then continue.
When a fault strikes is a matter of time, so a schedule that is played twice is not the same to the microsecond.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from lockstep.observe.ledger import audit, read
from lockstep.plan.membership_recovery import has_majority
from tests import chaos
from tests.chaos import EPOCHS, SCRIPT, STEPS, Expected, undisturbed
from tests.cluster import Cluster, Member
from tests.hosts import Hosts
from tests.lane_jobs import SAMPLES
from tests.launch import is_running

HANG_TIMEOUT_S = 3.0
HEAD_TIMEOUT_S = 30.0
STALL_S = 30.0
"""How long no step may commit when no fault is in effect: the timeouts of heartbeats, hangs and recoveries, on a busy machine."""
SETTLE_S = 8.0
"""A worker that was not lost this long after a fault has ended is not lost by it any more."""
DEADLINE_S = 120.0
PACE_S = 0.15

FAULTS = (
    *("kill worker", "kill worker", "stop worker", "raise"),
    *("kill agent", "kill agent", "leave"),
    *("cut", "cut silently", "cut silently", "stop host"),
    *("kill head", "kill head"),
)


# -- schedules -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Strikes ``after_s`` after the fault before it. ``pick`` in [0, 1) chooses the worker or the host."""

    kind: str
    after_s: float
    pick: float
    lasts_s: float


@dataclass(frozen=True)
class Schedule:
    seed: int
    heads: str
    faults: tuple[Fault, ...]
    await_step: int
    """The first fault strikes after this step. -1: when the agents have been started."""
    awaits_all: bool
    """Whether all machines must belong to the run again before its loop may end."""
    spares: int = 0

    def __str__(self) -> str:
        spares = f", {self.spares} spares" if self.spares else ""
        return f"{len(self.heads)} head{'s' if len(self.heads) > 1 else ''}{spares}"


def draw(seed: int) -> Schedule:
    """The schedule of a seed. Pure."""
    random = Random(f"machines {seed}")
    heads = random.choice(["a", "a", "ab"])
    kinds = [*FAULTS, *(["cut two hosts"] if heads == "ab" else [])]
    faults = []
    for _ in range(random.randint(1, 5)):
        kind = random.choice(kinds)
        if kind == "raise":  # a script that raises twice has a bug
            kinds = [each for each in kinds if each != kind]
        after_s = 0.0 if random.random() < 0.3 else random.uniform(0.0, 2.0)
        longest_s = 3.5 if kind == "stop host" else 5.0
        lasts_s = random.choice([random.uniform(0.05, 1.0), random.uniform(1.0, longest_s)])
        faults.append(Fault(kind, after_s, random.random(), lasts_s))
    spares = Random(f"machines {seed} spares").choice([0, 0, 1, 2])
    return Schedule(seed, heads, tuple(faults), random.choice([-1, 0, 1, 3, 8]), random.random() < 0.5, spares)


# -- one schedule --------------------------------------------------------------------------------------


@dataclass
class Active:
    """A fault that is in effect: when and how it ends."""

    kind: str
    hosts: str
    ends_at: float
    end: Callable[[], object]
    workers: set[int] = field(default_factory=set)
    """The workers that may be lost because of it."""


class MachineChaos:
    """One schedule against one run."""

    def __init__(self, hosts: Hosts, folder: Path, schedule: Schedule) -> None:
        env = {"CHAOS_PACE_S": str(PACE_S)}
        self.cluster = Cluster(hosts, folder, SCRIPT, env=env, heads=schedule.heads)
        self._hosts, self._folder, self._schedule = hosts, folder, schedule
        self._networks = {os.stat(hosts.network(host)).st_ino: host for host in hosts.names}
        self._host_of: dict[int, str] = {}
        self._active: list[Active] = []
        self._doubtful: dict[int, float] = {}  # worker -> until when it may be lost because of a fault
        self._left: list[Member] = []
        self._step, self._stepped_at = -1, time.monotonic()
        self.done: list[str] = []
        """What was done, for people."""

    def play(self, expected: Expected) -> None:
        """Raises AssertionError if the run hangs, fails, ends with other bits, or leaves something behind."""
        with self.cluster:
            try:
                self._start()
                for fault in self._schedule.faults:
                    self._wait(fault.after_s)
                    self.done.append(f"{self._strike(fault)} at step {self.cluster.step()}")
                self._finish()
                self._check(expected)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.cluster.dump()}") from None

    def _start(self) -> None:
        for host in self._schedule.heads:
            self._start_head(host, min_workers=6)
        for host in self._hosts.names:
            self._start_agent(host)
        self._wait_until(lambda: self.cluster.step() >= self._schedule.await_step, f"step {self._schedule.await_step}", 60.0)

    def _start_head(self, host: str, min_workers: int = 1) -> None:
        options = "--ledger", "--max-respawns", "50", "--spares", str(self._schedule.spares)
        self.cluster.start_head(host, *options, min_workers=min_workers, hang_timeout_s=HANG_TIMEOUT_S)

    def _start_agent(self, host: str) -> None:
        self.cluster.start_agent(host, "--head-timeout", str(HEAD_TIMEOUT_S), "--connect-timeout", str(HEAD_TIMEOUT_S))

    # -- time -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """End the faults that are over, and note where workers run and when steps commit."""
        now = time.monotonic()
        for active in [each for each in self._active if now >= each.ends_at]:
            self._end(active)
        for worker, pid in self.cluster.notes("pid").items():
            if int(worker) not in self._host_of:
                with suppress(OSError):
                    self._host_of[int(worker)] = self._networks[os.stat(f"/proc/{pid}/ns/net").st_ino]
        if self.cluster.step() != self._step or self._active or self._is_over:
            self._step, self._stepped_at = self.cluster.step(), now
        assert now - self._stepped_at < STALL_S, f"no step has committed for {STALL_S:g} s, although no fault is in effect"

    def _end(self, active: Active) -> None:
        self._active.remove(active)
        active.end()
        self._doubtful |= dict.fromkeys(active.workers, time.monotonic() + SETTLE_S)

    def _wait_until(self, condition: Callable[[], Any], what: str, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while not condition() and not self._is_over:
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
            self._tick()
            time.sleep(0.02)

    def _wait(self, seconds: float) -> None:
        """The schedule's own rhythm: nothing is waited for here."""
        end = time.monotonic() + seconds
        self._wait_until(lambda: time.monotonic() >= end, "time passes", seconds + 60.0)

    @property
    def _is_over(self) -> bool:
        return any(head.process.poll() not in (None, -signal.SIGKILL) for head in self.cluster.head.values())

    # -- faults -----------------------------------------------------------------------------------

    @property
    def _members(self) -> list[int]:
        generations = self.cluster.generations()
        return generations[-1][2] if generations else []

    def _keepers(self) -> set[int]:
        """The members that have the training state, and that no fault makes the run lose."""
        now = time.monotonic()
        doubtful = {worker for worker, until in self._doubtful.items() if now < until}
        doubtful |= {worker for active in self._active for worker in active.workers}
        running = self.cluster.workers()
        found = {worker for worker in self._members if worker in running and worker in self._host_of}
        return {worker for worker in found - doubtful if (self._folder / f"seen-{worker}.jsonl").exists()}

    def _on(self, hosts: str) -> set[int]:
        """The workers on these hosts."""
        return {worker for worker, host in self._host_of.items() if host in hosts}

    def _may_lose(self, workers: set[int]) -> bool:
        """Whether the run can go on for ever without these workers."""
        members = self._members
        if not members:  # there is no state to lose yet; of the workers, enough must stay to begin
            return not self._active
        left = self._keepers() - workers
        return bool(left) and (self._schedule.heads == "a" or has_majority(members, sorted(left, key=members.index)))

    def _is_active(self, hosts: str, *kinds: str) -> bool:
        return any((each.kind in kinds or not kinds) and set(each.hosts) & set(hosts) for each in self._active)

    def _strike(self, fault: Fault) -> str:
        """Returns what was done."""
        self._tick()
        if self._is_over:
            return f"{fault.kind}: the run is over"
        kind = fault.kind
        if kind in ("kill worker", "stop worker", "raise"):
            return self._strike_worker(fault)
        if kind == "kill head":
            return self._kill_head(fault)
        if kind == "cut two hosts":
            return self._cut_two(fault)
        free = [host for host in self._hosts.names if not self._is_active(host)]
        if not free:
            return f"{kind}: no host is free"
        host = free[int(fault.pick * len(free))]
        return f"{kind} {host}{self._strike_host(kind, host, fault.lasts_s)}"

    def _strike_worker(self, fault: Fault) -> str:
        running = {worker: pid for worker, pid in self.cluster.workers().items() if worker in self._host_of}
        running = {worker: pid for worker, pid in running.items() if not self._is_active(self._host_of[worker], "stop host")}
        if not running:
            return f"{fault.kind}: nobody runs"
        worker = sorted(running)[int(fault.pick * len(running))]
        text = f"{fault.kind} {worker} on {self._host_of[worker]}"
        if (worker in self._members or not self._members) and not self._may_lose({worker}):
            return f"{text}: not possible"
        if fault.kind == "raise":
            if worker not in self._members:
                return f"{text}: not a member"
            (self._folder / f"raise-{worker}").touch()
        else:
            _signal(running[worker], signal.SIGKILL if fault.kind == "kill worker" else signal.SIGSTOP)
        if fault.kind == "stop worker":
            ends_at, go_on = time.monotonic() + fault.lasts_s, partial(_signal, running[worker], signal.SIGCONT)
            self._active.append(Active(fault.kind, "", ends_at, go_on, {worker}))
            return f"{text} for {fault.lasts_s:.1f} s"
        self._doubtful[worker] = math.inf
        return text

    def _strike_host(self, kind: str, host: str, lasts_s: float) -> str:
        cluster, mine, is_only_head = self.cluster, self._on(host), self._schedule.heads == host
        isolates_head = is_only_head and kind in ("cut", "cut silently", "stop host")
        workers = set(self._host_of) - mine if isolates_head else mine
        if not self._may_lose(workers) or (is_only_head and kind == "stop host" and self._is_active(host, "kill head")):
            return ": not possible"
        ends: dict[str, Callable[[], object]] = {
            "cut": partial(self._hosts.restore, host),
            "cut silently": partial(self._hosts.restore, host),
            "stop host": partial(self._hosts.kill, host, signal.SIGCONT),
        }
        if kind in ("kill agent", "leave"):
            agent = cluster.agent[host]
            if agent.process.poll() is not None or not agent.events("begin"):
                return ": it does not run"
            cluster.kill_agent(host, signal.SIGKILL if kind == "kill agent" else signal.SIGTERM)
            self._doubtful |= dict.fromkeys(mine, math.inf)
            if kind == "leave":
                self._left.append(agent)
        elif kind == "stop host":
            self._hosts.kill(host, signal.SIGSTOP)
        else:
            self._hosts.cut(host, silently=kind == "cut silently")
        end = ends.get(kind, partial(self._start_agent_again, host))
        self._active.append(Active(kind, host, time.monotonic() + lasts_s, end, workers))
        return f" for {lasts_s:.1f} s"

    def _start_agent_again(self, host: str) -> None:
        self._wait_until_ended(self.cluster.agent[host])
        self._start_agent(host)

    def _wait_until_ended(self, member: Member) -> None:
        """Not ``_wait_until``: that would end other faults within the end of this one."""
        end = time.monotonic() + 30.0
        while member.process.poll() is None:
            assert time.monotonic() < end, f"{member.name} has not ended within 30 s"
            time.sleep(0.02)

    def _kill_head(self, fault: Fault) -> str:
        heads = [host for host in self._schedule.heads if not self._is_active(host, "kill head", "stop host")]
        if not heads:
            return "kill head: none runs"
        host = heads[int(fault.pick * len(heads))]
        self.cluster.kill_head(host)
        self._active.append(Active("kill head", host, time.monotonic() + fault.lasts_s, partial(self._start_head, host)))
        return f"kill head {host} for {fault.lasts_s:.1f} s"

    def _cut_two(self, fault: Fault) -> str:
        """No majority is left, and no member is lost."""
        if self._active or self._keepers() != set(self._members) or len(self._members) != 6:
            return f"{fault.kind}: not possible"
        two = [host for host in self._hosts.names if host != self._hosts.names[int(fault.pick * 3)]]
        for host in two:
            self._hosts.cut(host, silently=True)
        self._active.append(
            Active(fault.kind, "abc", time.monotonic() + fault.lasts_s, partial(self._restore, two), set(self._members))
        )
        return f"{fault.kind} {' '.join(two)} for {fault.lasts_s:.1f} s"

    def _restore(self, hosts: list[str]) -> None:
        for host in hosts:
            self._hosts.restore(host)

    # -- the end ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait for the end of all faults and of the run."""
        cluster = self.cluster
        self._wait_until(lambda: not self._active, "all faults are over", 60.0)
        if self._schedule.awaits_all:
            self._wait_until(lambda: len(self._members) == 6 or cluster.notes("done"), "all machines belong to the run again", 60.0)
        cluster.hurry()
        self._wait_until(lambda: False, "the run has ended", DEADLINE_S)
        for active in list(self._active):  # the run was over before
            self._end(active)
        ended = {name: head.process.returncode for name, head in cluster.head.items() if head.process.poll() is not None}
        codes = [code for code in ended.values() if code != -signal.SIGKILL]
        assert codes == [0], f"the heads have ended with {ended}"
        for host in self._schedule.heads:  # a head that had nothing to do
            if cluster.head[host].process.poll() is None:
                cluster.kill_head(host)

    def _check(self, expected: Expected) -> None:
        self._check_agents()
        want = json.loads(expected.result)
        results = self.cluster.notes("done")
        assert results, "no worker has written its result"
        for worker, text in results.items():
            found = json.loads(text)
            differ = [name for name in want if found.get(name) != want[name]]
            assert not differ, f"worker {worker} has other {', '.join(differ)}: {found} instead of {want}"
        self._check_ledger()
        self._check_logged(expected)

    def _check_agents(self) -> None:
        """All agents end by themselves, and nothing runs on their hosts any more."""
        for host, agent in self.cluster.agent.items():
            code = self.cluster.wait(agent, HEAD_TIMEOUT_S + 15.0)
            knows_end = bool(agent.events("the run has ended"))
            left = agent.events("leaving")
            was_killed = code == -signal.SIGKILL
            assert was_killed or (code == 0 if knows_end or left else code == 1), f"the agent of {host} has ended with {code}"
        for agent in self._left:
            assert agent.process.poll() == 0, f"{agent.name}, which was told to leave, has ended with {agent.process.poll()}"
        end = time.monotonic() + 10.0
        while (left_over := {host: pids for host in self._hosts.names if (pids := self._hosts.pids(host))}) and (
            time.monotonic() < end
        ):
            time.sleep(0.05)
        assert not left_over, f"processes are left: { {host: list(map(_command, pids)) for host, pids in left_over.items()} }"

    def _check_ledger(self) -> None:
        folders = [path.parent for path in self._folder.glob("agent-*/run/ledger/*.jsonl")]
        lines = [line for folder in sorted(set(folders)) for line in read(folder)]
        missing = sorted(set(range(STEPS)) - {line["step"] for line in lines if line["kind"] == "commit"})
        assert not missing, f"the ledger lacks steps {missing}"
        mistakes = audit(lines, SAMPLES, EPOCHS)
        assert not mistakes, f"ledger: {mistakes}"

    def _check_logged(self, expected: Expected) -> None:
        handed = chaos.read_lines(self._folder / "logged.jsonl")
        steps = [step for step, _ in handed]
        twice = sorted({step for step in steps if steps.count(step) > 1})
        assert not twice, f"on_log got steps {twice} more than once"
        for step, values in handed:
            assert values == expected.handed[step], f"on_log got {values} for step {step}, not {expected.handed[step]}"
        for path in self._folder.glob("seen-*.jsonl"):
            for step, logged in chaos.read_lines(path):
                want = expected.seen[step]
                assert logged == want, f"{path.name}: run.logged is {logged} after step {step}, not {want}"


def play(hosts: Hosts, folder: Path, seed: int, expected: Expected) -> str:
    """Play one schedule. Returns what was done; raises AssertionError with everything that is needed to play it again."""
    schedule = draw(seed)
    machines = MachineChaos(hosts, folder, schedule)
    try:
        machines.play(expected)
    except AssertionError as error:
        what, _, dump = str(error).partition("\n")
        raise AssertionError(f"schedule {seed} ({schedule}): {'; '.join(machines.done)}: {what}\n{dump}") from None
    return f"{schedule}: {'; '.join(machines.done)}"


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command(pid: int) -> str:
    with suppress(OSError):
        return f"{pid} {Path('/proc', str(pid), 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:80]}"
    return f"{pid}{'' if is_running(pid) else ' (gone)'}"


# -- many schedules ------------------------------------------------------------------------------------


def _play_one(seed: int, folder: Path, expected: Expected, keep: Path | None) -> tuple[int, bool, str, float]:
    """In a process of its own: its hosts carry the number of the process. Returns (seed, whether it failed, text, seconds)."""
    here, start, failed = folder / f"run-{seed}", time.monotonic(), False
    try:
        with Hosts(3) as hosts:
            text = play(hosts, here, seed, expected)
    except Exception as error:  # noqa: BLE001 - an error of the harness is a failure too
        failed = True
        text, _, dump = f"{error if isinstance(error, AssertionError) else repr(error)}".partition("\n")
        if keep is not None:
            shutil.copytree(here, keep / f"{seed}", ignore_dangling_symlinks=True, dirs_exist_ok=True, ignore=chaos._sockets)
            (keep / f"{seed}" / "dump.txt").write_text(f"{text}\n{dump}")
    shutil.rmtree(here, ignore_errors=True)
    return seed, failed, text, time.monotonic() - start


def main(first: int, count: int, jobs: int, *, verbose: bool = False, keep: Path | None = None) -> int:
    """Returns how many schedules failed."""
    with tempfile.TemporaryDirectory(prefix="lockstep-machines-") as temporary:
        folder = Path(temporary).resolve()
        expected = undisturbed(folder / "undisturbed", scaler=False)
        began, failures, took = time.monotonic(), 0, [0.0]
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            one = partial(_play_one, folder=folder, expected=expected, keep=keep)
            for seed, failed, text, seconds in pool.map(one, range(first, first + count)):
                failures += failed
                took.append(seconds)
                if failed:
                    print(f"FAILED {text} ({seconds:.1f} s)", flush=True)
                elif verbose:
                    print(f"{seed}: {text} ({seconds:.1f} s)", flush=True)
        print(
            f"{count} schedules from {first}, {jobs} at a time: {failures} failed; {time.monotonic() - began:.0f} s, "
            f"{sum(took) / max(1, count):.1f} s each, the longest {max(took):.1f} s"
        )
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="how many schedules to play at a time")
    parser.add_argument("--verbose", action="store_true", help="print what was done in each schedule")
    parser.add_argument("--keep", type=Path, help="copy the folder of each failed schedule to this folder, with a dump of its logs")
    given = parser.parse_args()
    sys.exit(main(given.first, given.count, given.jobs, verbose=given.verbose, keep=given.keep) > 0)
