"""Makes docs/figures.md, and the table of figures in the README, from benchmarks/results/. No figure is typed by hand.

    python -m benchmarks.figures            prints the page
    python -m benchmarks.figures --write    writes the page and the README's table

A benchmark writes results/NAME.json with everything and results/NAME.md with its tables. Sentences quote cells of these
tables. What is typed here are goals and explanations.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "figures.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: made by python -m benchmarks.figures --write -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Result:
    """What one benchmark wrote."""

    name: str

    @property
    def exists(self) -> bool:
        return (RESULTS / f"{self.name}.json").exists()

    @cached_property
    def text(self) -> str:
        text = (RESULTS / f"{self.name}.md").read_text().strip()
        return text.replace("training stands still", "training waits")

    @cached_property
    def data(self) -> Any:
        return json.loads((RESULTS / f"{self.name}.json").read_text())

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The rows of all tables of the text, each by column."""
        found, head = list[dict[str, str]](), list[str]()
        for line in self.text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if not cells:
                head = []
            elif not head:
                head = cells
            elif not set(line) <= set("|-"):
                found.append(dict(zip(head, cells, strict=True)))
        return found

    def cell(self, column: str, *row: str) -> str:
        """The cell in ``column`` of the first row that has all of ``row`` among its cells; without the quartiles behind it."""
        for cells in self.rows:
            if column in cells and all(each in cells.values() for each in row):
                return cells[column].split(" (")[0]
        raise KeyError(f"{self.name}.md has no column {column!r} in a row with {row}")

    def span(self, column: str, buckets: tuple[str, ...]) -> str:
        """ "0.84 to 0.99": the least and the greatest of a column, over the rows of these buckets."""
        values = sorted((float(cells[column]), cells[column]) for cells in self.rows if cells["bucket"] in buckets)
        return f"{values[0][1]} to {values[-1][1]}"


STEP_2, STEP_4, GPU = Result("step-cpu-2-workers"), Result("step-cpu-4-workers"), Result("gpu")
SCALING_2, SCALING_16 = Result("scaling-2-cores"), Result("scaling-16-cores")
EXACT_2, EXACT_16 = Result("exact-2-workers"), Result("exact-2-workers-16-cores")
BUCKET_2, BUCKET_16, HOOKS = Result("allreduce-2-cores"), Result("allreduce-16-cores"), Result("hooks")
HELPER, RECOVERY_GPU = Result("helper-thread-16-cores"), Result("recovery-gpu")
RECOVERY_2, RECOVERY_16 = Result("recovery-2-cores"), Result("recovery-16-cores")
COST, START = Result("cost-2-cores"), Result("start-8-workers")
SAVE_2, SAVE_GPU, FAULTS = Result("checkpoint-2-cores"), Result("checkpoint-gpu"), Result("faults")
MACHINES, LINK, AGENTS = Result("machines-recovery"), Result("machines-link"), Result("machines-agents")
OBSERVE, STRAGGLERS = Result("observe-2-cores"), Result("stragglers")
LARGE, NARROW, CNN = "GPT 124 M, 8x1024 bf16", "48 layers of 256, 1x128 bf16", "CNN like ResNet-50, 64x224x224 bf16"
STALL = "training waits, s (quartiles)"


@dataclass(frozen=True)
class Section:
    """One section of the page: its text, then what the benchmarks wrote."""

    title: str
    text: str
    results: tuple[Result, ...] = ()


def sections() -> list[Section]:
    first = [step(), gpu(), scaling(), helper(), exactness(), bucket(), hook()]
    return [*first, recovery(), machines(), cost(), start(), checkpoints(), recording(), stragglers(), faults()]


def step() -> Section:
    text = """
A whole training step: forward, backward, averaging, optimizer. The variants run interleaved; the table has medians. "Bare" is the
same loop without averaging, so the replicas drift apart: it is the lower bound.
"""
    return Section("A training step", text, (STEP_2, STEP_4))


