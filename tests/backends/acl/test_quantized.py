"""int8 on Arm: which calls q/dq graphs become, and that results equal those with an exact product bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import _torch_compat as compat
from fusewright import machine, report
from fusewright.interface import Fragment, Value
from fusewright_acl import quantized
from fusewright_cpu.kernels.arm.int8_linear import MOST_K
from fusewright_cpu.target import aarch64_target
from tests.backends.acl.common import BF16, F32, compiled
from tests.fragments import Sketch, targets

compat.register_quantized_decomposed()

HERE = machine.arch() == "aarch64"
U8, I8 = torch.uint8, torch.int8
LIMITS = {U8: (0, 255), I8: (-128, 127)}


@pytest.fixture(autouse=True)
def an_arm_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other machines, fragments are compiled for a core and inspected, but not run."""
    if not HERE:
        monkeypatch.setattr(quantized, "host_target", lambda: aarch64_target("neoverse-v1"))


def levels(*shape: int, dtype: torch.dtype = U8) -> torch.Tensor:
    low, high = LIMITS[dtype]
    return torch.randint(low, high + 1, shape).to(dtype)


def dequantize(g: Sketch, q: Value, scale: float, zero: int, out_dtype: torch.dtype | None = None) -> Value:
    dtype = g.tensors[q.id].dtype
    return g.op("dequantize", q, scale, zero, *LIMITS[dtype], dtype, out_dtype=out_dtype)


class Weight:
    """An int8 weight of a sketch: `value` is the dequantized value, `of` the exact weight in fp64."""

    def __init__(self, g: Sketch, n: int, k: int, zeros: bool = False, per_channel: bool = True, dtype: torch.dtype = F32) -> None:
        q = levels(n, k, dtype=I8)
        self.sums, held = q.double(), g.input(q, const=True)
        if per_channel:
            self.scale = torch.rand(n) * 0.02 + 0.01
            zero = torch.randint(-128, 128, (n,)) if zeros else torch.zeros(n, dtype=torch.int64)
            self.sums = self.sums - zero[:, None]
            rows = g.input(self.scale, const=True), g.input(zero, const=True)
            self.value = g.op("dequantize_per_channel", held, *rows, 0, -128, 127, I8, out_dtype=dtype)
        else:
            self.scale, zero = torch.full((n,), 0.02), -37 if zeros else 0
            self.sums = self.sums - zero
            self.value = dequantize(g, held, 0.02, zero, dtype)


def linear(
    g: Sketch, x: torch.Tensor, scale: float, zero: int, w: Weight, bias: torch.Tensor | None = None
) -> tuple[Value, torch.Tensor]:
    """Sketch a linear; also return its result in exact arithmetic, rounded to fp32 once."""
    y = g.op("linear", dequantize(g, g.input(x), scale, zero), w.value, None if bias is None else g.input(bias, const=True))
    return y, rounded(x.double() - zero, torch.tensor(scale), w, bias)


def rounded(x: torch.Tensor, scale: torch.Tensor, w: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    wide = (x @ w.sums.t()) * (scale.double() * w.scale.double())
    return (wide if bias is None else wide + bias.double()).float()


def run(g: Sketch, out: Value, *prefer: str, **options: Any) -> tuple[torch.Tensor | None, Fragment]:
    """Return the fragment's result (on aarch64 only) and the fragment."""
    fragment = compiled(g, [out], *prefer, "int8", **options)
    return g.run(fragment, [out])[0] if HERE else None, fragment


def same(ours: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert ours is None or torch.equal(ours, wanted), (ours, wanted)


def steps(fragment: Fragment) -> list[str]:
    """The steps of each call, without dequantizations of weights that nothing reads, which the plan drops."""
    return [t for t in targets(fragment) if not t.startswith("quantized_decomposed::dequantize")]


def ours(fragment: Fragment) -> list[str]:
    """The names of handwritten kernels, without the instruction set."""
    names = [t.removeprefix("kernel ") for t in steps(fragment) if "int8_linear" in t or "gemv" in t]
    return [n.replace("_smmla", "").replace("_sdot", "") for n in names]


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "zero", "zeros", "per_channel", "bias"),
    [(1, 1, 1, U8, 0, False, True, True), (3, 17, 9, U8, 255, True, True, False), (5, 64, 40, I8, -128, False, False, True),
     (9, 70, 33, I8, 5, True, True, True), (34, 33, 8, U8, 131, False, True, False)],
)  # fmt: skip
def test_a_linear_equals_exact_arithmetic(
    m: int, k: int, n: int, dtype: torch.dtype, zero: int, zeros: bool, per_channel: bool, bias: bool
) -> None:
    g = Sketch()
    w = Weight(g, n, k, zeros, per_channel)
    y, wanted = linear(g, levels(m, k, dtype=dtype), 0.037, zero, w, torch.randn(n) if bias else None)
    found, fragment = run(g, y)
    name = f"int8_linear_{'u8' if dtype is U8 else 'i8'}_f32{'_bias' if bias else ''}{'_zeros' if per_channel else ''}"
    assert ours(fragment) == [name] and len(steps(fragment)) == 1
    same(found, wanted)


