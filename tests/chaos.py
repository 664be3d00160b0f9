"""Plays random schedules of faults against real runs. Every run must end with the bits of an undisturbed one, and leave nothing.

make chaos                                     a thousand schedules, and a line about them
python -m tests.chaos FIRST COUNT [--jobs N]   the schedules FIRST to FIRST + COUNT - 1, N at a time: with 16 cores, 6

A schedule follows from its seed: a variant of tests/scripts/chaos.py (how gradients travel, checkpoints, loader processes, a
GradScaler, a spare) and the faults of each launch. The last fault of a launch may end the whole run: then the same command is
started again. When a fault strikes is a matter of time, so a schedule that is played twice is not the same to the microsecond.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lockstep.launcher import packets
from lockstep.launcher.run_folder import connect
from lockstep.observe.ledger import audit, read
from tests.fork_server import ROOT
from tests.lane_jobs import SAMPLES
from tests.launch import LaunchedRun, children_of, is_running

SCRIPT = ROOT / "tests" / "scripts" / "chaos.py"
STEPS, EPOCHS = 30, 6  # of the script
HANG_TIMEOUT_S = 2.0
DEADLINE_S = 90.0
KEPT = 3
"""How many checkpoints the script keeps."""

WORKER_FAULTS = ("kill", "kill newest", "SIGTERM", "stop", "pause", "raise", "slow")
FAULTS = (
    *("kill", "kill", "kill", "kill", "kill newest", "SIGTERM", "stop", "pause", "raise", "slow"),
    *("scale", "scale", "kill zygote", "SIGTERM zygote", "stop zygote", "pause zygote", "pause agent"),
)
ENDINGS = ("SIGTERM agent", "SIGTERM agent", "kill agent", "kill all", "SIGTERM all")
"""Faults that end the whole run."""


# -- schedules -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Strikes ``after_steps`` committed steps and ``after_s`` after the fault before it: the steps may take 3 s at most.

    ``pick`` in [0, 1) chooses the worker among those that run, or a number of workers.
    """

    kind: str
    after_steps: int
    after_s: float
    pick: float
    lasts_s: float


@dataclass(frozen=True)
class Variant:
    workers: int
    comm: str
    machines: int
    checkpoints: bool
    loaders: int
    scaler: bool
    spares: int = 0

    def __str__(self) -> str:
        spares, machines = ["1 spare"] * self.spares, [f"{self.machines} machines"] * (self.machines > 1)
        parts = [f"{self.workers} workers", *spares, self.comm, *machines]
        named = {"checkpoints": self.checkpoints, "loaders": self.loaders, "scaler": self.scaler}
        return " ".join([*parts, *(name for name, is_on in named.items() if is_on)])


@dataclass(frozen=True)
class Schedule:
    """``launches``: the faults of each launch. The last fault of each launch but the last ends the run."""

    seed: int
    variant: Variant
    launches: tuple[tuple[Fault, ...], ...]
    await_workers: int
    """How many workers must have started their script before the first fault. Fewer than all: the others are still starting."""
    calm_s: float
    """How long the loop stays slow after the last fault: sometimes replacements join in time, sometimes not."""


def draw(seed: int) -> Schedule:
    """The schedule of a seed. Pure."""
    random = Random(seed)
    comm = random.choice(["auto", "auto", "gloo", "twolevel"])
    variant = Variant(
        workers=random.randint(2, 4),
        comm=comm,
        machines=2 if comm == "twolevel" else 1,
        checkpoints=random.random() < 0.6,
        loaders=int(random.random() < 0.3),
        scaler=random.random() < 0.5,
        spares=Random(f"{seed} spares").randint(0, 1),
    )
    launches = [list(draw_faults(random, random.randint(1, 4)))]
    if random.random() < 0.35:
        launches[0].append(Fault(random.choice(ENDINGS), random.randint(0, 8), random.uniform(0.0, 0.2), 0.0, 0.0))
        launches.append(list(draw_faults(random, random.randint(0, 2))))
    return Schedule(seed, variant, tuple(map(tuple, launches)), random.randint(1, variant.workers), random.choice([0.0, 0.3, 1.0]))


def draw_faults(random: Random, count: int, kinds: Sequence[str] = FAULTS) -> Iterator[Fault]:
    for _ in range(count):
        kind = random.choice(kinds)
        if kind in ("raise", "stop", "stop zygote"):  # a script that raises twice has a bug; a stop costs the hang timeout
            kinds = [each for each in kinds if each != kind]
        after_steps, after_s = random.choice([0, 1, 2, 4, 7]), random.uniform(0.0, 0.2)
        if random.random() < 0.3:  # at once
            after_steps, after_s = 0, 0.0
        yield Fault(kind, after_steps, after_s, random.random(), random.uniform(0.05, 1.0))


