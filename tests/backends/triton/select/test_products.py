"""Products followed by an activation, or with rows of odd length, are one kernel that rounds only the final result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.interface import Device, Value
from fusewright_triton.backend import NvidiaTriton, RocmTriton
from fusewright_triton.build import binaries, resources, workers
from fusewright_triton.kernels import product_ops
from fusewright_triton.run.handwritten import Order, noting, source
from fusewright_triton.run.interpreter import Simulated
from fusewright_triton.target import named
from tests.backends.triton.select.test_calls import REAL, SIMULATED, Net, check, lowered
from tests.fragments import targets

ARCHS = ("sm_90", "gfx942")
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dict(product_ops.ACTIVATIONS)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("m", "k", "n"), [(70, 40, 264), (130, 64, 33), (5, 72, 16), (1, 8, 1), (129, 136, 257)])
def test_one_rounding(m: int, k: int, n: int, arch: str, name: str) -> None:
    """Sizes around the blocks, odd widths, bf16 and fp16: each result is within one rounding of fp64's."""
    for dtype in (torch.bfloat16, torch.float16):
        x, w, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        for bias in (b, None):
            got = product_ops.linear_activation(x, w, bias, name, arch)
            want = EXACT[name](
                torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
            )
            sums = x.double().abs() @ w.double().abs().t()  # the error of fp32 sums grows with the sizes of their terms
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
    assert worst < 1.5e-5  # the polynomial's 7e-6, and fp32 roundings
    assert out[-3] == math.inf and math.isnan(out[-2]) and out[-1] == 0


@pytest.mark.parametrize(
    ("dtype", "near", "error", "beyond"), [(torch.bfloat16, 3.8, 4.2e-4, 3e-7), (torch.half, 4.5, 7e-6, 1e-9)]
)
def test_hoppers_gelu_to_a_relative_error(dtype: torch.dtype, near: float, error: float, beyond: float) -> None:
    """The error is relative except for negative results near 0. Gluon has no interpreter; Triton's runs this function."""
    text = source("hopper")
    text = text[text.index("def gelu(") : text.index("@gluon.jit\ndef activated(")]
    text = (
        "import triton\nimport triton.language as tl\n\n@triton.jit\n"
        + text.replace("gl.", "tl.").replace("exp2(", "tl.exp2(").replace("=ALL", "=tl.PropagateNan.ALL")
        + "@triton.jit\ndef run(x_ptr, out_ptr, N: tl.constexpr, BF16: tl.constexpr):\n"
        + "    i = tl.arange(0, N)\n    tl.store(out_ptr + i, gelu(tl.load(x_ptr + i), BF16))\n"
    )
    x, out = torch.linspace(-16, 16, 1 << 16), torch.zeros(1 << 16)
    x[-3:] = torch.tensor([math.inf, math.nan, -math.inf])
    Simulated(text, ["run"]).run(0, 1, (x, out), N=1 << 16, BF16=dtype == torch.bfloat16)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    wrong = (out - exact).abs()[:-3]
    assert (wrong / exact.abs()[:-3])[x[:-3] > -near].max() < error
    assert wrong[x[:-3] <= -near].max() < beyond
    assert out[-3] == math.inf and math.isnan(out[-2]) and abs(out[-1]) < 1e-20


@pytest.fixture
def small(thresholds: Callable[..., None]) -> None:
    """Make the tests' sizes count as large."""
    thresholds(product_results=1 << 10)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("m", "k", "n"), [(70, 40, 264), (130, 64, 33)])
