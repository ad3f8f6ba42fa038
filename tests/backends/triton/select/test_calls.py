"""Library calls of the GPU backends for regions drawn by hand: the exact calls on a device, and, simulated, that their results
equal eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Device, Fragment, OpView, Phase, Value
from fusewright.ops.strides import CHANNELS_LAST
from fusewright.plan.ir import Call, Launch, Ref
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.fuse.call import LibraryCall
from fusewright.toolkit.fuse.fuser import fuse
from fusewright.toolkit.region.graph import Claim, spec_of
from fusewright_triton.backend import NvidiaTriton, RocmTriton, TritonBackend
from fusewright_triton.select import convolutions, more_channels
from fusewright_triton.select.calls import Calls, OpCode, rewritten
from tests import fragments
from tests.backends.onednn.common import close
from tests.fragments import Context, Sketch, targets

F32, BF16 = torch.float32, torch.bfloat16
H100 = NvidiaTriton.targets["sm_90"]
REAL = Device("cpu", "sm_90", H100.all_features)
"""A device that is not simulated, though its tensors are on the CPU: code lowered for it is inspected, never run."""
SIMULATED = Device("cuda", "sm_90", H100.all_features, simulated=True)


class Net(Sketch):
    """A sketch with methods that draw layers with random weights."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype

    def tensor(self, *shape: int, const: bool = False) -> Value:
        return self.input(torch.randn(*shape).to(self.dtype), const)

    def images(self, *shape: int) -> Value:
        return self.input(torch.randn(*shape).to(self.dtype).to(memory_format=CHANNELS_LAST[len(shape)]))

    def weight(self, *shape: int) -> Value:
        return self.input((torch.randn(*shape) / 4).to(self.dtype), const=True)

    def conv(self, x: Value, i: int, o: int, k: int = 3, bias: bool = False, **more: Any) -> Value:
        dims = spec_of(x).rank - 2
        ones, zeros = (1,) * dims, (0,) * dims
        how = {"stride": ones, "padding": (k // 2,) * dims, "dilation": ones, "transposed": False, "groups": 1, **more}
        b = self.weight(o) if bias else None
        (first, second), groups = (i, o) if how["transposed"] else (o, i), how["groups"]
        w = self.weight(first, second // groups, *(k,) * dims)
        return self.op("conv", x, w, b, how["stride"], how["padding"], how["dilation"], how["transposed"], zeros, groups)

    def norm(self, x: Value, c: int) -> Value:
        variance = self.input((torch.rand(c) + 0.5).to(self.dtype), const=True)
        return self.op("batch_norm", x, self.weight(c), self.weight(c), self.weight(c), variance, 0.1, 1e-5)

    def relu(self, x: Value) -> Value:
        return self.op("relu", x)


def lowered(
    g: Sketch, outputs: Sequence[Value], *prefer: str, device: Device = REAL, cls: type[TritonBackend] = NvidiaTriton,
    **options: Any,
) -> Fragment:  # fmt: skip
    g.temporaries.clear()
    ctx = Context(options, device, _preferring(*prefer, "separate", "aten", "torch"), specs=g.temporaries)
    result = cls(device).compile(g.region(outputs), ctx)
    assert isinstance(result, Fragment)
    return result


def _preferring(*names: str) -> Callable[[str, Sequence[str]], str]:
    """Take the first of these names among candidates, or the layout that a convolution has without a trial."""
    return lambda key, given: next(n for n in (*names, "planes" if "float32 layout" in key else "last") if n in given)


def check(g: Sketch, outputs: Sequence[Value], *prefer: str, exact: bool = False) -> Fragment:
    """Lower for a simulated device, run, and compare with eager, or with what eager would return if it were exact."""
    fragment = lowered(g, outputs, *prefer, device=SIMULATED)
    for ours, expected in zip(g.run(fragment, outputs), g.exact(outputs) if exact else g.expected(outputs), strict=True):
        close(ours, expected)
    return fragment


def text(fragment: Fragment, prepare: bool | None = None) -> list[str]:
    """Return calls as "target(values and shapes)": all of them, or by `prepare` only those for constants or only the others."""
    found = []
    for i in fragment.instructions:
        if isinstance(i, Call) and prepare in (None, i.prepare):
            found.append(f"{i.target.removesuffix('.default')}{tuple(map(_word, i.args))}")
    return found


def _word(arg: Any) -> Any:
    if isinstance(arg, Ref):
        return "_"
    return tuple(map(_word, arg)) if isinstance(arg, tuple | list) else arg


# ---------------------------------------------------------------- convolutions


def block(g: Net, x: Value, shortcut: bool = False) -> Value:
    """Draw convolution, norm, addition and relu, as in a residual network."""
    y = g.norm(g.conv(x, 8, 8), 8)
    other = g.norm(g.conv(x, 8, 8, 1), 8) if shortcut else x
    return g.relu(g.op("add", y, other))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "outs", "k"), [(18, 18, 3), (24, 27, 1), (20, 16, 3), (12, 30, 1)])
def test_channels_that_libraries_pad(monkeypatch: pytest.MonkeyPatch, channels: int, outs: int, k: int, bias: bool) -> None:
    """Zeros are written behind the channels of images by the kernel before, and those behind results are not read."""
    monkeypatch.setattr(more_channels, "LARGE", 1)
    g = Net()
    x = g.relu(g.images(2, channels, 6, 5))
    fragment = check(g, [g.relu(g.norm(g.conv(x, channels, outs, k, bias), outs))])
    assert "aten::cudnn_convolution_relu" not in targets(lowered(g, [g.relu(g.conv(x, channels, outs, k, bias))]))
    assert sum(isinstance(i, Launch) for i in fragment.instructions) <= 2


def test_an_infinity_behind_odd_channels_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(more_channels, "LARGE", 1)
    g = Net()
    x = torch.randn(1, 18, 8, 8).to(BF16).to(memory_format=torch.channels_last)
    x[0, 3, 1, 1] = torch.inf
    made = g.conv(g.relu(g.conv(g.input(x), 18, 18)), 18, 18)
    fragment = lowered(g, [made], device=SIMULATED)
    (ours,), (eager,) = g.run(fragment, [made]), g.expected([made])
    assert torch.equal(ours.isfinite(), eager.isfinite()) and torch.equal(ours.isnan(), eager.isnan())


def test_convolution_norm_and_relu_are_one_call() -> None:
    g = Net()
    y = g.relu(g.norm(g.conv(g.images(2, 8, 7, 7), 8, 16), 16))
    fragment = lowered(g, [y])
    assert targets(fragment) == ["aten::cudnn_convolution_relu"]
    assert text(fragment, prepare=False) == [
        "aten::cudnn_convolution_relu('_', '_', '_', (1, 1), (1, 1), (1, 1), 1)",
    ]
    assert text(fragment, prepare=True)[-2:] == ["aten::clone('_',)", "aten::_to_copy('_',)"], "weight and shift, folded"
    assert set(fragment.notes.values()) >= {"convolution, channels-last + batch_norm + relu"}
    assert "aten::relu" in targets(check(g, [y]))


def test_an_addition_rides_along_and_a_shortcut_gives_its_shift() -> None:
    g = Net()
    y = block(g, g.tensor(2, 8, 7, 7))
    assert text(lowered(g, [y]), prepare=False) == [
        "aten::cudnn_convolution_add_relu('_', '_', '_', 1.0, '_', (1, 1), (1, 1), (1, 1), 1)",
    ]
    check(g, [y])
    g = Net()
    y = block(g, g.tensor(2, 8, 7, 7), shortcut=True)
    assert text(lowered(g, [y]), prepare=False) == [
        "aten::convolution('_', '_', None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)",
        "aten::cudnn_convolution_add_relu('_', '_', '_', 1.0, '_', (1, 1), (1, 1), (1, 1), 1)",
    ]
    check(g, [y])


def test_a_shortcut_that_is_read_elsewhere_keeps_its_norm() -> None:
    g = Net()
    x = g.images(2, 8, 7, 7)
    side = g.norm(g.conv(x, 8, 8, 1), 8)
    y = g.relu(g.op("add", g.norm(g.conv(x, 8, 8), 8), side))
    z = g.op("neg", side)
    names = [n for n in targets(lowered(g, [y, z])) if "conv" in n or "kernel" in n]
    assert names == ["aten::convolution", "kernel addcmul_neg", "aten::cudnn_convolution_add_relu"]
    check(g, [y, z])


@pytest.mark.parametrize("groups", [1, 8])
def test_without_a_relu_or_with_groups_the_norm_is_a_kernel(groups: int) -> None:
    g = Net()
    y = g.norm(g.conv(g.images(2, 8, 7, 7), 8, 8, groups=groups), 8)
    y = g.relu(y) if groups > 1 else y
    fragment = lowered(g, [y])
    (launch,) = [i for i in fragment.instructions if isinstance(i, Launch)]
    assert "aten::convolution" in targets(fragment) and len(launch.inputs) == 3, "the result, factors and summands"
    check(g, [y])


@pytest.mark.parametrize("cls", [NvidiaTriton, RocmTriton])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_what_depends_on_the_weights_of_a_norm_is_computed_once(dtype: torch.dtype, cls: type[TritonBackend]) -> None:
    """In fp32 the mean is subtracted first, as eager does: inputs far from zero keep their digits."""
    g = Net(dtype)
    y = g.op("silu", g.norm(g.tensor(2, 8, 7, 7), 8))
    fragment = lowered(g, [y], cls=cls, device=REAL if cls is NvidiaTriton else Device("cpu", "gfx942"))
    (launch,) = [i for i in fragment.instructions if isinstance(i, Launch)]
    assert len(launch.inputs) == (3 if dtype is BF16 else 4)
    assert not any(n.op == "rsqrt" for n in fragment.kernels[launch.kernel].nodes())  # type: ignore[attr-defined]
    check(g, [y])


def test_images_stay_channels_last_between_convolutions() -> None:
    g = Net()
    y = g.relu(g.conv(g.relu(g.conv(g.tensor(2, 8, 7, 7), 8, 8, bias=True)), 8, 8, bias=True))
    relu = "aten::cudnn_convolution_relu"
    found = targets(lowered(g, [y]))
    assert found == ["kernel clone", relu, relu, "kernel clone"], "the last gives the result eager's strides"
    check(g, [y])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_patches_are_rows_of_a_matrix(layout: torch.memory_format) -> None:
    g = Net()
    x = g.input(torch.randn(1, 3, 224, 224).to(BF16).to(memory_format=layout))  # large enough for eager's copies on a CPU
    y = g.conv(x, 3, 8, 16, bias=True, stride=(16, 16), padding=(0, 0))
    names = targets(check(g, [y]))
    at = names.index("kernel clone")
    assert names[at : at + 5] == ["kernel clone", "aten::view", "aten::linear", "aten::view", "aten::permute"], "a kernel cuts it"


@pytest.mark.parametrize(
    ("why", "more"), [("a gap at the border", {"stride": (5, 5)}), ("overlap", {"stride": (4, 4)})]
)
def test_windows_that_are_no_patches_stay_convolutions(why: str, more: dict[str, Any]) -> None:
    g = Net()
    k = 5 if why.startswith("a gap") else 8
    y = g.conv(g.tensor(2, 8, 16, 16), 8, 8, k, padding=(0, 0), **more)
    assert "aten::convolution" in targets(lowered(g, [y])), why


def test_only_cudnn_gets_channels_last() -> None:
    g = Net()
    y = g.relu(g.conv(g.tensor(2, 8, 7, 7), 8, 8))
    assert targets(lowered(g, [y], cls=RocmTriton, device=Device("cpu", "gfx942"))) == ["aten::convolution", "kernel relu"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2, 8, 7), "neither 2-d nor 3-d"), ((0, 8, 7, 7), "empty or symbolic"), ((0, 8, 7, 7, 7), "empty or symbolic"),
    ],
)  # fmt: skip
def test_what_stays_torchs_own_convolution(shape: tuple[int, ...], reason: str) -> None:
    g = Net()
    spatial = len(shape) - 2
    ones, zeros = (1,) * spatial, (0,) * spatial
    g.op("conv", g.tensor(*shape), g.weight(8, 8, *(3,) * spatial), None, ones, ones, ones, False, zeros, 1)
    found = convolutions.reason(g.ops[-1])
    assert found is not None and reason in found


