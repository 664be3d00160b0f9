"""Trains as the official tutorial for torchrun does: a Trainer with snapshots and a DistributedSampler. Torch's class, then ours.

Rank 0 prints the losses of both. KILL_AT_EPOCH: rank 1 kills itself in that epoch with our class, before the first restart.
"""

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep

MAX_EPOCHS, SAVE_EVERY = 4, 1


class Trainer:
    def __init__(self, ddp_class, model, train_data, optimizer, snapshot_path):
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.snapshot_path, self.epochs_run, self.losses = snapshot_path, 0, []
        if snapshot_path.exists():
            snapshot = torch.load(snapshot_path, weights_only=True)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
            self.epochs_run, self.losses = snapshot["EPOCHS_RUN"], snapshot["LOSSES"]
        self.model = ddp_class(self.model)

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def save_snapshot(self, epoch):
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": epoch + 1,
            "LOSSES": self.losses,
        }
        torch.save(snapshot, f"{self.snapshot_path}.new")
        os.replace(f"{self.snapshot_path}.new", self.snapshot_path)

    def train(self, max_epochs, kill_at):
        for epoch in range(self.epochs_run, max_epochs):
            self.train_data.sampler.set_epoch(epoch)
            for batch, (source, targets) in enumerate(self.train_data):
                if (epoch, batch, self.global_rank) == (kill_at, 1, 1) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                self.run_batch(source, targets)
            if self.local_rank == 0 and epoch % SAVE_EVERY == 0:
                self.save_snapshot(epoch)


def main(name, ddp_class, kill_at):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 20), torch.randint(5, (64,)))
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=8, shuffle=False, sampler=DistributedSampler(data))
    trainer = Trainer(ddp_class, model, loader, optimizer, Path(f"snapshot-{name}.pt"))
    trainer.train(MAX_EPOCHS, kill_at)
    return trainer.losses


dist.init_process_group("gloo")
results = {
    "torch": main("torch", DistributedDataParallel, -1),
    "ours": main("ours", lockstep.DistributedDataParallel, int(os.environ.get("KILL_AT_EPOCH", -1))),
}
if int(os.environ["RANK"]) == 0:
    print("losses", json.dumps(results))
dist.destroy_process_group()
