"""`python -m lockstep`: the command line. Knows only where it is."""

import sys

from lockstep.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