# -- one schedule --------------------------------------------------------------------------------------


class Chaos:
    """One schedule against one run, which may need several launches. ``steps`` and ``epochs`` are those of ``script``."""

    script, steps, epochs, hang_timeout_s = SCRIPT, STEPS, EPOCHS, HANG_TIMEOUT_S
    has_tracker = True
    """Whether the script has the tracker csv."""

    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self._folder, self._schedule = folder, schedule
        self._random = Random(f"{schedule.seed} spared")
        self._checkpoints, self._temporary = folder / "checkpoints", folder / "temporary"
        self._temporary.mkdir(parents=True)
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._timers: list[threading.Timer] = []
        self._spared = -1
        self._struck: set[int] = set()
        self._launch = 0
        self.run: LaunchedRun | None = None
        self.done: list[str] = []
        """What was done, for people."""

    def play(self, expected: Expected) -> None:
        """Raises AssertionError if a run hangs, fails, ends with other bits, or leaves something behind."""
        launches = list(self._schedule.launches)
        try:
            while True:
                faults = launches.pop(0) if launches else ()
                if self._play_launch(faults):
                    break
                assert self._launch < 5, "the run does not finish"
            self._check(expected)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._dump()}") from None
        finally:
            for timer in self._timers:
                timer.cancel()
            if self.run is not None:
                self.run.stop()

    # -- launches ---------------------------------------------------------------------------------

    def _play_launch(self, faults: tuple[Fault, ...]) -> bool:
        """Start the command, strike, and wait for the end. Returns whether the script has finished; otherwise it must resume."""
        self._begin_launch()
        run, schedule = self._running, self._schedule
        self._spared = self._random.randrange(schedule.variant.workers)
        self._struck = set()
        run.wait_until(lambda: len(run.workers()) >= schedule.await_workers, "workers run", may_end=True)
        for fault in faults:
            self._wait(fault)
            self.done.append(f"{self._strike(fault)} at step {self._step()}")
        time.sleep(schedule.calm_s if faults else 0.0)
        (self._folder / "hurry").touch()
        try:
            code = run.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run is not over after {DEADLINE_S} s") from None
        self._finish_timers()
        self._check_leftovers()
        return self._judge_end(code, faults[-1].kind if faults else "")

    @property
    def _running(self) -> LaunchedRun:
        assert self.run is not None
        return self.run

    def _begin_launch(self) -> None:
        """What the script of the last launch has written is put aside. The run folder stays: the agent does that itself."""
        aside = self._folder / f"launch-{self._launch}"
        for path in [path for path in self._folder.iterdir() if path.is_file()]:
            aside.mkdir(exist_ok=True)
            path.rename(aside / path.name)
        self._launch += 1
        if self._launch > 1:
            self.done.append("launched again")
        self.run = LaunchedRun(
            self.script,
            *("--hang-timeout", str(self.hang_timeout_s), "--max-respawns", "50", "--ledger"),
            *("--spares", str(self._schedule.variant.spares)),
            folder=self._folder,
            workers=self._schedule.variant.workers,
            env=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        return environment(self._schedule.variant, self._checkpoints, self._temporary)

    # -- faults -----------------------------------------------------------------------------------

    def _wait(self, fault: Fault) -> None:
        run, begin, end = self._running, self._step(), time.monotonic() + 3.0
        while self._step() < begin + fault.after_steps and time.monotonic() < end and run.process.poll() is None:
            time.sleep(0.005)
        time.sleep(fault.after_s)  # the schedule's own rhythm: nothing is waited for here

    def _step(self) -> int:
        """The last step that rank 0 has committed in this launch."""
        note = self._folder / "step"
        return int(note.read_text() or 0) if note.exists() else 0

    def _strike(self, fault: Fault) -> str:
        """Returns what was done."""
        run, kind = self._running, fault.kind
        alive = run.workers()
        if kind == "scale":
            return self._scale(1 + int(fault.pick * 5))
        if kind.endswith(" all"):
            for worker, pid in alive.items():
                self._signal_worker(worker, pid, kind)
            return f"{kind}: workers {sorted(alive)}"
        if kind.endswith((" agent", " zygote")):
            how, _, whom = kind.partition(" ")
            pids = [run.process.pid] if whom == "agent" else self._zygotes()
            if run.process.poll() is None and pids:
                self._signal(pids[0], how, fault.lasts_s)
            return kind if pids else f"{kind}: none runs"
        candidates = sorted(worker for worker in alive if worker != self._spared)
        if not candidates:
            return f"{kind}: nobody runs"
        worker = candidates[-1] if kind == "kill newest" else candidates[int(fault.pick * len(candidates))]
        members = run.generations()[-1] if run.generations() else alive  # a spare notices nothing
        others = {each for each in members if each in alive and each != worker}
        if kind == "stop" and (not others or any(text.startswith("scale to 1 ") for text in self.done)):
            return f"{kind} {worker}: nobody else would notice"
        if kind in ("raise", "slow"):
            (self._folder / f"{kind}-{worker}").touch()
            self._struck |= {worker} if kind == "raise" else set()
        else:
            self._signal_worker(worker, alive[worker], kind, fault.lasts_s)
        return f"{kind} {worker}"

    def _signal_worker(self, worker: int, pid: int, kind: str, lasts_s: float = 0.0) -> None:
        if not kind.startswith("pause"):
            self._struck.add(worker)
        self._signal(pid, kind.partition(" ")[0], lasts_s)

    def _signal(self, pid: int, how: str, lasts_s: float) -> None:
        number = {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM}.get(how, signal.SIGSTOP)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if how == "pause":
            self._timers.append(threading.Timer(lasts_s, _continue, (pid,)))
            self._timers[-1].start()

    def _scale(self, size: int) -> str:
        try:
            with connect(self._running.run_dir, 5.0) as connection:
                packets.send(connection, {"type": "scale", "size": size})
                answer = packets.receive(connection)
        except OSError as error:
            return f"scale to {size}: {error}"
        return f"scale to {size}{'' if answer and answer.get('ok') else f': {answer}'}"

    def _zygotes(self) -> list[int]:
        """A zygote is the child of the agent that leads a process group."""
        with suppress(OSError):
            return [pid for pid in children_of(self._running.process.pid) if os.getpgid(pid) == pid]
        return []

    def _finish_timers(self) -> None:
        for timer in self._timers:
            timer.join()

    # -- the oracle -------------------------------------------------------------------------------

    def _judge_end(self, code: int, last: str) -> bool:
        """Whether the exit code is right. Returns whether the script has finished."""
        run = self._running
        ends = run.events("end")
        why = ends[-1]["why"] if ends else "the agent was killed"
        if run.results():
            assert code == 0 or last in ENDINGS, f"exit code {code} although workers have finished: {why}"
            if code == 0:
                return True
        members = run.generations()[-1] if run.generations() else []
        hung = {action["Kill"]["worker"] for entry in run.events() for action in entry["actions"] if "Kill" in action}
        dismissed = {action["Dismiss"]["worker"] for entry in run.events() for action in entry["actions"] if "Dismiss" in action}
        all_struck = set(members) <= self._struck | hung | dismissed
        allowed = {"SIGTERM agent": {0, 143}, "kill agent": {-9}, "kill all": {137}, "SIGTERM all": {0, 143}}.get(last, set())
        is_saved = code == 0 and "which is saved" in why  # the last worker got SIGTERM
        assert code in allowed or is_saved or (all_struck and code != 0), f"exit code {code} without a result: {why}"
        assert code != 0 or self._schedule.variant.checkpoints, f"exit code 0, but nothing is finished or saved: {why}"
        self.done.append(f"ended with code {code}")
        return False

    def _check(self, expected: Expected) -> None:
        """The run has finished."""
        want = json.loads(expected.result)
        for worker, text in self._running.notes("done").items():
            found = json.loads(text)
            differ = [name for name in want if found.get(name) != want[name]]
            assert not differ, f"worker {worker} has other {', '.join(differ)}: {found} instead of {want}"
        self._check_ledger()
        self._check_logged(expected)
        if self.has_tracker:
            self._check_tracked(expected)
        self._check_descriptors()
        if self._schedule.variant.checkpoints:
            names = sorted(path.name for path in self._checkpoints.iterdir() if path.name != "tracking")
            whole = [name for name in names if (self._checkpoints / name / "manifest.json").exists()]
            assert names == whole, f"left in the checkpoint folder: {sorted(set(names) - set(whole))}"
            assert 1 <= len(names) <= KEPT, f"there are {len(names)} checkpoints: {names}"

    def _check_ledger(self) -> None:
        """Each launch that committed something has repeated the steps of the launches before it from there on."""
        launches = [self._folder / "run" / f"earlier-{n}" / "ledger" for n in range(1, self._launch)]
        lines: list[dict[str, Any]] = []
        for number, ledger in enumerate([*launches, self._folder / "run" / "ledger"]):
            found = read(ledger) if ledger.exists() and list(ledger.iterdir()) else []
            found = [{**line, "generation": f"{number}/{line['generation']}"} for line in found]
            begin = min((line["step"] for line in found if line["kind"] == "commit"), default=self.steps)
            lines = [line for line in lines if line["step"] < begin] + found
        committed = {line["step"] for line in lines if line["kind"] == "commit"}
        missing = sorted(set(range(self.steps)) - committed)
        assert not missing, f"the ledger lacks steps {missing}"
        mistakes = audit(lines, SAMPLES, self.epochs)
        assert not mistakes, f"ledger: {mistakes}"

    def _check_logged(self, expected: Expected) -> None:
        for launch in range(1, self._launch + 1):
            folder = self._folder / f"launch-{launch}" if launch < self._launch else self._folder
            handed = read_lines(folder / "logged.jsonl")
            steps = [step for step, _ in handed]
            twice = sorted({step for step in steps if steps.count(step) > 1})
            assert not twice, f"on_log got steps {twice} more than once in launch {launch}"
            for step, values in handed:
                assert values == expected.handed[step], f"on_log got {values} for step {step}, not {expected.handed[step]}"
            for path in folder.glob("seen-*.jsonl"):
                for step, logged in read_lines(path):
                    want = expected.seen[step]
                    assert logged == want, f"{path.name}: run.logged is {logged} after step {step}, not {want}"
        leaders = {members[0] for members in self._running.generations()}
        if self._launch == 1 and len(leaders) == 1 and not leaders & self._struck:
            missing = sorted(set(expected.handed) - set(steps))
            assert not missing, f"on_log did not get steps {missing}, although rank 0 was always the same worker"

    def _check_tracked(self, expected: Expected) -> None:
        """The tracker has each step once, also if rank 0 has died, and over all launches."""
        place = self._checkpoints if self._schedule.variant.checkpoints else self._folder / "run"
        files = list((place / "tracking").glob("*/metrics.csv"))
        file = max(files, key=lambda path: path.stat().st_mtime_ns)  # a launch that found no checkpoint has begun new curves
        with file.open(newline="") as lines:
            rows = [(int(row.pop("step")), row) for row in csv.DictReader(lines)]
        assert [step for step, _ in rows] == sorted(expected.handed), f"steps in {file}: {[step for step, _ in rows]}"
        for step, row in rows:
            found = {name: float(cell).hex() for name, cell in row.items() if cell}
            assert found == expected.handed[step], f"the tracker has {found} for step {step}, not {expected.handed[step]}"

    def _check_descriptors(self) -> None:
        """A worker has no more descriptors open after a loop than after the first loop with as many workers.

        Over gloo, the first average of a generation opens a second group of 6 descriptors. With two machines, a worker
        may have to carry more slices than before, all of them if it is alone on its machine: each costs 11.
        """
        variant = self._schedule.variant
        more = 40 if variant.machines > 1 else 10 if variant.comm == "gloo" else 4
        for path in self._folder.glob("open-*.jsonl"):
            counts: dict[int, list[int]] = {}
            for _, size, count in read_lines(path):
                counts.setdefault(size, []).append(count)
            for size, found in counts.items():
                assert max(found) <= found[0] + more, f"{path.name}: open descriptors with {size} workers: {found}"

    def _check_leftovers(self) -> None:
        """Nothing of the run is left: no process, no shared memory, no temporary file."""
        self._check_processes()
        left = _wait_for_none(lambda: [n for n in set(os.listdir("/dev/shm")) - self._shared_memory if not _is_in_use(n)])
        assert not left, f"left in /dev/shm: {left}"
        # torch's cache; and folders of multiprocessing, which a loader process cannot remove when its worker is killed.
        not_ours = ("torchinductor_", *(["pymp-"] if self.done else []))
        left = sorted(path.name for path in self._temporary.iterdir() if not path.name.startswith(not_ours))
        assert not left, f"left in the temporary folder: {left}"

    def _check_processes(self) -> None:
        left = _wait_for_none(lambda: _processes_in(self._folder))
        assert not left, f"processes are left: {left}"

    def _dump(self) -> str:
        return self.run.dump() if self.run is not None else ""


# -- what is expected ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """An undisturbed run: the digests of its state, what ``on_log`` got, and ``run.logged`` after each step."""

    result: str
    handed: dict[int, dict[str, str]]
    seen: dict[int, dict[str, str]]


def undisturbed(folder: Path, *, scaler: bool) -> Expected:
    """The script alone, in one process: what a schedule of this variant must lead to, however many workers there are."""
    folder.mkdir(parents=True)
    (folder / "hurry").touch()
    variant = Variant(0, "auto", 1, checkpoints=False, loaders=0, scaler=scaler)
    result = LaunchedRun(SCRIPT, folder=folder, workers=0, env=environment(variant, folder, folder)).result()
    return Expected(result, dict(read_lines(folder / "logged.jsonl")), dict(read_lines(folder / "seen-0.jsonl")))


def environment(variant: Variant, checkpoints: Path, temporary: Path) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "LOCKSTEP_COMM": variant.comm, "CHAOS_MACHINES": str(variant.machines)}
    env |= {"CHAOS_LOADERS": str(variant.loaders), "CHAOS_SCALER": str(int(variant.scaler))}
    return env | ({"CHAOS_CHECKPOINT": str(checkpoints)} if variant.checkpoints else {})


