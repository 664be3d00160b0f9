"""Small models that between them use every path of the engine, and seeded data for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def data(samples: int = 40) -> TensorDataset:
    """Rows of 12 numbers in 4 classes."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(samples, 12, generator=generator), torch.randint(0, 4, (samples,), generator=generator))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class CNN(nn.Module):
    """Convolutions, channels_last weights and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
        )
        self.body.to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 3, 4)).mean((2, 3)))


class Transformer(nn.Module):
    """Embedding tied to the head, attention, layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 19)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 7).long() % 19
        return self.head(self.encoder(self.embed(tokens))).mean(1)[:, :4]


class UnusedBranch(nn.Module):
    """``self.unused`` never takes part; ``self.sometimes`` only where the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.used = MLP()
        self.sometimes = nn.Linear(12, 4)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        return self.used(x) + self.sometimes(x) if branch else self.used(x)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(12, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.single(x))
        h = torch.tanh(self.wide(h.double())).float()
        return self.head((h.to(torch.complex64) * self.phase).abs())


class Wide(nn.Module):
    """Parameters above 64 KB, which are scaled as they are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 1500), nn.Tanh(), nn.Linear(1500, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS: dict[str, type[nn.Module]] = {
    "wide": Wide,
    "mlp": MLP,
    "cnn": CNN,
    "transformer": Transformer,
    "unused": UnusedBranch,
    "mixed": MixedDtypes,
}

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """The global batch of one step: the same everywhere."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(samples, 12, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def part(tensor: Tensor, rank: int, size: int) -> Tensor:
    return tensor.chunk(size)[rank]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def digest(model: nn.Module) -> bytes:
    """Every bit of parameters and buffers."""
    import hashlib

    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode())
        sha.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return sha.digest()
