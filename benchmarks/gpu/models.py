"""The training steps that are measured: a model, its data, its loss and its optimizer. Knows nothing of averaged gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from examples.gpt import GPT, GPTConfig
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
BATCHES = 4  # different batches that every variant takes in turn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with BatchNorm, beside a shortcut."""

    def __init__(self, inside: int, width: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride=stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class CNN(nn.Module):
    """A ResNet of bottleneck blocks. ``blocks=(3, 4, 6, 3), width=64`` has the size of ResNet-50.

    Strided convolutions take the place of max pooling, whose backward has no deterministic kernel.
    """

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)
        layers, inside = list[nn.Module](), width
        for stage, count in enumerate(blocks):
            narrow = width << stage
            for number in range(count):
                layers.append(Bottleneck(inside, narrow, 4 * narrow, 2 if stage and not number else 1))
                inside = 4 * narrow
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.down(F.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """One training step. ``samples``: the batch of one rank."""

    key: str
    name: str
    samples: int
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[nn.Module, bool], torch.optim.Optimizer]
    """Makes the optimizer of a model; the flag says whether it must be fit for a CUDA graph."""
    is_large: bool = False
    """Whether the GPU is busy all the time, so that the eager step should cost hardly more than the bare one."""
    is_launch_bound: bool = False
    """Whether the GPU waits for the host, so that a captured step should be several times as fast."""


def _adamw(model: nn.Module, in_graph: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=in_graph)


def _sgd(model: nn.Module, in_graph: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-4, fused=True)


def _gpt(key: str, name: str, config: GPTConfig, samples: int, **kind: Any) -> Case:
    return Case(
        key,
        name,
        samples,
        build=lambda: GPT(config),
        batch=lambda count: (torch.randint(config.vocab, (count, config.context + 1)),),
        loss=lambda model, batch: model(*batch),
        optimizer=_adamw,
        **kind,
    )


def _cnn(key: str, name: str, blocks: tuple[int, ...], width: int, classes: int, pixels: int, samples: int, **kind: Any) -> Case:
    def batch(count: int) -> Batch:
        images = torch.randn(count, 3, pixels, pixels).to(memory_format=torch.channels_last)
        return images, torch.randint(classes, (count,))

    return Case(
        key,
        name,
        samples,
        build=lambda: CNN(blocks, width, classes).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        batch=batch,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1]),
        optimizer=_sgd,
        **kind,
    )


def _gpt_config(context: int) -> GPTConfig:
    return GPTConfig(vocab=50304, context=context, layers=12, heads=12, width=768)


GPU_CASES = [
    _gpt("gpt-large", "GPT 124 M, 8x1024 bf16", _gpt_config(1024), 8, is_large=True),
    _gpt("gpt-small", "GPT 124 M, 1x256 bf16", _gpt_config(256), 1, is_launch_bound=True),
    _gpt(
        "narrow",
        "48 layers of 256, 1x128 bf16",
        GPTConfig(vocab=512, context=128, layers=48, heads=4, width=256),
        1,
        is_launch_bound=True,
    ),
    _cnn("cnn", "CNN like ResNet-50, 64x224x224 bf16", (3, 4, 6, 3), 64, 1000, 224, 64, is_large=True),
]
TINY_CASES = [
    _gpt("gpt-large", "tiny GPT, 4x16", GPTConfig(vocab=64, context=16, layers=2, heads=2, width=32), 4, is_large=True),
    _gpt("gpt-small", "tiny GPT, 1x8", GPTConfig(vocab=64, context=8, layers=2, heads=2, width=32), 1, is_launch_bound=True),
    _gpt("narrow", "6 layers of 16, 1x8", GPTConfig(vocab=32, context=8, layers=6, heads=2, width=16), 1, is_launch_bound=True),
    _cnn("cnn", "tiny CNN, 4x32x32", (1, 1), 8, 10, 32, 4, is_large=True),
]


def cases(device_type: str) -> list[Case]:
    """The cases of this kind of device: tiny ones on a CPU, which only show that everything runs."""
    return GPU_CASES if device_type == "cuda" else TINY_CASES
