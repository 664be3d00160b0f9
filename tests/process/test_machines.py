"""Three hosts with two workers each: whatever is killed, cut off or stopped, training continues to the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.hosts import Hosts


@pytest.fixture
def make(hosts: Callable[[int], Hosts], tmp_path: Path) -> Callable[..., Cluster]:
    return lambda count=3, **settings: Cluster(hosts(count), tmp_path / "cluster", **settings)


def test_machines_train_together_to_the_bits_of_one_process(make: Callable[..., Cluster], expected: str) -> None:
    with make() as cluster:
        cluster.start("--ledger")
        assert cluster.result() == expected, cluster.dump()
        for agent in cluster.agent.values():
            assert cluster.wait(agent) == 0, cluster.dump()
        cluster.require_ledger()
        assert len(cluster.generations()[0][2]) == 6


def test_an_agent_is_killed_and_another_one_takes_its_place(make: Callable[..., Cluster], expected: str) -> None:
    with make(hold_at=20) as cluster:
        cluster.start("--ledger")
        cluster.wait_for_step(20)
        cluster.kill_agent("c")
        cluster.wait_for_size(4)
        cluster.wait_until(lambda: cluster.step() > 22, "training continues without machine c")
        cluster.start_agent("c")
        cluster.wait_for_size(6)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        assert "machine c is lost" in cluster.head["a"].stderr()
        cluster.require_ledger()


def test_a_worker_is_killed_and_replaced_on_its_machine(make: Callable[..., Cluster], expected: str) -> None:
    with make(2, hold_at=20) as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        worker, pid = max(cluster.workers().items())
        os.kill(pid, signal.SIGKILL)
        cluster.wait_for_size(3)
        cluster.wait_for_size(4)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        assert worker not in cluster.generations()[-1][2]


@pytest.mark.parametrize("silently", [True, False])
def test_a_machine_is_cut_off_and_comes_back(make: Callable[..., Cluster], expected: str, silently: bool) -> None:
    with make(hold_at=20) as cluster:
        cluster.start("--ledger")
        cluster.wait_for_step(20)
        cluster.hosts.cut("c", silently=silently)
        cluster.wait_for_size(4)
        cluster.wait_for_step(23)
        cluster.wait_for_text(cluster.agent["c"], "the head is lost")
        cluster.hosts.restore("c")
        cluster.wait_for_text(cluster.agent["c"], "the run has gone on without 2 workers of this machine")
        cluster.wait_for_size(6)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        cluster.require_ledger()


def test_a_machine_stops_and_goes_on_later(make: Callable[..., Cluster], expected: str) -> None:
    with make(hold_at=20) as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        cluster.hosts.kill("c", signal.SIGSTOP)
        cluster.wait_for_size(4)
        cluster.hosts.kill("c", signal.SIGCONT)
        cluster.wait_for_size(6)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()


def test_the_head_is_killed_and_training_goes_on_until_another_one_is_there(make: Callable[..., Cluster], expected: str) -> None:
    with make(hold_at=20) as cluster:
        cluster.start("--ledger")
        cluster.wait_for_step(20)
        cluster.kill_head()
        before = cluster.step()
        cluster.wait_for_step(before + 4)
        head = cluster.start_head("a", "--ledger")
        cluster.wait_for_text(head, "continuing a run with 6 workers on 3 machines")
        os.kill(max(cluster.workers().items())[1], signal.SIGKILL)
        cluster.wait_for_size(5)
        cluster.wait_for_size(6)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        cluster.require_ledger()


def test_a_worker_dies_while_there_is_no_head(make: Callable[..., Cluster], expected: str) -> None:
    with make(hold_at=20) as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        cluster.kill_head()
        os.kill(max(cluster.workers().items())[1], signal.SIGKILL)
        cluster.start_head("a")
        cluster.wait_for_size(5)
        cluster.wait_for_size(6)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()


def test_head_and_agent_are_replaced_and_the_new_agent_finds_the_new_head_first(
    make: Callable[..., Cluster], expected: str
) -> None:
    with make(hold_at=20) as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        cluster.kill_head()
        cluster.kill_agent("c")
        for host in "ab":
            cluster.kill_agent(host, signal.SIGSTOP)
        head = cluster.start_head("a", min_workers=6)
        cluster.start_agent("c")
        cluster.wait_until(lambda: head.events("registered"), "the new agent has registered")
        for host in "ab":
            cluster.kill_agent(host, signal.SIGCONT)
        cluster.wait_for_text(head, "continuing a run")
        cluster.wait_for_size(6)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()


def test_the_script_ends_while_there_is_no_head(make: Callable[..., Cluster], expected: str) -> None:
    with make(2, hold_at=20) as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        cluster.kill_head()
        cluster.hurry()
        cluster.wait_until(lambda: len(cluster.notes("done")) == 4, "all workers have finished")
        cluster.start_head("a")
        assert cluster.result() == expected, cluster.dump()
        for agent in cluster.agent.values():
            assert cluster.wait(agent) == 0, cluster.dump()


def test_the_script_ends_while_the_head_hangs_and_another_head_learns_of_it(make: Callable[..., Cluster], expected: str) -> None:
    with make(2, hold_at=50, workers=1) as cluster:
        cluster.start()
        cluster.wait_for_step(50)
        cluster.hurry()
        cluster.wait_for_step(57)
        os.kill(cluster.head["a"].process.pid, signal.SIGSTOP)
        exited = [cluster.agent[host].events for host in "ab"]
        cluster.wait_until(lambda: all(events("exited") for events in exited), "the workers have ended")
        cluster.kill_head()
        cluster.start_head("a", min_workers=2)
        assert cluster.result() == expected, cluster.dump()
        for agent in cluster.agent.values():
            assert cluster.wait(agent) == 0, cluster.dump()


def test_all_machines_leave_at_once_and_the_run_is_saved(make: Callable[..., Cluster], tmp_path: Path) -> None:
    with make(3, hold_at=20, heads="ab", workers=1, checkpoint=tmp_path / "checkpoints") as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        for host in "abc":
            cluster.kill_agent(host, signal.SIGTERM)
        assert cluster.wait(cluster.head["a"]) == 0, cluster.dump()
        assert "The same command resumes from it" in cluster.head["a"].stderr(), cluster.dump()


def test_the_machine_of_the_head_is_cut_off_and_the_majority_goes_on_with_the_next_head(
    make: Callable[..., Cluster], expected: str
) -> None:
    with make(hold_at=20, heads="ab") as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        cluster.hosts.cut("a", silently=True)
        cluster.wait_for_text(cluster.head["b"], "continuing a run with 4 workers on 2 machines")
        cluster.wait_for_text(cluster.head["a"], "too few members of the run are left")
        cluster.wait_for_size(4)
        step = cluster.step()
        cluster.wait_until(lambda: cluster.step() > step + 2, "the majority trains")
        numbers = [number for _, number, _ in cluster.generations()]
        assert len(set(numbers)) >= len([members for _, _, members in cluster.generations() if len(members) != 6]), cluster.dump()
        cluster.hosts.restore("a")
        cluster.kill_head("a")  # the agent of a goes to the next head of its list
        cluster.wait_for_size(6)
        cluster.hurry()
        assert cluster.result("b") == expected, cluster.dump()


def test_a_new_head_meets_a_new_agent_before_those_of_the_run(make: Callable[..., Cluster], expected: str) -> None:
    with make(3, hold_at=20, workers=1) as cluster:
        cluster.start("--ledger")
        cluster.wait_for_step(20)
        cluster.kill_head()
        cluster.kill_agent("c")
        for host in "ab":
            cluster.kill_agent(host, signal.SIGSTOP)
        cluster.start_head("a", "--ledger")
        cluster.start_agent("c")
        cluster.wait_until(lambda: cluster.head["a"].events("registered"), "the new agent has registered")
        for host in "ab":
            cluster.kill_agent(host, signal.SIGCONT)
        cluster.wait_for_text(cluster.head["a"], "continuing a run")
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        cluster.require_ledger()


def test_agents_that_first_meet_different_heads_begin_one_run(make: Callable[..., Cluster], expected: str) -> None:
    with make(2, heads="ab", workers=1) as cluster:
        cluster.start_head("b", min_workers=2)
        cluster.start_agent("b")
        cluster.wait_until(lambda: cluster.head["b"].events("let go"), "the agent of b has found the second head only")
        cluster.start_head("a", min_workers=2)
        cluster.start_agent("a")
        assert cluster.result() == expected, cluster.dump()
        assert len(cluster.generations()[0][2]) == 2


def test_a_machine_leaves_and_the_run_stops_and_resumes(make: Callable[..., Cluster], expected: str, tmp_path: Path) -> None:
    with make(hold_at=20, checkpoint=tmp_path / "checkpoints") as cluster:
        cluster.start()
        cluster.wait_for_step(20)
        cluster.kill_agent("c", signal.SIGTERM)
        cluster.wait_for_size(4)
        assert cluster.wait(cluster.agent["c"]) == 0, cluster.dump()
        assert "has left the run" in cluster.agent["c"].stderr()
        cluster.wait_for_step(23)
        os.kill(cluster.head["a"].process.pid, signal.SIGTERM)
        assert cluster.wait(cluster.head["a"]) == 0, cluster.dump()
        assert "The same command resumes from it" in cluster.head["a"].stderr(), cluster.dump()
        assert not cluster.notes("done")
        for host in "ab":
            assert cluster.wait(cluster.agent[host]) == 0, cluster.dump()
        cluster.hurry()
        cluster.start_head("a", min_workers=2)
        cluster.start_agent("b")
        assert cluster.result() == expected, cluster.dump()


WITHOUT_RUN = """
import hashlib, os, signal, sys
import torch
import torch.distributed as dist
import lockstep
from tests.models import MLP, batch, loss_of, part

