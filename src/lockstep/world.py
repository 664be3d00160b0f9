"""World: who am I. The one place that reads RANK, LOCKSTEP_*, SLURM_*, OMPI_* and PMI_*.

It knows nothing of sockets and imports no torch until asked for a device: it turns an environment
into a frozen value and says which launcher it believed. Precedence, first complete one wins:

    LOCKSTEP_*  >  torchrun (RANK, WORLD_SIZE, ...)  >  Slurm step  >  Open MPI  >  PMI  >  alone
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

from lockstep.errors import UsageError

COMMS = ("auto", "shm", "twolevel", "gloo", "nccl")


@dataclass(frozen=True)
class World:
    """One worker's place among the others.

    ``rendezvous`` is where workers meet: ``tcp://host:port`` or ``file:///path``; empty when alone.
    ``hosts_store`` says whether rank 0 itself must serve that TCP address (torchrun's agent
    serves it for its workers).
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
    """Names this worker's machine; workers with equal names share memory. Empty: ``machine_name()``."""

    def __post_init__(self) -> None:
        shown = f"rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}"
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise UsageError(f"{self.source} says {shown}: the rank must lie in 0..size-1. Correct these variables.")
        if self.local_size < 1 or not 0 <= self.local_rank < self.local_size or self.local_size > self.size:
            raise UsageError(
                f"{self.source} says {shown}: the local rank must lie in 0..local size-1, and the local size "
                "cannot exceed the world's. Correct these variables."
            )

    def __str__(self) -> str:
        where = f", meeting at {self.rendezvous}" if self.rendezvous else ""
        return f"rank {self.rank} of {self.size} (local {self.local_rank} of {self.local_size}; from {self.source}{where})"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def spans_machines(self) -> bool:
        return self.local_size < self.size

    def device(self) -> Any:
        """The ``torch.device`` for this worker: a GPU by local rank where there are any, else the CPU."""
        import torch

        gpus = torch.cuda.device_count()
        return torch.device("cuda", self.local_rank % gpus) if gpus else torch.device("cpu")

    @staticmethod
    def detect(environ: Mapping[str, str] | None = None) -> World:
        """Read the launcher's variables. Half-set or contradictory ones are a ``UsageError`` that lists them."""
        env = os.environ if environ is None else environ
        for read in (_from_lockstep, _from_torchrun, _from_slurm, _from_openmpi, _from_pmi):
            world = read(env)
            if world is not None:
                return world
        return World()


@dataclass(frozen=True)
class AgentEndpoint:
    """A worker's line to its agent: an open socket, its number in the run, and the run's folder."""

    fd: int
    worker: int
    run_dir: str
    hang_timeout_s: float = 30.0
    start_size: int = 0
    """How many workers the run began with; 0 where nobody says."""
    ledger: str = ""
    """Where to write which samples were committed; empty: nowhere."""


def agent_endpoint(environ: Mapping[str, str] | None = None) -> AgentEndpoint | None:
    """Where ``lockstep run`` started this process; None elsewhere."""
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
    )


def requested_comm(environ: Mapping[str, str] | None = None) -> str:
    """What LOCKSTEP_COMM asks for: one of COMMS, "auto" where it is not set."""
    asked = (os.environ if environ is None else environ).get("LOCKSTEP_COMM", "auto")
    return require_comm(asked, "LOCKSTEP_COMM")


def require_comm(name: str, whose: str) -> str:
    if name not in COMMS:
        raise UsageError(f"{whose}={name!r} is no way to carry gradients. Choose one of {', '.join(COMMS)}.")
    return name


def ask_cublas_to_repeat() -> None:
    """cuBLAS gives the same bits again only if told so before its first use. A value of the user's own stays."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def machine_name() -> str:
    """Equal for two processes exactly if they can see each other: one kernel, and one process namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _from_lockstep(env: Mapping[str, str]) -> World | None:
    found = _ints(env, "LOCKSTEP_*", "LOCKSTEP_RANK", "LOCKSTEP_SIZE", local=("LOCKSTEP_LOCAL_RANK", "LOCKSTEP_LOCAL_SIZE"))
    if found is None:
        return None
    rank, size, local_rank, local_size = found
    store = env.get("LOCKSTEP_STORE", "")
    if size > 1:
        parsed = urlparse(store)
        if (parsed.scheme == "tcp" and parsed.hostname and parsed.port) or (parsed.scheme == "file" and parsed.path):
            pass
        else:
            raise UsageError(
                f"LOCKSTEP_SIZE={size} needs a place to meet, but LOCKSTEP_STORE={store!r}. "
                "Set it to tcp://HOST:PORT or file:///PATH, the same for every worker."
            )
    run_id = env.get("LOCKSTEP_RUN_ID", "")
    machine = env.get("LOCKSTEP_MACHINE", "")
    return World(rank, size, local_rank, local_size, "LOCKSTEP_*", store, hosts_store=rank == 0, run_id=run_id, machine=machine)


