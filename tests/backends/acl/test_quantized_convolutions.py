"""int8 convolutions on Arm: which q/dq graphs become one, and that results equal exact arithmetic bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import report
from fusewright.interface import Value
from fusewright_acl import quantized
from fusewright_cpu.target import aarch64_target
from tests.backends.acl.common import BF16, F32, channels_last, compiled
from tests.backends.acl.test_quantized import HERE, I8, LIMITS, U8, dequantize, levels, run, same, steps
from tests.fragments import Sketch, targets


@pytest.fixture(autouse=True)
def an_arm_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other machines, fragments are compiled for a core and inspected, but not run."""
    if not HERE:
        monkeypatch.setattr(quantized, "host_target", lambda: aarch64_target("neoverse-v1"))


def convolution(
    shape: tuple[int, ...] = (2, 16, 7, 6), columns: int = 24, kernel: tuple[int, int] = (3, 3), *, stride: int = 1,
    padding: int = 1, dilation: int = 1, groups: int = 1, dtype: torch.dtype = U8, out: torch.dtype = F32, zero: int = 9,
    zeros: bool = False, per_channel: bool = True, bias: bool = True, planes: bool = False, transposed: bool = False,
) -> tuple[Sketch, Value, torch.Tensor]:  # fmt: skip
    """Sketch a convolution of dequantized operands; also return its result in exact arithmetic, rounded to fp32 once."""
    torch.manual_seed(0)
    g, x = Sketch(), levels(*shape, dtype=dtype)
    weight = levels(columns, shape[1] // groups, *kernel, dtype=I8)
    if transposed:
        weight = levels(shape[1], columns, *kernel, dtype=I8)
    shift, scale = torch.randint(-128, 128, (columns,)) * int(zeros), torch.rand(columns) * 0.02 + 0.01
    held = g.input(weight, const=True)
    if per_channel:
        rows = g.input(scale, const=True), g.input(shift, const=True)
        w = g.op("dequantize_per_channel", held, *rows, 0, -128, 127, I8, out_dtype=out)
    else:
        scale, shift = torch.full((columns,), 0.02), torch.full((columns,), -5 * int(zeros))
        w = g.op("dequantize", held, 0.02, int(shift[0]), -128, 127, I8, out_dtype=out)
    b = torch.randn(columns).to(out) if bias else None
    image = dequantize(g, g.input(x if planes else channels_last(x)), 0.03, zero, out)
    how = [stride] * 2, [padding] * 2, [dilation] * 2
    y = g.op("conv", image, w, None if b is None else g.input(b, const=True), *how, transposed, [0, 0], groups)
    if transposed:
        return g, y, torch.empty(0)
    scales, shifts, biases = (t if t is None else t.double().view(-1, 1, 1) for t in (scale, shift, b))
    sums = torch.conv2d(x.double() - zero, weight.double() - shifts[..., None], None, *how, groups)
    wide = sums * (torch.tensor(0.03).double() * scales)
    return g, y, (wide if biases is None else wide + biases).float().to(out)


HOW: dict[str, dict[str, Any]] = {
    "one point": {"kernel": (1, 1), "padding": 0}, "of a batch": {}, "from planes": {"planes": True},
    "int8": {"dtype": I8, "zero": -3}, "no padding": {"padding": 0}, "bf16": {"out": BF16},
    "zero points": {"zeros": True, "dtype": I8}, "one scale": {"per_channel": False, "zeros": True},
    "stride": {"stride": 2, "kernel": (5, 3)}, "dilation": {"dilation": 2, "padding": 3},
    "two groups": {"groups": 2, "columns": 32}, "no bias": {"bias": False},
    "few channels": {"shape": (1, 3, 11, 12), "kernel": (7, 7), "padding": 3, "stride": 2},
    "wide padding": {"padding": 5, "kernel": (4, 2)}, "one pixel": {"shape": (1, 8, 1, 1), "padding": 1},
}  # fmt: skip


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
def test_a_convolution_is_one_kernel_and_exact(how: dict[str, Any]) -> None:
    g, y, wanted = convolution(**how)
    found, fragment = run(g, y)
    kernels = [t for t in steps(fragment) if "int8_conv" in t]
    assert len(kernels) == 1 and kernels[0].endswith("_zeros") is (how.get("zeros", False) or how.get("per_channel", True))
    assert all("int8_conv" in t or "clone" in t or "copy" in t for t in steps(fragment)), steps(fragment)
    assert targets(fragment, prepare=True).count("fusewright_acl::int8_pack_conv") == 1
    same(found, wanted)


def test_int8_stays_int8_between_layers() -> None:
    """The activation and quantization after the exact convolution form one kernel, whose bytes the next one reads."""
    g, y, exact = convolution((1, 8, 6, 5), 16)
    q = g.op("quantize", g.op("relu", y), 0.4, 30, 0, 255, U8)
    weight, scale = levels(8, 16, 1, 1, dtype=I8), torch.rand(8) + 0.1
    w = g.op("dequantize_per_channel", g.input(weight, const=True), g.input(scale, const=True),
             g.input(torch.zeros(8, dtype=torch.int64), const=True), 0, -128, 127, I8)  # fmt: skip
    z = g.op("conv", dequantize(g, q, 0.4, 30), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    found, fragment = run(g, z)
    assert [("int8_conv" in t) for t in steps(fragment)][:3] == [True, False, True], steps(fragment)
    held = torch.ops.quantized_decomposed.quantize_per_tensor(torch.relu(exact), 0.4, 30, 0, 255, U8)
    sums = torch.conv2d(held.double() - 30, weight.double())
    same(found, (sums * (torch.tensor(0.4).double() * scale.double()).view(-1, 1, 1)).float())


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"groups": 16, "columns": 16}, "groups of few channels"), ({"transposed": True, "columns": 16}, "only plain 2-d"),
        ({"zero": 300}, "a zero point"), ({"shape": (1, 3700, 3, 3), "columns": 1, "zeros": True}, "do not fit int32"),
    ],
)  # fmt: skip
def test_what_stays_a_convolution_of_floats_says_why(how: dict[str, Any], why: str) -> None:
    g, y, _ = convolution(**how)
    fragment = compiled(g, [y])
    assert any(why in n for n in fragment.notes.values()) and not any("int8_conv" in t for t in targets(fragment)), fragment.notes


