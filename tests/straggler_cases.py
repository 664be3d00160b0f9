"""Real runs in which one worker is slow for a while, and what the run says of it. A script, and the cases of a test.

    python -m tests.straggler_cases                    40 cases, about 15 minutes
    python -m tests.straggler_cases --batches 0 3      some of them

The exit code is 0 if 95% of them are right, if 95% of their prices are within 3 points of the rerun, and if less than 1% of the
quiet windows of 20 steps have a false alarm.

Each batch is one run of tests/scripts/lagging.py with several cases, one after the other, and quiet steps between them:

    quiet (45 steps) | rank 1: loader, +5% (30 steps) | quiet (45 steps) | rank 0: stopped, +20% (30 steps) | quiet ...

A case is right if the run itself, while it goes on, names the right rank and cause before the 21st step of the delay begins. Each
run is then repeated without the delays: it says how much faster the run really is without them, and that nothing is said of a quiet
run. What the run recorded is also read again step by step: this says what somebody would know who looks after every step
("replayed"), and finds every false alarm.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.recording.causes import COMPUTE, LINK, LOADER, STOP, Stop
from lockstep.recording.reader import RecordingReader
from lockstep.recording.records import StepRecord
from lockstep.recording.step_rows import StepRow, rows_of
from lockstep.recording.stragglers import Straggler, StragglerWatch
from tests.cluster import Cluster
from tests.fork_server import ROOT
from tests.hosts import Hosts, missing
from tests.launch import LaunchedRun

SCRIPT = ROOT / "tests" / "scripts" / "lagging.py"
STEP_MS = 90.0
QUIET, LAG = 45, 30
WITHIN = 20
POINTS = 0.03
"""How far a price may be from the rerun."""
_SETTLE = 20
"""Steps after a delay in which its verdict may still be there."""
DEADLINE_S = 170.0
_STOPS_S = 1.0
"""A line of events.jsonl about stops stands for those of about a second. The agent knew the first of them then."""
_LINK_PARAMETERS = 100
"""In thousands: what is sent must be large enough to be slow."""


@dataclass(frozen=True)
class Case:
    """``how``: a cause of tests/scripts/lagging.py, "stop" or "link". ``amount``: milliseconds, for a link megabits per second."""

    worker: int
    how: str
    amount: float

    @property
    def cause(self) -> str:
        causes = {"loader": LOADER, "parse": LOADER, "stop": STOP, "link": LINK}
        return causes.get(self.how, COMPUTE)


@dataclass(frozen=True)
class Batch:
    """The cases of one run. ``lag``: how many steps each delay lasts."""

    workers: int
    cases: tuple[Case, ...]
    lag: int = LAG

    @property
    def has_links(self) -> bool:
        return any(case.how == "link" for case in self.cases)

    def segment(self, number: int) -> tuple[int, int]:
        """The first and the last step of a case."""
        first = QUIET + number * (QUIET + self.lag) + 1
        return first, first + self.lag - 1

    @property
    def steps(self) -> int:
        return QUIET + len(self.cases) * (QUIET + self.lag)


@dataclass
class Result:
    """``live``: how many steps of the delay had begun when the run named the right worker and cause; None if it did not.

    ``replayed``: the same, if somebody looks after every step. ``said``: the speedup that the verdict promised at the end of the
    delay; ``true``: what the run without delays shows; ``true_beside``: what the quiet steps before and after show.
    """

    batch: int
    workers: int
    case: Case
    live: int | None
    replayed: int | None
    wrong: list[str] = field(default_factory=list)
    """Other verdicts that were there in the first 20 steps."""
    said: float | None = None
    true: float | None = None
    true_beside: float | None = None
    sentence: str = ""

    @property
    def is_right(self) -> bool:
        return self.live is not None and self.live <= WITHIN and not self.wrong

    @property
    def has_right_price(self) -> bool:
        return self.said is not None and self.true is not None and abs(self.said - self.true) <= POINTS


@dataclass
class Quiet:
    """Windows of 20 steps without a delay, and the verdicts that began in one."""

    windows: int = 0
    alarms: list[str] = field(default_factory=list)


def batches(seed: int = 0) -> list[Batch]:
    """40 cases: 10 of each cause, two thirds of them with a delay of 5% of a step, the others with 20%."""
    rng = random.Random(seed)
    hows = {LOADER: ["loader", "parse"], COMPUTE: ["forward", "body"], STOP: ["stop"]}
    found = []
    for number in range(6):
        workers = 2 + number % 2
        cases = []
        for cause in (LOADER, COMPUTE, STOP, LOADER, COMPUTE, STOP)[number % 2 : number % 2 + 5]:
            part = 0.2 if (number + len(cases)) % 3 == 0 else 0.05
            cases.append(Case(rng.randrange(workers), rng.choice(hows[cause]), STEP_MS * part))
        found.append(Batch(workers, tuple(cases)))
    for workers in (2, 3):
        rates = (LINK_5[workers], LINK_5[workers], LINK_20[workers], LINK_5[workers], LINK_20[workers])
        found.append(Batch(workers, tuple(Case(rng.randrange(workers), "link", rate) for rate in rates)))
    return found


LINK_5, LINK_20 = {2: 560.0, 3: 500.0}, {2: 175.0, 3: 165.0}
"""Megabits per second that make a step about 5% and 20% longer. (A part of the transport is hidden.)"""


# -- one run -------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What a run left."""

    records: list[StepRecord]
    events: list[dict[str, Any]]
    run_dir: Path | None = None

    @property
    def rows(self) -> list[StepRow]:
        return rows_of(self.records)


