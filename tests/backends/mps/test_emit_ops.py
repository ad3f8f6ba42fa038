"""Every op of the kernel IR in Metal: values against torch's, including the limits of its type."""

from __future__ import annotations

import math

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel
from fusewright.toolkit.ir.optable import OPS, REDUCTIONS, SCANS
from fusewright.toolkit.ir.types import TYPES, is_float, to_torch
from fusewright_mps.emit.operators import DIVISIONS, FORMS
from fusewright_mps.emitter import Unsupported, emit
from tests.backends.mps.simulated import compiled, reference, run
from tests.kernels import recurrence

KINDS = {"float": ["f32"], "int": ["i32", "i64", "i8", "u8", "i16"], "bool": ["bool"]}
TOLERANCE = {"lgamma": 16, "pow": 2, "erf": 8, "erfc": 10, "expm1": 4, "log1p": 4, "sigmoid": 4, "hypot": 3}
"""Tolerance in units in the last place, by default one, for functions that Metal lacks. Others come from the C library here."""
TYPE_NAMES = ("f32", "bf16", "f16", "i8", "u8", "i16", "i32", "i64", "bool")


def test_every_op_of_the_table_has_a_form_for_each_kind_of_operand() -> None:
    assert set(FORMS) == set(OPS)
    kinds = {"float": "floats", "int": "ints", "bool": "bools"}
    lacking = [
        f"{op} on {kind}" for op, row in OPS.items() for kind in row.kinds if not getattr(FORMS[op], kinds[kind])
    ]
    assert lacking == []


def operands(dtype: str, n: int = 200) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    if dtype == "bool":
        return torch.rand(n, generator=g) > 0.5
    if is_float(dtype):
        x = torch.randn(n, generator=g) * torch.logspace(-3, 1.5, n)
        edges = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            math.inf,
            -math.inf,
            math.nan,
            0.5,
            2.0,
            1e30,
            -1e30,
            1e-30,
            88.0,
            -104.0,
            3.0,
            10.5,
        ]
        x[: len(edges)] = torch.tensor(edges)
        return x.to(to_torch(dtype))
    info = torch.iinfo(to_torch(dtype))
    x = torch.randint(max(info.min, -99), min(info.max, 99), (n,), generator=g)
    x[:5] = torch.tensor([info.min, info.max, 0, 1, 2])
    return x.to(to_torch(dtype))


def op_kernel(op: str, dtype: str, n: int = 200) -> Kernel:
    row = OPS[op]
    b = Builder(f"op_{op}", p=[n])
    (i,) = b.axes
    types = ["bool", dtype, dtype] if op == "where" else [dtype] * row.arity
    values = [b.load(b.input(f"x{k}", t), i) for k, t in enumerate(types)]
    if op in DIVISIONS and not is_float(dtype):
        values[1] = b.where(values[1].eq(0), 3, values[1])
    y = b.op(op, *values)
    b.store(b.output("y", y.dtype), i, y)
    return b.build()


def tensors_of(k: Kernel) -> list[torch.Tensor]:
    rolls = [1, 7, 40]
    out = [operands(b.dtype).roll(rolls[j]) for j, b in enumerate(k.buffers[:-1])]
    return [*out, torch.zeros(200, dtype=to_torch(k.buffers[-1].dtype))]


@pytest.mark.parametrize("kind", ["float", "int", "bool"])
def test_ops_compute_what_torch_does(kind: str) -> None:
    kernels = [op_kernel(op, t) for op, row in OPS.items() if kind in row.kinds for t in KINDS[kind]]
    signed = ("neg", "abs", "sign", "signbit")
    kernels = [k for k in kernels if not (k.buffers[0].dtype == "u8" and k.name[3:] in signed)]
    module = compiled(kernels)
    wrong = []
    for at, k in enumerate(kernels):
        ts = tensors_of(k)
        want = exact(k, ts) if kind == "float" else reference(k, ts)[-1]
        module.run(at, ts)
        got, op = ts[-1], k.name[3:]
        bad = wrong_places(got, want, TOLERANCE.get(op, 1.01), op)
        if bad.any():
            j = int(bad.nonzero()[0])
            wrong.append(
                f"{op} on {k.buffers[0].dtype}: {[t[j].item() for t in ts[:-1]]} gives {got[j]}, not {want[j]}"
            )
    assert wrong == []


def exact(k: Kernel, ts: list[torch.Tensor]) -> torch.Tensor:
    """The result in fp64 arithmetic, rounded to f32 if it is a float."""
    args = [t.double() if t.is_floating_point() else t for t in ts[:-1]]
    y = OPS[k.name[3:]].ref(*args)
    return torch.as_tensor(y)


def wrong_places(got: torch.Tensor, want: torch.Tensor, ulps: float, op: str) -> torch.Tensor:
    """The places where a result is too far off, or a zero has the other sign."""
    if not got.is_floating_point():
        return got != want
    rounded = want.float()
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    same &= (got != 0) | (got.signbit() == rounded.signbit())
    unit = torch.maximum(want.abs(), torch.tensor(1.0 if op == "lgamma" else 2.0**-126, dtype=torch.float64)) * 2.0**-23
    close = (got.double() - want).abs() <= ulps * unit
    return ~(same | (close & got.isfinite() & (rounded != 0)))


