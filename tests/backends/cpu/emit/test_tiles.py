"""Kernels that load or store along two axes use square tiles and match the interpreter."""

from __future__ import annotations

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, crosses, interpret
from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.emit.strategy import choose
from fusewright_cpu.run.jit import compile_kernels
from fusewright_cpu.target import host_target, x86_target


def transposed_sum(batch: int, rows: int, cols: int, dtype: str, symbolic: bool = False) -> Kernel:
    """y[b, j, i] = x[b, i, j] + z[j] + w[b, j, i], stored in `dtype`."""
    b = Builder("transposed_sum", p=[batch, cols, rows])
    if symbolic:
        b = Builder("transposed_sum")
        sizes = [batch, b.size("cols", cols), b.size("rows", rows)]
        b = Builder("transposed_sum", p=sizes, symbols={"cols": cols, "rows": rows})
    _, n_j, n_i = b.p
    x, z, w, y = b.input("x", dtype), b.input("z", "f32"), b.input("w", dtype), b.output("y", dtype)
    k, j, i = b.axes
    at = (k * n_j + j) * n_i + i
    total = b.cast(b.load(x, (k * n_i + i) * n_j + j), "f32") + b.load(z, j) + b.cast(b.load(w, at), "f32")
    b.store(y, at, b.cast(total, dtype))
    return b.build()


def check(kernel: Kernel, batch: int, rows: int, cols: int, dtype: str, sizes: tuple[int, ...] = ()) -> None:
    x, w = ((8 * torch.rand(batch * rows * cols)).to(to_torch(dtype)) for _ in range(2))
    z = torch.randint(4, (cols,)).float()
    ours, wanted = (torch.zeros(batch * rows * cols, dtype=to_torch(dtype)) for _ in range(2))
    compile_kernels([kernel]).launcher(kernel).checked([x, z, w, ours], sizes)
    interpret(kernel, [x, z, w, wanted], sizes)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("rows", [16, 31, 128, 200])
@pytest.mark.parametrize("cols", [16, 64, 141])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "u8"])
def test_whole_tiles_and_what_is_left(rows: int, cols: int, dtype: str) -> None:
    kernel = transposed_sum(2, rows, cols, dtype)
    assert choose(kernel, x86_target("avx512")).tile is not None
    check(kernel, 2, rows, cols, dtype)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 300), (48, 32), (129, 17)])
def test_symbolic_sizes(rows: int, cols: int) -> None:
    kernel = transposed_sum(2, 64, 64, "f32", symbolic=True)
    check(kernel, 2, rows, cols, "f32", (cols, rows))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "bool", "i64"])
def test_copies_are_exact(dtype: str) -> None:
    b = Builder("copy", p=[77, 150])
    x, y = b.input("x", dtype), b.output("y", dtype)
    j, i = b.axes
    b.store(y, j * 150 + i, b.load(x, i * 77 + j))
    kernel = b.build()
    assert crosses(kernel)
    data = torch.randn(150, 77).mul(3).to(to_torch(dtype))
    out = torch.empty(77, 150, dtype=data.dtype)
    compile_kernels([kernel]).launcher(kernel).checked([data, out])
    assert torch.equal(out, data.t())


@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (33, 150)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "bool", "i64"])
def test_a_result_that_is_stored_along_both_axes_is_transposed_in_registers(rows: int, cols: int, dtype: str) -> None:
    b = Builder("both", p=[cols, rows])
    x, y, z = b.input("x", dtype), b.output("y", dtype), b.output("z", dtype)
    j, i = b.axes
    value = b.load(x, i * cols + j)
    b.store(y, j * rows + i, value)
    b.store(z, i * cols + j, value)
    kernel = b.build()
    how = choose(kernel, x86_target("avx512"))
    assert (how.v, how.tile) == (0, 1)  # along the other axis both the load and a store would be transposed
    data = torch.randn(rows, cols).mul(3).to(to_torch(dtype))
    turned, same = torch.empty(cols, rows, dtype=data.dtype), torch.empty_like(data)
    compile_kernels([kernel]).launcher(kernel).checked([data, turned, same])
    assert torch.equal(turned, data.t()) and torch.equal(same, data)


def test_narrow_and_plain_copies_are_no_tiles() -> None:
    target = host_target()
    assert choose(transposed_sum(2, 3, 64, "f32"), target).tile is None
    b = Builder("copy", p=[64, 64])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    j, i = b.axes
    b.store(y, j * 64 + i, b.load(x, j * 128 + i))
    kernel = b.build()
    assert choose(kernel, target).tile is None and not crosses(kernel)


@pytest.mark.parametrize(("channels", "points"), [(32, (20, 12)), (48, (33, 100, 16)), (141, (16, 65))])
def test_parts_of_images_are_joined_in_planes(channels: int, points: tuple[int, ...]) -> None:
    """Each part is loaded along channels, under a condition on the points that are stored along: as heads of detectors are."""
    whole = sum(points)
    b = Builder("planes", p=[channels, whole])
    i, j = b.axes
    parts, total, first = [b.input(f"x{k}", "f32") for k in range(len(points))], None, 0
    for x, n in zip(parts, points, strict=True):
        here = (b.index_value(j) >= first) & (b.index_value(j) < first + n)
        value = b.load(x, (j - first) * channels + i, here, 0)
        total = value if total is None else b.where(here, value, total)
        first += n
    y = b.output("y", "f32")
    b.store(y, i * whole + j, total)
    kernel = b.build()
    assert choose(kernel, x86_target("avx512")).tile == 1
    given = [torch.randn(n, channels) for n in points]
    ours = torch.full((channels, whole), 7.0)
    compile_kernels([kernel]).launcher(kernel).checked([*given, ours])
    assert torch.equal(ours, torch.cat([x.t() for x in given], 1))


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_parts_that_are_stacked_between_other_dims_are_no_tiles(parts: int) -> None:
    """No load runs along the new axis: in tiles each element would be gathered, which took 2.5 times eager's time."""
    rows, columns = 6, 40
    b = Builder("stacked", p=[rows, parts, columns])
    i, k, j = b.axes
    total = None
    for n in range(parts):
        here = b.index_value(k).eq(n)
        value = b.load(b.input(f"x{n}", "f32"), i * columns + j, here, 0)
        total = value if total is None else b.where(here, value, total)
    y = b.output("y", "f32")
    b.store(y, (i * parts + k) * columns + j, total)
    kernel = b.build()
    how = choose(kernel, x86_target("avx512"))
    assert (how.v, how.tile) == (2, None)
    given = [torch.randn(rows, columns) for _ in range(parts)]
    ours = torch.empty(rows, parts, columns)
    compile_kernels([kernel]).launcher(kernel).checked([*given, ours])
    assert torch.equal(ours, torch.stack(given, 1))
