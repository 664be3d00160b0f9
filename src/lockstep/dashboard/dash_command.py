"""`lockstep dash`: its arguments, and the process of its server."""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from lockstep.cluster.token import write_token
from lockstep.dashboard.access import Access
from lockstep.dashboard.page_files import missing, plotly_file
from lockstep.dashboard.run_list import RunList
from lockstep.errors import UsageError
from lockstep.launcher.arguments import whole_number, write
from lockstep.launcher.run_registry import RUNS_FOLDER, find_run

PORT = 8686


def add_parsers(commands: Any) -> None:
    """Add `dash` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command."""
    parser = commands.add_parser("dash", help="show a run, or all runs of a folder, in the browser", allow_abbrev=False)
    parser.set_defaults(execute=dash)
    help = f"a run, as `lockstep status` finds it, or a folder with runs (default: ./{RUNS_FOLDER})"
    parser.add_argument("folder", nargs="?", default=RUNS_FOLDER, metavar="RUN|FOLDER", help=help)
    help = f"the port to listen at; 0: a free one (default: {PORT}, or a free one if it is taken)"
    parser.add_argument("--port", type=whole_number(0), metavar="N", help=help)
    help = "the address to listen at (default: 127.0.0.1, which other machines cannot reach)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=help)
    help = "the file with the token of the address; it is made if it does not exist (default: a new token each time)"
    parser.add_argument("--token-file", metavar="FILE", help=help)


def dash(given: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM. Returns 0."""
    try:
        import uvicorn

        from lockstep.dashboard.server import Server
    except ImportError as error:
        raise missing(str(error.name)) from error
    plotly_file()
    folder = Path(given.folder)
    runs = RunList(folder if folder.is_dir() else find_run(given.folder))
    token = _token(given.token_file)
    listener = _listen(given.host, given.port)
    host, port = listener.getsockname()[:2]
    own = frozenset({given.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()})
    server: uvicorn.Server | None = None
    app = Server(runs, Access(token, own), lambda: server is not None and server.should_exit).app
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=30,
    )
    server = uvicorn.Server(config)
    _announce(runs, host, port, token)
    try:
        with listener:
            server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    return 0


def _announce(runs: RunList, host: str, port: int, token: str) -> None:
    what = f"the run {runs.folder}" if runs.is_single else f"the runs in {runs.folder}"
    is_loopback = ipaddress.ip_address(host).is_loopback
    if not is_loopback:
        write(2, f"lockstep: warning: {host} can be reached from other machines, and what is sent is not encrypted. ")
        write(2, "A person who reads the traffic can read the token. `ssh -L` to 127.0.0.1 is safer.\n")
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, f"[{host}]" if ":" in host else host)
    write(2, f"lockstep: {what} can be seen at http://{shown}:{port}/?token={token} (Ctrl-C ends this server)\n")


def _token(file: str | None) -> str:
    if file is None:
        return secrets.token_urlsafe(24)
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            token = opened.read(4096).decode(errors="replace").strip()
    except FileNotFoundError:
        return write_token(file)
    except OSError as error:
        raise UsageError(f"the token cannot be read from {file}: {error.strerror}. Name a file of yours.") from error
    if mode & 0o077:
        raise UsageError(f"other users can read {file}, which has the token. Type: chmod 600 {file}")
    if len(token) < 16 or not token.isascii() or not token.isalnum():
        raise UsageError(
            f"{file} has no token: 16 or more letters and digits on one line. Name a file that does not exist, and it is made."
        )
    return token


def _listen(host: str, port: int | None) -> socket.socket:
    if port is not None and port > 65535:  # the system would take its last 16 bits
        raise UsageError(f"--port {port}: ports are numbers up to 65535.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port if port is not None else PORT, type=socket.SOCK_STREAM)[0]
        try:
            return _bind(family, address)
        except OSError:
            if port is not None:
                raise
            return _bind(family, (address[0], 0, *address[2:]))
    except OSError as error:
        where = f"{host}:{port if port is not None else PORT}"
        raise UsageError(f"the page cannot be served at {where}: {error.strerror}. Choose another --port or --host.") from error


def _bind(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
