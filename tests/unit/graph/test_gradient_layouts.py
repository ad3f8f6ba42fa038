"""Gradients of channels-last convolutions: a kernel lays them so, where a library would copy them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph.canonicalize import canonicalize

LAST = torch.channels_last


def gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten.convolution_backward(g * 2, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
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
    copies = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert [n.kwargs for n in copies] == ([{"memory_format": LAST}] if image is LAST and gradient is not LAST else [])
    for ours, eagers in zip(traced(g, x, w), gradients(g, x, w), strict=True):
        torch.testing.assert_close(ours, eagers)
        assert ours.stride() == eagers.stride()