def gpu() -> Section:
    text = """
The same on a GPU, with the variants that [the GPU page](gpu.md) explains. All variants of a step live in one process and take turns
of a few steps each, in another order in each round. Times are taken between two CUDA events. Peak memory is what a variant adds to
what is there already; the memory of a CUDA graph counts as a whole.

"Captured" steps are replayed as CUDA graphs: forward and backward as one, the optimizer as another. "Deterministic" variants ask
torch for deterministic kernels, as every `Run` with `exact=True` does, and are compared with each other alone. A `Run` gets its
batches from its own loader, the other variants from a list; all batches are on the GPU.
"""
    text += f"""
Two ranks were not run, and parts of the step have changed since these figures were made ([limits](limits.md)). The steps are
those of a worker that is alone: with other workers under `lockstep run`, the host also [waits for the
averages](internals/gradients.md#when-the-host-waits-for-the-gpu), which is not measured.

The host of this machine was slow on that day: the bare loop of the large batch took {GPU.cell("ms (quartiles)", LARGE, "bare")}
ms, and two days before, on another machine of this kind, 24.2 ms (that result was not kept). So the eager variants of the GPTs
and of the narrow model are limited by the host, and differences below 10% between them are noise. Those of the CNN are from few
turns and differ by more without a reason that we know: {GPU.cell("x bare", CNN, "Lockstep Run")} for `Run` beside the bare loop
is a goal that is missed, and the bare loop itself was faster with deterministic kernels than without.

Captured steps depend on the host less. Three of the four take as long as the captured bare step; that of the CNN takes
{GPU.cell("x bare captured", CNN, "Lockstep Run captured")} of it (goal 1.05: missed).

**Some peak memory is wrong:** torch DDP with any kernels shows less than the bare loop in the narrow model
({GPU.cell("peak MB", NARROW, "torch DDP")} against {GPU.cell("peak MB", NARROW, "bare")} MB) and the CNN, which is impossible.
About as much is missing as the gradients of the model before had: probably torch's NCCL group still held them, so that they
counted as memory that is always there, and released them at torch DDP's first exchange. The figure of the small GPT may be too
low for the same reason. The goals of peak memory beside these three figures mean nothing. The benchmark now makes the group
release them first; this has not been run on a GPU.
"""
    return Section("A training step on a GPU", text, (GPU,))


def scaling() -> Section:
    text = f"""
The same work per worker on more workers, compared with the bare loop run by as many processes at the same time. The goal, 95%
with 8 workers, is missed: Lockstep has {SCALING_16.cell("Lockstep", "8")}, torch DDP {SCALING_16.cell("torch DDP", "8")}.
[Communication](internals/communication.md#the-lower-bound) says why.

On 2 cores:

![Weak scaling on 2 cores](../benchmarks/results/scaling-2-cores.svg)

On 16 cores:

![Weak scaling on 16 cores](../benchmarks/results/scaling-16-cores.svg)
"""
    return Section("Weak scaling", text, (SCALING_2, SCALING_16))


def helper() -> Section:
    text = """
With a helper thread (`LOCKSTEP_HELPER_THREAD=on`) each worker adds gradients while its backward goes on. The goal, 1.00 of bare
with 4 workers and 1.05 with 8, is missed: with 4 workers the thread makes no difference beyond the noise, so it is off by default.
With 8 workers it was not measured.
"""
    return Section("A helper thread on idle cores", text, (HELPER,))


def exactness() -> Section:
    of_inexact, of_torch, of_accumulation = "x exact=False", "x torch DDP", "x accumulation"
    text = f"""
A GPT with 25 M parameters.

First, one lane per worker on 2 workers, compared with `exact=False` and with torch DDP. Over shared memory an exact step takes
{EXACT_2.cell(of_inexact, "exact, shm")} of the time of `exact=False` on 2 cores and {EXACT_16.cell(of_inexact, "exact, shm")} on 16
cores (goal 1.03): the owner of a slice adds the same blocks, only in another order. Over gloo it takes
{EXACT_2.cell(of_inexact, "exact, gloo")} and {EXACT_16.cell(of_inexact, "exact, gloo")}, because two collectives and a pass of
our own replace gloo's one; compared with torch DDP that is {EXACT_2.cell(of_torch, "exact, gloo")} and
{EXACT_16.cell(of_torch, "exact, gloo")} (goal 1.0: missed).

Second, four lanes on one worker, compared with gradient accumulation over the same four micro-batches:
{EXACT_2.cell(of_accumulation, "4 lanes, exact")} and {EXACT_16.cell(of_accumulation, "4 lanes, exact")} (goal 1.05).

Third, how long a shard takes to start in the middle of a long epoch.
"""
    return Section("What exactness costs", text, (EXACT_2, EXACT_16))


