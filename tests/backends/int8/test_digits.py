"""Accuracy on real data: a small CNN and a small transformer, trained here on scikit-learn's 1,797 digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")
pytest.importorskip("sklearn", reason="scikit-learn, which brings the digits, is of the extra `test`")

from sklearn import datasets

import fusewright

pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "one_thread"), pytest.mark.slow]

DROP = 0.005
"""The largest loss of top-1 accuracy that 8 bits may cause."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: layers of a few thousand multiplications are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Patches(nn.Module):
    """A transformer over the 16 patches of a digit."""

    def __init__(self, d: int = 48) -> None:
        super().__init__()
        self.cut, self.place = nn.Conv2d(1, d, 2, 2), nn.Parameter(torch.randn(1, 16, d) * 0.02)
        layer = [nn.TransformerEncoderLayer(d, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layer), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = datasets.load_digits(return_X_y=True)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[mixed].view(-1, 1, 8, 8) / 16, torch.tensor(labels)[mixed]


@cache
def trained(make: Callable[[], nn.Module], epochs: int) -> nn.Module:
    """Train the model for some epochs on the first 1,000 digits."""
    torch.manual_seed(0)
    model, (x, y) = make(), digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for k in range(0, 1000, 50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[k : k + 50]), y[k : k + 50]).backward()
            optimizer.step()
    return model.eval()


def top1(model: Callable[[Tensor], Tensor]) -> float:
    """Top-1 accuracy on the 797 held-out digits."""
    x, y = digits()
    with torch.no_grad():
        return float((model(x[1000:]).argmax(1) == y[1000:]).float().mean())


@pytest.mark.parametrize("recipe", ["static", "dynamic", "weight_only"])
@pytest.mark.parametrize(("make", "epochs"), [(cnn, 4), (Patches, 10)], ids=["cnn", "transformer"])
def test_8_bits_cost_at_most_half_a_point(make: Callable[[], nn.Module], epochs: int, recipe: str) -> None:
    model = trained(make, epochs)
    before = top1(model)
    assert before > 0.85  # an untrained model would lose nothing
    quantized = fusewright.quantize(model, list(digits()[0][:200].split(50)), recipe)
    compiled = torch.compile(quantized, backend="x86_int8", options={"strict": True})
    assert top1(compiled) >= before - DROP
