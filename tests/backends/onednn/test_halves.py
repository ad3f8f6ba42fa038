"""Products of half types on CPUs whose oneDNN refuses them: computed in fp32, as exactly as eager's, in inference and training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fusewright import report
from tests.backends.onednn.common import without_halves

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]
HALVES = (torch.bfloat16, torch.float16)
EPS = {dtype: torch.finfo(dtype).eps for dtype in HALVES}


@pytest.fixture(autouse=True)
def _without_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_halves(monkeypatch)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, groups=4), nn.Flatten(),
        nn.Linear(64 * 49, 48), nn.GELU(), nn.Linear(48, 480),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
def test_inference_is_lowered_and_as_exact_as_eager(dtype: torch.dtype) -> None:
    m, x = _net().eval().to(dtype), torch.randn(8, 3, 16, 16).to(dtype)
    exact = copy.deepcopy(m).double()(x.double())
    with torch.no_grad(), report.recording() as graphs:
        eager, ours = m(x), torch.compile(m, backend="x86_onednn", options={"strict": True})(x)
    assert ours.dtype is dtype and ours.stride() == eager.stride()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + EPS[dtype]
    assert graphs[0].rules["product.wider"] == 4 and not graphs[0].fallbacks


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_as_exact_as_eagers(dtype: torch.dtype) -> None:
    m, x = _net().train(), torch.randn(8, 3, 16, 16)

    def gradients(f: nn.Module, of: nn.Module, x: torch.Tensor, enabled: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            loss = f(x).square().mean()
        return list(torch.autograd.grad(loss, list(of.parameters())))

    wide = copy.deepcopy(m).double()
    exact, eager = gradients(wide, wide, x.double(), False), gradients(m, m, x, True)
    ours = gradients(torch.compile(m, backend="x86_onednn", options={"strict": True}), m, x, True)
    for mine, theirs, right in zip(ours, eager, exact, strict=True):
        assert mine.dtype is theirs.dtype and mine.stride() == theirs.stride()
        assert (mine - right).norm() <= 2 * (theirs - right).norm() + EPS[dtype] * right.norm()


@pytest.mark.parametrize("dtype", HALVES)
def test_sizes_may_be_symbolic(dtype: torch.dtype) -> None:
    m = nn.Linear(64, 96).eval().to(dtype)
    compiled = torch.compile(m, backend="x86_onednn", dynamic=True)
    for rows in (40, 7, 96):
        x = torch.randn(rows, 64).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), m(x))


def test_a_weight_that_changes_is_widened_again() -> None:
    m, x = nn.Linear(64, 96).eval().bfloat16(), torch.randn(40, 64).bfloat16()
    compiled = torch.compile(m, backend="x86_onednn")
    with torch.no_grad():
        compiled(x)
        m.weight.mul_(2)
        torch.testing.assert_close(compiled(x), m(x))


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_is_off_while_compiling(dtype: torch.dtype) -> None:
    """It would narrow the widened product, and the products that are measured."""
    m, x = _net().eval().requires_grad_(False), torch.randn(8, 3, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype), report.recording() as graphs:
        eager, ours = m(x), torch.compile(m, backend="x86_onednn", options={"strict": True})(x)
    assert graphs[0].capture == "direct" and graphs[0].rules["product.wider"] == 4
    torch.testing.assert_close(ours, eager, rtol=8 * EPS[dtype], atol=8 * EPS[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_of_two_types_is_eagers_error(dtype: torch.dtype) -> None:
    x, w = torch.randn(40, 64, dtype=dtype), torch.randn(96, 64)
    with torch.no_grad(), pytest.raises(RuntimeError, match="same dtype"):
        torch.compile(torch.nn.functional.linear, backend="x86_onednn")(x, w)


@pytest.mark.parametrize("training", [False, True])
def test_convolutions_of_symbolic_sizes_assume_nothing_of_them(training: bool) -> None:
    """Tracing one chooses a kernel of eager's by its sizes; `strict` raises what is assumed."""
    m = nn.Conv2d(3, 32, 3, padding=1).bfloat16()
    compiled = torch.compile(m, backend="x86_onednn", dynamic=True, options={"strict": True})
    for n, size in ((2, 16), (3, 24)):
        x = torch.randn(n, 3, size, size).bfloat16().requires_grad_(training)
        with torch.set_grad_enabled(training):
            ours, eager = compiled(x), m(x)
        torch.testing.assert_close(ours, eager, rtol=1e-2, atol=1e-2)
        assert ours.stride() == eager.stride()
        if training:
            torch.testing.assert_close(*(torch.autograd.grad(y.float().sum(), x)[0] for y in (ours, eager)), rtol=3e-2, atol=3e-2)
