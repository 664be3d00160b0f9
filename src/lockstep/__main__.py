"""`lockstep` and `python -m lockstep`: one parser for all commands. Imports no torch."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

import lockstep
from lockstep.checkpoint import checkpoint_command
from lockstep.cluster import command_line as cluster_command_line
from lockstep.doctor import doctor_command
from lockstep.engines import command_line as engines_command_line
from lockstep.engines import render_command
from lockstep.errors import UsageError
from lockstep.launcher import command_line
from lockstep.launcher.arguments import Parser, open_standard_streams, write


def main(argv: Sequence[str] | None = None) -> int:
    """Execute one command. Returns its exit code, or 2 if the arguments cannot work."""
    open_standard_streams()
    try:
        given = _parser().parse_args(argv)
        code: int = given.execute(given)
        return code
    except UsageError as error:
        write(2, f"lockstep: {error}\n")
        return 2


def _parser() -> Parser:
    parser = Parser(prog="lockstep", description="Data-parallel training for PyTorch.", allow_abbrev=False)
    parser.set_defaults(execute=_no_command)
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    command_line.add_parsers(commands)
    cluster_command_line.add_parsers(commands)
    engines_command_line.add_options(commands.choices["run"])
    checkpoint_command.add_parser(commands)
    render_command.add_parser(commands)
    doctor_command.add_parser(commands)
    return parser


def _no_command(given: Namespace) -> int:
    raise UsageError(
        "no command was given. `lockstep run -n 4 train.py` starts four workers; `lockstep --help` lists all commands."
    )


if __name__ == "__main__":
    sys.exit(main())
