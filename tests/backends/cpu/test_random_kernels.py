"""Random kernels: the emitter against the interpreter, bit for bit.

Values are small whole numbers, infinities, NaN and signed zeros, and the ops are correctly rounded in IEEE
arithmetic, so every order of evaluation gives the same bits and the comparison is exact."""

from __future__ import annotations

import functools
import math
import platform
from dataclasses import dataclass

import llvmlite.binding
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusewright.toolkit.ir import Builder, Index, Kernel, Val, interpret, structural_hash, symbol, to_text
from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.types import DType, is_float, to_torch
from fusewright.toolkit.transform.split import split_rows
from fusewright_cpu.run import codegen, jit
from fusewright_cpu.run.jit import compile_kernels
from fusewright_cpu.target import CpuTarget, target_machine, x86_target
from tests.kernels import decayed_maximum, recurrence

SIZES = st.sampled_from([0, 1, 2, 3, 7, 15, 16, 17, 33, 64, 65, 130])
FLOAT_OPS = {
    1: ["neg", "abs", "sign", "floor", "ceil", "round", "trunc"],
    2: [
        "add",
        "sub",
        "mul",
        "minimum",
        "maximum",
        "copysign",
        "fmin",
        "fmax",
        "remainder",
        "floordiv",
        "fmod",
    ],
}
INT_OPS = {
    1: ["neg", "abs", "sign", "not"],
    2: ["add", "sub", "mul", "minimum", "maximum", "and", "or", "xor", "shl", "shr"],
}
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Case:
    kernel: Kernel
    tensors: list[torch.Tensor]
    sizes: list[int]


def values(shape: list[int], dtype: str, seed: int, odd: bool) -> torch.Tensor:
    """Small whole numbers; with `odd` also NaN, infinities and -0.0."""
    g = torch.Generator().manual_seed(seed)
    low = 0 if dtype in ("u8", "bool") else -4
    x = torch.randint(low, 2 if dtype == "bool" else 5, shape, generator=g).to(to_torch(dtype))
    if odd and is_float(dtype) and x.numel():
        for k, v in enumerate((math.nan, math.inf, -math.inf, -0.0)):
            x.view(-1)[(seed + k * 7) % x.numel()] = v
    return x


@st.composite
def layouts(draw: st.DrawFn, shape: list[int]) -> tuple[list[int], list[int]]:
    """(shape of a buffer, its stride per axis): contiguous, permuted, broadcast or with gaps."""
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.sampled_from([1, 1, 2]))
    broadcast = [draw(st.integers(0, 4)) == 0 for _ in shape]
    strides, total = [0] * len(shape), gap
    for a in reversed(order):
        if not broadcast[a]:
            strides[a], total = total, total * max(shape[a], 1)
    return [total], strides


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_p, n_r = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    shape = [draw(SIZES) for _ in range(n_p + n_r)]
    dynamic = draw(st.booleans())
    names = [f"n{a}" for a in range(len(shape))]
    extents = [symbol(n) if dynamic else s for n, s in zip(names, shape, strict=True)]
    hints = dict(zip(names, shape, strict=True)) if dynamic else {}
    dtype = draw(st.sampled_from(["f32", "f32", "f64", "i32", "i64", "u8", "i8"]))
    b = Builder("random", extents[:n_p], extents[n_p:], hints)
    tensors: list[torch.Tensor] = []
    pool: list[Val] = []
    odd = draw(st.booleans())
    for k in range(draw(st.integers(1, 3))):
        store = draw(st.sampled_from(["bf16", "f16", dtype] if dtype == "f32" else [dtype]))
        flat, strides = draw(layouts(shape))
        x = b.input(f"x{k}", store)
        tensors.append(values(flat, store, draw(st.integers(0, 99)), odd))
        pool.append(b.load(x, address(b, strides)).to(dtype))
    for _ in range(draw(st.integers(1, 6))):
        pool.append(step(draw, b, pool, dtype, n_r > 0))
    outputs = pool[-2:]
    for k, v in enumerate(outputs):
        strides = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
        y = b.output(f"y{k}", v.dtype)
        tensors.append(torch.zeros(math.prod(shape) or 1, dtype=to_torch(v.dtype)))
        b.store(y, address(b, strides), v)
    kernel = b.build()
    return Case(kernel, tensors, shape if dynamic else [])


