"""Maxima and sums of exponentials of one pass over rows, which a vocabulary's losses consist of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusewright.toolkit.ir import Builder, Kernel, Val, interpret, symbol
from fusewright.toolkit.ir.types import to_torch
from fusewright.toolkit.transform.online_softmax import pairs, totals
from fusewright_triton import target
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.held import kept, passes
from fusewright_triton.emit.schedule import Config, Tile, choose
from fusewright_triton.runtime import SimulatedLauncher
from tests.backends.triton.kernels import simulate
from tests.kernels import softmax

H100 = target.NVIDIA["sm_90"]
CONFIGS = {
    "held": Config((Tile((0,), 1),), 64, True, 1, 4),
    "in steps": Config((Tile((0,), 1),), 16, False, 1, 4),
    "in steps of lanes": Config((Tile((0,), 1),), 16, False, 1, 4, 4),
    "of whole steps": Config((Tile((0,), 1),), 16, False, 1, 4, 16),
    "several rows": Config((Tile((0,), 4),), 16, False, 1, 4, 4),
    "shared": Config((Tile((0,), 1),), 8, False, 4, 4, 8),
}
SETTINGS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def guarded(b: Builder, top: Val) -> Val:
    """A maximum as logsumexp subtracts it."""
    return b.where(b.op("isinf", top), 0.0, top)


def losses(rows: int, cols: int, dtype: str = "f32", scale: float = 1.0, stride: int = 0, store: bool = False) -> Kernel:
    """The sum of a row's exponentials as in softmax and as in logsumexp, the plain sum, and what needs another pass: the entropy.
    With `store`, scaled values leave in the first pass."""
    wide = "f64" if dtype == "f64" else "f32"
    b = Builder("losses", p=[rows], r=[cols])
    x, out = b.input("x", dtype), [b.output(n, wide) for n in ("plain", "log", "total", "entropy")]
    i, j = b.axes
    v = b.load(x, i * (stride or cols) + j).to(wide) * scale
    if store:
        b.store(b.output("scaled", wide), i * cols + j, v)
    top = b.reduce("max", v)
    less = guarded(b, top)
    plain = b.reduce("sum", b.op("exp", v - top))
    b.store(out[0], i, plain)
    b.store(out[1], i, b.op("log", b.reduce("sum", b.op("exp", v - less))) + less)
    b.store(out[2], i, b.reduce("sum", v))
    logs = (v - top) - b.op("log", plain)
    b.store(out[3], i, b.reduce("sum", b.op("exp", logs) * logs))
    return b.build()


def eager(x: torch.Tensor, scale: float) -> list[torch.Tensor]:
    v = x * scale
    logs = v.log_softmax(-1)
    return [(v - v.amax(-1, keepdim=True)).exp().sum(-1), v.logsumexp(-1), v.sum(-1), (logs.exp() * logs).sum(-1)]


def near(got: list[torch.Tensor], x: torch.Tensor, scale: float) -> None:
    """Check results against those of fp64, with eager's error as the measure. What is not finite is eager's."""
    given = x if x.dtype == torch.float64 else x.float()
    plain, exact = eager(given, scale), eager(x.double(), scale)
    unit = torch.finfo(given.dtype).eps
    for a, e, d in zip(got, plain, exact, strict=True):
        fine = e.isfinite()
        assert torch.equal(a.isfinite(), fine), f"{a}\n{e}"
        torch.testing.assert_close(a[~fine], e[~fine], equal_nan=True)
        a, e, d = (t[fine].double() for t in (a, e, d))
        error = (e - d).abs().max().item() if len(e) else 0.0
        scale_of = given.shape[-1] ** 0.5 * d.abs().clamp(min=1) * unit
        assert ((a - d).abs() <= 2 * error + 4 * scale_of).all(), f"{a}\n{e}\n{d}"


SPECIAL = {
    "masked": lambda x: x[..., ::3].fill_(-math.inf),
    "all masked": lambda x: x.fill_(-math.inf),
    "but one": lambda x: x[..., :-1].fill_(-math.inf),
    "first masked": lambda x: x[..., : x.shape[-1] // 2].fill_(-math.inf),
    "inf": lambda x: x[..., x.shape[-1] // 2].fill_(math.inf),
    "inf among masked": lambda x: (x.fill_(-math.inf), x[..., -1].fill_(math.inf)),
    "all inf": lambda x: x.fill_(math.inf),
    "nan": lambda x: x[..., 0].fill_(math.nan),
    "nan and inf": lambda x: (x[..., 0].fill_(math.inf), x[..., -1].fill_(math.nan)),
    "zeros": lambda x: (x.fill_(0.0), x[..., ::2].fill_(-0.0)),
    "rising": lambda x: x.copy_(torch.arange(x.shape[-1]) * 2.0),
    "falling": lambda x: x.copy_(torch.arange(x.shape[-1]) * -2.0),
    "far apart": lambda x: x.mul_(1e3),
}


@SETTINGS
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    dtype=st.sampled_from(["f32", "bf16", "f16", "f64"]),
    cols=st.integers(1, 64),
    special=st.lists(st.sampled_from(sorted(SPECIAL)), max_size=5),
    scale=st.sampled_from([1.0, 0.7, -1.5]),
    apart=st.booleans(),
    store=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_as_in_eager(
    name: str, dtype: str, cols: int, special: list[str], scale: float, apart: bool, store: bool, seed: int
) -> None:
    rows, stride = 6, cols + 3 if apart else cols
    torch.manual_seed(seed)
    x = (torch.randn(rows, stride, dtype=torch.float64) * 4).to(to_torch(dtype))
    for row, what in zip(x, special, strict=False):
        SPECIAL[what](row[:cols])
    wide = torch.float64 if dtype == "f64" else torch.float32
    out = [torch.empty(rows, dtype=wide) for _ in range(4)]
    more = [torch.empty(rows, cols, dtype=wide)] if store else []
    k = losses(rows, cols, dtype, scale, stride, store)
    SimulatedLauncher(k, emit(k, CONFIGS[name]))([x, *out, *more])
    near(out, x[:, :cols], scale)
    if store:
        torch.testing.assert_close(more[0], x[:, :cols].to(wide) * scale, equal_nan=True)


def test_two_sums_and_a_maximum_take_one_pass() -> None:
    k = losses(9, 50)
    assert {t.guarded for t in totals(k).values()} == {True, False} and len(pairs(k)) == 1
    assert passes(k, totals(k)) == 2 and passes(k) == 3
    text = emit(k, CONFIGS["in steps of lanes"]).text
    assert text.count("for start") == 2 and text.count("fw.online_lanes(") == 1 and text.count("fw.reduce_online(") == 1
    assert text.count("fw.lanes_sum(") == 2, "the plain sum and the entropy"


def test_a_held_row_has_one_sum_where_another_differs_for_infinite_maxima_alone() -> None:
    text = emit(losses(9, 50), CONFIGS["held"]).text
    assert text.count("fw.guarded(") == 1 and "fw.reduce_sum2" not in text


def later(buffer: str) -> Kernel:
    """exp(x - max) after x, or another tensor, was overwritten in the pass of the maximum."""
    b = Builder("later", p=[5], r=[40])
    x, out = b.inout("x", "f32"), b.output("out", "f32")
    other = {"x": x, "other": b.output("other", "f32")}[buffer]
    i, j = b.axes
    v = b.load(x, i * 40 + j)
    top = b.reduce("max", v)
    b.store(other, i * 40 + j, v * 0.5)
    again = b.load(x, i * 40 + j)
    b.store(out, i, b.reduce("sum", b.op("exp", again - top)))
    return b.build()


@pytest.mark.parametrize("buffer", ["x", "other"])
def test_a_row_that_is_overwritten_before_its_sum_has_two_passes(buffer: str) -> None:
    k = later(buffer)
    assert bool(totals(k)) == (buffer == "other")
    x = torch.randn(5, 40)
    want = [x.clone(), torch.empty(5), torch.empty(5, 40)]
    interpret(k, want)
    got = [x.clone(), torch.empty(5), torch.empty(5, 40)]
    SimulatedLauncher(k, emit(k, CONFIGS["in steps of lanes"]))(got)
    torch.testing.assert_close(got[:2], want[:2])


def picked(rows: int, cols: int, dtype: str = "bf16") -> Kernel:
    """Cross entropy in training: maximum and logarithm of the sum are saved."""
    b = Builder("picked", p=[rows], r=[cols])
    x, top, log = b.input("x", dtype), b.output("top", "f32"), b.output("log", "f32")
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    most = b.reduce("max", v)
    b.store(top, i, most)
    b.store(log, i, b.op("log", b.reduce("sum", b.op("exp", v - most))))
    return b.build()


def divergence(rows: int, cols: int, dtype: str = "bf16") -> Kernel:
    """The divergence of two rows of logits."""
    b = Builder("divergence", p=[rows], r=[cols])
    buffers, out = [b.input(n, dtype) for n in ("x", "y")], b.output("out", "f32")
    i, j = b.axes
    logs = []
    for buffer in buffers:
        v = b.load(buffer, i * cols + j).to("f32")
        less = v - b.reduce("max", v)
        logs.append(less - b.op("log", b.reduce("sum", b.op("exp", less))))
    b.store(out, i, b.reduce("sum", b.op("exp", logs[0]) * (logs[0] - logs[1])))
    return b.build()


def test_rows_that_one_pass_is_enough_for_are_not_held() -> None:
    """One program of 1024 threads fills a multiprocessor, which then loads or adds up, never both."""
    assert not choose(picked(4096, 32000), H100).persistent
    assert choose(picked(4096, 16000), H100).persistent, "two programs to a multiprocessor"
    assert emit(picked(4096, 32000), choose(picked(4096, 32000), H100)).text.count("for start") == 1


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_rows_are_held_as_long_as_registers_hold_what_is_computed(dtype: str) -> None:
    """Divergences of two rows of 32000 spilled 784 bytes a thread."""
    k = divergence(2048, 32000, dtype)
    assert kept(k) == 2 and not choose(k, H100).persistent
    assert choose(divergence(2048, 16000, dtype), H100).persistent
    one = softmax(2048, 32000, dtype)
    assert kept(one) == 1 and choose(one, H100).persistent, "read and written once"


def test_lanes_combine_what_they_hold_of_a_step() -> None:
    for k in (picked(4096, 32000), softmax(1024, 128256, "bf16"), softmax(symbol("n"), symbol("m")), softmax(2, 1 << 20)):
        c = choose(k, H100)
        assert not c.persistent and c.each * 32 * c.warps == c.row
    wide = choose(softmax(1024, 128256, "bf16"), target.AMD["gfx942"])
    assert wide.each * 64 * wide.warps == wide.row
    assert replace(wide, each=1) != wide, "the cache on disk tells them apart"


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("cols", [16385, 20011, 32768])
def test_a_vocabulary_as_the_target_runs_it(dtype: str, cols: int) -> None:
    k = divergence(3, cols, dtype)
    x, y = ((torch.randn(3, cols) * 3).to(to_torch(dtype)) for _ in range(2))
    x[1, ::2] = -math.inf
    y[1, ::2] = -math.inf
    out = torch.empty(3)
    assert not choose(k, H100).persistent
    simulate(k, [x, y, out], target=H100)
    p, q = x.double().log_softmax(-1), y.double().log_softmax(-1)
    p32, q32 = x.float().log_softmax(-1), y.float().log_softmax(-1)
    want, plain = (p.exp() * (p - q)).sum(-1), (p32.exp() * (p32 - q32)).sum(-1)
    assert torch.equal(out.isnan(), want.isnan())
    error = (plain.double() - want)[[0, 2]].abs().max()
    assert (out.double() - want)[[0, 2]].abs().max() <= 2 * error + 1e-6 * want[[0, 2]].abs().max()


@pytest.mark.parametrize("sizes", [(3, 1), (2, 37), (1, 5000)])
def test_rows_of_symbolic_length(sizes: tuple[int, int]) -> None:
    k = softmax(symbol("n"), symbol("m"))
    x, out = torch.randn(sizes) * 5, torch.empty(sizes)
    simulate(k, [x, out], sizes, target=H100)
    torch.testing.assert_close(out, x.softmax(-1))


BY = "fw.divide_by("


@pytest.mark.parametrize(("divisor", "text"), [(0.9, BY), (-3.0, BY), (0.5, " * "), (1e-38, "fw.divide(")])
def test_quotients_by_constants_are_two_corrected_products(divisor: float, text: str) -> None:
    b = Builder("divide", p=[64])
    x, out = b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, i) / divisor)
    k = b.build()
    assert text in emit(k, choose(k, H100)).text
    given, got = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3e38, 7.0] * 8), torch.empty(64)
    simulate(k, [given, got], target=H100)
    assert torch.equal(got.nan_to_num(), (given / divisor).nan_to_num())
    assert torch.equal(got.signbit()[:2], (given / divisor).signbit()[:2])


def test_quotients_by_the_sum_of_a_softmax_need_its_reciprocal_once() -> None:
    text = emit(softmax(64, 300), choose(softmax(64, 300), H100)).text
    assert BY in text and "fw.divide(" not in text


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_over_a_vocabulary_in_training(dtype: torch.dtype) -> None:
    """Some classes are masked, one label is ignored."""
    torch.manual_seed(0)
    x, y = (torch.randn(3, 20011) * 3).to(dtype), torch.tensor([5, -100, 20010])
    x[:, 7::11] = -math.inf

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = x.to(torch.promote_types(x.dtype, torch.float32)) / 0.9
        squares = logits.logsumexp(-1).pow(2).mean()
        entropy = torch.distributions.Categorical(logits=logits.detach().clamp(min=-1e4)).entropy().mean()
        return torch.nn.functional.cross_entropy(logits, y) + 1e-2 * squares + entropy

    compiled = torch.compile(loss, backend="nvidia_triton", options={"simulate": True, "strict": True, "cache": False})
    found = []
    for f, logits in ((compiled, x), (loss, x), (loss, x.double())):
        leaf = logits.clone().requires_grad_()
        value = f(leaf, y)
        value.backward()
        found.append((value.detach().double(), leaf.grad.double()))
    for ours, plain, exact in zip(*found, strict=True):
        error = (plain - exact).abs().max()
        assert (ours - exact).abs().max() <= 2 * error + 4 * torch.finfo(torch.float32).eps * exact.abs().max()
