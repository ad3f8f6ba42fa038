"""Quantized linears and convolutions with known scales: which call each graph becomes, and every level of its result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fusewright.interface import Fragment, Value
from fusewright.plan.ir import Call
from fusewright_int8.backend import X86Int8
from fusewright_int8.engines import FLOAT_MAKERS, MAKERS, Convolution, Product, present
from fusewright_int8.run.native import MOST_K
from tests.backends.int8.common import (
    BF16,
    DEVICE,
    ENGINES,
    F32,
    I8,
    POSTS,
    U8,
    calls,
    compiled,
    dequantize,
    needs_core,
    needs_onednn,
    post,
    quantize,
    quantized_input,
    run,
    same_levels,
    weight,
)
from tests.fragments import Context, Sketch, by_preference

CALL = {"core": "fusewright_int8::{}", "onednn": "fusewright_int8::{}_onednn"}


def _int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=I8)


def _linear(
    x: torch.Tensor, n: int, scale: float, zero: int, per_channel: bool = True, bias: bool = True
) -> tuple[Sketch, Value, torch.Tensor]:
    """Sketch a linear; also return its result in fp64."""
    g = Sketch()
    w, w64 = weight(g, _int8(n, x.shape[-1]), per_channel)
    b = torch.randn(n) if bias else None
    y = g.op("linear", dequantize(g, g.input(x), scale, zero), w, None if b is None else g.input(b, const=True))
    return g, y, F.linear((x.double() - zero) * scale, w64, None if b is None else b.double())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["none", "relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("dtype", "zero"), [(U8, 0), (U8, 131), (U8, 255), (I8, 0), (I8, -7)])
def test_a_linear_is_requantized_in_one_call(engine: str, name: str, dtype: torch.dtype, zero: int) -> None:
    g, y, exact = _linear(quantized_input((5, 33), dtype), 19, 0.03, zero)
    exact = POSTS[name](exact)
    scale = float(exact.abs().max()) / 100
    ours, fragment = run(g, quantize(g, post(g, y, name), scale, 17, U8), engine)
    assert calls(fragment) == [CALL[engine].format("linear")]
    same_levels(ours, exact, scale, 17)


@given(
    m=st.integers(1, 9), k=st.integers(1, 70), n=st.integers(1, 40), zero=st.integers(0, 255), scale=st.floats(1e-4, 10),
    per_channel=st.booleans(), bias=st.booleans(), engine=st.sampled_from(ENGINES), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_level_is_right_for_random_shapes(
    m: int, k: int, n: int, zero: int, scale: float, per_channel: bool, bias: bool, engine: str, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randint(0, 256, (m, k)).to(U8)
    g, y, exact = _linear(x, n, scale, zero, per_channel, bias)
    out = max(float(exact.abs().max()) / 128, 1e-6)
    ours, _ = run(g, quantize(g, y, out, 128, U8), engine)
    same_levels(ours, exact, out, 128)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("out", "bound"), [(F32, 1e-6), (BF16, 4e-3)])
def test_a_result_may_stay_in_floats(engine: str, out: torch.dtype, bound: float) -> None:
    g = Sketch()
    x, w = quantized_input((2, 3, 48), U8), _int8(24, 48)
    w_held, w64 = weight(g, w)
    if out is BF16:
        w_held = g.op("dequantize_per_channel", *g.ops[-1].args[:-1], out_dtype=BF16)
    b = torch.randn(24, dtype=out)
    y = g.op("linear", dequantize(g, g.input(x), 0.05, 100, out), w_held, g.input(b, const=True))
    ours, fragment = run(g, y, engine)
    exact = F.linear((x.double() - 100) * 0.05, w64, b.double())
    assert calls(fragment) == [CALL[engine].format("linear")]
    assert float((ours.double() - exact).abs().max()) <= bound * float(exact.abs().max())


@needs_core
def test_a_residual_in_either_type_is_added_by_the_core() -> None:
    for quantized in (True, False):
        g, y, exact = _linear(quantized_input((6, 32), U8), 32, 0.02, 9)
        r = quantized_input((6, 32), I8) if quantized else torch.randn(6, 32)
        added = dequantize(g, g.input(r), 0.5, 3) if quantized else g.input(r)
        out = quantize(g, g.op("relu", g.op("add", y, added)), 0.7, 1, U8)
        ours, fragment = run(g, out)
        assert calls(fragment) == ["fusewright_int8::linear"]
        same_levels(ours, torch.relu(exact + ((r.double() - 3) * 0.5 if quantized else r.double())), 0.7, 1)


@needs_core
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 32), (6, 1, 32)])
def test_a_residual_is_added_behind_a_view_of_the_rows(quantized: bool, shape: tuple[int, ...]) -> None:
    """For example, a linear written for rows (GPT-2's `Conv1D`) reshapes its result back to a batch of sequences."""
    g, y, exact = _linear(quantized_input((6, 32), U8), 32, 0.02, 9)
    r = quantized_input(shape, I8) if quantized else torch.randn(shape)
    added = dequantize(g, g.input(r), 0.5, 3) if quantized else g.input(r)
    ours, fragment = run(g, g.op("add", g.op("view", y, list(shape)), added))
    assert "fusewright_int8::linear" in calls(fragment)
    exact = exact.view(shape) + ((r.double() - 3) * 0.5 if quantized else r.double())
    assert float((ours.double() - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


def _with_residual(
    g: Sketch, y: Value, exact: torch.Tensor, held: torch.dtype, name: str, out: torch.dtype
) -> tuple[Value, torch.Tensor]:
    """Sketch the addition of a residual, a post-op and (for bytes) quantization at 0.7 and 1; also return the floats in fp64."""
    r = torch.randn(exact.shape) if held.is_floating_point else quantized_input(tuple(exact.shape), held)
    r = r.to(held).contiguous(memory_format=torch.channels_last) if exact.dim() == 4 else r.to(held)
    added = g.input(r) if held is F32 else dequantize(g, g.input(r), 0.5, 3)
    y = post(g, g.op("add", y, added), name)
    exact = POSTS[name](exact + (r.double() if held is F32 else (r.double() - 3) * 0.5))
    return (y if out is F32 else quantize(g, y, 0.7, 1, out)), exact


def _judge(ours: torch.Tensor, exact: torch.Tensor) -> None:
    if ours.dtype.is_floating_point:
        assert float((ours.double() - exact).abs().max()) <= 1e-6 * float(exact.abs().max())
    else:
        same_levels(ours, exact, 0.7, 1)


@needs_onednn
@pytest.mark.parametrize("name", ["none", "relu", "gelu"])
@pytest.mark.parametrize("held", [U8, I8, F32])
@pytest.mark.parametrize("out", [U8, I8, F32])
def test_onednn_adds_the_residuals_that_it_can(name: str, held: torch.dtype, out: torch.dtype) -> None:
    """It leaves the others to a kernel."""
    for rows in ((6,), (2, 3)):
        g, y, exact = _linear(quantized_input((*rows, 32), U8), 32, 0.02, 9)
        result, exact = _with_residual(g, y, exact, held, name, out)
        ours, fragment = run(g, result, "onednn")
        fused = name != "gelu" and (held is F32 or out is not F32)
        made = [c for c in calls(fragment) if c != "fusewright_int8::other_sign"]
        assert made[0] == "fusewright_int8::linear_onednn" and (len(made) == 1) == fused
        _judge(ours, exact)


@pytest.mark.parametrize("engine", ENGINES)
def test_int8_stays_int8_between_layers(engine: str) -> None:
    g, y, _ = _linear(quantized_input((4, 16), U8), 24, 0.02, 9)
    q = quantize(g, g.op("gelu", y), 0.05, 30, U8)
    w, w64 = weight(g, _int8(8, 24))
    z = g.op("linear", dequantize(g, q, 0.05, 30), w, None)
    fragment = compiled(g, [z], engine)
    assert calls(fragment) == [CALL[engine].format("linear")] * 2
    (ours,) = g.run(fragment, [z])
    held = (g.tensors[q.id].double() - 30) * 0.05
    assert float((ours.double() - F.linear(held, w64)).abs().max()) <= 0.05 * float(w64.abs().sum(1).max())  # a level


@needs_core
def test_one_quantized_input_serves_several_linears() -> None:
    g = Sketch()
    x = torch.randn(4, 16)
    held = dequantize(g, quantize(g, g.input(x), 0.02, 128, U8), 0.02, 128)
    outs = [g.op("linear", held, weight(g, _int8(8, 16))[0], None) for _ in range(3)]
    fragment = compiled(g, outs)  # results that leave the region are not joined (siblings/)
    assert calls(fragment) == ["kernel quantize", *["fusewright_int8::linear"] * 3]
    for ours, eager in zip(g.run(fragment, outs), g.expected(outs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("zeros", [[3, -5, 0, 9], [127, -128, 0, 60]], ids=["that fit", "that do not fit 8 bits"])
def test_zero_points_of_weights_are_kept(engine: str, zeros: list[int]) -> None:
    g = Sketch()
    x, w = quantized_input((3, 20), U8), torch.randint(-100, 100, (4, 20), dtype=I8)
    held, w64 = weight(g, w, zeros=torch.tensor(zeros))
    y = g.op("linear", dequantize(g, g.input(x), 0.03, 7), held, None)
    ours, _ = run(g, quantize(g, y, 0.4, 120, U8), engine)
    same_levels(ours, F.linear((x.double() - 7) * 0.03, w64), 0.4, 120)


# -- convolutions

CONVS = {
    "3x3": ((2, 8, 9, 7), (16, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1x1, batch 1": ((1, 16, 5, 5), (8, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "strided, dilated": ((2, 4, 12, 11), (8, 4, 3, 2), (2, 1), (2, 0), (2, 1), 1),
    "groups": ((2, 8, 6, 6), (12, 4, 3, 3), (1, 1), (1, 1), (1, 1), 2),
    "depthwise": ((2, 16, 7, 7), (16, 1, 3, 3), (1, 1), (1, 1), (1, 1), 16),
    "an image of few channels": ((1, 3, 16, 16), (8, 3, 5, 5), (2, 2), (2, 2), (1, 1), 1),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("zero", [0, 113])
@pytest.mark.parametrize("case", CONVS)
def test_a_convolution_is_requantized_in_one_call(engine: str, zero: int, case: str) -> None:
    shape, wshape, stride, padding, dilation, groups = CONVS[case]
    g = Sketch()
    x = quantized_input(shape, U8, channels_last=True)
    w, w64 = weight(g, _int8(*wshape))
    b = torch.randn(wshape[0])
    y = g.op(
        "conv", dequantize(g, g.input(x), 0.04, zero), w, g.input(b, const=True),
        list(stride), list(padding), list(dilation), False, [0, 0], groups,
    )  # fmt: skip
    exact = F.conv2d((x.double() - zero) * 0.04, w64, b.double(), stride, padding, dilation, groups).relu()
    scale = float(exact.max()) / 200
    ours, fragment = run(g, quantize(g, g.op("relu", y), scale, 0, U8), engine)
    assert [t for t in calls(fragment) if not t.endswith("clone")] == [CALL[engine].format("conv")]
    same_levels(ours, exact, scale, 0)


@needs_core
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["int8", "a weight that does not fit 8 bits"])
def test_the_core_pads_on_each_side_by_its_own_number(wide: bool, channels_last: bool) -> None:
    """Mobile networks pad strided layers below and on the right, and their input is not channels-last."""
    g = Sketch()
    x = quantized_input((2, 3, 9, 8), U8, channels_last)
    w, w64 = weight(g, _int8(8, 3, 3, 3), zeros=torch.full((8,), 127 if wide else 0))
    padded = g.op("constant_pad_nd", g.input(x), [0, 1, 2, 3], 113)
    y = g.op("conv", dequantize(g, padded, 0.04, 113), w, None, [2, 2], [1, 0], [1, 1], False, [0, 0], 1)
    exact = F.conv2d(F.pad((x.double() - 113) * 0.04, (0, 1, 2, 3)), w64, None, (2, 2), (1, 0))
    scale = float(exact.abs().max()) / 100
    ours, fragment = run(g, quantize(g, y, scale, 128, U8))
    assert [t for t in calls(fragment) if "clone" not in t] == ["fusewright_int8::conv"], "no pass for the padding"
    same_levels(ours, exact, scale, 128)


@needs_core
def test_padding_with_another_value_than_zero_stays() -> None:
    g = Sketch()
    x = quantized_input((1, 4, 6, 6), U8, channels_last=True)
    w, w64 = weight(g, _int8(8, 4, 3, 3))
    padded = g.op("constant_pad_nd", g.input(x), [0, 1, 0, 1], 0)
    y = g.op("conv", dequantize(g, padded, 0.04, 113), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    exact = F.conv2d((F.pad(x, (0, 1, 0, 1)).double() - 113) * 0.04, w64)
    scale = float(exact.abs().max()) / 100
    ours, fragment = run(g, quantize(g, y, scale, 128, U8))
    assert len(calls(fragment)) == 2
    same_levels(ours, exact, scale, 128)


@needs_core
def test_a_residual_block_is_two_calls() -> None:
    g = Sketch()
    x = quantized_input((1, 16, 6, 6), U8, channels_last=True)
    held = dequantize(g, g.input(x), 0.05, 0)

    def conv(v: Value, w: Value) -> Value:
        return g.op("conv", v, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    (first, _), (second, _) = weight(g, _int8(16, 16, 3, 3)), weight(g, _int8(16, 16, 3, 3))
    inner = quantize(g, g.op("relu", conv(held, first)), 0.5, 0, U8)
    out = quantize(g, g.op("relu", g.op("add", conv(dequantize(g, inner, 0.5, 0), second), held)), 2.0, 0, U8)
    fragment = compiled(g, [out])
    assert calls(fragment) == ["fusewright_int8::conv"] * 2
    (ours,) = g.run(fragment, [out])
    assert int((ours.int() - g.tensors[out.id].int()).abs().max()) <= 1


@needs_onednn
@needs_core
@pytest.mark.parametrize("adds", [True, False])
def test_a_product_for_which_each_engine_prefers_the_other_is_int8_all_the_same(adds: bool) -> None:
    """Each engine is asked with the ops that it can fuse."""

    def the_other(key: str, candidates: Sequence[str]) -> str:
        return "onednn" if "adds" in key or "->uint8" in key else "core"

    g = Sketch()
    x = quantized_input((1, 16, 6, 6), U8, channels_last=True)
    held, (w, _) = dequantize(g, g.input(x), 0.05, 0), weight(g, _int8(16, 16, 3, 3))
    y = g.op("conv", held, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = quantize(g, g.op("relu", g.op("add", y, held) if adds else y), 2.0, 0, U8)
    g.temporaries.clear()
    ctx = Context(dict(X86Int8.options), DEVICE, the_other, specs=g.temporaries)
    fragment = X86Int8(DEVICE).compile(g.region([out]), ctx)
    assert isinstance(fragment, Fragment)
    assert f"fusewright_int8::conv{'_sum' if adds else ''}_onednn" in calls(fragment)
    (ours,) = g.run(fragment, [out])
    assert int((ours.int() - g.tensors[out.id].int()).abs().max()) <= 1


@pytest.mark.parametrize("op", ["linear", "conv"])
def test_a_layer_whose_floats_are_faster_stays_one_of_floats_and_says_so(op: str) -> None:
    g = Sketch()
    if op == "linear":
        x, (w, _) = quantized_input((6, 32), U8), weight(g, _int8(16, 32))
        y = g.op("linear", dequantize(g, g.input(x), 0.05, 3), w, None)
    else:
        x, (w, _) = quantized_input((1, 16, 6, 6), U8, channels_last=True), weight(g, _int8(16, 16, 3, 3))
        y = g.op("conv", dequantize(g, g.input(x), 0.05, 3), w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = quantize(g, g.op("relu", y), 2.0, 0, U8)
    g.temporaries.clear()
    pick = by_preference("floats", "packed", "aten", "together", "kernel")
    fragment = X86Int8(DEVICE).compile(g.region([out]), Context(dict(X86Int8.options), DEVICE, pick, specs=g.temporaries))
    assert isinstance(fragment, Fragment)
    assert not [c for c in calls(fragment) if "fusewright_int8" in c]
    assert any("not int8: floats are faster for its shape" in note for note in fragment.notes.values())
    (ours,) = g.run(fragment, [out])
    assert int((ours.int() - g.tensors[out.id].int()).abs().max()) <= 1


@pytest.mark.parametrize("adds", [None, U8, I8, F32])
@pytest.mark.parametrize("floats", [F32, BF16])
@pytest.mark.parametrize("out", [U8, I8, F32, BF16])
def test_floats_can_be_measured_for_every_result(out: torch.dtype, floats: torch.dtype, adds: torch.dtype | None) -> None:
    conv = Convolution((1, 8, 6, 6), (16, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1, U8, out, adds)
    for shape in (Product(4, 32, 16, U8, out, adds), conv):
        assert [make()().dtype for make in FLOAT_MAKERS[type(shape)](shape, floats, True).values()] == [out]


@pytest.mark.parametrize("adds", [None, U8, I8, F32])
@pytest.mark.parametrize("out", [U8, I8, F32, BF16])
def test_every_engine_can_be_measured_for_every_result(out: torch.dtype, adds: torch.dtype | None) -> None:
    conv = Convolution((1, 8, 6, 6), (16, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1, U8, out, adds)
    for shape in (Product(4, 32, 16, U8, out, adds), conv):
        for e in present():
            assert MAKERS[type(shape)](e, shape)()().dtype == out


@needs_onednn
@pytest.mark.parametrize("case", CONVS)
@pytest.mark.parametrize("name", ["none", "relu"])
@pytest.mark.parametrize(("held", "out"), [(U8, U8), (I8, I8), (I8, U8), (U8, I8), (F32, F32), (F32, U8)])
def test_onednn_adds_the_residual_of_a_convolution(case: str, name: str, held: torch.dtype, out: torch.dtype) -> None:
    shape, wshape, *geometry, groups = CONVS[case]
    g = Sketch()
    x, (w, w64) = quantized_input(shape, U8, channels_last=True), weight(g, _int8(*wshape))
    y = g.op("conv", dequantize(g, g.input(x), 0.04, 113), w, None, *map(list, geometry), False, [0, 0], groups)
    exact = F.conv2d((x.double() - 113) * 0.04, w64, None, *geometry, groups)
    result, exact = _with_residual(g, y, exact, held, name, out)
    ours, fragment = run(g, result, "onednn")
    if held is F32 and out is U8:
        assert calls(fragment)[0] == "fusewright_int8::conv_onednn" and len(calls(fragment)) == 2
    else:
        copy = "aten::clone" if held is out else "fusewright_int8::other_sign"
        assert calls(fragment) == [copy, "fusewright_int8::conv_sum_onednn"]
    _judge(ours, exact)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_residual_that_others_read_is_not_overwritten(engine: str) -> None:
    g = Sketch()
    x, (w, w64) = quantized_input((2, 16, 6, 6), U8, channels_last=True), weight(g, _int8(16, 16, 3, 3))
    held, before = dequantize(g, value := g.input(x), 0.05, 3), x.clone()
    y = g.op("add", g.op("conv", held, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), held)
    ours, fragment = run(g, quantize(g, y, 0.9, 7, U8), engine)
    assert calls(fragment)[-1] == CALL[engine].format("conv" if engine == "core" else "conv_sum")
    assert torch.equal(g.tensors[value.id], before)
    floats = (x.double() - 3) * 0.05
    same_levels(ours, F.conv2d(floats, w64, None, padding=1) + floats, 0.9, 7)


@needs_onednn
def test_the_weight_of_a_onednn_convolution_is_packed_for_its_input() -> None:
    """Packed for a guessed shape, it is reordered in every call, which can take longer than the convolution."""
    g = Sketch()
    x, (w, _) = quantized_input((2, 64, 14, 14), U8, channels_last=True), weight(g, _int8(128, 64, 1, 1))
    y = g.op("conv", dequantize(g, g.input(x), 0.05, 0), w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    fragment = compiled(g, [quantize(g, y, 0.5, 0, U8)], "onednn")
    found = [i for i in fragment.instructions if isinstance(i, Call)]
    (packing,) = (i for i in found if i.target.startswith("fusewright_int8::pack_conv_onednn"))
    assert packing.args[-1] == (2, 64, 14, 14)


# -- activations alone


def _activation(g: Sketch, x: torch.Tensor, scale: float, zero: int) -> tuple[Value, torch.Tensor]:
    return dequantize(g, g.input(x), scale, zero), (x.double() - zero) * scale


@needs_core
@pytest.mark.parametrize("requantized", [True, False])
@pytest.mark.parametrize(("op", "batch"), [("mm", ()), ("bmm", (3,)), ("matmul", (2, 3))])
@pytest.mark.parametrize(("left", "right"), [((U8, 0), (U8, 140)), ((I8, -5), (U8, 255)), ((U8, 128), (I8, 0))])
def test_a_product_of_two_quantized_activations_is_one_call(
    op: str, batch: tuple[int, ...], left: tuple[torch.dtype, int], right: tuple[torch.dtype, int], requantized: bool
) -> None:
    g = Sketch()
    x, exact_x = _activation(g, quantized_input((*batch, 7, 33), left[0]), 0.02, left[1])
    y, exact_y = _activation(g, quantized_input((*batch, 33, 20), right[0]), 0.05, right[1])
    out, exact = g.op(op, x, y), torch.matmul(exact_x, exact_y)
    scale = float(exact.abs().max()) / 120
    ours, fragment = run(g, quantize(g, out, scale, 128, U8) if requantized else out)
    assert calls(fragment) == ["fusewright_int8::matmul"]
    if requantized:
        same_levels(ours, exact, scale, 128)
    else:
        assert float((ours.double() - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


def test_a_product_of_activations_stays_in_floats_where_those_measure_faster() -> None:
    g = Sketch()
    x, exact_x = _activation(g, quantized_input((4, 8), U8), 0.02, 3)
    y, exact_y = _activation(g, quantized_input((8, 4), U8), 0.05, 9)
    ours, fragment = run(g, g.op("mm", x, y), "onednn")
    assert "fusewright_int8::matmul" not in calls(fragment)
    torch.testing.assert_close(ours, (exact_x @ exact_y).float())


@given(
    dtypes=st.tuples(*[st.sampled_from([U8, I8])] * 3), scales=st.tuples(*[st.sampled_from([0.5, 0.25, 0.03, 1e-3])] * 3),
    zeros=st.tuples(*[st.integers(0, 127)] * 3), relu=st.booleans(), size=st.integers(1, 90), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_addition_of_quantized_tensors_is_one_kernel_from_bytes_to_bytes(
    dtypes: tuple[torch.dtype, ...], scales: tuple[float, ...], zeros: tuple[int, ...], relu: bool, size: int, seed: int
) -> None:
    """Scales with integer quotients make every other sum a tie."""
    torch.manual_seed(seed)
    g = Sketch()
    a, b = (_activation(g, quantized_input((2, size + 1), dtypes[i]), scales[i], zeros[i])[0] for i in range(2))
    y = g.op("add", a, b)
    ours, fragment = run(g, out := quantize(g, g.op("relu", y) if relu else y, scales[2], zeros[2], dtypes[2]))
    assert len(calls(fragment)) == 1 and calls(fragment)[0].startswith("kernel ")
    assert torch.equal(ours, g.tensors[out.id])


# -- what stays in floats


def _notes(g: Sketch, out: Value) -> str:
    fragment = compiled(g, [out])
    assert not any("int8::linear" in t or "int8::conv" in t for t in calls(fragment))
    (ours,) = g.run(fragment, [out])
    torch.testing.assert_close(ours, g.tensors[out.id], rtol=2e-5, atol=2e-5 * float(g.tensors[out.id].abs().max()))
    return " ".join(fragment.notes.values())


def test_sums_that_int32_does_not_hold_stay_in_floats_with_a_reason() -> None:
    g, y, _ = _linear(quantized_input((1, MOST_K + 1), U8), 2, 1e-4, 0)
    assert f"sums of {MOST_K + 1} products do not fit int32" in _notes(g, y)


@needs_core
def test_the_longest_sum_that_int32_holds_does_not_overflow() -> None:
    g = Sketch()
    x, w = torch.full((1, MOST_K), 255, dtype=U8), torch.full((2, MOST_K), -128, dtype=I8)
    y = g.op("linear", dequantize(g, g.input(x), 1.0, 0), dequantize(g, g.input(w, const=True), 1.0, 0), None)
    ours, _ = run(g, y)
    assert torch.equal(ours, torch.full((1, 2), -128.0 * 255 * MOST_K))


def test_a_weight_that_is_no_constant_stays_in_floats_with_a_reason() -> None:
    g = Sketch()
    w = dequantize(g, g.input(_int8(4, 8)), 0.1, 0)
    y = g.op("linear", dequantize(g, g.input(quantized_input((2, 8), U8)), 0.1, 0), w, None)
    assert "its weight is no constant of int8" in _notes(g, y)


def test_a_scale_per_input_of_the_weight_stays_in_floats_with_a_reason() -> None:
    g = Sketch()
    held = g.input(_int8(4, 8), const=True), g.input(torch.rand(8), const=True), None
    w = g.op("dequantize_per_channel", *held, 1, -128, 127, I8)
    y = g.op("linear", dequantize(g, g.input(quantized_input((2, 8), U8)), 0.1, 0), w, None)
    assert "a scale for each input" in _notes(g, y)