def address(b: Builder, strides: list[int]) -> Index:
    return sum((axis * s for axis, s in zip(b.axes, strides, strict=True)), Index(sizes=b.p + b.r))


def step(draw: st.DrawFn, b: Builder, pool: list[Val], dtype: str, rows: bool) -> Val:
    """Draw one more value of type `dtype`."""

    def pick() -> Val:
        return draw(st.sampled_from(pool))

    kind = draw(st.sampled_from(["op", "op", "op", "where", "reduce", "any", "const"]))
    if kind == "reduce" and rows:
        return b.reduce(draw(st.sampled_from(["sum", "max", "min"])), pick())
    if kind == "any" and rows:
        how = draw(st.sampled_from(["any", "all"]))
        return b.where(b.reduce(how, pick() > 0), pick(), pick())
    if kind == "where":
        return b.where(draw(st.sampled_from([pick() < pick(), pick().eq(pick())])), pick(), pick())
    if kind == "const":
        return pick() + draw(st.sampled_from([0, 1, 2]))
    table = FLOAT_OPS if is_float(dtype) else INT_OPS
    name = draw(st.sampled_from(table[1] + table[2]))
    if dtype == "u8" and name in ("neg", "abs", "sign"):
        name = "not"
    return b.op(name, pick()) if name in table[1] else b.op(name, pick(), pick())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether values are equal. All NaNs count as equal, and the sign of zero is left to the test below (max of 0 and
    -0 may be either)."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


@SETTINGS
@given(cases())
def test_emitter_agrees_with_interpreter(case: Case) -> None:
    wanted = [t.clone() for t in case.tensors]
    interpret(case.kernel, wanted, case.sizes)
    got = [t.clone() for t in case.tensors]
    compile_kernels([case.kernel]).launcher(case.kernel).checked(got, case.sizes)
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a, b), f"{to_text(case.kernel)}\n{case.sizes}\n{a}\n{b}"


@functools.cache
def narrow_jit() -> tuple[CpuTarget, llvmlite.binding.TargetMachine, jit._Process]:
    target = x86_target("avx", llvmlite.binding.get_process_triple())
    return target, target_machine(target), jit._Process()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="narrows x86")
@settings(SETTINGS, max_examples=20)
@given(cases())
def test_narrow_vectors_without_masks_agree_too(case: Case) -> None:
    """The code for machines without masked loads and stores (such as AArch64): scalar tails, and scalar accumulators
    in addition to the vectors."""
    wanted = [t.clone() for t in case.tensors]
    interpret(case.kernel, wanted, case.sizes)
    (target, machine, process), name = narrow_jit(), structural_hash(case.kernel)
    text, symbols = codegen.kernels_to_text({name: case.kernel}, target, parallel=False)
    linked = process.link(codegen.to_object(text, machine), [name], symbols)
    got = [t.clone() for t in case.tensors]
    jit.Launcher(case.kernel, linked.addresses[name], linked).checked(got, case.sizes)
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a, b), f"{to_text(case.kernel)}\n{case.sizes}\n{a}\n{b}"


