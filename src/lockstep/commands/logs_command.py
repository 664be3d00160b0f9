"""`lockstep logs RUN`: what the workers have printed, in the order of time."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from lockstep.commands.standard_output import ends_quietly, print_bytes
from lockstep.commands.status_command import add_run
from lockstep.errors import UsageError
from lockstep.launcher.arguments import whole_number, write
from lockstep.launcher.log_files import last_state, why_no_logs
from lockstep.launcher.run_folder import is_in_use
from lockstep.launcher.run_registry import find_run
from lockstep.launcher.worker_logs import LogLine, WorkerLogs
from lockstep.launcher.worker_ranks import WorkerRanks
from lockstep.recording.event_lines import is_event
from lockstep.recording.json_lines import JsonLinesTail
from lockstep.recording.text import rank_text

_POLL_S = 0.1


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("logs", help="print what the workers of a run have printed", allow_abbrev=False)
    parser.set_defaults(execute=logs)
    add_run(parser, is_optional=True)
    help = "go on with what is printed from now on, also by new workers, until the run has ended"
    parser.add_argument("-f", "--follow", action="store_true", help=help)
    which = parser.add_mutually_exclusive_group()
    help = "only the workers that have rank K, or have had it"
    which.add_argument("--rank", type=whole_number(0), metavar="K", help=help)
    which.add_argument("--worker", type=whole_number(0), metavar="K", help="only worker K, without a prefix")
    help = "begin with the last LINES lines (default: all)"
    parser.add_argument("-n", "--lines", type=whole_number(0), metavar="LINES", help=help)


@ends_quietly
def logs(given: argparse.Namespace) -> int:
    """Returns 0, or 1 if the logs of the run are not on this machine."""
    return _Logs(find_run(given.run), given).print()


class _Logs:
    def __init__(self, run_dir: Path, given: argparse.Namespace) -> None:
        self._run_dir, self._given = run_dir, given
        self._events, self._ranks = JsonLinesTail(run_dir / "events.jsonl"), WorkerRanks()
        self._files = WorkerLogs(run_dir, self._is_wanted)
        self._width = 0

    def print(self) -> int:
        is_running = is_in_use(self._run_dir)
        self._read_ranks()
        self._width = max((len(self._label(worker)) for worker in self._files.workers() if self._is_wanted(worker)), default=0)
        self._check(is_running=is_running)
        follows = self._given.follow and is_running
        if self._given.lines is None:
            self._print(self._files.read(to_end=not follows))
        else:
            self._print(self._files.read_last(self._given.lines, to_end=not follows))
        while follows:
            follows = is_in_use(self._run_dir)  # before the files are read: when the run has ended, they are complete
            self._read_ranks()
            self._print(self._files.read(to_end=not follows))
            if follows:
                time.sleep(_POLL_S)
        if not self._files.workers():
            write(2, f"lockstep: no worker has a log in {self._run_dir}. {why_no_logs(self._run_dir)}\n")
            return 1
        return 0

    def _check(self, *, is_running: bool) -> None:
        rank, worker = self._given.rank, self._given.worker
        ranks, workers = self._ranks.ranks, self._files.workers()
        if rank is not None and rank not in ranks and (ranks or not is_running):
            known = f"There were the ranks {_listed(ranks)}." if ranks else "Its files do not tell ranks; use --worker."
            raise UsageError(f"no worker of this run has had rank {rank}. {known}")
        if worker is not None and worker not in workers and not (is_running and self._given.follow):
            known = f"There are logs of the workers {_listed(workers)}." if workers else "There is no log."
            raise UsageError(f"there is no log of a worker {worker}. {known}")

    def _is_wanted(self, worker: int) -> bool:
        if self._given.rank is not None:
            return worker in self._ranks.workers_of(self._given.rank)
        return self._given.worker in (None, worker)

    def _read_ranks(self) -> None:
        for line in filter(is_event, self._events.read()):
            self._ranks.add(line)

    def _print(self, lines: Any) -> None:
        data = bytearray()
        for line in lines:
            data += self._prefixed(line)
            if len(data) > 1 << 16:
                print_bytes(bytes(data))
                data.clear()
        print_bytes(bytes(data))

    def _prefixed(self, line: LogLine) -> bytes:
        if self._given.worker is not None:
            return line.text + b"\n"
        label = self._label(line.worker)
        self._width = max(self._width, len(label))
        return f"{label:<{self._width}} | ".encode() + last_state(line.text) + b"\n"

    def _label(self, worker: int) -> str:
        """A worker keeps its number, and may get another rank when others are lost."""
        rank = self._ranks.rank_of.get(worker)
        return f"worker {worker}" if rank is None else rank_text(rank, worker)


def _listed(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
