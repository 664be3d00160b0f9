"""A head with a thousand agents: all join, one generation has them all, and the death of one worker is told to all others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lockstep.cluster.token import write_token
from tests.many_agents import ManyAgents
from tests.waiting import wait_until

AGENTS = 1000
DEADLINE_S = 60.0  # generous: benchmarks/machines.py measures


def test_a_thousand_agents_join_and_are_told_of_one_death(tmp_path: Path) -> None:
    token, run_dir = tmp_path / "token", tmp_path / "run"
    write_token(token)
    listen = ["--listen", "127.0.0.1:0", "--token-file", str(token), "--run-dir", str(run_dir)]
    command = [sys.executable, "-m", "lockstep", "head", *listen, "--min-workers", str(AGENTS), "--heartbeat-timeout", "20"]
    with (tmp_path / "stderr.txt").open("wb") as output:
        head = subprocess.Popen(command, stderr=output)
    try:
        wait_until((run_dir / "head.address").exists, "the head listens", DEADLINE_S)
        with ManyAgents((run_dir / "head.address").read_text().strip(), token, AGENTS, processes=4) as agents:
            agents.wait("ready", DEADLINE_S)
            agents.connect()
            joined_s = agents.wait("running", DEADLINE_S)
            formed_s = agents.wait("formed", DEADLINE_S)
            assert agents.details("formed") == {AGENTS}
            agents.lose_one()
            told_s = agents.wait("told", DEADLINE_S)
            print(f"{AGENTS} agents: joined after {joined_s:.2f} s, in a generation after {formed_s:.2f} s; told in {told_s:.3f} s")
            assert head.poll() is None
    finally:
        head.kill()
        head.wait()