class Block(torch.nn.Module):
    """Two convolutions with a residual around the second, as PT2E produces them."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("first", (16, 3, 3, 3)), ("second", (16, 16, 3, 3))):
            self.register_buffer(name, levels(*shape, dtype=I8))
            self.register_buffer(f"{name}_scale", torch.rand(16) * 0.01 + 0.001)
            self.register_buffer(f"{name}_zero", torch.zeros(16, dtype=torch.int64))

    def weight(self, name: str) -> torch.Tensor:
        rows = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero")
        return torch.ops.quantized_decomposed.dequantize_per_channel(getattr(self, name), *rows, 0, -128, 127, I8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def held(x: torch.Tensor, *rule: Any) -> torch.Tensor:
            q = torch.ops.quantized_decomposed.quantize_per_tensor(x, *rule, *LIMITS[U8], U8)
            return torch.ops.quantized_decomposed.dequantize_per_tensor(q, *rule, *LIMITS[U8], U8)

        y = held(torch.relu(torch.conv2d(held(x, 0.03, 128), self.weight("first"), padding=1, stride=2)), 0.1, 0)
        return torch.relu(torch.conv2d(y, self.weight("second"), padding=1) + y)


@pytest.mark.hardware("graviton_acl")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_that_was_quantized_by_export_compiles() -> None:
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(2, 3, 14, 14)
    ours = torch.compile(model, backend="graviton_acl", options={"strict": True})
    with torch.no_grad(), report.recording() as reports:
        eager, found = model(x), ours(x)
    level = 0.1 * float(model.weight("second").abs().amax())  # a rounding that changes a level of the hidden layer
    assert float((found - eager).abs().max()) <= level * 3 and float((found - eager).abs().mean()) < 1e-2
    notes = [op.note for r in reports for op in r.ops if op.op == "conv"]
    assert notes and all(note.startswith("int8 convolution") for note in notes), notes
