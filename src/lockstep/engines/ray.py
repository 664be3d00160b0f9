"""Runs on a Ray cluster: `lockstep run --engine ray` and ``launch``. Checks what was asked for, and makes a RayRun of it.

Ray is imported when a run begins, not with this module.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.engines.agent_options import head_options, refuse_debugger, script_words
from lockstep.engines.ray_placement import bundle, needs_of_worker, workers_per_agent
from lockstep.errors import UsageError, WorkerError
from lockstep.launcher.arguments import write
from lockstep.launcher.outcome import failure_text, workers_by_rank

if TYPE_CHECKING:
    from lockstep.engines.ray_run import RayJob

_THREADS = "OMP_NUM_THREADS"


def run(given: argparse.Namespace) -> int:
    """Execute `lockstep run --engine ray`. Returns the exit code of the run."""
    refuse_debugger(given, "--engine ray")
    for option in ("python", "listen"):
        if getattr(given, option) is not None:
            raise UsageError(f"--{option} does nothing with --engine ray: Ray knows the Python and the address of each node.")
    if given.n is None:
        raise UsageError("--engine ray needs -n: how many workers the run has on all nodes together.")
    runtime_env = _read_runtime_env(given.runtime_env, given.working_dir)
    words = _script_in(given, runtime_env.get("working_dir"))
    try:
        stdout = sys.stdout
        with redirect_stdout(sys.stderr):  # Ray prints messages of its own
            with _connected(given.address, runtime_env) as env_of_actors:
                code: int = _execute(_make_job(given, words, None, runtime_env, env_of_actors), stdout)["code"]
                return code
    except WorkerError as error:
        write(2, f"lockstep: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def launch(
    script_or_fn: str | os.PathLike[str] | Callable[..., Any],
    *args: Any,
    workers: int,
    cpus_per_worker: float = 1,
    gpus_per_worker: float | None = None,
    workers_per_node: int | None = None,
    address: str | None = None,
    working_dir: str | None = None,
    runtime_env: dict[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    hang_timeout: float = 30.0,
    max_respawns: int = 10,
    max_restarts: int = 3,
    spares: int = 0,
    ledger: bool = False,
) -> Any:
    """Run a script or a function on workers of a Ray cluster, and wait for its end.

    One actor on each node runs `lockstep agent`, and one actor runs `lockstep head`. Ray restarts them if a node is lost. Training
    continues meanwhile, and new workers join it. What rank 0 prints is shown here, with the messages of the run. Ctrl-C stops all
    workers. Everything ends with this process.

    Args:
        script_or_fn: The path of a script; or a function. Ray's cloudpickle sends the function to the workers, so it may be defined
            in a notebook.
        *args: The arguments of the function, or the words of the script's command line.
        workers: How many workers there are on all nodes together. Training begins when all of them can be placed.
        cpus_per_worker: How many CPUs Ray reserves for a worker, and how many threads the worker has.
        gpus_per_worker: How many GPUs Ray reserves for a worker; default: 1 if the cluster has GPUs, else 0.
        workers_per_node: How many workers a node has; default: as few nodes as possible are used, with equal numbers of workers.
        address: The address of the cluster, ``"auto"``, ``"local"`` or ``"ray://HOST:PORT"``. Default: the variable
            ``RAY_ADDRESS``, or a cluster that runs on this machine. If this process has called ``ray.init``, that cluster is used.
        working_dir: A folder that Ray copies to the nodes. A script is named relative to it. Default: workers run in the current
            directory of this process, which must exist on the nodes.
        runtime_env: Ray's runtime environment for the workers: ``{"pip": [...], "env_vars": {...}}``.
        run_dir: The folder for logs and events on each node; default: a new folder under ``lockstep-runs``.
        hang_timeout: A worker for which others wait this many seconds is killed.
        max_respawns: How many workers are replaced in 5 minutes.
        max_restarts: How often all workers are started again, if they do not use ``lockstep.Run``.
        spares: How many more workers stand by, to take the place of one that is lost.
        ledger: Whether to record which sample was committed in which step.

    Returns:
        For a function: what it has returned on rank 0. For a script: the exit code of the run.

    Raises:
        WorkerError: The function failed. The message has the traceback of the worker that failed first.
        UsageError: An argument cannot work, or no Ray cluster answers.
        KeyboardInterrupt: Ctrl-C has stopped a function, or a script before it was started.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(f"workers={workers!r} is not a number of workers. Pass a whole number of at least 1.")
    if "LOCKSTEP_AGENT_FD" in os.environ:
        raise UsageError("lockstep.engines.ray.launch was called in a worker: every worker would start workers of its own.")
    environment = dict(runtime_env or {})
    if working_dir is not None:
        environment["working_dir"] = os.fspath(working_dir)
    given = argparse.Namespace(
        **{"n": workers, "cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker},
        **{"workers_per_node": workers_per_node, "run_dir": None if run_dir is None else os.fspath(run_dir)},
        **{"hang_timeout": float(hang_timeout), "max_respawns": max_respawns, "max_restarts": max_restarts, "ledger": ledger},
        **{"spares": spares, "plain": False},
        **{"grace": 10.0, "no_respawn": False, "preload": None, "interface": None, "module": None, "script": []},
    )
    words: list[str] | None = None
    if not callable(script_or_fn):
        given.script = [os.fspath(script_or_fn), *map(str, args)]
        words = _script_in(given, environment.get("working_dir"))
    with _connected(address, environment) as env_of_actors:
        function = None if words is not None else _pickled(script_or_fn, args)
        job = _make_job(given, words or [], function, environment, env_of_actors)
        outcome = _execute(job, sys.stdout, is_function=words is None)
    return outcome["result"] if words is None else outcome["code"]


def _execute(job: RayJob, stdout: TextIO, *, is_function: bool = False) -> dict[str, Any]:
    """Run the job. Returns its outcome; of a function with "result", what it has returned on rank 0."""
    from ray import cloudpickle

    from lockstep.engines.ray_run import RayRun

    try:
        ray_run = RayRun(job, stdout)
    except ValueError as error:  # of what was asked for, Ray cannot do something
        raise UsageError(f"Ray cannot start the actors of this run: {' '.join(str(error).split())}") from error
    try:
        outcome = ray_run.run()
        if is_function:
            if ray_run.was_interrupted:
                raise KeyboardInterrupt
            if outcome["code"] != 0:
                raise WorkerError(failure_text(outcome, "The files of the run are on the nodes of the Ray cluster."))
            results = (ray_run.result(worker) for worker in workers_by_rank(outcome))
            data = next((each for each in results if each is not None), None)
            # Written by a worker of this run, and brought by Ray: docs/internals/security.md
            outcome["result"] = None if data is None else cloudpickle.loads(data)
        return outcome
    finally:
        ray_run.close()


def _make_job(
    given: argparse.Namespace,
    words: Sequence[str],
    function: bytes | None,
    runtime_env: dict[str, Any],
    env_of_actors: dict[str, Any] | None,
) -> RayJob:
    """``runtime_env``: what was asked for. ``env_of_actors``: what of it the actors need, if the whole job does not have it."""
    import ray

    from lockstep.engines.ray_actors import Places
    from lockstep.engines.ray_run import RayJob

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = given.gpus_per_worker
    if gpus is None:
        gpus = 1 if any(node.get("GPU", 0) >= 1 for node in nodes) else 0
    each = needs_of_worker(given.cpus_per_worker, gpus)
    counts = workers_per_agent(given.n, given.workers_per_node, each, nodes)
    options = ["--grace", f"{given.grace:g}"]
    for name in ("preload", "interface"):
        if getattr(given, name) is not None:
            options += [f"--{name}", getattr(given, name)]
    in_job = dict(ray.get_runtime_context().runtime_env or {})
    variables = {**(in_job.get("env_vars") or {}), **(runtime_env.get("env_vars") or {})}
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime()) + f"-{os.getpid()}"
    return RayJob(
        head_options(given, given.n),
        [["-n", str(count), *options, *words] for count in counts],
        [bundle(count, each) for count in counts],
        Places(
            os.getcwd(),
            "working_dir" in {**in_job, **runtime_env},
            None if given.run_dir is None else os.path.abspath(given.run_dir),
            name,
        ),
        function,
        None if _THREADS in variables else max(1, math.floor(given.cpus_per_worker)),
        env_of_actors,
    )