def run(batch: Batch, folder: Path, *, quiet: bool = False) -> Ran:
    """Run the batch, or the same steps without delays."""
    plan: list[list[Any]] = []
    if not quiet:
        for number, case in enumerate(batch.cases):
            if case.how not in ("stop", "link"):
                plan.append([*batch.segment(number), case.worker, case.how, case.amount, 1])
    env = {"LAG_PLAN": json.dumps(plan), "LAG_STEPS": str(batch.steps), "LAG_STEP_MS": str(STEP_MS), "OMP_NUM_THREADS": "1"}
    if batch.has_links:
        return _run_on_hosts(batch, folder, env, quiet)
    started = LaunchedRun(SCRIPT, folder=folder, workers=batch.workers, env=env)
    try:
        with _acting(batch, folder, {} if quiet else {"stop": _Stopper(folder)}):
            assert started.wait(DEADLINE_S) == 0, started.dump()
    finally:
        started.stop()
    return _read(started.run_dir)


def _run_on_hosts(batch: Batch, folder: Path, env: dict[str, str], quiet: bool) -> Ran:
    env["LAG_PARAMETERS"] = str(_LINK_PARAMETERS)
    with Hosts(batch.workers) as hosts, Cluster(hosts, folder, SCRIPT, env=env, workers=1) as cluster:
        cluster.start(hang_timeout_s=10.0)
        with _acting(batch, folder, {} if quiet else {"link": _Limiter(cluster)}):
            assert cluster.wait(cluster.head["a"], DEADLINE_S) == 0, cluster.dump()
        return _read(cluster.head["a"].run_dir)


def _read(run_dir: Path) -> Ran:
    found = RecordingReader(run_dir).poll()
    return Ran(found.steps, found.events, run_dir)


def step_now(folder: Path) -> int:
    with suppress(OSError, ValueError):
        return int((folder / "step").read_text())
    return 0


class _Stopper:
    """Stops a worker for some milliseconds when a step begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step(self, case: Case) -> None:
        pid = int((self._folder / f"pid-{case.worker}").read_text())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(case.amount / 1e3)
        os.kill(pid, signal.SIGCONT)

    def end(self, case: Case) -> None:
        pass


class _Limiter:
    """Limits what the machine of a worker can send."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._limited = cluster, ""

    def on_step(self, case: Case) -> None:
        host = self._host(case.worker)
        if self._limited != host:
            self._limited = host
            limit_sending(self._cluster.hosts, host, case.amount)

    def end(self, case: Case) -> None:
        if self._limited:
            limit_sending(self._cluster.hosts, self._limited, None)
            self._limited = ""

    def _host(self, worker: int) -> str:
        pid = int(self._cluster.notes("pid")[str(worker)])
        return next(host for host in self._cluster.hosts.names if pid in self._cluster.hosts.pids(host))


