"""World.detect() reads the variables of each launcher, and lists those that are missing or contradict each other."""

from __future__ import annotations

import pytest

from lockstep import UsageError, World

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MASTER}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node-123@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "job"}

TRAINJOB = {  # Kubeflow Trainer; PyTorchJob adds RANK, WORLD_SIZE and MASTER_*
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}
PYTORCHJOB = {**TRAINJOB, **MASTER, "RANK": "2", "WORLD_SIZE": "4"}


def test_a_lone_process() -> None:
    world = World.detect({})
    assert world.device().type in ("cpu", "cuda")
    assert (world.rank, world.size, world.source, world.is_main) == (0, 1, "alone", True)


def test_torchrun() -> None:
    world = World.detect(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert (world.source, world.rendezvous) == ("torchrun", "tcp://10.0.0.1:29500")
    assert World.detect({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}).hosts_store
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "r"}
    world = World.detect({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", **agent})
    assert not world.hosts_store
    assert world.run_id == "r.2", "a restart must not read the keys of the run before"


def test_a_slurm_step() -> None:
    world = World.detect(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert world.source == "a Slurm step"
    assert world.rendezvous.startswith("tcp://gpu003:")
    assert World.detect({**SLURM, **MASTER}).rendezvous == "tcp://10.0.0.1:29500"
    one_node = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0", "SLURM_LOCALID": "5"}
    assert World.detect(one_node).rendezvous.startswith("file://"), "one machine opens no port"


def test_an_sbatch_script_without_srun_is_alone() -> None:
    assert World.detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "3"}).source == "alone"


@pytest.mark.parametrize(
    ("nodelist", "first"), [("a[01-03,7]", "tcp://a01:"), ("n5", "tcp://n5:"), ("x,y", "tcp://x:"), ("r[2]-ib,z", "tcp://r2-ib:")]
)
def test_slurm_node_lists(nodelist: str, first: str) -> None:
    assert World.detect({**SLURM, "SLURM_STEP_NODELIST": nodelist}).rendezvous.startswith(first)


def test_open_mpi_and_pmi() -> None:
    for env, source in ((OMPI, "Open MPI"), (PMI, "PMI")):
        world = World.detect(env)
        assert (world.source, world.rank) == (source, world.size - 1)
        assert world.rendezvous.startswith("file://")
        assert World.detect({**env, **MASTER}).rendezvous == "tcp://10.0.0.1:29500"


def test_kubeflow() -> None:
    for env in (TRAINJOB, PYTORCHJOB, {**TRAINJOB, "PET_NPROC_PER_NODE": "auto"}):
        world = World.detect(env)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 0, 1), "each pod is a machine"
        assert (world.source, world.rendezvous) == ("Kubeflow", "tcp://train-node-0-0.train:29500")
        assert not world.hosts_store
    assert World.detect({**TRAINJOB, "PET_NODE_RANK": "0"}).hosts_store
    under_torchrun = World.detect({**PYTORCHJOB, **TORCHRUN, "PET_NPROC_PER_NODE": "4"})
    assert (under_torchrun.source, under_torchrun.rank, under_torchrun.local_rank) == ("torchrun", 5, 1)
    assert World.detect({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}).size == 1


def test_lockstep_variables_win() -> None:
    ours = {"LOCKSTEP_RANK": "1", "LOCKSTEP_SIZE": "2", "LOCKSTEP_STORE": "file:///tmp/x/y"}
    world = World.detect({**TORCHRUN, **SLURM, **ours})
    assert (world.rank, world.size, world.source) == (1, 2, "LOCKSTEP_*")
    assert World.detect({**SLURM, **TORCHRUN}).source == "torchrun", "torchrun may run inside a Slurm step"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, ["RANK='0'", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE='2'", "RANK"]),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ["RANK='zero'", "whole number"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ["MASTER_PORT", "MASTER_ADDR=h"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4 of 4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, ["of 16", "exceed"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, ["contradict", "8", "6"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "three"}, ["three", "by hand"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_SIZE"]),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ["Open MPI", "MASTER_ADDR"]),
        ({"PMI_SIZE": "4"}, ["PMI_RANK"]),
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "8"}, ["PET_NPROC_PER_NODE='8'", "torchrun"]),
        ({**TRAINJOB, "PET_NNODES": "2:4"}, ["PET_NNODES='2:4'", "a fixed number of pods"]),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}, ["PET_NODE_RANK is not"]),
        ({**PYTORCHJOB, "RANK": "3"}, ["RANK=3", "PET_NODE_RANK=2"]),
        ({"LOCKSTEP_RANK": "0", "LOCKSTEP_SIZE": "2"}, ["LOCKSTEP_STORE", "tcp://HOST:PORT"]),
        ({"LOCKSTEP_RANK": "0", "LOCKSTEP_SIZE": "2", "LOCKSTEP_STORE": "http://x"}, ["http://x"]),
    ],
)
def test_missing_or_contradictory_variables_are_listed(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        World.detect(env)
    for word in words:
        assert word in str(caught.value)
