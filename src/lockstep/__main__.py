"""`lockstep` and `python -m lockstep`: which command line a command belongs to."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["checkpoint"]:
        from lockstep.checkpoint import checkpoint_command as checkpoint

        return checkpoint.main(arguments[1:])
    from lockstep.launch import command_line as launch

    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
