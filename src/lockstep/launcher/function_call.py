"""What a worker of ``lockstep.launch`` does: call the function and leave its result in the worker's folder. Knows no other worker.

A forked worker has the function already. A spawned worker runs this module as its script, with the name of a file as argument. It
loads the function from that file in the run folder, which is readable by its user alone.
"""

from __future__ import annotations

import atexit
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError

_RESULT = "result.pickle"


def call_and_save(fn: Callable[..., Any], args: tuple[Any, ...], dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
    """Call the function and write what it returns, pickled by ``dumps``. Raises UsageError if that cannot be pickled."""
    result = fn(*args)
    try:
        data = dumps(result)
    except Exception as error:
        raise UsageError(
            f"the function returned a {type(result).__name__}, which cannot be sent to the process that launched it "
            f"({type(error).__name__}: {error}). Return numbers, texts, tensors, or lists and dicts of them."
        ) from error
    (Path(os.environ["LOCKSTEP_RUN_DIR"]) / "workers" / os.environ["LOCKSTEP_WORKER"] / _RESULT).write_bytes(data)


def load_result(worker_folder: Path) -> Any:
    """Returns what the function has returned on a worker; None if it has left the process by ``sys.exit(0)``."""
    path = worker_folder / _RESULT
    return pickle.loads(path.read_bytes()) if path.exists() else None


def save_function(path: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write what a spawned worker needs. Raises UsageError if the function cannot be found by its name in another process."""
    main = sys.modules["__main__"]
    if fn.__module__ == "__main__" and not hasattr(main, "__file__"):
        raise UsageError(
            f"{fn.__qualname__} is defined in a notebook or at a prompt, where spawned workers cannot find it. Move it into a "
            "module and import it. Or let workers be forked: do not pass start_method='spawn', and call lockstep.launch before "
            "this process uses CUDA."
        )
    try:
        data = pickle.dumps((fn, args))
    except Exception as error:
        raise UsageError(
            f"{fn.__qualname__} or its arguments cannot be sent to spawned workers ({type(error).__name__}: {error}). Define the "
            "function at the top level of a module, and pass arguments that can be pickled."
        ) from error
    preparation = multiprocessing.spawn.get_preparation_data("lockstep worker")
    preparation.pop("authkey", None)  # it cannot be pickled, and workers have no connections of multiprocessing to the caller
    path.write_bytes(pickle.dumps((preparation, data)))


def forget_parent() -> None:
    """The first call in a process that was forked from the user's interpreter: undo what belongs to that interpreter alone.

    A notebook replaces the standard streams and hooks. Exit handlers and child processes are those of the parent.
    """
    atexit._clear()
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    sys.excepthook, sys.displayhook, sys.breakpointhook = sys.__excepthook__, sys.__displayhook__, sys.__breakpointhook__
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _main() -> None:
    preparation, data = pickle.loads(Path(sys.argv[1]).read_bytes())
    multiprocessing.spawn.prepare(preparation)
    call_and_save(*pickle.loads(data))


if __name__ == "__main__":
    _main()
