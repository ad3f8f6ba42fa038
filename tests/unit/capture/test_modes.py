"""Both capture modes reproduce eager: values, types, strides, aliasing, changed inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from fusewright import report
from tests.compare import against_eager

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

def r(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """A function and its inputs. `mode`: the capture mode that the report must name; "" if it does not matter."""

    def __init__(self, fn: Callable[..., Any], *makers: Callable[[], Any], mode: str = "") -> None:
        self.fn, self.makers, self.capture = fn, makers, mode

    def make(self) -> list[Any]:
        return [m() for m in self.makers]


def x34() -> Tensor:
    return r(3, 4)


def image() -> Tensor:
    return r(2, 3, 8, 8)


def _autocast_inside(x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return y, y.float() + 1


def _autocast_then_write(x: Tensor, into: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        into.add_(1)
    return y


def _write_column(x: Tensor) -> Tensor:
    x[:, 0] = 1
    return x * 2


def _write_middle(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = 7
    return y.add_(1) + x


def _write_view_then_read(x: Tensor) -> Tensor:
    y = x + 1
    z = y.view(-1)
    z.mul_(3)
    return y


def _read_before_and_after(x: Tensor) -> tuple[Tensor, Tensor]:
    before = x + 1
    x.add_(1)
    return before, x + 1


def _copy_then_write(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    x.add_(1)
    return y * 1, x


def _set_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    with torch.inference_mode():
        z = x.sum()
    return y + z


def _branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x - 1


def _break(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


CASES: dict[str, Case] = {
    "view of an input": Case(lambda x: (x.view(-1)[2:], x + 1), x34, mode="direct"),
    "input as it is": Case(lambda x: (x, x + 1), x34),
    "input twice": Case(lambda x: (x, x * 2, x), x34),
    "one tensor twice": Case(lambda x: (lambda y: (y, y))(x + 1), x34),
    "views of one result": Case(lambda x: (lambda y: (y.view(-1), y.t(), y))(x + 1), x34),
    "pieces of an input": Case(lambda x: torch.split(x, 2, 1), x34),
    "pieces of a result": Case(lambda x: (x * 2).chunk(2), lambda: r(4, 4)),
    "expanded input": Case(lambda x: x[:1].expand(5, 4), x34),
    "view of a copy": Case(lambda x: x.clone().view(-1), x34),
    "view of x * 1": Case(lambda x: (x * 1).view(-1), x34),
    "view of two equal copies": Case(lambda x: (x.clone().view(-1), x.clone().view(-1)), x34),
    "two equal results": Case(lambda x: (x.exp(), x.exp()), x34),
    "detached": Case(lambda x: (x.detach(), (x + 1).detach()), x34),
    "same dtype cast": Case(lambda x: (x.to(torch.float32), x.float() + 1), x34),
    "copying cast": Case(lambda x: x.to(torch.float32, copy=True), x34),
    "contiguous already": Case(lambda x: (x.contiguous(), x.t().contiguous()), x34),
    "real view of complex": Case(lambda x: torch.view_as_real(torch.complex(x, x)), x34),
    "add in place to an input": Case(lambda x: x.add_(1) * 2, x34, mode="aot"),
    "write a column of an input": Case(_write_column, x34, mode="aot"),
    "write into a result": Case(_write_middle, x34),
    "write into a view, read the base": Case(_write_view_then_read, x34),
    "read, write, read": Case(_read_before_and_after, x34, mode="aot"),
    "copy before a write": Case(_copy_then_write, x34, mode="aot"),
    "autocast inside": Case(_autocast_inside, x34),
    "write inside autocast": Case(_autocast_then_write, x34, x34),
    "grad modes inside": Case(_set_grad, x34),
    "branch on data": Case(_branch, x34),
    "graph break": Case(_break, x34),
    "item": Case(lambda x: x * x.sum().item(), x34),
    "nonzero": Case(lambda x: x[x > 0].sum(), x34),
    "literal tensor": Case(lambda x: (x + torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 2])), x34),
    "constants out": Case(lambda x: (torch.ones(3), torch.arange(4), x + torch.arange(4)), x34),
    "python values out": Case(
        lambda x: {"a": x + 1, "n": x.shape[0], "s": "text", "none": None, "f": 0.5, "t": True}, x34
    ),
    "nested": Case(lambda x: {"a": [x + 1, (x - 1, {"b": x * 2})]}, x34),
    "no tensor out": Case(lambda x: x.shape, x34),
    "0-dim": Case(lambda x: (x.sum(), x * x.sum(), torch.tensor(2.0) + x), x34),
    "0-dim input": Case(lambda x, s: x * s, x34, lambda: torch.tensor(2.0, dtype=torch.float64)),
    "empty": Case(lambda x: (x[:0] * 2, x[:0].sum(0), torch.cat([x, x[:0]])), x34),
    "channels last in": Case(
        lambda x: (F.relu(x), x.mean((2, 3)), x + 1), lambda: image().to(memory_format=torch.channels_last)
    ),
    "pooled to a point": Case(  # torch changes the strides of such a result in place
        lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool1d(x[0].transpose(1, 2), 1).flatten(1)),
        lambda: image().to(memory_format=torch.channels_last),
        mode="direct",
    ),
    "channels last made": Case(lambda x: F.relu(x.to(memory_format=torch.channels_last)) * 2, image),
    "transposed in": Case(lambda x: (x * 2, x + x.contiguous(), x.sum(0)), lambda: r(5, 6).t()),
    "overlapping in": Case(lambda x: (x * 2, x.sum(0)), lambda: r(1, 6).expand(4, 6)),
    "strided in": Case(lambda x: (x * 2, x.softmax(-1)), lambda: r(8, 12)[::2, 1::3]),
    "negative zero": Case(
        lambda x: (x * 1, x * -0.0, 1 / F.pad(x, (1, 1), value=-0.0)), lambda: torch.tensor([0.0, -0.0, 1.0])
    ),
    "1, True and 1.0": Case(
        lambda x: (x + 1, x + True, x + 1.0, x * 1, x * True, x * 1.0), lambda: torch.arange(4)
    ),
    "integer and 0-dim float": Case(
        lambda x, s: (x + s, x * 2.5), lambda: torch.arange(4), lambda: torch.tensor(1.5)
    ),
    "half and 0-dim float": Case(lambda x, s: x + s, lambda: r(4).bfloat16(), lambda: torch.tensor(1.5)),
    "dropout": Case(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), x34),
    "random in order": Case(
        lambda x: (torch.rand(3), x + torch.randn(3, 4), torch.rand(3), torch.randint(0, 9, (5,))), x34
    ),
    "rand_like twice": Case(lambda x: torch.rand_like(x) - torch.rand_like(x), x34),
    "bernoulli": Case(lambda x: torch.bernoulli(x.sigmoid()) + torch.bernoulli(x.sigmoid()), x34),
    "sort": Case(lambda x: torch.sort(x, 1), x34),
    "unused input": Case(lambda x, y: x + 1, x34, x34),
    "dtype views": Case(lambda x: x.view(torch.int32) + 1, x34),
    "complex": Case(lambda x: torch.fft.fft(x).abs(), x34),
    "index put": Case(
        lambda x: x.index_put((torch.tensor([0, 0]),), torch.tensor(1.0), accumulate=True), x34
    ),
    "bool mask": Case(lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 0.0), x34),
}


@pytest.mark.parametrize("name", CASES)
def test_inference_is_as_in_eager(name: str, backend: str) -> None:
    case = CASES[name]
    with torch.no_grad():
        assert against_eager(case.fn, case.make, backend, exact=backend == "fusewright_null") == []


@pytest.mark.parametrize("name", CASES)
def test_grad_mode_is_as_in_eager(name: str) -> None:
    case = CASES[name]
    assert against_eager(case.fn, case.make, "fusewright_null", exact=True) == []


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.capture])
def test_takes_the_road_that_it_should(name: str) -> None:
    case = CASES[name]
    with torch.no_grad(), report.recording() as reports:
        torch.compile(case.fn, backend="fusewright_null")(*case.make())
    assert {g.capture.split(" ")[0] for g in reports} == {case.capture}


@pytest.mark.parametrize("name", ["autocast inside", "write inside autocast"])
def test_leaves_no_mode_behind(name: str) -> None:
    case = CASES[name]
    torch.compile(case.fn, backend="fusewright_null")(*case.make())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


@pytest.fixture
def ambient_autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@pytest.mark.usefixtures("ambient_autocast")
def test_ambient_autocast(backend: str) -> None:
    w = r(4, 4, seed=2)

    def fn(x: Tensor) -> Any:
        y = F.linear(x, w)
        return y, F.softmax(y, -1), y + x, F.layer_norm(y, (4,))

    with torch.no_grad():
        assert against_eager(fn, lambda: [x34()], backend, exact=backend == "fusewright_null") == []


@pytest.mark.usefixtures("ambient_autocast")
def test_ambient_autocast_takes_the_direct_road() -> None:
    """Autocast caches casts of weights: those that Dynamo's run made looked like tensors from outside the graph."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), x34()
    with torch.no_grad(), report.recording() as reports:
        got = torch.compile(model, backend="fusewright_null")(x)
        assert torch.equal(got, model(x))
    assert [g.capture for g in reports] == ["direct"]


