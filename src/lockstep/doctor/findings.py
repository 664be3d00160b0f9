"""What the reports of all machines mean: one line for each finding, with its remedy. Values in, values out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from lockstep.doctor.survey import FoundLink, Report

_OLDEST_TORCH = (2, 11)
_FEW_FILES, _ENOUGH_FILES = 256, 1024
_SMALL_SHM_BYTES = 1 << 30
_MAX_CLOCK_OFFSET_S = 1.0
_SLOW_LATENCY_S = 0.05
_SLOW_BYTES_PER_S = 12.5e6
_SHOWN_PAIRS = 10


@dataclass(frozen=True)
class Finding:
    """``level``: "ok", "warn" (a run would start, but badly), or "FAIL" (a run would not start)."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:4}  {self.text}"


def find(reports: Sequence[Report], place: str | None) -> list[Finding]:
    """Returns the findings. ``place``: that of the checkpoints, if machines were asked to try it."""
    found = [Finding("FAIL", report.failure) for report in reports if report.failure]
    here = [report for report in reports if not report.failure and report.facts is not None]
    workers = [report for report in here if report.has_workers]
    found += _versions("Python", {each.machine: _minor(each.facts["python"]) for each in here if each.facts}, _python_remedy)
    found += _versions("Lockstep", {each.machine: each.facts["lockstep"] for each in here if each.facts}, _lockstep_remedy)
    found += _torch(workers)
    found += [finding for check in (_open_files, _shared_memory) for finding in check(workers)]
    found += _gpus(workers)
    if len(here) > 1:
        found += _reachability(here) + _clocks(here) + _speed(here)
    if place is not None:
        found += _checkpoint(workers, place)
    return found


def _versions(what: str, version_of: dict[str, str], remedy: Callable[[str], str]) -> list[Finding]:
    groups = _grouped(version_of)
    if len(groups) <= 1:
        return [Finding("ok", f"{what} {version} on {_names(names)}") for version, names in groups.items()]
    shown = "; ".join(f"{version} on {_names(names)}" for version, names in groups.items())
    usual = max(groups, key=lambda version: len(groups[version]))
    return [Finding("FAIL", f"{what} differs: {shown}. {remedy(usual)}")]


def _python_remedy(version: str) -> str:
    return f"Use Python {version} on every machine."


def _lockstep_remedy(version: str) -> str:
    return f"Install the same version on every machine: pip install lockstep-ddp=={version}."


def _torch(workers: Sequence[Report]) -> list[Finding]:
    found, versions = [], {}
    for report in workers:
        torch = report.torch or {"version": "", "error": "it has not answered in time", "slow_s": 0.0}
        if torch["version"]:
            versions[report.machine] = torch["version"]
        if torch["slow_s"]:
            remedy = "Try again, now that its files are cached. If it stays so, install torch on a disk of the machine."
            found.append(Finding("FAIL", f"{report.machine}: `import torch` takes longer than {torch['slow_s']:.0f} s. {remedy}"))
        if torch["error"]:
            what = f"torch {torch['version']} fails" if torch["version"] else "torch cannot be imported"
            remedy = "Try `python -c 'import torch; torch.ones(1)'` there, and install torch again if it fails."
            found.append(Finding("FAIL", f"{report.machine}: {what} ({torch['error'].rstrip('.')}). {remedy}"))
    found += _versions("torch", versions, lambda usual: f"Install the same version on every machine: pip install torch=={usual}.")
    for version, names in _grouped(versions).items():
        numbers = re.findall(r"\d+", version)
        if tuple(map(int, numbers[:2])) < _OLDEST_TORCH:
            found.append(Finding("FAIL", f"torch {version} on {_names(names)} is too old. Install torch 2.11 or newer."))
    return found


def _open_files(workers: Sequence[Report]) -> list[Finding]:
    found = []
    for limit, names in _grouped({each.machine: each.facts["open_files"] for each in workers if each.facts}).items():
        level = "ok" if limit >= _ENOUGH_FILES else "warn" if limit >= _FEW_FILES else "FAIL"
        remedy = "" if level == "ok" else ". Each worker needs dozens: raise the limit with `ulimit -n 65536`."
        found.append(Finding(level, f"{limit} open files are allowed on {_names(names)}{remedy}"))
    return found


def _shared_memory(workers: Sequence[Report]) -> list[Finding]:
    found = []
    tried = {each.machine: each.torch["segment"] for each in workers if each.torch and not each.torch["slow_s"]}
    for why, names in _grouped(tried).items():
        text = f"two processes share memory on {_names(names)}"
        remedy = "Workers use gloo there, several times slower: give the container more memory, and all workers the same user"
        found.append(Finding("warn", f"{_names(names)}: no shared memory ({why}). {remedy}.") if why else Finding("ok", text))
    for size, names in _grouped({each.machine: each.facts["shm_bytes"] for each in workers if each.facts}).items():
        if size < _SMALL_SHM_BYTES:
            remedy = (
                "Loader processes of torch need it: start the container with --shm-size=8g (Kubernetes: an emptyDir in memory)."
            )
            found.append(Finding("warn", f"/dev/shm has {size / 1e6:.0f} MB on {_names(names)}. {remedy}"))
    return found


