"""Channels over real sockets: what they carry, how they end, and that nobody gets in or holds up others without the token."""

from __future__ import annotations

import errno
import os
import random
import resource
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.frames import FrameWriter
from lockstep.cluster.handshake import OPENING_BYTES, ClientHandshake, FrameKeys
from lockstep.cluster.listener import Listener
from lockstep.cluster.messages import Message, Table, encode
from lockstep.cluster.tls import ClientTls, ServerTls, client_tls, server_tls
from lockstep.cluster.token import new_token
from lockstep.errors import InvariantError, UsageError
from tests import echo_listener
from tests.waiting import wait_until

TOKEN = bytes(range(32))
TABLE: Table = {"ping": {"number": int}, "data": {"text": str}}
DEADLINE_S = 20.0


class Network:
    """One loop with a listener and its clients."""

    def __init__(self, host: str = "127.0.0.1", tls: ServerTls | None = None, **limits: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.events: list[tuple[str, Any]] = []
        self.opened: list[Channel] = []
        """On the side of the listener."""
        self.refused: list[str] = []
        callbacks = ChannelCallbacks(self.on_open, self.on_message("listener"), self.on_closed("listener"))
        self.listener = Listener(
            Address(host, 0),
            TOKEN,
            self.selector,
            {"agent": TABLE},
            callbacks,
            tls=tls,
            on_refused=lambda address, why: self.refused.append(why),
            **limits,
        )
        self.clients: list[Channel] = []

    def on_open(self, channel: Channel) -> None:
        self.opened.append(channel)

    def on_message(self, side: str) -> Callable[[Channel, Message], None]:
        return lambda channel, message: self.events.append((side, message))

    def on_closed(self, side: str) -> Callable[[Channel, str], None]:
        return lambda channel, why: self.events.append((side, why))

    def connect(
        self,
        target: Address | socket.socket | None = None,
        token: bytes = TOKEN,
        purpose: str = "agent",
        tls: ClientTls | None = None,
    ) -> Channel:
        callbacks = ChannelCallbacks(lambda channel: None, self.on_message("client"), self.on_closed("client"))
        self.clients.append(
            Channel.client(target or self.listener.address, token, purpose, self.selector, callbacks, TABLE, tls=tls)
        )
        return self.clients[-1]

    def open(self, **settings: Any) -> tuple[Channel, Channel]:
        """A channel as the client and as the listener has it."""
        client, before = self.connect(**settings), len(self.opened)
        self.run_until(lambda: client.is_open and len(self.opened) > before, "the channel is open")
        return client, self.opened[-1]

    def run_until(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}. Events: {self.events[-3:]}, {self.refused[-3:]}"
            self.run_once(0.02)
            self.listener.on_time(time.monotonic())
            for client in self.clients:
                client.on_time(time.monotonic())

    def run_once(self, timeout_s: float = 0.0) -> int:
        ready = self.selector.select(timeout_s)
        for key, _ in ready:
            key.data()
        return len(ready)

    def next_event(self, what: str) -> tuple[str, Any]:
        self.run_until(lambda: self.events, what)
        return self.events.pop(0)

    def close(self) -> None:
        for channel in (*self.clients, *self.opened):
            channel.close()
        self.listener.close()
        assert len(self.selector.get_map()) == 0
        self.selector.close()


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@contextmanager
def network_with(*arguments: Any, **settings: Any) -> Iterator[Network]:
    network = Network(*arguments, **settings)
    try:
        yield network
    finally:
        network.close()


def make_certificate(folder: Path) -> tuple[str, str]:
    """Returns the files of a certificate that has signed itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    return certificate, key


# What a channel carries


@pytest.mark.parametrize("kind", ["plain", "TLS", "IPv6"])
def test_messages_arrive_in_order_and_whole_on_both_sides(tmp_path: Path, kind: str) -> None:
    if kind == "IPv6" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    files = make_certificate(tmp_path) if kind == "TLS" else None
    settings: dict[str, Any] = {"tls": client_tls(files[0])} if files else {}
    with network_with("::1" if kind == "IPv6" else "127.0.0.1", server_tls(*files) if files else None) as network:
        client, server = network.open(**settings)
        assert (client.local_address, client.peer_address) == (server.peer_address, server.local_address)
        assert client.peer_address == network.listener.address
        assert server.purpose == "agent"
        large = {"type": "data", "text": "x" * 15_000_000}
        for sender, receiver, side in ((client, server, "listener"), (server, client, "client")):
            expected: list[Message] = [{"type": "ping", "number": 1}, large, {"type": "ping", "number": 2}]
            for message in expected:
                sender.send(message)
            assert sender.backlog > 0  # nobody has read yet, and send did not wait
            assert [network.next_event("all messages arrive") for _ in expected] == [(side, message) for message in expected]
            assert sender.backlog == receiver.backlog == 0


def test_a_listener_for_every_address_takes_ipv4_and_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with network_with("::") as network:
        for host in ("127.0.0.1", "::1", "localhost"):
            client, server = network.open(target=Address(host, network.listener.address.port))
            assert server.peer_address.host == client.peer_address.host or host == "localhost"


def test_a_connected_socket_can_be_given(network: Network) -> None:
    client, _ = network.open(target=socket.create_connection(network.listener.address))
    client.send({"type": "ping", "number": 1})
    assert network.next_event("the message arrives") == ("listener", {"type": "ping", "number": 1})


# How a channel ends


def test_a_close_on_purpose_is_told_apart_from_a_loss(network: Network) -> None:
    client, _ = network.open()
    client.send({"type": "ping", "number": 1})
    client.close()
    assert network.next_event("the last message")[1] == {"type": "ping", "number": 1}
    assert network.next_event("the end")[1].endswith("has closed the connection")
    client, _ = network.open()
    assert client._socket is not None
    client._socket.shutdown(socket.SHUT_WR)  # the end of a process, or a cut
    assert network.next_event("the end")[1].endswith("has ended")
    client.send({"type": "ping", "number": 1})  # nothing happens
    assert "listener" not in [side for side, _ in network.events]


def test_a_peer_that_does_not_read_ends_the_channel_and_not_the_sender(network: Network) -> None:
    client, server = network.open()
    server.max_backlog = 8 << 20
    for _ in range(50):
        server.send({"type": "data", "text": "x" * 1_000_000})
    assert not network.events  # never from within send
    assert server.backlog == 0
    network.selector.unregister(client._socket)  # type: ignore[arg-type]
    side, why = network.next_event("the channel fails")
    assert side == "listener"
    assert "does not read" in why
    network.selector.register(client._socket, selectors.EVENT_READ, client._on_ready)  # type: ignore[arg-type]


def test_a_message_to_a_dead_peer_fails_later_and_once(network: Network) -> None:
    client, server = network.open()
    assert client._socket is not None
    client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    network.selector.unregister(client._socket)
    client._socket.close()  # with a reset
    network.clients.remove(client)
    for _ in range(3):
        server.send({"type": "ping", "number": 1})
    assert not network.events
    assert network.next_event("the failure")[0] == "listener"
    network.run_once()
    assert not network.events


def test_the_last_messages_of_a_peer_arrive_although_it_has_not_read_ours(network: Network) -> None:
    """The kernel of a peer that closes with bytes unread resets the connection."""
    client, server = network.open()
    client.send({"type": "data", "text": "x" * 15_000_000})
    for number in range(3):
        server.send({"type": "ping", "number": number})
    server.close()
    for number in range(3):
        assert network.next_event("the last messages") == ("client", {"type": "ping", "number": number})
    assert network.next_event("the end")[1].endswith("has closed the connection")


def test_last_messages_are_flushed(network: Network) -> None:
    client, server = network.open()
    client.send({"type": "data", "text": "x" * 15_000_000})
    assert not client.flush(0.01)  # the listener is this thread, and does not read
    thread = threading.Thread(target=lambda: network.next_event("the message arrives"))  # now another thread does
    network.selector.unregister(client._socket)  # type: ignore[arg-type]
    thread.start()
    assert client.flush(DEADLINE_S)
    thread.join()
    assert client.backlog == 0
    network.selector.register(client._socket, selectors.EVENT_READ, client._on_ready)  # type: ignore[arg-type]
    assert server.is_open


@pytest.mark.parametrize("message", [{"type": "pong"}, {"type": "ping"}, {"type": "ping", "number": "1"}])
def test_a_message_that_is_not_in_the_table_closes_the_channel(network: Network, message: Message) -> None:
    client, _ = network.open()
    client.send(message)
    side, why = network.next_event("the channel is closed")
    assert (side, "has sent a wrong message" in why) == ("listener", True)
    assert network.next_event("the client sees it")[0] == "client"


def test_a_message_before_the_opening_is_an_error(network: Network) -> None:
    with pytest.raises(InvariantError, match="before the channel was open"):
        network.connect().send({"type": "ping", "number": 1})


def test_a_callback_may_close_the_channel(network: Network) -> None:
    client, server = network.open()
    seen: list[Message] = []

    def close_at_first(channel: Channel, message: Message) -> None:
        seen.append(message)
        channel.close()

    server._callbacks = ChannelCallbacks(lambda channel: None, close_at_first, network.on_closed("listener"))
    for number in range(3):
        client.send({"type": "ping", "number": number})
    network.run_until(lambda: client.is_closed, "the client sees the end")
    assert len(seen) == 1


# Why a channel cannot be opened


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def why_not(network: Network, **settings: Any) -> str:
    network.connect(**settings)
    side, why = network.next_event("the client is told why")
    assert side == "client"
    return str(why)


def test_each_reason_is_one_sentence_with_host_and_port(network: Network) -> None:
    port, address = free_port(), network.listener.address
    cases: list[tuple[dict[str, Any], str]] = [
        ({"target": Address("127.0.0.1", port)}, f"cannot connect to 127.0.0.1:{port}: connection refused"),
        ({"target": Address("localhost", port)}, f"cannot connect to localhost:{port}: 127.0.0.1: connection refused"),
        ({"target": Address("no-such-host.invalid", 80)}, "cannot connect to no-such-host.invalid:80: the name"),
        ({"target": Address("a..b", 80)}, "cannot connect to a..b:80: the name a..b cannot be resolved (not a host name)"),
        ({"token": bytes(32)}, f"the head at {address} has another token. Give both processes the same token file"),
        ({"purpose": "doctor"}, f"the head at {address} closed the connection before it had proven the token"),
    ]
    for settings, expected in cases:
        assert expected in why_not(network, **settings)


def test_a_name_that_is_looked_up_too_long_is_given_up(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = socket.getaddrinfo
    released: list[bool] = []

    def slow(*arguments: Any, flags: int = 0, **settings: Any) -> Any:
        while not flags and not released:
            time.sleep(0.01)
        return looked_up(*arguments, flags=flags, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    client = network.connect(target=Address("slow.invalid", 80))
    client.on_time(1000.0)
    client.on_time(1004.9)
    assert not network.events
    client.on_time(1005.1)
    released.append(True)
    assert "slow.invalid was not resolved within 5 s" in network.events.pop()[1]


def test_a_host_that_does_not_answer_is_given_up(network: Network) -> None:
    with socket.socket() as full:  # a listener whose queue is full: the kernel drops what arrives
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = Address.from_socket(full.getsockname())
        with socket.create_connection(address):
            client = network.connect(target=address)
            for _ in range(20):
                network.run_once(0.01)
            client.on_time(1000.0)
            assert not network.events
            client.on_time(1005.1)
            assert f"cannot connect to {address}: no answer within 5 s" in network.events.pop()[1]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" + b"Header: x\r\n" * 10, "does not answer like a process of Lockstep"),
        (b"", "has not proven the token within 5 s"),
    ],
    ids=["another protocol", "silence"],
)
def test_a_server_of_another_kind_is_named(network: Network, answer: bytes, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address.from_socket(server.getsockname())
        client = network.connect(target=address)
        network.run_until(lambda: client.local_address, "the client is connected")
        connection, _ = server.accept()
        with connection:
            connection.sendall(answer)
            if answer:
                network.run_until(lambda: network.events, "the client is told why")
            else:
                network.run_once(0.1)
                client.on_time(start := time.monotonic())
                client.on_time(start + 5.1)
            assert f"the head at {address} {expected}" in network.events.pop()[1]
            data = connection.recv(1000)
            assert len(data) == OPENING_BYTES  # nothing else was sent


def test_tls_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files, others = make_certificate(tmp_path), make_certificate(tmp_path / "other")
    with network_with(tls=server_tls(*files)) as network:
        assert "is not accepted (self-signed certificate). Pass the certificate" in why_not(network, tls=client_tls(others[0]))
        assert "uses TLS" in why_not(network).replace("may use TLS (then pass --ca)", "uses TLS")
        network.open(tls=client_tls(files[0]))
    with network_with() as network:
        assert "does not speak TLS as this process does" in why_not(network, tls=client_tls(files[0]))
    with pytest.raises(UsageError, match="cannot be used"):
        server_tls(files[0], others[1])
    with pytest.raises(UsageError, match=r"--ca .* cannot be used"):
        client_tls(files[1])


def test_a_port_in_use_is_refused_with_the_address(network: Network) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on {network.listener.address}: Address already in use"):
        Listener(network.listener.address, TOKEN, network.selector, {}, network.listener._callbacks)


# Many clients


def test_a_burst_from_one_host_is_served_completely() -> None:
    with network_with(max_openings=8, max_openings_of_one_host=4) as network:
        clients = [network.connect() for _ in range(100)]
        network.run_until(lambda: len(network.opened) == 100 and all(client.is_open for client in clients), "all are open")
        assert not network.refused


def test_clients_that_do_not_go_on_are_dropped_and_hold_up_no_other_host() -> None:
    with network_with(max_openings=8, max_openings_of_one_host=4, max_waiting=4) as network:
        idle = [socket.create_connection(network.listener.address, source_address=("127.0.0.2", 0)) for _ in range(10)]
        network.run_until(lambda: len(network.refused) == 2, "those beyond openings and waiting are closed at once")
        network.open()  # from 127.0.0.1
        network.listener.on_time(start := time.monotonic())
        network.listener.on_time(start + 4.9)
        assert len(network.refused) == 2
        network.listener.on_time(start + 5.2)
        assert len(network.refused) == 6
        network.listener.on_time(start + 5.3)  # those that had to wait begin, and have as much time
        network.listener.on_time(start + 10.4)
        assert len(network.refused) == 10
        assert len(network.listener._openings) == len(network.listener._waiting) == 0
        for each in idle:
            each.settimeout(5)
            assert each.recv(100) == b""
            each.close()


def test_a_process_without_free_descriptors_accepts_later(network: Network) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.create_connection(network.listener.address) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")), limits[1]))
    taken: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files") as full:
            while True:
                taken.append(os.dup(0))
        assert full.value.errno == errno.EMFILE
        network.run_once(1.0)
        assert network.run_once() == 0  # the loop does not spin
        client = network.connect()
        assert not network.events
        client.on_time(time.monotonic())
        assert network.events.pop() == ("client", f"cannot connect to {network.listener.address}: Too many open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    network.listener.on_time(time.monotonic())
    network.run_until(lambda: len(network.listener._openings) == 3, "the clients are accepted")
    for each in clients:
        each.close()


# 10,000 attacks on a listener in a process of its own


class Attacker:
    """Each attack is one connection. Knows the token only for the attacks of somebody who changes what others send."""

    def __init__(self, address: Address, token: bytes) -> None:
        self.address, self.token = address, token
        self.random = random.Random(0)
        self.valid_messages = 0
        with self.connected() as connection:
            handshake = ClientHandshake(token, "agent")
            connection.sendall(handshake.opening)
            proof = handshake.receive(self.read(connection, handshake.needs))
            assert handshake.keys is not None
            self.recorded = handshake.opening + proof + FrameWriter(handshake.keys.sending).frame(encode({"type": "attack"}))

    def attack(self, number: int) -> None:
        kinds = (self.noise, self.truncated, self.replayed, self.reflected, self.bit_flipped, self.without_token, self.frames)
        with self.connected() as connection:
            try:
                kinds[number % len(kinds)](connection)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
            except (ConnectionResetError, BrokenPipeError):
                pass  # the listener has closed it with bytes unread
            except OSError as error:
                if error.errno != errno.ENOTCONN:
                    raise

    def connected(self) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def read(self, connection: socket.socket, length: int) -> bytes:
        data = b""
        while len(data) < length and (more := connection.recv(length - len(data))):
            data += more
        return data

    def noise(self, connection: socket.socket) -> None:
        connection.sendall(self.random.randbytes(self.random.randrange(200)))

    def truncated(self, connection: socket.socket) -> None:
        connection.sendall(self.recorded[: self.random.randrange(OPENING_BYTES + 32)])

    def replayed(self, connection: socket.socket) -> None:
        connection.sendall(self.recorded)

    def reflected(self, connection: socket.socket) -> None:
        """The server's own reply as opening, or the server's own proof as proof."""
        handshake = ClientHandshake(self.token, "agent")
        connection.sendall(handshake.opening)
        reply = self.read(connection, handshake.needs)
        if self.random.random() < 0.5:
            connection.sendall(reply[-32:])
        else:
            with self.connected() as another:
                another.sendall(reply)

    def bit_flipped(self, connection: socket.socket) -> None:
        """One bit of the opening, of the proof or of the first frame."""
        handshake = ClientHandshake(self.token, "agent")
        where = self.random.randrange(3)
        connection.sendall(self.flip(handshake.opening) if where == 0 else handshake.opening)
        if where == 0:
            connection.sendall(self.recorded[OPENING_BYTES:])
            return
        proof = handshake.receive(self.read(connection, handshake.needs))
        assert handshake.keys is not None
        frame = FrameWriter(handshake.keys.sending).frame(encode({"type": "attack"}))
        connection.sendall(self.flip(proof) + frame if where == 1 else proof + self.flip(frame))

    def without_token(self, connection: socket.socket) -> None:
        handshake = ClientHandshake(self.random.randbytes(32), "agent")
        connection.sendall(handshake.opening)
        self.read(connection, handshake.needs)
        connection.sendall(self.random.randbytes(32) + self.recorded[OPENING_BYTES + 32 :])

    def frames(self, connection: socket.socket) -> None:
        """After a valid opening: frames repeated, exchanged, cut, too long, of the other direction, or with another key."""
        handshake = ClientHandshake(self.token, "agent")
        connection.sendall(handshake.opening)
        connection.sendall(handshake.receive(self.read(connection, handshake.needs)))
        assert handshake.keys is not None
        connection.sendall(self.wrong_frames(handshake.keys))

    def wrong_frames(self, keys: FrameKeys) -> bytes:
        kind, payload = self.random.randrange(6), encode({"type": "attack"})
        writer = FrameWriter(keys.sending)
        if kind == 0:
            self.valid_messages += 1
            frame = writer.frame(encode({"type": "ping", "number": 0}))
            return frame + frame
        frame = writer.frame(payload)
        return (
            b"",
            writer.frame(payload) + frame,
            frame[: self.random.randrange(len(frame))],
            b"\xff" + frame,
            FrameWriter(keys.receiving).frame(payload),
            FrameWriter(self.random.randbytes(32)).frame(payload),
        )[kind]

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)


class User:
    """A channel in use."""

    def __init__(self, address: Address, token: bytes) -> None:
        self.selector = selectors.DefaultSelector()
        self.answers: list[Message] = []
        callbacks = ChannelCallbacks(lambda channel: None, lambda channel, message: self.answers.append(message), self.fail)
        self.channel = Channel.client(address, token, "agent", self.selector, callbacks, echo_listener.ANSWERS)
        self.run_until(lambda: self.channel.is_open)
        self.round_trips_s: list[float] = []

    def fail(self, channel: Channel, why: str) -> None:
        raise AssertionError(why)

    def ask(self, message: Message) -> Message:
        self.channel.send(message)
        self.run_until(lambda: self.answers)
        return self.answers.pop()

    def ping(self) -> None:
        start = time.perf_counter()
        number = len(self.round_trips_s)
        assert self.ask({"type": "ping", "number": number}) == {"type": "ping", "number": number}
        self.round_trips_s.append(time.perf_counter() - start)

    def run_until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"no answer within {DEADLINE_S} s"
            for key, _ in self.selector.select(0.1):
                key.data()


def test_ten_thousand_attacks_leave_nothing_behind(record_property: Callable[[str, object], None]) -> None:
    """Round trips are measured on one channel that is open all the time: 200 before the attacks, and one after every 20 attacks,
    while another attack is in its opening. Only a deadline is asserted."""
    token = new_token()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.echo_listener"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(token + "\n")
        process.stdin.flush()
        address = Address.parse(process.stdout.readline())
        user = User(address, bytes.fromhex(token))
        descriptors = user.ask({"type": "report"})["descriptors"]
        attacker = Attacker(address, bytes.fromhex(token))
        for _ in range(200):
            user.ping()
        calm_s = statistics.median(user.round_trips_s)
        for number in range(500):
            attacker.attack(number)
        memory_kib = user.ask({"type": "report"})["memory_kib"]
        slow = [socket.create_connection(address, source_address=("127.0.0.2", 0)) for _ in range(10)]
        slow_since = time.monotonic()
        user.round_trips_s.clear()
        for number in range(10_000):
            attacker.attack(number)
            if number % 20 == 0:
                with attacker.connected() as half_open:
                    half_open.sendall(attacker.recorded[:OPENING_BYTES])
                    user.ping()
            if number % 500 == 0:
                for each in slow:
                    send_if_possible(each)
        for each in slow:
            each.settimeout(DEADLINE_S)
            while each.recv(100):
                pass
            each.close()
        slow_s = time.monotonic() - slow_since
        wait_until(lambda: user.ask({"type": "report"})["descriptors"] == descriptors, "no descriptor is left", DEADLINE_S)
        after = user.ask({"type": "report"})
        record_property(
            "median round trip", f"{calm_s:.6f} s before, {statistics.median(user.round_trips_s):.6f} s during the attacks"
        )
        assert slow_s > 5.0
        assert 0 < after["refused"] < 500  # few of them are reported: nobody can fill the log of a head
        assert after["messages"].get("attack", 0) == 0
        assert after["messages"]["ping"] == 200 + len(user.round_trips_s) + attacker.valid_messages
        assert after["memory_kib"] - memory_kib < 2048
        user.channel.close()
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


def send_if_possible(connection: socket.socket) -> None:
    """One byte of an opening that never ends."""
    try:
        connection.send(b"\0")
    except OSError:
        pass  # dropped already
