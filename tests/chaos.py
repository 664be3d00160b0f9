"""Random fault schedules against real runs of four workers: the weights end with the bits of a run in which nothing happened.

make chaos                                    a thousand schedules, and a line about them
python -m tests.chaos FIRST COUNT [--jobs N]   so many at once: with 16 cores, 6
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

from lockstep.observe.ledger import audit, read
from tests.lane_jobs import SAMPLES

HERE = Path(__file__).parents[1]
SCRIPT = HERE / "tests" / "scripts" / "survive.py"
WORKERS, HANG_S = 4, 1.0
EPOCHS = 12  # of the script


class Chaos:
    """One run of the script under ``lockstep run``, and what is done to its workers."""

    def __init__(self, folder: Path, workers: int = WORKERS, *options: str) -> None:
        self.folder = folder
        self.output = folder.parent / f"{folder.name}.txt"
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--run-dir", str(folder)]
        command += ["--hang-timeout", str(HANG_S), *options, str(SCRIPT), str(HERE)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=HERE)

    def workers(self) -> dict[int, int]:
        """Number -> process id of those that live and are not through."""
        found = {}
        for path in self.folder.glob("pid-*"):
            number = int(path.name.removeprefix("pid-"))
            with suppress(OSError, ValueError):
                pid = int(path.read_text())
                os.kill(pid, 0)
                if not (self.folder / f"done-{number}").exists():
                    found[number] = pid
        return found

    def await_workers(self, count: int, deadline_s: float = 30.0) -> None:
        end = time.monotonic() + deadline_s
        while len(self.workers()) < count and self.process.poll() is None:
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.01)

    def strike(self, fault: str, random: Random, spared: int) -> str:
        """Do something bad to one worker, but not to ``spared``: where all that hold the state are struck, it is gone."""
        alive = {number: pid for number, pid in self.workers().items() if number != spared}
        if not alive:
            return ""
        number = random.choice(sorted(alive))
        with suppress(OSError):
            if fault == "kill":
                os.kill(alive[number], signal.SIGKILL)
            elif fault == "stop":
                os.kill(alive[number], signal.SIGSTOP)
            else:
                (self.folder / f"{fault}-{number}").touch()
        return f"{fault} {number}"

    def finish(self, deadline_s: float) -> tuple[int, str]:
        """(exit code, everything printed). A hang is killed and fails."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"not done after {deadline_s} s:\n{self.output.read_text()}") from None
        return code, self.output.read_text()

    def results(self) -> set[str]:
        return {path.read_text() for path in self.folder.glob("done-*")}


def undisturbed(folder: Path) -> str:
    chaos = Chaos(folder, 1)
    assert chaos.finish(60) == (0, chaos.output.read_text())
    (result,) = chaos.results()
    return result


def play(folder: Path, seed: int, expected: str) -> str:
    """One schedule. Returns what was done; raises where the run hangs, fails, or ends with other bits."""
    random = Random(seed)
    chaos = Chaos(folder, WORKERS, "--max-respawns", "50", "--ledger")
    done: list[str] = []
    spared = random.randrange(WORKERS)
    chaos.await_workers(random.randint(1, WORKERS))  # sometimes while the others are still starting
    stops = 0
    for _ in range(random.randint(1, 5)):
        time.sleep(random.uniform(0.0, 0.4))  # the schedule's own rhythm: nothing is waited for here
        raised = any(each.startswith("raise") for each in done)  # twice at one step would be a bug, and end the run
        fault = random.choice(["kill", "kill", "kill", "slow", "stop" if stops < 2 else "kill", "kill" if raised else "raise"])
        stops += fault == "stop"
        done.append(chaos.strike(fault, random, spared))
    told = f"schedule {seed}, worker {spared} was spared: {done}\n"
    try:
        code, output = chaos.finish(30 + 10 + stops * (HANG_S + 10))
    except AssertionError as error:
        events = (folder / "events.jsonl").read_text().splitlines()
        raise AssertionError(f"{told}{error}\n" + "\n".join(events[-12:])) from None
    told += output
    assert code == 0, told
    assert chaos.results() == {expected}, told
    lines = read(folder / "ledger")
    assert {line["step"] for line in lines if line["kind"] == "commit"} == set(range(60)), told
    assert audit(lines, SAMPLES, EPOCHS) == [], told
    return ", ".join(filter(None, done))


def main(first: int, count: int, jobs: int) -> int:
    """Returns how many failed."""
    with tempfile.TemporaryDirectory() as place:
        expected = undisturbed(Path(place, "undisturbed"))

        def one(seed: int) -> bool:
            try:
                play(Path(place, f"run-{seed}"), seed, expected)
            except AssertionError as error:
                print(f"FAILED {error}", flush=True)
                return False
            finally:
                done.append(seed)
                if len(done) % 50 == 0:
                    print(f"{len(done)} done after {time.monotonic() - began:.0f} s", flush=True)
                shutil.rmtree(Path(place, f"run-{seed}"), ignore_errors=True)
            return True

        done: list[int] = []
        began = time.monotonic()
        with ThreadPoolExecutor(jobs) as pool:
            failures = list(pool.map(one, range(first, first + count))).count(False)
        took_s = time.monotonic() - began
        print(f"{count} schedules from {first}, {jobs} at a time: {failures} failed; {took_s:.0f} s")
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    sys.exit(main(given.first, given.count, given.jobs) > 0)