def bucket() -> Section:
    of_memcpy, faster, large = "shm / memcpy", "gloo / shm", ("25 MB", "100 MB")
    text = f"""
One bucket averaged over gloo and over shared memory, and the memcpy of the same bytes, which is the lower bound. From 25 MB
on, shared memory takes {BUCKET_2.span(of_memcpy, large)} of the memcpy on 2 cores and {BUCKET_16.span(of_memcpy, large)} on 16
cores. It is {BUCKET_2.span(faster, large)} times as fast as gloo on 2 cores and {BUCKET_16.span(faster, large)} times on 16
cores (goal 4.5: missed). With 2 workers on 2 cores it is {BUCKET_2.cell(faster, "2", "4 KB")} times as fast at 4 KB and
{BUCKET_2.cell(faster, "2", "1 MB")} times at 1 MB (goals 20 and 6: met).
"""
    return Section("Averaging one bucket", text, (BUCKET_2, BUCKET_16))


def hook() -> Section:
    text = "What the hooks on parameters add to the backward of a model with many small parameters."
    return Section("What a hook costs", text, (HOOKS,))


def recovery() -> Section:
    text = """
From kill -9 of one worker to the next committed step of the others, and until the replacement works again. A step takes 20 ms.
The goal is 0.1 s, 0.3 s at worst.

torchft has no supervisor: the benchmark restarts its processes, which import torch anew, and its heartbeats are tuned (with
its defaults the others waited for seconds in a trial of three kills; with version 0.2.0 they died too). torchrun restarts all
workers; here its restarts failed again and again ("connection refused" from gloo).
"""
    if not RECOVERY_GPU.exists:
        return Section("Recovery from a lost worker", text, (RECOVERY_2, RECOVERY_16))
    text += """
The last table is of workers that share one GPU and talk over NCCL. The goals there are 0.5 s to the next step, and 4 s until the
replacement is back: it starts CUDA.
"""
    return Section("Recovery from a lost worker", text, (RECOVERY_2, RECOVERY_16, RECOVERY_GPU))


def machines() -> Section:
    commit, joined, told = "next commit, median s", "all have joined", "all know of a death"
    sent, time, link = "bytes x torch DDP", "time x torch DDP", ("1 Gbit/s", "Lockstep, two levels")
    text = f"""
Machines are network namespaces on one machine, connected by a bridge.

**A lost machine,** 3 machines with 2 workers each. If all packets of and to a machine are lost, the others commit the next step
after {MACHINES.cell(commit, "machine cut off silently")} s (goal 2.5: the heartbeat timeout of 2 s and 0.5 s). After the death of
an agent they do so after {MACHINES.cell(commit, "agent killed")} s (goal 0.3).

**Two levels,** 2 machines with 2 workers each: workers of one machine add up their gradients in shared memory, and the sums travel
between the machines. At 1 Gbit/s the link carries {LINK.cell(sent, *link)} of the bytes of torch DDP over gloo (goal 0.7), and a
step takes {LINK.cell(time, *link)} of its time (goal 0.75). The model has 25 M parameters and little to compute.

**A thousand agents** join a head within {AGENTS.cell("median s", joined)} s (goal 2), and the death of one worker is known to all
others after {AGENTS.cell("median s", told)} s (goal 0.2). Head and agents share the cores of one machine.
"""
    return Section("Several machines", text, (MACHINES, LINK, AGENTS))


def cost() -> Section:
    text = """
The same script under torchrun and under `lockstep run`, run after run. The goal is 1% of a step; the noise of this machine is
larger. Nothing in a step talks to the agent.
"""
    return Section("What recovery costs while nothing fails", text, (COST,))


def start() -> Section:
    text = "How long it takes until eight workers on 2 cores have imported torch, and have made their first optimizer."
    return Section("Start-up", text, (START,))


