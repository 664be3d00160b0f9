"""TLS of a connection: which certificate a server shows, and how a client checks it. Opens no socket.

The names in a certificate are not compared with the host, because agents reach the head under addresses that nobody knows when the
certificate is made. Instead the proofs of the token include the digest of the certificate (see handshake.py): another server with a
certificate of the same authority cannot stand between the two.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class ServerTls:
    context: ssl.SSLContext
    certificate: bytes
    """SHA-256 of the certificate that clients see."""


@dataclass(frozen=True)
class ClientTls:
    context: ssl.SSLContext


def server_tls(certificate_file: str, key_file: str) -> ServerTls:
    """``--cert`` and ``--key``. Raises UsageError if they cannot be used."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no connection is resumed
    try:
        found = _PEM.search(Path(certificate_file).read_text())
        if found is None:
            raise UsageError(f"{certificate_file} holds no certificate in PEM format. Pass --cert FILE with one.")
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(found.group())).digest()
        context.load_cert_chain(certificate_file, key_file, password="")  # a key with a password fails instead of asking for it
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the certificate {certificate_file} and the key {key_file} cannot be used: {error}.") from error
    return ServerTls(context, digest)


def client_tls(authority_file: str) -> ClientTls:
    """``--ca``: the certificate of the authority that has signed the server's, or the server's own. Raises UsageError."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    try:
        context.load_verify_locations(authority_file)
    except (OSError, ValueError) as error:
        raise UsageError(f"--ca {authority_file} cannot be used: {error}. Pass a file with a certificate in PEM format.") from error
    return ClientTls(context)


def certificate_of_server(connection: ssl.SSLSocket) -> bytes:
    """SHA-256 of the certificate that the server has shown to this client."""
    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").digest()


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
