"""`lockstep clean`: removes the folders of old runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.commands.plain_text import age_text, path_text, size_text
from lockstep.commands.standard_output import ends_quietly, print_text
from lockstep.commands.time_arguments import length_of_time
from lockstep.errors import UsageError
from lockstep.launcher.arguments import whole_number
from lockstep.launcher.run_folder import last_written
from lockstep.launcher.run_registry import known_runs
from lockstep.launcher.run_removal import NotRemovedError, check_removable, disk_bytes, remove_run, without_parts
from lockstep.launcher.run_status import UNKNOWN, RunStatus, read_status
from lockstep.recording.text import plural

_OLDER_THAN_S, _KEPT = 14 * 86400.0, 10
_UNKNOWN_S = 86400.0
"""A run of another machine may still run there. It is removed only if nobody has written to its folder for so long."""


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("clean", help="remove the folders of old runs", allow_abbrev=False)
    parser.set_defaults(execute=clean)
    help = "remove runs that ended longer ago than this: 14 days, 12h, 30min (default: 14 days)"
    parser.add_argument("--older-than", type=length_of_time, metavar="TIME", help=help)
    help = f"keep the N newest in any case (default: {_KEPT})"
    parser.add_argument("--keep", type=whole_number(0), metavar="N", help=help)
    parser.add_argument("--all", action="store_true", help="remove all runs that have ended")
    help = "remove also runs with files of trackers (track=) in their folder"
    parser.add_argument("--with-curves", action="store_true", help=help)
    parser.add_argument("-n", "--dry-run", action="store_true", help="remove nothing, and print what would be removed")


@ends_quietly
def clean(given: argparse.Namespace) -> int:
    """Returns 0 if every folder that is old enough was removed, 1 if one of them stays."""
    if given.all and (given.older_than is not None or given.keep is not None):
        raise UsageError("--all removes all runs that have ended; --older-than and --keep spare some. Leave one of them out.")
    older_than_s = 0.0 if given.all else _OLDER_THAN_S if given.older_than is None else given.older_than
    kept = 0 if given.all else _KEPT if given.keep is None else given.keep
    now = time.time()
    found = [status for status in map(_status, without_parts(known_runs())) if status is not None]
    chosen = choose(found, now, older_than_s=older_than_s, keep=kept)
    removed, left, freed = 0, 0, 0
    for status in chosen:
        what = f"{path_text(status.path)} ({age_text(now - _ended_at(status))} old"
        try:
            _require_abandoned(status, now)
            act = _measure if given.dry_run else remove_run
            size = act(status.path, with_curves=given.with_curves)
        except NotRemovedError as error:
            print_text(f"left     {what}): {error}\n")
            left += 1
            continue
        print_text(f"{'would remove' if given.dry_run else 'removed'}  {what}, {size_text(size)})\n")
        removed, freed = removed + 1, freed + size
    verb = "would be removed" if given.dry_run else "removed"
    print_text(f"{plural(removed, 'run')} {verb}, {size_text(freed)}; {len(found) - removed} left.\n")
    return 1 if left else 0


def choose(ended: Sequence[RunStatus], now: float, *, older_than_s: float, keep: int) -> list[RunStatus]:
    """Returns the runs to remove, oldest first: all but the ``keep`` newest, if they ended more than ``older_than_s`` ago."""
    newest_first = sorted(ended, key=_ended_at, reverse=True)
    return [status for status in reversed(newest_first[keep:]) if now - _ended_at(status) >= older_than_s]


def _ended_at(status: RunStatus) -> float:
    return status.ended if status.ended is not None else status.began


def _require_abandoned(status: RunStatus, now: float) -> None:
    silent_s = now - _ended_at(status)
    if status.state == UNKNOWN and silent_s < _UNKNOWN_S:
        raise NotRemovedError(
            f"{status.origin}. It may still run: somebody wrote there {age_text(silent_s)} ago. "
            "Wait until nobody has written for a day"
        )


def _measure(path: Path, *, with_curves: bool) -> int:
    check_removable(path, with_curves=with_curves)
    return disk_bytes(path)


def _status(path: Path) -> RunStatus | None:
    """None if the run has not ended. A run of another machine, of which that is not known, ended when somebody wrote there last."""
    try:
        status = read_status(path, ask=False)
    except OSError:
        return None
    if status.state == UNKNOWN:
        return replace(status, ended=last_written(path))
    return status if status.is_over else None