def checkpoints() -> Section:
    stall_s, copy_s = (median(SAVE_GPU.data["stalls_s"][name]) for name in ("Lockstep", "memcpy"))
    loss_s = float(SAVE_GPU.cell("ms, median", "a loss.item() right after the stall")) / 1e3
    of_memcpy, of_reading, resume = "x memcpy", "x reading", "Lockstep: verify, load and resume"
    text = f"""
**How long training waits** for a checkpoint of 1 GB. The lower bound is the copy of the bytes. One worker waits
{SAVE_2.cell(STALL, "Lockstep")} s, which is {SAVE_2.cell(of_memcpy, "Lockstep")} of the memcpy measured beside it (goal 1.3).
The second goal, half of the better of `torch.save` and `async_save`, is missed with one worker and cannot be met: `async_save`
itself takes {SAVE_2.cell(of_memcpy, "async_save")} memcpys, and half of that is less than the copy.

On the GPU, tensors are copied on the device first, and go to the host while training continues: the host waits for
{SAVE_GPU.cell(of_memcpy, "Lockstep")} of the time that a copy to pinned memory takes (goal 1.3: met). But a `loss.item()` right
after that shares the way to the host with the copies, and takes {1e3 * loss_s:.1f} ms: a loop that reads its loss there waits
{(stall_s + loss_s) / copy_s:.2f} of that time in all (goal 1.3: missed).

**How long a resume takes,** with every byte verified: {SAVE_2.cell(of_reading, resume)} times as long as reading the files on
2 cores, {SAVE_GPU.cell(of_reading, resume)} times on the GPU machine (goal 1.2). Reading into new memory is slow on the 2-core
machine: into memory that was touched before it takes {SAVE_2.cell("s, median", "reading them into touched memory")} s.

**How long it takes to compare replicas** (goal: 1% of training time).
"""
    return Section("Checkpoints", text, (SAVE_2, SAVE_GPU))


def recording() -> Section:
    ratio = "with / without, median (quartiles)"
    text = f"""
Every worker switches its recorder on and off every few steps, in one run. With 2 workers a step with recording takes
{OBSERVE.cell(ratio, "2")} times as long as one without, with 4 workers {OBSERVE.cell(ratio, "4")}
(goal 1.005: missed with 4 workers on 2 cores). The noise of this machine is about as large, so the CPU time of the recorder
itself is measured too. "Main thread" is what training waits for. Besides, the agent uses up to 0.3% of a core for stragglers.
"""
    return Section("What recording costs", text, (OBSERVE,))


def stragglers() -> Section:
    every = "all"
    text = f"""
Real runs in which one worker is slow for 30 steps, by 5% or 20% of a step, in its loader or its computation, or because it is
stopped (SIGSTOP) or its link is slow (`tc`). A step takes 90 ms, and its work is mostly a wait, so that the workers do not compete
for the cores. In {STRAGGLERS.cell("right within 20 steps", every)} of {STRAGGLERS.cell("cases", every)}
cases the run itself, while it went on, named the right worker and cause before the 21st slow step began (goal 95%). "Price" is
how much faster the run would be without the delay, as the run says, compared with a second run without it (goal: within 3
percentage points). No false alarm in 224 windows is less than 1.4% with a certainty of 95%; the goal is 1%.
"""
    return Section("Naming the straggler", text, (STRAGGLERS,))


def faults() -> Section:
    data = FAULTS.data
    schedules, chance, forged = data["schedules"], data["checkpoints"]["by chance"], data["checkpoints"]["forged"]
    by_chance, wrongly = sum(chance.values()), chance["loaded wrongly"] + forged["loaded wrongly"]
    total = by_chance + forged["cases"]
    causes = "\n".join(f"- {count}: {cause}" for cause, count in schedules["failures"].items())
    text = f"""
**Recovery under random faults.** `tests/chaos.py` plays schedules of kills, SIGTERM, stops, pauses, exceptions and slow workers,
of scaling, and of killing everything and starting again, against real runs: over shared memory, gloo and two levels, with
checkpoints, loader processes, a GradScaler, several loops and code between them. Each run must end with the bits of an undisturbed
run, with every sample committed once, the same logged values, the right exit code, and nothing left behind. `make test`
plays 25 schedules, `make chaos` a thousand (hours on 2 cores). `tests/machine_chaos.py` does the same to runs on three machines:
machines that are cut off or stopped, agents and heads that are killed and started again; 10 schedules in `make test`, 200 in
`make chaos`. On {data["machine"]["date"]}, {schedules["run"]:,} schedules
(`{schedules["command"]}`, {schedules["machine"]["cores"]} cores) were run; no run ended with wrong bits, and {schedules["failed"]}
failed for other reasons:

{causes}

**Damaged checkpoints.** `python -m tests.fuzz 0 {total}` damages a checkpoint {total:,} times and loads it. {by_chance:,} were
damaged by chance: {chance["detected"]:,} were detected, {chance["without a manifest"]} had no manifest left and so were no
checkpoint, {chance["harmless"]} were changed harmlessly. {forged["cases"]} had a manifest that was forged with a right digest;
{forged["taken"]} of these was loaded, because everything in it fitted together. {wrongly or "None"} was loaded wrongly.
"""
    return Section("Random faults and damaged checkpoints", text)