def play(folder: Path, seed: int, expected: dict[bool, Expected]) -> str:
    """Play one schedule. Returns what was done; raises AssertionError with everything that is needed to play it again."""
    schedule = draw(seed)
    return play_schedule(Chaos(folder, schedule), schedule, expected[schedule.variant.scaler])


def play_schedule(chaos: Chaos, schedule: Schedule, expected: Expected) -> str:
    try:
        chaos.play(expected)
    except AssertionError as error:
        what, _, dump = str(error).partition("\n")
        raise AssertionError(f"schedule {schedule.seed} ({schedule.variant}): {'; '.join(chaos.done)}: {what}\n{dump}") from None
    return f"{schedule.variant}: {'; '.join(chaos.done)}"


# -- processes and files -------------------------------------------------------------------------------


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _wait_for_none(find: Any, deadline_s: float = 5.0) -> Any:
    """Returns what ``find`` still finds at the deadline."""
    end = time.monotonic() + deadline_s
    while (left := find()) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _processes_in(folder: Path) -> list[str]:
    """The processes whose working directory is ``folder``: agent, zygote, workers and loaders."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdecimal() and os.readlink(f"/proc/{entry}/cwd") == str(folder) and is_running(int(entry)):
                found.append(f"{entry} {Path('/proc', entry, 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:80]}")
    return found


def _is_in_use(name: str) -> bool:
    """Whether the file in /dev/shm belongs to a process that runs: torch names files torch_<pid>_..."""
    numbers = [int(part) for part in name.split("_") if part.isdecimal()]
    return not numbers or any(is_running(number) for number in numbers)


# -- many schedules ------------------------------------------------------------------------------------


def main(first: int, count: int, jobs: int, *, verbose: bool = False, keep: Path | None = None) -> int:
    """Returns how many schedules failed."""
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as temporary:
        folder = Path(temporary).resolve()
        expected = {scaler: undisturbed(folder / f"undisturbed-{scaler}", scaler=scaler) for scaler in (False, True)}
        took: list[float] = []
        began = time.monotonic()

        def one(seed: int) -> bool:
            here, start, is_right = folder / f"run-{seed}", time.monotonic(), True
            try:
                done = play(here, seed, expected)
                if verbose:
                    print(f"{seed}: {done} ({time.monotonic() - start:.1f} s)", flush=True)
            except Exception as error:  # noqa: BLE001 - an error of the harness is a failure too
                is_right = False
                what, _, dump = f"{error if isinstance(error, AssertionError) else repr(error)}".partition("\n")
                print(f"FAILED {what}", flush=True)
                if keep is not None:
                    shutil.copytree(here, keep / f"{seed}", ignore_dangling_symlinks=True, dirs_exist_ok=True, ignore=_sockets)
                    (keep / f"{seed}" / "dump.txt").write_text(f"{what}\n{dump}")
            took.append(time.monotonic() - start)
            if len(took) % 50 == 0:
                print(f"{len(took)} done after {time.monotonic() - began:.0f} s", flush=True)
            shutil.rmtree(here, ignore_errors=True)
            return is_right

        with ThreadPoolExecutor(jobs) as pool:
            failures = list(pool.map(one, range(first, first + count))).count(False)
        total_s = time.monotonic() - began
        print(
            f"{count} schedules from {first}, {jobs} at a time: {failures} failed; {total_s:.0f} s, "
            f"{sum(took) / max(1, len(took)):.1f} s each, the longest {max(took, default=0.0):.1f} s"
        )
    return failures


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="how many schedules to play at a time")
    parser.add_argument("--verbose", action="store_true", help="print what was done in each schedule")
    parser.add_argument("--keep", type=Path, help="copy the folder of each failed schedule to this folder, with a dump of its logs")
    given = parser.parse_args()
    sys.exit(main(given.first, given.count, given.jobs, verbose=given.verbose, keep=given.keep) > 0)
