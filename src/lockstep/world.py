"""World: the rank and size of this worker, read from the environment. The one place that reads RANK, LOCKSTEP_*, SLURM_* etc.

It opens no socket, and imports no torch until ``World.device`` is called. The first launcher whose variables are set is used:

    LOCKSTEP_*  >  Kubeflow (PET_*)  >  torchrun (RANK, WORLD_SIZE, ...)  >  Slurm step  >  Open MPI  >  PMI  >  alone
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

from lockstep.errors import UsageError

AGENT_STORE = "agent:"
"""The rendezvous of workers whose agent serves their store."""
COMMS = ("auto", "shm", "twolevel", "gloo", "nccl")
_building_nccl = threading.Lock()


@dataclass(frozen=True)
class World:
    """The rank of this worker, the number of workers, and where the workers find each other.

    Attributes:
        rank: The number of this worker, from 0 to ``size`` - 1.
        size: How many workers there are.
        local_rank: The number of this worker among the workers of its machine.
        local_size: How many workers its machine has.
        source: Which launcher's variables were read, for messages.
        rendezvous: Where the workers find each other: ``tcp://host:port`` or ``file:///path``; empty if there is one worker.
        hosts_store: Whether this worker must serve the TCP address itself. torchrun's agent serves it for its workers.
        run_id: Distinguishes this run, or this restart of it, from others at the same address.
        machine: Names the machine. Workers with equal names share memory. Empty: ``machine_name()``.

    Example:
        >>> World.detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}).rank
        1
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    source: str = "alone"
    rendezvous: str = ""
    hosts_store: bool = False
    run_id: str = ""
    machine: str = ""

    def __post_init__(self) -> None:
        shown = f"rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}"
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise UsageError(f"{self.source} says {shown}: the rank must be from 0 to size - 1. Correct these variables.")
        if self.local_size < 1 or not 0 <= self.local_rank < self.local_size or self.local_size > self.size:
            raise UsageError(
                f"{self.source} says {shown}: the local rank must be from 0 to local size - 1, and the local size "
                "must not exceed the size. Correct these variables."
            )

    @property
    def is_main(self) -> bool:
        """Whether this worker has rank 0."""
        return self.rank == 0

    def device(self) -> Any:
        """Returns the ``torch.device`` of this worker: the GPU with the number of its local rank, or the CPU if there is no GPU."""
        import torch

        gpus = torch.cuda.device_count()
        return torch.device("cuda", self.local_rank % gpus) if gpus else torch.device("cpu")

    @staticmethod
    def detect(environ: Mapping[str, str] | None = None) -> World:
        """Read the variables of the launcher that started this process.

        Args:
            environ: The variables; default: ``os.environ``.

        Returns:
            The world that they describe; a world of one worker if there are none.

        Raises:
            UsageError: Some variables of a launcher are missing or contradict each other. The message lists them.
        """
        env = os.environ if environ is None else environ
        for read in (_from_lockstep, _from_kubeflow, _from_torchrun, _from_slurm, _from_openmpi, _from_pmi):
            world = read(env)
            if world is not None:
                return world
        return World()


@dataclass(frozen=True)
class AgentEndpoint:
    """What the agent of `lockstep run` tells a worker. ``fd``: a socket to the agent. ``worker``: the number of the worker."""

    fd: int
    worker: int
    run_dir: str
    hang_timeout_s: float = 30.0
    start_size: int = 0
    """How many workers the run began with; 0 if it is not known."""
    ledger: str = ""
    """The folder in which to record which samples were committed; empty: do not record."""
    is_debugged: bool = False
    """Whether a person may stop a worker in a debugger: `lockstep run --debug-rank`."""
    machine: str = ""
    """Names the machine. Workers with equal names share memory. Empty: ``machine_name()``."""
    records: bool = True
    """Whether the worker records how its steps pass."""


def agent_endpoint(environ: Mapping[str, str] | None = None) -> AgentEndpoint | None:
    """Returns what the agent has told this process, or None if `lockstep run` did not start it."""
    env = os.environ if environ is None else environ
    if "LOCKSTEP_AGENT_FD" not in env:
        return None
    return AgentEndpoint(
        _int(env, "LOCKSTEP_AGENT_FD"),
        _int(env, "LOCKSTEP_WORKER"),
        env["LOCKSTEP_RUN_DIR"],
        float(env.get("LOCKSTEP_HANG_TIMEOUT", 30)),
        int(env.get("LOCKSTEP_START_SIZE", 0)),
        env.get("LOCKSTEP_LEDGER", ""),
        "LOCKSTEP_DEBUG_RANK" in env,
        env.get("LOCKSTEP_MACHINE", ""),
        recording_requested(env),
    )