def page() -> str:
    parts = [
        "<!-- Made by python -m benchmarks.figures --write from benchmarks/results/. Do not edit. -->",
        "# Figures",
        "Only ratios within one table mean something; absolute times are the machine's. Each table says which command made it,\n"
        "and on which machine. The results are in `benchmarks/results/`.",
    ]
    for section in sections():
        parts += [f"## {section.title}", section.text.strip(), *(result.text for result in section.results)]
    return "\n\n".join(parts) + "\n"


def table() -> str:
    """The README's six figures: (what, ours, others')."""
    step, gpt = "ms (quartiles)", "GPT 25 M, 4x64"
    exact, commit, back = ("x exact=False", "exact, shm"), "next commit, median s", "replacement back, median s"
    ours, torchft, torchrun = ("2", "lockstep run"), ("2", "torchft"), ("2", "torchrun")
    rows = [
        (
            "training step, GPT of 25 M parameters, 2 workers on 2 cores",
            f"{STEP_2.cell(step, gpt, 'Lockstep, shm')} ms",
            f"torch DDP {STEP_2.cell(step, gpt, 'torch DDP')} ms",
        ),
        gpu_row(),
        (
            "weak scaling, 8 workers on 16 cores",
            SCALING_16.cell("Lockstep", "8"),
            f"torch DDP {SCALING_16.cell('torch DDP', '8')}",
        ),
        (
            "exact sums, 2 workers with one lane each, on 2 and on 16 cores",
            f"{EXACT_2.cell(*exact)} and {EXACT_16.cell(*exact)}",
            "`exact=False`: 1",
        ),
        (
            "`kill -9` of one of 2 workers: next step; replacement at work",
            f"{RECOVERY_2.cell(commit, *ours)} s; {RECOVERY_2.cell(back, *ours)} s",
            f"torchft {RECOVERY_2.cell(commit, *torchft)} s; {RECOVERY_2.cell(back, *torchft)} s. "
            f"torchrun {RECOVERY_2.cell(commit, *torchrun)}",
        ),
        (
            "checkpoint of 1 GB: training waits",
            f"{SAVE_2.cell(STALL, 'Lockstep')} s",
            f"`async_save` {SAVE_2.cell(STALL, 'async_save')} s, `torch.save` {SAVE_2.cell(STALL, 'torch.save')} s",
        ),
    ]
    return "\n".join(["| | Lockstep | others |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def gpu_row() -> tuple[str, str, str]:
    step, large, small = "ms (quartiles)", ("GPT 124 M, 8x1024 bf16", "1"), ("GPT 124 M, 1x256 bf16", "1")
    ours, others = "Lockstep Run captured", "torch DDP, deterministic"
    return (
        "training step, GPT of 124 M parameters, one worker on an H200 with a slow host, 8x1024 and 1x256 tokens",
        f"captured {GPU.cell(step, *large, ours)} and {GPU.cell(step, *small, ours)} ms",
        f"torch DDP {GPU.cell(step, *large, others)} and {GPU.cell(step, *small, others)} ms, not captured; "
        "the host is most of the difference at 8x1024",
    )


def with_table(readme: str) -> str:
    """The README with its table of figures made anew."""
    before, found, rest = readme.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the README has no {BEGIN!r} ... {END!r}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/figures.md and the README's table")
    if parser.parse_args().write:
        PAGE.write_text(page())
        README.write_text(with_table(README.read_text()))
    else:
        print(page())


if __name__ == "__main__":
    main()
