"""Products of odd features: zeros behind them, written once for weights and by the kernel that makes the input."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from torch import nn

from fusewright import machine
from fusewright.interface import Device, Value
from fusewright.plan.ir import Call, Launch, Ref
from fusewright_triton.backend import NvidiaTriton, RocmTriton, multiple
from fusewright_triton.select import aligned
from fusewright_triton.target import H100, named
from tests.backends.triton.select.test_calls import BF16, F32, REAL, SIMULATED, Net, check, lowered, text
from tests.fragments import targets

FITTED = H100
"""As measured, whatever a test sets."""


@pytest.fixture(autouse=True)
def small(thresholds: Callable[..., None]) -> None:
    """Make the tests' sizes count as large."""
    thresholds(padded_results=64, product_results=1 << 10, unaligned_flops=(1.0, 1.0))


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


def operand(g: Net, turned: bool, *shape: int) -> Value:
    """Draw matrices, dense along columns if `turned`."""
    return g.op("transpose", g.tensor(*shape[:-2], shape[-1], shape[-2]), -2, -1) if turned else g.tensor(*shape)


TURNED = pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)))


@TURNED
@pytest.mark.parametrize(("m", "k", "n"), [(27, 35, 29), (24, 35, 16), (27, 16, 32), (24, 16, 29)])
@pytest.mark.parametrize("phase", ["infer", "backward"])
@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_products_have_rows_of_whole_vectors(
    name: str, phase: Any, m: int, k: int, n: int, turned: tuple[bool, bool]
) -> None:
    """Of both operands and of the result: one row of any other length, and the library takes its slow kernel."""
    g = Net()
    g.phase = phase
    batch = (2,) if name == "bmm" else ()
    y = g.op(name, operand(g, turned[0], *batch, m, k), operand(g, turned[1], *batch, k, n))
    odd = n % 8 or (k % 8 and (turned[1] or not turned[0])) or (m % 8 and turned[0])
    fragment = check(g, [y])
    assert any("padded rows" in note for note in fragment.notes.values()) == bool(odd)
    check(g, [y, g.op("relu", y)])
    assert all(length % 8 == 0 for s in factors(g, fragment, f"aten::{name}") for length in (max(s.stride[-2:]), _dense_length(s)))


def _dense_length(s: Any) -> int:
    return int(s.shape[s.stride.index(1)])


def factors(g: Net, fragment: Any, target: str) -> list[Any]:
    """The factors and results of a product, if the lowering made them."""
    (call,) = [i for i in fragment.instructions if isinstance(i, Call) and i.target.startswith(target)]
    refs = [a.id for a in call.args if isinstance(a, Ref)]
    return [s for s in map(g.temporaries.get, refs) if s is not None]


@TURNED
@pytest.mark.parametrize("added", [(29,), (27, 29), (27, 1), (1, 29), (1,), ()])
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_what_is_added_is_padded_too(name: str, added: tuple[int, ...], turned: tuple[bool, bool]) -> None:
    g = Net()
    batch = (2,) if name == "baddbmm" else ()
    more = (2, *added) if len(added) == 2 and batch and added[0] > 1 else added
    given = operand(g, turned[0], *batch, 27, 35), operand(g, turned[1], *batch, 35, 29)
    fragment = check(g, [g.op(name, g.input(torch.randn(more).to(BF16)), *given, beta=0.5, alpha=2.0)])
    assert any("padded rows" in note for note in fragment.notes.values())


def test_a_matrix_times_itself() -> None:
    g = Net()
    x = g.tensor(27, 27)
    check(g, [g.op("mm", x, x), g.op("mm", g.op("t", x), x), g.op("mm", x, g.op("t", x))])


def test_rows_of_a_slice_are_copied() -> None:
    g = Net()
    x = g.op("slice", g.tensor(24, 35), 1, 0, 32)
    fragment = check(g, [g.op("mm", x, g.tensor(32, 16))])
    assert targets(fragment) == ["kernel clone", "aten::mm"]


@pytest.mark.parametrize(("m", "k", "n"), [(1, 35, 29), (27, 35, 1), (1, 35, 16), (16, 35, 1), (1, 32, 29)])
def test_vectors_are_no_matrices(m: int, k: int, n: int) -> None:
    """Libraries multiply them by rows of any length: a padded vector took 0.39 ms of an H200, eager 0.26 (2048 x 262144)."""
    for turned in itertools.product((False, True), repeat=2):
        for batch, name, sizes in (((), "mm", ()), ((2,), "bmm", ()), ((), "addmm", (n,))):
            g = Net()
            given = operand(g, turned[0], *batch, m, k), operand(g, turned[1], *batch, k, n)
            fragment = lowered(g, [g.op(name, *(g.tensor(*s) for s in [sizes] if s), *given)])
            assert [t.removesuffix(".default") for t in targets(fragment) if "transpose" not in t] == [f"aten::{name}"]
    g = Net()
    assert targets(lowered(g, [linear(g, g.tensor(m, k), k, n)])) == ["aten::linear"]
    g = Net()
    assert targets(lowered(g, [g.op("linear", g.tensor(m, k), g.tensor(n, k), None)])) == ["aten::linear"]


@pytest.mark.parametrize(("m", "k", "n", "paid"), [
    (8205, 2949, 5921, True), (8192, 2949, 8192, True), (8192, 30522, 768, True), (65536, 2949, 4, False), (262144, 33, 32, False),
    (515, 131, 77, False), (128, 262145, 2, False),
])  # fmt: skip
def test_copies_must_pay(m: int, k: int, n: int, paid: bool) -> None:
    """Long products are padded; those that only read a large matrix or make one, or are small, are not."""
    c = SimpleNamespace(target=replace(named("sm_90"), fitted=FITTED))
    assert aligned.pays(aligned.Sizes(1, m, k, n, m * k + k * n + m * n, 3), BF16, c) == paid  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [True, False])
def test_long_rows_of_few_results_are_copied_by_nobody(made: bool, thresholds: Callable[..., None]) -> None:
    """The copy would take longer than the product, which reads them once; a kernel that makes them writes zeros for nothing."""
    thresholds(unaligned_flops=FITTED.unaligned_flops)
    g = Net()
    x = g.tensor(512, 1021)
    fragment = lowered(g, [linear(g, g.op("relu", x) if made else x, 1021, 16)])
    assert any(note == "product, padded" for note in fragment.notes.values()) == made


def test_the_scores_of_attention_are_left_to_it() -> None:
    """A row that matches at the softmax takes the product as well."""
    g = Net()
    scores = g.op("bmm", g.tensor(4, 29, 16), operand(g, True, 4, 16, 29))
    y = g.op("bmm", g.op("softmax", g.op("mul", scores, 0.25), -1, False), g.tensor(4, 29, 16))
    assert not any("padded rows" in note for note in lowered(g, [y]).notes.values())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("k", "n"), [(35, 29), (35, 16), (16, 29)])
def test_linears_whose_weights_are_inputs(k: int, n: int, bias: bool) -> None:
    g = Net()
    y = g.op("linear", g.tensor(24, k), g.tensor(n, k), g.tensor(n) if bias else None)
    fragment = check(g, [y])
    assert any(note == "product, padded" for note in fragment.notes.values())
    assert "aten::constant_pad_nd" not in [t.removesuffix(".default") for t in targets(fragment)[: 0 if bias else None]]


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
