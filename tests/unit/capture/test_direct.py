"""The direct capture: what it rejects before it runs anything, and that a rejection leaves nothing behind."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

from fusewright import _torch_compat as compat
from fusewright import report
from fusewright.capture import direct
from tests.compare import differences

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

def modes() -> tuple[Any, ...]:
    """Every mode of this thread that affects ops."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_fwd_grad_enabled(),
        torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level,
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), len(_get_current_dispatch_mode_stack()),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def written(a: Tensor) -> Tensor:
    """Write through a view, which the direct capture rejects."""
    b = a * 2
    b[0:1].add_(1)
    return b


def autocast_then_write(x: Tensor) -> Any:
    before = x @ x.t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = x @ x.t()
        x.add_(1)
    return before, inside, x @ x.t()


def autocast_twice(x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            b = written(x @ x.t())
        c = x @ x.t()
    return a, b, c, x @ x.t()


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = written(x)
    return y + x


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: vmap(written)(x),
    "vmap of softmax": lambda x: vmap(lambda a: a.softmax(0), in_dims=1, out_dims=1)(x),
    "vmap of grad": lambda x: vmap(grad(lambda a: (written(a) * a).sum()))(x),
    "vmap of random": lambda x: vmap(lambda a: torch.rand(3) + a[:3], randomness="different")(x),
    "jvp": lambda x: jvp(torch.sin, (x,), (x,)),
    "jvp of a write": lambda x: jvp(written, (x,), (x,)),
    "vjp": lambda x: vjp(torch.sin, x)[1](x),
    "grad": lambda x: grad(lambda a: (a * a).sum())(x),
    "jacrev": lambda x: jacrev(lambda a: a.sin() * 2)(x[0]),
    "jacfwd": lambda x: jacfwd(lambda a: a.sin() * 2)(x[0]),
    "hessian": lambda x: hessian(lambda a: (a.sin() * a).sum())(x[0]),
    "autocast, then a write": autocast_then_write,
    "autocast in autocast": autocast_twice,
    "a write without gradients": without_grad,
}


def x34() -> Tensor:
    return torch.arange(12.0).view(3, 4) / 7


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_doubt_leaves_every_mode_as_it_was(name: str, backend: str) -> None:
    fn, before = FUNCTIONS[name], modes()
    with torch.no_grad():
        torch.manual_seed(0)
        wanted = tree_flatten(fn(x34()))[0]
        compiled = torch.compile(fn, backend=backend)
        for _ in range(2):
            torch.manual_seed(0)
            assert differences(wanted, tree_flatten(compiled(x34()))[0], exact=False) == []
        torch.manual_seed(0)
        assert differences(wanted, tree_flatten(fn(x34()))[0], exact=True) == []  # eager is unaffected
    assert modes() == before


def roads(fn: Callable[..., Any], *args: Tensor) -> list[str]:
    with torch.no_grad(), report.recording() as graphs:
        torch.compile(fn, backend="fusewright_null")(*args)
    return [g.capture for g in graphs]


def test_what_may_switch_a_mode_is_doubted_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    run_node = direct._Recorder.run_node
    monkeypatch.setattr(direct._Recorder, "run_node", lambda self, n: ran.append(n) or run_node(self, n))
    assert roads(lambda x: vmap(torch.sin)(x), x34()) == [
        "aot (the graph calls lazy_load_decompositions, which may switch a mode)"
    ]
    assert not ran


def test_indices_are_no_doubt() -> None:
    assert roads(lambda x, i: x[i] * 2, x34(), torch.tensor([0, 1])) == ["direct"]


def test_autocast_stays_on_the_direct_road() -> None:
    def fn(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.t()
        return y, x @ x.t()

    assert roads(fn, x34()) == ["direct"]


@pytest.mark.skipif(not compat.has_python_form(torch.ops.aten.one_hot.default), reason="this torch checks nothing there")
def test_one_hot_keeps_its_checks_on_the_direct_road(backend: str) -> None:
    compiled = torch.compile(lambda i: F.one_hot(i, 3) * 2, backend=backend)
    with torch.no_grad(), report.recording() as graphs:
        assert compiled(torch.tensor([0, 2])).tolist() == [[2, 0, 0], [0, 0, 2]]
        for bad in ([0, 3], [-1, 0]):
            with pytest.raises(RuntimeError, match="Class values must be"):
                compiled(torch.tensor(bad))
    assert [g.capture for g in graphs] == ["direct"]


ONE_PIECE: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda x: x.chunk(1, 0)[0] @ x.t(),
    "split": lambda x: x.split(3)[0].exp() * 2,
    "split with sizes": lambda x: x.split([3])[0].exp() * 2,
    "unbind": lambda x: x[:1].unbind(0)[0] + 1,
    "tensor_split": lambda x: x.tensor_split(1)[0] @ x.t(),
    "result": lambda x: x.chunk(1, 0),
    "of a result": lambda x: [p * 2 for p in (x + 1).chunk(1, 1)],
    "dsplit": lambda x: torch.dsplit(x[None], 1)[0].relu(),
}


