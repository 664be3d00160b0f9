"""`lockstep report`: its arguments, and the files that it writes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.launcher.arguments import write
from lockstep.launcher.run_registry import find_run


def add_parsers(commands: Any) -> None:
    """Add `report` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command."""
    parser = commands.add_parser("report", help="write what a run has recorded into one HTML file, with charts", allow_abbrev=False)
    parser.set_defaults(execute=report)
    parser.add_argument("run", metavar="RUN", help="the run, as `lockstep status` finds it: its folder, its name, or last")
    parser.add_argument("-o", dest="output", default="report.html", metavar="FILE", help="the file to write (default: report.html)")
    parser.add_argument("--png", metavar="DIR", help="write the charts as pictures into this folder too, for papers")


def report(given: argparse.Namespace) -> int:
    """Write the report, and the pictures if they are asked for. Returns 0."""
    from lockstep.dashboard.report import report_data, report_html

    data = report_data(find_run(given.run))
    written = [_write(Path(given.output), report_html(data))]
    if given.png is not None:
        from lockstep.dashboard.pictures import write_pictures

        try:
            written += write_pictures(data, Path(given.png))
        except OSError as error:
            raise UsageError(f"the pictures cannot be written to {given.png}: {error.strerror}. Name another folder.") from error
    for path in written:
        write(1, f"{path}\n")
    return 0


def _write(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"the report cannot be written to {path}: {error.strerror}. Name another file with -o FILE.") from error
    return path