def test_casts_between_all_types_are_torchs() -> None:
    kernels, wanted, given = [], [], []
    for src in TYPE_NAMES:
        x = operands(src)
        x = x.nan_to_num(0.0, 50.0, -50.0).clamp(-120, 120) if is_float(src) else x
        for dst in TYPE_NAMES:
            data = x.abs() if is_float(src) and dst == "u8" else x  # negative floats to u8 are undefined in torch
            b = Builder(f"{src}_{dst}", p=[200])
            a, y = b.input("x", src), b.output("y", dst)
            (i,) = b.axes
            b.store(y, i, b.load(a, i).to(dst))
            kernels.append(b.build())
            given.append(data)
            wanted.append(data.to(to_torch(dst)))
    module = compiled(kernels)
    for at, (k, x, want) in enumerate(zip(kernels, given, wanted, strict=True)):
        got = torch.empty_like(want)
        module.run(at, [x, got])
        assert torch.equal(got, want), k.name


def test_half_types_round_to_even_and_keep_nan_and_subnormals() -> None:
    bits = torch.arange(0, 2**32, 655211, dtype=torch.int64)
    x = torch.cat(
        [bits.to(torch.int32).view(torch.float32), torch.tensor([math.nan, math.inf, 1e-40, 65519.9, 65520.0])]
    )
    for dst in ("bf16", "f16"):
        b = Builder("round", p=[x.numel()])
        a, y = b.input("x", "f32"), b.output("y", dst)
        (i,) = b.axes
        b.store(y, i, b.load(a, i).to(dst))
        got, want = torch.empty(x.shape, dtype=to_torch(dst)), x.to(to_torch(dst))
        run(b.build(), [x, got])
        odd = want.isnan()
        assert torch.equal(odd, got.isnan())
        assert torch.equal(got[~odd].view(torch.int16), want[~odd].view(torch.int16))


def test_f64_is_refused_by_name_but_for_numbers_that_are_cast() -> None:
    b = Builder("double", p=[4])
    (i,) = b.axes
    b.store(b.output("y", "f32"), i, b.load(b.input("x", "f64"), i).to("f32"))
    with pytest.raises(Unsupported, match="x is f64, which Metal does not have"):
        emit(b.build())
    b = Builder("scaled", p=[4])
    (i,) = b.axes
    scaled = b.load(b.input("x", "f32"), i) * b.scalar("factor", "f64").to("f32")
    b.store(b.output("y", "f32"), i, scaled)
    x, y = torch.arange(4.0), torch.empty(4)
    run(b.build(), [x, y], scalars=[0.1])
    assert torch.equal(y, x * torch.tensor(0.1))


@pytest.mark.parametrize("layout", ["rows", "columns", "few", "one long row"])
def test_reductions_are_torchs(layout: str) -> None:
    rows, cols = {"rows": (70, 100), "columns": (70, 100), "few": (300, 3), "one long row": (1, 5000)}[layout]
    kernels, inputs = [], []
    for how, kinds in REDUCTIONS.items():
        for dtype in ("f32", "i32", "i64", "bool"):
            if TYPES[dtype].kind not in kinds:
                continue
            b = Builder(f"{how}_{dtype}", p=[rows], r=[cols])
            i, j = b.axes
            x = b.load(b.input("x", dtype), j * rows + i if layout == "columns" else i * cols + j)
            y = b.reduce(how, x)
            b.store(b.output("y", y.dtype), i, y)
            kernels.append(b.build())
            data = torch.randint(-3, 4, (rows, cols)).to(to_torch(dtype))
            if dtype == "f32" and cols > 50 and how in ("max", "min", "argmax", "argmin"):
                data[0, 50:52] = math.nan
            inputs.append(data.clamp(-1, 1) if how == "prod" else data)
    module = compiled(kernels)
    for at, (k, data) in enumerate(zip(kernels, inputs, strict=True)):
        stored = data.t().contiguous() if layout == "columns" else data
        ts = [stored, torch.zeros(rows, dtype=to_torch(k.buffers[1].dtype))]
        want = reference(k, ts)[1]
        module.run(at, ts)
        torch.testing.assert_close(ts[1], want, equal_nan=True, msg=lambda m, k=k: f"{k.name}: {m}")


@pytest.mark.parametrize("column", [False, True])
def test_scans_are_torchs(column: bool) -> None:
    kernels = []
    for how in (how for how in SCANS if how != "step"):
        for dtype in ("f32", "i64"):
            b = Builder(f"cum{how}_{dtype}", p=[19], r=[77])
            i, j = b.axes
            at = j * 19 + i if column else i * 77 + j
            y = b.scan(how, b.load(b.input("x", dtype), at))
            b.store(b.output("y", dtype), at, y)
            kernels.append(b.build())
    module = compiled(kernels)
    for at, k in enumerate(kernels):
        data = torch.randint(-2, 3, (19 * 77,)).to(to_torch(k.buffers[0].dtype))
        ts = [data, torch.zeros_like(data)]
        want = reference(k, ts)[1]
        module.run(at, ts)
        assert torch.equal(ts[1], want), k.name


