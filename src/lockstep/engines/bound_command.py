"""`python -m lockstep.engines.bound_command PID COMMAND ...`: a command of `lockstep` that dies with its parent, process PID.

For parents with threads of other libraries, such as an actor of Ray: between fork and exec, no code may run in them.
"""

from __future__ import annotations

import runpy
import signal
import sys

from lockstep.launcher.linux import die_with_parent


def main() -> None:
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray blocks Ctrl-C in its actors, whose children inherit that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    sys.argv[1:] = words
    runpy.run_module("lockstep", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
