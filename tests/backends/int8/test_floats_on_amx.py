"""Floats that int8 competes with where our own bf16 kernel for AMX runs them: they are measured, and taken. Tiles are simulated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fusewright.interface import Fragment, Value
from fusewright_cpu.kernels.by_hand import VectorLinear
from fusewright_cpu.target import host_target
from fusewright_int8.backend import X86Int8
from fusewright_int8.engines import FLOAT_MAKERS, FLOATS, OWN_FLOATS, Convolution, Product, fastest, reading_pays
from tests.backends.cpu.amx.simulated import simulate_linears
from tests.backends.int8.common import (
    BF16,
    DEVICE,
    F32,
    I8,
    U8,
    calls,
    dequantize,
    needs_core,
    quantize,
    quantized_input,
)
from tests.fragments import Context, Sketch, by_preference

pytestmark = pytest.mark.skipif(not host_target().masks, reason="this CPU has no masked stores")


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_linears(monkeypatch)
    monkeypatch.setattr(VectorLinear, "refused", lambda self, target: "only bf16 is meant here")


def conv(k: int, adds: torch.dtype | None = None, out: torch.dtype = U8, stride: int = 1) -> Convolution:
    return Convolution((1, 32, 6, 6), (40, 32, k, k), (stride, stride), (k // 2, k // 2), (1, 1), 1, U8, out, adds)


@pytest.mark.parametrize("adds", [None, U8, F32, BF16])
@pytest.mark.parametrize("out", [U8, I8, BF16])
def test_both_float_calls_give_the_type_of_the_result(out: torch.dtype, adds: torch.dtype | None) -> None:
    for shape in (Product(33, 32, 40, U8, out, adds), conv(1, adds, out)):
        made = {name: make()() for name, make in FLOAT_MAKERS[type(shape)](shape, BF16, True).items()}
        assert {name: y.dtype for name, y in made.items()} == {FLOATS: out, OWN_FLOATS: out}


@pytest.mark.parametrize(
    ("shape", "dtype", "own"),
    [
        (Product(33, 32, 40, U8, U8), F32, True), (Product(31, 32, 40, U8, U8), BF16, True), (conv(3), BF16, True),
        (Product(33, 40, 40, U8, U8), BF16, True), (Product(33, 32, 40, U8, U8), BF16, False), (conv(1, stride=2), BF16, True),
    ],
)  # fmt: skip
def test_our_floats_are_no_candidate_where_a_plan_would_not_take_them(
    shape: Product | Convolution, dtype: torch.dtype, own: bool
) -> None:
    assert list(FLOAT_MAKERS[type(shape)](shape, dtype, own)) == [FLOATS]


def test_a_choice_is_remembered_for_the_type_around_it() -> None:
    keys: list[str] = []

    def pick(key: str, candidates: Sequence[str]) -> str:
        keys.append(key)
        return OWN_FLOATS if OWN_FLOATS in candidates else candidates[0]

    ctx = Context(dict(X86Int8.options), DEVICE, pick)
    shape = Product(33, 32, 40, U8, U8)
    found = [fastest(ctx, shape, floats=dtype) for dtype in (BF16, F32)]
    assert found[0] == FLOATS != found[1] and len(set(keys)) == 2


@needs_core
def test_weight_only_is_compared_with_our_floats() -> None:
    ctx = Context(dict(X86Int8.options), DEVICE, by_preference(OWN_FLOATS, "core"))
    assert not reading_pays(ctx, 33, 64, 40, BF16)
    assert reading_pays(ctx, 33, 64, 40, F32)


def _weight(g: Sketch, *shape: int) -> Value:
    w, scales = torch.randint(-128, 128, shape, dtype=I8), torch.rand(shape[0]) * 0.02 + 0.01
    given = g.input(w, const=True), g.input(scales, const=True), g.input(torch.zeros(shape[0], dtype=torch.int64), const=True)
    return g.op("dequantize_per_channel", *given, 0, -128, 127, I8, out_dtype=BF16)


@pytest.mark.parametrize("op", ["linear", "conv"])
def test_a_layer_left_to_floats_is_computed_by_our_kernel(op: str) -> None:
    g = Sketch()
    x = quantized_input((40, 32), U8) if op == "linear" else quantized_input((2, 32, 6, 6), U8, channels_last=True)
    held = dequantize(g, g.input(x), 0.05, 3, BF16)
    if op == "linear":
        y = g.op("linear", held, _weight(g, 45, 32), None)
    else:
        y = g.op("conv", held, _weight(g, 40, 32, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    out = quantize(g, g.op("relu", y), 2.0, 0, U8)
    g.temporaries.clear()
    ctx = Context(
        dict(X86Int8.options), DEVICE, by_preference(OWN_FLOATS, "own", "kernel", "packed", "together"), specs=g.temporaries
    )
    fragment = X86Int8(DEVICE).compile(g.region([out]), ctx)
    assert isinstance(fragment, Fragment)
    assert "kernel amx_linear_relu" in calls(fragment)
    assert any("not int8: floats are faster for its shape" in note for note in fragment.notes.values())
    (ours,) = g.run(fragment, [out])
    assert int((ours.int() - g.tensors[out.id].int()).abs().max()) <= 1
