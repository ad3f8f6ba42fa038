"""Short innermost axes are unrolled and their stores interleaved: the same values, and no narrow vectors."""

from __future__ import annotations

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, interpret, symbol, verify
from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.emit.unroll import unrolled
from fusewright_cpu.run.jit import compile_kernels


def stacked(rows: int | None, points: int, dtype: str) -> Kernel:
    """Stack several tensors in a new innermost dim and multiply by another tensor's sum over that dim."""
    n = symbol("n") if rows is None else rows
    b = Builder("stacked", p=[n, points], symbols={"n": 64} if rows is None else {})
    inputs = [b.input(f"x{k}", dtype) for k in range(points)]
    z, y = b.input("z", dtype), b.output("y", dtype)
    i, j = b.axes
    out = b.const(0, "f32")
    for k, x in enumerate(inputs):
        here = b.index_value(j).eq(k)
        out = b.where(here, b.cast(b.load(x, i, here, 0), "f32"), out)
    b.store(y, i * points + j, b.cast(out * b.cast(b.load(z, i * points + j), "f32"), dtype))
    return b.build()


@pytest.mark.parametrize("points", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("rows", [3, 47, 1025, None])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "bool"])
def test_every_count_and_tail(points: int, rows: int | None, dtype: str) -> None:
    kernel = stacked(rows, points, dtype)
    for n in (rows,) if rows else (1, 15, 33, 700):
        xs = [(9 * torch.rand(n)).to(to_torch(dtype)) for _ in range(points)]
        z = (9 * torch.rand(n, points)).to(to_torch(dtype))
        ours, wanted = torch.empty_like(z), torch.empty_like(z)
        sizes = [] if rows else [n]
        compile_kernels([kernel]).launcher(kernel).checked([*xs, z, ours], sizes)
        interpret(kernel, [*xs, z, wanted], sizes)
        assert torch.equal(ours, wanted)


def test_conditions_on_the_position_are_gone() -> None:
    kernel = unrolled(stacked(64, 3, "f32"))
    verify(kernel)
    assert kernel.p == (64,)
    assert not {"where", "eq", "index"} & {n.op for n in kernel.nodes()}
    assert all(not n.args for n in kernel.nodes() if n.op == "load")


def test_an_output_may_live_in_what_it_is_computed_from() -> None:
    b = Builder("turned", p=[100, 2])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    b.store(y, i * 2 + j, b.load(x, i * 2 + j) * 3 + b.cast(b.index_value(j), "f32"))
    kernel = b.build()
    data = torch.randn(100, 2)
    want = data * 3 + torch.tensor([0.0, 1.0])
    compile_kernels([kernel]).launcher(kernel).checked([data, data])
    assert torch.equal(data, want)


@pytest.mark.parametrize(("rows", "points"), [(8, 2), (64, 8)])
def test_short_or_wide_ones_stay(rows: int, points: int) -> None:
    kernel = stacked(rows, points, "f32")
    assert unrolled(kernel) is kernel
