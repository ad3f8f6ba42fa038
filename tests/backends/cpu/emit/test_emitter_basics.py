"""Kernels through LLVM, end to end, against torch."""

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright_cpu.run.jit import compile_kernels


def run(kernel: Kernel, *tensors: torch.Tensor, sizes: tuple[int, ...] = ()) -> None:
    compile_kernels([kernel]).launcher(kernel).checked(tensors, sizes)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1000, 70_000])
def test_add_gelu(n: int) -> None:
    b = Builder("add_gelu", p=[symbol("n")], symbols={"n": 1000})
    x, y, out = b.input("x", "f32"), b.input("y", "f32"), b.output("out", "f32")
    (i,) = b.axes
    v = b.load(x, i) + b.load(y, i)
    b.store(out, i, v * 0.5 * (b.op("erf", v * 0.5**0.5) + 1))
    torch.manual_seed(0)
    xs, ys, got = torch.randn(n), torch.randn(n), torch.empty(n)
    run(b.build(), xs, ys, got, sizes=(n,))
    exact = torch.nn.functional.gelu((xs + ys).double())
    eager = torch.nn.functional.gelu(xs + ys)
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2.0**-23 * exact.abs().max()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(5, 64), (7, 33), (3, 1), (2, 1000)])
def test_softmax(shape: tuple[int, int], dtype: str) -> None:
    rows, cols = shape
    b = Builder("softmax", p=[rows], r=[cols])
    x, out = b.input("x", dtype), b.output("out", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    e = b.op("exp", v - b.reduce("max", v))
    b.store(out, i * cols + j, (e / b.reduce("sum", e)).to(dtype))
    xs = torch.randn(shape).to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    got = torch.empty_like(xs)
    run(b.build(), xs, got)
    torch.testing.assert_close(got, xs.softmax(-1))


def test_a_kept_value_that_is_the_same_along_the_innermost_axis() -> None:
    """What reads it belongs into the innermost loop as well, where the row buffer has the value."""
    b = Builder("softmax_of_an_expanded_tensor", p=[3], r=[5, 20])
    x, once, out = b.input("x", "f32"), b.output("once", "f32"), b.output("out", "f32")
    i, j, k = b.axes
    e = b.op("exp", b.op("exp", b.load(x, i * 5 + j)))
    b.store(once, i * 100 + j * 20 + k, e + 1)
    b.store(out, i * 100 + j * 20 + k, e / b.reduce("sum", e))
    xs = torch.randn(3, 5)
    got = torch.empty(2, 3, 5, 20)
    run(b.build(), xs, *got)
    wanted = xs.exp().exp()[..., None].expand(3, 5, 20)
    torch.testing.assert_close(got[0], wanted + 1)
    torch.testing.assert_close(got[1], wanted / wanted.sum((1, 2), keepdim=True))


def test_out_of_range_index_is_reported_after_the_launch() -> None:
    b = Builder("embedding", p=[3, 40])
    ids, table, y = b.input("ids", "i64"), b.input("table", "f32"), b.output("y", "f32")
    i, j = b.axes
    row = b.bound(b.load(ids, i), 10, wrap=True)
    b.store(y, i * 40 + j, b.load(table, b.indirect(row, 40) + j))
    k = b.build()
    rows, out = torch.randn(10, 40), torch.empty(3, 40)
    run(k, torch.tensor([0, -1, 3]), rows, out)
    assert torch.equal(out, rows[[0, -1, 3]])
    with pytest.raises(IndexError):
        run(k, torch.tensor([0, 10, 3]), rows, out)
