"""The parts of a secured connection that need no socket: token, opening, frames, messages, addresses."""

from __future__ import annotations

import io
import os
import random
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster import handshake, messages
from lockstep.cluster.address import Address
from lockstep.cluster.frames import MAX_PAYLOAD_BYTES, FrameError, FrameReader, FrameWriter
from lockstep.cluster.handshake import ClientHandshake, HandshakeError, ServerHandshake
from lockstep.cluster.token import new_token, read_token, write_token
from lockstep.errors import UsageError

TOKEN = bytes(range(32))
OTHER_TOKEN = bytes(range(1, 33))
CERTIFICATE = b"c" * 32


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def open_both(
    client: ClientHandshake, server: ServerHandshake, on_way: Callable[[int, bytes], bytes] = lambda step, data: data
) -> None:
    """The three messages of an opening. ``on_way(number, message)`` is what becomes of each between the two."""
    reply = server.receive(on_way(0, client.opening))
    proof = client.receive(on_way(1, reply))
    assert server.receive(on_way(2, proof)) == b""


# Token


def test_a_token_is_written_for_this_user_alone_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    umask = os.umask(0)
    try:
        token = write_token(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(str(path), {}) == bytes.fromhex(token)
    assert len(bytes.fromhex(token)) == 32
    assert new_token() != new_token()
    with pytest.raises(UsageError, match="exists already"):
        write_token(path)


def test_the_option_comes_before_the_variables(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    tokens = [bytes.fromhex(write_token(file)) for file in files]
    variables = {"LOCKSTEP_TOKEN_FILE": str(files[1]), "LOCKSTEP_TOKEN": OTHER_TOKEN.hex()}
    assert read_token(str(files[0]), variables) == tokens[0]
    assert read_token(None, variables) == tokens[1]
    assert read_token(None, {"LOCKSTEP_TOKEN": OTHER_TOKEN.hex()}) == OTHER_TOKEN


def test_a_token_from_standard_input_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(TOKEN.hex().encode() + b"\nthe rest")
    with os.fdopen(reader, "rb", buffering=0) as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(file)))
        assert read_token("-", {}) == TOKEN
        assert os.read(reader, 100) == b"the rest"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o660])
def test_a_token_file_of_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    write_token(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode 0{mode:o}.*chmod 600"):
        read_token(str(path), {})


@pytest.mark.parametrize("text", ["", "00" * 31, "0" * 65, "xy" * 32, "00" * 32 + " " + "00" * 32, "\0" * 64])
def test_a_text_that_is_no_token_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="64 hexadecimal digits") as caught:
        read_token(str(path), {})
    assert len(text) < 3 or text not in str(caught.value)


def test_without_a_token_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--token-file FILE"):
        read_token(None, {"LOCKSTEP_TOKEN": ""})
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_token(str(tmp_path / "missing"), {})


# Opening


def test_both_sides_have_the_same_keys_and_no_two_connections_have() -> None:
    seen = set()
    for certificate in (handshake.NO_CERTIFICATE, CERTIFICATE):
        for _ in range(2):
            client, server = ClientHandshake(TOKEN, "agent", certificate), ServerHandshake(TOKEN, ("doctor", "agent"), certificate)
            open_both(client, server)
            assert client.keys is not None
            assert server.keys is not None
            assert (client.keys.sending, client.keys.receiving) == (server.keys.receiving, server.keys.sending)
            assert server.purpose == "agent"
            seen |= {client.keys.sending, client.keys.receiving}
    assert len(seen) == 8


def test_the_messages_of_an_opening_have_fixed_lengths() -> None:
    client, server = ClientHandshake(TOKEN, "agent"), ServerHandshake(TOKEN, ("agent",))
    assert len(client.opening) == server.needs == 60  # as docs/internals/security.md says
    reply = server.receive(client.opening)
    assert len(reply) == client.needs == 76
    assert len(client.receive(reply)) == server.needs == 32


@pytest.mark.parametrize(
    ("client", "server"),
    [
        (ClientHandshake(OTHER_TOKEN, "agent"), ServerHandshake(TOKEN, ("agent",))),
        (ClientHandshake(TOKEN, "agent", CERTIFICATE), ServerHandshake(TOKEN, ("agent",), bytes(31) + b"x")),
        (ClientHandshake(TOKEN, "agent", CERTIFICATE), ServerHandshake(TOKEN, ("agent",))),
    ],
    ids=["another token", "another certificate", "TLS on one side"],
)
def test_the_client_sees_first_that_the_server_cannot_be_trusted(client: ClientHandshake, server: ServerHandshake) -> None:
    reply = server.receive(client.opening)
    with pytest.raises(HandshakeError, match="has another token"):
        client.receive(reply)
    assert client.keys is None