@pytest.mark.parametrize("how", ["argmax", "argmin", "max", "min", "prod", "sum", "mean", "m2"])
@pytest.mark.parametrize("shape", [(3, 1), (2, 17), (5, 64), (4, 1000), (1, 0)])
@pytest.mark.parametrize("column", [False, True])
def test_reductions_like_torch(how: str, shape: tuple[int, int], column: bool) -> None:
    rows, cols = shape
    if cols == 0 and how in ("max", "min", "argmax", "argmin"):
        pytest.skip("torch raises, the caller does so")
    b = Builder(how, p=[rows], r=[cols])
    x, y = b.input("x", "f32"), b.output("y", "i64" if how.startswith("arg") else "f32")
    i, j = b.axes
    b.store(y, i, b.reduce(how, b.load(x, j * rows + i if column else i * cols + j)))
    k = b.build()
    torch.manual_seed(0)
    data = torch.randint(-9, 9, shape).float() if "arg" in how else torch.randn(shape)
    if how in ("max", "argmax", "min", "argmin") and cols > 3:
        data[0, 2] = data[0, 3] = math.nan
    out = torch.zeros(rows, dtype=torch.int64 if how.startswith("arg") else torch.float32)
    stored = data.t().contiguous() if column else data
    compile_kernels([k]).launcher(k).checked([stored, out])
    special = {
        "m2": lambda t: (t - t.mean(-1, keepdim=True)).square().sum(-1),
        "max": lambda t: t.amax(-1),
        "min": lambda t: t.amin(-1),
    }
    want = special.get(how, lambda t: getattr(torch, how)(t, -1))(data)
    torch.testing.assert_close(out, want, equal_nan=True)


@pytest.mark.parametrize("how", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("column", [False, True])
def test_scans_like_torch(how: str, column: bool) -> None:
    rows, cols = 19, 37
    b = Builder(f"cum{how}", p=[rows], r=[cols])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    at = j * rows + i if column else i * cols + j
    b.store(y, at, b.scan(how, b.load(x, at)))
    k = b.build()
    data = torch.rand(cols, rows) + 0.5 if column else torch.rand(rows, cols) + 0.5
    out = torch.empty_like(data)
    compile_kernels([k]).launcher(k).checked([data, out])
    ref = getattr(torch, f"cum{how}")(data, 0 if column else 1)
    torch.testing.assert_close(out, ref if isinstance(ref, torch.Tensor) else ref.values)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "i64"])
@pytest.mark.parametrize("how", ["", "add", "mul", "max", "min"])
@pytest.mark.parametrize("features", [1, 3, 40])
def test_scatter_runs_in_order_on_any_number_of_threads(how: str, dtype: str, features: int) -> None:
    n, m = 500, 20
    b = Builder("scatter", p=[n, features])
    idx, src, out = b.input("idx", "i64"), b.input("src", dtype), b.inout("out", dtype)
    i, j = b.axes
    row = b.bound(b.load(idx, i), m)
    b.store(out, b.indirect(row, features) + j, b.load(src, i * features + j), how=how)
    k = b.build()
    torch.manual_seed(1)
    where = torch.randint(0, m, (n,))
    data = torch.randint(1, 4, (n, features)).to(to_torch(dtype))
    wanted = torch.zeros(m, features, dtype=to_torch(dtype))
    got = wanted.clone()
    interpret(k, [where, data, wanted])
    compile_kernels([k]).launcher(k).checked([where, data, got])
    if how == "mul" and dtype == "f32":
        assert same_bits(got, wanted)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("how", ["add", "mul"])
