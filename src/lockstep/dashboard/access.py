"""Access: who may read the page. Decides about each request from its method, headers and token; pure. AccessMiddleware asks it.

Only GET and HEAD. The token comes in the address (``?token=``) or as ``Authorization: Bearer``; no cookie is set, because browsers
send cookies to every port of a host. A page of another site cannot read ours: it does not know the token. A host name that
somebody lets point to this machine (DNS rebinding) is refused too, and so is a request that another site's page has started.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere. Plotly writes style elements, which needs 'unsafe-inline' for styles."""
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:/@]+)(?::\d+)?")


@dataclass(frozen=True)
class Access:
    """``hosts``: names of this machine by which the page may be called, besides its addresses and localhost."""

    token: str
    hosts: frozenset[str] = frozenset()

    def refusal(self, method: str, path: str, headers: Mapping[str, str], query: str) -> tuple[int, str] | None:
        """Return the status and a sentence if the request is refused; None if it may be answered. Header names are lowercase."""
        if method not in ("GET", "HEAD"):
            return 405, "This page is read-only: it answers GET alone."
        host = _host(headers.get("host", ""))
        if not self._is_own(host):
            name = re.sub(r"[^\w.:\[\]-]", "?", host[:80])
            return (
                403,
                f"This server does not answer under the name {name or '(none)'}. Open the address that `lockstep dash` printed.",
            )
        origin = headers.get("origin")
        if origin is not None and _host(_site(origin)) != host:
            return 403, "The request was started by a page of another site."
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "The request was started by a page of another site."
        if path.startswith("/static/"):
            return None  # files of the package, the same for everybody
        if not self._is_token(headers.get("authorization", ""), query):
            return 403, "The token is missing or wrong. Open the address that `lockstep dash` has printed; it contains the token."
        return None

    def _is_token(self, authorization: str, query: str) -> bool:
        given = parse_qs(query).get("token", [""])[-1]
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "bearer":
            given = value.strip()
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def _is_own(self, host: str) -> bool:
        if host == "localhost" or host.endswith(".localhost") or host in self.hosts:
            return True
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return True  # nobody can let an address point elsewhere


def _host(text: str) -> str:
    """The host of "host:port", in lowercase; empty if it is none."""
    found = _HOST.fullmatch(text.strip())
    return found[1].lower().rstrip(".") if found else ""


def _site(origin: str) -> str:
    """Its host and port; empty if it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


class AccessMiddleware:
    """Middleware: refuses what ``access`` refuses, with one sentence as plain text, and adds headers to every answer."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._access.refusal(scope["method"], scope["path"], headers, scope["query_string"].decode("latin-1"))
        if refusal is not None:
            await _refuse(send, *refusal)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = [(name, value) for name, value in message.get("headers", []) if name.lower() not in _HEADERS]
                kept = {name: value for name, value in message.get("headers", []) if name.lower() == b"cache-control"}
                message["headers"] = [*given, *(_HEADERS | kept).items()]
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _refuse(send: Send, status: int, sentence: str) -> None:
    headers = [*_HEADERS.items(), (b"content-type", b"text/plain; charset=utf-8")]
    if status == 405:
        headers.append((b"allow", b"GET, HEAD"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{sentence}\n".encode()})
