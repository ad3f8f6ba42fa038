"""fp32 products and convolutions multiplied in bf16: their results, and that the setting does not leak."""

from __future__ import annotations

import threading

import pytest
import torch

from fusewright import machine
from fusewright.errors import OptionError
from fusewright_acl import fpmath, products
from fusewright_acl.backend import GravitonAcl
from fusewright_cpu.target import aarch64_target
from tests.backends.acl.common import F32, channels_last, compiled
from tests.fragments import Sketch, targets

HERE = machine.arch() == "aarch64"


def settings() -> list[str]:
    mkldnn = torch.backends.mkldnn
    return [mkldnn.matmul.fp32_precision, mkldnn.conv.fp32_precision]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """The error relative to the largest result."""
    return float((ours.double() - exact).abs().max() / exact.abs().max())


def bf16(t: torch.Tensor) -> torch.Tensor:
    return t.bfloat16().double()


def test_a_linear_with_its_bias_and_activation() -> None:
    torch.manual_seed(0)
    g = Sketch()
    x, w, b = g.input(torch.randn(4, 16, 64)), g.input(torch.randn(48, 64), const=True), g.input(torch.randn(48), const=True)
    y = g.op("gelu", g.op("linear", x, w, b))
    fragment = compiled(g, [y], fpmath="bf16")
    assert targets(fragment) == ["fusewright_acl::linear_bf16", "kernel gelu"], "the kernel adds the bias"
    (ours,) = g.run(fragment, [y])
    tx, tw, tb = (g.tensors[v.id] for v in (x, w, b))
    rounded = torch.nn.functional.gelu(bf16(tx) @ bf16(tw).t() + tb.double())
    exact = torch.nn.functional.gelu(tx.double() @ tw.double().t() + tb.double())
    assert ours.dtype is F32 and error(ours, exact) < 1e-2
    assert not HERE or error(ours, rounded) < 1e-5 < error(ours, exact)


@pytest.mark.parametrize(("shape", "bias"), [((4, 16, 64), True), ((1, 64), False), ((37, 64), True)])
def test_a_weight_is_packed_once_for_our_kernel(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HERE:
        monkeypatch.setattr(products, "host_target", lambda: aarch64_target("neoverse-v1"))
    torch.manual_seed(0)
    g = Sketch()
    x, w = g.input(torch.randn(shape)), g.input(torch.randn(45, 64), const=True)
    y = g.op("linear", x, w, g.input(torch.randn(45), const=True) if bias else None)
    fragment = compiled(g, [y], "bf16_packed", fpmath="bf16")
    assert targets(fragment) == [f"kernel bf16_linear{'_bias' if bias else ''}"]
    assert targets(fragment, prepare=True)[0] == "fusewright_acl::pack_bf16"
    if HERE:
        (ours,) = g.run(fragment, [y])
        shift = g.tensors[y.id].double() - g.tensors[x.id].double() @ g.tensors[w.id].double().t()  # the bias
        assert error(ours, bf16(g.tensors[x.id]) @ bf16(g.tensors[w.id]).t() + shift) < 1e-5


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal: bool) -> None:
    torch.manual_seed(0)
    g = Sketch()
    q, k, v = (g.input(torch.randn(2, 3, 40, 16)) for _ in range(3))
    y = g.op("sdpa", q, k, v, None, 0.0, causal)
    fragment = compiled(g, [y], fpmath="bf16")
    assert targets(fragment) == ["fusewright_acl::sdpa_bf16"]
    (ours,) = g.run(fragment, [y])
    exact = torch.nn.functional.scaled_dot_product_attention(*(g.tensors[i.id].double() for i in (q, k, v)), is_causal=causal)
    assert ours.dtype is F32 and (1e-5 if HERE else 0) <= error(ours, exact) < 2e-2
    assert "sdpa_bf16" not in str(targets(compiled(g, [y], "fp32", fpmath="bf16")))


def test_products_of_batches_and_matrices() -> None:
    torch.manual_seed(0)
    g = Sketch()
    x, y, w = g.input(torch.randn(3, 9, 16)), g.input(torch.randn(3, 16, 12)), g.input(torch.randn(12, 8))
    z = g.op("bmm", x, y)
    flat = g.op("mm", g.op("view", z, [27, 12]), w)
    fragment = compiled(g, [z, flat], fpmath="bf16")
    assert [t for t in targets(fragment) if "fusewright_acl" in t] == ["fusewright_acl::bmm_bf16", "fusewright_acl::linear_bf16"]
    ours, _ = g.run(fragment, [z, flat])
    exact = bf16(g.tensors[x.id]) @ bf16(g.tensors[y.id])
    assert error(ours, exact) < (1e-5 if HERE else 1e-2)


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_with_its_batch_norm(kernel: int) -> None:
    torch.manual_seed(0)
    g = Sketch()
    x = g.input(channels_last(torch.randn(2, 16, 9, 7)))
    w, b = g.input(torch.randn(32, 16, kernel, kernel) / 8, const=True), g.input(torch.randn(32), const=True)
    stats = [g.input(torch.rand(32) + 0.5, const=True) for _ in range(4)]
    y = g.op("conv", x, w, b, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    z = g.op("relu", g.op("batch_norm", y, *stats, 0.1, 1e-5))
    fragment = compiled(g, [z], fpmath="bf16")
    assert targets(fragment) == ["fusewright_acl::conv_bf16", "kernel relu"]
    (ours,) = g.run(fragment, [z])
    assert ours.dtype is F32 and error(ours, g.tensors[z.id].double()) < 2e-2


def test_narrow_products_and_bf16_stay_as_they_are() -> None:
    g = Sketch()
    x, w = g.input(torch.randn(4, 3)), g.input(torch.randn(16, 3), const=True)
    assert targets(compiled(g, [g.op("linear", x, w)], fpmath="bf16")) == ["aten::linear"]
    half = Sketch()
    x, w = half.input(torch.randn(4, 32).bfloat16()), half.input(torch.randn(16, 32).bfloat16())
    assert targets(compiled(half, [half.op("linear", x, w)], fpmath="bf16")) == ["aten::linear"]


def test_nothing_of_the_setting_stays_behind() -> None:
    before = settings()
    with fpmath.bf16_products():
        assert settings() == ["bf16", "bf16"]
        with fpmath.bf16_products():
            pass
        assert settings() == ["bf16", "bf16"]
    assert settings() == before
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size"):
        torch.ops.fusewright_acl.linear_bf16(torch.randn(4, 8), torch.randn(4, 9))
    assert settings() == before


def test_threads_share_it_and_the_last_one_puts_it_back() -> None:
    before, x, w = settings(), torch.randn(16, 32), torch.randn(8, 32)
    wanted = torch.ops.fusewright_acl.linear_bf16(x, w)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(50):
            if not torch.equal(torch.ops.fusewright_acl.linear_bf16(x, w), wanted):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and settings() == before


def test_an_unknown_precision_is_an_error_that_names_the_others() -> None:
    with pytest.raises(OptionError, match=r"'fp8'.*fp32, bf16"):
        GravitonAcl(None, {"fpmath": "fp8"})