@pytest.mark.parametrize("points", [(40,), (3, 50), (50, 3)])
@pytest.mark.parametrize("known", [True, False])
def test_each_point_accumulates_where_all_store_one_value_to_one_element(
    how: str, points: tuple[int, ...], known: bool
) -> None:
    b = Builder("scatter", p=points)
    idx, src, out = b.input("idx", "i64"), b.input("src", "f64"), b.inout("out", "f64")
    place = Index(3) if known else b.indirect(b.bound(b.load(idx, Index()), 5))
    b.store(out, place, b.load(src, Index()), how=how)
    k = b.build()
    where, data, wanted = torch.tensor([3]), torch.tensor([1.5], dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    got = wanted.clone()
    interpret(k, [where, data, wanted])
    compile_kernels([k]).launcher(k).checked([where, data, got])
    assert wanted[3] > 50
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("shape", [(6, 40), (3, 5)])
def test_masked_loads_pad_and_concatenate(shape: tuple[int, int]) -> None:
    rows, cols = shape
    b = Builder("cat", p=[rows, 2 * cols + 3])
    x, y, out = b.input("x", "f32"), b.input("y", "bool"), b.output("out", "f32")
    i, j = b.axes
    at = b.index_value(j)
    left = b.load(x, i * cols + j, mask=at < cols, other=7.0)
    inside = (at >= cols) & (at < 2 * cols)
    right = b.load(y, i * cols + j - cols, mask=inside).to("f32")
    b.store(out, i * (2 * cols + 3) + j, b.where(inside, right, left))
    k = b.build()
    xs, ys, got = torch.randn(shape), torch.rand(shape) > 0.5, torch.empty(rows, 2 * cols + 3)
    compile_kernels([k]).launcher(k).checked([xs, ys, got])
    assert torch.equal(got, torch.cat([xs, ys.float(), torch.full((rows, 3), 7.0)], 1))


@pytest.mark.parametrize("src", ["f32", "f64", "bf16", "f16", "i8", "u8", "i16", "i32", "i64", "bool"])
def test_casts_like_torch(src: str) -> None:
    x = values([77], src, 3, odd=False)
    if is_float(src):
        x = x * 1.37
    kernels, wanted = [], []
    for dst in ("f32", "f64", "bf16", "f16", "i8", "u8", "i16", "i32", "i64", "bool"):
        if is_float(src) and dst == "u8":
            continue  # negative floats to u8 are undefined in torch
        b = Builder(f"{src}_{dst}", p=[77])
        a, y = b.input("x", src), b.output("y", dst)
        (i,) = b.axes
        b.store(y, i, b.load(a, i).to(dst))
        kernels.append(b.build())
        wanted.append(x.to(to_torch(dst)))
    module = compile_kernels(kernels)
    for k, want in zip(kernels, wanted, strict=True):
        got = torch.empty_like(want)
        module.launcher(k).checked([x, got])
        assert torch.equal(got, want), k.name


def test_bf16_rounds_to_even_and_keeps_subnormals_and_nan() -> None:
    bits = torch.arange(0, 2**32, 65521, dtype=torch.int64)
    x = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([math.nan, math.inf, 1e-40, -1e-40])])
    b = Builder("round", p=[x.numel()])
    a, y = b.input("x", "f32"), b.output("y", "bf16")
    (i,) = b.axes
    b.store(y, i, b.load(a, i).to("bf16"))
    k = b.build()
    got, want = torch.empty(x.shape, dtype=torch.bfloat16), x.bfloat16()
    compile_kernels([k]).launcher(k).checked([x, got])
    odd = want.isnan()
    assert torch.equal(odd, got.isnan())
    assert torch.equal(got[~odd].view(torch.int16), want[~odd].view(torch.int16))


def test_integer_division_like_torch() -> None:
    a = torch.tensor([7, -7, 7, -7, 0, -(2**31), 5] * 5, dtype=torch.int32)
    d = torch.tensor([2, 2, -2, -2, 3, -1, 7] * 5, dtype=torch.int32)
    for name, mode in (("floordiv", "floor"), ("truncdiv", "trunc"), ("remainder", None), ("fmod", None)):
        b = Builder(name, p=[a.numel()])
        x, y, z = b.input("x", "i32"), b.input("y", "i32"), b.output("z", "i32")
        (i,) = b.axes
        b.store(z, i, b.op(name, b.load(x, i), b.load(y, i)))
        k = b.build()
        got = torch.empty_like(a)
        launcher = compile_kernels([k]).launcher(k)
        launcher.checked([a, d, got])
        keep = (a != -(2**31)) | (d != -1)
        want = torch.div(a[keep], d[keep], rounding_mode=mode) if mode else getattr(torch, name)(a[keep], d[keep])
        assert torch.equal(got[keep], want), name
        with pytest.raises(RuntimeError, match="ZeroDivision"):
            launcher.checked([a, torch.zeros_like(d), got])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    b = Builder("column_sum", p=[700], r=[900])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    b.store(y, i, b.reduce("sum", b.load(x, j * 700 + i)))
    k = b.build()
    launcher = compile_kernels([k]).launcher(k)
    data, before = torch.randn(900, 700), torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(torch.empty(700))
            launcher.checked([data, outs[-1]])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("how", ["sum", "max", "any"])