world = lockstep.World.detect()
if "torch" in sys.argv:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = lockstep.replicate(MLP(), timeout_s=20)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x, y = batch(step, 24)
    loss_of(model, part(x, world.rank, world.size), part(y, world.rank, world.size)).backward()
    if step == 2 and world.rank == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    opt.step()
    opt.zero_grad()
name = lockstep.replica_of(model).comm.name
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
open(f"done-{world.rank}", "w").write(f"{name} {world.size} {digest}\\n")
"""


@pytest.mark.parametrize("group", ["lockstep", "torch"])
def test_scripts_without_run_find_each_other_and_are_started_again(
    make: Callable[..., Cluster], tmp_path: Path, group: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_RUN.replace("\\\\n", "\\n"))
    with make(2, script=script, args=[group]) as cluster:
        cluster.start()
        result = cluster.result()
        assert result.startswith("twolevel 4 "), cluster.dump()
        assert "All workers are stopped and start again (restart 1 of 3)" in cluster.head["a"].stderr(), cluster.dump()
        assert len(cluster.notes("done")) == 4


CONNECTED = """
import os, time, torch
import torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
Path(f"pid-{os.environ['LOCKSTEP_WORKER']}").write_text(f"{os.getpid()}\\n")
while not Path("hurry").exists():
    time.sleep(0.02)