def limit_sending(hosts: Hosts, host: str, mbit: float | None) -> None:
    """Let the host send at most ``mbit`` megabits per second. What it receives is not limited."""
    device = ["-n", hosts.network(host).name]
    command = ["tc", *device, "qdisc", "del", "dev", "eth0", "root"]
    if mbit is not None:
        bits = round(mbit * 1e6)
        shape = ["tbf", "rate", f"{bits}bit", "burst", str(1 << 16), "latency", "200ms"]
        command = ["tc", *device, "qdisc", "replace", "dev", "eth0", "root", *shape]
    subprocess.run(command, check=mbit is not None, capture_output=True, timeout=10)


@contextmanager
def _acting(batch: Batch, folder: Path, actors: dict[str, Any]) -> Iterator[None]:
    """Meanwhile a thread does in each step what its case needs."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def act() -> None:
        done, active = 0, None
        while not ended.is_set():
            step = step_now(folder) + 1  # the one that is under way
            if step == done:
                time.sleep(0.002)
                continue
            done = step
            now = next((case for k, case in enumerate(batch.cases) if batch.segment(k)[0] <= step <= batch.segment(k)[1]), None)
            if active is not None and now is not active:
                actors[active.how].end(active)
            active = now if now is not None and now.how in actors else None
            if active is not None:
                with suppress(ProcessLookupError):
                    actors[active.how].on_step(active)

    def guarded() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001  (raised below)
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


# -- what it says --------------------------------------------------------------------------------------


def replay(ran: Ran) -> dict[int, Straggler | None]:
    """Step -> what was said after it, if somebody looks after every step."""
    watch, said = StragglerWatch(), dict[int, Straggler | None]()
    stops = [Stop(each["worker"], each["at"], each["seconds"], each["times"]) for each in ran.events if each["kind"] == "stopped"]
    stops.sort(key=lambda each: each.at)
    steps: dict[int, list[StepRecord]] = {}
    for record in ran.records:
        steps.setdefault(record.step, []).append(record)
    for step in sorted(steps):
        for record in steps[step]:
            watch.add(record)
        now = max(each.at + each.seconds for each in steps[step])
        while stops and stops[0].at - _STOPS_S <= now:
            watch.add_stop(stops.pop(0))
        said[step] = watch.verdict()
    return said


def judge(number: int, batch: Batch, ran: Ran, without: Ran | None) -> tuple[list[Result], Quiet]:
    said = replay(ran)
    results = [_judge_case(number, batch, k, said, ran, without) for k in range(len(batch.cases))]
    lags = [range(batch.segment(k)[0], batch.segment(k)[1] + _SETTLE + 1) for k in range(len(batch.cases))]
    quiet = _quiet(said, lambda step: not any(step in lag for lag in lags))
    if without is not None:
        more = _quiet(replay(without), lambda step: True)
        quiet = Quiet(quiet.windows + more.windows, quiet.alarms + more.alarms)
    return results, quiet


def _judge_case(number: int, batch: Batch, k: int, said: dict[int, Straggler | None], ran: Ran, without: Ran | None) -> Result:
    case, (first, last) = batch.cases[k], batch.segment(k)
    result = Result(number, batch.workers, case, None, None)
    for step in range(first, last + 1):
        verdict = said.get(step)
        if verdict is None:
            continue
        if (verdict.worker, verdict.cause) == (case.worker, case.cause):
            result.replayed = result.replayed or step - first + 1
            result.said, result.sentence = verdict.speedup, verdict.sentence()
        elif step - first < WITHIN:
            result.wrong.append(verdict.sentence())
    begins = sorted(row.ranks[0].at for row in ran.rows if row.step >= first)
    for event in ran.events:
        if event["kind"] != "verdict" or not event["sentence"] or not first <= event["step"] <= last + _SETTLE:
            continue
        begun = sum(at <= event["time"] for at in begins)
        if (event["worker"], event["cause"]) == (case.worker, case.cause):
            result.live = min(begun, result.live or begun)
        elif begun <= WITHIN:
            result.wrong.append(event["sentence"])
    result.wrong = sorted(set(result.wrong))
    during = _mean_s(ran, range(first + 1, last))
    beside = _mean_s(ran, [*range(first - QUIET + 10, first - 1), *range(last + 10, last + QUIET - 2)])
    result.true_beside = during / beside - 1
    if without is not None:
        result.true = during / _mean_s(without, range(first + 1, last)) - 1
    return result


def _mean_s(ran: Ran, steps: Sequence[int]) -> float:
    """The mean without the slowest and the fastest twentieth."""
    wanted = set(steps)
    times = sorted(row.seconds for row in ran.rows if row.step in wanted)
    cut = len(times) // 20
    return statistics.mean(times[cut : len(times) - cut])


def _quiet(said: dict[int, Straggler | None], is_quiet: Callable[[int], bool]) -> Quiet:
    found, length, before = Quiet(), 0, None
    for step, verdict in sorted(said.items()):
        length = length + 1 if is_quiet(step) else 0
        if length and length % WITHIN == 0:
            found.windows += 1
        if length and verdict is not None and before is None:
            found.alarms.append(verdict.sentence())
        before = verdict
    return found


# -- the script ----------------------------------------------------------------------------------------


def run_batch(number: int, batch: Batch, keep: Path | None) -> tuple[list[Result], Quiet]:
    with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
        ran = run(batch, Path(folder) / "with")
        without = run(batch, Path(folder) / "without", quiet=True)
        for name, each in (("with", ran), ("without", without)):
            if keep is not None and each.run_dir is not None:
                only_files = shutil.ignore_patterns("*.sock")
                shutil.copytree(each.run_dir, keep / f"batch-{number}-{name}", dirs_exist_ok=True, ignore=only_files)
        return judge(number, batch, ran, without)


def main() -> None:
    parser = argparse.ArgumentParser(description="Names the straggler of real runs.")
    parser.add_argument("--batches", type=int, nargs="*", help="only these")
    parser.add_argument("--lock", help="a file that is locked while a run is measured")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON; those of other batches in it are kept")
    parser.add_argument("--keep", type=Path, help="a folder for the run folders")
    given = parser.parse_args()
    reason = missing()
    right, priced = list[bool](), list[bool]()
    windows = alarms = 0
    for number, batch in enumerate(batches()):
        if given.batches is not None and number not in given.batches:
            continue
        if batch.has_links and reason is not None:
            print(f"batch {number} is left out: {reason}")
            continue
        with _locked(given.lock):
            results, quiet = run_batch(number, batch, given.keep)
        for each in results:
            right.append(each.is_right)
            priced.append(each.has_right_price)
            print(_line(each), flush=True)
        windows, alarms = windows + quiet.windows, alarms + len(quiet.alarms)
        print(f"batch {number}: {quiet.windows} quiet windows, false alarms: {quiet.alarms or 'none'}", flush=True)
        if given.out is not None:
            _save(given.out, number, results, quiet)
    print(f"{sum(right)} of {len(right)} cases are right, {sum(priced)} prices; {alarms} false alarms in {windows} quiet windows")
    sys.exit(0 if min(sum(right), sum(priced)) >= 0.95 * len(right) and alarms <= 0.01 * windows else 1)


def _line(result: Result) -> str:
    case = result.case
    percents = [f"{100 * each:5.1f}%" if each is not None else "  -  " for each in (result.said, result.true, result.true_beside)]
    right = "right" if result.is_right else f"WRONG {result.wrong}"
    what = f"{case.how} {case.amount:g}"
    return (
        f"batch {result.batch} worker {case.worker} of {result.workers}: {what:14} live {result.live!s:>4}, "
        f"replayed {result.replayed!s:>4}, said {percents[0]}, rerun {percents[1]}, beside {percents[2]}: {right}"
    )


def _save(path: Path, number: int, results: list[Result], quiet: Quiet) -> None:
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    cases = [{**asdict(each), "cause": each.case.cause, "right": each.is_right} for each in results]
    data[str(number)] = {"cases": cases, "quiet": asdict(quiet), "date": time.strftime("%Y-%m-%d")}
    path.write_text(json.dumps(data, indent=1) + "\n")


@contextmanager
def _locked(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
