"""What a worker of ``lockstep.engines.ray.launch(fn)`` runs as its script: call the function and write its result to a file."""

from __future__ import annotations

import sys
from pathlib import Path

from ray import cloudpickle

from lockstep.launcher.function_call import call_and_save


def main() -> None:
    # A file that the agent actor of this run has written: docs/internals/security.md
    fn, args = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
    call_and_save(fn, args, cloudpickle.dumps)


if __name__ == "__main__":
    main()