def requested_comm(environ: Mapping[str, str] | None = None) -> str:
    """Returns the value of LOCKSTEP_COMM, which must be one of COMMS; "auto" if it is not set."""
    requested = (os.environ if environ is None else environ).get("LOCKSTEP_COMM", "auto")
    return require_comm(requested, "LOCKSTEP_COMM")


def require_comm(name: str, argument: str) -> str:
    """Returns ``name``. Raises UsageError if it is not one of COMMS. ``argument``: where ``name`` was given, for the message."""
    if name not in COMMS:
        raise UsageError(f"{argument}={name!r} is not a way to send gradients. Choose one of {', '.join(COMMS)}.")
    return name


def requested_helper_thread(environ: Mapping[str, str] | None = None) -> str:
    """Returns the value of LOCKSTEP_HELPER_THREAD: "on", "auto", or "off" if it is not set. Raises UsageError for another value."""
    requested = (os.environ if environ is None else environ).get("LOCKSTEP_HELPER_THREAD", "off")
    if requested not in ("auto", "on", "off"):
        raise UsageError(f"LOCKSTEP_HELPER_THREAD={requested!r} is not a choice. Set it to on, off or auto, or unset it.")
    return requested


def recording_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether a worker records how its steps pass: unless LOCKSTEP_RECORD is off. Raises UsageError for another value."""
    requested = (os.environ if environ is None else environ).get("LOCKSTEP_RECORD", "on")
    if requested not in ("on", "off"):
        raise UsageError(f"LOCKSTEP_RECORD={requested!r} is not a choice. Set it to off to record nothing, or unset it.")
    return requested == "on"


def patch_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether LOCKSTEP_DDP is 1: `lockstep run` then calls ``lockstep.patch()``. Must be 0, 1 or empty."""
    requested = (os.environ if environ is None else environ).get("LOCKSTEP_DDP", "")
    if requested not in ("", "0", "1"):
        raise UsageError(f"LOCKSTEP_DDP={requested!r} is not a choice. Set it to 1 for lockstep.patch(), or unset it.")
    return requested == "1"


def ask_cublas_to_repeat() -> None:
    """Make cuBLAS deterministic. Must be called before its first use. A value that the user has set is kept."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def no_nccl_watchdog() -> Iterator[None]:
    """An NCCL group of torch that is built in this context has no thread that may end the process. Other groups are not affected.

    torch reads the variable when a group is built. comm/nccl_connect.py says why it is this one.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _building_nccl:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


@contextmanager
def default_variables(defaults: Mapping[str, str]) -> Iterator[None]:
    """Give each variable that is not set a value, until the block ends: for a library that takes its limits from variables."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def machine_name() -> str:
    """Returns a name that is equal for two processes exactly if they have the same kernel and the same pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def requested_machine() -> str:
    """Returns the value of LOCKSTEP_MACHINE: processes with different values do not share memory. Empty if it is not set."""
    return os.environ.get("LOCKSTEP_MACHINE", "")


def machine_label() -> str:
    """Returns the name of this machine for people, and in the messages of agents: ``LOCKSTEP_MACHINE``, or the host name."""
    return requested_machine() or socket.gethostname()


def gloo_address() -> str:
    """Returns the address on which this worker listens for workers of other machines; empty: no agent has chosen one."""
    return os.environ.get("LOCKSTEP_ADDRESS", "")


def nccl_may_share_gpus() -> bool:
    """Returns whether several ranks of NCCL may use one GPU: NCCL 2.30 and later read this variable."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1"


def gloo_interfaces() -> list[str]:
    """Returns the network interfaces that ``GLOO_SOCKET_IFNAME`` names, as torch reads it; empty if it is not set."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _from_lockstep(env: Mapping[str, str]) -> World | None:
    found = _ints(env, "LOCKSTEP_*", "LOCKSTEP_RANK", "LOCKSTEP_SIZE", local=("LOCKSTEP_LOCAL_RANK", "LOCKSTEP_LOCAL_SIZE"))
    if found is None:
        return None
    rank, size, _, _ = found
    store = env.get("LOCKSTEP_STORE", "")
    parsed = urlparse(store)
    is_address = (parsed.scheme == "tcp" and parsed.hostname and parsed.port) or (parsed.scheme == "file" and parsed.path)
    is_address = is_address or (store == AGENT_STORE and "LOCKSTEP_AGENT_FD" in env)
    if size > 1 and not is_address:
        raise UsageError(
            f"LOCKSTEP_SIZE={size} needs a rendezvous, but LOCKSTEP_STORE={store!r}. "
            "Set it to tcp://HOST:PORT or file:///PATH, the same for every worker."
        )
    run_id, machine = env.get("LOCKSTEP_RUN_ID", ""), env.get("LOCKSTEP_MACHINE", "")
    return World(*found, "LOCKSTEP_*", store, hosts_store=rank == 0, run_id=run_id, machine=machine)


