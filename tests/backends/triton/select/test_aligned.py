"""Products of odd features: zeros behind them, written once for weights and by the kernel that makes the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import nn

from fusewright import machine
from fusewright.interface import Device, Value
from fusewright.plan.ir import Launch
from fusewright_triton.backend import NvidiaTriton, RocmTriton, multiple
from fusewright_triton.target import named
from tests.backends.triton.select.test_calls import BF16, F32, REAL, SIMULATED, Net, check, lowered, text
from tests.fragments import targets


@pytest.fixture(autouse=True)
def small(thresholds: Callable[..., None]) -> None:
    """Make the tests' sizes count as large."""
    thresholds(padded_results=64, product_results=1 << 10)


def linear(g: Net, x: Value, k: int, n: int, bias: bool = True) -> Value:
    return g.op("linear", x, g.weight(n, k), g.weight(n) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [16, 13])
@pytest.mark.parametrize("shape", [(24, 19), (2, 12, 19)])
def test_the_kernel_that_makes_the_features_writes_zeros_behind_them(shape: tuple[int, ...], n: int, bias: bool) -> None:
    g = Net()
    x = g.op("relu", g.tensor(*shape))
    y = linear(g, x, 19, n, bias)
    fragment = check(g, [g.op("exp", y)])
    launches = [i for i in fragment.instructions if isinstance(i, Launch)]
    assert len(launches) == 2 and "aten::constant_pad_nd(('_', (0, 5, 0, 0), 0))" not in text(fragment, prepare=False)
    weights = f"(0, 5, 0, {-n % 8})"
    assert text(fragment, prepare=True)[0] == f"aten::constant_pad_nd('_', {weights}, 0)"


def test_others_read_the_rows_before_the_zeros() -> None:
    """A radiance field: encoded positions are read by the first product and joined to the features of a later layer."""
    g = Net()
    given = g.op("cat", [g.tensor(24, 9), g.op("sin", g.tensor(24, 10))], -1)
    h = g.op("relu", linear(g, given, 19, 32))
    y = linear(g, g.op("cat", [h, given], -1), 51, 16)
    fragment = check(g, [y])
    assert targets(fragment) == ["kernel sin", *["kernel constant_pad_nd", "aten::linear"] * 2]


def test_features_that_leave_have_eagers_strides() -> None:
    g = Net()
    x = g.op("relu", g.tensor(24, 19))
    y = linear(g, x, 19, 13)
    fragment = lowered(g, [x, y, g.op("t", y)], device=SIMULATED)
    outs = g.run(fragment, [x, y])
    for ours, eager in zip(outs, g.expected([x, y]), strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def test_a_kernel_activates_what_it_writes_zeros_behind() -> None:
    """Between two products of odd width: the library's rows are aligned, and one kernel applies relu and writes zeros."""
    g = Net()
    h = g.op("relu", linear(g, g.tensor(128, 16), 16, 19))
    y = linear(g, h, 19, 16)
    names = [t.removesuffix(".default") for t in targets(check(g, [y]))]
    assert [n for n in names if n.startswith("kernel")] == ["kernel constant_pad_nd"]
    assert [n for n in names if not n.startswith("kernel")] == ["aten::linear", "aten::slice.Tensor", "aten::linear"]


def test_our_product_takes_odd_features(thresholds: Callable[..., None]) -> None:
    thresholds(padded_results=64, product_results=1 << 10)
    g = Net()
    y = linear(g, g.op("gelu", linear(g, g.tensor(128, 19), 19, 64), "none"), 64, 48)
    fragment = lowered(g, [y], device=SIMULATED)
    assert targets(fragment)[:2] == ["kernel constant_pad_nd", "fusewright_triton::linear_activation"]
    torch.testing.assert_close(g.run(fragment, [y])[0], g.expected([y])[0], rtol=2e-2, atol=6e-2)


def test_products_of_one_tensor_share_its_zeros() -> None:
    g = Net()
    x = g.op("relu", g.tensor(24, 19))
    ys = [linear(g, x, 19, 8), linear(g, x, 19, 16)]
    for prefer in ("together", "separate"):
        assert targets(check(g, ys, prefer)).count("kernel constant_pad_nd") == 1


def test_products_that_become_one_are_aligned_as_one() -> None:
    """Heads of 5 and 2 classes: 7 columns, and one of zeros."""
    g = Net()
    x = g.op("relu", g.tensor(24, 19))
    ys = [linear(g, x, 19, 5), linear(g, x, 19, 2)]
    fragment = check(g, ys, "together")
    assert "aten::constant_pad_nd('_', (0, 5, 0, 1), 0)" in text(fragment, prepare=True)
    assert targets(fragment).count("aten::linear") == 1


def test_a_single_result_is_no_matrix() -> None:
    """Libraries multiply vectors by matrices with rows of any length."""
    g = Net()
    assert targets(lowered(g, [linear(g, g.tensor(24, 16), 16, 1)])) == ["aten::linear"]


def test_fp32_is_padded_where_it_is_rounded_for_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "matmul_precision", lambda device: "tf32")
    g = Net(F32)
    fragment = check(g, [linear(g, g.tensor(24, 19), 19, 14)])
    assert text(fragment, prepare=True)[0] == "aten::constant_pad_nd('_', (0, 1, 0, 2), 0)"


