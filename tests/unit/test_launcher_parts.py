"""Small parts of the launcher that need no processes: ports, local ranks, and reads of the environment."""

from __future__ import annotations

import os
import socket
import types
from collections.abc import Iterator

import pytest

from lockstep.launcher import rank_reads
from lockstep.launcher.local_ranks import LocalRanks
from lockstep.launcher.master_port import MasterPort


def test_nobody_else_gets_the_master_port_but_a_server_that_may_reuse_addresses_does() -> None:
    first, second = MasterPort(), MasterPort()
    assert first.number != second.number
    with socket.socket() as program, pytest.raises(OSError, match="in use"):
        program.bind(("127.0.0.1", first.number))
    with socket.create_server(("127.0.0.1", first.number)) as store:  # sets SO_REUSEADDR, as torch's store does
        socket.create_connection(store.getsockname()).close()
    for port in (first, second, first):
        port.close()
    with socket.create_server(("127.0.0.1", second.number)):
        pass


def test_a_replacement_gets_the_number_of_a_lost_worker() -> None:
    ranks = LocalRanks()
    assert ranks.assign([0, 1, 2]) == {0: 0, 1: 1, 2: 2}
    ranks.release(1)
    ranks.release(0)
    assert not ranks.has(1)
    assert ranks.assign([3]) == {3: 0}
    assert ranks.assign([4, 5]) == {4: 1, 5: 3}


def test_spares_share_the_numbers_of_members_and_are_spread_over_them() -> None:
    ranks = LocalRanks()
    ranks.assign([0, 1, 2, 3])
    assert ranks.assign_to_spares([4, 5]) == {4: 0, 5: 1}
    ranks.release(2)
    assert ranks.assign([6]) == {6: 2}, "a replacement uses the GPU of the lost worker"
    ranks.release(0)
    assert ranks.assign_to_spares([7]) == {7: 0}, "spare 4 has taken the place of worker 0"
    assert ranks.assign([8]) == {8: 4}, "the run was scaled up"
    assert ranks.count == 5


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    plain, found = type(os.environ), []
    rank_reads.watch(found.append)
    yield found
    os.environ.__class__ = plain


@pytest.mark.parametrize("read", [lambda: os.environ["RANK"], lambda: os.getenv("RANK"), lambda: os.environ.get("MASTER_PORT")])
def test_a_script_that_connects_to_others_is_noticed_once(reads: list[bool], read: types.FunctionType) -> None:
    assert os.environ.get("HOME") == os.getenv("HOME")
    assert dict(os.environ) == os.environ.copy() == dict(os.environ.items())  # some libraries look through all variables
    assert reads == []
    assert sorted(os.environ) == sorted(os.environ.keys())
    for _ in range(2):
        assert "LOCAL_RANK" in os.environ
    assert reads == [False]
    for _ in range(2):
        read()
    assert reads == [False, True]
