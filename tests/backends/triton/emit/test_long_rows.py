"""Rows that no program holds: moments and scans in steps of lanes, and rows of planes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.types import DType, to_torch
from fusewright_triton import target
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.schedule import Config, Tile, choose
from fusewright_triton.runtime import SimulatedLauncher
from tests.backends.triton.kernels import simulate
from tests.kernels import cumsum, hints, layer_norm

H100 = target.NVIDIA["sm_90"]
ONE = (Tile((0,), 1),)
CONFIGS = {
    "an element a lane": Config(ONE, 16, False, 1, 4),
    "two": Config(ONE, 16, False, 1, 4, 2),
    "four": Config(ONE, 16, False, 1, 4, 4),
    "of whole steps": Config(ONE, 16, False, 1, 4, 16),
    "several rows": Config((Tile((0,), 4),), 16, False, 1, 4, 4),
}
SHARED = {"shared": Config(ONE, 8, False, 4, 4, 4), "shared by lanes": Config(ONE, 8, False, 4, 4, 8)}
SETTINGS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def moments(rows: int, cols: Extent, dtype: DType = "f32", stride: int = 0) -> Kernel:
    """Mean, squared deviations, and what needs another pass over the row."""
    wide: DType = "f64" if dtype == "f64" else "f32"
    b = Builder("moments", p=[rows], r=[cols], symbols=hints(cols))
    x, out = b.input("x", dtype), [b.output(n, wide) for n in ("mean", "m2", "y")]
    i, j = b.axes
    v = b.load(x, i * (stride or cols) + j).to(wide)
    mean, m2 = b.reduce("mean", v), b.reduce("m2", v)
    b.store(out[0], i, mean)
    b.store(out[1], i, m2)
    b.store(out[2], i * cols + j, (v - mean) * b.op("rsqrt", m2 / 7.0 + 1e-5))
    return b.build()


def plain(x: torch.Tensor) -> list[torch.Tensor]:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    m2 = variance * x.shape[-1]
    return [mean.squeeze(-1), m2.squeeze(-1), (x - mean) * torch.rsqrt(m2 / 7.0 + 1e-5)]


def near(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, size: float = 1.0) -> None:
    """Check that an error is as small as eager's (twice that, and a few ulp of numbers of this `size`)."""
    fine = exact.isfinite()
    torch.testing.assert_close(got[~fine].double(), exact[~fine].double(), equal_nan=True)
    got, eager, exact = (t[fine].double() for t in (got, eager, exact))
    allowed = 2 * (eager - exact).abs().max().item() if len(exact) else 0.0
    assert ((got - exact).abs() <= allowed + size).all(), f"{got}\n{exact}\n{allowed}"


SHIFTS = {"none": 0.0, "large": 1000.0, "half": -0.25}


