"""Training loops follow eager's loss curve, in fp32 and under bf16 autocast, and leak nothing."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence

import pytest
import torch

from fusewright.bench import suite

BACKEND = "x86_onednn"
STEPS = 20

pytestmark = [pytest.mark.hardware(BACKEND), pytest.mark.usefixtures("fresh_dynamo")]


def losses(step: suite.TrainStep, steps: int = STEPS) -> list[float]:
    return [step().item() for _ in range(steps)]


def compiled(step: suite.TrainStep, **kwargs: object) -> suite.TrainStep:
    step.compiled = torch.compile(step.module, backend=BACKEND, **kwargs)
    return step


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("model", ["bert_small", "resnet18"])
@pytest.mark.parametrize("dtype", ["fp32", "amp"])
def test_the_loss_curve_is_eagers(model: str, dtype: str) -> None:
    eager = suite.train_step(model, size="small", dtype=dtype)
    exact = suite.train_step(model, size="small", dtype="fp32")
    exact.module.double()
    exact.batch = {k: v.double() if v.is_floating_point() else v for k, v in exact.batch.items()}
    ours = compiled(eager.fork())
    reference, theirs, mine = losses(exact), losses(eager), losses(ours)
    assert theirs[-1] < theirs[0], "the model must learn, or the curve shows nothing"
    floor = 1e-5 if dtype == "fp32" else 2e-3
    allowed = 2 * max(abs(a - b) for a, b in zip(theirs, reference, strict=True)) + floor
    assert max(abs(a - b) for a, b in zip(mine, reference, strict=True)) <= allowed


def test_steps_leave_no_tensors_behind() -> None:
    step = compiled(suite.train_step("bert_small", size="small"))
    losses(step, 3)
    before = live_tensors()
    losses(step, 10)
    assert live_tensors() <= before


def test_gradients_are_eagers_within_the_fp64_rule() -> None:
    eager = suite.train_step("bert_small", size="small")
    exact = suite.train_step("bert_small", size="small")
    exact.module.double()
    ours = compiled(eager.fork())
    for e, t, m in zip(exact.loss_and_grads(), eager.loss_and_grads(), ours.loss_and_grads(), strict=True):
        assert (m.double() - e).abs().max() <= 2 * (t.double() - e).abs().max() + 1e-6 * e.abs().max() + 1e-12


def test_retain_graph_and_two_backwards() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    twin = torch.compile(net, backend=BACKEND)
    x = torch.randn(5, 8)
    for f in (net, twin):
        net.zero_grad()
        loss = f(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        if f is net:
            wanted = grads
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_may_be_retained_after_others_were_not(dynamic: bool) -> None:
    """Torch refuses this where a backend is given what was saved; with symbolic sizes, from the first backward on."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4), torch.nn.Softmax(1))
    twin, x = torch.compile(net, backend=BACKEND, dynamic=dynamic), torch.randn(5, 8)
    for retained in (False, True):
        found = []
        for f in (net, twin):
            net.zero_grad()
            loss = f(x).square().mean()
            for _ in range(1 + retained):
                loss.backward(retain_graph=retained)
            found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_results_may_be_written_in_place() -> None:
    """As SpecAugment does between two graphs. A product over sequences is a view of a matrix in our plans, not in eager."""
    linear = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 16))
    rest = torch.nn.Parameter(torch.randn(16))

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(linear(x.transpose(1, 2)), 0.0)
        torch._dynamo.graph_break()
        y[mask] = rest
        return y * 2

    x, mask = torch.randn(2, 8, 6), torch.arange(12).view(2, 6) % 3 == 0
    given = (rest, *linear.parameters())
    wanted = torch.autograd.grad(f(x, mask).square().sum(), given)
    fast = torch.compile(f, backend="x86_onednn")
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(fast(x, mask).square().sum(), given), wanted)


@pytest.mark.parametrize("written", ["result", "argument", "weight"])
def test_what_a_gradient_reads_may_not_be_written(written: str) -> None:
    """Eager's error is better than gradients of other values. A result that no gradient reads may be written."""
    weight = torch.randn(8, 8, requires_grad=True)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ weight).exp()
        return y, y[:, 1:] * x[:, :7]

    fn = torch.compile(block, backend=BACKEND)
    for _ in range(3):
        x = torch.randn(8, 8, requires_grad=True).sin()
        y, z = fn(x)
        with torch.no_grad():
            z.mul_(2)
            {"result": y, "argument": x, "weight": weight}[written].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y.sum() + z.sum()).backward()


