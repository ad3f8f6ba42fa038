"""The package as torch loads it, on JAX. `fusewright conformance` checks what each op computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusewright import registry
from fusewright.interface import Unavailable

found = registry.info("xla_cpu").device if "xla_cpu" in registry.plugins() else Unavailable("it is not installed")
if isinstance(found, Unavailable):
    reason = f"xla_cpu: {found.reason}; pip install examples/xla_cpu and the extra `xla` (ci/xla_cpu.sh does)"
    pytest.skip(reason, allow_module_level=True)

STRICT: dict[str, Any] = {"strict": True, "fallback": "error"}


def compiled(fn: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(fn, backend="xla_cpu", dynamic=dynamic, options={**STRICT, **options})


def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.softmax(F.layer_norm(F.gelu(F.linear(x, w, b)), (16,)), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_block_is_one_program(dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(s).to(dtype) for s in ((4, 8), (16, 8), (16,)))
    torch.testing.assert_close(compiled(block)(x, w, b), block(x, w, b))


@pytest.mark.parametrize("name", "digamma lgamma rsqrt reciprocal expm1 log1p asinh atanh sigmoid".split())
def test_poles_and_limits_are_eagers(name: str) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, -1.0, 1.0, -2.5])
    fn = getattr(torch, name)
    torch.testing.assert_close(compiled(fn)(x), fn(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_power_of_two_is_as_exact_as_eagers_however_large(dtype: torch.dtype) -> None:
    x = torch.linspace(-120, 126, 997, dtype=dtype)
    exact = torch.exp2(x.double())
    assert ((compiled(torch.exp2)(x).double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("stable", [False, True])
def test_equal_elements_are_in_eagers_order(stable: bool, dtype: torch.dtype) -> None:
    x = torch.randint(0, 40, (20, 400)).to(dtype)
    torch.compiler.reset()
    ours = torch.compile(torch.sort, backend="xla_cpu")(x, dim=-1, stable=stable)
    assert all(map(torch.equal, ours, torch.sort(x, dim=-1, stable=stable)))


def test_lgamma_of_one_and_two_is_zero() -> None:
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(compiled(torch.lgamma)(x), torch.zeros(2))


def test_what_jax_refuses_raises_eagers_error() -> None:
    x, boundaries = torch.randn(4), torch.randn(2, 2)
    torch.compiler.reset()
    refused = torch.compile(torch.bucketize, backend="xla_cpu", options={"cache": False})
    with pytest.raises(RuntimeError, match="1 dimension"):
        refused(x, boundaries)


def test_an_inverse_of_erf_is_right_where_its_gradient_is_steep() -> None:
    x = torch.linspace(-0.999, 0.999, 997)
    exact = torch.special.erfinv(x.double())
    off = (compiled(torch.special.erfinv)(x).double() - exact).abs()
    assert (off <= torch.finfo(torch.float32).eps * exact.abs()).all()


@pytest.mark.parametrize("fn", [torch.mul, torch.div, lambda a, b: (b + a) * a, lambda a, b: (b > 1) * b])
def test_a_bool_is_no_selection(fn: Callable[..., Tensor]) -> None:
    """XLA turns a product with a bool into a selection; zero times infinity must be NaN."""
    a = torch.tensor([[False], [True]])
    b = torch.tensor([math.nan, math.inf, 0.0, -0.0, 2.0])
    torch.testing.assert_close(compiled(fn)(a, b), fn(a, b), equal_nan=True)
    c = torch.tensor([False, True])
    torch.testing.assert_close(compiled(torch.div)(a, c), a / c, equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sum_of_bools_is_whether_one_is_true(dynamic: bool) -> None:
    x, at, y = torch.tensor([False, True, False, False]), torch.tensor([0, 0, 2]), torch.tensor([True, True, False])

    def fn(x: Tensor, at: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.scatter_add(0, at, y), x.index_put((at,), y, accumulate=True), x.index_add(0, at, y)

    torch.testing.assert_close(compiled(fn, dynamic)(x, at, y), fn(x, at, y))


def test_gradients_go_through_it() -> None:
    leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((4, 8), (16, 8), (16,))]
    copies = [t.detach().clone().requires_grad_() for t in leaves]
    compiled(block)(*leaves).square().sum().backward()
    block(*copies).square().sum().backward()
    for ours, eager in zip(leaves, copies, strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)


def test_a_new_size_is_a_new_program_of_the_same_graph() -> None:
    w, b = torch.randn(16, 8), torch.randn(16)
    run = compiled(block, dynamic=True)
    for rows in (3, 5, 1, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(run(x, w, b), block(x, w, b))


def test_results_have_eagers_strides() -> None:
    x, w = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.randn(4, 3, 3, 3)

    def convolved(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.conv2d(x, w, padding=1).relu(), x.transpose(1, 3) + 1

    for ours, eager in zip(compiled(convolved)(x, w), convolved(x, w), strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("layout", [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[0].expand(4, 6)], ids=["t", "gaps", "0"])
def test_inputs_may_lie_anyhow(layout: Callable[[Tensor], Tensor]) -> None:
    x = layout(torch.randn(4, 6))
    torch.testing.assert_close(compiled(lambda x: (x * 2).sin() + 1)(x), (x * 2).sin() + 1)


def test_equal_results_share_no_memory() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + 1, x + 1, (x * 1).clone()

    x = torch.randn(8)
    results = compiled(twice)(x)
    assert len({t.data_ptr() for t in (x, *results)}) == 4
    results[0].zero_()
    assert torch.equal(results[1], x + 1)


def test_inputs_are_changed_where_the_model_changes_them() -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.sum())
        return total * 2

    ours, eager, x = torch.zeros(()), torch.zeros(()), torch.arange(4.0)
    assert torch.equal(compiled(step, fallback="allow")(x, ours), step(x, eager)) and torch.equal(ours, eager)


NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 2.5, -2.5, 0.5, 1.5])


@pytest.mark.parametrize(
    "fn",
    [
        torch.relu, torch.round, torch.sign, torch.sigmoid,
        lambda x: torch.maximum(x, torch.zeros(())), lambda x: x.clamp(-1, 1), lambda x: x.amax(), lambda x: x.argmax(),
        lambda x: torch.div(x, 0.5, rounding_mode="floor"), lambda x: torch.remainder(x, -2.0), lambda x: torch.fmod(x, 2.0),
        lambda x: x.sort(descending=True, stable=True), lambda x: F.max_pool2d(x[None, None, :8].reshape(1, 2, 4), 2),
        lambda x: x.isnan(), lambda x: x != x, lambda x: torch.logical_and(x, x),
    ],
)  # fmt: skip
def test_nan_infinity_and_halves_are_torchs(fn: Callable[[Tensor], Any]) -> None:
    torch.testing.assert_close(compiled(fn)(SPECIAL), fn(SPECIAL), equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_integers_are_divided_as_torch_divides_them(mode: str) -> None:
    x, y = torch.tensor([7, -7, 7, -7, 2**62]), torch.tensor([2, 2, -2, -2, 3])

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        shifted, narrow = torch.bitwise_right_shift(x, 1), x.to(torch.int8)
        return torch.div(x, y, rounding_mode=mode), x % y, torch.fmod(x, y), x / y, shifted, narrow

    for ours, eager in zip(compiled(fn)(x, y), fn(x, y), strict=True):
        assert ours.dtype == eager.dtype and torch.equal(ours, eager)


@pytest.mark.parametrize(
    ("fn", "args", "error"),
    [
        (lambda x, y: x // y, (torch.ones(3, dtype=torch.int64), torch.tensor([1, 0, 1])), RuntimeError),
        (lambda x, i: x[i], (torch.randn(4), torch.tensor([0, 4])), IndexError),
        (lambda x, i: F.embedding(i, x), (torch.randn(4, 2), torch.tensor([-1])), IndexError),
        (lambda x, i: x.gather(0, i), (torch.randn(4), torch.tensor([9])), RuntimeError),
        (lambda x, i: x.index_add(0, i, torch.ones(2)), (torch.randn(3, 2), torch.tensor([0, 2])), RuntimeError),
    ],
    ids=["zero divisor", "index", "embedding", "gather", "source of another rank"],
)
def test_what_eager_refuses_is_refused(fn: Callable[..., Tensor], args: tuple[Tensor, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        fn(*args)
    with pytest.raises(error):
        compiled(fn, fallback="allow")(*args)


def test_casts_round_inside_of_a_program() -> None:
    """XLA may keep excess precision of a value that is rounded and widened again."""
    x = torch.randn(64)
    assert torch.equal(compiled(lambda x: x.bfloat16().float())(x), x.bfloat16().float())


def test_jaxs_own_settings_stay() -> None:
    import jax

    compiled(torch.sin)(torch.randn(3, dtype=torch.float64))
    assert not jax.config.jax_enable_x64


class Residual(torch.nn.Module):
    """A small residual network with batch norms, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.BatchNorm2d(8)
        self.second, self.head = torch.nn.Conv2d(8, 8, 3, 1, 1, groups=2), torch.nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(x + self.second(x), 1).flatten(1))


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_residual_network_and_its_gradients(train: bool) -> None:
    eager = Residual().double().train(train)
    ours = copy.deepcopy(eager)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    run = compiled(ours, fallback="allow")
    a, b = run(x), eager(x)
    torch.testing.assert_close(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))
