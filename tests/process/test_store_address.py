"""A store whose address cannot work is named in time: host, address, port, direction and reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from lockstep.comm import store_address
from lockstep.comm.store import open_store
from lockstep.errors import PeerError
from lockstep.world import World

SCRIPT = """
import time, torch, lockstep
model, began = torch.nn.Linear(1, 1), time.monotonic()
try:
    lockstep.replicate(model)
finally:
    print(time.monotonic() - began)
"""


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port: int = taken.getsockname()[1]
    return port


def world(rank: int, host: str, port: int) -> World:
    return World(rank, 2, rendezvous=f"tcp://{host}:{port}", hosts_store=rank == 0)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port to which the kernel loses every packet: its queue of connections is full."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for each in waiting:
            each.close()


@pytest.mark.slow
def test_a_script_whose_master_does_not_resolve_ends_within_20_s_on_each_rank() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LOCKSTEP_", "SLURM_"))}
    env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "n1.invalid", "MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", SCRIPT], env={**env, "RANK": str(rank)}, **pipes) for rank in range(2)]
    for rank, process in enumerate(ranks):
        duration_s, said = process.communicate(timeout=90)
        assert process.returncode == 1
        assert float(duration_s) < 20  # the import of torch, which takes long on a busy machine, is not in it
        assert f"rank {rank} on {socket.gethostname()} cannot resolve the host n1.invalid of the store at n1.invalid:" in said


OF_RANK_0 = "UsageError: rank 0 cannot serve the store at {0}: it runs on {1}, which has none of the addresses of 10.9.9.9"
OF_RANK_1 = "PeerError: no store answered rank 1 at {0} for 1 s: from {1} to {0}: network is unreachable"


@pytest.mark.parametrize(("rank", "says"), [(0, OF_RANK_0), (1, OF_RANK_1)])
def test_an_address_without_a_route(rank: int, says: str) -> None:
    namespace = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a network namespace needs root, unshare and iproute2")
    code = "from lockstep.comm.store import open_store; from lockstep.world import World; "
    code += f"open_store(World({rank}, 2, rendezvous='tcp://10.9.9.9:29500', hosts_store={rank} == 0), 1.0)"
    done = subprocess.run([*namespace, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert says.format("10.9.9.9:29500", socket.gethostname()) in done.stderr
    assert "10.9.9.9:29500: network is unreachable" in done.stderr


def test_a_port_that_loses_all_packets(silent_port: int) -> None:
    with pytest.raises(PeerError) as caught:
        open_store(world(1, "localhost", silent_port), 1.0)
    said = str(caught.value)
    assert f"at localhost:{silent_port} for " in said
    assert f"from {socket.gethostname()} to " in said
    assert f"127.0.0.1:{silent_port}: no answer (a firewall" in said
    assert caught.value.ranks == (0,)


def test_a_refused_connection_is_tried_until_rank_0_is_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_address, "NOTICE_S", 0.3)
    port, opened = free_port(), []
    waiting = threading.Thread(target=lambda: opened.append(open_store(world(1, "localhost", port), 30.0)))
    waiting.start()
    said = ""
    while "has tried for" not in said:
        said += capfd.readouterr().err
    assert f"rank 1 has tried for 0.3 s to reach the store of rank 0 at localhost:{port}" in said
    assert f"127.0.0.1:{port}: connection refused" in said
    store = open_store(world(0, "localhost", port), 30.0)
    waiting.join(30)
    opened[0].set("key", "value")
    assert store.get("key") == b"value"


def test_refused_until_the_timeout() -> None:
    with pytest.raises(PeerError, match=r"127\.0\.0\.1:\d+: connection refused"):
        open_store(world(1, "127.0.0.1", free_port()), 0.5)