def test_infinities_stay_in_their_rows() -> None:
    g = Net()
    given = torch.randn(24, 19).to(BF16)
    given[3, 2], given[5, 1] = torch.inf, torch.nan
    h = linear(g, g.input(given), 19, 21)
    y = linear(g, g.op("relu", h), 21, 16)
    (ours,) = g.run(lowered(g, [y], device=SIMULATED), [y])
    others = [k for k in range(24) if k not in (3, 5)]
    assert ours[others].isfinite().all() and ours[5].isnan().all() and not ours[3].isfinite().any(), "oneDNN's own spread to row 2"


@pytest.mark.parametrize(
    ("device", "cls", "dtype"),
    [
        (REAL, NvidiaTriton, F32),
        (Device("cpu", "sm_100", NvidiaTriton.targets["sm_100"].all_features), NvidiaTriton, BF16),
        (Device("cpu", "gfx942", RocmTriton.targets["gfx942"].all_features), RocmTriton, BF16),
    ],
    ids=["full precision", "not measured", "not measured"],
)  # fmt: skip
def test_others_keep_their_features(device: Device, cls: Any, dtype: torch.dtype) -> None:
    g = Net(dtype)
    y = linear(g, g.tensor(24, 19), 19, 16)
    assert targets(lowered(g, [y], "library", device=device, cls=cls)) == ["aten::linear"]


def test_small_products_keep_their_features(thresholds: Callable[..., None]) -> None:
    thresholds(padded_results=24 * 19 + 1)
    g = Net()
    y = linear(g, g.tensor(24, 19), 19, 16)
    assert targets(lowered(g, [y])) == ["aten::linear"]


def test_steps_ask_for_multiples_where_matrices_are_large() -> None:
    h100 = named("sm_90")
    assert multiple(h100, BF16, 4, 16, 3) == 8 and multiple(h100, torch.half, 2, 9, 32) == 8
    assert multiple(h100, BF16, 4, 9, 3) == 1, "small"
    assert multiple(h100, BF16, 32, 8, 16) == multiple(h100, BF16, 1, 99, 16) == 1, "sums of few terms, and vectors"
    assert multiple(h100, F32, 4, 16, 3) == multiple(named("gfx942"), BF16, 4, 16, 3) == 1


class Field(nn.Module):
    """Odd widths, a result in between, features that two products read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.n = nn.Linear(13, 19), nn.Linear(32, 21), nn.Linear(21, 10, bias=False), nn.LayerNorm(21)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.cat([self.a(x).relu(), x], -1)
        y = self.n(self.b(h).relu())
        return self.c(y), y, self.c(y).softmax(-1)


def run(model: nn.Module, x: torch.Tensor, call: Callable[..., Any], amp: bool) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        made = call(x)
    sum((t.double() * torch.arange(t.numel()).view(t.shape).sin()).sum() for t in made).backward()  # type: ignore[attr-defined]
    return [*made, *(p.grad for p in model.parameters()), x.grad]  # type: ignore[misc]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("dtype", "amp"), [(F32, True), (BF16, False), (torch.half, False)])
def test_a_step(dtype: torch.dtype, amp: bool) -> None:
    """Results and gradients have eager's strides, and at most twice its error."""
    torch.manual_seed(0)
    net, x = Field().to(dtype), torch.randn(4, 10, 13).to(dtype)
    wide = Field().double()
    wide.load_state_dict(net.state_dict())
    compiled = torch.compile(net, backend="nvidia_triton", options={"simulate": True, "cache": False, "strict": True})
    ours = run(net, x, compiled, amp)
    net.zero_grad()
    for a, b, exact in zip(ours, run(net, x, net, amp), run(wide, x.double(), wide, False), strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        assert (a - exact).norm() <= 2 * (b - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.usefixtures("fresh_dynamo")
def test_symbolic_rows() -> None:
    net = Field().to(BF16).eval()
    options = {"simulate": True, "cache": False, "strict": True}
    compiled = torch.compile(net, backend="nvidia_triton", options=options, dynamic=True)
    with torch.no_grad():
        for rows in (10, 17):
            x = torch.randn(4, rows, 13).to(BF16)
            for ours, eager in zip(compiled(x), net(x), strict=True):
                assert ours.stride() == eager.stride()
                torch.testing.assert_close(ours, eager, rtol=5e-2, atol=5e-2)
