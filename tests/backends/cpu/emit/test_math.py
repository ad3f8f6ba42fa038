"""Accuracy of the emitter's elementary functions on f32: a dense sweep over all exponents, in ulps of the
exact value."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright_cpu.emit.math import LIBM, MATH
from fusewright_cpu.run.jit import compile_kernels

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-45,
    -1e-45,
    1e-39,
    3.4028235e38,
    -3.4028235e38,
]
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    n: getattr(torch, n)
    for n in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "erf", "sin", "cos")
}

ODD = ("expm1", "log1p", "tanh", "erf", "sin")
"""Functions that preserve the sign of zero."""


def unary(name: str, dtype: str = "f32") -> Kernel:
    b = Builder(name, p=[symbol("n")], symbols={"n": 1 << 16})
    x, y = b.input("x", dtype), b.output("y", dtype)
    (i,) = b.axes
    b.store(y, i, b.op(name, b.load(x, i)))
    return b.build()


def run(kernel: Kernel, *tensors: torch.Tensor) -> None:
    compile_kernels([kernel]).launcher(kernel).checked(tensors, (tensors[0].numel(),))


def sweep(step: int = 2003, near: int = 1) -> torch.Tensor:
    """Every `step`-th float of both signs, and every `near`-th value in the critical ranges."""
    bits = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32)
    happens = [
        torch.linspace(-20, 20, 40001), torch.linspace(-4, 4, 400_001),
        torch.linspace(-110, 100, 20001), torch.linspace(0.5, 2, 20001),
    ]  # fmt: skip
    return torch.cat([torch.from_numpy(bits.view(np.float32)), *(x[::near] for x in happens), torch.tensor(SPECIAL)])


def ulps(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error in ulps of the f64 value `exact`; NaN and infinities must agree."""
    wanted = exact.float()
    odd = ~torch.isfinite(wanted) | ~torch.isfinite(got)
    agree = (got[odd] == wanted[odd]) | (got[odd].isnan() & wanted[odd].isnan())
    # a finite value next to the overflow threshold may round either way
    edge = exact[odd].abs().gt(3.4028234e38) & exact[odd].abs().lt(3.4028240e38)
    assert bool((agree | edge).all()), f"special values differ: {got[odd][~agree][:4]} for {wanted[odd][~agree][:4]}"
    got, exact = got[~odd].double(), exact[~odd]
    size = np.clip(np.abs(exact.float().numpy()), np.float32(2.0**-126), np.float32(2.0**127))
    spacing = torch.from_numpy(np.spacing(size)).double()
    return float(((got - exact).abs() / spacing).max())


@pytest.mark.parametrize("name", sorted(EXACT))
def test_unary_function_is_within_its_bound(name: str) -> None:
    x = sweep()
    y = torch.empty_like(x)
    run(unary(name), x, y)
    worst = ulps(y, EXACT[name](x.double()))
    print(f"{name}: {worst:.3f} ulp (bound {MATH[name].ulp})")
    assert worst <= MATH[name].ulp


def test_every_own_function_is_tested() -> None:
    assert set(MATH) == {*EXACT, "pow"}


def test_erf_reaches_one_and_goes_no_further() -> None:
    x = sweep()
    y = torch.empty_like(x)
    run(unary("erf"), x, y)
    assert bool(((y.abs() <= 1) | x.isnan()).all())
    assert torch.equal(y[x.abs() > 3.95], x[x.abs() > 3.95].sign())


def test_signed_zeros() -> None:
    for name in ODD:
        x = torch.tensor([0.0, -0.0])
        y = torch.empty(2)
        run(unary(name), x, y)
        assert torch.signbit(y).tolist() == [False, True], name


def binary(name: str, dtype: str = "f32") -> Kernel:
    b = Builder(name, p=[symbol("n")], symbols={"n": 1 << 16})
    x, y, z = b.input("x", dtype), b.input("y", dtype), b.output("z", dtype)
    (i,) = b.axes
    b.store(z, i, b.op(name, b.load(x, i), b.load(y, i)))
    return b.build()


def test_pow_on_random_and_special_values() -> None:
    torch.manual_seed(0)
    grid = torch.tensor([*SPECIAL, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 2.5, -2.5, 1e30, -1e30])
    x, y = (t.reshape(-1) for t in torch.meshgrid(grid, grid, indexing="ij"))
    more = torch.randn(100_000).abs() * torch.exp(torch.randn(100_000) * 3)
    x, y = torch.cat([x, more]), torch.cat([y, torch.randn(100_000) * 8])
    z = torch.empty_like(x)
    run(binary("pow"), x, y, z)
    worst = ulps(z, torch.pow(x.double(), y.double()))
    print(f"pow: {worst:.3f} ulp (bound {MATH['pow'].ulp})")
    assert worst <= MATH["pow"].ulp


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_the_c_library_serves_the_other_functions(dtype: str) -> None:
    torch.manual_seed(0)
    t = {"f32": torch.float32, "f64": torch.float64}[dtype]
    x, y = torch.rand(37, dtype=t) + 1.01, torch.rand(37, dtype=t) * 3
    kernels, wanted = [], []
    for name in LIBM:
        two = name in ("atan2", "hypot", "pow", "fmod")
        kernels.append(binary(name, dtype) if two else unary(name, dtype))
        args = (x, y) if two else ((x - 1.01,) if name in ("asin", "acos", "atanh") else (x,))
        wanted.append((args, getattr(torch, name)(*args)))
    module = compile_kernels(kernels)
    for k, (args, want) in zip(kernels, wanted, strict=True):
        got = torch.empty_like(x)
        module.launcher(k).checked((*args, got), (37,))
        torch.testing.assert_close(got, want, msg=f"{k.name}: {got} is not {want}")