@pytest.mark.parametrize("pieces", [lambda x: x.chunk(2), lambda x: x.split(3), lambda x: x.unbind()])
def test_pieces_of_inputs_are_no_results_to_write(pieces: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
    """Eager fails, as the input's gradients would be wrong; the write was not noticed."""
    for run in (pieces, torch.compile(pieces, backend=BACKEND, options={"never_slower": False})):
        x = torch.ones(4, 4, requires_grad=True)
        out = run(x)[0]
        assert out._base is x
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            out.mul_(2)
        assert torch.equal(x, torch.ones(4, 4))


def test_sparse_gradients() -> None:
    table = torch.nn.Embedding(20, 4, sparse=True)
    compiled = torch.compile(lambda i: table(i).sum(1), backend=BACKEND)
    compiled(torch.tensor([[1, 2], [2, 3]])).square().sum().backward()
    ours, table.weight.grad = table.weight.grad, None
    table(torch.tensor([[1, 2], [2, 3]])).sum(1).square().sum().backward()
    assert ours is not None and table.weight.grad is not None and ours.is_sparse
    torch.testing.assert_close(ours.to_dense(), table.weight.grad.to_dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "norm", [lambda: torch.nn.BatchNorm2d(8), lambda: torch.nn.GroupNorm(2, 8), lambda: torch.nn.LayerNorm(64)],
    ids=["batch", "groups", "layer"],
)  # fmt: skip
def test_a_norms_statistics_are_of_the_rounded_numbers_that_its_gradient_reads(
    norm: Callable[..., torch.nn.Module], dtype: torch.dtype
) -> None:
    """A bias rounds all numbers of a binade alike, so that the unrounded sums have another mean."""
    torch.manual_seed(0)
    x, bias = (torch.rand(16, 8, 64, 64) * 2).to(dtype), (torch.randn(8, 1, 1) / 10).to(dtype)
    cotangent = torch.rand(x.shape).to(dtype)  # not around zero: in the weight's gradient nearly all cancels
    ours = norm()
    eager, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    step = torch.compile(lambda x, bias: ours(x + bias), backend=BACKEND)
    results = [step(x, bias), eager(x + bias), exact((x + bias).double())]
    modules = (ours, eager, exact)
    grads = [torch.autograd.grad(y, m.weight, cotangent.to(y.dtype))[0] for y, m in zip(results, modules, strict=True)]
    mine, theirs, right = (g.double() for g in grads)
    assert (mine - right).norm() <= 2 * (theirs - right).norm() + 1e-5 * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_of_a_step_round_half_numbers_where_eager_does(dtype: torch.dtype) -> None:
    """Forward and gradient may compute the same number, or one read what the other stored: they agree if both round it."""
    torch.manual_seed(0)
    inputs = torch.rand(64, 33).to(dtype), torch.rand(33).to(dtype)

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + y) * y - x) * (x * x + y)

    def run(f: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        given = [x.clone().requires_grad_() for x in inputs]
        out = f(*given)
        return [out.detach(), torch.autograd.grad(out, given[0], torch.ones_like(out))[0]]

    for ours, eagers in zip(run(torch.compile(chain, backend=BACKEND)), run(chain), strict=True):
        assert torch.equal(ours, eagers)
    exact = chain(*(x.double() for x in inputs))  # in inference fewer roundings are more exact
    mine, theirs = torch.compile(chain, backend=BACKEND)(*inputs), chain(*inputs)
    assert (mine - exact).norm() < (theirs - exact).norm()


def test_a_gradient_behind_a_norm_of_half_numbers_is_that_of_the_rounded_ones() -> None:
    """The gradient normalizes the stored sums by the statistics of the forward. Those of the unrounded sums are others."""
    torch.manual_seed(0)
    x, scale = torch.rand(8, 16, 32, 32).bfloat16(), torch.rand(16, 1, 1) + 0.5

    def normed(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + bias
        return torch.nn.functional.instance_norm(h * scale.to(torch.promote_types(x.dtype, scale.dtype))), h

    def grad(f: Callable[..., tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        bias = torch.linspace(-1, 1, 16).view(16, 1, 1).bfloat16().to(dtype).requires_grad_()
        y, _ = f(x.to(dtype), bias)
        return torch.autograd.grad(y, bias, torch.linspace(0, 1, y.numel()).view(y.shape).to(y.dtype))[0]

    mine, theirs = grad(torch.compile(normed, backend=BACKEND), x.dtype), grad(normed, x.dtype)
    right = grad(normed, torch.float64)  # nothing but what eps leaves: the norm takes any bias off again
    assert (mine - right).abs().max() <= 2 * (theirs - right).abs().max()
