"""Calls of the core in plans: launched by address, with the results and the errors of the functions in `native`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusewright.interface import Device, Dim, TensorSpec
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import BINDS, Call, Ref
from fusewright.plan.memory import place
from fusewright_int8.backend import X86Int8
from fusewright_int8.operators import as_planned, name
from fusewright_int8.run import native, words
from tests.backends.int8.common import BF16, F32, I8, U8, needs_core, quantized_input

pytestmark = needs_core

POLICY = X86Int8(Device("cpu", "avx2", frozenset())).policy()
LEVELS = U8, 0.05, 7, 2, 250
FLOATS = F32, 1.0, 0, 0, 0
NONE = None, 1.0, 0


def _spec(x: Tensor, **given: Any) -> TensorSpec:
    return TensorSpec(**({"shape": tuple(x.shape), "stride": tuple(x.stride()), "dtype": x.dtype} | given))


def _plan(op: str, args: Sequence[Any], out: TensorSpec, **given: Any) -> tuple[Plan, list[Tensor]]:
    """A plan of one call, whose tensors are inputs 1, 2, ... and whose result is 0. Of packed weights nothing is known."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    ids = {id(x): k for k, x in enumerate(tensors, 1)}
    call = Call(name(op), tuple(Ref(ids[id(x)]) if isinstance(x, Tensor) else x for x in args), (0,))
    specs = {0: out} | {ids[id(x)]: _spec(x) for x in tensors if op == "matmul" or x is not args[1]}
    return Plan(tuple(ids.values()), (Ref(0),), [call], [], (), (), specs, policy=POLICY, **given), tensors


def _launched(op: str, *args: Any) -> Tensor:
    """The result of a call in a plan, which must be a launch."""
    expected = as_planned(name(op), *args)()
    plan, tensors = _plan(op, args, _spec(expected))
    assert place(plan).bound, "the call is not launched"
    (ours,) = codegen.load(plan)(list(tensors))
    assert ours.stride() == expected.stride()
    return ours


