"""`python -m lockstep.engines.bound_command PID COMMAND ...`: a command of `lockstep` that dies with its parent, process PID.

For parents with threads of other libraries, such as an actor of Ray: between fork and exec, no code may run in them.
"""

from __future__ import annotations

import runpy
import sys

from lockstep.launcher.linux import die_with_parent


def main() -> None:
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv[1:] = words
    runpy.run_module("lockstep", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