@pytest.mark.parametrize("phase", ["infer", "forward"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("cls", [NvidiaTriton, RocmTriton])
def test_a_kernel_behind_a_convolution_adds_its_bias(phase: Phase, dtype: torch.dtype, cls: type[TritonBackend]) -> None:
    """Torch would add it in a pass of its own."""
    device = REAL if cls is NvidiaTriton else Device("cpu", "gfx942")
    for transposed in (False, True):
        g = Net(dtype)
        g.phase = phase
        ones = (1, 1)
        x = g.op("conv", g.tensor(2, 8, 7, 7), g.weight(8, 8, 3, 3), g.weight(8), ones, ones, ones, transposed, (0, 0), 1)
        y = g.op("gelu", g.op("permute", x, (0, 2, 3, 1)))
        fragment = lowered(g, [y], device=device, cls=cls)
        (call,) = [c for c in text(fragment, prepare=False) if "convolution" in c]
        launch = [i for i in fragment.instructions if isinstance(i, Launch)][-1]
        assert "None" in call and len(launch.inputs) == 2, "the convolution's result and the bias"
        check(g, [y])


def test_images_are_copied_once_for_all_convolutions_that_read_them() -> None:
    """By a kernel, which the copy may share with what makes the image; torch copies in front of each call."""
    g = Net()
    x = g.op("silu", g.tensor(2, 8, 7, 7))
    y, z = g.conv(x, 8, 8), g.conv(x, 8, 8, 1)
    fragment = lowered(g, [y, z])
    assert targets(fragment)[0].startswith("kernel") and targets(fragment).count("aten::convolution") == 2
    assert sum(isinstance(i, Launch) for i in fragment.instructions) == 3, "one for the images, two for the strides of results"
    check(g, [y, z])


def test_a_group_norm_keeps_images_channels_last() -> None:
    """On GPUs eager copies images to planes in front of it; what adds the norm to them would read one of both across memory."""
    g = Net()
    x = g.images(2, 8, 7, 7)
    planes = g.op("clone", x, memory_format=torch.contiguous_format)
    y = g.op("group_norm", planes, g.weight(8), g.weight(8), 2, 8, 49, 1, 1e-5)
    z = g.op("add", x, g.op("avg_pool2d", y, (3, 3), (1, 1), (1, 1), False, False, None))
    fragment = lowered(g, [z])
    kernels = [fragment.kernels[i.kernel] for i in fragment.instructions if isinstance(i, Launch)]
    assert len(kernels) == 2
    for kernel in kernels:
        accesses = [n.index for n in kernel.nodes() if n.op in ("load", "store")]  # type: ignore[attr-defined]
        inner = len(kernel.sizes) - 1  # type: ignore[attr-defined]
        assert {i.stride_of(inner) for i in accesses} == {1}, "neighbours in memory are neighbours in the loop"
    check(g, [z])


def test_the_gradient_of_a_group_norm_keeps_images_channels_last() -> None:
    g = Net(F32)
    g.phase = "backward"
    x, grad = g.images(2, 8, 7, 7), g.images(2, 8, 7, 7)
    planes, grads = (g.op("clone", v, memory_format=torch.contiguous_format) for v in (x, grad))
    mean, rstd = g.input(torch.randn(2, 2)), g.input(torch.rand(2, 2))
    dx = g.op("group_norm_backward", grads, planes, mean, rstd, g.weight(8), 2, 8, 49, 2, (True, True, True))
    weights = g.ops[-1].outs[1:]
    outs = [g.op("clone", dx, memory_format=torch.channels_last), *weights]
    fragment = lowered(g, outs)
    kernels = [fragment.kernels[i.kernel] for i in fragment.instructions if isinstance(i, Launch)]
    assert len(kernels) == 2, "of the image, and of the weights"
    for kernel in kernels:
        accesses = [n.index for n in kernel.nodes() if n.op in ("load", "store")]  # type: ignore[attr-defined]
        inner = len(kernel.sizes) - 1  # type: ignore[attr-defined]
        assert {i.stride_of(inner) for i in accesses} <= {0, 1, 8}, "pixels are 8 channels apart, as no planes are"
    check(g, outs)


def test_the_gradient_of_a_bias_is_a_kernel() -> None:
    g = Net()
    g.phase = "backward"
    grad, x, w = g.tensor(2, 8, 7, 7), g.tensor(2, 8, 7, 7), g.tensor(8, 8, 3, 3)
    ones = (1, 1)
    g.op("conv_backward", grad, x, w, (8,), ones, ones, ones, False, (0, 0), 1, (True, True, True))
    outs = list(g.ops[-1].outs)
    fragment = lowered(g, outs)
    assert any("(True, True, False)" in c for c in text(fragment)) and any(n.startswith("kernel sum") for n in targets(fragment))
    check(g, outs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("planes", [True, False])
def test_patches_in_training_are_products(planes: bool, bias: bool) -> None:
    """Forward, and the gradients of weight and bias."""
    g = Net()
    g.phase = "forward"
    x = (g.tensor if planes else g.images)(2, 4, 8, 12)
    w, b = (g.input(torch.randn(s).to(BF16)) for s in ((6, 4, 4, 2), (6,)))
    y = g.op("conv", x, w, b if bias else None, (4, 2), (0, 0), (1, 1), False, (0, 0), 1)
    assert not [t for t in targets(check(g, [y])) if "conv" in t]
    g = Net()
    g.phase = "backward"
    grad, x = g.tensor(2, 6, 2, 6), (g.tensor if planes else g.images)(2, 4, 8, 12)
    g.op("conv_backward", grad, x, g.tensor(6, 4, 4, 2), (6,), (4, 2), (0, 0), (1, 1), False, (0, 0), 1, (False, True, bias))
    fragment = check(g, list(g.ops[-1].outs[1 : 2 + bias]))
    assert "aten::mm" in targets(fragment) and not [t for t in targets(fragment) if "conv" in t]


@pytest.mark.parametrize(("mask", "stride"), [
    ((True, True, True), (4, 2)),
    ((False, True, False), (2, 2)),
    ((False, False, True), (4, 2)),
])  # fmt: skip
def test_other_gradients_stay(mask: tuple[bool, ...], stride: tuple[int, int]) -> None:
    g = Net()
    g.phase = "backward"
    sizes = [(n - k) // s + 1 for n, k, s in zip((8, 12), (4, 2), stride, strict=True)]
    w = g.tensor(6, 4, 4, 2)
    g.op("conv_backward", g.tensor(2, 6, *sizes), g.tensor(2, 4, 8, 12), w, (6,), stride, (0, 0), (1, 1), False, (0, 0), 1, mask)
    fragment = lowered(g, [o for o, wanted in zip(g.ops[-1].outs, mask, strict=True) if wanted])
    assert "aten::mm" not in targets(fragment)


def test_other_convolutions_keep_their_bias() -> None:
    """Nothing is gained in front of a library's call, where a depthwise kernel adds it, or where a row of cuDNN's does."""
    g = Net(F32)
    between = g.conv(g.conv(g.tensor(2, 8, 7, 7), 8, 8, bias=True), 8, 8)
    depthwise = g.relu(g.conv(g.tensor(2, 8, 7, 7), 8, 8, bias=True, groups=8))
    calls = [c for c in text(lowered(g, [between, depthwise])) if "convolution" in c]
    assert ["None" in c for c in calls] == [False, True, False]


def test_a_depthwise_convolution_in_half_precision_leaves_its_bias_to_a_kernel() -> None:
    """Of channels-last images it is a library's, behind which torch adds the bias in a pass of its own."""
    g = Net()
    g.phase = "forward"
    w, b = (g.input(torch.randn(s).to(BF16)) for s in ((8, 1, 3, 3), (8,)))
    y = g.op("conv", g.images(2, 8, 7, 7), w, b, (1, 1), (1, 1), (1, 1), False, (0, 0), 8)
    (call,) = [c for c in text(check(g, [g.relu(y)])) if "convolution" in c]
    assert "None" in call


# ---------------------------------------------------------------- calls in a region


def drawn() -> tuple[Net, Value]:
    g = Net(F32)
    x = g.tensor(4, 8)
    return g, g.op("neg", g.op("exp", g.relu(x)))


def test_a_call_is_written_where_its_last_op_was() -> None:
    g, y = drawn()
    table: LoweringTable[OpCode] = LoweringTable()
    order: list[str] = []

    @table.add("relu")
    def with_exp(op: OpView, c: Calls) -> Claim:
        then = c.graph.only_user(op.out)
        assert then is not None and c.graph.producer(then.out) is then and c.graph.producer(op.arg("self")) is None

        def write(calls: Calls) -> None:
            order.append(f"call at {then.op}")
            calls.b.call("aten::exp.default", calls.b.exact(op.arg("self")), out=then.out, op=then)

        return Claim((op, then), then, write, "relu and exp")

    @table.add("neg")
    def nothing(op: OpView, c: Calls) -> None:
        order.append("neg is asked")

    b = rewritten(table, g.region([y]), Context({}, REAL))
    assert order == ["neg is asked", "call at exp"], "first everything is found, then it is written"
    assert b.notes == dict.fromkeys((op.id for op in g.ops[:2]), "relu and exp")
    neg = next(op for op in b.finish().ops if op.op == "neg")
    assert [c.instructions[0].target for c in b.calls] == ["aten::exp.default"]  # type: ignore[union-attr]
    assert not any(neg.id in c.ops for c in b.calls), "it is left to kernels"


def test_what_a_call_took_is_asked_no_more() -> None:
    g, y = drawn()
    table: LoweringTable[OpCode] = LoweringTable()

    @table.add("relu")
    def with_exp(op: OpView, c: Calls) -> Claim:
        then = c.graph.only_user(op.out)
        assert then is not None
        return Claim((op, then), then, lambda calls: calls.b.call("aten::exp.default", out=then.out, op=then), "both")

    @table.add("exp")
    def exp(op: OpView, c: Calls) -> Claim:
        pytest.fail("relu's call has taken it")

    rewritten(table, g.region([y]), Context({}, REAL))


def claiming(*claims: Sequence[int], also: Sequence[int] = ()) -> tuple[LoweringTable[OpCode], list[tuple[int, ...]]]:
    """Return a table in which the k-th relu of a graph claims the ops at `claims[k]`, and the list of claims whose calls were
    emitted. The first claim needs another call, of the ops at `also`."""
    table: LoweringTable[OpCode] = LoweringTable()
    written: list[tuple[int, ...]] = []
    waiting = list(claims)

    def found(places: Sequence[int], c: Calls, also: tuple[Claim, ...] = ()) -> Claim:
        ops = tuple(list(c.graph)[k] for k in places)
        return Claim(ops, ops[-1], lambda c: written.append(tuple(places)), "a call", also)

    @table.add("relu")
    def claim(op: OpView, c: Calls) -> Claim:
        first = len(waiting) == len(claims)
        return found(waiting.pop(0), c, (found(also, c),) if also and first else ())

    return table, written


def two_branches() -> tuple[Net, Value]:
    """Draw relu(x), relu(y), their sum and its exp: ops 0 to 3."""
    g = Net(F32)
    return g, g.op("exp", g.op("add", g.relu(g.tensor(4, 8)), g.relu(g.tensor(4, 8))))


@pytest.mark.parametrize(
    ("claims", "also", "kept"),
    [
        (([0, 2], [1, 2]), (), [(0, 2)]),  # both claim the sum
        (([0, 2], [1, 3]), (), [(0, 2), (1, 3)]),
        (([0], [1, 0]), (), [(0,)]),  # the second claims the relu of the first
        (([0, 2, 3], [1, 3]), (), [(0, 2, 3)]),
        (([0, 3], [1, 2]), (2,), [(2,), (0, 3)]),  # a call that the first claim needs has claimed the sum
        (([0, 2], [1]), (2,), [(1,)]),  # a claim that overlaps itself
    ],
)
def test_a_claim_that_overlaps_another_is_refused(
    claims: Sequence[Sequence[int]], also: Sequence[int], kept: Sequence[tuple[int, ...]]
) -> None:
    """The first claim stands; all ops that only the second claimed are left to kernels and eager's calls."""
    g, y = two_branches()
    table, written = claiming(*claims, also=also)
    b = rewritten(table, g.region([y]), Context({}, REAL))
    assert written == kept
    taken = [i for c in b.calls for i in c.ops]
    assert sorted(taken) == sorted(g.ops[k].id for places in kept for k in places)


def test_the_fuser_takes_no_two_calls_of_one_op() -> None:
    """Whichever backend made them, and however."""
    g, y = two_branches()
    calls = [LibraryCall((g.ops[k].id, g.ops[2].id), ()) for k in (0, 1)]
    with pytest.raises(ValueError, match="two library calls compute the same ops"):
        fuse(g.region([y]), Context({}, REAL), calls)


# ---------------------------------------------------------------- products


def linears(g: Net, x: Value, widths: Sequence[int], bias: bool = True) -> list[Value]:
    k = g.tensors[x.id].shape[-1]
    return [g.op("linear", x, g.weight(n, k), g.weight(n) if bias else None) for n in widths]


@pytest.mark.parametrize("bias", [True, False])
def test_products_of_one_tensor_are_one_and_its_slices(bias: bool) -> None:
    g = Net()
    ys = linears(g, g.tensor(2, 8, 16), (32, 16, 16), bias)
    assert text(lowered(g, ys, "together"))[bias + 1 :] == [
        f"aten::linear('_', '_', {chr(39) + '_' + chr(39) if bias else None})",
        "aten::slice.Tensor('_', 2, 0, 32)", "aten::slice.Tensor('_', 2, 32, 48)", "aten::slice.Tensor('_', 2, 48, 64)",
    ]  # fmt: skip
    assert text(lowered(g, ys, "together"), prepare=True)[0] == "aten::cat(('_', '_', '_'), 0)"
    check(g, ys)


def test_they_stay_apart_where_that_is_faster_or_the_copy_is_large(thresholds: Callable[..., None]) -> None:
    g = Net()
    ys = linears(g, g.tensor(2, 8, 16), (32, 16))
    assert targets(lowered(g, ys, "separate")) == ["aten::linear", "aten::linear"]
    thresholds(sibling_weights=16 * 47)
    assert targets(lowered(g, ys, "together")) == ["aten::linear", "aten::linear"]


def test_products_of_two_tensors_stay_apart() -> None:
    g = Net()
    ys = linears(g, g.tensor(2, 8, 16), (32,)) + linears(g, g.tensor(2, 8, 16), (32,))
    assert targets(lowered(g, ys, "together")) == ["aten::linear", "aten::linear"]


def test_a_width_that_suits_no_fast_kernel_is_padded(thresholds: Callable[..., None]) -> None:
    thresholds(padded_results=16 * 30)
    g = Net()
    y = linears(g, g.tensor(2, 8, 16), (30,))[0]
    fragment = lowered(g, [y])
    assert text(fragment, prepare=True) == [
        "aten::constant_pad_nd('_', (0, 0, 0, 2), 0)", "aten::constant_pad_nd('_', (0, 2), 0)",
    ]  # fmt: skip
    assert text(fragment, prepare=False) == ["aten::linear('_', '_', '_')", "aten::slice.Tensor('_', 2, 0, 30)"]
    check(g, [y])
    thresholds(padded_results=16 * 30 + 1)
    assert targets(lowered(g, [y])) == ["aten::linear"], "a small result is not worth the copy"


def test_training_pads_at_every_call(thresholds: Callable[..., None]) -> None:
    thresholds(padded_results=16 * 30, unaligned_flops=(1.0, 1.0))
    g = Net()
    g.phase = "forward"
    x, w = g.tensor(2, 8, 16), g.tensor(30, 16)
    fragment = lowered(g, [g.op("linear", x, w, None)])
    assert text(fragment, prepare=True) == []
    assert targets(fragment)[:2] == ["kernel constant_pad_nd", "aten::linear"]


def test_a_slice_of_one_product_is_read_by_what_copies_it() -> None:
    """Whisper's heads: `transpose(1, 2).contiguous()` after the product. A kernel reads the slice in place."""
    g = Net()
    heads = [g.op("transpose", g.op("view", y, [2, 8, 2, 8]), 1, 2) for y in linears(g, g.tensor(2, 8, 16), (16, 16))]
    made = [g.op("clone", h, memory_format=torch.contiguous_format) for h in heads]
    assert "aten::copy_" not in targets(lowered(g, made, "together"))
    check(g, made, "together")


def test_products_of_a_gradient_share_a_copy_with_zeros_behind_its_rows(thresholds: Callable[..., None]) -> None:
    """The gradient of the LM head, [rows, 30], and its transpose. Sizes are padded as well as strides: cuBLAS considers both."""
    thresholds(unaligned_flops=(1.0, 1.0))
    g = Net()
    g.phase = "backward"
    grad, w, x = g.tensor(16, 30), g.tensor(30, 8), g.tensor(16, 8)
    first = g.op("mm", grad, w)
    second = g.op("mm", g.op("t", grad), x)
    fragment = lowered(g, [first, second])
    assert [t for t in text(fragment) if "t(" not in t] == [
        "aten::mm('_', '_')", "aten::mm('_', '_')", "aten::slice.Tensor('_', -2, 0, 30)"
    ]  # fmt: skip
    assert len([i for i in fragment.instructions if isinstance(i, Launch)]) == 2, "of the gradient, once, and of the weight"
    check(g, [first, second])


@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)))
def test_a_product_of_sizes_that_suit_no_fast_kernel_is_padded_all_round(
    turned: tuple[bool, bool], thresholds: Callable[..., None]
) -> None:
    thresholds(unaligned_flops=(1.0, 1.0))
    g = Net()
    g.phase = "backward"
    shapes = zip(((27, 35), (35, 29)), turned, strict=True)
    check(g, [g.op("mm", *(g.op("t", g.tensor(*shape[::-1])) if turn else g.tensor(*shape) for shape, turn in shapes))])


def gradient(g: Net) -> Value:
    return g.op("mm", g.tensor(16, 30), g.tensor(30, 8))


def turned_product(g: Net) -> Value:
    return g.op("mm", g.op("clone", g.op("t", g.tensor(16, 30)), torch.preserve_format), g.tensor(16, 8))


def turned_stream(g: Net) -> Value:
    stream = g.op("add", g.op("transpose", g.tensor(2, 8, 6), 1, 2), g.tensor(6, 8))
    return g.op("layer_norm", stream, (8,), g.weight(8), g.weight(8), 1e-5)


@pytest.mark.parametrize("graph", [gradient, turned_product, turned_stream, block])
def test_what_a_row_adds_lies_where_the_tensors_are(
    graph: Callable[..., Value], thresholds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary on the wrong device goes unnoticed on a CPU; on a GPU the call that reads it raises."""
    thresholds(padded_results=1, unaligned_flops=(1.0, 1.0))
    on_cpu = fragments.spec_of
    monkeypatch.setattr(fragments, "spec_of", lambda t, const=False: replace(on_cpu(t, const), device="cuda"))
    g = Net()
    g.phase = "infer" if graph in (block, turned_stream) else "backward"
    y = graph(g, *((g.tensor(2, 8, 7, 7),) if graph is block else ()))
    lowered(g, [y], device=replace(REAL, type="cuda"))
    assert {s.device for s in g.temporaries.values()} <= {"cuda"}
    assert g.temporaries or graph is block