@SETTINGS
@given(
    name=st.sampled_from(sorted({**CONFIGS, **SHARED})),
    dtype=st.sampled_from(["f32", "bf16", "f16", "f64"]),
    cols=st.integers(1, 70),
    shift=st.sampled_from(sorted(SHIFTS)),
    special=st.sampled_from([None, math.inf, -math.inf, math.nan]),
    padded=st.booleans(),
    apart=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_moments_as_in_eager(
    name: str, dtype: DType, cols: int, shift: str, special: float | None, padded: bool, apart: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(6, cols + apart, dtype=torch.float64) + SHIFTS[shift]).to(to_torch(dtype))
    if padded:
        x[:, : cols // 3] = 0.0  # the first elements tell nothing about the others
    if special is not None:
        x[1, cols // 2] = special
    wide = torch.float64 if dtype == "f64" else torch.float32
    out = [torch.empty(6, dtype=wide), torch.empty(6, dtype=wide), torch.empty(6, cols, dtype=wide)]
    k = moments(6, cols, dtype, cols + apart)
    SimulatedLauncher(k, emit(k, {**CONFIGS, **SHARED}[name]))([x, *out])
    given_x, unit = x[:, :cols].to(wide), torch.finfo(wide).eps
    eager, exact = plain(given_x), plain(given_x.double())
    if special is not None:
        assert out[1][1].isnan() and out[2][1].isnan().all()
        assert torch.equal(out[0][1].nan_to_num(7.0), given_x[1].mean().nan_to_num(7.0)), "the mean of an infinity"
        out, eager, exact = ([torch.cat((t[:1], t[2:])) for t in found] for found in (out, eager, exact))
    size = abs(SHIFTS[shift]) + 1
    near(out[0], eager[0], exact[0], 4 * unit * size)
    spread = exact[1].max().item()
    near(out[1], eager[1], exact[1], 8 * unit * (spread + size * (spread * cols) ** 0.5) + cols * (size * unit) ** 2)
    if cols > 3:
        near(out[2], eager[2], exact[2], 64 * unit * size)


SCANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.cumsum(-1), "prod": lambda t: t.cumprod(-1),
    "max": lambda t: t.cummax(-1).values, "min": lambda t: t.cummin(-1).values,
}  # fmt: skip


def scanned(how: str, rows: int, cols: int, dtype: DType, offset: int = 0, turned: bool = False) -> Kernel:
    """A scan of rows that begin between vectors, or that run backwards."""
    wide: DType = {"bf16": "f32", "f16": "f32"}.get(dtype, dtype)  # type: ignore[assignment]
    b = Builder("scanned", p=[rows], r=[cols])
    x, out = b.input("x", dtype), b.output("out", dtype)
    i, j = b.axes
    at = (cols - 1) - j if turned else j
    v = b.scan(how, b.load(x, i * (cols + offset) + at).to(wide))
    b.store(out, i * cols + j, v.to(dtype))
    return b.build()


@SETTINGS
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    how=st.sampled_from(sorted(SCANS)),
    dtype=st.sampled_from(["f32", "bf16", "f16", "f64", "i64", "i32"]),
    cols=st.integers(1, 70),
    special=st.sampled_from([None, math.inf, -math.inf, math.nan]),
    offset=st.integers(0, 2),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scans_as_in_eager(
    name: str, how: str, dtype: DType, cols: int, special: float | None, offset: int, turned: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    kind = to_torch(dtype)
    x = torch.randint(-3, 4, (6, cols + offset)) if dtype[0] == "i" else torch.randn(6, cols + offset, dtype=torch.float64)
    x = x.to(kind)
    if special is not None and dtype[0] != "i":
        x[1, cols // 2] = special
    out, k = torch.empty(6, cols, dtype=kind), scanned(how, 6, cols, dtype, offset, turned)
    SimulatedLauncher(k, emit(k, CONFIGS[name]))([x, out])
    row = x[:, :cols].flip(1) if turned else x[:, :cols]
    if dtype[0] == "i":
        assert torch.equal(out, SCANS[how](row).to(kind))
        return
    exact = SCANS[how](row.double())
    near(out, SCANS[how](row), exact, torch.finfo(kind).eps * exact[exact.isfinite()].abs().max().nan_to_num(1.0).item())


@pytest.mark.parametrize("how", sorted(SCANS))
def test_an_infinity_changes_nothing_before_it(how: str) -> None:
    x = torch.arange(40.0).repeat(2, 1)
    x[0, 9], x[1, 30] = math.inf, math.nan
    out, k = torch.empty(2, 40), scanned(how, 2, 40, "f32")
    SimulatedLauncher(k, emit(k, CONFIGS["four"]))([x, out])
    torch.testing.assert_close(out, SCANS[how](x), equal_nan=True)


def test_long_rows_with_a_scan_take_a_few_warps() -> None:
    """Held in 32 warps, each block of 1024 elements was scanned by itself: 119 instructions an element, 12 so."""
    long, short = choose(scanned("sum", 64, 32767, "bf16"), H100), choose(cumsum(64, 4095), H100)
    assert not long.persistent and long.warps <= 8 and long.each >= 4
    assert short.persistent, "few warps hold it"
    text = emit(scanned("sum", 64, 32767, "bf16"), long).text
    assert text.count("fw.scan_lanes(") == 2 and "max_contiguous" not in text, "whole steps, whose loads are vectors, and the rest"
    assert emit(scanned("sum", 64, 32768, "bf16"), long).text.count("fw.scan_lanes(") == 1


@pytest.mark.parametrize("cols", [8193, 10001, 16384])
def test_a_long_scan_as_the_target_runs_it(cols: int) -> None:
    x, out = torch.randn(2, cols), torch.empty(2, cols)
    simulate(cumsum(2, cols), [x, out], target=H100)
    near(out, x.cumsum(1), x.double().cumsum(1), 1e-5)


def test_moments_of_long_rows_are_taken_by_lanes() -> None:
    assert choose(layer_norm(4096, 70000, "f32"), H100).each == 1, "caches would keep too little of the rows under way"
    k = layer_norm(4096, 70000, "bf16")
    c = choose(k, H100)
    assert not c.persistent and c.each * 32 * c.warps == c.row
    text = emit(k, c).text
    assert text.count("fw.welford_lanes(") == 1 and text.count("fw.welford_rest(") == 1
    assert "fw.welford_rest(" not in emit(layer_norm(4096, c.row * 20, "bf16"), c).text


@pytest.mark.parametrize("sizes", [(3, 1), (2, 37), (1, 5000), (2, 4096)])
def test_moments_and_scans_of_symbolic_length(sizes: tuple[int, int]) -> None:
    rows, cols = sizes
    x = torch.randn(sizes) + 30
    out = [torch.empty(rows), torch.empty(rows), torch.empty(rows, cols)]
    simulate(moments(rows, symbol("m")), [x, *out], (cols,), target=H100)
    for got, eager, exact in zip(out, plain(x), plain(x.double()), strict=True):
        near(got, eager, exact, 1e-4 * max(1.0, exact.abs().max().item()) if cols > 1 else 1e-2)
    k = cumsum(rows, symbol("m"))
    long = replace(choose(k, H100), row=2048, persistent=False, warps=4, each=8)
    SimulatedLauncher(k, emit(k, long))([x, out[2]], (cols,))
    near(out[2], x.cumsum(1), x.double().cumsum(1), 1e-4)


def planes(rows: int, channels: int, pixels: int, how: str = "m2", dtype: DType = "f32") -> Kernel:
    """A group norm, whose weights are those of a plane."""
    b = Builder("planes", p=[rows], r=[channels, pixels])
    x, w, out = b.input("x", dtype), b.input("w", dtype), b.output("out", dtype)
    i, c, j = b.axes
    place = i * (channels * pixels) + c * pixels + j
    v = b.load(x, place).to("f32")
    if how == "m2":
        y = (v - b.reduce("mean", v)) * b.op("rsqrt", b.reduce("m2", v) / (channels * pixels) + 1e-5)
    else:
        y = v - b.reduce("sum", v * b.load(w, c).to("f32")) / (channels * pixels)
    b.store(out, place, (y * b.load(w, c).to("f32")).to(dtype))
    return b.build()


@pytest.mark.parametrize("how", ["m2", "sum"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("pixels", [60, 64, 47])
@pytest.mark.parametrize(("split", "each"), [(1, 1), (1, 4), (4, 4)])
def test_rows_of_planes(how: str, dtype: DType, pixels: int, split: int, each: int) -> None:
    """Each plane is passed over by itself, with its weight in a register, if steps fill planes and lanes combine what they hold."""
    k = planes(3, 8, pixels, how, dtype)
    x, w = torch.randn(3, 8, pixels).to(to_torch(dtype)), torch.randn(8).to(to_torch(dtype))
    out = torch.empty_like(x)
    source = emit(k, Config(ONE, 16, False, split, 4, each))
    SimulatedLauncher(k, source)([x, w, out])
    alone = (1 + (how == "sum")) * (each > 1)
    assert source.text.count("for plane in") == alone
    found = []
    for t, u in ((x.float(), w.float()), (x.double(), w.double())):
        flat, u = t.flatten(1), u[:, None]
        y = torch.nn.functional.layer_norm(flat, flat.shape[1:]).view_as(t) if how == "m2" else t - (t * u).mean((1, 2), True)
        found.append((y * u).to(out.dtype if t.dtype == torch.float32 else t.dtype))
    near(out, *found, 1e-5 if dtype == "f32" else 0.02)


def test_planes_that_steps_do_not_fill_stay_one_row() -> None:
    assert "for plane in" not in emit(planes(3, 8, 40), Config(ONE, 32, False, 1, 4, 4)).text
    assert "for plane in" not in emit(planes(3, 8, 64), Config((Tile((0,), 2),), 16, False, 1, 4, 4)).text
    text = emit(planes(3, 8, 64, "sum"), Config(ONE, 16, False, 4, 4, 4)).text
    assert text.count("for plane in range(beginplane") == 2, "programs share planes"


def test_a_chosen_plane_loop() -> None:
    k = planes(1024, 4, 64516, dtype="bf16")
    text = emit(k, choose(k, H100)).text
    assert text.count("for turn in range(0, 4)") == 1 and "% 64516" not in text[text.index("for turn") :]


def weighted(rows: int, cols: Extent, dtype: DType) -> Kernel:
    """A sum, by which a second pass divides, and then the largest quotient and its position."""
    b = Builder("weighted", p=[rows], r=[cols], symbols=hints(cols))
    x, out, total, at = b.input("x", dtype), b.output("y", dtype), b.output("top", "f32"), b.output("at", "i64")
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    y = v / b.reduce("sum", v)
    b.store(out, i * cols + j, y.to(dtype))
    b.store(total, i, b.reduce("sum", y * y))
    b.store(at, i, b.reduce("argmax", y * b.reduce("min", y)))
    return b.build()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("cols", [65537, 70000, 81920, symbol("m")])
def test_a_long_row_is_read_again_from_its_end(cols: Extent, dtype: DType) -> None:
    """Positions of extremes are those of the first ones, whichever way the row is read."""
    length = cols if isinstance(cols, int) else 66000
    k = weighted(2, cols, dtype)
    x = (torch.rand(2, length) + 0.5).to(to_torch(dtype))
    x[:, 100] = x[:, 50000] = 9.0
    out = [torch.empty_like(x), torch.empty(2), torch.empty(2, dtype=torch.int64)]
    source = emit(k, Config(ONE, 4096, False, 1, 16, 8), wide=False)
    SimulatedLauncher(k, source)([x, *out], () if isinstance(cols, int) else (length,))
    y = x.float() / x.float().sum(1, keepdim=True)
    torch.testing.assert_close(out[0].float(), y, rtol=1e-5 if dtype == "f32" else 1e-2, atol=0)
    torch.testing.assert_close(out[1], (y * y).sum(1), rtol=1e-4, atol=0)
    assert torch.equal(out[2], torch.full((2,), 100))
    if isinstance(cols, int):
        assert (source.text.count("for back in") >= 1) == (dtype == "bf16")


@pytest.mark.parametrize("split", [1, 4])
def test_elements_are_stored_once_with_the_sums_of_parts(split: int) -> None:
    """The programs that share a row store what they add up."""
    b = Builder("scaled", p=[3], r=[1000])
    x, z, y = b.input("x", "f32"), b.output("z", "f32"), b.output("y", "f32")
    i, j = b.axes
    v = b.load(x, i * 1000 + j) * 2
    b.store(z, i * 1000 + j, v)
    b.store(y, i, b.reduce("sum", v))
    data, doubled, sums = torch.randn(3, 1000), torch.full((3, 1000), torch.nan), torch.empty(3)
    kernel = b.build()
    SimulatedLauncher(kernel, emit(kernel, Config(ONE, 64, False, split, 4)))([data, doubled, sums])
    assert torch.equal(doubled, 2 * data)
    torch.testing.assert_close(sums, doubled.sum(1), rtol=1e-4, atol=1e-4)
