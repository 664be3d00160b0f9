"""The main job: a small GPT learns Python's own standard library, character by character.

    python examples/train_gpt.py                                     one worker
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py   two workers, one model

No download. Every worker draws its own crops; gradients are averaged, so all hold the same model.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from gpt import GPT, GPTConfig

import lockstep


def main() -> None:
    options = read_options()
    world = lockstep.World.detect()
    device = world.device()
    config = GPTConfig()
    torch.manual_seed(0)
    model = lockstep.replicate(GPT(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options.lr, total_steps=options.steps, pct_start=0.1)
    text = standard_library()
    draw = torch.Generator().manual_seed(1 + world.rank)  # each worker its own part of the batch
    per_worker = max(1, options.batch // world.size)
    if world.is_main:
        count = sum(p.numel() for p in model.parameters())
        print(f"{count / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of Python source, {world}", flush=True)
    progress = Progress(options.steps, per_worker * world.size * config.context, shown=world.is_main)
    for step in range(options.steps):
        starts = torch.randint(len(text) - config.context - 1, (per_worker,), generator=draw)
        tokens = torch.stack([text[s : s + config.context + 1] for s in starts]).long().to(device)
        loss = model(tokens)
        loss.backward()  # gradients leave averaged over all workers
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.show(step + 1, loss)
    if world.is_main:
        print(f"\nA sample from the model:\n{sample(model, config, device)}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer updates (default 300)")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step over all workers (default 32)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default 0.004)")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1 or not options.lr > 0:
        parser.error("--steps, --batch and --lr must be positive")
    return options


def standard_library() -> torch.Tensor:
    """The .py files beside this interpreter as one tensor of character codes below 128."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in folder.rglob("*.py") if not {"site-packages", "test", "tests", "idlelib"} & set(p.parts))
    raw = b"\n".join(p.read_bytes() for p in files)
    return torch.frombuffer(bytearray(byte for byte in raw if byte < 128), dtype=torch.uint8)


class Progress:
    """A line that moves on a terminal; a line now and then in a pipe."""

    def __init__(self, steps: int, characters_per_step: int, shown: bool) -> None:
        self.steps, self.per_step, self.shown = steps, characters_per_step, shown
        self.live = sys.stdout.isatty()
        self.began = self.marked = time.perf_counter()
        self.average = 0.0

    def show(self, step: int, loss: torch.Tensor) -> None:
        if not self.shown:
            return
        self.average = loss.item() if step == 1 else 0.95 * self.average + 0.05 * loss.item()
        now = time.perf_counter()
        last = step == self.steps
        if not last and (now - self.marked < 0.1 if self.live else step % max(1, self.steps // 20) and step != 1):
            return
        self.marked = now
        elapsed = now - self.began
        rate = step * self.per_step / elapsed
        line = f"step {step:4d}/{self.steps}  loss {self.average:.3f}  {rate:7.0f} characters/s  {elapsed:5.1f} s"
        print(f"\r{line}" if self.live else line, end="" if self.live and not last else "\n", flush=True)


@torch.no_grad()
def sample(model: GPT, config: GPTConfig, device: torch.device, length: int = 200) -> str:
    draw = torch.Generator(device).manual_seed(0)
    tokens = torch.tensor([[ord(c) for c in "def "]], device=device)
    for _ in range(length):
        logits = model.logits(tokens[:, -config.context :])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(-1), 1, generator=draw).view(1, 1)], 1)
    return "".join(chr(c) for c in tokens[0].tolist())


if __name__ == "__main__":
    main()
