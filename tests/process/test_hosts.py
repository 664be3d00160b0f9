"""Two hosts, simulated by network namespaces with a real link between them: the kernel counts the bytes that cross the link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOSTS = "aabbb"  # rank -> host: unequal numbers of workers
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
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


def namespaces_work() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "lockstep-probe"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "lockstep-probe"], capture_output=True, check=False)
    return made


@pytest.fixture
def link() -> Iterator[dict[str, str]]:
    if not namespaces_work():
        pytest.skip("network namespaces need root and iproute2")
    names = {host: f"lockstep-{os.getpid()}-{host}" for host in ADDRESSES}
    try:
        for name in names.values():
            subprocess.run(["ip", "netns", "add", name], check=True)
        pair = ["type", "veth", "peer", "name", "eth0", "netns", names["b"]]
        subprocess.run(["ip", "link", "add", "eth0", "netns", names["a"], *pair], check=True)
        for host, name in names.items():
            subprocess.run(["ip", "-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "eth0"], check=True)
            for device in ("eth0", "lo"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_between_two_hosts_each_sends_one_bucket_however_many_workers_it_has(link: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    running = []
    for rank, host in enumerate(HOSTS):
        world = {
            "LOCKSTEP_RANK": str(rank),
            "LOCKSTEP_SIZE": str(len(HOSTS)),
            "LOCKSTEP_LOCAL_RANK": str(HOSTS[:rank].count(host)),
            "LOCKSTEP_LOCAL_SIZE": str(HOSTS.count(host)),
            "LOCKSTEP_STORE": f"tcp://{ADDRESSES['a']}:29611",
            "LOCKSTEP_MACHINE": host,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        command = ["ip", "netns", "exec", link[host], sys.executable, str(script)]
        env = {**os.environ, **world}
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=90) for process in running]
    for process, (_, err) in zip(running, outputs, strict=True):
        assert process.returncode == 0, err[-1500:]
    counts = [int(out.split()[1]) for out, _ in outputs if out]
    assert len(counts) == 2
    for count in counts:  # 2(M-1)/M of the bucket for M = 2 hosts; headers and control are the rest
        assert BUCKET_BYTES * ROUNDS <= count < 1.05 * BUCKET_BYTES * ROUNDS
