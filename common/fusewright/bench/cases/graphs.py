"""Graph networks and a NumPy function: gathers, scatters and short reductions instead of matrix products.

Cases are called `graph:NAME`. Layers take node features [nodes, FEATURES] and edges [2, edges] (source, target) of a random
graph; the k-means step is NumPy code, which `torch.compile` traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fusewright.bench.models import Size
from fusewright.bench.suite import Built, TrainStep, UnknownModel, cast
from fusewright.errors import nearest

PREFIX = "graph"
FEATURES, CLASSES = 128, 64
NODES: dict[Size, int] = {"full": 10_000, "small": 60}
EDGES: dict[Size, int] = {"full": 100_000, "small": 500}
POINTS: dict[Size, int] = {"full": 2_000_000, "small": 3_000}
Fold: TypeAlias = Literal["sum", "mean", "amax"]


class Output(NamedTuple):
    """The result of a layer in training."""

    loss: Tensor


class GCN(nn.Module):
    """The graph convolution of Kipf and Welling (2017): relu(D^-1/2 A D^-1/2 (X W + b))."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        source, target = edges[0], edges[1]
        degree = x.new_zeros(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0]))
        scale = degree.clamp(min=1).rsqrt()
        messages = self.linear(x)[source] * (scale[source] * scale[target])[:, None]
        out = torch.relu(x.new_zeros(x.shape[0], CLASSES).index_add(0, target, messages))
        return _with_loss(out, labels)


class GraphSAGE(nn.Module):
    """The layer of Hamilton, Ying and Leskovec (2017): relu(W_l fold(neighbours) + b + W_r x)."""

    def __init__(self, fold: Fold) -> None:
        super().__init__()
        self.fold = fold
        self.neighbours = nn.Linear(FEATURES, CLASSES)
        self.root = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        source, target = edges[0], edges[1]
        place = target[:, None].expand(-1, x.shape[1])
        folded = torch.zeros_like(x).scatter_reduce(0, place, x[source], self.fold, include_self=False)
        return _with_loss(torch.relu(self.neighbours(folded) + self.root(x)), labels)


def _with_loss(out: Tensor, labels: Tensor | None) -> Tensor | Output:
    return out if labels is None else Output(nn.functional.cross_entropy(out, labels))


def nearest_centroid(points: np.ndarray[Any, Any], centroids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[n, d], [k, d] -> the index [n] of each point's nearest centroid."""
    distances = np.linalg.norm(points[:, None, :] - centroids[None, :, :], axis=2)
    labels: np.ndarray[Any, Any] = np.argmin(distances, axis=1)
    return labels


def _kmeans_step(points: Tensor, centroids: Tensor) -> Tensor:
    return torch.from_numpy(nearest_centroid(points.numpy(), centroids.numpy()))


@dataclass(frozen=True)
class Case:
    """`make()` returns what is called; a `layer` takes a graph and can be trained, others take points."""

    make: Callable[[], Callable[..., Any]]
    layer: bool = True


CASES: dict[str, Case] = {
    "gcn": Case(GCN),
    "sage_sum": Case(lambda: GraphSAGE("sum")),
    "sage_mean": Case(lambda: GraphSAGE("mean")),
    "sage_amax": Case(lambda: GraphSAGE("amax")),
    "kmeans_numpy": Case(lambda: _kmeans_step, layer=False),
}


def is_graph(model: str) -> bool:
    """Whether the name is one of this module's."""
    return model.startswith(f"{PREFIX}:")


def names(train: bool = False) -> list[str]:
    """`graph:NAME` for every case, or for the trainable ones."""
    return [f"{PREFIX}:{name}" for name, case in CASES.items() if case.layer or not train]


def build_graph(ref: str, size: Size = "full", dtype: str = "fp32", seed: int = 0) -> Built:
    """The call for `graph:NAME`. Raises `UnknownModel`."""
    case = _case(ref)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fn = case.make()
        if case.layer:
            args = {"x": torch.randn(NODES[size], FEATURES), "edges": torch.randint(NODES[size], (2, EDGES[size]))}
        else:
            args = {"points": torch.randn(POINTS[size], 3), "centroids": torch.randn(8, 3)}
    return cast(Built(ref, fn, (), args), dtype)


def graph_step(ref: str, size: Size = "full", dtype: str = "fp32", seed: int = 0) -> TrainStep:
    """The training step for `graph:NAME`. Raises `UnknownModel`, also for a case without weights."""
    check(ref, train=True)
    built = build_graph(ref, size, dtype, seed)
    assert built.module is not None
    labels = torch.randint(CLASSES, (NODES[size],), generator=torch.Generator().manual_seed(seed))
    return TrainStep(ref, built.module.train(), {**built.kwargs, "labels": labels}, dtype)


def check(ref: str, train: bool = False) -> None:
    """Raises `UnknownModel`."""
    if not _case(ref).layer and train:
        raise UnknownModel(f"{ref!r} cannot be trained; {nearest(ref, names(train=True))}")


def _case(ref: str) -> Case:
    name = ref.partition(":")[2]
    if name not in CASES:
        raise UnknownModel(f"there is no {ref!r}; {nearest(ref, names())}")
    return CASES[name]
