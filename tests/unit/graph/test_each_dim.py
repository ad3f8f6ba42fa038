"""Numbers that a convolution takes for all dims are written out: lowerings see one for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusewright.graph.canonicalize import canonicalize

aten = torch.ops.aten
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
