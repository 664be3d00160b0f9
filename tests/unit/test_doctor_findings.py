"""What the doctor concludes from what machines have said. The machines themselves: tests/process/test_doctor.py."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.__main__ import main
from lockstep.doctor.findings import find
from lockstep.doctor.survey import FoundLink, Report

FACTS = {
    "python": "3.12.3",
    "lockstep": "1.0",
    "open_files": 4096,
    "shm_bytes": 8 << 30,
    "free_bytes": 8 << 30,
    "nvidia_devices": 0,
}
TORCH = {"version": "2.13.0", "error": "", "segment": "", "gpus": [], "nccl": "", "slow_s": 0.0}
GPU = {"gpus": ["H200", "H200"], "nccl": "2.28.3"}


def machine(name: str, others: str = "", *, torch: dict[str, Any] | None = None, **changed: Any) -> Report:
    """A healthy machine, except for what is given: of its facts, of its torch, or of its links."""
    link = {"reached_at": "10.0.0.1:1", "failures": "", "latency_s": 1e-4, "clock_offset_s": 0.01, "bytes_per_s": 2e9}
    link |= {key: changed.pop(key) for key in list(changed) if key in link}
    links = {other: FoundLink(to=other, **link) for other in others if other != name}
    facts = {**FACTS, **{key: changed.pop(key) for key in list(changed) if key in FACTS}}
    return Report(name, facts=facts, torch={**TORCH, **(torch or {})}, links=links, has_links=True, **changed)


def bad(*reports: Report, place: str | None = None) -> list[str]:
    return [str(finding) for finding in find(reports, place) if finding.level != "ok"]


def test_healthy_machines() -> None:
    found = [str(finding) for finding in find([machine("a", "ab", torch=GPU), machine("b", "ab", torch=GPU)], None)]
    assert found == [
        "ok    Python 3.12 on a and b",
        "ok    Lockstep 1.0 on a and b",
        "ok    torch 2.13.0 on a and b",
        "ok    4096 open files are allowed on a and b",
        "ok    two processes share memory on a and b",
        "ok    GPUs: 2 x H200 on a and b",
        "ok    NCCL 2.28.3 on a and b",
        "ok    each of a and b reaches the others",
        "ok    clocks differ by at most 10.0 ms",
        "ok    a -> b 2.0 GB/s, b -> a 2.0 GB/s, 0.10 ms",
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"python": "3.11.2"}, "FAIL  Python differs: 3.12 on a; 3.11 on b. Use Python 3.12 on every machine."),
        ({"lockstep": "0.9"}, "FAIL  Lockstep differs: 1.0 on a; 0.9 on b. Install the same version"),
        ({"torch": {"version": "2.11.0"}}, "FAIL  torch differs: 2.13.0 on a; 2.11.0 on b. Install the same version"),
        ({"torch": {"error": "CUDA error"}}, "FAIL  b: torch 2.13.0 fails (CUDA error). Try `python -c"),
        ({"torch": {"version": "", "slow_s": 15.0}}, "FAIL  b: `import torch` takes longer than 15 s. Try again"),
        ({"open_files": 512}, "warn  512 open files are allowed on b. Each worker needs dozens: raise the limit with `ulimit -n"),
        ({"open_files": 64}, "FAIL  64 open files are allowed on b."),
        ({"torch": {"segment": "no memory"}}, "warn  b: no shared memory (no memory). Workers use gloo there"),
        ({"shm_bytes": 64 << 20}, "warn  /dev/shm has 67 MB on b."),
        ({"nvidia_devices": 8}, "warn  b has 8 NVIDIA devices, and torch 2.13.0 cannot use them"),
        ({"torch": GPU}, "warn  GPUs: no GPU on a; 2 x H200 on b."),
        ({"reached_at": "", "failures": "10.0.0.1:1: refused."}, "FAIL  b cannot reach a: 10.0.0.1:1: refused. Workers connect"),
        ({"bytes_per_s": 1e6}, "warn  a -> b 2.0 GB/s, b -> a 1 MB/s, 0.10 ms. The link is slow"),
        ({"latency_s": 0.2}, "warn  a -> b 2.0 GB/s, b -> a 2.0 GB/s, 200.00 ms. The link is slow"),
        ({"failure": "b cannot be reached by ssh"}, "FAIL  b cannot be reached by ssh"),
    ],
)
def test_one_machine_differs(changed: dict[str, Any], says: str) -> None:
    (found,) = bad(machine("a", "ab"), machine("b", "ab", **changed))
    assert found.startswith(says), found


def test_what_no_machine_says_in_time() -> None:
    silent = Report("b", facts=FACTS)
    assert bad(machine("a", "ab", checkpoint="", unseen=[]), silent, place="/place") == [
        "FAIL  b: torch cannot be imported (it has not answered in time). Try `python -c 'import torch; torch.ones(1)'` there, "
        "and install torch again if it fails.",
        "FAIL  b has not said in time which machines it can reach. Try again.",
        "FAIL  b cannot write and read /place: it has not answered in time. Let this user write there, or name another place with "
        "--checkpoint.",
    ]


def test_different_gpus_versions_of_nccl_and_clocks() -> None:
    a = machine("a", "ab", torch=GPU, clock_offset_s=-3.0)
    b = machine("b", "ab", torch={"gpus": ["H100"], "nccl": "2.27.0"})
    gpus, nccl, clocks = bad(a, b)
    assert gpus.startswith("warn  GPUs: 2 x H200 on a; 1 x H100 on b. Machines with other GPUs compute other bits")
    assert nccl.startswith("FAIL  NCCL differs: 2.28.3 on a; 2.27.0 on b.")
    assert clocks.startswith("warn  clocks differ from a: b by -3.0 s. Run a time service")


def test_old_torch_and_a_machine_without_workers() -> None:
    old = {"version": "2.4.1+cu121"}
    head = Report("this machine", has_workers=False, facts={**FACTS, "open_files": 8}, has_links=True)
    (found,) = bad(head, machine("a", "ab", torch=old), machine("b", "ab", torch=old))
    assert found == "FAIL  torch 2.4.1+cu121 on a and b is too old. Install torch 2.11 or newer."


def test_many_machines_have_one_line_for_all_links() -> None:
    names = "abcdefgh"
    reports = [machine(name, names, bytes_per_s=1e6 if name == "c" else 1e9) for name in names]
    lines = [str(finding) for finding in find(reports, None)]
    assert lines[-1] == "ok    28 pairs: 0.10 ms, 1.0 GB/s (medians); slowest 0.10 ms, 1 MB/s"
    assert sum(line.startswith("warn") for line in lines) == 7


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hosts", "a,b", "--head", "h:1"], "--hosts, --engine and --head name different machines"),
        (["--hosts", "a,,b"], "'' is not a host"),
        (["--hosts", "a", "--ssh", "no-such-program"], "there is no program no-such-program"),
        (["--engine", "slurm"], "runs inside an allocation"),
        (["--head", "nowhere", "--token-file", "x"], "'nowhere' is not an address"),
        (["--head", "h:1", "--token-file", "/nowhere"], "the token file /nowhere cannot be read"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["doctor", *arguments]) == 2
    said = capfd.readouterr()
    assert said.err.startswith("lockstep: ")
    assert said.err.count("\n") == 1
    assert says in said.err
    assert not said.out