def test_a_residual_is_rounded_with_the_sum(m: int, k: int, n: int, arch: str) -> None:
    x, w, b, r = (torch.randn(*s).bfloat16() for s in ((m, k), (n, k), (n,), (m, n)))
    want = torch.relu(torch.nn.functional.linear(x.double(), w.double(), b.double()) + r.double())
    got = product_ops.linear_activation(x, w, b, "relu", arch, r)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_hoppers_kernel_keeps_its_sums_in_registers(name: str, residual: bool) -> None:
    """The kernel is built, not run: it is for one architecture, and Triton cannot interpret it."""
    orders: list[Order] = []
    x, w, b, r = (
        torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((256, 64), (256, 64), (256,), (256, 256))
    )
    with noting(orders):
        product_ops.linear_activation(x, w, b, name, "sm_90", r if residual else None)
    (answer,) = workers.build_each([orders[0].request(named("sm_90"))])
    assert isinstance(answer, list), answer
    built = binaries.binary(answer[0])
    assert orders[0].module == "hopper" and "wgmma.mma_async" in built.listing and ".local" not in built.listing
    used = resources.resources(built, named("sm_90"))
    assert used.scratch == 0 and used.registers <= product_ops.STARTING
    assert not resources.over_limits(built, named("sm_90"))


def test_sizes_say_which_kernel_is_faster() -> None:
    """Measured on an H100: docs/studies/gpu-products.md."""
    h100 = named("sm_90")
    assert product_ops.gain(h100, 8192, 768, 3072, 2 * 8192 * 3072 * 2) > 30e-6  # an activation
    assert product_ops.gain(h100, 8192, 768, 768, 8192 * 768 * 2) > 0  # a residual
    assert product_ops.gain(h100, 12608, 3072, 768, 12608 * 768 * 2) < 0  # 594 tiles for 5 x 132
    assert product_ops.gain(h100, 8192, 768, 2304, 0) > 0
    assert product_ops.gain(h100, 8192, 3072, 768, 0) < 0


@pytest.mark.usefixtures("small")
def test_by_default_only_where_it_was_measured() -> None:
    for device, used in ((REAL, True), (Device("cpu", "sm_100", NvidiaTriton.targets["sm_100"].all_features), False)):
        g = Net()
        assert (
            "fusewright_triton::linear_activation" in targets(lowered(g, [mlp(g, "relu", rows=1 << 14)], device=device))
        ) == used


def mlp(g: Net, act: str, *args: object, rows: int = 128, width: int = 48) -> Value:
    x = g.tensor(rows, 32)
    return g.op(
        "linear", g.op(act, g.op("linear", x, g.weight(64, 32), g.weight(64)), *args), g.weight(width, 64), None
    )


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
@pytest.mark.parametrize("swap", [False, True])
def test_a_residual_goes_into_the_product_before_it(swap: bool) -> None:
    g = Net()
    x = g.tensor(128, 32)
    h = g.op("view", g.op("linear", x, g.weight(64, 32), g.weight(64)), (4, 32, 64))
    r = g.tensor(4, 32, 64)
    y = g.op("linear", g.op("add", r, h) if swap else g.op("add", h, r), g.weight(48, 64), None)
    fragment = lowered(g, [y], device=SIMULATED)
    assert targets(fragment) == ["fusewright_triton::linear_activation", "aten::view", "aten::linear"]
    torch.testing.assert_close(g.run(fragment, [y])[0], g.expected([y])[0], rtol=2e-2, atol=4e-2)


