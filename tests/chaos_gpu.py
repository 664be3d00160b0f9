"""Plays random schedules of faults against runs over NCCL. Every run must end with the bits of an undisturbed one.

make chaos-gpu                                     a hundred schedules, and a line about them
python -m tests.chaos_gpu FIRST COUNT [--jobs N]   the schedules FIRST to FIRST + COUNT - 1, N at a time
python -m tests.chaos_gpu FIRST COUNT --cpu        the same over gloo, without a GPU

With several GPUs each rank has one of its own, so there are no more ranks than GPUs. LOCKSTEP_NCCL_LIB names an NCCL that lets
ranks share one (tests/shared_gpu.py). A schedule follows from its seed: 2 to 4 ranks, whether the run waits for NCCL or uses gloo
until it is connected, and kills, stops, exceptions and slow workers.
At the end no process is left, no run hangs, and the GPU has as much free memory as before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import torch

from tests import shared_gpu
from tests.chaos import Chaos, Expected, Schedule, Variant, draw_faults, play_schedule, read_lines
from tests.fork_server import ROOT
from tests.launch import LaunchedRun

SCRIPT = ROOT / "tests" / "scripts" / "chaos_gpu.py"
KINDS = ("kill", "kill", "kill", "kill newest", "stop", "raise", "slow")
STEPS, EPOCHS = 20, 4  # of the script
GROWTH_BYTES = 4 << 20
"""By how much the tensors of a worker may grow from loop to loop. Those of one generation of the script have 3 MB or more."""
LEFT_MB = 64
"""How much of the GPU's memory may be lost in the end: the driver keeps some itself."""
_FREE_MB = "import torch; print(torch.cuda.mem_get_info()[0] >> 20)"
_TAIL = 80


def draw(seed: int, largest: int = 4) -> Schedule:
    """The schedule of a seed, with ``largest`` workers at most. Pure."""
    random = Random(f"gpu {seed}")
    workers = random.randint(2, largest)
    comm = random.choice(["nccl", "nccl", "gloo until nccl"])
    variant = Variant(workers, comm, machines=1, checkpoints=False, loaders=0, scaler=False)
    faults = tuple(draw_faults(random, random.randint(1, 3), KINDS))
    return Schedule(seed, variant, (faults,), random.choice([workers, workers, 1]), random.choice([0.0, 0.3, 2.0]))