def _gpus(workers: Sequence[Report]) -> list[Finding]:
    found = []
    tested = [report for report in workers if report.torch and report.facts and not report.torch["slow_s"]]
    gpus = {report.machine: _count(report.torch["gpus"]) for report in tested if report.torch}
    for report in tested:
        devices = report.facts["nvidia_devices"] if report.facts else 0
        if devices and report.torch and not report.torch["gpus"] and not report.torch["error"]:
            remedy = f"torch {report.torch['version']} cannot use them: install a build for CUDA, and a driver that it supports."
            found.append(Finding("warn", f"{report.machine} has {devices} NVIDIA devices, and {remedy}"))
    if any(gpus.values()):
        groups = _grouped(gpus)
        shown = "; ".join(f"{what or 'no GPU'} on {_names(names)}" for what, names in groups.items())
        remedy = ". Machines with other GPUs compute other bits, and the slowest decides" if len(groups) > 1 else ""
        found.append(Finding("warn" if remedy else "ok", f"GPUs: {shown}{remedy}"))
        nccl = {report.machine: report.torch["nccl"] or "missing" for report in tested if report.torch and report.torch["gpus"]}
        found += _versions("NCCL", nccl, lambda usual: "Install the same build of torch on every machine.")
    return found


def _reachability(machines: Sequence[Report]) -> list[Finding]:
    found = []
    for report in machines:
        if not report.has_links:
            found.append(Finding("FAIL", f"{report.machine} has not said in time which machines it can reach. Try again."))
            continue
        for link in report.links.values():
            if not link.reached_at and report.has_workers:
                remedy = "Workers connect to each other at any port: allow TCP between the machines in both directions."
                why = link.failures or "it has no address"
                found.append(Finding("FAIL", f"{report.machine} cannot reach {link.to}: {why.rstrip('.')}. {remedy}"))
    if not found:
        found.append(Finding("ok", f"each of {_names(report.machine for report in machines)} reaches the others"))
    return found


def _clocks(machines: Sequence[Report]) -> list[Finding]:
    first = machines[0]
    offsets = {link.to: link.clock_offset_s for link in first.links.values() if link.reached_at}
    wrong = {name: offset for name, offset in offsets.items() if abs(offset) > _MAX_CLOCK_OFFSET_S}
    for_each = "; ".join(f"{name} by {offset:+.1f} s" for name, offset in wrong.items())
    if wrong:
        remedy = "Run a time service (chrony, systemd-timesyncd) on each: times in logs and of checkpoints would be wrong."
        return [Finding("warn", f"clocks differ from {first.machine}: {for_each}. {remedy}")]
    most = max((abs(offset) for offset in offsets.values()), default=0.0)
    return [Finding("ok", f"clocks differ by at most {1000 * most:.1f} ms")] if offsets else []


def _speed(machines: Sequence[Report]) -> list[Finding]:
    """A line for each pair, both directions in it; for many machines, a line for all pairs."""
    pairs = []
    for a, b in combinations([report for report in machines if report.has_workers], 2):
        there, back = a.links.get(b.machine), b.links.get(a.machine)
        if there and back and there.reached_at and back.reached_at:
            pairs.append((a.machine, b.machine, there, back))
    found = [_pair(*pair) for pair in pairs]
    if len(found) <= _SHOWN_PAIRS:
        return found
    slow = [finding for finding in found if finding.level != "ok"]
    latencies = [max(there.latency_s, back.latency_s) for _, _, there, back in pairs]
    speeds = [min(there.bytes_per_s, back.bytes_per_s) for _, _, there, back in pairs]
    text = f"{len(pairs)} pairs: {1000 * median(latencies):.2f} ms, {_speed_text(median(speeds))} (medians); slowest "
    text += f"{1000 * max(latencies):.2f} ms, {_speed_text(min(speeds))}"
    return [*slow, Finding("ok", text)]


def _pair(a: str, b: str, there: FoundLink, back: FoundLink) -> Finding:
    latency = max(there.latency_s, back.latency_s)
    text = f"{a} -> {b} {_speed_text(there.bytes_per_s)}, {b} -> {a} {_speed_text(back.bytes_per_s)}, {1000 * latency:.2f} ms"
    if min(there.bytes_per_s, back.bytes_per_s) < _SLOW_BYTES_PER_S or latency > _SLOW_LATENCY_S:
        return Finding("warn", f"{text}. The link is slow: every step waits for it. Check its cable, switch and interface.")
    return Finding("ok", text)


def _speed_text(bytes_per_s: float) -> str:
    if bytes_per_s == 0:
        return "too slow to measure"
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


def _checkpoint(workers: Sequence[Report], place: str) -> list[Finding]:
    found = []
    for report in workers:
        why = "it has not answered in time" if report.checkpoint is None else report.checkpoint
        if why:
            remedy = "Let this user write there, or name another place with --checkpoint."
            found.append(Finding("FAIL", f"{report.machine} cannot write and read {place}: {why.rstrip('.')}. {remedy}"))
        elif report.unseen is None:
            found.append(Finding("FAIL", f"{report.machine} has not said in time whether it reads {place}. Is the storage slow?"))
        elif report.unseen:
            remedy = "Use a folder that all machines mount, or a URL such as s3://bucket/run."
            text = f"{report.machine} does not see what {_names(report.unseen)} wrote to {place}: the place is not common. {remedy}"
            found.append(Finding("FAIL", text))
    return found or [Finding("ok", f"{_names(report.machine for report in workers)} can write to {place} and read from it")]


def _grouped(value_of: dict[str, Any]) -> dict[Any, list[str]]:
    """Value -> the machines that have it."""
    groups: dict[Any, list[str]] = {}
    for machine, value in value_of.items():
        groups.setdefault(value, []).append(machine)
    return groups


def _count(names: Sequence[str]) -> str:
    return ", ".join(f"{len(list_)} x {name}" for name, list_ in _grouped_names(names).items())


def _grouped_names(names: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name, []).append(name)
    return groups


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _names(machines: Iterable[str]) -> str:
    *others, last = machines
    return f"{', '.join(others)} and {last}" if others else last
