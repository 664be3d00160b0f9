"""What holds for all tests: one thread per worker, Ctrl-C works, and a test marked ``exclusive`` runs while no other test does."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Two cores are shared by up to eight workers. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Runs of the tests are not registered among those of the person who starts the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-of-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# A command that a shell runs in the background ignores Ctrl-C, and a command under nohup ignores SIGHUP. The runs that the tests
# start would inherit it, and `lockstep run` respects it.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def _locks() -> Iterator[tuple[int, int]]:
    """Two files that the processes of one pytest-xdist session share."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    paths = [Path(tempfile.gettempdir(), f"test-session-{session}-{name}") for name in ("queue", "tests")]
    queue, tests = (os.open(path, os.O_RDWR | os.O_CREAT) for path in paths)
    yield queue, tests
    for descriptor, path in zip((queue, tests), paths, strict=True):
        os.close(descriptor)
        path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _run_alone_if_exclusive(request: pytest.FixtureRequest, _locks: tuple[int, int]) -> Iterator[None]:
    """Every test shares a lock with the others, and a test marked ``exclusive`` has it alone. In the queue nobody overtakes it."""
    queue, tests = _locks
    fcntl.flock(queue, fcntl.LOCK_EX)
    fcntl.flock(tests, fcntl.LOCK_EX if request.node.get_closest_marker("exclusive") else fcntl.LOCK_SH)
    fcntl.flock(queue, fcntl.LOCK_UN)
    yield
    fcntl.flock(tests, fcntl.LOCK_UN)