@pytest.mark.usefixtures("small")
def test_a_sum_of_two_products_is_taken_in_by_one_of_them() -> None:
    """The parallel residual of GPT-NeoX, GPT-J and Falcon: the sum of attention and MLP."""
    g = Net()
    a, b, x = (g.tensor(128, 32) for _ in range(3))
    left, right = (g.op("linear", t, g.weight(64, 32), g.weight(64)) for t in (a, b))
    y = g.op("add", g.op("linear", x, g.weight(64, 32), None), g.op("add", left, right))
    fragment = lowered(g, [y], device=SIMULATED)
    assert sorted(targets(fragment)) == ["aten::linear", *["fusewright_triton::linear_activation"] * 2]
    torch.testing.assert_close(g.run(fragment, [y])[0], g.expected([y])[0], rtol=2e-2, atol=6e-2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("other", ["row", "self", "scaled", "read"])
def test_what_is_no_residual_stays_apart(other: str) -> None:
    """A broadcast row, the product itself, a scaled residual, a product with other users."""
    g = Net()
    h = g.op("linear", g.tensor(128, 32), g.weight(64, 32), None)
    added = {"row": g.tensor(1, 64), "self": h}.get(other) or g.tensor(128, 64)
    y = g.op("add", h, added, **({"alpha": 2} if other == "scaled" else {}))
    fragment = lowered(g, [y, h] if other == "read" else [y], device=SIMULATED)
    assert "fusewright_triton::linear_activation" not in targets(fragment)


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
    assert any(t.startswith("kernel") for t in targets(lowered(g, [y], "kernel", autotune=True)))


@pytest.mark.usefixtures("small")
def test_a_product_that_others_read_keeps_its_activation_apart() -> None:
    g = Net()
    h = g.op("linear", g.tensor(128, 32), g.weight(64, 32), None)
    y = g.op("linear", g.op("gelu", h, "none"), g.weight(48, 64), None)
    assert "kernel gelu" in targets(lowered(g, [y, h], "kernel", autotune=True))


@pytest.mark.usefixtures("small")
def test_rows_of_odd_length_are_written_where_they_are_wanted(thresholds: Callable[..., None]) -> None:
    thresholds(padded_results=1 << 10, unaligned_flops=(1.0, 1.0))
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
    assert "fusewright_triton::linear_activation" not in targets(
        lowered(g, [y], "kernel", device=device, cls=cls, autotune=True)
    )


class Mlp(torch.nn.Module):
    """An MLP as in captured models: rows are flattened around each product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 57)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.usefixtures("small")
def test_a_model_has_both(monkeypatch: pytest.MonkeyPatch, thresholds: Callable[..., None]) -> None:
    thresholds(padded_results=1 << 10)
    torch.manual_seed(0)
    seen: list[str] = []
    launch = product_ops._one_by_one
    monkeypatch.setattr(
        product_ops, "_one_by_one", lambda *args, **k: (seen.append(args[5]["ACT"]), launch(*args, **k))
    )
    model, x = Mlp().eval().bfloat16(), torch.randn(2, 128, 32).bfloat16()
    with torch.no_grad():
        got = torch.compile(model, backend="nvidia_triton", options={"simulate": True, "cache": False, "strict": True})(
            x
        )
        eager, exact = model(x), model.double()(x.double())
    assert seen == ["gelu", ""]
    assert got.is_contiguous() and (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-3


@pytest.mark.hardware("nvidia_triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Partly filled tiles, inner sizes around the ring's, more tiles than programs, odd rows: within one rounding of fp64."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    for m, k, n in (
        (129, 8, 136),
        (700, 72, 264),
        (128, 384, 128),
        (4100, 392, 1032),
        (1, 4096, 8),
        (300, 64, 57),
        (9000, 64, 2048),
    ):
        x, w, b, r = (torch.randn(*s, device="cuda").to(dtype) for s in ((m, k), (n, k), (n,), (m, n)))
        for bias, residual in ((b, None), (None, r), (b, r)):
            sums = x.double() @ w.double().T
            sums = sum((t.double() for t in (bias, residual) if t is not None), start=sums)
            want, size = EXACT[name](sums), x.double().abs() @ w.double().abs().T + 1
            got = product_ops.linear_activation(x, w, bias, name, arch, residual)
            allowed = want.abs() * (torch.finfo(dtype).eps * 0.55) + 1e-6 * (size + 1)
            assert ((got - want).abs() <= allowed).all(), (m, k, n, bias is None, residual is None)
    x[0, 0] = math.nan
    assert product_ops.linear_activation(x, w, None, name, arch)[0].isnan().all()