@pytest.mark.parametrize("name", ONE_PIECE)
@pytest.mark.parametrize("mode", ["direct", "aot"])
def test_a_list_of_one_piece(name: str, mode: str, backend: str) -> None:
    fn = ONE_PIECE[name]
    compiled = torch.compile(fn, backend=backend)
    with torch.set_grad_enabled(mode == "aot"):
        x = x34().requires_grad_(mode == "aot")
        for _ in range(2):
            wanted, got = tree_flatten(fn(x))[0], tree_flatten(compiled(x))[0]
            assert differences(wanted, got, exact=False) == []


class Cells(torch.nn.Module):
    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell", "RNNCell"])
def test_a_loop_of_cells(kind: str, length: int, backend: str) -> None:
    torch.manual_seed(0)
    model = Cells(getattr(torch.nn, kind)(4, 5))
    x = torch.randn(2, length, 4)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))


def _gates(x: Tensor, show: str = "") -> Any:
    """Write pieces as `lstm_cell` does, and read them."""
    whole = x if show == "input" else x * 2
    a, b = whole.unsafe_chunk(2, 1)
    a.sigmoid_().add_(b)
    b.tanh_()
    if show == "whole":
        return a * b, whole + 1
    return (a, b) if show == "piece" else a * b - a


def test_pieces_that_count_as_tensors_are_written_on_the_direct_road() -> None:
    x = torch.randn(3, 8)
    aten, _ = direct.capture(*_dynamo(_gates, x))
    torch.testing.assert_close(aten(x.clone())[0], _gates(x))
    for n in aten.graph.find_nodes(op="call_function", target=operator.getitem):
        assert n.meta["val"].stride() == (8, 1), "the value before it was written keeps its layout"


@pytest.mark.parametrize("show", ["whole", "piece", "input"])
def test_written_pieces_that_others_see_are_doubted(show: str) -> None:
    with pytest.raises(direct.UnsupportedCapture, match="written"):
        direct.capture(*_dynamo(lambda x: _gates(x, show), torch.randn(3, 8)))


def _dynamo(fn: Any, *inputs: Tensor) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Dynamo's graph of a function."""
    found: list[torch.fx.GraphModule] = []
    torch.compile(fn, backend=lambda gm, _: found.append(gm) or gm.forward)(*(x.clone() for x in inputs))
    return found[0], list(inputs)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.pow_(-0.5), lambda x: x.pow_(torch.full_like(x, 1.5)), lambda x: x.double().float_power_(2.0),
        lambda x: x.ldexp_(torch.full_like(x, 2)), lambda x: x.floor_divide_(torch.full_like(x, 0.3)),
    ],
)  # fmt: skip
def test_a_write_whose_overload_has_another_name_out_of_place(write: Any) -> None:
    """`pow_.Scalar` is `pow.Tensor_Scalar`; `pow.Scalar` takes a number for a base."""
    torch._dynamo.reset()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return write(y) + 1

    x = torch.rand(5) + 0.5
    torch.testing.assert_close(torch.compile(fn, backend="fusewright_null", options={"fallback": "allow"})(x), fn(x))


@pytest.mark.parametrize("steps", [4, 8])
def test_views_of_a_tensor_that_is_filled_are_made_again_only_to_be_read(steps: int) -> None:
    """A loop that fills a tensor is recorded in a number of calls that grows as its steps do."""

    def fill(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        first = out[0]
        for t in range(steps):
            out[t] = x[t].sin()
        return out + first

    graphs: list[torch.fx.Graph] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        aten, _ = direct.capture(gm, inputs)
        graphs.append(aten.graph)
        return aten

    x = torch.randn(steps, 3)
    assert torch.equal(torch.compile(fill, backend=backend, dynamic=False)(x), fill(x))
    assert len(graphs[0].find_nodes(op="call_function", target=torch.ops.aten.select.int)) == 2 * steps + 2


@pytest.mark.parametrize(
    "write",
    [lambda x: F.relu(x, inplace=True), lambda x: F.leaky_relu(x, 0.1, True), lambda x: x.__imul__(2), lambda x: x.tanh_()],
)
def test_every_call_that_says_it_writes_is_recorded_before_gradients(write: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return write(x * 2) * x

    recorded: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        recorded.append(direct.forward(gm, inputs))
        return gm

    x, y = (torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.compile(step, backend=backend)(x.detach())
    recorded[0](x)[0].sum().backward()
    step(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize(
    "multiply", [operator.matmul, Tensor.matmul, lambda x, w: F.linear(x, w[0].T), lambda x, w: x @ w[0, :, 0]]
)
def test_products_are_recorded_before_gradients_without_fixing_their_sizes(multiply: Any) -> None:
    """C++ forms of torch 2.10 ask for sizes as numbers."""
    recorded: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        recorded.append(direct.forward(gm, inputs))
        return gm

    torch.compile(multiply, backend=backend, dynamic=True)(torch.randn(3, 5, 4, requires_grad=True), torch.randn(3, 4, 6))
    (output,) = recorded[0].graph.find_nodes(op="output")
    assert all(isinstance(compat.settled_size(size), torch.SymInt) for size in output.args[0][0].meta["val"].shape)
