"""Tables that the host computes from literals alone are kept on the device that reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.capture import tables
from fusewright.capture.capture import through_aot
from fusewright.capture.tables import host_tables


def positions(size: int = 3) -> torch.Tensor:
    """The index of relative positions, as vision models compute it in place, on the host."""
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
    relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    relative[..., 0] += size - 1
    relative[..., 1] += size - 1
    relative[..., 0] *= 2 * size - 1
    return relative.sum(-1)


def held(gm: GraphModule) -> list[torch.Tensor]:
    return [n.meta["val"] for n in gm.graph.find_nodes(op="get_attr")]


def devices(gm: GraphModule) -> set[str]:
    vals = (n.meta.get("val") for n in gm.graph.nodes)
    return {v.device.type for v in vals if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[positions()],
        lambda x: torch.ops.aten.index_put(x, [positions()], x.sum(), True),
        lambda x: x[:, positions() % 2],
        lambda x: x[:9] + torch.arange(9).double().cos()[:, None].to(x.device, x.dtype),
        lambda x: x[torch.tensor([3, 0, 3])],
        lambda x: F.embedding((torch.arange(512) - torch.arange(512)[:, None]).abs().clamp(max=24).to(x.device), x),
    ],
)
def test_nothing_of_the_host_is_left(fn: Any) -> None:
    x = torch.empty(25, 2, device="meta")
    gm = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(x)
    assert devices(gm) == {"cpu", "meta"}
    host_tables(gm.graph)
    gm.recompile()
    assert devices(gm) == {"meta"} and len(held(gm)) == 1
    assert gm(x).shape == fn(x).shape


@pytest.mark.parametrize("table", [lambda: torch.arange(20)[::2], lambda: torch.arange(3).expand(4, 3)])
def test_a_copy_has_the_strides_that_it_is_said_to_have(table: Any) -> None:
    """The copy of a tensor with gaps, or with elements at one address, is dense."""
    gm = make_fx(torch.func.functionalize(lambda x: x[table()]), tracing_mode="fake")(torch.empty(25, 2, device="meta"))
    host_tables(gm.graph)
    (node,) = gm.graph.find_nodes(op="get_attr")
    assert node.meta["val"].stride() == getattr(gm, node.target).stride()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x[positions()], positions()),  # the caller may write to it
        lambda x: x[torch.randint(0, 25, (4,))],
        lambda x: x[torch.arange(3_000_000) % 25],  # more than 16 MiB
        lambda x: positions().to(x.device),
    ],
)
def test_what_the_caller_sees_or_chance_decides_stays(fn: Any) -> None:
    gm = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(torch.empty(25, 2, device="meta"))
    host_tables(gm.graph)
    assert "cpu" in devices(gm)


def is_float(node: Node) -> bool:
    """Tensors of floats pass for those of another device, so that a graph can run."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()


@pytest.mark.usefixtures("fresh_dynamo")
def test_plans_for_other_tables_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan reads the table that its own graph holds, also where it comes from the cache."""
    monkeypatch.setattr(tables, "_is_elsewhere", is_float)
    x = torch.randn(25, 2)
    for shift in (1, 2):

        def fn(x: torch.Tensor, shift: int = shift) -> torch.Tensor:
            return x[(positions() + shift) % 25] * 2

        with torch.no_grad():
            assert torch.equal(torch.compile(fn, backend="x86_onednn")(x), fn(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_saves_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[Node]] = {}

    def keep(aten: GraphModule, phase: str, constants: Any, mode: str) -> Any:
        found[phase] = list(aten.graph.nodes)
        return lambda args: aten(*args)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return through_aot(gm, inputs, keep, "test")

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[positions()].square()

    monkeypatch.setattr(tables, "_is_elsewhere", is_float)
    ours, theirs = (torch.linspace(-1, 1, 50).reshape(25, 2).requires_grad_() for _ in range(2))
    got, wanted = torch.compile(fn, backend=backend)(ours), fn(theirs)
    got.sum().backward()
    wanted.sum().backward()
    assert torch.equal(got, wanted) and torch.equal(ours.grad, theirs.grad)
    for nodes in found.values():
        tables_left = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor) and not is_float(n)]
        assert [n.op for n in tables_left] == ["get_attr"]
