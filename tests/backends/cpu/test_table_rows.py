"""Ops that a CPU backend's table refuses may still be in its regions, as eager's own calls or for other rows: no row of the
table may claim them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusewright.interface import Device, Fragment, Value
from fusewright_acl.backend import GravitonAcl
from fusewright_cpu.onednn.fused import OneDnnBackend
from fusewright_int8.backend import X86Int8
from fusewright_onednn.backend import X86OneDnn
from tests.fragments import Context, Sketch, by_preference

X86 = Device("cpu", "avx512_vnni", frozenset({"avx512_vnni", "mkldnn_bf16"}))
ARM = Device("cpu", "neoverse-v1", frozenset({"neon", "sve", "bf16", "acl"}))
ON: dict[type[OneDnnBackend], Device] = {X86OneDnn: X86, X86Int8: X86, GravitonAcl: ARM}


def gapped(*shape: int) -> torch.Tensor:
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


def product_of_gapped(g: Sketch) -> Value:
    return g.op("mm", g.input(torch.randn(3, 6)), g.input(gapped(6, 4)))


def product_of_empty(g: Sketch) -> Value:
    return g.op("mm", g.input(torch.randn(3, 0)), g.input(torch.randn(0, 4)))


def scaled_addmm(g: Sketch) -> Value:
    return g.op("addmm", g.input(torch.randn(3, 4)), g.input(torch.randn(3, 6)), g.input(torch.randn(6, 4)), beta=2)


def empty_linear(g: Sketch) -> Value:
    return g.op("linear", g.input(torch.randn(0, 6)), g.input(torch.randn(4, 6)))


def empty_conv(g: Sketch) -> Value:
    x, w = g.input(torch.randn(0, 3, 5, 5)), g.input(torch.randn(2, 3, 3, 3))
    return g.op("conv", x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def attention_of_three_dimensions(g: Sketch) -> Value:
    return g.op("sdpa", *(g.input(torch.randn(2, 5, 8)) for _ in range(3)))


@pytest.mark.parametrize("cls", ON)
@pytest.mark.parametrize(
    "draw",
    [
        product_of_gapped,
        product_of_empty,
        scaled_addmm,
        empty_linear,
        empty_conv,
        attention_of_three_dimensions,
    ],
)
def test_no_row_claims_what_the_table_refuses(draw: Callable[[Sketch], Value], cls: type[OneDnnBackend]) -> None:
    g, device = Sketch(), ON[cls]
    y = draw(g)
    backend = cls(device)
    assert not backend.lowerings.supports(g.ops[-1], device)
    pick = by_preference("packed", "aten", "eager", "kernel")
    fragment = backend.compile(g.region([y]), Context(dict(cls.options), device, pick, specs=g.temporaries))
    assert isinstance(fragment, Fragment)
    torch.testing.assert_close(g.run(fragment, [y]), g.expected([y]))
