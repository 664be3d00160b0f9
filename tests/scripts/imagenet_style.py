"""Trains as the ImageNet example does: it starts its own processes by ``mp.spawn``, which meet at ``--dist-url tcp://...``.

It trains with torch's class and then with ours. Rank 0 prints the losses of both.
"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dist-url", required=True)
    parser.add_argument("--world-size", default=1, type=int)
    parser.add_argument("--rank", default=0, type=int)
    args = parser.parse_args()
    ngpus_per_node = 2
    args.world_size = ngpus_per_node * args.world_size
    mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))


def main_worker(gpu, ngpus_per_node, args):
    import lockstep

    args.rank = args.rank * ngpus_per_node + gpu
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    classes = {"torch": nn.parallel.DistributedDataParallel, "ours": lockstep.DistributedDataParallel}
    results = {name: train(ddp_class) for name, ddp_class in classes.items()}
    if args.rank == 0:
        print("losses", json.dumps(results), flush=True)
    dist.destroy_process_group()


def train(ddp_class):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    model = ddp_class(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    dataset = TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(5, (32,)))
    sampler = DistributedSampler(dataset)
    loader, losses = DataLoader(dataset, batch_size=8, sampler=sampler), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for images, target in loader:
            loss = nn.functional.cross_entropy(model(images), target)
            total += torch.tensor([loss.item() * len(target), len(target)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(total)  # AverageMeter.all_reduce
        losses.append((total[0] / total[1]).item())
    return losses


if __name__ == "__main__":
    main()
