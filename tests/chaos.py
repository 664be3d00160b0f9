"""Plays random schedules of faults against real runs of four workers. Every run must end with the bits of an undisturbed one.

make chaos                                     a thousand schedules, and a line about them
python -m tests.chaos FIRST COUNT [--jobs N]   the schedules FIRST to FIRST + COUNT - 1, N at a time: with 16 cores, 6
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

from tests.training_run import TrainingRun, undisturbed_result

WORKERS = 4
PACE_S = 0.01
"""A micro-batch takes this long at least: the run lasts longer than its schedule."""


def play(folder: Path, seed: int, expected: str) -> str:
    """Play one schedule. Returns what was done; raises AssertionError if the run hangs, fails, or ends with other bits."""
    random = Random(seed)
    run = TrainingRun(folder, WORKERS, "--max-respawns", "50", "--ledger", pace_s=PACE_S)
    done: list[str] = []
    spared = random.randrange(WORKERS)
    count = random.randint(1, WORKERS)  # sometimes while the others are still starting
    stops = 0
    try:
        run.wait_until(lambda: len(run.workers()) >= count, f"{count} workers run", may_end=True)
        for _ in range(random.randint(1, 5)):
            time.sleep(random.uniform(0.0, 0.4))  # the schedule's own rhythm: nothing is waited for here
            raised = any(each.startswith("raise") for each in done)  # twice at one step would be a bug, and end the run
            fault = random.choice(["kill", "kill", "kill", "slow", "stop" if stops < 2 else "kill", "kill" if raised else "raise"])
            stops += fault == "stop"
            done.append(strike(run, fault, random, spared))
        run.require_undisturbed(expected, deadline_s=40 + stops * 11)
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}, worker {spared} was spared: {done}\n{error}") from None
    finally:
        run.stop()
    return ", ".join(filter(None, done))


def strike(run: TrainingRun, fault: str, random: Random, spared: int) -> str:
    """Do something bad to one worker, but not to ``spared``: if all workers that have the state are struck, it is lost."""
    alive = {worker: pid for worker, pid in run.workers().items() if worker != spared}
    if not alive:
        return ""
    worker = random.choice(sorted(alive))
    with suppress(ProcessLookupError):
        if fault == "kill":
            os.kill(alive[worker], signal.SIGKILL)
        elif fault == "stop":
            os.kill(alive[worker], signal.SIGSTOP)
        else:
            (run.folder / f"{fault}-{worker}").touch()
    return f"{fault} {worker}"


def main(first: int, count: int, jobs: int) -> int:
    """Returns how many schedules failed."""
    with tempfile.TemporaryDirectory() as folder:
        expected = undisturbed_result(Path(folder, "undisturbed"))

        def one(seed: int) -> bool:
            try:
                play(Path(folder, f"run-{seed}"), seed, expected)
            except AssertionError as error:
                print(f"FAILED {error}", flush=True)
                return False
            finally:
                done.append(seed)
                if len(done) % 50 == 0:
                    print(f"{len(done)} done after {time.monotonic() - began:.0f} s", flush=True)
                shutil.rmtree(Path(folder, f"run-{seed}"), ignore_errors=True)
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
