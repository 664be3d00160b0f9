"""RayCluster: a real Ray cluster on this machine, one raylet per node, and drivers that train on it.

    with RayCluster(3) as cluster:                     # or the fixture ``ray_cluster``
        run = RayTraining(cluster, folder, hold_at=20)
        run.wait_for_step(20)
        cluster.remove_node()
        cluster.add_node()
        assert run.result() == expected

Each node takes itself for a machine of its own (LOCKSTEP_MACHINE), so workers of different nodes do not share memory.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fork_server import ROOT
from tests.launch import LaunchedRun
from tests.training_run import SCRIPT

CPUS = 2
DEADLINE_S = 120.0
HANG_TIMEOUT_S = 3.0


def missing_ray() -> str | None:
    """Returns why there can be no Ray here, or None."""
    return "Ray is not installed (pip install -e '.[ray]')" if find_spec("ray") is None else None


class RayCluster:
    """Use it in a ``with`` statement. Every node has 2 CPUs, that of Ray's own control process too."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._added: list[Any] = []
        self._count = 0

    def __enter__(self) -> RayCluster:
        from ray.cluster_utils import Cluster

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            first = {"num_cpus": CPUS, "include_dashboard": False, "ray_client_server_port": port, "env_vars": self._variables()}
            self.client_address = f"ray://127.0.0.1:{port}"
            self._cluster = Cluster(initialize_head=True, head_node_args=first)
            for _ in range(self._nodes - 1):
                self.add_node()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> None:
        self._added.append(self._cluster.add_node(num_cpus=CPUS, env_vars=self._variables()))

    def restore(self) -> None:
        """Add the nodes that a test has removed and not replaced."""
        while len(self._added) < self._nodes - 1:
            self.add_node()

    def remove_node(self) -> None:
        """Kill the node that was added last, with everything on it."""
        self._cluster.remove_node(self._added.pop(), allow_graceful=False)

    def _variables(self) -> dict[str, str]:
        self._count += 1
        return {"LOCKSTEP_MACHINE": f"node{self._count}"}


class RayDriver(LaunchedRun):
    """`lockstep run --engine ray` in a folder that all nodes see. ``env``: variables of the workers. ``address``: of Ray."""

    def __init__(
        self,
        cluster: RayCluster,
        folder: Path,
        script: str | Path | None,
        *options: str,
        workers: int,
        env: dict[str, str] | None = None,
        address: str | None = None,
    ) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
        engine = ["--engine", "ray", "--address", address or cluster.address]
        engine += ["--runtime-env", json.dumps({"env_vars": variables})]
        super().__init__(script, *engine, *options, folder=folder, workers=workers, own_imports=True)

    def events(self, kind: str = "event") -> list[Any]:
        """Of all heads of this run."""
        lines = [line for path in self.run_dir.glob("heads/*/events.jsonl") for line in path.read_text().splitlines()]
        entries = [entry for entry in map(json.loads, lines) if entry["kind"] == kind]
        return sorted(entries, key=lambda entry: float(entry["time"]))

    def generations(self) -> list[list[int]]:
        """The members of every generation so far, as all heads have noted it."""
        formed = [
            (entry["time"], each["Form"]["members"]) for entry in self.events() for each in entry["actions"] if "Form" in each
        ]
        formed += [(entry["time"], entry["workers"]) for entry in self.events("continue")]
        return [members for _, members in sorted(formed)]

    def head_actor(self) -> int:
        """The process id of the actor that owns the newest head."""
        newest = max(self.run_dir.glob("heads/*"), key=lambda path: path.stat().st_ctime)
        return int(newest.name.rpartition("-")[2])

    def dump(self) -> str:
        texts = [super().dump()]
        for path in sorted(self.run_dir.rglob("*")):
            if path.name in ("events.jsonl", "zygote.txt", "log.txt"):
                texts += [f"-- {path.relative_to(self.run_dir)}", *path.read_text(errors="replace").splitlines()[-40:]]
        return "\n".join(texts)


class RayTraining(RayDriver):
    """tests/scripts/train.py on 6 workers. ``settings``: what it reads from its environment: ``hold_at=30`` is TRAIN_HOLD_AT=30."""

    def __init__(self, cluster: RayCluster, folder: Path, *options: str, workers: int = 6, **settings: Any) -> None:
        env = {f"TRAIN_{name.upper()}": str(value) for name, value in settings.items()}
        limits = ("--hang-timeout", str(HANG_TIMEOUT_S))
        super().__init__(cluster, folder, SCRIPT, *limits, *options, workers=workers, env=env)

    def step(self) -> int:
        """The last step that rank 0 has committed."""
        note = self.folder / "step"
        return int(note.read_text() or 0) if note.exists() else 0

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step} is committed", DEADLINE_S)

    def wait_for_size(self, size: int) -> None:
        """Wait until the newest generation has ``size`` members."""
        what = f"the newest generation has {size} members"
        self.wait_until(lambda: self.generations() and len(self.generations()[-1]) == size, what, DEADLINE_S)

    def hurry(self) -> None:
        """The test has acted: the run need not be slow any more."""
        (self.folder / "hurry").touch()
