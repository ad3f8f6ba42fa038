"""Gradients that torch traces element by element, as one scan.

Eager's gradient of a running product divides by its operand where that has no zeros. A trace cannot know that, and computes each
element by operations of its own: 192 samples along a ray took 17 times eager's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusewright.graph.effects import transforms
from fusewright.ops.semantics.recurrence import linear_scan_op


class _RunningProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        out = torch.cumprod(x, dim)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product of what is before, times d[t] = grad[t] + x[t + 1] * d[t + 1]: no division, so right with zeros."""
        (x, out), dim = ctx.saved_tensors, ctx.dim
        steps, one_before = x.shape[dim], [0, 0] * (x.dim() - 1 - dim) + [1, 0]
        later = torch.nn.functional.pad(x.narrow(dim, 1, steps - 1).flip([dim]), one_before)  # the first is not used
        d = linear_scan_op(later, grad.flip([dim]), None, dim).flip([dim])
        before = torch.nn.functional.pad(out.narrow(dim, 0, steps - 1), one_before, value=1.0)
        return before * d, None


def running_product(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """`torch.cumprod` of a type, with a gradient of a few operations."""
    found: torch.Tensor = _RunningProduct.apply(x.to(dtype), dim)
    return found


def simplify(gm: GraphModule) -> None:
    """Replace running products of a training step."""
    found = [n for n in gm.graph.nodes if _is_product(n)]
    if not found or any(map(transforms, gm.graph.nodes)):
        return
    for n in found:
        x, out = n.args[0], n.meta["example_value"]
        dim = n.args[1] if len(n.args) > 1 else n.kwargs["dim"]
        with gm.graph.inserting_before(n):
            new = gm.graph.call_function(running_product, (x, dim % out.dim(), out.dtype))
        new.meta = dict(n.meta)
        n.replace_all_uses_with(new)
        gm.graph.erase_node(n)
    gm.recompile()


def _is_product(n: Node) -> bool:
    """Whether a node is a running product of several real numbers that needs a gradient."""
    if n.target is not torch.cumprod and (n.op, n.target) != ("call_method", "cumprod"):
        return False
    x = n.meta.get("example_value")
    dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
    if not isinstance(x, torch.Tensor) or not isinstance(dim, int) or not n.args or "out" in n.kwargs:
        return False
    several = x.dim() > 0 and isinstance(x.shape[dim], int) and x.shape[dim] > 1
    return several and x.requires_grad and x.is_floating_point()
