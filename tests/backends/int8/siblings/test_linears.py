"""Linears of one input as one int8 product: which are joined, which are not, and that no result changes by a bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fusewright.interface import Fragment, RuleLog, Value
from fusewright.plan.ir import Call
from fusewright_int8.backend import X86Int8
from fusewright_int8.run import reference
from fusewright_int8.siblings import ROWS
from tests.backends.int8.common import (
    DEVICE,
    ENGINES,
    F32,
    I8,
    U8,
    calls,
    compiled,
    dequantize,
    needs_core,
    quantize,
    quantized_input,
    weight,
)
from tests.fragments import Context, Sketch, by_preference

PRODUCTS = {"core": "fusewright_int8::{}", "onednn": "fusewright_int8::{}_onednn"}
SHAPE, K = (2, 5), 16
WIDTHS = (16, 16, 16)


def _static(g: Sketch, zero: int = 128) -> Value:
    return dequantize(g, g.input(quantized_input((*SHAPE, K), U8)), 0.02, zero)


def _tokens(g: Sketch) -> Value:
    """Sketch floats that are quantized by row as they come."""
    x = g.input(torch.randn(*SHAPE, K))
    scale = g.op("choose_qparams_per_token", x, I8)
    made = g.ops[-1].outs
    q = g.op("quantize_per_token", x, *made, -127, 127, I8)
    assert made[0] == scale
    return g.op("dequantize_per_token", q, *made, -127, 127, I8, F32)


def _floats(g: Sketch) -> Value:
    return g.input(torch.randn(*SHAPE, K))


INPUTS = {"static": (_static, "linear"), "dynamic": (_tokens, "dynamic_linear"), "weight_only": (_floats, "weight_linear")}
CASES = [(kind, e) for kind in INPUTS for e in ENGINES if kind != "weight_only" or e == "core"]


def _linear(g: Sketch, x: Value, n: int, bias: bool = True) -> Value:
    b = g.input(torch.randn(n), const=True) if bias else None
    return g.op("linear", x, weight(g, torch.randint(-127, 128, (n, K), dtype=I8))[0], b)


def _read(g: Sketch, y: Value) -> Value:
    """Sketch a reader of a result that takes any strides."""
    return g.op("relu", g.op("transpose", y, 0, 1))


def _products(fragment: Fragment) -> list[str]:
    return [c for c in calls(fragment) if c.startswith("fusewright_int8::")]


def _apart(g: Sketch, outs: Sequence[Value], engine: str) -> list[torch.Tensor]:
    """Run the sketch with a product for each linear."""
    g.temporaries.clear()
    given, off = {**X86Int8.options, "engine": engine}, RuleLog(frozenset(row.id for row in ROWS))
    ctx = Context(given, DEVICE, by_preference(engine, "packed", "aten", "together"), specs=g.temporaries, rules=off)
    found = X86Int8(DEVICE).compile(g.region(outs), ctx)
    assert isinstance(found, Fragment) and "aten::slice.Tensor" not in calls(found)
    return g.run(found, outs)


def _judge(g: Sketch, outs: Sequence[Value], joined: Sequence[torch.Tensor], engine: str) -> None:
    for one, other, eager in zip(joined, _apart(g, outs, engine), g.expected(outs), strict=True):
        assert torch.equal(one, other) and one.stride() == eager.stride()
        torch.testing.assert_close(one, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("widths", [WIDTHS, (32, 16, 8), (3, 70, 1)], ids=["query, key, value", "grouped keys", "odd"])
@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize(("kind", "engine"), CASES)
def test_query_key_and_value_are_one_product(kind: str, biases: tuple[bool, ...], widths: tuple[int, ...], engine: str) -> None:
    g = Sketch()
    make, call = INPUTS[kind]
    x = make(g)
    outs = [_read(g, _linear(g, x, n, bias)) for n, bias in zip(widths, biases, strict=True)]
    fragment = compiled(g, outs, engine)
    assert _products(fragment) == [PRODUCTS[engine].format(call)]
    assert calls(fragment).count("aten::slice.Tensor") == 3
    assert [n for n in fragment.notes.values() if "one product for 3" in n] == [f"int8 linear, {engine}, one product for 3"] * 3
    _judge(g, outs, g.run(fragment, outs), engine)


@needs_core
@pytest.mark.parametrize("kind", INPUTS)
def test_what_is_joined_is_packed_once(kind: str) -> None:
    g = Sketch()
    x = INPUTS[kind][0](g)
    fragment = compiled(g, [_read(g, _linear(g, x, n)) for n in WIDTHS])
    packings = [i for i in fragment.instructions if isinstance(i, Call) and "pack_linear" in i.target]
    assert len(packings) == 1 and packings[0].prepare


@needs_core
def test_the_joined_product_is_the_definitions() -> None:
    """Bit for bit, as each product alone."""
    g = Sketch()
    x, weights = quantized_input((*SHAPE, K), U8), [torch.randint(-127, 128, (n, K), dtype=I8) for n in WIDTHS]
    held = dequantize(g, g.input(x), 0.02, 128)
    scales = [torch.rand(n) * 0.02 + 0.01 for n in WIDTHS]
    outs = []
    for w, s in zip(weights, scales, strict=True):
        zeros = g.input(torch.zeros(len(s), dtype=torch.int64), const=True)
        wide = g.op("dequantize_per_channel", g.input(w, const=True), g.input(s, const=True), zeros, 0, -128, 127, I8)
        outs.append(_read(g, g.op("linear", held, wide, None)))
    fragment = compiled(g, outs)
    assert _products(fragment) == ["fusewright_int8::linear"]
    for ours, w, s in zip(g.run(fragment, outs), weights, scales, strict=True):
        exact = reference.linear(x.view(-1, K), w, s, None, 0.02, 128).view(*SHAPE, -1)
        assert torch.equal(ours, exact.transpose(0, 1).relu())


@needs_core
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("post", ["relu", "gelu"])
def test_an_activation_that_all_have_is_computed_in_the_product(kind: str, post: str) -> None:
    g = Sketch()
    make, call = INPUTS[kind]
    x = make(g)
    outs = [g.op("transpose", g.op(post, _linear(g, x, 16)), 0, 1) for _ in range(2)]
    outs = [g.op("add", y, 1.0) for y in outs]
    fragment = compiled(g, outs)
    assert _products(fragment) == [f"fusewright_int8::{call}"]
    (made,) = (i for i in fragment.instructions if isinstance(i, Call) and i.target == f"fusewright_int8::{call}.default")
    assert post in made.args
    _judge(g, outs, g.run(fragment, outs), "core")


@needs_core
@pytest.mark.parametrize("kind", INPUTS)
def test_gate_and_up_are_joined_and_the_gates_activation_is_left_to_the_kernel_behind(kind: str) -> None:
    g = Sketch()
    make, call = INPUTS[kind]
    x = make(g)
    gate, up = _linear(g, x, 24, bias=False), _linear(g, x, 24, bias=False)
    out = g.op("mul", g.op("silu", gate), up)
    fragment = compiled(g, [out])
    assert _products(fragment) == [f"fusewright_int8::{call}"]
    kernels = [c for c in calls(fragment)[calls(fragment).index("aten::slice.Tensor") :] if c.startswith("kernel ")]
    assert kernels == ["kernel mul"]  # one pass over both, as without a silu
    (ours,) = g.run(fragment, [out])
    torch.testing.assert_close(ours, g.tensors[out.id], rtol=1e-5, atol=1e-5)


@needs_core
@pytest.mark.parametrize("scales", [(0.1, 0.1), (0.1, 0.2)], ids=["alike", "unlike"])
def test_results_of_8_bits_are_joined_if_they_are_quantized_alike(scales: tuple[float, float]) -> None:
    g = Sketch()
    x = _static(g)
    outs = []
    for scale in scales:
        q = quantize(g, _linear(g, x, 16), scale, 100, U8)
        outs.append(g.op("transpose", dequantize(g, q, scale, 100), 0, 1))
    outs = [g.op("add", y, 1.0) for y in outs]
    fragment = compiled(g, outs)
    assert _products(fragment) == ["fusewright_int8::linear"] * (1 if scales[0] == scales[1] else 2)
    _judge(g, outs, g.run(fragment, outs), "core")


# -- what is not joined


def _count(g: Sketch, outs: Sequence[Value]) -> int:
    """Return how many products there are, and check that none is a slice and all are right."""
    fragment = compiled(g, list(outs))
    assert "aten::slice.Tensor" not in calls(fragment)
    for ours, eager in zip(g.run(fragment, outs), g.expected(outs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    return len(_products(fragment))


@needs_core
def test_inputs_quantized_differently_are_not_joined() -> None:
    g = Sketch()
    q = g.input(quantized_input((*SHAPE, K), U8))
    outs = [_read(g, _linear(g, dequantize(g, q, scale, 128), 16)) for scale in (0.02, 0.03)]
    assert _count(g, outs) == 2


@needs_core
def test_a_weight_that_is_no_constant_is_not_joined() -> None:
    g = Sketch()
    x = _static(g)
    w = dequantize(g, g.input(torch.randint(-127, 128, (16, K), dtype=I8)), 0.1, 0)
    assert _count(g, [_read(g, g.op("linear", x, w, None)), _read(g, _linear(g, x, 16))]) == 1


@needs_core
@pytest.mark.parametrize("kind", INPUTS)
def test_a_residual_stays_in_its_own_product(kind: str) -> None:
    g = Sketch()
    x = INPUTS[kind][0](g)
    summed = g.op("add", _linear(g, x, 16), g.input(torch.randn(*SHAPE, 16)))
    assert _count(g, [_read(g, summed), _read(g, _linear(g, x, 16))]) == 2


@needs_core
@pytest.mark.parametrize("kind", INPUTS)
def test_results_that_leave_the_region_are_not_joined_since_each_would_be_copied(kind: str) -> None:
    g = Sketch()
    x = INPUTS[kind][0](g)
    assert _count(g, [_linear(g, x, 16), _linear(g, x, 16)]) == 2


@needs_core
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("answer", ["core, apart", "floats"])
def test_nothing_is_joined_where_that_measured_slower(kind: str, answer: str) -> None:
    g = Sketch()
    x = INPUTS[kind][0](g)
    outs = [_read(g, _linear(g, x, n)) for n in WIDTHS]

    def choose(key: str, candidates: Sequence[str]) -> str:
        joint = "16+16+16" in key
        return answer if joint and answer in candidates else "core, apart" if joint else "core"

    ctx = Context(dict(X86Int8.options), DEVICE, choose, specs=g.temporaries)
    found = X86Int8(DEVICE).compile(g.region(outs), ctx)
    assert isinstance(found, Fragment) and len(_products(found)) == 3
    asked = [key for key in ctx.asked if "16+16+16" in key]
    assert asked and all("core/core, apart" in key for key in asked)
    assert ("floats" in asked[0]) == (kind != "dynamic")  # its graph quantizes in floats too


@needs_core
@pytest.mark.parametrize("kind", INPUTS)
def test_both_ways_can_be_measured(kind: str) -> None:
    g = Sketch()
    x = INPUTS[kind][0](g)
    outs = [_read(g, _linear(g, x, n)) for n in WIDTHS]
    ran = []

    class Measuring(Context):
        def choose(self, key: str, candidates: object) -> str:
            if "16+16+16" in key:
                made = {name: run() for name, run in candidates.items()}  # type: ignore[attr-defined]
                ran.append([tuple(y.shape for y in made[name]) for name in ("core", "core, apart")])
            return "core"

    ctx = Measuring(dict(X86Int8.options), DEVICE, specs=g.temporaries)
    assert isinstance(X86Int8(DEVICE).compile(g.region(outs), ctx), Fragment)
    assert ran == [[((10, 16),) * 3] * 2]


@needs_core
def test_one_weight_that_does_not_fit_8_bits_keeps_all_exact() -> None:
    """Less its zero points; then all of them are multiplied in floats."""
    g = Sketch()
    x = _static(g)
    wide = weight(g, torch.randint(-100, 101, (4, K), dtype=I8), zeros=torch.tensor([127, -128, 0, 60]))[0]
    outs = [_read(g, g.op("linear", x, wide, None)), _read(g, _linear(g, x, 4))]
    fragment = compiled(g, outs)
    assert _products(fragment) == ["fusewright_int8::linear"]
    for ours, eager in zip(g.run(fragment, outs), g.expected(outs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