def largest_over_nccl(largest: int, gpus: int, environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks can meet over NCCL, of ``largest`` at most. Ends the program if not even two can."""
    sizes = [size for size in range(2, largest + 1) if shared_gpu.why_no_nccl(size, gpus, environ) is None]
    return max(sizes) if sizes else sys.exit(str(shared_gpu.why_no_nccl(2, gpus, environ)))


class GpuChaos(Chaos):
    script, steps, epochs, has_tracker = SCRIPT, STEPS, EPOCHS, False

    def __init__(self, folder: Path, schedule: Schedule, *, cpu: bool, hang_timeout_s: float) -> None:
        super().__init__(folder, schedule)
        self._cpu, self.hang_timeout_s = cpu, hang_timeout_s

    def _environment(self) -> dict[str, str]:
        waits = {"CHAOS_AWAIT_NCCL": str(int(self._schedule.variant.comm == "nccl"))}
        return waits | environment(self._temporary, cpu=self._cpu, comm="gloo" if self._cpu else "nccl")

    def _check_leftovers(self) -> None:
        """NCCL and CUDA leave files of their own when their process is killed: they are not looked at."""
        self._check_processes()

    def _check(self, expected: Expected) -> None:
        super()._check(expected)
        for path in self._folder.glob("memory-*.jsonl"):
            counts: dict[int, list[int]] = {}
            for _, size, count in read_lines(path):
                counts.setdefault(size, []).append(count)
            for size, found in counts.items():
                assert max(found) <= found[0] + GROWTH_BYTES, f"{path.name}: bytes of tensors with {size} workers: {found}"


def environment(temporary: Path, *, cpu: bool, comm: str) -> dict[str, str]:
    common = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "LOCKSTEP_COMM": comm}
    return common | ({"CHAOS_DEVICE": "cpu"} if cpu else shared_gpu.environment())


def undisturbed(folder: Path, *, cpu: bool) -> Expected:
    """The script alone, in one process."""
    folder.mkdir(parents=True)
    (folder / "hurry").touch()
    result = LaunchedRun(SCRIPT, folder=folder, workers=0, env=environment(folder, cpu=cpu, comm="auto")).result()
    return Expected(result, dict(read_lines(folder / "logged.jsonl")), dict(read_lines(folder / "seen-0.jsonl")))


def free_mb() -> int:
    """How much memory of the first GPU is free, as a new process sees it."""
    return int(subprocess.run([sys.executable, "-c", _FREE_MB], check=True, capture_output=True, text=True, timeout=60).stdout)


def memory_left(before_mb: int, deadline_s: float = 15.0) -> int:
    """How many MB fewer are free than before: a process that was killed takes a while to go."""
    end = time.monotonic() + deadline_s
    while (left := before_mb - free_mb()) > LEFT_MB and time.monotonic() < end:
        pass  # each question takes a second
    return left


class Player:
    """Plays schedules until the deadline, and prints what failed: the first time with the logs."""

    def __init__(self, folder: Path, options: argparse.Namespace, expected: Expected) -> None:
        self._folder, self._options, self._expected = folder, options, expected
        self._end = time.monotonic() + (options.deadline_s or 1e9)
        self._lock = threading.Lock()
        self.played = self.failed = 0
        self.longest_s = 0.0

    def play(self, seed: int) -> None:
        if time.monotonic() > self._end:
            return
        folder, began, text, is_right = self._folder / f"run-{seed}", time.monotonic(), "", False
        options = self._options
        # Ranks of several runs take turns on one GPU: each of them is slower, and must not look as if it hung.
        schedule, hang_timeout_s = draw(seed, options.largest), 2.0 if options.jobs == 1 else 2.0 + options.jobs
        try:
            chaos = GpuChaos(folder, schedule, cpu=options.cpu, hang_timeout_s=hang_timeout_s)
            text, is_right = f"{seed}: {play_schedule(chaos, schedule, self._expected)}", True
        except Exception as error:  # noqa: BLE001 - an error of the harness is a failure too
            text = f"FAILED {error if isinstance(error, AssertionError) else repr(error)}"
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._note(text, is_right, time.monotonic() - began)

    def _note(self, text: str, is_right: bool, took_s: float) -> None:
        self.played, self.longest_s = self.played + 1, max(self.longest_s, took_s)
        what, _, dump = text.partition("\n")
        if not is_right or self._options.verbose:
            print(f"{what} ({took_s:.1f} s)", flush=True)
        if not is_right and self.failed == 0:
            print("\n".join(dump.splitlines()[-_TAIL:]), flush=True)
        self.failed += not is_right
        if self.played % 20 == 0:
            print(f"{self.played} schedules are played, {self.failed} failed", flush=True)


def main(options: argparse.Namespace) -> int:
    """Returns 0 if all schedules that were played ended as they must and nothing is left on the GPU."""
    if not options.cpu:
        options.largest = largest_over_nccl(options.largest, torch.cuda.device_count())
    before_mb, began = 0 if options.cpu else free_mb(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary).resolve()
        player = Player(folder, options, undisturbed(folder / "undisturbed", cpu=options.cpu))
        print(f"the undisturbed run took {time.monotonic() - began:.1f} s", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            for done in [pool.submit(player.play, seed) for seed in range(options.first, options.first + options.count)]:
                done.result()
    left_mb = 0 if options.cpu else memory_left(before_mb)
    print(
        f"{player.played} of {options.count} schedules, {player.failed} failed; {options.jobs} at a time, "
        f"{time.monotonic() - began:.0f} s, the longest {player.longest_s:.1f} s"
        + ("" if options.cpu else f"; {before_mb} MB of the GPU were free before, {left_mb} MB fewer are now")
    )
    return int(player.failed > 0 or player.played == 0 or left_mb > LEFT_MB)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="how many schedules to play at a time")
    parser.add_argument("--deadline-s", type=float, help="begin no schedule after so many seconds")
    parser.add_argument("--largest", type=int, default=4, help="how many workers at most")
    parser.add_argument("--cpu", action="store_true", help="over gloo, on a machine without a GPU")
    parser.add_argument("--verbose", action="store_true", help="print what was done in each schedule")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse()))