total = torch.ones(1)
dist.all_reduce(total)
Path(f"done-{dist.get_rank()}").write_text(f"{int(total)}\\n")
"""


def test_a_script_without_run_outlives_the_head_and_starts_again_with_the_machines_that_are_left(
    make: Callable[..., Cluster], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CONNECTED)
    with make(2, script=script, workers=1) as cluster:
        cluster.start()
        cluster.wait_until(lambda: len(cluster.workers()) == 2, "the workers are connected")
        before = cluster.workers()
        cluster.kill_head()
        head = cluster.start_head("a", min_workers=2)
        cluster.wait_for_text(head, "continuing a run with 2 workers on 2 machines")
        assert cluster.workers() == before
        cluster.kill_agent("b")
        cluster.wait_for_text(head, "All workers are stopped and start again (restart 1 of 3)")
        cluster.hurry()
        assert cluster.result() == "1", cluster.dump()


def test_machines_that_do_not_share_the_checkpoint_folder_are_named(make: Callable[..., Cluster], tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with make(2, checkpoint=place) as cluster:
        cluster.start_head("a", min_workers=4)
        for host in "ab":  # each machine has a folder of its own there
            own = tmp_path / f"own-{host}"
            own.mkdir()
            cluster.start_agent(host, mounts={own: place})
        assert cluster.wait(cluster.head["a"]) == 1, cluster.dump()
        assert "does not see what machine" in cluster.head["a"].stderr()
        assert "Name a folder that all machines share" in cluster.head["a"].stderr()


def test_a_machine_that_others_cannot_reach_is_named_at_once(make: Callable[..., Cluster], expected: str) -> None:
    with make(3, hold_at=20) as cluster:
        cluster.hosts.block("b", "c")
        cluster.start_head("a", min_workers=4)
        for host in "ab":
            cluster.start_agent(host)
        cluster.wait_for_size(4)
        cluster.start_agent("c")
        assert cluster.wait(cluster.agent["c"], 20.0) == 1, cluster.dump()
        refusal = cluster.agent["c"].stderr()
        for part in ("machine c cannot reach machine b: cannot connect to ", cluster.hosts.address("b"), "machine b cannot reach"):
            assert part in refusal, cluster.dump()
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
