"""One rank of the benchmark, in a process of its own: python -m benchmarks.gpu.worker SPEC.json RANK

It measures one case after the other and writes what it has after every round, so that a crash loses little. If a variant raises, a
lone rank goes on without it. Several ranks would wait for each other then: the process ends, and supervisor.py starts all again
without the variant.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.gpu.measuring import WARM_UP, PeakMemory, has_time, rotated, share_of, steps_of_turn, summary, take_turn
from benchmarks.gpu.models import Case, cases
from benchmarks.gpu.variants import BARE, Kernels, Site, Variant, variants_for

TIMEOUT = timedelta(seconds=60)  # of a collective: the first one may wait for kernels that are compiled


@dataclass(frozen=True)
class Spec:
    """What the ranks of one configuration measure. Written by supervisor.py as JSON."""

    folder: str
    size: int
    device_type: str
    backend: str
    cases: list[str]
    until: float
    """The time (``time.time``) at which the last case should be complete."""
    variants: list[str] = field(default_factory=list)
    """Empty: all."""
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    """By case and variant: why an earlier attempt failed."""

    @staticmethod
    def read(path: str) -> Spec:
        return Spec(**json.loads(Path(path).read_text()))


class VariantFailed(Exception):
    """A variant has raised, and this process cannot go on."""


class Ranks:
    """What the ranks of one configuration tell each other, and the supervisor."""

    def __init__(self, spec: Spec, rank: int, store: dist.Store) -> None:
        self._spec, self._store, self.rank = spec, store, rank
        self._asked = 0
        self._where: dict[str, str] = {}

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank. All ranks must call it alike."""
        self._asked += 1
        if self._spec.size == 1:
            return value
        if self.rank == 0:
            self._store.set(f"decision/{self._asked}", json.dumps(value))
            return value
        return json.loads(self._store.get(f"decision/{self._asked}"))

    def note(self, case: str, variant: str, doing: str) -> None:
        """Tell the supervisor what this rank does now."""
        self._where = {"case": case, "variant": variant, "doing": doing}
        self._write(f"progress-{self.rank}.json", {**self._where, "at": time.time()})

    def failed(self, error: BaseException) -> None:
        """Tell the supervisor why this process ends."""
        self._write(f"error-{self.rank}.json", {**self._where, "error": describe(error), "at": time.time()})

    def publish(self, number: int, row: dict[str, Any]) -> None:
        if self.rank == 0:
            self._write(f"row-{number}.json", row)

    def _write(self, name: str, value: Any) -> None:
        path = Path(self._spec.folder, name)
        new = path.with_suffix(f".{self.rank}.new")
        new.write_text(json.dumps(value))
        os.replace(new, path)


