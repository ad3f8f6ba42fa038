"""Products of few rows with a weight matrix against fp64, judged relative to torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.kernels.by_hand import Gemv
from fusewright_cpu.run.sources import from_json, hash_of, to_json
from fusewright_cpu.target import aarch64_target, host_target, x86_target
from tests.backends.cpu.launchers import launcher

Run = Callable[[Gemv, list[torch.Tensor], list[int]], None]
KINDS = [
    Gemv(rows, dtype, weight, dtype if rows in (1, 4) else "")
    for rows in (1, 2, 3, 4) for dtype in ("f32", "bf16") for weight in ("f32", "bf16", "i8")
]  # fmt: skip
KINDS += [Gemv(r, dtype, "i8", bias, zeros=True) for r, dtype, bias in ((1, "f32", ""), (2, "bf16", "bf16"), (4, "f32", "f32"))]
SIZES = ((1, 1), (3, 7), (5, 129), (9, 64), (4, 515), (130, 96), (2, 0))
here = pytest.mark.skipif(
    bool(Gemv(1, "f32", "f32").refused(host_target())), reason="this CPU has no masked loads or no FMA"
)


def on_this_machine(g: Gemv, tensors: list[torch.Tensor], sizes: list[int]) -> None:
    launcher(g).checked(tensors, sizes)


def operands(g: Gemv, n: int, k: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the buffers, with the result full of NaN, and the exact result."""
    torch.manual_seed(seed)
    x, dtype = torch.randn(g.rows, k).to(to_torch(g.dtype)), to_torch(g.weight)
    w = torch.randint(-128, 128, (n, k)).to(dtype) if g.weight == "i8" else torch.randn(n, k).to(dtype)
    tensors, exact = [x, w], x.double() @ w.double().t()
    if g.weight == "i8":
        tensors += [torch.rand(n) / 64, *([torch.randint(-128, 128, (n,)).float()] if g.zeros else [])]
        shift = tensors[3].double()[:, None] if g.zeros else 0
        exact = x.double() @ (w.double() - shift).t() * tensors[2].double()
    if g.bias:
        tensors.append(torch.randn(n).to(to_torch(g.bias)))
        exact = exact + tensors[-1].double()
    return [*tensors, torch.full((g.rows, n), math.nan, dtype=x.dtype)], exact


def assert_exact(g: Gemv, n: int, k: int, run: Run, seed: int = 0) -> None:
    """Check that the error is at most twice that of an fp32 sum rounded once."""
    tensors, exact = operands(g, n, k, seed)
    run(g, tensors, [n, k])
    out, eps = tensors[-1], torch.finfo(torch.float32).eps
    theirs = float((exact.to(out.dtype).double() - exact).abs().max())
    size = float(exact.abs().max()) + math.sqrt(k) * (2 if g.weight == "i8" else 1)
    assert float((out.double() - exact).abs().max()) <= 2 * theirs + eps * math.sqrt(k + 1) * size


@here
@pytest.mark.parametrize("g", KINDS, ids=lambda g: g.name)
def test_lengths_around_vectors(g: Gemv) -> None:
    for n, k in SIZES:
        assert_exact(g, n, k, on_this_machine)


@here
@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(0, 300), st.integers(0, 9))
def test_any_lengths(g: Gemv, n: int, k: int, seed: int) -> None:
    assert_exact(g, n, k, on_this_machine, seed)


@here
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_is_not_finite_spreads_to_its_own_row(dtype: str) -> None:
    g = Gemv(2, dtype, dtype)
    tensors, _ = operands(g, 6, 70)
    tensors[0][1, 69], tensors[1][4, 3] = math.inf, math.nan
    on_this_machine(g, tensors, [6, 70])
    want = tensors[0].double() @ tensors[1].double().t()
    assert torch.equal(tensors[2].isnan(), want.isnan()) and torch.equal(tensors[2].isinf(), want.isinf())


@here
def test_threads_do_not_change_values() -> None:
    g, threads = Gemv(1, "f32", "bf16"), torch.get_num_threads()
    outs = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            tensors, _ = operands(g, 515, 1024)
            on_this_machine(g, tensors, [515, 1024])
            outs.append(tensors[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outs)


def test_it_says_what_it_is_not_written_for() -> None:
    arm = aarch64_target("neoverse-n1")
    assert "AVX2" in Gemv(1, "f32", "f32").refused(x86_target("avx")) and not Gemv(4, "bf16", "i8").refused(arm)
    assert "zero points" in Gemv(1, "f32", "f32", zeros=True).refused(arm)
    assert "4 rows" in Gemv(5, "f32", "f32").refused(arm) and "fp32 and bf16" in Gemv(1, "f16", "f16").refused(arm)


def test_it_survives_json() -> None:
    for g in KINDS:
        assert from_json(to_json(g)) == g
    assert len({hash_of(g) for g in KINDS}) == len(KINDS)


@here
@pytest.mark.parametrize("by_native", [True, False])
def test_a_bound_launch_is_the_launch(by_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What measurements call reads new tensors at every call."""
    monkeypatch.setenv("FUSEWRIGHT_NATIVE", str(int(by_native)))
    g = Gemv(2, "f32", "f32", "f32")
    bound = launcher(g).bound((9, 64))
    for seed in range(2):
        given, exact = operands(g, 9, 64, seed)
        bound(*given)
        assert torch.allclose(given[-1].double(), exact, rtol=1e-4, atol=1e-4)