@pytest.fixture(params=["native", "python"], autouse=True)
def _by_both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `fusewright-native` and without it."""
    monkeypatch.setenv("FUSEWRIGHT_NATIVE", str(int(request.param == "native")))


def _weight(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n * k)
    return torch.randint(-128, 128, (n, k)).to(I8), torch.rand(n) * 0.02 + 0.01, torch.randn(n)


def _named(post: str, args: tuple[float, ...], levels: Sequence[Any], residual: Sequence[Any] = NONE) -> dict[str, Any]:
    keys = "residual", "residual_scale", "residual_zero_point", "post", "post_args", "out_dtype", "out_scale", "out_zero_point"
    given = dict(zip(keys, (*residual, post, args, *levels[:3]), strict=True))
    return given | ({"out_low": levels[3], "out_high": levels[4]} if levels[0] in (U8, I8) else {})


# -- results


def _rows(kind: str, dtype: torch.dtype) -> Tensor:
    """[..., 40] in one of the forms that need no copy."""
    match kind:
        case "gaps":
            return quantized_input((6, 50), dtype)[:, :40]
        case "batches":
            return quantized_input((2, 1, 3, 40), dtype)
        case "one row":
            return quantized_input((40,), dtype)
    return quantized_input((6, 40), dtype)


@pytest.mark.parametrize("levels", [LEVELS, FLOATS, (BF16, *FLOATS[1:])], ids=["bytes", "fp32", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "gaps", "batches", "one row"])
@pytest.mark.parametrize("dtype", [U8, I8])
def test_a_linear(kind: str, dtype: torch.dtype, levels: tuple[Any, ...]) -> None:
    w, scale, bias = _weight(21, 40)
    x, packed = _rows(kind, dtype), native.pack_linear(w)
    residual = quantized_input((*x.shape[:-1], 21), U8), 0.1, 9
    ours = _launched("linear", x, packed, scale, bias, 0.03, 5, *residual, "clamp", (-1.0, 9.0), *levels)
    exact = native.linear(x, packed, scale, bias, 0.03, 5, **_named("clamp", (-1.0, 9.0), levels, residual))
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("layout", ["dense", "heads"])
def test_a_matmul(layout: str) -> None:
    x, y = quantized_input((1, 3, 5, 16), U8), quantized_input((1, 3, 16, 7), I8)
    if layout == "heads":
        x, y = quantized_input((1, 5, 3, 16), U8).transpose(1, 2), quantized_input((1, 7, 3, 16), I8).permute(0, 2, 3, 1)
    ours = _launched("matmul", x, y, 0.1, 100, 0.2, -3, *NONE, "none", (), *LEVELS)
    levels = {k: v for k, v in _named("none", (), LEVELS).items() if not k.startswith("residual")}
    assert torch.equal(ours, native.matmul(x, y, 0.1, 100, 0.2, -3, **levels))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rule", [*native.RULES, None])
def test_a_linear_of_floats(rule: str | None, dtype: torch.dtype) -> None:
    w, scale, bias = _weight(21, 40)
    x, packed, residual = torch.randn(2, 3, 40).to(dtype), native.pack_linear(w), torch.randn(2, 3, 21)
    rest = residual, "silu", (), dtype
    given = {"residual": residual, "post": "silu", "out_dtype": dtype}
    if rule is None:
        ours = _launched("weight_linear", x, packed, scale, bias, *rest)
        exact = native.weight_linear(x, packed, scale, bias, **given)
    else:
        ours = _launched("dynamic_linear", x, packed, scale, None, rule, *rest)
        exact = native.dynamic_linear(x, packed, scale, None, rule, **given)
    assert torch.equal(ours, exact)


CONVS = {
    "3x3": ((2, 6, 9, 8), (10, 6, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided": ((1, 6, 9, 8), (10, 6, 3, 2), (2, 1), (0, 1), (1, 2), 1),
    "groups": ((1, 8, 5, 5), (12, 4, 3, 3), (1, 1), (1, 1), (1, 1), 2),
    "depthwise": ((2, 70, 7, 9), (70, 1, 3, 3), (2, 2), (1, 1), (1, 1), 70),
    "1x1": ((2, 16, 4, 5), (24, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one channel": ((2, 1, 6, 6), (8, 1, 3, 3), (1, 1), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("more", [(), (0, 0, 1, 1), (1, 2, 0, 3)], ids=["symmetric", "below and right", "four numbers"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("case", CONVS)
def test_a_convolution(case: str, adds: bool, more: tuple[int, ...]) -> None:
    """Padding of its own equals a padded input."""
    shape, weight, stride, padding, dilation, groups = CONVS[case]
    torch.manual_seed(0)
    w, scale, bias = torch.randint(-128, 128, weight).to(I8), torch.rand(weight[0]) * 0.02 + 0.01, torch.randn(weight[0])
    x, packed, zero = quantized_input(shape, U8, channels_last=True), native.pack_conv2d(w, groups), 113
    given = (packed, weight[2:], scale, bias, 0.03, zero, stride)
    top, left, bottom, right = more or (0, 0, 0, 0)
    outside = F.pad(x, (left, right, top, bottom), value=zero).contiguous(memory_format=torch.channels_last)
    size = native.conv2d(outside, *given, padding, dilation, groups).shape
    residual = (quantized_input(tuple(size), U8, channels_last=True), 0.1, 9) if adds else NONE
    exact = native.conv2d(outside, *given, padding, dilation, groups, **_named("relu", (), LEVELS, residual))
    around = tuple(a + b for a, b in zip((*padding, *padding), more, strict=True)) if more else padding
    rest = weight[2:], stride, around, dilation, groups, *residual, "relu", (), *LEVELS
    assert torch.equal(_launched("conv", x, packed, scale, bias, 0.03, zero, *rest), exact)


# -- what changes from call to call


def _linear_plan(symbolic: bool = False, more: Sequence[Call] = ()) -> tuple[Plan, list[Tensor]]:
    w, scale, bias = _weight(8, 16)
    args = quantized_input((4, 16), U8), native.pack_linear(w), scale, bias, 0.03, 5, *NONE, "relu", (), *LEVELS
    plan, tensors = _plan("linear", args, TensorSpec((4, 8), (8, 1), U8))
    if symbolic:
        rows = Dim("s0", 4)
        plan.specs |= {1: TensorSpec((rows, 16), (16, 1), U8), 0: TensorSpec((rows, 8), (8, 1), U8)}
    return plan, tensors


def _exact(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return native.linear(x, packed, scale, bias, 0.03, 5, **_named("relu", (), LEVELS))


def test_a_batch_of_any_size() -> None:
    plan, (_, *weights) = _linear_plan(symbolic=True)
    assert place(plan).bound
    run = codegen.load(plan)
    for m in (4, 1, 9, 64):
        x = quantized_input((m, 16), U8)
        (ours,) = run([x, *weights])
        assert torch.equal(ours, _exact(x, *weights))


def test_images_of_any_size() -> None:
    w = torch.randint(-128, 128, (8, 4, 3, 3)).to(I8)
    packed, scale, batch, side = native.pack_conv2d(w), torch.rand(8) + 0.1, Dim("s0", 2), Dim("s1", 6)
    x = quantized_input((2, 4, 6, 6), U8, channels_last=True)
    rest = (3, 3), (1, 1), (1, 1), (1, 1), 1, *NONE, "none", (), *FLOATS
    plan, _ = _plan("conv", (x, packed, scale, None, 0.03, 5, *rest), _spec(x))

    def images(c: int, dtype: torch.dtype) -> TensorSpec:
        row, image = Dim(side.expr * c, 6 * c), Dim(side.expr * side.expr * c, 36 * c)  # type: ignore[arg-type]
        return TensorSpec((batch, c, side, side), (image, 1, row, c), dtype)

    plan.specs |= {1: images(4, U8), 0: images(8, F32)}
    assert place(plan).bound
    run = codegen.load(plan)
    for shape in ((2, 4, 6, 6), (1, 4, 9, 9), (5, 4, 1, 1)):
        x = quantized_input(shape, U8, channels_last=True)
        (ours,) = run([x, packed, scale])
        assert torch.equal(ours, native.conv2d(x, packed, (3, 3), scale, None, 0.03, 5, padding=(1, 1)))


def test_threads_call_the_same_plan() -> None:
    """Results on the way lie in arenas: each call has its own."""
    plan, (_, *weights) = _linear_plan()
    plan.instructions = [*plan.instructions, Call("aten::mul.Scalar", (Ref(0), 1), (9,))]
    plan.outputs = (Ref(9),)
    assert 0 in place(plan).offset
    run, inputs = codegen.load(plan), [quantized_input((4, 16), U8) for _ in range(8)]

    def repeated(x: Tensor) -> bool:
        exact = _exact(x, *weights)
        return all(torch.equal(run([x, *weights])[0], exact) for _ in range(200))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(repeated, inputs))


def test_weights_that_change_are_packed_again_and_one_that_no_longer_fits_8_bits_stays_in_floats() -> None:
    w, scale, bias = _weight(8, 16)
    x, zeros = quantized_input((4, 16), U8), torch.zeros(8, dtype=torch.int32)
    plan, _ = _plan("linear", (x, w, scale, bias, 0.03, 5, *NONE, "relu", (), *LEVELS), TensorSpec((4, 8), (8, 1), U8))
    plan.inputs, plan.prepare_inputs, plan.prepare_outputs = (1, 3, 4, 5, 6), (5, 6), (2,)
    plan.prepare = [Call(name("center"), (Ref(5), Ref(6)), (7,)), Call(name("pack_linear"), (Ref(7),), (2,))]
    run = codegen.load(plan)

    def ours() -> Tensor:
        (found,) = run([x, scale, bias, w, zeros])
        return found

    def exact() -> Tensor:
        product = F.linear((x.double() - 5) * 0.03, (w.double() - zeros[:, None]) * scale[:, None], bias.double()).relu()
        return (product / 0.05).round().add(7).clamp(2, 250)

    for change in (lambda: None, lambda: w.fill_(3), lambda: zeros.fill_(-127), lambda: zeros.zero_(), lambda: w.neg_()):
        change()
        off = (ours().double() - exact()).abs()
        assert int(off.max()) <= 1 and int(off.sum()) <= 1  # at the midpoint of two levels


# -- what is not launched


def _refused(change: Callable[[dict[int, TensorSpec]], Any], op: str = "linear", **args: Any) -> bool:
    w, scale, bias = _weight(8, 16)
    given: dict[str, Any] = {"x_zero": 5, "residual": None, "post": "relu", "levels": LEVELS} | args
    x, packed = quantized_input((4, 16), U8), native.pack_linear(w)
    rest = given["residual"], 1.0, 0, given["post"], (), *given["levels"]
    plan, _ = _plan(op, (x, packed, scale, bias, 0.03, given["x_zero"], *rest), TensorSpec((4, 8), (8, 1), given["levels"][0]))
    change(plan.specs)
    (call,) = plan.instructions
    assert isinstance(call, Call)
    return BINDS[call.target](call, plan.specs) is None


REFUSED: dict[str, tuple[Callable[[dict[int, TensorSpec]], Any], dict[str, Any]]] = {
    "nothing known of the input": (lambda s: s.pop(1), {}),
    "nothing known of the result": (lambda s: s.pop(0), {}),
    "input of floats": (lambda s: s.update({1: TensorSpec((4, 16), (16, 1), F32)}), {}),
    "columns of the input apart": (lambda s: s.update({1: TensorSpec((4, 16), (1, 4), U8)}), {}),
    "rows at no fixed distance": (lambda s: s.update({1: TensorSpec((2, 2, 16), (50, 16, 1), U8)}), {}),
    "gaps in the result": (lambda s: s.update({0: TensorSpec((4, 8), (9, 1), U8)}), {}),
    "result of another type": (lambda s: s.update({0: TensorSpec((4, 8), (8, 1), I8)}), {}),
    "result of another shape": (lambda s: s.update({0: TensorSpec((3, 8), (8, 1), U8)}), {}),
    "bias of bf16": (lambda s: s.update({4: TensorSpec((8,), (1,), BF16)}), {}),
    "residual of another shape": (lambda s: None, {"residual": torch.zeros(8)}),
    "zero point": (lambda s: None, {"x_zero": -1}),
    "post-op": (lambda s: None, {"post": "tanh"}),
    "scale of the result": (lambda s: None, {"levels": (U8, 0.0, 0, 0, 255)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_stays_a_call(case: str) -> None:
    change, args = REFUSED[case]
    assert not _refused(lambda s: None)
    assert _refused(change, **args)


@pytest.mark.parametrize(("args", "message"), [
    ({"x_zero": 256}, "x_zero_point is 256"), ({"post": "tanh"}, "no post-op 'tanh'"), ({"scale": 0.0}, "out_scale is 0.0"),
])  # fmt: skip
def test_an_invalid_argument_is_an_error_when_the_plan_runs(args: dict[str, Any], message: str) -> None:
    w, scale, bias = _weight(8, 16)
    rest = *NONE, args.get("post", "relu"), (), U8, args.get("scale", 0.05), 7, 2, 250
    call = quantized_input((4, 16), U8), native.pack_linear(w), scale, bias, 0.03, args.get("x_zero", 5), *rest
    plan, tensors = _plan("linear", call, TensorSpec((4, 8), (8, 1), U8))
    with pytest.raises(ValueError, match=message):
        codegen.load(plan)(tensors)


def test_an_entry_that_fails_is_an_error() -> None:
    assert isinstance(words.error(1, ()), MemoryError)
    assert "code 2" in str(words.error(2, ()))


def test_the_text_of_a_plan_shows_the_operator() -> None:
    plan, _ = _linear_plan()
    assert "v0 = fusewright_int8_linear_default(v1, v2, v3, v4, 0.03, 5, None" in codegen.to_text(plan)
