"""A small GPT learns the source of Python's standard library, character by character. Nothing is downloaded.

    python examples/train_gpt.py                       one worker
    lockstep run -n 2 examples/train_gpt.py            two workers; kill one, and the training continues
    lockstep run -n 2 examples/train_gpt.py --checkpoint checkpoints    kill all, and the same command continues

With --lanes 4 the result has the same bits on 1, 2, 3 and 4 workers.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from torch.utils.data import Dataset

import lockstep


class Crops(Dataset[torch.Tensor]):
    """``count`` random crops of a text. Run seeds the random generators for each index, so it gives the same crop on any worker."""

    def __init__(self, text: torch.Tensor, length: int, count: int) -> None:
        self.text, self.length, self.count = text, length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(torch.randint(len(self.text) - self.length, ()))
        return self.text[start : start + self.length].long()


def main() -> None:
    options = read_options()
    world = lockstep.World.detect()
    device = world.device()
    config = GPTConfig()
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options.lr, total_steps=options.steps, pct_start=0.1)
    text = standard_library()
    run = lockstep.Run(
        model,
        optimizer,
        schedule,
        lanes=options.lanes,
        checkpoint=options.checkpoint,
        every="30 s",
        log_every=5,
    )
    if run.is_main:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of Python source, {run.size} worker{'s' * (run.size > 1)}",
            flush=True,
        )
    crops = Crops(text, config.context + 1, options.steps * options.batch)
    for tokens in run.shard(crops, global_batch=options.batch):
        loss = model(tokens.to(device))
        loss.backward()  # in the last lane of the step, gradients are averaged over all lanes
        run.log(loss=loss)
        if run.averaged:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if world.source == "alone" and run.every(20):  # `lockstep run` shows the progress itself
            print(f"step {run.step} of {options.steps}, loss {run.logged['loss']:.3f}", flush=True)
    if run.is_main:
        print(f"\nA sample from the model:\n{sample(model, config, device)}")
    run.close()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer updates (default 300)")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step over all workers (default 32)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default 0.004)")
    parser.add_argument("--lanes", type=int, help="slices of every batch: equal lanes give equal bits (default: one per worker)")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save there every 30 s, and resume from there")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1 or not options.lr > 0:
        parser.error("--steps, --batch and --lr must be positive")
    return options


def standard_library() -> torch.Tensor:
    """Return this Python's standard library, all .py files, as one tensor of character codes below 128."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in folder.rglob("*.py") if not {"site-packages", "test", "tests", "idlelib"} & set(p.parts))
    raw = b"\n".join(p.read_bytes() for p in files)
    return torch.frombuffer(bytearray(byte for byte in raw if byte < 128), dtype=torch.uint8)


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
