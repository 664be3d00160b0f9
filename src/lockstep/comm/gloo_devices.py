"""Builds gloo groups that only their members can reach, and ends them.

A gloo group listens on a port for as long as it lives, although its members connect only while it is built. Anyone who can reach
the port could open connections until this process has no descriptors left, which aborts it. Therefore a group of one machine
listens on the loopback interface, and no group accepts connections once it is built.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.comm.connections import Connections, new_listeners
from lockstep.comm.store import StoreWaitError, abortable_store
from lockstep.errors import PeerError
from lockstep.world import gloo_address, gloo_interfaces, machine_name

_BACKEND_TIMEOUT = timedelta(days=7)  # our own waits time out first, and name the rank
_BUILD_TIMEOUT = timedelta(seconds=60)
_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # the classic BPF program "accept 0 bytes of every packet"


def build_gloo(store: dist.Store, rank: int, size: int, connections: Connections) -> Any:
    """Build a gloo group whose sockets ``connections`` can cut. All ranks must call it."""
    is_local = _on_one_machine(store, rank, size)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _BACKEND_TIMEOUT
    with connections.captured():
        with new_listeners() as listeners:
            options._devices = _devices(is_local)
        options._threads = 2 * len(options._devices)
        try:
            return _construct(store, rank, size, options)
        finally:
            for listener in listeners:
                _refuse_connections(listener)
                listener.close()


def _construct(store: dist.Store, rank: int, size: int, options: Any) -> Any:
    """Construct a group. If the store can be aborted, so can this; if it cannot, a member that is lost is a PeerError.

    A member that is lost after it has published its address lets the others wait for its connection, and nothing ends that wait but
    gloo's own timeout. So a thread of its own waits, for ``_BUILD_TIMEOUT`` at most; if the store is aborted, it is left alone.
    """
    abortable = abortable_store(store)
    if abortable is None:
        try:
            return _new_group(store, rank, size, options)
        except RuntimeError as error:
            line = str(error).splitlines()[0][:200]
            text = f"a rank did not connect to rank {rank} over gloo ({line}). It has probably died: see its log."
            raise PeerError(text) from error
    options._timeout = _BUILD_TIMEOUT
    built: list[Any] = []
    failed: list[RuntimeError] = []
    ended = threading.Event()

    def build() -> None:
        try:
            built.append(_new_group(store, rank, size, options))
        except RuntimeError as error:
            failed.append(error)
        ended.set()

    abortable.on_abort(ended.set)
    threading.Thread(target=build, name="lockstep-gloo-build", daemon=True).start()
    ended.wait()
    if failed:
        raise StoreWaitError(f"a member did not connect: {str(failed[0]).splitlines()[0][:200]}") from failed[0]
    if not built:
        raise StoreWaitError("the generation was aborted while its members connected")
    built[0]._set_default_timeout(_BACKEND_TIMEOUT)
    return built[0]


def _new_group(store: dist.Store, rank: int, size: int, options: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, options)


def destroy_gloo(connections: Connections, groups: list[Any]) -> None:
    """End gloo groups before the interpreter ends: later, a gloo thread that releases a Python object would abort the process.

    Connections are cut first, because a group waits for its pending operations, and these wait for peers that may be dead.
    """
    connections.cut()
    groups.clear()
    connections.close()


def _devices(is_local: bool) -> list[Any]:
    """Loopback, or the address that the agent has chosen, or what ``GLOO_SOCKET_IFNAME`` says, or that of the machine's name."""
    gloo = dist.ProcessGroupGloo
    if is_local:
        return [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    if gloo_address():
        return [gloo.create_device(hostname=gloo_address(), lazy_init=False)]
    interfaces = gloo_interfaces()
    if interfaces:
        return [gloo.create_device(interface=name, lazy_init=False) for name in interfaces]
    return [gloo.create_default_device(lazy_init=False)]


def _on_one_machine(store: dist.Store, rank: int, size: int) -> bool:
    """Whether all ranks have the same kernel and the same network interfaces."""
    store.set(f"network/{rank}", _network_name())
    return len({store.get(f"network/{r}") for r in range(size)}) == 1


def _network_name() -> str:
    try:
        return f"{machine_name()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return machine_name()


def _refuse_connections(listener: socket.socket) -> None:
    """Make the kernel drop every packet that arrives for a listening socket. Connections that exist already are not affected.

    Closing or shutting down the socket instead would end the process: gloo's thread would raise an uncaught C++ exception.
    """
    if sys.platform == "linux":
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        try:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
        except OSError:
            pass  # a kernel without filters: the port stays open, as docs/internals/security.md says