def scatter(dtype: str, how: str, rows: int = 20) -> Kernel:
    b = Builder(f"scatter_{how}_{dtype}", p=[90, 3])
    at, src, out = b.input("at", "i64"), b.input("src", dtype), b.inout("out", dtype)
    i, j = b.axes
    row = b.bound(b.load(at, i), rows)
    b.store(out, b.indirect(row, 3) + j, b.load(src, i * 3 + j), how=how)
    return b.build()


def test_points_that_meet_accumulate_by_atomics() -> None:
    kernels = [scatter(t, how) for t in ("f32", "i32", "bf16", "f16") for how in ("add", "mul", "max", "min")]
    module = compiled(kernels)
    for at, k in enumerate(kernels):
        where = torch.randint(0, 20, (90,))
        src = torch.randint(1, 3, (90, 3)).to(to_torch(k.buffers[1].dtype))
        ts = [where, src, torch.ones(20, 3, dtype=src.dtype)]
        want = reference(k, ts)[2]
        module.run(at, ts)
        assert torch.equal(ts[2], want), k.name


def test_sums_of_64_bits_where_points_meet_are_refused() -> None:
    with pytest.raises(Unsupported, match="Metal has atomics of 32 bits"):
        emit(scatter("i64", "add"))


def test_an_index_out_of_bounds_is_eagers_error_and_touches_nothing() -> None:
    k = scatter("f32", "add")
    where = torch.zeros(90, dtype=torch.int64)
    where[5] = 20
    out = torch.zeros(20, 3)
    with pytest.raises(IndexError, match="index 20 is out of bounds for size 20"):
        run(k, [where, torch.ones(90, 3), out])
    where[5] = -1
    with pytest.raises(IndexError, match="index -1 is out of bounds for size 20"):
        run(k, [where, torch.ones(90, 3), out])


def test_whole_numbers_divided_by_zero_are_an_error_where_eager_makes_one() -> None:
    b = Builder("quotient", p=[4])
    (i,) = b.axes
    q = b.op("floordiv", b.load(b.input("x", "i32"), i), b.load(b.input("y", "i32"), i))
    b.store(b.output("z", "i32"), i, q)
    k, x = b.build(), torch.arange(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(k, [x, x, torch.empty_like(x)])
    run(k, [x, x, torch.empty_like(x)], check_division=False)


@pytest.mark.parametrize("inputs", [40, 20])
def test_more_buffers_than_metal_takes_are_several_dispatches(inputs: int) -> None:
    b = Builder("many", p=[10])
    (i,) = b.axes
    loads = [b.load(b.input(f"x{k}", "f32"), i) for k in range(inputs)]
    for k in range(0, inputs, 2):
        b.store(b.output(f"y{k}", "f32"), i, loads[k] + loads[k + 1])
    kernel = b.build()
    source = emit(kernel)
    assert len(source.dispatches) == (2 if inputs == 40 else 1)
    assert all(len(d.arguments) <= 31 for d in source.dispatches)
    ts = [torch.full((10,), float(k)) for k in range(inputs)] + [torch.zeros(10) for _ in range(inputs // 2)]
    want = reference(kernel, ts)
    if source.apart:
        ts[inputs] = ts[38]  # the first result aliases an input of the second dispatch, which therefore receives a copy
    run(kernel, ts)
    for k in range(inputs, len(ts)):
        assert torch.equal(ts[k], want[k]) or k == inputs
    assert torch.equal(ts[inputs], torch.full((10,), 1.0))


def test_one_result_of_too_many_buffers_is_refused() -> None:
    b = Builder("sum", p=[10])
    (i,) = b.axes
    total = b.load(b.input("x", "f32"), i)
    for k in range(35):
        total = total + b.load(b.input(f"x{k}", "f32"), i)
    b.store(b.output("y", "f32"), i, total)
    with pytest.raises(Unsupported, match="needs more buffers than the 31 that Metal takes"):
        emit(b.build())


def test_recurrences_are_loops_over_their_steps() -> None:
    kernels = [
        recurrence(*shape, dtype, first)
        for shape in ((6, 37, 5), (1, 9, 1), (3, 40, 70)) for dtype in ("f32", "bf16", "i64") for first in (None, 0.0)
    ]  # fmt: skip
    module = compiled(kernels)
    for at, k in enumerate(kernels):
        tensors = [torch.randint(-3, 4, (3 * 40 * 70,)).to(to_torch(k.buffers[0].dtype)) for _ in k.buffers]
        want = reference(k, tensors)
        module.run(at, tensors)
        torch.testing.assert_close(tensors[-1], want[-1])