def test_what_follows_is_one_kernel_that_quantizes() -> None:
    """Residual, activation and quantization follow the graph's own arithmetic on the exact product."""
    g = Sketch()
    w = Weight(g, 40, 48)
    x, r = levels(6, 48), levels(6, 40)
    y, exact = linear(g, x, 0.02, 9, w, torch.randn(40))
    z = g.op("relu", g.op("add", y, dequantize(g, g.input(r), 0.5, 3)))
    out = g.op("quantize", z, 0.7, 1, 0, 255, U8)
    found, fragment = run(g, out)
    assert ours(fragment) and len(steps(fragment)) == 2 and steps(fragment)[1].startswith("kernel add")
    after = torch.relu(exact + (r.float() - 3) * 0.5)
    same(found, torch.ops.quantized_decomposed.quantize_per_tensor(after, 0.7, 1, 0, 255, U8))


def test_int8_stays_int8_between_layers_and_through_views() -> None:
    g = Sketch()
    first, second = Weight(g, 24, 32), Weight(g, 8, 24, zeros=True)
    y, exact = linear(g, levels(2, 5, 32), 0.02, 9, first)
    q = g.op("quantize", g.op("relu", y), 0.05, 30, 0, 255, U8)
    rows = g.op("view", dequantize(g, q, 0.05, 30), [10, 24])
    z = g.op("linear", rows, second.value, None)
    found, fragment = run(g, z)
    assert len(ours(fragment)) == 2 and len(steps(fragment)) == 3
    held = torch.ops.quantized_decomposed.quantize_per_tensor(torch.relu(exact), 0.05, 30, 0, 255, U8)
    same(found, rounded(held.double().view(10, 24) - 30, torch.tensor(0.05), second, None))


def test_a_result_of_bf16_is_rounded_from_fp32() -> None:
    g = Sketch()
    w, x, bias = Weight(g, 24, 48, dtype=BF16), levels(3, 48), torch.randn(24).bfloat16()
    y = g.op("linear", dequantize(g, g.input(x), 0.05, 100, BF16), w.value, g.input(bias, const=True))
    found, fragment = run(g, y)
    assert len(ours(fragment)) == 1
    same(found, rounded(x.double() - 100, torch.tensor(0.05), w, bias.float()).bfloat16())


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_are_quantized_when_they_come(symmetric: bool) -> None:
    g = Sketch()
    w, x = Weight(g, 24, 48), torch.randn(2, 5, 48)
    name, low = ("choose_qparams_per_token", -127) if symmetric else ("choose_qparams_per_token_asymmetric", -128)
    held = g.input(x)
    scale = g.op(name, held, I8)
    zero = g.ops[-1].outs[1]
    q = g.op("quantize_per_token", held, scale, zero, low, 127, I8)
    y = g.op("linear", g.op("dequantize_per_token", q, scale, zero, low, 127, I8, F32), w.value, None)
    found, fragment = run(g, y)
    assert len(ours(fragment)) == 1
    s, z, level = (g.tensors[v.id].reshape(10, -1) for v in (scale, zero, q))
    same(found, rounded(level.double() - z.double(), s.float(), w, None).view(2, 5, 24))


def test_a_tensor_is_quantized_when_it_comes() -> None:
    g = Sketch()
    w, held = Weight(g, 24, 48), g.input(torch.randn(5, 48))
    scale = g.op("choose_qparams", held, 0, 255, 2.0**-23, U8)
    zero = g.ops[-1].outs[1]
    q = g.op("quantize_tensor", held, scale, zero, 0, 255, U8)
    y = g.op("linear", g.op("dequantize_tensor", q, scale, zero, 0, 255, U8), w.value, None)
    found, fragment = run(g, y)
    assert len(ours(fragment)) == 1
    s, z, level = (g.tensors[v.id] for v in (scale, zero, q))
    same(found, rounded(level.double() - z.double(), s.float(), w, None))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_few_rows_of_floats_read_8_bits(dtype: torch.dtype, per_channel: bool, zeros: bool) -> None:
    for rows, few in ((1, True), (4, True), (5, False)):
        g = Sketch()
        w, x = Weight(g, 24, 48, zeros, per_channel, dtype), torch.randn(rows, 48, dtype=dtype)
        y = g.op("linear", g.input(x), w.value, g.input(torch.ones(24, dtype=dtype), const=True))
        found, fragment = run(g, y)
        assert bool(ours(fragment)) is few
        assert not few or ours(fragment)[0].endswith("_zeros") is (zeros or per_channel), "a tensor of zero points may hold any"
        if found is not None:
            scaled = w.sums.t() * w.scale.double()
            exact, size = (a.double() @ w + 1 for a, w in ((x, scaled), (x.abs(), scaled.abs())))
            bound = torch.finfo(torch.float32).eps * 4 * size + torch.finfo(dtype).eps * (exact.abs() if few else size)
            assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 20])
