"""Other processes of the machine cannot use up a worker's descriptors through the ports of gloo."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

import pytest

from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from tests.process.test_different_calls import call, connect, make_buckets
from tests.workers import run_workers

ATTEMPTS = 300


def listening() -> list[tuple[str, int]]:
    """The addresses on which this process listens, from the kernel's table of IPv4 sockets."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the descriptor of the listing itself
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def flood(addresses: list[tuple[str, int]]) -> int:
    """Open many connections and keep them until the end of the process. Returns how many were established."""
    attempts = []
    for address in addresses * ATTEMPTS:
        attempt = socket.socket()
        attempt.setblocking(False)
        assert attempt.connect_ex(address) in (0, errno.EINPROGRESS)
        attempts.append(attempt)
    kept.extend(attempts)
    return sum(attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and is_connected(attempt) for attempt in attempts)


kept: list[socket.socket] = []


def is_connected(attempt: socket.socket) -> bool:
    try:
        attempt.getpeername()
    except OSError:
        return False
    return True


def suffer(rank: int, size: int, kind: str) -> tuple[list[tuple[str, int]], int]:
    comm: Comm = connect(rank, size, kind)
    buckets = make_buckets(comm)
    call(comm, "bucket", buckets)
    addresses = listening()
    if rank == 0:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ports = gather_bytes(comm, ",".join(str(port) for _, port in addresses).encode(), "the ports of each rank")[0]
    established = flood([("127.0.0.1", int(port)) for port in ports.decode().split(",") if port]) if rank == 1 else 0
    for _ in range(3):
        comm.barrier("after the attack")
        call(comm, "buckets", buckets)
    comm.close()
    return addresses, established


@pytest.mark.parametrize("kind", ["gloo", "twolevel", "shm"])
def test_foreign_connections_do_not_use_up_descriptors(kind: str) -> None:
    outcomes = run_workers(suffer, 3, kind)
    addresses = [address for found, _ in outcomes for address in found]
    assert bool(addresses) == (kind != "shm")  # workers over shared memory open no port
    assert {host for host, _ in addresses} <= {"127.0.0.1"}
    assert outcomes[1][1] == 0