@pytest.mark.parametrize("row", [1 << 15, (1 << 15) + 13])
@pytest.mark.parametrize("rows", [1, 3])
def test_long_reductions_split_in_two(how: str, row: int, rows: int) -> None:
    b = Builder("long", p=[rows] if rows > 1 else [], r=[row])
    dtype = "bool" if how == "any" else "f32"
    x, y = b.input("x", "f32"), b.output("y", dtype)
    *p, j = b.axes
    at = p[0] if p else 0
    v = b.load(x, j + at * row)
    b.store(y, at, b.reduce(how, v > 3.5 if how == "any" else v))
    kernel = b.build()
    split = split_rows(kernel)
    assert split is not None
    first, second = split.first.kernel, split.second.kernel
    data = torch.randn(rows, row)
    parts = [torch.empty(evaluate(n, []), dtype=to_torch(t)) for t, n in split.partials]
    out = torch.empty(rows, dtype=to_torch(dtype))
    module = compile_kernels([first, second])
    module.launcher(first).checked([data, *parts])
    module.launcher(second).checked([data, out, *parts])
    want = {"sum": data.double().sum(1).float(), "max": data.amax(1), "any": (data > 3.5).any(1)}[how]
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i64"])
@pytest.mark.parametrize("shape", [(6, 37, 5), (1, 8, 33), (1, 40, 1), (3, 1, 16), (2, 64, 130)])
@pytest.mark.parametrize("first", [None, 0.0])
def test_a_recurrence_has_the_bits_of_its_steps(dtype: DType, shape: tuple[int, int, int], first: float | None) -> None:
    """Vectors lie across rows; no product is fused into its addition, and no step is reassociated."""
    k, t = recurrence(*shape, dtype, first), to_torch(dtype)
    a, b = ((torch.randn(shape) * 3).to(t) for _ in range(2))
    data = [a, b, (torch.randn(shape[0], shape[2]) * 3).to(t)]
    want, got = torch.zeros_like(b), torch.zeros_like(b)
    interpret(k, [*data, want])
    compile_kernels([k]).launcher(k).checked([*data, got])
    assert same_bits(got, want)


@pytest.mark.parametrize("shape", [(6, 37, 5), (1, 40, 1), (2, 64, 130)])
def test_a_step_may_be_any_pointwise_expression_and_read_another_state(shape: tuple[int, int, int]) -> None:
    k, data = decayed_maximum(*shape), [torch.randn(shape[2]), torch.randn(shape)]
    data[1][0, 11, 0] = math.nan
    (want, got), second = torch.zeros(2, *shape), torch.zeros(2, *shape)
    interpret(k, [*data, want, second[0]])
    compile_kernels([k]).launcher(k).checked([*data, got, second[1]])
    assert same_bits(got, want)
    torch.testing.assert_close(*second, equal_nan=True)


def test_a_recurrence_through_infinity_is_that_of_its_steps() -> None:
    """Products of all factors overflow, and a factor of zero resets the state; the states themselves stay finite."""
    a, b = torch.full((1, 40, 3), 1e30), torch.zeros(1, 40, 3)
    a[0, 20], b[0, 20:] = 0.0, 1e-30
    a[0, 21:] = 1.0
    k, got, want = recurrence(1, 40, 3), torch.zeros(1, 40, 3), torch.zeros(1, 40, 3)
    compile_kernels([k]).launcher(k).checked([a, b, torch.zeros(1, 3), got])
    interpret(k, [a, b, torch.zeros(1, 3), want])
    assert got.isfinite().all() and same_bits(got, want)