def test_a_product_of_integers_is_exact(rows: int) -> None:
    g = Sketch()
    x, w = levels(rows, 40, dtype=I8), levels(24, 40, dtype=I8)
    y = g.op("int_mm", g.input(x), g.input(w.t(), const=True))
    found, fragment = run(g, y)
    assert ours(fragment) == ["int8_linear_i8_i32"] and targets(fragment, prepare=True)[-1] == "fusewright_acl::int8_pack"
    same(found, (x.long() @ w.long().t()).to(torch.int32))


def test_a_weight_that_is_widened_with_its_factor_and_bias() -> None:
    g = Sketch()
    x, w, scale, bias = torch.randn(2, 40), levels(24, 40, dtype=I8), torch.rand(24), torch.randn(24)
    product = g.op("mm", g.input(x), g.op("cast", g.input(w.t(), const=True), F32))
    y = g.op("add", g.op("mul", product, g.input(scale, const=True)), g.input(bias, const=True))
    found, fragment = run(g, y)
    assert ours(fragment) == ["gemv_2_f32_i8_bias"] and len(targets(fragment)) == 1
    if found is not None:
        exact = x.double() @ w.double().t() * scale.double() + bias.double()
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def _refused(g: Sketch, y: Value) -> str:
    """The note of a linear that stays in floating point."""
    fragment = compiled(g, [y], "aten")
    assert not ours(fragment)
    return next(n for n in fragment.notes.values() if "not int8" in n)


def test_what_stays_a_product_of_floats_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    g = Sketch()
    y, _ = linear(g, levels(1, MOST_K + 16), 0.02, 9, Weight(g, 1, MOST_K + 16, per_channel=False))
    assert "do not fit int32" in _refused(g, y)
    g = Sketch()
    w = Weight(g, 8, 16)
    y = g.op("linear", dequantize(g, g.input(levels(4, 16)), 0.1, 0), w.value, g.input(torch.randn(8)))
    assert "a bias that is computed" in _refused(g, y)
    monkeypatch.setattr(quantized, "host_target", lambda: aarch64_target("generic"))
    g = Sketch()
    y, _ = linear(g, levels(4, 16), 0.02, 9, Weight(g, 8, 16))
    assert "multiplies no int8" in _refused(g, y)


class Mlp(torch.nn.Module):
    """Two linears between quantized tensors, as PT2E produces them."""

    def __init__(self) -> None:
        super().__init__()
        for name, n, k in (("first", 48, 32), ("second", 16, 48)):
            self.register_buffer(name, levels(n, k, dtype=I8))
            self.register_buffer(f"{name}_scale", torch.rand(n) * 0.02 + 0.01)
            self.register_buffer(f"{name}_zero", torch.zeros(n, dtype=torch.int64))
        self.bias = torch.nn.Parameter(torch.randn(48))

    def weight(self, name: str) -> torch.Tensor:
        rows = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero")
        return torch.ops.quantized_decomposed.dequantize_per_channel(getattr(self, name), *rows, 0, -128, 127, I8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def held(x: torch.Tensor, *rule: Any) -> torch.Tensor:
            q = torch.ops.quantized_decomposed.quantize_per_tensor(x, *rule, 0, 255, U8)
            return torch.ops.quantized_decomposed.dequantize_per_tensor(q, *rule, 0, 255, U8)

        y = torch.relu(torch.nn.functional.linear(held(x, 0.03, 128), self.weight("first"), self.bias))
        return torch.nn.functional.linear(held(y, 0.05, 0), self.weight("second"))


@pytest.mark.hardware("graviton_acl")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_that_was_quantized_by_export_compiles(dynamic: bool) -> None:
    model = Mlp().eval()
    compiled_model = torch.compile(model, backend="graviton_acl", dynamic=dynamic, options={"strict": True})
    with torch.no_grad(), report.recording() as reports:
        for rows in (7, 12) if dynamic else (7,):
            x = torch.randn(rows, 32)
            eager, found = model(x), compiled_model(x)
            level = 0.05 * float(model.weight("second").abs().amax())  # a rounding that changes a level of the hidden layer
            assert float((found - eager).abs().max()) <= level * 1.001 and float((found - eager).abs().mean()) < 1e-3
    notes = [op.note for r in reports for op in r.ops if op.op == "linear"]
    assert notes and all(note.startswith("int8 product") for note in notes), notes
