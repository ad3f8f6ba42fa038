"""Errors of float sums beside those of torch's own, which adds up to 16 numbers one after the other."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright_cpu.emit.rows import CHAIN, chunks
from fusewright_cpu.run.jit import compile_kernels

MOST = 1.3
"""The largest error beside eager's: root mean squares over all sums and draws."""


def columns(*rows: int, width: int, dtype: str = "f32", symbolic: bool = False) -> Kernel:
    """Return sums over row axes with gaps between them; the first is a symbol with `symbolic`."""
    first, hints = (symbol("n"), {"n": rows[0]}) if symbolic else (rows[0], {})
    b = Builder("columns", p=[width], r=[first, *rows[1:]], symbols=hints)
    x, out = b.input("x", dtype), b.output("out", "f32")
    j, *axes = b.axes
    at = axes[0]
    for n, axis in zip(rows[1:], axes[1:], strict=True):
        at = at * (n + 1) + axis
    b.store(out, j, b.reduce("sum", b.cast(b.load(x, at * width + j), "f32")))
    return b.build()


def rows(count: int, width: int) -> Kernel:
    b = Builder("rows", p=[count], r=[width])
    x, out = b.input("x", "f32"), b.output("out", "f32")
    i, j = b.axes
    b.store(out, i, b.reduce("sum", b.load(x, i * width + j)))
    return b.build()


def beside_eager(
    kernel: Kernel, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype = torch.float32, sizes: Sequence[int] = ()
) -> float:
    """Return the error over that of `torch.sum` in fp32 of the same numbers. They are above zero, which shows the order best."""
    launcher = compile_kernels([kernel]).launcher(kernel)
    torch.manual_seed(0)
    ours = eager = 0.0
    for _ in range(max(4, 1 << 15 >> torch.Size(shape).numel().bit_length())):
        x = torch.rand(*shape).to(dtype)
        exact = x.double().sum(dims)
        out = torch.empty(exact.shape)
        launcher.checked([x, out], sizes)
        ours += (out - exact).square().sum().item()
        eager += (x.float().sum(dims) - exact).square().sum().item()
    return (ours / max(eager, 1e-30)) ** 0.5


COUNTS = [2, 15, 17, 24, 31, 33, 64, 70, 250, 1000, 3000, 10_000]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("width", [64, 200])
def test_columns(n: int, width: int) -> None:
    assert beside_eager(columns(n, width=width), (n, width), (0,)) < MOST


@pytest.mark.parametrize("n", [64, 1000])
def test_columns_of_a_half_type(n: int) -> None:
    assert beside_eager(columns(n, width=64, dtype="bf16"), (n, 64), (0,), torch.bfloat16) < MOST


@pytest.mark.parametrize("n", COUNTS)
def test_columns_of_a_symbolic_length(n: int) -> None:
    """The kernel is made for 100 rows."""
    assert beside_eager(columns(100, width=64, symbolic=True), (n, 64), (0,), sizes=[n]) < MOST


@pytest.mark.parametrize("shape", [(10, 7), (60, 60), (30, 3), (300, 2), (9, 8, 7), (50, 2, 4)])
def test_columns_over_axes_within_each_other(shape: tuple[int, ...]) -> None:
    """As in gradients of a batch norm, channels innermost: each axis may be too short for chunks, but not all together."""
    launcher = compile_kernels([kernel := columns(*shape, width=64)]).launcher(kernel)
    x = torch.rand(shape[0], *(n + 1 for n in shape[1:]), 64)
    used = x[tuple(slice(n) for n in shape)].flatten(0, -2)
    exact, out = used.double().sum(0), torch.empty(64)
    launcher.checked([x, out])
    assert (out - exact).norm() <= MOST * (used.sum(0) - exact).norm()


@pytest.mark.parametrize("n", [64, 1000, 2100, 4000, 10_000])
def test_rows(n: int) -> None:
    assert beside_eager(rows(64, n), (64, n), (1,)) < MOST


@pytest.mark.parametrize("inner", [1, 2, 3, 5, 8, 16])
def test_no_chain_is_longer(inner: int) -> None:
    """What is added one after the other: steps, chunks of them, chunks of chunks."""
    for steps in [*range(1, 600), 4095, 4096, 4097, 10_001, 1 << 20]:
        widths = chunks(steps, inner)
        assert all(long % short == 0 for long, short in pairwise(widths))
        sizes = [*widths, 1]
        chains = [-(-long // short) for long, short in zip([steps, *widths], sizes, strict=True)]
        assert max(chains) <= CHAIN
        assert chains[-1] * inner <= CHAIN