def _from_torchrun(env: Mapping[str, str]) -> World | None:
    found = _ints(env, "torchrun", "RANK", "WORLD_SIZE", local=("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if found is None:
        return None
    rank, size, local_rank, local_size = found
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return World(
        rank,
        size,
        local_rank,
        local_size,
        "torchrun",
        _master(env, size, "torchrun"),
        hosts_store=rank == 0 and not agent_serves,
        run_id=env.get("TORCHELASTIC_RUN_ID", "") + "." + env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _from_slurm(env: Mapping[str, str]) -> World | None:
    # SLURM_STEP_NUM_TASKS is set by srun alone; an sbatch script has SLURM_PROCID too, but is no step.
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
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']} adds up to {sum(per_node)}."
        )
    node = _int(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    local_size = per_node[node] if node < len(per_node) else (size if nodes == 1 else local_rank + 1)
    job = env.get("SLURM_JOB_ID", env.get("SLURM_JOBID", "0")) + "." + env.get("SLURM_STEP_ID", "0")
    if size == 1:
        rendezvous = ""
    elif "MASTER_ADDR" in env:
        rendezvous = f"tcp://{env['MASTER_ADDR']}:{env.get('MASTER_PORT') or _port(job)}"
    elif nodes == 1:
        rendezvous = _private_file(f"slurm-{job}")
    else:
        rendezvous = f"tcp://{_first_host(env.get('SLURM_STEP_NODELIST', ''))}:{env.get('MASTER_PORT') or _port(job)}"
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
    rank, size, local_rank, local_size = found
    if size == 1:
        rendezvous = ""
    elif "MASTER_ADDR" in env or "MASTER_PORT" in env or local_size < size:
        rendezvous = _master(env, size, source)
    else:
        rendezvous = _private_file(job)
    return World(rank, size, local_rank, local_size, source, rendezvous, hosts_store=rank == 0, run_id=job)


def _ints(
    env: Mapping[str, str], source: str, rank_key: str, size_key: str, local: tuple[str, str]
) -> tuple[int, int, int, int] | None:
    """(rank, size, local rank, local size), None where neither is set; one without the other is an error."""
    keys = [rank_key, size_key]
    present = [k for k in keys if k in env]
    if not present:
        return None
    if len(present) == 1:
        (missing,) = [k for k in keys if k not in env]
        raise UsageError(
            f"{source} is half set: {present[0]}={env[present[0]]!r} is there but {missing} is not. "
            f"Set both, or unset {present[0]} to run alone."
        )
    rank, size = _int(env, rank_key), _int(env, size_key)
    if not 0 <= rank < size:
        raise UsageError(f"{source} contradicts itself: {rank_key}={rank} with {size_key}={size}; the rank must be below the size.")
    local_rank_key, local_size_key = local
    if local_size_key and local_rank_key in env and local_size_key in env:
        return rank, size, _int(env, local_rank_key), _int(env, local_size_key)
    if local_rank_key in env:
        # Without a local size, all workers count as one machine's unless the local rank says otherwise.
        local_rank = _int(env, local_rank_key)
        return rank, size, local_rank, size if local_rank == rank else local_rank + 1
    return rank, size, rank, size


def _int(env: Mapping[str, str], key: str) -> int:
    try:
        return int(env[key])
    except ValueError:
        raise UsageError(f"{key}={env[key]!r} is not a whole number. Set it to one, or unset it.") from None


def _master(env: Mapping[str, str], size: int, source: str) -> str:
    if size == 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        return ""
    missing = [k for k in ("MASTER_ADDR", "MASTER_PORT") if not env.get(k)]
    if missing:
        have = ", ".join(f"{k}={env[k]}" for k in ("MASTER_ADDR", "MASTER_PORT") if k not in missing) or "neither"
        raise UsageError(
            f"{source} gives {size} workers but no place to meet: {' and '.join(missing)} not set (found {have}). "
            "Set MASTER_ADDR to rank 0's address and MASTER_PORT to a free port there."
        )
    return f"tcp://{env['MASTER_ADDR']}:{_int(env, 'MASTER_PORT')}"


def _port(job: str) -> int:
    return 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 20000


def _parent() -> str:
    """Names the launcher that started this worker and its neighbours; a later one with the same number has another start."""
    try:
        with open(f"/proc/{os.getppid()}/stat") as status:
            return f"parent-{os.getppid()}-{status.read().rpartition(')')[2].split()[19]}"
    except OSError:
        return f"parent-{os.getppid()}"


def _private_file(job: str) -> str:
    """A path that workers of one job on one machine agree on without talking; it opens no port."""
    name = hashlib.sha256(f"{os.getuid()}/{job}".encode()).hexdigest()[:24]
    return f"file://{tempfile.gettempdir()}/lockstep-{os.getuid()}/{name}"


def _expand_tasks(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]."""
    out: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read. Set LOCKSTEP_RANK and LOCKSTEP_SIZE by hand.")
        out += [int(match[1])] * int(match[2] or 1)
    return out


def _first_host(nodelist: str) -> str:
    """Slurm's "gpu[003-007,9],cpu1" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,]*))?", nodelist)
    if match is None:
        raise UsageError(f"SLURM_STEP_NODELIST={nodelist!r} names no host to meet at. Set MASTER_ADDR to the first node's address.")
    prefix, ranges, suffix = match[1], match[2], match[3] or ""
    return prefix + re.split(r"[,-]", ranges)[0] + suffix if ranges else prefix