@contextmanager
def _connected(address: str | None, runtime_env: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Connect to the cluster, unless this process is connected. Yields the runtime environment that actors must get themselves."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("the engine ray needs the package ray. Install it: pip install 'lockstep-ddp[ray]'") from error
    if ray.is_initialized():
        yield runtime_env or None
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, runtime_env=runtime_env or None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ImportError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UsageError(
            f"no connection to a Ray cluster at {address}: {why}. Start one with `ray start --head`, or name its address with "
            "--address."
        ) from error
    try:
        yield None
    finally:
        ray.shutdown()


def _read_runtime_env(text: str | None, working_dir: str | None) -> dict[str, Any]:
    try:
        env = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f'--runtime-env is not JSON ({error}). Write it like \'{{"pip": ["numpy"]}}\'.') from error
    if not isinstance(env, dict):
        raise UsageError(f'--runtime-env {text} is not a JSON object. Write it like \'{{"pip": ["numpy"]}}\'.')
    return env if working_dir is None else {**env, "working_dir": working_dir}


def _script_in(given: argparse.Namespace, working_dir: str | None) -> list[str]:
    """Returns the script, or `-m module`, with its arguments. It must exist in ``working_dir``, if that is a folder here."""
    if working_dir is None:
        return script_words(given)
    if not Path(working_dir).is_dir():
        if "://" not in working_dir and not working_dir.endswith((".zip", ".jar")):
            raise UsageError(
                f"there is no folder {working_dir} for Ray to copy to the nodes. Name a folder, or the URL of an archive."
            )
        return _words_alone(given)
    before = os.getcwd()
    os.chdir(working_dir)  # on the nodes, it is the current directory
    try:
        return script_words(given)
    finally:
        os.chdir(before)


def _words_alone(given: argparse.Namespace) -> list[str]:
    if given.module is not None:
        return ["-m", *given.module, *given.script]
    if not given.script:
        raise UsageError("no script was given. Name one of the working directory: `lockstep run --engine ray -n 4 train.py`.")
    return list(given.script[1:] if given.script[:1] == ["--"] else given.script)


def _pickled(fn: Any, args: tuple[Any, ...]) -> bytes:
    from ray import cloudpickle

    try:
        return cloudpickle.dumps((fn, args))  # type: ignore[no-any-return]
    except Exception as error:
        raise UsageError(
            f"{getattr(fn, '__qualname__', fn)} or its arguments cannot be sent to workers ({type(error).__name__}: {error}). Open "
            "files, connections and locks in the function."
        ) from error