class CaseRun:
    """All variants of one case in this process."""

    def __init__(self, case: Case, number: int, spec: Spec, site: Site, ranks: Ranks) -> None:
        self._case, self._number, self._site, self._ranks = case, number, site, ranks
        self._failed = spec.failed.get(case.key, {})
        self._variants = {v.name: v for v in variants_for(site.size) if not spec.variants or v.name in spec.variants}
        self._loops: dict[str, Iterator[None]] = {}
        self._steps: dict[str, int] = {}
        self._step_s: dict[str, float] = {}
        self._turns: dict[str, list[tuple[float, float]]] = {}
        self._found: dict[str, dict[str, Any]] = {}
        self._row = {
            "key": case.key,
            "case": case.name,
            "ranks": site.size,
            "backend": spec.backend,
            "shares_gpu": site.is_cuda and site.size > torch.cuda.device_count(),
            "large": case.is_large,
            "launch_bound": case.is_launch_bound,
            "nccl": _nccl_version() if spec.backend == "nccl" else None,
            "gpu": torch.cuda.get_device_name() if site.is_cuda else None,
        }

    def run(self, until: float) -> dict[str, Any]:
        """Prepare all variants, measure them in turn until the time is over, and let go of them. Returns the row of results."""
        try:
            self._prime()
            for variant in self._variants.values():
                self._prepare(variant, until)
            gc.collect()
            gc.freeze()  # the garbage collector of a user's process does not look at nine models
            self._measure(until)
            return self._publish(complete=True)
        finally:
            self._close()

    def _prime(self) -> None:
        """Run some bare steps and drop them: libraries allocate their workspaces, which are not the memory of the first variant."""
        self._ranks.note(self._case.key, "", "priming")
        for kernels in Kernels:
            kernels.ask()
            loop = BARE(self._case, self._site)
            for _ in range(2):
                next(loop)
            loop.close()  # type: ignore[attr-defined]
        gc.collect()

    def _prepare(self, variant: Variant, until: float) -> None:
        """Build a variant, warm it up, and measure its memory and roughly its time."""
        reason = variant.why_not(self._site)
        if variant.name in self._failed:
            self._found[variant.name] = {"error": self._failed[variant.name]}
        elif reason is not None:
            self._found[variant.name] = {"skipped": reason}
        elif self._ranks.from_first(time.time() > until):
            self._found[variant.name] = {"skipped": "no time was left"}
        else:
            self._ranks.note(self._case.key, variant.name, "warming up")
            try:
                self._warm_up(variant)
            except Exception as error:  # noqa: BLE001 - whatever a variant raises is a result
                self._drop(variant.name, error)

    def _warm_up(self, variant: Variant) -> None:
        variant.kernels.ask()
        name, site = variant.name, self._site
        memory = PeakMemory(site)
        self._loops[name] = loop = variant.loop(self._case, site)
        self._turns[name] = []
        for _ in range(WARM_UP):
            next(loop)
        peak = memory.measure(loop)
        _, self._step_s[name] = take_turn(loop, 3, site)
        self._steps[name] = self._ranks.from_first(steps_of_turn(self._step_s[name]))
        self._found[name] = {"peak_mb": peak}

    def _measure(self, until: float) -> None:
        rounds = 0
        round_s = sum(self._steps[name] * self._step_s[name] for name in self._loops)
        while self._loops and self._ranks.from_first(has_time(rounds, time.time(), round_s, until)):
            began = time.time()
            for name in rotated(list(self._loops), rounds):
                self._ranks.note(self._case.key, name, "measuring")
                self._variants[name].kernels.ask()
                try:
                    self._turns[name].append(take_turn(self._loops[name], self._steps[name], self._site))
                except Exception as error:  # noqa: BLE001 - as above
                    self._drop(name, error)
            rounds, round_s = rounds + 1, time.time() - began
            self._publish(complete=False)

    def _drop(self, name: str, error: Exception) -> None:
        """Go on without a variant that has raised, if this process can."""
        traceback.print_exc()
        self._found[name] = {"error": describe(error)}
        loop = self._loops.pop(name, None)
        self._publish(complete=False)
        if self._site.size > 1:
            raise VariantFailed from error
        error.__traceback__ = None  # it holds the tensors of the loop
        if loop is not None:
            with suppress(Exception):
                loop.close()  # type: ignore[attr-defined]
        if self._site.is_cuda:
            try:
                torch.cuda.synchronize()
            except RuntimeError as broken:
                raise VariantFailed(describe(broken)) from error

    def _publish(self, complete: bool) -> dict[str, Any]:
        for name in self._loops:
            if self._turns[name]:
                self._found[name] |= summary(self._turns[name], self._steps[name])
        variants = {name: self._found[name] for name in self._variants if name in self._found}
        row = {**self._row, "complete": complete, "variants": variants}
        self._ranks.publish(self._number, row)
        return row

    def _close(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # the process ends
        self._ranks.note(self._case.key, "", "closing")
        while self._loops:
            name, loop = self._loops.popitem()
            try:
                loop.close()  # type: ignore[attr-defined]
            except Exception:  # noqa: BLE001 - its figures are complete; what it raises goes to the log
                print(f"closing {name}:", file=sys.stderr)
                traceback.print_exc()
            del loop
        gc.unfreeze()
        gc.collect()
        if self._site.is_cuda:
            torch.cuda.empty_cache()


def describe(error: BaseException) -> str:
    """The type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else '(no message)'}"


def _nccl_version() -> str | None:
    """What this process has loaded, which is not what torch was built with if another library was preloaded."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    except (OSError, AttributeError):
        return None


def _in_words(row: dict[str, Any], seconds: float) -> str:
    parts = []
    for name, found in row["variants"].items():
        result = f"{found['ms']:.2f} ms" if "ms" in found else found.get("error") or found.get("skipped")
        parts.append(f"  {name}: {result}")
    ranks = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}"
    return "\n".join([f"{row['case']}, {ranks} over {row['backend']}, took {seconds:.0f} s", *parts])


def _connect(spec: Spec, rank: int) -> tuple[Site, Ranks]:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if spec.device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{spec.folder}/store", spec.size)
    store.set_timeout(TIMEOUT)
    bound = device if spec.backend == "nccl" else None
    dist.init_process_group(
        spec.backend, store=dist.PrefixStore("group", store), rank=rank, world_size=spec.size, device_id=bound, timeout=TIMEOUT
    )
    return Site(device, rank, spec.size), Ranks(spec, rank, dist.PrefixStore("ranks", store))


def main() -> NoReturn:
    spec, rank = Spec.read(sys.argv[1]), int(sys.argv[2])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic kernels need, for all variants alike
    ranks = Ranks(spec, rank, dist.HashStore())
    code = 0
    try:
        ranks.note("", "", "starting")
        site, ranks = _connect(spec, rank)
        known = {case.key: case for case in cases(spec.device_type)}
        for number, key in enumerate(spec.cases):
            now = time.time()
            until = now + share_of(spec.until - now, number, len(spec.cases))
            row = CaseRun(known[key], number, spec, site, ranks).run(until)
            if rank == 0:
                print(_in_words(row, time.time() - now), flush=True)
    except BaseException as error:  # noqa: BLE001 - the supervisor reads it
        traceback.print_exc()
        ranks.failed(error.__cause__ or error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's DdpReducer may deadlock when the last owner of a gloo group is destroyed


def write_spec(spec: Spec) -> str:
    """Returns the path of the file that the ranks read."""
    path = Path(spec.folder, "spec.json")
    path.write_text(json.dumps(asdict(spec)))
    return str(path)


if __name__ == "__main__":
    main()
