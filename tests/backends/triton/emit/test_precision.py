"""Approximate forms stand only where a half type hides them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusewright.toolkit.ir import Builder, Kernel, Val
from fusewright_triton import target
from fusewright_triton.emit import schedule
from fusewright_triton.emit.emitter import emit
from tests.backends.triton.kernels import simulate

H100 = target.NVIDIA["sm_90"]


def silu(out: str, *more: str) -> Kernel:
    """Return y = x * sigmoid(x), also stored with the types `more`."""
    b = Builder("silu", p=[4096])
    x = b.load(b.input("x", "bf16"), b.axes[0]).to("f32")
    v = x * b.op("sigmoid", x)
    for k, dtype in enumerate((out, *more)):
        b.store(b.output(f"y{k}", dtype), b.axes[0], v.to(dtype))  # type: ignore[arg-type]
    return b.build()


def text_of(kernel: Kernel) -> str:
    return emit(kernel, schedule.choose(kernel, H100)).text


def test_what_is_rounded_to_a_half_type_is_approximate() -> None:
    assert "tl.exp(" in text_of(silu("bf16")) and "fw.sigmoid" not in text_of(silu("bf16"))
    assert "tl.exp(" in text_of(silu("f16"))


def test_what_is_stored_in_full_as_well_is_exact() -> None:
    assert "fw.sigmoid" in text_of(silu("f32")) and "tl.exp(" not in text_of(silu("f32"))
    assert "fw.sigmoid" in text_of(silu("bf16", "f32"))


@pytest.mark.parametrize("use", ["compared", "an integer", "floored", "a logarithm"])
def test_what_decides_something_is_exact(use: str) -> None:
    """A quotient of 2 must not be compared, floored or counted as a little less; nor may small logarithms lose digits."""
    b = Builder("quotient", p=[4096])
    x, y = (b.load(b.input(n, "bf16"), b.axes[0]).to("f32") for n in "xy")
    q = x / y
    uses: dict[str, Val] = {
        "compared": b.where(q >= 2.0, x, y), "an integer": q.to("i32").to("f32"),
        "floored": b.op("floor", q), "a logarithm": b.op("log", q),
    }  # fmt: skip
    b.store(b.output("z", "bf16"), b.axes[0], (uses[use] + q).to("bf16"))
    assert "fw.divide" in text_of(b.build())


def test_each_function_of_a_kernel_decides_by_what_it_stores() -> None:
    """The first keeps a sum in fp32; the second computes the elements again and rounds them."""
    b = Builder("gate", p=[8], r=[1 << 19])
    i, j = b.axes
    x = b.load(b.input("x", "bf16"), i * (1 << 19) + j).to("f32")
    gate = b.op("sigmoid", x)
    total = b.reduce("sum", gate)
    b.store(b.output("s", "f32"), i, total)
    b.store(b.output("y", "bf16"), i * (1 << 19) + j, (gate + total).to("bf16"))
    kernel = b.build()
    _, first, second = emit(kernel, replace(schedule.choose(kernel, H100), split=4)).text.split("@triton.jit")
    assert "fw.sigmoid" in first and "fw.sigmoid" not in second and "tl.exp(" in second


def normalized(dtype: str) -> Kernel:
    """A norm of gates, of which `dtype` is stored; with f32 also the variance."""
    b = Builder("normalized", p=[64], r=[70000])
    i, j = b.axes
    gate = b.op("sigmoid", b.load(b.input("x", "bf16"), i * 70000 + j).to("f32"))
    variance = b.reduce("m2", gate) / 70000.0
    if dtype == "f32":
        b.store(b.output("v", "f32"), i, variance)
    y = (gate - b.reduce("mean", gate)) * b.op("rsqrt", variance + 1e-5)
    b.store(b.output("y", "bf16"), i * 70000 + j, y.to("bf16"))
    return b.build()


def test_what_a_norm_divides_by_may_be_approximate_as_what_it_divides() -> None:
    """Eager rounds each gate to the half type, which is 2^8 times coarser, before it takes mean and variance."""
    assert "fw.sigmoid" not in text_of(normalized("bf16")) and "tl.exp(" in text_of(normalized("bf16"))
    assert "fw.sigmoid" in text_of(normalized("f32")), "the variance is stored in full"


@given(st.lists(st.floats(-90, 90, width=32), min_size=1, max_size=64))
def test_rounded_results_are_within_a_step_of_exact_ones(values: list[float]) -> None:
    x = torch.tensor(values + [0.0] * (4096 - len(values))).bfloat16()
    y = torch.empty(4096, dtype=torch.bfloat16)
    simulate(silu("bf16"), [x, y])
    exact = x.double() * torch.sigmoid(x.double())
    assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-38).all()