def _from_kubeflow(env: Mapping[str, str]) -> World | None:
    """Kubeflow's Trainer and PyTorchJob set PET_* for torchrun in each pod; PyTorchJob sets RANK and WORLD_SIZE too.

    Returns None if torchrun has read the variables: it sets LOCAL_RANK for each worker. Without torchrun a pod is one worker.
    """
    if "PET_NNODES" not in env or "LOCAL_RANK" in env:
        return None
    nodes, per_node = env["PET_NNODES"], env.get("PET_NPROC_PER_NODE", "1")
    if not nodes.isdecimal() or (per_node.isdecimal() and int(per_node) > 1):
        raise UsageError(
            f"Kubeflow asks for {nodes} pods with {per_node} workers each (PET_NNODES={nodes!r}, PET_NPROC_PER_NODE={per_node!r}), "
            "but this process is the only worker of its pod, because it was started without torchrun. "
            "Let the command of the pod begin with torchrun, or ask for a fixed number of pods with one worker each."
        )
    size, number = int(nodes), "PET_NODE_RANK" if "PET_NODE_RANK" in env else "RANK"
    if size == 1:
        return World(source="Kubeflow")
    if number not in env:
        raise UsageError(f"the variables of Kubeflow are incomplete: PET_NNODES={size} is set, but PET_NODE_RANK is not. Set it.")
    rank = _int(env, number)
    if "RANK" in env and _int(env, "RANK") != rank:
        raise UsageError(f"RANK={env['RANK']} contradicts PET_NODE_RANK={rank}, and this pod has one worker. Correct one of them.")
    master = {key: env.get(f"PET_{key}") or env.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT")}
    return World(rank, size, 0, 1, "Kubeflow", _master(master, size, "Kubeflow"), hosts_store=rank == 0)


def _from_torchrun(env: Mapping[str, str]) -> World | None:
    found = _ints(env, "torchrun", "RANK", "WORLD_SIZE", local=("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if found is None:
        return None
    rank, size, _, _ = found
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run_id = env.get("TORCHELASTIC_RUN_ID", "") + "." + env.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = _master(env, size, "torchrun")
    return World(*found, "torchrun", rendezvous, hosts_store=rank == 0 and not agent_serves, run_id=run_id)


def _from_slurm(env: Mapping[str, str]) -> World | None:
    # Only srun sets SLURM_STEP_NUM_TASKS. An sbatch script has SLURM_PROCID too, but it is one process.
    if "SLURM_STEP_NUM_TASKS" not in env:
        return None
    found = _ints(env, "a Slurm step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", local=("SLURM_LOCALID", ""))
    assert found is not None
    rank, size, local_rank, _ = found
    nodes = _int(env, "SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_NODES" in env else 1
    per_node = _expand_tasks(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if per_node and sum(per_node) != size:
        raise UsageError(
            f"Slurm's variables contradict each other: SLURM_STEP_NUM_TASKS={size} but "
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']} adds up to {sum(per_node)}. Correct one of them."
        )
    node = _int(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    local_size = per_node[node] if node < len(per_node) else (size if nodes == 1 else local_rank + 1)
    job = env.get("SLURM_JOB_ID", env.get("SLURM_JOBID", "0")) + "." + env.get("SLURM_STEP_ID", "0")
    rendezvous = ""
    if size > 1 and nodes == 1 and "MASTER_ADDR" not in env:
        rendezvous = _private_file(f"slurm-{job}")
    elif size > 1:
        host = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
        rendezvous = f"tcp://{host}:{env.get('MASTER_PORT') or _port(job)}"
    return World(rank, size, local_rank, local_size, "a Slurm step", rendezvous, hosts_store=rank == 0, run_id=job)


def _from_openmpi(env: Mapping[str, str]) -> World | None:
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    found = _ints(env, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", local=local)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or _parent()
    return None if found is None else _mpi_world(env, "Open MPI", found, job)


def _from_pmi(env: Mapping[str, str]) -> World | None:
    found = _ints(env, "PMI", "PMI_RANK", "PMI_SIZE", local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    job = env.get("PMI_JOBID") or env.get("PMI_ID") or _parent()
    return None if found is None else _mpi_world(env, "PMI", found, job)


def _mpi_world(env: Mapping[str, str], source: str, found: tuple[int, int, int, int], job: str) -> World:
    rank, size, _, local_size = found
    needs_master = "MASTER_ADDR" in env or "MASTER_PORT" in env or local_size < size
    rendezvous = "" if size == 1 else _master(env, size, source) if needs_master else _private_file(job)
    return World(*found, source, rendezvous, hosts_store=rank == 0, run_id=job)


def _ints(
    env: Mapping[str, str], source: str, rank_key: str, size_key: str, local: tuple[str, str]
) -> tuple[int, int, int, int] | None:
    """Returns (rank, size, local rank, local size), or None if neither rank nor size is set.

    Raises UsageError if only one of them is set, or if they contradict each other.
    """
    present = [key for key in (rank_key, size_key) if key in env]
    if not present:
        return None
    if len(present) == 1:
        missing = size_key if present == [rank_key] else rank_key
        raise UsageError(
            f"the variables of {source} are incomplete: {present[0]}={env[present[0]]!r} is set, but {missing} is not. "
            f"Set both, or unset {present[0]} to run one worker."
        )
    rank, size = _int(env, rank_key), _int(env, size_key)
    if not 0 <= rank < size:
        raise UsageError(
            f"{rank_key}={rank} contradicts {size_key}={size}: the rank must be from 0 to size - 1. Correct one of them."
        )
    local_rank_key, local_size_key = local
    if local_size_key and local_rank_key in env and local_size_key in env:
        return rank, size, _int(env, local_rank_key), _int(env, local_size_key)
    if local_rank_key in env:
        # Without a local size, all workers are taken to be on one machine, unless the local rank differs from the rank.
        local_rank = _int(env, local_rank_key)
        return rank, size, local_rank, size if local_rank == rank else local_rank + 1
    return rank, size, rank, size


def _int(env: Mapping[str, str], key: str) -> int:
    try:
        return int(env[key])
    except ValueError:
        raise UsageError(f"{key}={env[key]!r} is not a whole number. Correct it, or unset it.") from None


def _master(env: Mapping[str, str], size: int, source: str) -> str:
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if not env.get(key)]
    if missing and size == 1:
        return ""
    if missing:
        found = ", ".join(f"{key}={env[key]}" for key in ("MASTER_ADDR", "MASTER_PORT") if key not in missing) or "neither"
        raise UsageError(
            f"{source} starts {size} workers, which need {' and '.join(missing)} to find each other (found {found}). "
            "Set MASTER_ADDR to rank 0's address and MASTER_PORT to a free port there."
        )
    return f"tcp://{env['MASTER_ADDR']}:{_int(env, 'MASTER_PORT')}"


def _port(job: str) -> int:
    return 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 20000


def _parent() -> str:
    """Names the launcher process by pid and start time, so that a later launcher with the same pid has another name."""
    try:
        with open(f"/proc/{os.getppid()}/stat") as status:
            return f"parent-{os.getppid()}-{status.read().rpartition(')')[2].split()[19]}"
    except OSError:
        return f"parent-{os.getppid()}"


def _private_file(job: str) -> str:
    """A rendezvous file for the workers of one job on one machine. All of them compute the same path, and no port is opened."""
    name = hashlib.sha256(f"{os.getuid()}/{job}".encode()).hexdigest()[:24]
    return f"file://{tempfile.gettempdir()}/lockstep-{os.getuid()}/{name}"


def _expand_tasks(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]."""
    out: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be parsed. Set LOCKSTEP_RANK and LOCKSTEP_SIZE by hand.")
        out += [int(match[1])] * int(match[2] or 1)
    return out


def _first_host(nodelist: str) -> str:
    """Slurm's "gpu[003-007,9],cpu1" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,]*))?", nodelist)
    if match is None:
        raise UsageError(f"SLURM_STEP_NODELIST={nodelist!r} names no host. Set MASTER_ADDR to the address of the first node.")
    prefix, ranges, suffix = match[1], match[2], match[3] or ""
    return prefix + re.split(r"[,-]", ranges)[0] + suffix if ranges else prefix
