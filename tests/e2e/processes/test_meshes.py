"""One process trains several sharded models, each on its own mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "group"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is without distributed; runs with a build that has it"),
]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def weight_gradient(f: Callable[[Tensor, Tensor], Tensor], wrap: Callable[..., Callable[..., Tensor]]) -> Tensor:
    """The gradient of a weight in the function of it and an input, both distributed over a new mesh, as `wrap` runs it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    w = torch.nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 16).reshape(4, 4), mesh, [Replicate()]))
    out = wrap(lambda x: f(DTensor.from_local(x, mesh, [Replicate()], run_check=False), w))(torch.eye(4))
    out.to_local().square().sum().backward()  # type: ignore[attr-defined]
    found: Tensor = w.grad.full_tensor()  # type: ignore[union-attr]
    return found


def test_a_mesh_that_equals_an_earlier_models() -> None:
    """Torch remembers shardings with the mesh of their first use, which is no input of a later model's graph."""
    from torch.distributed.tensor import Shard

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    def added(x: Tensor, w: Tensor) -> Tensor:
        return x + (x @ w).redistribute(placements=[Shard(0)])  # type: ignore[attr-defined]

    weight_gradient(product, lambda f: f)
    expected = weight_gradient(added, lambda f: f)
    torch.testing.assert_close(weight_gradient(added, lambda f: torch.compile(f, backend="fusewright_null")), expected)
