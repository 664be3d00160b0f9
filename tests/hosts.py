"""Hosts: machines on this machine. Each is a network namespace with an address of its own; a bridge connects them.

    with Hosts(3) as hosts:                                  # or the fixture ``hosts``: hosts(3)
        process = hosts.run("a", [sys.executable, "script.py"], stdout=subprocess.PIPE)
        hosts.address("a")                                   # 10.77.X.1, at the interface eth0
        hosts.cut("b", silently=True)                        # packets of and to b are lost, and nobody gets an error
        hosts.restore("b")

The test itself is on none of the hosts: it reaches them with ``run`` alone. All hosts see the same files and processes. What runs
on a host has LOCKSTEP_MACHINE set to its name, so that workers of two hosts do not share memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fork_server import ROOT
from tests.waiting import wait_until

_MAX_HOSTS = 26
_SSHD = "/usr/sbin/sshd"
_END_S = 10.0
_CLONE_NEWNET = 0x40000000


def missing() -> str | None:
    """Returns why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need the commands ip and tc (Debian: iproute2)"
    name = f"lockstep-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespace can be made here: {made.stderr.strip()}"


def missing_sshd() -> str | None:
    """Returns why no host can have an sshd, or None."""
    programs = {_SSHD: "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
    packages = sorted({package for program, package in programs.items() if shutil.which(program) is None})
    return f"ssh between hosts needs the Debian packages {', '.join(packages)}" if packages else None


class Hosts:
    """``count`` hosts with the names a, b, c, ... Use it in a ``with`` statement: at its end everything is removed.

    ``missing()`` says whether hosts can be made. ``names``: of the hosts. ``folder``: for files of the hosts, removed at the end.
    ``ssh_config``: a configuration file of ssh that maps the names of the hosts that have an sshd to their addresses.
    """

    def __init__(self, count: int) -> None:
        assert 1 <= count <= _MAX_HOSTS
        self.names = [chr(ord("a") + number) for number in range(count)]
        self._started: list[subprocess.Popen[Any]] = []
        self._network = os.getpid() % 254 + 1
        self._is_down: set[str] = set()

    def __enter__(self) -> Hosts:
        _remove_namespaces_of_ended_tests()
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-hosts-"))
        self.ssh_config = self.folder / "ssh_config"
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    # -- processes --------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        return f"10.77.{self._network}.{self.names.index(host) + 1}"

    def environment(self, host: str) -> dict[str, str]:
        """The variables of what runs on the host, besides those of this process that are not Lockstep's."""
        path = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"LOCKSTEP_MACHINE": host, "PYTHONPATH": os.pathsep.join(path)}

    def run(self, host: str, command: Sequence[str], env: dict[str, str] | None = None, **popen: Any) -> subprocess.Popen[Any]:
        """Start a command on the host and return at once. ``env`` is added to its variables.

        The process id is that of the command. What still runs when the hosts are removed is killed.
        """
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        variables = {**clean, **self.environment(host), **(env or {})}
        popen.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(["ip", "netns", "exec", self._namespace(host), *command], env=variables, **popen)
        self._started.append(process)
        return process

    def network(self, host: str) -> Path:
        """The network namespace of the host, for ``enter_network``."""
        return Path("/run/netns", self._namespace(host))

    def pids(self, host: str) -> list[int]:
        """The ids of all processes on the host, also of those that other processes have started."""
        return _pids(self._namespace(host))

    def pids_of(self, host: str, word: str) -> list[int]:
        """The ids of the processes on the host that have not ended and whose command line contains ``word``."""
        return [pid for pid in self.pids(host) if word in _command_line(pid)]

    def kill(self, host: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to every process on the host. For a machine that loses power, ``cut`` it silently first."""
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- the link of a host -----------------------------------------------------------------------

    def cut(self, host: str, *, silently: bool = False) -> None:
        """Disconnect the host from the others.

        With ``silently`` every packet of and to the host is lost, as if its cable ended nowhere. Otherwise its interface is
        down: what runs on the host gets an error when it sends, and what runs on other hosts gets none.
        """
        if silently:
            _ip("-n", self._hub, "link", "set", self._port(host), "nomaster")
        else:
            self._is_down.add(host)
            _ip("-n", self._namespace(host), "link", "set", "eth0", "down")

    def restore(self, host: str) -> None:
        """Connect the host again, however it was cut. Does nothing if it is connected."""
        _ip("-n", self._hub, "link", "set", self._port(host), "master", "bridge")
        if host in self._is_down:
            self._is_down.remove(host)
            _ip("-n", self._namespace(host), "link", "set", "eth0", "up")
            self._add_neighbours(host)  # the kernel has forgotten them

    def block(self, one: str, other: str) -> None:
        """Lose every packet between two hosts, silently. Each reaches all others."""
        for host, peer in ((one, other), (other, one)):
            nobody = [self.address(peer), "lladdr", "02:00:00:00:ff:ff", "nud", "permanent", "dev", "eth0"]
            _ip("-n", self._namespace(host), "neigh", "replace", *nobody)

    def limit(self, host: str, mbit: float | None) -> None:
        """Let the link of the host carry at most ``mbit`` megabits per second in each direction. None: no limit any more."""
        for namespace, device in ((self._namespace(host), "eth0"), (self._hub, self._port(host))):
            if mbit is None:
                _run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], check=False)
                continue
            bits = round(mbit * 1e6)
            burst = max(1 << 16, bits // 8 // 100)  # bytes of 10 ms: the kernel's timer is not finer
            shape = ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "50ms"]
            _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape])

    def bytes_sent(self, host: str) -> int:
        """How many bytes have left the host so far, headers included, as its kernel counts them."""
        (link,) = json.loads(_ip("-n", self._namespace(host), "-s", "-j", "link", "show", "dev", "eth0"))
        return int(link["stats64"]["tx"]["bytes"])

    # -- ssh --------------------------------------------------------------------------------------

    def sshd(self, host: str, env: dict[str, str] | None = None) -> subprocess.Popen[Any]:
        """Start an sshd on the host, and return when it answers. `ssh -F hosts.ssh_config HOST` logs in, from every host.

        ``env`` is added to the variables of what is started by ssh. ``missing_sshd()`` says whether this is possible.
        """
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd refuses to start without it
        user_key, host_key = self.folder / "user_key", self.folder / f"host_key_{host}"
        for key in (user_key, host_key):
            if not key.exists():
                _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        variables = " ".join(f'"{name}={value}"' for name, value in {**self.environment(host), **(env or {})}.items())
        settings = f"""
            ListenAddress {self.address(host)}
            HostKey {host_key}
            AuthorizedKeysFile {user_key}.pub
            StrictModes no
            PermitRootLogin yes
            PasswordAuthentication no
            KbdInteractiveAuthentication no
            UsePAM no
            PidFile none
            SetEnv {variables}
        """
        config, log = self.folder / f"sshd_config_{host}", self.folder / f"sshd_{host}.txt"
        config.write_text(settings)
        with log.open("ab") as output:
            process = self.run(host, [_SSHD, "-D", "-e", "-f", str(config)], stdout=output, stderr=output)
        self._add_to_ssh_config(host, user_key, host_key)
        wait_until(lambda: "Server listening" in log.read_text() or process.poll() is not None, f"sshd of {host} listens", _END_S)
        assert process.poll() is None, log.read_text()
        return process

    def _add_to_ssh_config(self, host: str, user_key: Path, host_key: Path) -> None:
        known = self.folder / "known_hosts"
        address, public = self.address(host), host_key.with_suffix(".pub").read_text()
        with known.open("a") as file:
            file.write(f"{address} {public}")
        with self.ssh_config.open("a") as file:
            file.write(f"Host {host}\n  HostName {address}\n  User root\n  IdentityFile {user_key}\n  IdentitiesOnly yes\n")
            file.write(f"  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n")

    # -- making and removing ----------------------------------------------------------------------

    @property
    def _hub(self) -> str:
        return f"lockstep-{os.getpid()}-hub"

    def _namespace(self, host: str) -> str:
        assert host in self.names, host
        return f"lockstep-{os.getpid()}-{host}"

    def _port(self, host: str) -> str:
        """The other end of the host's link, in the namespace of the bridge."""
        return f"port-{host}"

    def _make(self) -> None:
        for namespace in (self._hub, *map(self._namespace, self.names)):
            _ip("netns", "add", namespace)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0", "stp_state", "0")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for host in self.names:
            namespace, port = self._namespace(host), self._port(host)
            pair = ["address", self._hardware_address(host), "type", "veth", "peer", "name", port, "netns", self._hub]
            _ip("link", "add", "eth0", "netns", namespace, *pair)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", namespace, "link", "set", device, "up")
        for host in self.names:
            self._add_neighbours(host)

    def _hardware_address(self, host: str) -> str:
        return f"02:00:00:00:{self._network:02x}:{self.names.index(host) + 1:02x}"

    def _add_neighbours(self, host: str) -> None:
        """Without this a host finds out after some seconds that no host has the address of one that is silently cut off."""
        for other in self.names:
            if other != host:
                entry = [self.address(other), "lladdr", self._hardware_address(other), "nud", "permanent", "dev", "eth0"]
                _ip("-n", self._namespace(host), "neigh", "replace", *entry)

    def _remove(self) -> None:
        for namespace in (*map(self._namespace, self.names), self._hub):
            _remove_namespace(namespace)
        for process in self._started:
            process.wait(_END_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(OSError):  # what was to be flushed has no reader
                        pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def enter_network(namespace: Path) -> None:
    """Move this process to another host. (Python 3.12 has os.setns.)"""
    descriptor = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


def _run(command: list[str], check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_END_S, check=False)
    assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run(["ip", "netns", "pids", namespace], check=False).split()]


def _command_line(pid: int) -> str:
    """Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _remove_namespace(namespace: str) -> None:
    """Kill what runs in the namespace, and remove it with its interfaces. Does nothing if it does not exist."""
    if not Path("/run/netns", namespace).exists():
        return
    end = time.monotonic() + _END_S
    while (pids := _pids(namespace)) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    _run(["ip", "netns", "del", namespace], check=False)


def _remove_namespaces_of_ended_tests() -> None:
    """A test process that was killed has left its namespaces."""
    for path in Path("/run/netns").glob("lockstep-*"):
        found = re.fullmatch(r"lockstep-(\d+)-(hub|probe|[a-z])", path.name)
        if found and not Path("/proc", found[1]).exists():
            _remove_namespace(path.name)
