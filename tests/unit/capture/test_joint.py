"""The joint graph of forward and backward before it is partitioned."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from fusewright import _torch_compat as compat
from fusewright.capture.capture import through_aot
from fusewright.capture.joint import unread_seeds
from fusewright.graph.spec import value_of
from fusewright.interface import DevicePolicy

STEP = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.GELU())
torch.compile(model, backend="x86_onednn")(torch.randn(3, 4)).sum().backward()
print(*sys.modules)
"""


def traced(policy: DevicePolicy | None = None) -> tuple[dict[str, GraphModule], Callable[[GraphModule, Any], Any]]:
    """A backend that runs graphs as they are, and the graphs that it was given, by phase."""
    found: dict[str, GraphModule] = {}

    def keep(aten: GraphModule, phase: str, constants: Any, mode: str) -> Any:
        found[phase] = aten
        return lambda args: aten(*args)

    return found, lambda gm, inputs: through_aot(gm, inputs, keep, "test", policy)


def called(aten: GraphModule) -> list[str]:
    return [str(n.target) for n in aten.graph.nodes if n.op == "call_function"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_equal_calls_are_one_before_the_graph_is_cut() -> None:
    found, backend = traced()
    x = torch.randn(8, 8, requires_grad=True)
    y = torch.compile(lambda x: (x @ x).sin() + (x @ x).cos(), backend=backend)(x)
    y.sum().backward()
    assert called(found["forward"]).count("aten.mm.default") == 1


def test_a_step_does_not_import_inductors_lowerings() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert not {"torch._inductor.lowering", "torch._inductor.pattern_matcher"} & set(done.stdout.split())


@pytest.mark.usefixtures("fresh_dynamo")
def test_running_statistics_are_not_saved_for_a_gradient_that_reads_none() -> None:
    found, backend = traced()
    torch.manual_seed(0)
    ours = torch.nn.BatchNorm1d(4)
    theirs = copy.deepcopy(ours)
    x = torch.randn(8, 4)
    torch.compile(ours, backend=backend)(x).sin().sum().backward()
    theirs(x).sin().sum().backward()
    saved = found["backward"].graph.find_nodes(op="placeholder")
    assert len(saved) == 5  # the image, the weight, the batch's mean and deviation, the gradient
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "largest",
    [lambda a: a.amax(0), lambda a: torch.zeros(2).scatter_reduce(0, torch.tensor([0, 1, 1]), a, "amax")],
)
def test_what_the_gradient_of_a_maximum_compares_is_not_computed_again(largest: Any) -> None:
    """If it were rounded otherwise, no element would be the maximum, and the gradient of a segment's would divide by zero."""
    found, backend = traced()
    x = torch.rand(3, 4, requires_grad=True)
    torch.compile(lambda x: largest((x.sin() * x.cos()).mean(-1)), backend=backend)(x).sum().backward()
    assert "aten.mean.dim" in called(found["forward"]) and "aten.mean.dim" not in called(found["backward"])


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_constant_that_is_compared_is_not_saved() -> None:
    """As an input of the backward graph, a number of the host would leave the comparison to eager."""
    found, backend = traced()
    x = torch.rand(3, 4, requires_grad=True)
    torch.compile(lambda x: torch.min(x.sin(), torch.tensor(0.5)), backend=backend)(x).sum().backward()
    assert {tuple(value_of(n).shape) for n in found["backward"].graph.find_nodes(op="placeholder")} == {(3, 4)}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_seeds_of_an_attention_without_dropout_are_not_saved(dropout: float) -> None:
    """On a GPU eager makes them on the host. Swin's step was not replayed, and was compiled again for each kind of window."""
    mode, graph, rows = compat.fake_mode(), torch.fx.Graph(), (2, 3, 8, 4)

    def given(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.fx.Node:
        node = graph.placeholder(name)
        stride = torch.empty(shape, device="meta").stride()
        node.meta["val"] = compat.fake_tensor(mode, shape, stride, dtype, "cuda:0")
        return node

    grad, q, k, v, out = (given(n, rows) for n in ("grad", "q", "k", "v", "out"))
    sums, seeds = given("sums", (2, 3, 32)), [given(n, (), torch.int64) for n in ("seed", "offset")]
    target = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    node = graph.call_function(target, (grad, q, k, v, None, out, sums, *seeds, dropout, [True, True, True, False]))
    graph.output(node)
    unread_seeds(graph)
    if dropout:
        assert list(node.args[7:9]) == seeds
        return
    assert not any(s.users for s in seeds)
    zero = node.args[7]
    assert zero is node.args[8] and zero.target is torch.ops.aten.full.default
    made = value_of(zero)
    assert (made.dtype, made.shape, made.device) == (torch.int64, (), torch.device("cuda:0"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_scalars_of_the_host_are_not_saved(dynamic: bool) -> None:
    found: dict[str, list[Any]] = {}

    def keep(aten: GraphModule, phase: str, constants: Any, mode: str) -> Any:
        found[phase] = [n.meta["val"] for n in aten.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        return lambda args: aten(*args)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return through_aot(gm, inputs, keep, "test")

    def fn(x: torch.Tensor) -> torch.Tensor:
        scale = torch.sqrt(torch.tensor(64, dtype=torch.float) * 3)
        return (x / scale.to(dtype=x.dtype)).softmax(-1) / scale

    ours = torch.randn(6, 4).bfloat16().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    y = torch.compile(fn, backend=backend, dynamic=dynamic)(ours)
    wanted = fn(theirs)
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.equal(y, wanted) and torch.equal(ours.grad, theirs.grad)
    assert not [v for phase in ("forward", "backward") for v in found[phase] if v.dim() == 0]


class Clamped(torch.nn.Module):
    """A convolution of a clamped norm, in between padded or not."""

    def __init__(self, clamp: torch.nn.Module, pads: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.clamp, self.pads, self.conv = torch.nn.BatchNorm2d(4), clamp, pads, torch.nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.clamp(self.norm(x))
        return self.conv(F.pad(x, self.pads) if self.pads else x)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("pads", [(), (1, 1), (0, 2, 1, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("clamp", [torch.nn.ReLU6(), torch.nn.Hardtanh(), torch.nn.ReLU(), torch.nn.LeakyReLU(0.01)], ids=repr)
def test_an_activation_is_saved_once(clamp: torch.nn.Module, pads: tuple[int, ...]) -> None:
    """The norm's input and what the convolution reads; the clamp's gradient finds its mask in the latter."""
    images: list[torch.Size] = []

    def keep(aten: GraphModule, phase: str, constants: Any, mode: str) -> Any:
        saved = [n.meta["val"].shape for n in aten.graph.find_nodes(op="placeholder") if "tangents" not in n.name]
        images.extend(s for s in saved if phase == "backward" and s[2:] > (3, 3))
        return lambda args: aten(*args)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return through_aot(gm, inputs, keep, "test")

    torch.manual_seed(0)
    ours = Clamped(clamp, pads)
    theirs = copy.deepcopy(ours)
    x = torch.randn(2, 4, 9, 9) * 4
    torch.compile(ours, backend=backend)(x).sum().backward()
    theirs(x).sum().backward()
    left, right, top, bottom = (*pads, 0, 0, 0, 0)[:4]
    assert images == [x.shape, (2, 4, 9 + top + bottom, 9 + left + right)]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_bound_that_rounds_is_compared_with_the_input() -> None:
    """A clamp to 0.7 in bf16 gives 0.699, which is inside of the bound."""
    x = torch.randn(64, dtype=torch.bfloat16, requires_grad=True)

    def clamp(x: torch.Tensor) -> torch.Tensor:
        return F.hardtanh(x, -0.7, 0.7)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return through_aot(gm, inputs, lambda aten, *_: lambda args: aten(*args), "test")

    wanted, got = (torch.autograd.grad(f(x).sum(), x)[0] for f in (clamp, torch.compile(clamp, backend=backend)))
    assert torch.equal(wanted, got) and not wanted.all()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_leaky_relu_that_turns_signs_is_compared_with_the_input() -> None:
    x = torch.randn(64, requires_grad=True)

    def leaky(x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(x, -0.1)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return through_aot(gm, inputs, lambda aten, *_: lambda args: aten(*args), "test")

    wanted, got = (torch.autograd.grad(f(x).sum(), x)[0] for f in (leaky, torch.compile(leaky, backend=backend)))
    assert torch.equal(wanted, got) and (wanted < 0).any()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", ["group", "instance"])
def test_a_norm_saves_the_image_and_not_its_copy(kind: str) -> None:
    """Eager copies images to planes for a group norm on GPUs, here the copy is written out; for an instance norm everywhere."""
    found, backend = traced()
    image = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.rand(8, requires_grad=True)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if kind == "instance":
            return F.instance_norm(x.half().float(), weight=weight, bias=weight)
        return F.group_norm(x.half().float().contiguous(), 2, weight)

    results = [f(image, weight) for f in (norm, torch.compile(norm, backend=backend))]
    wanted, gradients = (torch.autograd.grad(r.sin().sum(), (image, weight)) for r in results)
    for a, b in zip((results[0], *wanted), (results[1], *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    saved = [value_of(n) for n in found["backward"].graph.find_nodes(op="placeholder")]
    images = [t for t in saved if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)]
    assert [t.dtype for t in images] == [torch.float16], "before it is widened, and as it lies"


def classified(
    x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, dtype: torch.dtype, early: bool
) -> torch.Tensor:
    """`early`: the logits are wide, as under autocast on some devices; else the log-softmax is."""
    logits = (x * 2).to(dtype)
    scores = logits.float().log_softmax(1) if early else logits.log_softmax(1).float()
    return F.nll_loss(scores, labels, weight=weight, ignore_index=3)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("dtype", "early"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_log_softmax_of_a_loss_is_not_saved(dtype: torch.dtype, early: bool, pixels: bool, weighted: bool) -> None:
    """The gradient computes it from the logits, as they were, and two numbers a row."""
    found, backend = traced()
    x = (50 * torch.randn(4, 600, *(2, 5)[: 2 * pixels])).requires_grad_()
    labels = torch.tensor([3, 5, 599, 0]).reshape(4, *[1] * (x.dim() - 2)).expand(4, *x.shape[2:])
    weight = torch.rand(600) if weighted else None
    loss = torch.compile(classified, backend=backend)(x, labels, weight, dtype, early)
    (grad,) = torch.autograd.grad(loss, x)
    large = [n for n in found["backward"].graph.find_nodes(op="placeholder") if value_of(n).numel() == x.numel()]
    assert [value_of(n).dtype for n in large] == [dtype]
    wanted = classified(x, labels, weight, dtype, early)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, x)[0])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("classes", [10, 600])
def test_a_log_softmax_that_is_returned_is_saved(classes: int) -> None:
    found, backend = traced()
    x = torch.randn(4, classes, requires_grad=True)

    def scored(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score = (x * 2).log_softmax(-1)
        return score, F.nll_loss(score, torch.arange(4))

    _, loss = torch.compile(scored, backend=backend)(x)
    loss.backward()
    assert "aten._log_softmax.default" in called(found["forward"])


def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The log probabilities of an even mixture."""
    return torch.logsumexp(torch.stack([x.log_softmax(-1), y.log_softmax(-1)]) - math.log(2), 0).exp().square().sum()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_stack_that_a_gradient_reduces_is_not_saved() -> None:
    """What it stacks is saved anyway."""
    found, backend = traced()
    x, y = (torch.randn(4, 20, requires_grad=True) for _ in range(2))
    grads = torch.autograd.grad(torch.compile(mixed, backend=backend)(x, y), [x, y])
    assert all(value_of(n).numel() <= x.numel() for n in found["backward"].graph.find_nodes(op="placeholder"))
    torch.testing.assert_close(grads, torch.autograd.grad(mixed(x, y), [x, y]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cat_that_a_product_reads_is_saved() -> None:
    found, backend = traced()
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(6, 2, requires_grad=True)
    torch.compile(lambda x, w: torch.cat([x, x.sin()], 1) @ w, backend=backend)(x, w).sum().backward()
    assert "aten.cat.default" not in called(found["backward"])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("follows", "apart"), [
    (lambda x: F.mish(x), True),
    (lambda x: F.group_norm(x, 2) + x, True),
    (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True), True),
    (lambda x: F.layer_norm(x, x.shape[-1:]), True),
    (lambda x: F.relu(x), False),
    (lambda x: F.max_pool2d(F.silu(x), 2) + F.max_pool2d(x, 2), False),
    (lambda x: (F.silu(x), x), False),
])  # fmt: skip
def test_a_convolution_is_saved_without_its_bias(follows: Callable[..., Any], apart: bool) -> None:
    """On a device that adds it in another pass, where kernels alone read the sum and one of them for a gradient."""
    found, backend = traced(DevicePolicy(adds_bias=True))
    module, image = torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)

    def step(run: Callable[..., Any]) -> list[torch.Tensor]:
        results = run(image)
        results = results if isinstance(results, tuple) else (results,)
        sum((r.square().sum() for r in results), torch.zeros(())).backward()
        return [*results, *(torch.clone(p.grad) for p in module.parameters() if p.grad is not None)]

    wanted = step(lambda x: follows(module(x)))
    module.zero_grad()
    got = step(torch.compile(lambda x: follows(module(x)), backend=backend))
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    (conv,) = found["forward"].graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    (output,) = found["forward"].graph.find_nodes(op="output")
    assert (conv.args[2] is None) == apart
    if apart:
        assert conv in output.args[0]


NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "layer": lambda: torch.nn.LayerNorm(6),
    "layer without weights": lambda: torch.nn.LayerNorm(6, elementwise_affine=False),
    "groups": lambda: torch.nn.GroupNorm(2, 8),
    "batch": lambda: torch.nn.BatchNorm2d(8),
}

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "written out": lambda y: y * y.sigmoid(),
    "scaled": lambda y: y * (1 + y.mean((2, 3), keepdim=True)),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_what_a_norm_returns_is_computed_again_from_its_statistics(norm: str, activation: str) -> None:
    torch.manual_seed(0)
    found, backend = traced()
    ours = NORMS[norm]()
    for p in ours.parameters():
        torch.nn.init.normal_(p)
    theirs, act = copy.deepcopy(ours), ACTIVATIONS[activation]
    x = torch.randn(4, 8, 5, 6)
    results = []
    for module, fn in ((ours, torch.compile(lambda x: act(ours(x)), backend=backend)), (theirs, lambda x: act(theirs(x)))):
        given = x.clone().requires_grad_()
        y = fn(given)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        results.append([given.grad, *(p.grad for p in module.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    large = [n for n in found["backward"].graph.find_nodes(op="placeholder") if value_of(n).numel() == x.numel()]
    assert len(large) == 2  # the operand and the gradient


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_a_norm_returns_is_saved_where_its_statistics_are_rounded() -> None:
    found, backend = traced()
    norm = torch.nn.LayerNorm(6, dtype=torch.bfloat16)
    x = torch.randn(4, 8, 6, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(lambda x: F.silu(norm(x)), backend=backend)(x).sum().backward()
    large = [n for n in found["backward"].graph.find_nodes(op="placeholder") if value_of(n).numel() == x.numel()]
    assert len(large) == 3