def test_a_client_is_served_only_for_what_it_may_connect_for() -> None:
    client, server = ClientHandshake(TOKEN, "probe"), ServerHandshake(TOKEN, ("agent",))
    with pytest.raises(HandshakeError, match="purpose"):
        server.receive(client.opening)


def test_a_purpose_cannot_be_exchanged_on_the_way() -> None:
    client, server = ClientHandshake(TOKEN, "agent"), ServerHandshake(TOKEN, ("agent", "probe"))
    as_probe = client.opening.replace(b"agent\0", b"probe\0")
    with pytest.raises(HandshakeError, match="another token"):
        client.receive(server.receive(as_probe))


def test_every_bit_of_an_opening_counts() -> None:
    for step, length in enumerate((handshake.OPENING_BYTES, handshake.REPLY_BYTES, 32)):
        for bit in range(length * 8):
            client, server = ClientHandshake(TOKEN, "agent"), ServerHandshake(TOKEN, ("agent",))

            def on_way(number: int, data: bytes, step: int = step, bit: int = bit) -> bytes:
                return flip(data, bit) if number == step else data

            with pytest.raises(HandshakeError):
                open_both(client, server, on_way)
            assert server.keys is None


def test_nothing_can_be_reflected() -> None:
    server = ServerHandshake(TOKEN, ("agent",))
    reply = server.receive(ClientHandshake(TOKEN, "agent").opening)
    with pytest.raises(HandshakeError, match="not proven"):
        server.receive(reply[-32:])  # the server's own proof
    client = ClientHandshake(TOKEN, "agent")
    with pytest.raises(HandshakeError, match="does not answer like a process of Lockstep"):
        client.receive(client.opening.ljust(client.needs, b"\0"))
    with pytest.raises(HandshakeError, match="not a process of Lockstep"):
        ServerHandshake(TOKEN, ("agent",)).receive(reply[: handshake.OPENING_BYTES])


def test_nothing_can_be_replayed() -> None:
    recorded: list[bytes] = []
    client = ClientHandshake(TOKEN, "agent")
    open_both(client, ServerHandshake(TOKEN, ("agent",)), lambda number, data: recorded.append(data) or data)  # type: ignore[func-returns-value]
    server = ServerHandshake(TOKEN, ("agent",))
    server.receive(recorded[0])
    with pytest.raises(HandshakeError, match="not proven"):
        server.receive(recorded[2])
    with pytest.raises(HandshakeError, match="another token"):
        ClientHandshake(TOKEN, "agent").receive(recorded[1])


def test_another_version_is_named_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ClientHandshake(TOKEN, "agent")
    monkeypatch.setattr(handshake, "_VERSION_BYTES", (7).to_bytes(2, "big"))
    with pytest.raises(HandshakeError, match="does not have version") as refused:
        ServerHandshake(TOKEN, ("agent",)).receive(client.opening)
    with pytest.raises(HandshakeError, match=r"has version 7 .* this process has version 1\. Install the same version"):
        client.receive(refused.value.last_reply)


# Frames


def test_frames_arrive_whole_in_any_pieces() -> None:
    generator = random.Random(0)
    payloads = [generator.randbytes(generator.choice((0, 1, 20, 3000))) for _ in range(50)]
    writer, reader = FrameWriter(TOKEN), FrameReader(TOKEN)
    data = b"".join(writer.frame(payload) for payload in payloads)
    received = []
    while data:
        length = generator.choice((1, 5, 30, 4000))
        received += list(reader.receive(data[:length]))
        data = data[length:]
    assert received == payloads
    assert not reader.is_inside_frame


def test_every_bit_of_a_frame_counts() -> None:
    frame = FrameWriter(TOKEN).frame(b"payload")
    for bit in range(len(frame) * 8):
        reader = FrameReader(TOKEN)
        try:
            assert list(reader.receive(flip(frame, bit))) == []  # a greater length: the frame is not complete
            assert reader.is_inside_frame
            assert bit < 32
        except FrameError:
            pass


def frames_of(key: bytes) -> list[bytes]:
    writer = FrameWriter(key)
    return [writer.frame(payload) for payload in (b"one", b"two", b"six")]


@pytest.mark.parametrize(
    ("order", "accepted"),
    [((0, 0), 1), ((1,), 0), ((0, 2), 1), ((0, 1, 0), 2), ((0, 2, 1), 1)],
    ids=["repeated", "first left out", "one left out", "old one again", "exchanged"],
)
def test_a_frame_out_of_order_is_refused(order: tuple[int, ...], accepted: int) -> None:
    frames, reader, received = frames_of(TOKEN), FrameReader(TOKEN), []
    with pytest.raises(FrameError, match=f"frame {accepted} was changed"):
        for number in order:
            received += list(reader.receive(frames[number]))
    assert received == [b"one", b"two"][:accepted]


