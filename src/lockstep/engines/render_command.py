"""`lockstep render kubernetes | slurm`: writes what a cluster needs to start a run. Checks the arguments; starts nothing."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.cluster.token import new_token
from lockstep.engines import slurm_script
from lockstep.engines.kubernetes import KINDS, KubernetesRun
from lockstep.engines.kubernetes import render as render_kubernetes
from lockstep.engines.slurm_script import SlurmJob
from lockstep.engines.yaml_text import documents
from lockstep.errors import UsageError
from lockstep.launcher.arguments import whole_number, write

_WORKERS_PER_POD = 8
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[MGTP]i?|Ki)?")
_SLURM_TIME = re.compile(r"\d+|(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE")
_WORD = re.compile(r"[A-Za-z0-9_.,-]+")
_EPILOG = "Options before the script belong to lockstep, options after it to the script."
_NOTE = (
    "Made by `lockstep render kubernetes`. Start it with `kubectl apply -f`. This file contains the token of the run: keep it "
    "private, or make a Secret of your own and render with --token-secret NAME."
)


def add_parsers(commands: Any) -> None:
    """Add `render` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command."""
    parser = commands.add_parser("render", help="write what Kubernetes or Slurm needs to start a run", allow_abbrev=False)
    parser.set_defaults(execute=_no_command)
    targets = parser.add_subparsers(metavar="CLUSTER")
    _add_kubernetes(targets)
    _add_slurm(targets)


def _add_kubernetes(targets: Any) -> None:
    parser = _target(targets, "kubernetes", "write a YAML file for kubectl", "--image IMAGE -n N", _kubernetes)
    parser.add_argument("--image", required=True, metavar="IMAGE", help="a container image with Lockstep and the script")
    parser.add_argument("-n", type=whole_number(1), required=True, metavar="N", help="how many workers")
    help = f"workers in each pod (default: N, at most {_WORKERS_PER_POD})"
    parser.add_argument("--workers-per-pod", type=whole_number(1), metavar="K", help=help)
    help = "begin when this many workers are there; later ones join (default: N)"
    parser.add_argument("--min-workers", type=whole_number(1), metavar="K", help=help)
    parser.add_argument("--gpus-per-worker", type=whole_number(0), default=0, metavar="G", help="GPUs for each worker (default: 0)")
    help = "the resource that stands for a GPU (default: nvidia.com/gpu)"
    parser.add_argument("--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help=help)
    parser.add_argument("--cpu", type=_quantity, metavar="Q", help="CPUs for each pod of workers, for example 16")
    parser.add_argument("--memory", type=_quantity, metavar="Q", help="memory for each pod of workers, for example 64Gi")
    parser.add_argument("--name", type=_name, metavar="NAME", help="name of the run (default: that of the script)")
    parser.add_argument("--namespace", type=_name, metavar="NS", help="namespace (default: that of kubectl)")
    help = "jobset (needs the JobSet controller), job (two Jobs), or trainjob (for Kubeflow Trainer); default: jobset"
    parser.add_argument("--kind", choices=sorted(KINDS), default="jobset", help=help)
    help = "a PersistentVolumeClaim that is mounted at /checkpoints; all pods must be able to write to it (ReadWriteMany)"
    parser.add_argument("--checkpoint-claim", type=_name, metavar="PVC", help=help)
    help = "a Secret that exists, whose key `token` has 64 hexadecimal digits (default: a new Secret)"
    parser.add_argument("--token-secret", type=_name, metavar="NAME", help=help)
    parser.add_argument(
        "--user", type=whole_number(0), metavar="UID", help="run as this user (default: root, the user of most images)"
    )
    help = "seconds to end a step and to write a checkpoint (default: 300)"
    parser.add_argument("--grace", type=whole_number(1), default=300, metavar="S", help=help)
    help = "how often Kubernetes replaces a pod that fails; drains and preemptions do not count (default: 3)"
    parser.add_argument("--max-restarts", type=whole_number(0), default=3, metavar="R", help=help)
    _add_entrypoint(parser)


def _add_slurm(targets: Any) -> None:
    parser = _target(targets, "slurm", "write a script for sbatch", "-n N --nodes K", _slurm)
    parser.add_argument("-n", type=whole_number(1), required=True, metavar="N", help="how many workers, on all nodes together")
    parser.add_argument("--nodes", type=whole_number(1), required=True, metavar="K", help="on how many nodes")
    parser.add_argument("--gpus-per-worker", type=whole_number(0), default=0, metavar="G", help="GPUs for each worker (default: 0)")
    parser.add_argument(
        "--cpus-per-worker", type=whole_number(1), default=1, metavar="C", help="cores for each worker (default: 1)"
    )
    parser.add_argument("--time", metavar="T", help="time limit, as sbatch takes it: minutes, or days-hours:minutes:seconds")
    parser.add_argument("--partition", metavar="P", help="partition")
    parser.add_argument("--name", type=_name, metavar="NAME", help="name of the job (default: that of the script)")
    help = "seconds before the time limit at which the run saves and is put into the queue again (default: 60)"
    parser.add_argument("--warning", type=whole_number(1), default=60, metavar="S", help=help)
    _add_entrypoint(parser)


def _target(targets: Any, name: str, help: str, required: str, make: Callable[[argparse.Namespace], str]) -> Any:
    usage = f"lockstep render {name} {required} [options] script.py [args ...]"
    usage += f"\n       lockstep render {name} {required} [options] -m module [args ...]"
    parser = targets.add_parser(name, help=help, usage=usage, epilog=_EPILOG, allow_abbrev=False)
    parser.set_defaults(execute=partial(_execute, make))
    parser.add_argument("-o", dest="file", metavar="FILE", help="write to this file (default: standard output)")
    return parser


def _add_entrypoint(parser: Any) -> None:
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module instead of a script, with its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def _execute(make: Callable[[argparse.Namespace], str], given: argparse.Namespace) -> int:
    text = make(given)
    if given.file is None:
        write(1, text)
        return 0
    try:
        # Only this user may read it: it may contain the token.
        descriptor = os.open(given.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)
            file.write(text)
    except OSError as error:
        raise UsageError(f"{given.file} cannot be written ({error.strerror}). Name another file with -o.") from error
    return 0


def _kubernetes(given: argparse.Namespace) -> str:
    entrypoint = _entrypoint(given, "lockstep render kubernetes --image IMAGE -n 16")
    per_pod = given.workers_per_pod or min(given.n, _WORKERS_PER_POD)
    _check_multiple(given.n, per_pod, "--workers-per-pod", "All pods of a Job are alike")
    if given.min_workers is not None and given.min_workers > given.n:
        raise UsageError(
            f"--min-workers {given.min_workers} is more than -n {given.n}: the run would never begin. Use at most {given.n}."
        )
    run = KubernetesRun(
        name=given.name or _default_name(entrypoint),
        image=given.image,
        entrypoint=entrypoint,
        workers=given.n,
        workers_per_pod=per_pod,
        min_workers=given.min_workers or given.n,
        gpus_per_worker=given.gpus_per_worker,
        gpu_resource=given.gpu_resource,
        namespace=given.namespace,
        cpu=given.cpu,
        memory=given.memory,
        checkpoint_claim=given.checkpoint_claim,
        token_secret=given.token_secret,
        token=None if given.token_secret else new_token(),
        user=given.user,
        grace_s=given.grace,
        max_restarts=given.max_restarts,
    )
    return documents(render_kubernetes(run, given.kind), _NOTE if run.token else "Made by `lockstep render kubernetes`.")


def _slurm(given: argparse.Namespace) -> str:
    entrypoint = _entrypoint(given, "lockstep render slurm -n 16 --nodes 4")
    _check_multiple(given.n, given.nodes, "--nodes", "Each node gets the same number of workers")
    if given.time is not None and not _SLURM_TIME.fullmatch(given.time):
        raise UsageError(
            f"--time {given.time!r} is not a time limit. Write minutes (90), or days-hours:minutes:seconds (1-12:00:00)."
        )
    if given.partition is not None and not _WORD.fullmatch(given.partition):
        raise UsageError(f"--partition {given.partition!r} is not the name of a partition. `sinfo` lists them.")
    return slurm_script.render(
        SlurmJob(
            name=given.name or _default_name(entrypoint),
            entrypoint=entrypoint,
            workers=given.n,
            nodes=given.nodes,
            time=given.time,
            partition=given.partition,
            gpus_per_worker=given.gpus_per_worker,
            cpus_per_worker=given.cpus_per_worker,
            warning_s=given.warning,
        )
    )


def _entrypoint(given: argparse.Namespace, command: str) -> tuple[str, ...]:
    """What the agents run. It need not exist here: it is in the image, or on the cluster."""
    if given.module is not None:
        if not given.module:
            raise UsageError(f"-m needs the name of a module: `{command} -m package.module`.")
        return ("-m", *given.module, *given.script)
    words = given.script[1:] if given.script[:1] == ["--"] else given.script
    if not words:
        raise UsageError(f"no script was given. Name one: `{command} train.py`, or a module: `{command} -m package.train`.")
    return tuple(words)


def _check_multiple(workers: int, divisor: int, option: str, why: str) -> None:
    if workers % divisor:
        below, above = workers // divisor * divisor, (workers // divisor + 1) * divisor
        choices = f"-n {below} or -n {above}" if below else f"-n {above}"
        raise UsageError(f"-n {workers} is not a multiple of {option} {divisor}. {why}: use {choices}, or another {option}.")


def _default_name(entrypoint: tuple[str, ...]) -> str:
    source = entrypoint[1].rpartition(".")[2] if entrypoint[0] == "-m" else Path(entrypoint[0]).stem
    name = re.sub(r"[^a-z0-9]+", "-", source.lower()).strip("-")[:40].strip("-")
    return name if _NAME.fullmatch(name) else "lockstep-run"


def _name(text: str) -> str:
    """The ``type=`` of the name of a Kubernetes object. 40 characters: the names of pods are longer."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of at most 40 lower-case letters, digits and hyphens")
    return text


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity, such as 16, 500m or 64Gi")
    return text


def _no_command(given: argparse.Namespace) -> int:
    raise UsageError(
        "no cluster was named. `lockstep render kubernetes --image IMAGE -n 16 train.py` writes a YAML file; `slurm` exists too."
    )
