"""Several hosts (tests/hosts.py): what their links do, and what workers send over them, counted by the kernel."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import training_run
from tests.hosts import Hosts, missing_sshd
from tests.waiting import wait_until

WORKERS = "aabbb"  # rank -> host: unequal numbers of workers
BUCKET_BYTES = 8_000_000
ROUNDS = 5

SCRIPT = f"""
import torch
from lockstep.comm.open_comm import open_comm
from lockstep.world import World

def sent():
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read())

world = World.detect()
comm = open_comm(torch.device("cpu"), world=world, timeout_s=30)
assert comm.name == "twolevel", comm.name
bucket = comm.buffer({BUCKET_BYTES} // 4, torch.float32, torch.device("cpu"))
comm.barrier()
before = sent()
for step in range({ROUNDS}):
    bucket.fill_(world.rank + 1.0)
    comm.reduce(bucket, "mean", f"bucket 0 of step {{step}}").wait()
    assert bool((bucket == (world.size + 1) / 2).all())
comm.barrier()
if world.local_rank == 0:
    print("sent", sent() - before, flush=True)
comm.barrier()
comm.close()
"""

TALK = """
import socket, sys

address, role = sys.argv[1], sys.argv[2]
if role == "listen":
    with socket.create_server((address, 5000)) as server:
        print("listening", flush=True)
        connection = server.accept()[0]
        while data := connection.recv(1 << 20):
            print(len(data), flush=True)
else:
    connection = socket.create_connection((address, 5000), timeout=10)
    for line in sys.stdin:
        try:
            connection.sendall(b"x" * int(line))
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (address, 5001))
            print("sent", flush=True)
        except OSError as error:
            print(error.errno, flush=True)
"""


def test_a_cut_link_loses_packets_or_gives_errors_and_is_restored(hosts: Callable[[int], Hosts]) -> None:
    three = hosts(3)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    listener = three.run("b", [sys.executable, "-c", TALK, three.address("b"), "listen"], **pipes)
    assert listener.stdout.readline() == "listening\n"
    talker = three.run("a", [sys.executable, "-c", TALK, three.address("b"), "talk"], **pipes)

    def talk() -> str:
        talker.stdin.write("5\n")
        return str(talker.stdout.readline()).strip()

    assert (talk(), listener.stdout.readline()) == ("sent", "5\n")
    sent = three.bytes_sent("a")
    three.cut("b", silently=True)
    assert talk() == "sent"
    wait_until(lambda: three.bytes_sent("a") > sent, "the lost packet has left the host")
    three.restore("b")
    assert listener.stdout.readline() == "5\n"  # TCP has sent it again
    three.cut("a")
    assert talk() == str(errno.ENETUNREACH)
    three.restore("a")
    assert listener.stdout.readline() == "5\n"
    assert (talk(), listener.stdout.readline()) == ("sent", "5\n")


def test_a_link_can_be_made_slow(hosts: Callable[[int], Hosts]) -> None:
    two = hosts(2)
    two.limit("a", 8)
    two.limit("a", None)
    two.limit("b", 8)  # megabits per second: 1 MB takes 1 s, less what the limit lets through at once
    script = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
connection, began, count = server.accept()[0], time.monotonic(), 0
while data := connection.recv(1 << 20):
    count += len(data)
print(count, time.monotonic() - began)
"""
    listener = two.run("b", [sys.executable, "-c", script, two.address("b")], stdout=subprocess.PIPE, text=True)
    assert listener.stdout.readline() == "listening\n"
    send = f"import socket; socket.create_connection(({two.address('b')!r}, 5000)).sendall(bytes(1_000_000))"
    assert two.run("a", [sys.executable, "-c", send]).wait(30) == 0
    count, duration = listener.communicate(timeout=30)[0].split()
    assert int(count) == 1_000_000
    assert 0.5 < float(duration) < 10


def test_ssh_between_hosts(hosts: Callable[[int], Hosts]) -> None:
    if reason := missing_sshd():
        pytest.skip(reason)
    two = hosts(2)
    two.sshd("b")
    command = ["ssh", "-F", str(two.ssh_config), "b", "echo $LOCKSTEP_MACHINE; exec sleep 600"]
    session = two.run("a", command, stdout=subprocess.PIPE, text=True)
    assert session.stdout.readline() == "b\n"
    assert len(two.pids("b")) >= 2  # sshd and what it has started
    two.kill("b")
    assert session.wait(30) == 255
    assert two.pids("b") == []


def test_between_two_hosts_each_sends_one_bucket_however_many_workers_it_has(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    two = hosts(2)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    running = []
    for rank, host in enumerate(WORKERS):
        world = {
            "LOCKSTEP_RANK": str(rank),
            "LOCKSTEP_SIZE": str(len(WORKERS)),
            "LOCKSTEP_LOCAL_RANK": str(WORKERS[:rank].count(host)),
            "LOCKSTEP_LOCAL_SIZE": str(WORKERS.count(host)),
            "LOCKSTEP_STORE": f"tcp://{two.address('a')}:29611",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(two.run(host, [sys.executable, str(script)], world, **pipes))
    outputs = [process.communicate(timeout=90) for process in running]
    for process, (_, err) in zip(running, outputs, strict=True):
        assert process.returncode == 0, err[-1500:]
    counts = [int(out.split()[1]) for out, _ in outputs if out]
    assert len(counts) == 2
    for count in counts:  # 2(M-1)/M of the bucket for M = 2 hosts; headers and control are the rest
        assert BUCKET_BYTES * ROUNDS <= count < 1.05 * BUCKET_BYTES * ROUNDS


def test_torchrun_on_two_hosts_gives_the_bits_of_one_process(hosts: Callable[[int], Hosts], tmp_path: Path, expected: str) -> None:
    two = hosts(2)
    running = []
    for node, host in enumerate(two.names):
        meet = [f"--master-addr={two.address('a')}", "--master-port=29612", "--nnodes=2", f"--node-rank={node}"]
        command = [sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node=2", str(training_run.SCRIPT)]
        folder = tmp_path / host  # a worker's note is named by its number, which torchrun does not set
        folder.mkdir()
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        running.append(two.run(host, command, env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in running:
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 0, output[-2000:]
    assert {(tmp_path / host / "done-0").read_text().strip() for host in two.names} == {expected}
