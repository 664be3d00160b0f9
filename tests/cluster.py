"""Cluster: a run of `lockstep head` and `lockstep agent` on several hosts (tests/hosts.py), with all that can happen to them.

    with Cluster(hosts(3), tmp_path) as cluster:
        cluster.start_head("a")
        for host in "abc":
            cluster.start_agent(host)
        cluster.wait_for_step(10)
        cluster.kill_agent("c")
        assert cluster.result() == expected

The script is tests/scripts/train.py unless another one is given. All hosts see the same folder. Every wait has a deadline.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.cluster.token import write_token
from lockstep.observe.ledger import audit, read
from tests import launch
from tests.fork_server import ROOT, Child, fork
from tests.hosts import Hosts, enter_network
from tests.lane_jobs import SAMPLES
from tests.training_run import EPOCHS, SCRIPT, STEPS
from tests.waiting import POLL_S

PORT = 29400
DEADLINE_S = 90.0
_LAST_LINES = 40
_CLONE_NEWNS = 0x20000


class Member:
    """A head or an agent: its process, its run folder, and what it prints."""

    def __init__(self, name: str, folder: Path, process: Child) -> None:
        self.name, self.process, self.run_dir = name, process, folder / "run"
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"

    def stdout(self) -> str:
        return self._out.read_text()

    def stderr(self) -> str:
        return self._err.read_text()

    def output(self) -> str:
        return self.stdout() + self.stderr()

    def events(self, kind: str) -> list[Any]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]

    def dump(self) -> str:
        code = self.process.poll()
        parts = [f"== {self.name} (pid {self.process.pid}) " + ("still runs" if code is None else f"ended with code {code}")]
        files = [self._out, self._err, self.run_dir / "zygote.txt", self.run_dir / "events.jsonl"]
        for path in (*files, *sorted(self.run_dir.glob("workers/*/*.txt"))):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines:
                parts.append(f"-- {path.name}: {len(lines)} lines, the last of them:")
                parts += lines[-_LAST_LINES:]
        return "\n".join(parts)


class Cluster:
    """``settings``: what tests/scripts/train.py reads: ``hold_at=30`` is TRAIN_HOLD_AT=30. ``env`` is added for all processes."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        script: Path = SCRIPT,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        heads: str = "a",
        workers: int = 2,
        **settings: Any,
    ) -> None:
        self.hosts, self.folder, self._heads, self._workers = hosts, folder, heads, workers
        self._script = [str(script), *args]
        self._env = {"OMP_NUM_THREADS": "1", **{f"TRAIN_{name.upper()}": str(value) for name, value in settings.items()}}
        self._env |= env or {}
        self.token = folder / "token"
        self.head: dict[str, Member] = {}
        self.agent: dict[str, Member] = {}
        self._all: list[Member] = []

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_token(self.token)
        return self

    def __exit__(self, *error: object) -> None:
        for member in self._all:
            if member.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(member.process.pid, signal.SIGKILL)
                member.process.wait(DEADLINE_S)

    # -- processes --------------------------------------------------------------------------------

    def start_head(self, host: str = "a", *options: str, min_workers: int = 1, hang_timeout_s: float = 3.0) -> Member:
        limits = ["--min-workers", str(min_workers), "--hang-timeout", str(hang_timeout_s)]
        listen = ["--listen", f"{self.hosts.address(host)}:{PORT}", "--token-file", str(self.token)]
        self.head[host] = self._start("head", host, ["head", *listen, *limits, *options])
        return self.head[host]

    def start_agent(self, host: str, *options: str, workers: int | None = None, mounts: dict[Path, Path] | None = None) -> Member:
        """``mounts``: folder -> the folder in whose place the agent and its workers see it."""
        heads = ",".join(f"{self.hosts.address(head)}:{PORT}" for head in self._heads)
        where = ["--head", heads, "--token-file", str(self.token), "-n", str(workers or self._workers)]
        self.agent[host] = self._start("agent", host, ["agent", *where, *options, *self._script], mounts or {})
        return self.agent[host]

    def start(self, *options: str, workers: int | None = None, **settings: Any) -> None:
        """Start the heads, and an agent on each host. Training begins when all agents are there."""
        room = (workers or self._workers) * len(self.hosts.names)
        for host in self._heads:
            self.start_head(host, *options, min_workers=room, **settings)
        for host in self.hosts.names:
            self.start_agent(host, workers=workers)

    def _start(self, kind: str, host: str, arguments: list[str], mounts: dict[Path, Path] | None = None) -> Member:
        number = sum(each.name.startswith(f"{kind} {host}") for each in self._all) + 1
        folder = self.folder / f"{kind}-{host}-{number}"
        folder.mkdir()
        arguments = ["-m", "lockstep", arguments[0], "--run-dir", str(folder / "run"), *arguments[1:]]
        clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS") and not k.startswith("LOCKSTEP_")}
        env = {**clean, **self.hosts.environment(host), **self._env}
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            where = str(self.hosts.network(host)), {str(folder): str(at) for folder, at in (mounts or {}).items()}, str(self.folder)
            process = fork(_enter, *where, arguments, env, descriptors=[err.fileno()], output=out.fileno())
        member = Member(f"{kind} {host} {number}", folder, process)
        self._all.append(member)
        return member

    def kill_head(self, host: str = "a", number: int = signal.SIGKILL) -> None:
        os.kill(self.head[host].process.pid, number)
        self.head[host].process.wait(DEADLINE_S)

    def kill_agent(self, host: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.agent[host].process.pid, number)

    def workers(self) -> dict[int, int]:
        """Worker -> process id, of the workers that run and have not written their result."""
        done = self.notes("done")
        found = {int(worker): int(pid) for worker, pid in self.notes("pid").items() if worker not in done}
        return {worker: pid for worker, pid in found.items() if launch.is_running(pid)}

    # -- what the run says and leaves -----------------------------------------------------------------

    def notes(self, kind: str) -> dict[str, str]:
        """What the script has written into files named ``kind``-..., each with a line end when it is whole."""
        texts = {path.name.removeprefix(f"{kind}-"): path.read_text() for path in self.folder.glob(f"{kind}-*") if path.is_file()}
        return {name: text.strip() for name, text in texts.items() if text.endswith("\n")}

    def step(self) -> int:
        """The last step that rank 0 has committed."""
        note = self.folder / "step"
        return int(note.read_text() or 0) if note.exists() else 0

    def generations(self) -> list[tuple[float, int, list[int]]]:
        """When each generation was formed, its number and its members, as all heads so far have noted it."""
        found = []
        for member in self._all:
            for entry in member.events("event"):
                forms = [action["Form"] for action in entry["actions"] if "Form" in action]
                found += [(entry["time"], form["number"], form["members"]) for form in forms]
            for entry in member.events("continue"):
                found.append((entry["time"], entry["generation"], entry["workers"]))
        return sorted(found)

    def hurry(self) -> None:
        """The test has acted: the run need not be slow any more."""
        (self.folder / "hurry").touch()

    def dump(self) -> str:
        return "\n".join([f"step {self.step()}, generations {self.generations()}", *(member.dump() for member in self._all)])

    # -- waiting ----------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}.\n{self.dump()}"
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, deadline_s: float = DEADLINE_S) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step} is committed", deadline_s)

    def wait_for_size(self, size: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the newest generation has ``size`` members."""
        what = f"the newest generation has {size} members"
        self.wait_until(lambda: self.generations() and len(self.generations()[-1][2]) == size, what, deadline_s)

    def wait_for_text(self, member: Member, text: str, deadline_s: float = DEADLINE_S) -> None:
        self.wait_until(lambda: text in member.output(), f"{member.name} has printed {text!r}", deadline_s)

    def wait(self, member: Member, deadline_s: float = DEADLINE_S) -> int:
        """The exit code of a head or an agent."""
        try:
            return member.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{member.name} has not ended after {deadline_s} s.\n{self.dump()}") from None

    def result(self, head: str | None = None, deadline_s: float = DEADLINE_S) -> str:
        """Wait for the end of a head, which must have exit code 0. Returns the result that all workers have written."""
        assert self.wait(self.head[head or self._heads[0]], deadline_s) == 0, self.dump()
        results = set(self.notes("done").values())
        assert len(results) == 1, f"{self.notes('done')}\n{self.dump()}"
        return results.pop()

    def require_ledger(self) -> None:
        """The ledgers of all agents together (`--ledger`) must have every sample exactly once."""
        folders = [member.run_dir / "ledger" for member in self._all if list(member.run_dir.glob("ledger/*.jsonl"))]
        lines = [line for folder in folders for line in read(folder)]
        assert {line["step"] for line in lines if line["kind"] == "commit"} == set(range(STEPS)), self.dump()
        assert audit(lines, SAMPLES, EPOCHS) == [], self.dump()


# -- in the forked process -----------------------------------------------------------------------------


def _enter(err: int, network: str, mounts: dict[str, str], folder: str, arguments: list[str], env: dict[str, str]) -> int:
    enter_network(Path(network))
    if mounts:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for own, at in mounts.items():
        subprocess.run(["mount", "--bind", own, at], check=True)
    return launch._enter(err, folder, arguments, env)


assert SCRIPT.is_relative_to(ROOT)
