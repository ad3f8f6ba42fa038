"""Rows that are passed over in steps: outputs in the memory of inputs that a later pass reads again."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright_triton.emit import schedule
from fusewright_triton.emit.deferred import deferred
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.target import NVIDIA
from tests.backends.triton.kernels import reference, simulate

H200 = NVIDIA["sm_90"]


def gradient(columns: int, rows: int) -> Kernel:
    """The gradient of a batch norm over channels-last images and a relu, of two gradients whose sum is stored too."""
    b = Builder("gradient", p=[columns], r=[rows])
    x, g, h, r = (b.input(name, "bf16") for name in ("x", "g", "h", "r"))
    y, z, bias = b.output("y", "bf16"), b.output("z", "bf16"), b.output("bias", "f32")
    i, j = b.axes
    at = j * columns + i
    image, positive = b.load(x, at).to("f32"), b.load(r, at).to("f32") > 0.0
    inner = b.where(positive, b.load(g, at).to("f32") + b.load(h, at).to("f32"), 0.0)
    b.store(y, at, inner.to("bf16"))
    b.store(bias, i, b.reduce("sum", inner))
    b.store(z, at, (inner - b.reduce("mean", inner) - image * b.reduce("mean", inner * image)).to("bf16"))
    return b.build()


@pytest.mark.parametrize("over", ["g", "h", "r"])
@pytest.mark.parametrize("rows", [1000, 6272])
def test_an_output_takes_the_memory_of_an_input_that_is_read_again(rows: int, over: str) -> None:
    k, columns = gradient(32, rows), 32
    buffers = [b.name for b in k.buffers]
    y, source = buffers.index("y"), buffers.index(over)
    assert not schedule.choose(k, H200).persistent and k.may_share(y, source) and not k.may_share(y, 0)
    ts = [torch.randn(rows * columns).bfloat16() for _ in range(6)] + [torch.zeros(columns)]
    want = reference(k, ts)
    ts[y] = ts[source]
    simulate(k, ts, target=H200)
    torch.testing.assert_close(ts[y:], want[y:], rtol=1e-2, atol=2e-3)


def again(reverse: bool = False) -> Kernel:
    """Rows are replaced by twice their exponential, and stored elsewhere as shares of its sum."""
    n = symbol("n")
    b = Builder("again", p=[2], r=[n], symbols={"n": 50000})
    x, y = b.inout("x", "f32"), b.output("y", "f32")
    i, j = b.axes
    e = b.op("exp", b.op("tanh", b.load(x, i * n + (n - 1 - j if reverse else j))))
    b.store(x, i * n + j, e * 2.0)
    b.store(y, i * n + j, e / b.reduce("sum", e))
    return b.build()


def test_a_buffer_that_is_updated_in_place_is_read_first() -> None:
    k, n = again(), 50000
    ts = [torch.randn(2 * n), torch.zeros(2 * n)]
    want = reference(k, ts, [n])
    simulate(k, ts, [n], target=H200)
    torch.testing.assert_close(ts, want)


def test_a_row_that_is_held_is_stored_as_soon_as_it_is_known() -> None:
    k = gradient(32, 64)
    config = schedule.choose(k, H200)
    assert config.persistent and deferred(k) != k
    text = emit(k, config).text
    assert text.count("tl.load(") == 4


def test_another_element_that_was_overwritten_is_refused() -> None:
    k = again(reverse=True)
    with pytest.raises(Unsupported, match="needed again after it was overwritten"):
        emit(k, schedule.choose(k, H200))