def test_autocast_state_is_a_guard() -> None:
    compiled = torch.compile(lambda x: x @ x.t(), backend="fusewright_null")
    with torch.no_grad():
        assert compiled(x34()).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compiled(x34()).dtype == torch.bfloat16
        assert compiled(x34()).dtype == torch.float32


def test_inference_mode_inputs_and_weights(backend: str) -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4).eval()
        x = x34()
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(x), model(x))
        model.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
        assert compiled(x).is_inference()


def test_normal_tensors_under_inference_mode_then_without(backend: str) -> None:
    model = nn.Linear(4, 4).eval()
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x34()), model(x34()))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x34()), model(x34()))
    x = x34().requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None and model.weight.grad is not None


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.embed(i))


def test_tied_weights(backend: str) -> None:
    model = _Tied()
    compiled = torch.compile(model, backend=backend)
    i = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(compiled(i), model(i))
        model.embed.weight.mul_(-2)
        torch.testing.assert_close(compiled(i), model(i))
    compiled(i).sum().backward()
    ours = model.embed.weight.grad
    model.embed.weight.grad = None
    model(i).sum().backward()
    torch.testing.assert_close(ours, model.embed.weight.grad)


def test_batch_norm_training_updates_its_buffers(backend: str) -> None:
    def run(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
        fn = torch.compile(model, backend=backend) if compile_it else model
        with torch.no_grad():
            outs = [fn(image()) for _ in range(3)]
        return [*outs, *(b.clone() for b in model.buffers())]

    for w, g in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(g, w)


def test_tensor_subclass(backend: str) -> None:
    def make() -> Tensor:
        return TwoTensor(x34(), r(3, 4, seed=2))

    def fn(x: Tensor) -> Tensor:
        return torch.add(x, 1) * x

    with torch.no_grad(), report.recording() as reports:
        wanted, got = fn(make()), torch.compile(fn, backend=backend)(make())
    assert type(got) is TwoTensor
    torch.testing.assert_close([got.a, got.b], [wanted.a, wanted.b])
    assert [g.capture for g in reports] == ["aot (an input is of the subclass TwoTensor)"]


SIZES = (0, 1, 2, 3, 7, 8, 16, 17)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_other_sizes(backend: str, dynamic: bool | None) -> None:
    def fn(x: Tensor) -> Any:
        return x.softmax(-1) * x.shape[0], torch.cat([x, x + 1]).view(-1), x.sum()

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for n in SIZES:
            x = r(n, 5)
            for w, g in zip(fn(x), compiled(x), strict=True):
                torch.testing.assert_close(g, w)


def test_marked_dynamic_compiles_once() -> None:
    with torch.no_grad(), report.recording() as reports:
        compiled = torch.compile(lambda x: (x @ x.t()).relu() + x.shape[0], backend="fusewright_null")
        for n in (4, 9, 30):
            x = r(n, 5)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), (x @ x.t()).relu() + n, rtol=0, atol=0)
    assert len(reports) == 1


def test_strides_are_a_guard(backend: str) -> None:
    compiled = torch.compile(lambda x: (x * 2, x.reshape(-1) + 1), backend=backend)
    with torch.no_grad():
        for x in (r(4, 4), r(4, 4).t(), r(8, 8)[::2, ::2], r(1, 4).expand(4, 4)):
            for w, g in zip((x * 2, x.reshape(-1) + 1), compiled(x), strict=True):
                torch.testing.assert_close(g, w)
                assert g.stride() == w.stride()


@pytest.mark.parametrize(
    "fn",
    [lambda x: (x * 3)[0].detach(), lambda x: x[1:].detach(), lambda x: x.view(3, 2, 2) @ torch.ones(2, 2)],
)
def test_what_eager_detaches_is_no_view(fn: Callable[[Tensor], Tensor]) -> None:
    """A view can not be detached in place, as states between calls are."""
    with torch.no_grad():
        result = torch.compile(fn, backend="x86_onednn")(x34())
        assert result._base is None
        result.detach_()
