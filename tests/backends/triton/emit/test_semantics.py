"""The emitted source against torch, on CPU tensors: types, special values, reductions, indices, accumulation."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.toolkit.ir import Builder, interpret, symbol
from fusewright.toolkit.ir.optable import OPS
from fusewright.toolkit.ir.types import TYPES, DType, is_float, to_torch
from fusewright_triton import target
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.operators import FORMS, Unsupported
from fusewright_triton.emit.schedule import Config, Tile, choose
from fusewright_triton.runtime import SimulatedLauncher, simulate_kernels
from tests.backends.triton.kernels import (
    argmax,
    column_sum,
    decayed_maximum,
    embedding,
    layer_norm,
    masked_mean,
    recurrence,
    reference,
    scatter_add,
    simulate,
    softmax,
    transpose,
)

H100 = target.NVIDIA["sm_90"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 2.5, 3.7, -7.2, math.inf, -math.inf, math.nan, 1e-30, 700.0]


def test_every_op_of_the_ir_has_a_form() -> None:
    assert set(FORMS) == set(OPS)
    for name, row in OPS.items():
        kinds = (FORMS[name].floats, FORMS[name].ints, FORMS[name].bools)
        for kind, text in zip(("float", "int", "bool"), kinds, strict=True):
            assert (kind not in row.kinds) or text, f"{name} on {kind}"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", [n for n, r in OPS.items() if "float" in r.kinds and n != "where"])
def test_float_ops_like_torch(name: str, dtype: str) -> None:
    row, n = OPS[name], len(SPECIAL)
    b = Builder(name, p=[n * n])
    ins = [b.input(f"x{k}", dtype) for k in range(row.arity)]
    (i,) = b.axes
    v = b.op(name, *(b.load(x, i) for x in ins))
    out = b.output("out", v.dtype)
    b.store(out, i, v)
    grid = torch.tensor(SPECIAL, dtype=to_torch(dtype))
    pair = [grid.repeat_interleave(n), grid.repeat(n)][: row.arity]
    got = torch.empty(n * n, dtype=to_torch(v.dtype))
    simulate(b.build(), [*pair, got])
    want = row.ref(*pair)
    torch.testing.assert_close(got, want, rtol=3e-16 if dtype == "f64" else 1e-6, atol=0, equal_nan=True)
    if name in ("neg", "abs", "copysign", "mul", "add", "round", "trunc", "floor", "ceil"):
        assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~want.isnan()])


@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "i32", "i64"])
@pytest.mark.parametrize("name", [n for n, r in OPS.items() if "int" in r.kinds and n != "where"])
def test_integer_ops_like_torch(name: str, dtype: str) -> None:
    row, info = OPS[name], torch.iinfo(to_torch(dtype))
    points = sorted({info.min, info.min + 1, -7, -2, -1, 0, 1, 2, 3, 7, 31, info.max - 1, info.max})
    grid = torch.tensor([p for p in points if info.min <= p <= info.max], dtype=to_torch(dtype))
    n = grid.numel()
    pair = [grid.repeat_interleave(n), grid.repeat(n)][: row.arity]
    if name in ("floordiv", "truncdiv", "remainder", "fmod"):
        keep = (pair[1] != 0) & ~((pair[1] == -1) & (pair[0] == info.min))
        pair = [x[keep] for x in pair]
    b = Builder(name, p=[pair[0].numel()])
    ins = [b.input(f"x{k}", dtype) for k in range(row.arity)]
    (i,) = b.axes
    v = b.op(name, *(b.load(x, i) for x in ins))
    out = b.output("out", v.dtype)
    b.store(out, i, v)
    got = torch.empty(pair[0].numel(), dtype=to_torch(v.dtype))
    simulate(b.build(), [*pair, got])
    assert torch.equal(got, row.ref(*pair))


@pytest.mark.parametrize("src", list(TYPES))
def test_casts_like_torch(src: str) -> None:
    x = torch.tensor([0.0, 1.37, -2.6, 100.3, 3.0, -0.0], dtype=torch.float64)
    x = (x.abs() if src in ("u8", "bool") else x).to(to_torch(src))
    for dst in TYPES:
        b = Builder(f"{src}_{dst}", p=[x.numel()])
        a, y = b.input("x", src), b.output("y", dst)
        (i,) = b.axes
        b.store(y, i, b.load(a, i).to(dst))
        if is_float(src) and dst == "u8":
            x = x.abs()  # negative floats to u8 are undefined in torch
        got = torch.empty(x.numel(), dtype=to_torch(dst))
        simulate(b.build(), [x, got])
        assert torch.equal(got, x.to(to_torch(dst))), (src, dst)


@pytest.mark.parametrize("dst", ["bf16", "f16"])
def test_half_types_round_to_even(dst: str) -> None:
    bits = torch.arange(0, 2**32, 2**32 // 9973, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    b = Builder("round", p=[x.numel()])
    a, y = b.input("x", "f32"), b.output("y", dst)
    (i,) = b.axes
    b.store(y, i, b.load(a, i).to(dst))
    got, want = torch.empty(x.numel(), dtype=to_torch(dst)), x.to(to_torch(dst))
    simulate(b.build(), [x, got])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~want.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))


CONFIGS = {
    "at once": Config((Tile((0,), 4),), 64, True, 1, 4),
    "in steps": Config((Tile((0,), 4),), 16, False, 1, 4),
    "one row, in steps": Config((Tile((0,), 1),), 16, False, 1, 4),
    "shared": Config((Tile((0,), 4),), 8, False, 4, 4),
}


@pytest.mark.parametrize("how", ["argmax", "argmin", "max", "min", "prod", "sum", "mean", "m2"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("column", [False, True])
def test_reductions_like_torch(how: str, name: str, column: bool) -> None:
    rows, cols = 6, 50
    b = Builder(how, p=[rows], r=[cols])
    x, y = b.input("x", "f32"), b.output("y", "i64" if how.startswith("arg") else "f32")
    i, j = b.axes
    b.store(y, i, b.reduce(how, b.load(x, j * rows + i if column else i * cols + j)))
    torch.manual_seed(0)
    data = torch.randint(-9, 9, (rows, cols)).float() if "arg" in how else torch.randn(rows, cols)
    if how in ("max", "argmax", "min", "argmin"):
        data[0, 22] = data[0, 23] = math.nan
        data[1] = -math.inf
        data[2] = math.inf
    out = torch.zeros(rows, dtype=torch.int64 if how.startswith("arg") else torch.float32)
    stored = data.t().contiguous() if column else data
    k = b.build()
    SimulatedLauncher(k, emit(k, CONFIGS[name]))([stored, out])
    want = torch.zeros_like(out)
    interpret(k, [stored, want])
    torch.testing.assert_close(out, want, equal_nan=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_in_every_configuration(name: str) -> None:
    k = layer_norm(6, 50)
    data = [torch.randn(6, 50) * 3 + 100, torch.randn(50), torch.randn(50), torch.empty(6, 50)]
    SimulatedLauncher(k, emit(k, CONFIGS[name]))(data)
    want = torch.nn.functional.layer_norm(data[0].double(), (50,), data[1].double(), data[2].double())
    torch.testing.assert_close(data[3].double(), want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("how", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("name", ["at once", "in steps", "one row, in steps"])
def test_scans_like_torch(how: str, name: str) -> None:
    rows, cols = 5, 41
    b = Builder(f"cum{how}", p=[rows], r=[cols])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    b.store(y, i * cols + j, b.scan(how, b.load(x, i * cols + j)))
    k = b.build()
    data, out = torch.rand(rows, cols) + 0.5, torch.empty(rows, cols)
    SimulatedLauncher(k, emit(k, CONFIGS[name]))([data, out])
    ref = getattr(torch, f"cum{how}")(data, 1)
    torch.testing.assert_close(out, ref if isinstance(ref, torch.Tensor) else ref.values)


@pytest.mark.parametrize("name", ["at once", "in steps", "one row, in steps"])
def test_a_scan_of_what_all_rows_share_fills_the_block(name: str) -> None:
    """Triton's lowering asserts this: an image's positions, a cumulative sum of ones, once failed to build for any GPU."""
    rows, cols = 5, 41
    b = Builder("cumsum", p=[rows], r=[cols])
    x, y, whole = b.input("x", "f32"), b.output("y", "f32"), b.output("whole", "f32")
    i, j = b.axes
    ones, shared = b.scan("sum", b.const(1.0, "f32")), b.scan("sum", b.load(x, j))
    b.store(y, i * cols + j, ones)
    b.store(whole, j, b.op("mul", shared, b.const(0.5, "f32")))
    k = b.build()
    source = emit(k, CONFIGS[name])
    if "XB" in source.text:
        assert source.text.count("[XB, RB])") >= 2
    data, out, half = torch.rand(cols), torch.empty(rows, cols), torch.empty(cols)
    SimulatedLauncher(k, source)([data, out, half])
    torch.testing.assert_close(out, torch.ones(rows, cols).cumsum(1))
    torch.testing.assert_close(half, data.cumsum(0) / 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_softmax_of_special_rows_in_every_configuration(name: str) -> None:
    k = softmax(9, 50)
    x, out = torch.randn(9, 50) * 20, torch.empty(9, 50)
    x[0] = -math.inf
    x[1, :49] = -math.inf
    x[2, 7] = math.inf
    x[3, 20] = math.nan
    x[4, ::2] = -math.inf
    x[5] = 0.0
    source = emit(k, CONFIGS[name])
    assert ("fw.online" in source.text) == (name != "at once")
    SimulatedLauncher(k, source)([x, out])
    torch.testing.assert_close(out, x.softmax(-1), equal_nan=True)


@pytest.mark.parametrize("arch", [None, "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_softmax_as_the_targets_run_it(dtype: str, arch: str | None) -> None:
    k = softmax(7, 100, dtype)
    x = torch.randn(7, 100).to(to_torch(dtype))
    out = torch.empty_like(x)
    simulate(k, [x, out], target={**target.NVIDIA, **target.AMD}[arch] if arch else None)
    torch.testing.assert_close(out, x.softmax(-1))


def test_long_rows_are_shared_and_combined() -> None:
    k = argmax(2, 200_000)
    assert len(emit(k, Config((Tile((0,), 1),), 4096, False, 8, 8)).functions) == 2
    x, out = torch.randn(2, 200_000), torch.zeros(2, dtype=torch.int64)
    SimulatedLauncher(k, emit(k, Config((Tile((0,), 1),), 4096, False, 8, 8)))([x, out])
    assert torch.equal(out, x.argmax(-1))


def test_few_columns_are_shared_too() -> None:
    k = column_sum(1000, 70)
    x, out = torch.randn(1000, 70), torch.empty(70)
    SimulatedLauncher(k, emit(k, Config((Tile((0,), 32),), 64, False, 4, 4)))([x, out])
    torch.testing.assert_close(out, x.sum(0))


def test_transposing_kernels_get_tiles() -> None:
    k = transpose(40, 70)
    source = simulate_kernels([k], H100).sources
    assert any("YB: tl.constexpr" in s.text for s in source.values())
    x, out = torch.randn(70, 40).bfloat16(), torch.empty(40, 70, dtype=torch.bfloat16)
    simulate(k, [x, out], target=H100)
    assert torch.equal(out, x.t())


def test_indices_are_checked_and_wrapped() -> None:
    k = embedding(5, 8, 10)
    table, out = torch.randn(10, 8).bfloat16(), torch.empty(5, 8, dtype=torch.bfloat16)
    ids = torch.tensor([0, 9, -1, -10, 3])
    simulate(k, [ids, table, out])
    assert torch.equal(out, table[ids])
    for bad in (10, -11):
        ids[2] = bad
        with pytest.raises(IndexError):
            simulate(k, [ids, table, out])


def test_a_masked_index_is_not_checked() -> None:
    b = Builder("masked", p=[4])
    ids, table, out = b.input("ids", "i64"), b.input("table", "f32"), b.output("out", "f32")
    (i,) = b.axes
    at = b.load(ids, i)
    ok = at.ne(-100)
    b.store(out, i, b.load(table, b.indirect(b.bound(at, 3, mask=ok)), mask=ok, other=5.0))
    got = torch.empty(4)
    simulate(b.build(), [torch.tensor([2, -100, 0, -100]), torch.tensor([1.0, 2.0, 3.0]), got])
    assert got.tolist() == [3.0, 5.0, 1.0, 5.0]


def test_scatter_add_meets_in_one_element() -> None:
    k = scatter_add(20, 5, 3)
    ids, src, out = torch.randint(0, 3, (20,)), torch.randint(0, 9, (20, 5)).float(), torch.ones(3, 5)
    want = reference(k, [ids, src, out])[2]
    simulate(k, [ids, src, out])
    assert torch.equal(out, want)


@pytest.mark.parametrize("how", ["", "add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "i8"])
def test_updates_that_do_not_meet(how: str, dtype: str) -> None:
    b = Builder("update", p=[30])
    x, out = b.input("x", dtype), b.inout("out", dtype)
    (i,) = b.axes
    b.store(out, i * 2, b.load(x, i), how=how)
    k = b.build()
    data = [torch.randint(-5, 5, (n,)).to(to_torch(dtype)) for n in (30, 60)]
    want = reference(k, data)
    simulate(k, data)
    assert torch.equal(data[1], want[1])


def test_what_hardware_cannot_accumulate_is_refused() -> None:
    b = Builder("scatter_mul", p=[8])
    ids, out = b.input("ids", "i64"), b.inout("out", "f32")
    (i,) = b.axes
    b.store(out, b.indirect(b.bound(b.load(ids, i), 4)), b.const(2.0, "f32"), how="mul")
    k = b.build()
    with pytest.raises(Unsupported, match="mul"):
        emit(k, Config((Tile((0,), 8),), 0, False, 1, 1))


def test_booleans_in_and_out() -> None:
    k = masked_mean(9, 33)
    x, m = torch.randn(9, 33), torch.rand(9, 33) > 0.5
    m[0], m[1] = True, False
    data = [x, m, torch.empty(9), torch.empty(9, dtype=torch.bool)]
    want = reference(k, data)
    simulate(k, data)
    torch.testing.assert_close(data[2], want[2])
    assert torch.equal(data[3], want[3])


def test_quotients_of_tiny_numbers_and_signs_of_zeros() -> None:
    b = Builder("divide", p=[256])
    x, y, out = b.input("x", "f32"), b.input("y", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.op("div", b.load(x, i), b.load(y, i)))
    finite = [0.0, -0.0, 1e-45, -1e-42, 1e-38, 3e-30, 1.0, -3.0, 1 / 3, 7e5, 1e30, 3e38, -3e38]
    values = torch.tensor([*finite, math.inf, -math.inf, math.nan])
    one, other, got = values.repeat_interleave(16), values.repeat(16), torch.empty(256)
    simulate(b.build(), [one, other, got])
    want = one / other
    torch.testing.assert_close(got, want, rtol=2.0**-22, atol=3e-45, equal_nan=True)
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


def test_integer_division_by_zero_is_an_error_on_the_cpu() -> None:
    b = Builder("divide", p=[4])
    x, y, out = b.input("x", "i32"), b.input("y", "i32"), b.output("out", "i32")
    (i,) = b.axes
    b.store(out, i, b.op("floordiv", b.load(x, i), b.load(y, i)))
    k = b.build()
    ones, zeros, out_t = torch.ones(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.empty(4).int()
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        simulate(k, [ones, zeros, out_t])
    assert "error_ptr" not in emit(k, Config((Tile((0,), 4),), 0, False, 1, 1)).text, "GPUs do not raise"


def test_scalars_and_sizes_are_arguments() -> None:
    n = symbol("n")
    b = Builder("scale", p=[n, 3], symbols={"n": 10})
    x, out = b.input("x", "f64"), b.output("out", "f64")
    a, flag = b.scalar("alpha", "f64"), b.scalar("flag", "bool")
    i, j = b.axes
    b.store(out, i * 3 + j, b.where(flag, b.load(x, i * 3 + j) * a, b.index_value(i).to("f64")))
    k = b.build()
    for rows in (0, 1, 7):
        data, out_t = torch.randn(rows, 3, dtype=torch.float64), torch.empty(rows, 3, dtype=torch.float64)
        simulate(k, [data, out_t], [rows], [0.1, True])
        assert torch.equal(out_t, data * 0.1)
        simulate(k, [data, out_t], [rows], [0.1, False])
        assert torch.equal(out_t, torch.arange(rows).double().unsqueeze(1).expand(rows, 3))


def test_negative_strides_and_divisions_of_negative_indices() -> None:
    b = Builder("roll", p=[10])
    x, out = b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, (i - 3) % 10) + b.load(x, 9 - i))
    data, out_t = torch.arange(10.0), torch.empty(10)
    simulate(b.build(), [data, out_t])
    assert torch.equal(out_t, data.roll(3) + data.flip(0))


def test_minus_zero_survives_as_constant_and_as_product() -> None:
    b = Builder("zero", p=[4])
    x, out, sign = b.input("x", "f32"), b.output("out", "f32"), b.output("sign", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, i) * -0.0)
    b.store(sign, i, b.const(-0.0, "f32"))
    data = [torch.ones(4), torch.empty(4), torch.empty(4)]
    simulate(b.build(), data)
    assert bool(data[1].signbit().all())
    assert bool(data[2].signbit().all())


def test_wide_offsets_use_64_bits() -> None:
    k = softmax(1 << 20, 4096)
    assert "tl.program_id(0).to(tl.int64)" in simulate_kernels([k], H100).sources.popitem()[1].text
    small = softmax(1 << 10, 4096)
    assert "int64" not in simulate_kernels([small], H100).sources.popitem()[1].text


def test_a_comparison_of_a_row_meets_those_of_its_elements() -> None:
    """`max(x)` in training marks the elements that equal the maximum, or are NaN if the maximum is."""
    b = Builder("is_max", p=[3], r=[5])
    x, out = b.input("x", "f32"), b.output("out", "bool")
    i, j = b.axes
    v = b.load(x, i * 5 + j)
    top = b.reduce("max", v)
    b.store(out, i * 5 + j, b.op("eq", v, top) | (b.op("isnan", v) & b.op("isnan", top)))
    data, out_t = torch.randn(3, 5), torch.empty(3, 5, dtype=torch.bool)
    data[1, 2] = math.nan
    for target_ in (None, H100):
        simulate(b.build(), [data, out_t], target=target_)
        most = data.amax(1, keepdim=True)
        assert torch.equal(out_t, (data == most) | (data.isnan() & most.isnan()))


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i64"])
@pytest.mark.parametrize("shape", [(6, 37, 5), (1, 8, 33), (1, 40, 1), (3, 1, 16)])
@pytest.mark.parametrize("first", [None, 0.0])
def test_a_recurrence_is_a_loop_over_its_steps(dtype: DType, shape: tuple[int, int, int], first: float | None) -> None:
    k, t = recurrence(*shape, dtype, first), to_torch(dtype)
    a, b = ((torch.randn(shape)).to(t) for _ in range(2))
    tensors = [a, b, torch.randn(shape[0], shape[2]).to(t), torch.zeros_like(b)]
    want = reference(k, tensors)
    simulate(k, tensors)
    torch.testing.assert_close(tensors[3], want[3])
    c = choose(k, H100)
    assert (c.row, c.persistent, c.split) == (1, False, 1)
    SimulatedLauncher(k, emit(k, c))(tensors)
    torch.testing.assert_close(tensors[3], want[3])


def test_a_step_may_be_any_pointwise_expression_and_read_another_state() -> None:
    k, tensors = decayed_maximum(), [torch.randn(5), torch.randn(6, 37, 5), torch.zeros(6, 37, 5), torch.zeros(6, 37, 5)]
    tensors[1][2, 11, 3] = math.nan
    want = reference(k, tensors)
    for launch in (lambda: simulate(k, tensors), lambda: SimulatedLauncher(k, emit(k, choose(k, H100)))(tensors)):
        launch()
        torch.testing.assert_close(tensors[2:], want[2:], equal_nan=True)


def test_steps_of_a_recurrence_are_read_ahead() -> None:
    assert "in tl.range(0, 37, RB, num_stages=" in emit(recurrence(), choose(recurrence(), H100)).text
