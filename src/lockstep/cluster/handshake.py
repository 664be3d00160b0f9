"""The opening of a connection: both sides prove that they know the token, without sending it. Values in, values out; no socket.

Three messages of fixed length, so that nothing of variable length is read from a process that has not proven the token:

1. client -> server: magic, version, purpose, nonce of the client
2. server -> client: magic, version, nonce of the server, proof of the server
3. client -> server: proof of the client

A proof is HMAC-SHA256(token, role of the sender, all that both sides know of this connection). Each side then derives two keys, one
for each direction.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass

VERSION = 1
"""Counted up if the opening, the frames or the meaning of any message changes: only equal versions talk to each other."""
NO_CERTIFICATE = bytes(32)
"""Stands for the digest of the server's certificate in a connection without TLS."""

_CLIENT_MAGIC = b"\x00lockstep>"  # the first byte is none of HTTP, TLS or ssh
_SERVER_MAGIC = b"\x00lockstep<"
_VERSION_BYTES = VERSION.to_bytes(2, "big")
_PURPOSE_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEAD_BYTES = len(_CLIENT_MAGIC) + len(_VERSION_BYTES)

OPENING_BYTES = _HEAD_BYTES + _PURPOSE_BYTES + _NONCE_BYTES
REPLY_BYTES = _HEAD_BYTES + _NONCE_BYTES + _PROOF_BYTES


class HandshakeError(Exception):
    """The peer has not proven the token. The text is a sentence about the peer without its subject.

    ``last_reply``: what may still be sent to the peer before the connection is closed.
    """

    def __init__(self, why: str, last_reply: bytes = b"") -> None:
        super().__init__(why)
        self.last_reply = last_reply


@dataclass(frozen=True)
class FrameKeys:
    """The keys of one side of a connection."""

    sending: bytes
    receiving: bytes


class ClientHandshake:
    """Send ``opening``, then pass ``needs`` bytes to ``receive``, and send what it returns. Then ``keys`` are there."""

    def __init__(self, token: bytes, purpose: str, certificate: bytes = NO_CERTIFICATE) -> None:
        self._token, self._certificate = token, certificate
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.purpose = purpose
        self.opening = _CLIENT_MAGIC + _VERSION_BYTES + _purpose_field(purpose) + self._nonce
        self.needs = REPLY_BYTES
        self.keys: FrameKeys | None = None

    def receive(self, reply: bytes) -> bytes:
        """Returns the proof to send. Raises HandshakeError if the server does not know the token."""
        if reply[: len(_SERVER_MAGIC)] != _SERVER_MAGIC:
            raise HandshakeError("does not answer like a process of Lockstep, or uses TLS and this process does not")
        version = int.from_bytes(reply[len(_SERVER_MAGIC) : _HEAD_BYTES], "big")
        if version != VERSION:
            raise HandshakeError(
                f"has version {version} of Lockstep's protocol, and this process has version {VERSION}. Install the same "
                "version of Lockstep on both machines"
            )
        nonce, proof = reply[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES], reply[_HEAD_BYTES + _NONCE_BYTES :]
        secret = _Secret(self._token, self.purpose, self._certificate, self._nonce, nonce)
        if not hmac.compare_digest(proof, secret.proof_of_server):
            raise HandshakeError("has another token. Give both processes the same token file")
        self.keys = FrameKeys(sending=secret.key_to_server, receiving=secret.key_to_client)
        return secret.proof_of_client


class ServerHandshake:
    """Pass ``needs`` bytes to ``receive`` and send what it returns, until ``keys`` are there.

    ``purposes``: what a client may connect for. ``purpose`` is what it did connect for.
    """

    opening = b""

    def __init__(self, token: bytes, purposes: Collection[str], certificate: bytes = NO_CERTIFICATE) -> None:
        self._token, self._certificate = token, certificate
        self._purposes = {_purpose_field(purpose): purpose for purpose in purposes}
        self._secret: _Secret | None = None
        self.purpose = ""
        self.needs = OPENING_BYTES
        self.keys: FrameKeys | None = None

    def receive(self, data: bytes) -> bytes:
        """Returns what to send. Raises HandshakeError if the client does not know the token."""
        if self._secret is None:
            return self._reply(data)
        if not hmac.compare_digest(data, self._secret.proof_of_client):
            raise HandshakeError("has not proven the token")
        self.keys = FrameKeys(sending=self._secret.key_to_client, receiving=self._secret.key_to_server)
        return b""

    def _reply(self, opening: bytes) -> bytes:
        if opening[: len(_CLIENT_MAGIC)] != _CLIENT_MAGIC:
            raise HandshakeError("is not a process of Lockstep, or uses TLS and this process does not")
        if opening[len(_CLIENT_MAGIC) : _HEAD_BYTES] != _VERSION_BYTES:
            last_reply = (_SERVER_MAGIC + _VERSION_BYTES).ljust(REPLY_BYTES, b"\x00")  # the client says which versions there are
            raise HandshakeError(f"does not have version {VERSION} of Lockstep's protocol", last_reply)
        purpose = self._purposes.get(opening[_HEAD_BYTES : _HEAD_BYTES + _PURPOSE_BYTES])
        if purpose is None:
            raise HandshakeError("connects for a purpose that this process does not serve")
        self.purpose = purpose
        nonce = secrets.token_bytes(_NONCE_BYTES)
        client_nonce = opening[_HEAD_BYTES + _PURPOSE_BYTES :]
        self._secret = _Secret(self._token, purpose, self._certificate, client_nonce, nonce)
        self.needs = _PROOF_BYTES
        return _SERVER_MAGIC + _VERSION_BYTES + nonce + self._secret.proof_of_server


class _Secret:
    """All that is derived from the token and from what both sides know. Every field has a fixed length: no two inputs are alike."""

    def __init__(self, token: bytes, purpose: str, certificate: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
        known = b"lockstep" + _VERSION_BYTES + _purpose_field(purpose) + certificate + client_nonce + server_nonce
        self.proof_of_server = _hmac(token, b"proof of server\x00" + known)
        self.proof_of_client = _hmac(token, b"proof of client\x00" + known)
        session = _hmac(token, b"keys of session\x00" + known)
        self.key_to_server = _hmac(session, b"client to server")
        self.key_to_client = _hmac(session, b"server to client")


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _purpose_field(purpose: str) -> bytes:
    field = purpose.encode("ascii")
    if not field or len(field) > _PURPOSE_BYTES:
        raise ValueError(f"the purpose {purpose!r} has no character, or more than {_PURPOSE_BYTES}")
    return field.ljust(_PURPOSE_BYTES, b"\x00")
