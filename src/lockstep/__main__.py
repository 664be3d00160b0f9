"""`lockstep` and `python -m lockstep`: one parser for all commands. Imports no torch, and only what the given command needs."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Sequence

import lockstep
from lockstep.errors import UsageError
from lockstep.launcher.arguments import Parser, open_standard_streams, write

_COMMANDS = (
    ("lockstep.engines.command_line", "run", "scale"),
    ("lockstep.commands.list_command", "ls"),
    ("lockstep.commands.status_command", "status"),
    ("lockstep.commands.top_command", "top"),
    ("lockstep.commands.logs_command", "logs"),
    ("lockstep.commands.events_command", "events"),
    ("lockstep.commands.trace_command", "trace"),
    ("lockstep.dashboard.dash_command", "dash"),
    ("lockstep.dashboard.report_command", "report"),
    ("lockstep.commands.stop_command", "stop"),
    ("lockstep.commands.clean_command", "clean"),
    ("lockstep.cluster.command_line", "head", "agent"),
    ("lockstep.checkpoint.checkpoint_command", "checkpoint"),
    ("lockstep.engines.render_command", "render"),
    ("lockstep.doctor.doctor_command", "doctor"),
)
"""Modules with a function ``add_parsers(commands)``, each with the commands that it adds, in the order of `lockstep --help`."""


_INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Execute one command. Returns its exit code; 2 if the arguments cannot work, 130 after Ctrl-C."""
    open_standard_streams()
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        given = _parser(words).parse_args(words)
        code: int = given.execute(given)
        return code
    except UsageError as error:
        write(2, f"lockstep: {error}\n")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser(words: Sequence[str] = ()) -> Parser:
    """The parser for these words. If they begin with a command, it knows this command alone: that saves time."""
    parser = Parser(prog="lockstep", description="Data-parallel training for PyTorch.", allow_abbrev=False)
    parser.set_defaults(execute=_no_command)
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    chosen = [module for module, *names in _COMMANDS if words and words[0] in names]
    for module in chosen or [module for module, *_ in _COMMANDS]:
        importlib.import_module(module).add_parsers(commands)
    return parser


def _no_command(given: Namespace) -> int:
    raise UsageError(
        "no command was given. `lockstep run -n 4 train.py` starts four workers; `lockstep --help` lists all commands."
    )


if __name__ == "__main__":
    sys.exit(main())
