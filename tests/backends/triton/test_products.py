"""Products with an activation behind, or rows of odd length: one kernel, of which nothing but the end is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this platform")

import torch

from fusewright.interface import Device, Value
from fusewright_triton import epilogues, products
from fusewright_triton.backend import NvidiaTriton, RocmTriton
from fusewright_triton.handwritten import source
from fusewright_triton.kernels import product_ops
from fusewright_triton.simulate import Simulated
from tests.backends.triton.test_calls import SIMULATED, Net, check, lowered
from tests.fragments import targets

ARCHS = ("sm_90", "gfx942")
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dict(epilogues.ACTIVATIONS)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("m", "k", "n"), [(70, 40, 264), (130, 64, 33), (5, 72, 16), (1, 8, 1), (129, 136, 257)])
def test_one_rounding(m: int, k: int, n: int, arch: str, name: str) -> None:
    """Sizes around the blocks, odd widths, bf16 and fp16: each result is within a rounding of that in fp64."""
    for dtype in (torch.bfloat16, torch.float16):
        x, w, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        for bias in (b, None):
            got = product_ops.linear_activation(x, w, bias, name, arch)
            want = EXACT[name](torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double()))
            sums = x.double().abs() @ w.double().abs().t()  # fp32 sums are as exact as what they add
            allowed = want.abs() * (torch.finfo(dtype).eps / 2 + 1e-5) + 1e-6 * (sums + 1)
            assert got.dtype == dtype and got.is_contiguous()
            assert ((got - want).abs() <= allowed).all()


def test_strides_and_addresses_that_no_descriptor_takes() -> None:
    x = torch.randn(40, 3, 80).bfloat16()[:, :, 3:67]
    w = torch.randn(64, 24).bfloat16()
    got = product_ops.linear_activation(x, w.t(), None, "relu", "sm_90")
    assert got.shape == (40, 3, 24)
    torch.testing.assert_close(got.double(), torch.relu(x.double() @ w.double()), rtol=1e-2, atol=1e-2)


def test_nothing_in_nothing_out() -> None:
    out = product_ops.linear_activation(torch.empty(0, 8).half(), torch.empty(4, 8).half(), None, "gelu", "sm_90")
    assert out.shape == (0, 4)


def test_gelu_to_a_relative_error() -> None:
    """Against fp64's erfc, down to results of 1e-18; NaN and infinities."""
    text = source("product") + (
        "\n\n@triton.jit\ndef run(x_ptr, out_ptr, N: tl.constexpr):\n"
        "    i = tl.arange(0, N)\n    tl.store(out_ptr + i, gelu(tl.load(x_ptr + i)))\n"
    )
    x, out = torch.linspace(-9, 9, 1 << 15), torch.zeros(1 << 15)
    x[-3:] = torch.tensor([math.inf, math.nan, 0.0])
    Simulated(text, ["run"]).run(0, 1, (x, out), N=1 << 15)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    worst = ((out - exact).abs() / exact.abs())[:-3].max().item()
    print(f"gelu: relative error {worst:.1e}")
    assert worst < 1.5e-5  # the polynomial's 7e-6, and roundings of fp32
    assert out[-3] == math.inf and math.isnan(out[-2]) and out[-1] == 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of tests count as large."""
    monkeypatch.setattr(epilogues, "LEAST", 1 << 10)


@pytest.mark.usefixtures("small")
def test_only_autotune_pays_for_the_compilation() -> None:
    g = Net()
    y = mlp(g, "relu")
    assert targets(lowered(g, [y], "kernel")) == ["aten::linear", "kernel relu", "aten::linear"]
    assert "fusewright_triton::linear_activation" in targets(lowered(g, [y], "kernel", autotune=True))


def mlp(g: Net, act: str, *args: object, rows: int = 128, width: int = 48) -> Value:
    x = g.tensor(rows, 32)
    return g.op("linear", g.op(act, g.op("linear", x, g.weight(64, 32), g.weight(64)), *args), g.weight(width, 64), None)


ACTS = [("gelu", "none"), ("gelu", "tanh"), ("relu",), ("silu",), ("sigmoid",)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("act", ACTS)
def test_an_activation_goes_into_the_product_before_it(act: tuple[str, ...]) -> None:
    g = Net()
    y = mlp(g, *act)
    fragment = lowered(g, [y], device=SIMULATED)
    assert targets(fragment) == ["fusewright_triton::linear_activation", "aten::linear"]
    (ours,), (eager,) = g.run(fragment, [y]), g.expected([y])
    torch.testing.assert_close(ours, eager, rtol=2e-2, atol=4e-2)  # eager rounds once more, before the activation


@pytest.mark.usefixtures("small")
def test_what_is_no_faster_stays_with_the_library() -> None:
    g = Net()
    y = mlp(g, "relu")
    assert targets(lowered(g, [y], "library", autotune=True)) == ["aten::linear", "kernel relu", "aten::linear"]


@pytest.mark.usefixtures("small")
def test_an_activation_that_a_kernel_behind_takes_in_is_left_to_it() -> None:
    g = Net()
    x = g.tensor(128, 32)
    gate, up = (g.op("linear", x, g.weight(64, 32), None) for _ in range(2))
    y = g.op("linear", g.op("mul", g.op("silu", gate), up), g.weight(48, 64), None)
    assert not any("linear_activation" in t for t in targets(lowered(g, [y], "kernel", autotune=True)))


@pytest.mark.usefixtures("small")
def test_a_product_that_others_read_keeps_its_activation_apart() -> None:
    g = Net()
    h = g.op("linear", g.tensor(128, 32), g.weight(64, 32), None)
    y = g.op("linear", g.op("gelu", h, "none"), g.weight(48, 64), None)
    assert not any("linear_activation" in t for t in targets(lowered(g, [y, h], "kernel", autotune=True)))


@pytest.mark.usefixtures("small")
def test_rows_of_odd_length_are_written_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PADDING_PAYS", 1 << 10)
    g = Net()
    y = g.op("linear", g.tensor(128, 32), g.weight(57, 32), g.weight(57))
    assert targets(check(g, [y])) == ["fusewright_triton::linear_activation"]
    padded = targets(lowered(g, [y], "library", autotune=True))
    assert "fusewright_triton::linear_activation" not in padded and "aten::slice.Tensor" in padded


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_devices_without_descriptors_keep_their_library(arch: str) -> None:
    g = Net()
    cls = RocmTriton if arch.startswith("gfx") else NvidiaTriton
    device = Device("cpu", arch, cls.targets[arch].all_features)
    y = mlp(g, "relu")
    assert "fusewright_triton::linear_activation" not in targets(lowered(g, [y], "kernel", device=device, cls=cls, autotune=True))


class Mlp(torch.nn.Module):
    """As captured models have it: rows are flattened around each product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 57)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.usefixtures("small")
def test_a_model_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PADDING_PAYS", 1 << 10)
    torch.manual_seed(0)
    seen: list[str] = []
    launch = product_ops._launch
    monkeypatch.setattr(product_ops, "_launch", lambda *args: (seen.append(args[4]["ACT"]), launch(*args)))
    model, x = Mlp().eval().bfloat16(), torch.randn(2, 128, 32).bfloat16()
    with torch.no_grad():
        got = torch.compile(model, backend="nvidia_triton", options={"simulate": True, "cache": False, "strict": True})(x)
        eager, exact = model(x), model.double()(x.double())
    assert seen == ["gelu", ""]
    assert got.is_contiguous() and (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-3
