"""Rows of all shapes: in place, long and short, of several axes, of symbolic sizes; every memory access is checked, for any order
of the threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright.toolkit.ir.types import DType, to_torch
from fusewright.toolkit.transform.split import split_rows
from fusewright_mps.emit.schedule import Config, choose
from fusewright_mps.emitter import Unsupported, emit, library, variant_for
from fusewright_mps.policy import policy
from fusewright_mps.simulate.library import compile_shader
from fusewright_mps.target import TARGETS, TYPICAL
from tests.backends.mps import representative
from tests.backends.mps.simulated import Module, compiled, reference

SHAPES = {"a simdgroup": (80, 300), "a threadgroup": (3, 3000), "a thread": (9, 4), "one point": (1, 40)}


def tensors(k: Kernel, rows: int, cols: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = {"x": (rows, cols), "out": (rows, cols), "weight": (cols,), "bias": (cols,)}
    return [torch.randn(shapes[b.name], generator=g).to(to_torch(b.dtype)) for b in k.buffers]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_of_any_length_in_place_or_not(dtype: DType, backward: bool) -> None:
    makers = (representative.softmax, representative.layer_norm)
    cases = [(make(r, c, dtype), r, c) for r, c in SHAPES.values() for make in makers]
    module = compiled([k for k, _, _ in cases], backward=backward)
    for at, (k, rows, cols) in enumerate(cases):
        ts, said = tensors(k, rows, cols), f"{k.name} of {rows}x{cols}"
        want = reference(k, ts)[-1]
        module.run(at, ts)
        torch.testing.assert_close(ts[-1], want, msg=lambda m, said=said: f"{said}: {m}")
        ts[-1] = ts[0]  # the thread that overwrites x is the last to read it
        assert k.may_share(len(ts) - 1, 0)
        module.run(at, ts)
        torch.testing.assert_close(ts[-1], want, msg=lambda m, said=said: f"{said} in place: {m}")


def test_configurations_are_those_that_the_shapes_are_named_after() -> None:
    found = {name: choose(representative.softmax(*shape), TYPICAL).workers for name, shape in SHAPES.items()}
    assert found == {"a simdgroup": "simd", "a threadgroup": "group", "a thread": "thread", "one point": "simd"}
    assert choose(representative.column_sum(), TYPICAL).workers == "columns"
    assert choose(representative.softmax(64, 3000), TYPICAL).held
    assert not choose(representative.softmax(64, symbol("n")), TYPICAL).held


def test_a_row_has_more_threads_where_a_chip_has_more_cores() -> None:
    """20 rows of 4096 occupy the cores of a small chip, but not those of a large one."""
    k = representative.rms_norm(20)
    found = {name: choose(k, TARGETS[name]).count for name in ("M1", "M3 Pro", "M4 Max", "M3 Ultra")}
    assert found == {"M1": 256, "M3 Pro": 512, "M4 Max": 512, "M3 Ultra": 512}
    few = representative.softmax(100, 512)
    assert [choose(few, TARGETS[name]).workers for name in ("M1", "M5", "M3 Ultra")] == ["simd", "simd", "group"]


def test_long_loops_and_split_rows_follow_the_cores() -> None:
    flat = representative.add_gelu(symbol("n"), "bf16")
    assert [choose(flat, TARGETS[n]).most for n in ("M1", "M4 Max")] == [8 * 3072, 40 * 3072]
    assert [policy(TARGETS[n]).splits.parts for n in ("M1", "M4 Max", "M3 Ultra")] == [32, 64, 128]
    assert [policy(TARGETS[n]).splits.few_points for n in ("M1", "M3 Ultra")] == [8, 80]


@pytest.mark.parametrize("name", TARGETS)
def test_a_configuration_is_within_the_limits_of_its_chip(name: str) -> None:
    chip = TARGETS[name]
    for k in (*representative.KERNELS.values(), representative.softmax(1, 1 << 20), representative.softmax(2, 2000)):
        group = choose(k, chip).group
        assert group[0] * group[1] * group[2] <= chip.max_threads


def running(how: str, rows: int, cols: int, dtype: DType) -> Kernel:
    b = Builder(f"running_{how}", p=[rows], r=[cols])
    x, out = b.input("x", dtype), b.output("out", dtype)
    i, j = b.axes
    b.store(out, i * cols + j, b.scan(how, b.load(x, i * cols + j)))
    return b.build()


@pytest.mark.parametrize("backward", [False, True])
def test_a_long_row_is_counted_along_by_a_threadgroup(backward: bool) -> None:
    """It takes several steps, the last one partial. It works in place too, since each thread stores only elements that it alone
    reads. Threads past the end read nothing."""
    cases: list[tuple[str, DType, int]] = [
        ("sum", "f32", 5000),
        ("prod", "i64", 1100),
        ("max", "f32", 3001),
        ("min", "i32", 129),
    ]
    kernels = [running(how, 3, cols, dtype) for how, dtype, cols in cases]
    assert {choose(k, TYPICAL).workers for k in kernels} == {"group"}
    module = compiled(kernels, backward=backward)
    g = torch.Generator().manual_seed(5)
    for at, (k, (_, dtype, cols)) in enumerate(zip(kernels, cases, strict=True)):
        x = torch.randn(3, cols, generator=g) if dtype == "f32" else torch.randint(-9, 9, (3, cols), generator=g)
        ts = [x.to(to_torch(dtype)), torch.zeros(3, cols, dtype=to_torch(dtype))]
        want = reference(k, ts)[1]
        module.run(at, ts)
        torch.testing.assert_close(ts[1], want)
        ts[1] = ts[0]
        module.run(at, ts)
        torch.testing.assert_close(ts[1], want)


def test_a_running_maximum_is_nan_behind_a_nan_of_another_simdgroup() -> None:
    k = running("max", 1, 2000, "f32")
    x, out = torch.arange(2000.0)[None].clone(), torch.zeros(1, 2000)
    x[0, 700] = torch.nan
    compiled([k]).run(0, [x, out])
    assert torch.equal(out[0, :700], x[0, :700]) and out[0, 700:].isnan().all()


@pytest.mark.parametrize("rows", [40, 2000])
def test_a_statistic_is_updated_where_it_lies(rows: int) -> None:
    """All threads that share a point read it before one of them overwrites it."""
    b = Builder("running", p=[5], r=[rows])
    x, mean = b.input("x", "f32"), b.inout("mean", "f32")
    i, j = b.axes
    new = b.load(mean, i) * 0.9 + b.reduce("mean", b.load(x, i * rows + j)) * 0.1
    b.store(mean, i, new)
    k = b.build()
    ts = [torch.randn(5, rows), torch.randn(5)]
    want = reference(k, ts)[1]
    assert "barrier(mem_flags::mem_device);" in emit(k).text
    compiled([k], backward=True).run(0, ts)
    torch.testing.assert_close(ts[1], want)


def test_what_a_row_stage_stores_a_later_one_loads() -> None:
    b = Builder("turned", p=[3], r=[500])
    x, mid, out = b.input("x", "f32"), b.inout("mid", "f32"), b.output("out", "f32")
    i, j = b.axes
    b.store(mid, i * 500 + j, b.load(x, i * 500 + j) * 2.0)
    total = b.reduce("sum", b.load(x, i * 500 + j))
    b.store(out, i * 500 + j, b.load(mid, i * 500 - j + 499) + total)
    k = b.build()
    ts = [torch.randn(3, 500), torch.zeros(3, 500), torch.zeros(3, 500)]
    want = reference(k, ts)[2]
    assert "barrier(mem_flags::mem_device);" in emit(k).text
    compiled([k]).run(0, ts)
    torch.testing.assert_close(ts[2], want)


@pytest.mark.parametrize("shape", [(6, 7, 5), (4, 3, 200), (2, 40, 64)])
def test_rows_of_two_axes_with_gaps(shape: tuple[int, int, int]) -> None:
    """Batch statistics of an image: rows run over batch and pixels, and positions count both."""
    channels, batch, place = shape
    kernels = []
    for how in ("sum", "argmax"):
        b = Builder(f"{how}_of_image", p=[channels], r=[batch, place])
        i, n, h = b.axes
        y = b.reduce(how, b.load(b.input("x", "f32"), n * (channels * place + 3) + i * place + h))
        b.store(b.output("y", y.dtype), i, y)
        kernels.append(b.build())
    module = compiled(kernels)
    for at, k in enumerate(kernels):
        ts = [torch.randn(batch * (channels * place + 3)), torch.zeros(channels, dtype=to_torch(k.buffers[1].dtype))]
        want = reference(k, ts)[1]
        module.run(at, ts)
        torch.testing.assert_close(ts[1], want)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 77), (33, 1000), (0, 5), (4, 0)])
def test_sizes_that_are_known_late(sizes: tuple[int, int]) -> None:
    k = representative.softmax(symbol("n"), symbol("m"))
    ts = [torch.randn(sizes), torch.zeros(sizes)]
    compiled([k], check_division=False).run(0, ts, sizes)
    torch.testing.assert_close(ts[1], ts[0].softmax(-1))


def test_offsets_beyond_31_bits_are_64() -> None:
    k = representative.softmax(symbol("n"), 1000)
    assert not variant_for(k, [2_000_000]).wide
    wide = variant_for(k, [2_200_000])
    assert wide.wide
    text = emit(k, wide).text
    assert "const long p0" in text
    ts = [torch.randn(4, 1000), torch.zeros(4, 1000)]
    compiled([k], wide=True).run(0, ts, [4])
    torch.testing.assert_close(ts[1], ts[0].softmax(-1))


def test_a_long_row_that_is_overwritten_before_it_is_done_is_refused() -> None:
    b = Builder("again", p=[2], r=[symbol("n")], symbols={"n": 5000})
    x, y = b.inout("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    at = i * symbol("n") + j
    e = b.op("exp", b.op("tanh", b.load(x, at)))
    b.store(x, at, e * 2.0)
    b.store(y, at, e / b.reduce("sum", e))
    with pytest.raises(Unsupported, match="needed again after it was overwritten"):
        emit(b.build())


def test_an_output_in_a_long_rows_memory_gets_a_copy_of_the_row() -> None:
    """The row is read again after the output is stored; if they alias, only a copy still holds it."""
    n = symbol("n")
    b = Builder("again", p=[2], r=[n], symbols={"n": 5000})
    x, y, z = b.input("x", "f32"), b.output("y", "f32"), b.output("z", "f32")
    i, j = b.axes
    e = b.op("exp", b.op("tanh", b.load(x, i * n + j)))
    b.store(y, i * n + j, e * 2.0)
    b.store(z, i * n + j, e / b.reduce("sum", e))
    k = b.build()
    assert emit(k).apart and k.may_share(1, 0)
    ts = [torch.randn(2, 5000), torch.zeros(2, 5000), torch.zeros(2, 5000)]
    want = reference(k, ts, [5000])
    ts[1] = ts[0]
    compiled([k]).run(0, ts, [5000])
    torch.testing.assert_close(ts[1:], want[1:])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_fast_math_is_within_twice_eagers_own_error_of_fp64(dtype: DType) -> None:
    """The shim's fast functions have the largest error that Metal's specification allows."""
    made = (representative.bias_silu(16, 256, dtype), representative.softmax(16, 256, dtype))
    assert "fw_fast_sigmoid" in emit(made[0]).text
    assert "metal::fast::exp" in emit(made[1]).text
    module = compiled(made)
    torch.manual_seed(2)
    x, bias, gate = torch.randn(16, 256) * 4, torch.randn(256), torch.randn(16, 512)
    x, bias, gate = (t.to(to_torch(dtype)) for t in (x, bias, gate))
    out = torch.empty_like(x)
    module.run(0, [x, bias, gate, out])
    exact = torch.nn.functional.silu(x.double() + bias.double()) * gate[:, :256].double()
    assert off(out, exact) <= 2 * off(exact.to(out.dtype), exact)
    module.run(1, [x, out])
    exact = x.double().softmax(-1)
    assert off(out, exact) <= 2 * off(x.softmax(-1), exact)


@pytest.mark.parametrize("shape", [(3, 6000), (2, 5001), (3000, 40)])
def test_long_sums_are_as_accurate_as_torchs(shape: tuple[int, int]) -> None:
    rows, cols = shape
    columns = rows > cols
    b = Builder("total", p=[cols if columns else rows], r=[rows if columns else cols])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    b.store(y, i, b.reduce("sum", b.load(x, j * cols + i if columns else i * cols + j)))
    torch.manual_seed(4)
    data = torch.rand(shape) + 1.0
    out = torch.zeros(cols if columns else rows)
    compiled([b.build()]).run(0, [data, out])
    exact, torchs = data.double().sum(0 if columns else 1), data.sum(0 if columns else 1)
    assert off(out, exact) <= 2 * off(torchs, exact) + 2.0**-24


@pytest.mark.parametrize("how", ["sum", "max", "argmax"])
def test_a_long_row_of_few_points_is_two_kernels(how: str) -> None:
    """The toolkit splits it: the first kernel reduces parts of the row in parallel, the second combines them."""
    b = Builder("long", p=[2], r=[40_013])
    i, j = b.axes
    y = b.reduce(how, b.load(b.input("x", "f32"), i * 40_013 + j))
    b.store(b.output("y", y.dtype), i, y)
    split = split_rows(b.build())
    assert split is not None
    steps = compiled([split.first.kernel, split.second.kernel])
    x, y_ = torch.randn(2, 40_013), torch.zeros(2, dtype=to_torch(y.dtype))
    parts = [torch.zeros(int(n), dtype=to_torch(t)) for t, n in split.partials if isinstance(n, int)]
    steps.run(0, [x, *parts])
    steps.run(1, [x, y_, *parts])
    want = {"sum": x.double().sum(1).float(), "max": x.amax(1), "argmax": x.argmax(1)}[how]
    torch.testing.assert_close(y_, want, atol=2e-4, rtol=1e-6)


CONFIGS = {
    "a thread": Config("thread", 1, None, 1, (0,), (16, 1, 1)),
    "a simdgroup": Config("simd", 32, 1, 1, (0,), (64, 1, 1)),
    "a simdgroup, two at once": Config("simd", 32, 1, 2, (0,), (64, 1, 1)),
    "a threadgroup, held": Config("group", 128, 1, 2, (0,), (128, 1, 1), 8),
    "a threadgroup, four at once": Config("group", 64, 1, 4, (0,), (64, 1, 1)),
    "a full threadgroup": Config("group", 1024, 1, 1, (0,), (1024, 1, 1)),
    "columns": Config("columns", 4, 1, 1, (0,), (32, 4, 1)),
    "columns of one simdgroup": Config("columns", 1, 1, 1, (0,), (32, 1, 1)),
}


@pytest.mark.parametrize("backward", [False, True])
def test_softmax_of_special_rows_in_every_configuration(backward: bool) -> None:
    """Maximum and sum take one pass, except if a row stays in registers or belongs to a single thread."""
    k = representative.softmax(10, 2000)
    sources = [emit(replace(k, name=f"softmax_{at}"), config=c) for at, c in enumerate(CONFIGS.values())]
    once = {name for name, source in zip(CONFIGS, sources, strict=True) if "fw_online(" in source.text}
    assert set(CONFIGS) - once == {"a thread", "a threadgroup, held"}
    module = Module(sources, compile_shader(library(sources), True, backward))
    x, out = torch.randn(10, 2000, generator=torch.Generator().manual_seed(3)) * 20, torch.empty(10, 2000)
    x[0] = -torch.inf
    x[1, :1999] = -torch.inf
    x[2, 7] = torch.inf
    x[3, 1020] = torch.nan
    x[4, ::2] = -torch.inf
    x[5] = 0.0
    x[6, 0], x[6, 1] = torch.nan, torch.inf
    x[7] = torch.arange(2000.0)
    exact = x.double().softmax(-1)
    for at, name in enumerate(CONFIGS):
        module.run(at, [x, out])
        torch.testing.assert_close(out, exact.float(), equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
        assert off(out[8:], exact[8:]) <= 2 * off(x[8:].softmax(-1), exact[8:]) + 2.0**-24, name


def test_a_softmax_over_columns_reads_them_twice() -> None:
    """Their maximum and sum take one pass, over neighbouring columns in parallel."""
    b = Builder("down", p=[6, 64], r=[400])
    i, h, j = b.axes
    v = b.load(b.input("x", "f32"), i * (400 * 64) + j * 64 + h)
    e = b.op("exp", v - b.reduce("max", v))
    b.store(b.output("out", "f32"), i * (400 * 64) + j * 64 + h, e / b.reduce("sum", e))
    k = b.build()
    text = emit(k).text
    assert choose(k, TYPICAL).workers == "columns" and text.count("= x[") == 2
    x, out = torch.randn(6, 400, 64), torch.empty(6, 400, 64)
    compiled([k]).run(0, [x, out])
    torch.testing.assert_close(out, x.softmax(1))


def off(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((got.double() - exact).abs() / exact.abs().clamp_min(1e-6)).max())
