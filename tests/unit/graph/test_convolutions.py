"""Convolutions of a canonical graph: numbers that they take for all dims are written out, and gradients lie as their images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusewright.graph.canonicalize import canonicalize

aten = torch.ops.aten
LAST = torch.channels_last
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "valid": lambda x, w: F.conv2d(x, w, stride=2, padding="valid"),
    "same": lambda x, w: F.conv2d(x, w, padding="same"),
    "one for all": lambda x, w: torch.convolution(x, w, None, [2], [1], [1], False, [0], 1),
    "transposed": lambda x, w: torch.convolution(x, w.transpose(0, 1), None, [2], [1], [1], True, [1], 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_convolution_and_its_gradients(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)

    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = call(x.requires_grad_(), w.requires_grad_())
        return (y.detach(), *torch.autograd.grad(y.square().sum(), (x, w)))

    gm = make_fx(gradients, tracing_mode="fake")(x, w)
    assert not canonicalize(gm.graph)
    convolutions = [n for n in gm.graph.nodes if n.target in (aten.convolution.default, aten.convolution_backward.default)]
    assert len(convolutions) == 2
    for n in convolutions:
        given = dict(zip((a.name for a in n.target._schema.arguments), n.args, strict=True))
        assert {len(given[name]) for name in ("stride", "padding", "dilation", "output_padding")} == {2}
    gm.recompile()
    torch.testing.assert_close(gm(x.detach(), w.detach()), gradients(x, w))


def gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    found = aten.convolution_backward(g * 2, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    return found[0], found[1]


@pytest.mark.parametrize("image", [LAST, torch.contiguous_format])
@pytest.mark.parametrize("gradient", [LAST, torch.contiguous_format])
def test_a_gradient_is_copied_to_the_layout_of_a_channels_last_image(
    image: torch.memory_format, gradient: torch.memory_format
) -> None:
    x, w = torch.randn(2, 3, 6, 5).contiguous(memory_format=image), torch.randn(4, 3, 3, 3)
    g = torch.randn(2, 4, 4, 3).contiguous(memory_format=gradient)
    traced = make_fx(gradients, tracing_mode="fake")(g, x, w)
    canonicalize(traced.graph)
    traced.graph.lint()
    traced.recompile()
    copies = traced.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert [n.kwargs for n in copies] == ([{"memory_format": LAST}] if image is LAST and gradient is not LAST else [])
    for ours, eagers in zip(traced(g, x, w), gradients(g, x, w), strict=True):
        torch.testing.assert_close(ours, eagers)
        assert ours.stride() == eagers.stride()