def test_a_frame_of_the_other_direction_is_refused() -> None:
    client, server = ClientHandshake(TOKEN, "agent"), ServerHandshake(TOKEN, ("agent",))
    open_both(client, server)
    assert server.keys is not None
    with pytest.raises(FrameError):
        list(FrameReader(server.keys.receiving).receive(FrameWriter(server.keys.sending).frame(b"reflected")))


def test_a_frame_that_is_too_long_is_refused_before_it_arrives() -> None:
    with pytest.raises(FrameError, match=str(MAX_PAYLOAD_BYTES + 1)):
        list(FrameReader(TOKEN).receive((MAX_PAYLOAD_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(ValueError, match="larger than the limit"):
        FrameWriter(TOKEN).frame(bytes(MAX_PAYLOAD_BYTES + 1))


# Messages

TABLE: messages.Table = {
    "join": {"workers": int, "hosts": list[str], "ports": dict[str, int], "share": float, "generation": int | None, "why?": str},
    "bye": {},
}
JOIN: messages.Message = {"type": "join", "workers": 2, "hosts": ["a"], "ports": {"a": 1}, "share": 1, "generation": None}


@pytest.mark.parametrize("message", [JOIN, {**JOIN, "why": "x", "generation": 3, "share": 0.5, "hosts": []}, {"type": "bye"}])
def test_a_message_of_the_table_is_accepted(message: messages.Message) -> None:
    assert messages.check(messages.decode(messages.encode(message)), TABLE) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "jion"}, "'jion' is not accepted here; accepted are: bye, join"),
        ({"type": ["join"]}, "is not accepted here"),
        ({"workers": True}, "'workers' of a message of type 'join' is 'True', which is not int"),
        ({"workers": 2.0}, "which is not int"),
        ({"hosts": ["a", 1]}, r"which is not list\[str\]"),
        ({"hosts": "a"}, r"which is not list\[str\]"),
        ({"ports": {"a": "1"}}, r"which is not dict\[str, int\]"),
        ({"share": "1"}, "which is not float"),
        ({"generation": "1"}, r"which is not int \| None"),
        ({"why": None}, "which is not str"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_any_other_message_is_refused_with_the_reason(changes: messages.Message, reason: str) -> None:
    found = messages.check({**JOIN, **changes}, TABLE)
    assert found is not None

    assert re.search(reason, found), found


def test_a_message_that_lacks_a_field_is_refused() -> None:
    lacking = {name: value for name, value in JOIN.items() if name != "hosts"}
    assert messages.check(lacking, TABLE) == "a message of type 'join' lacks 'hosts'"
    assert "type 'None' is not accepted" in str(messages.check({}, TABLE))


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]", "not a JSON object"),
        (b"\xff{}", "codec can't decode"),
        (b'{"a":' * 50_000, "nested too deeply"),
        (messages.encode({"type": nested(messages.MAX_DEPTH)}), "nested too deeply"),
        (b'{"a": ' + b"9" * 21 + b"}", "a number of 21 digits"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": NaN}', "the number NaN"),
    ],
    ids=["empty", "a list", "no text", "deep", "too deep", "a long number", "a large number", "NaN"],
)
def test_a_payload_that_is_no_message_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        messages.decode(payload)


def test_what_is_not_nested_too_deeply_is_read() -> None:
    for message in ({"type": nested(messages.MAX_DEPTH - 1)}, {"type": [[]] * 1000}, {"type": "{" * 1000}, {"type": 2**64}):
        assert messages.decode(messages.encode(message)) == message


# Addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a.b:80", "a.b", 80), ("10.0.0.1:0", "10.0.0.1", 0), ("[fd00::1]:65535", "fd00::1", 65535), ("[::]:1", "::", 1)],
)
def test_an_address_is_read_and_written(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert address == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":80", "a:x", "a:-1", "a:65536", "a:1000000000", "fd00::1:80", "[a]:1", "[]:1", "a:²"]
)
def test_any_other_text_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="Write HOST:PORT"):
        Address.parse(text)


def test_an_ipv4_address_of_a_socket_for_both_is_shown_as_ipv4() -> None:
    assert Address.from_socket(("::ffff:10.0.0.1", 80, 0, 0)) == ("10.0.0.1", 80)
    assert Address.from_socket(("fd00::1", 80, 0, 0)) == ("fd00::1", 80)
