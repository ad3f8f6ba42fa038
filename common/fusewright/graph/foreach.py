"""Calls of optimizers: `_foreach_` calls, which update all parameters at once, become one call per tensor, and products that are
added in one primitive become two calls.

Kernels then make one pass over each parameter and its state; eager makes one pass over all parameters for each step of the
formula.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph import retrace

PREFIX = "aten::_foreach_"

UNARY = ("neg", "sqrt", "rsqrt", "reciprocal", "exp", "abs", "sign")
BINARY = ("add", "sub", "mul", "div")

SINGLE: Mapping[str, str] = {
    **{f"{name}.default": f"{name}.default" for name in UNARY},
    **{f"{name}.{kind}": f"{name}.Scalar" for name in BINARY for kind in ("Scalar", "ScalarList")},
    **{f"{name}.{kind}": f"{name}.Tensor" for name in BINARY for kind in ("List", "Tensor")},
    **{f"{name}.{kind}": f"{name}.default" for name in ("addcmul", "addcdiv") for kind in ("Scalar", "ScalarList")},
    **{f"pow.{kind}": "pow.Tensor_Scalar" for kind in ("Scalar", "ScalarList")},
    "pow.List": "pow.Tensor_Tensor",
    "pow.ScalarAndTensor": "pow.Scalar",
    "lerp.Scalar": "lerp.Scalar",
    "lerp.List": "lerp.Tensor",
    "maximum.List": "maximum.default",
    "minimum.List": "minimum.default",
}
"""List calls -> single-tensor calls with the same arguments, each list replaced by its element."""


def single(graph: Graph) -> None:
    """Rewrite calls whose results are only read element by element; leave others."""
    for node in list(graph.nodes):
        target = _single(node)
        if target is None or any(u.target is not operator.getitem for u in node.users):
            continue
        given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
        for user in list(node.users):
            user.args, user.kwargs = _of_element(given, target, user.args[1])
            user.target = target
        graph.erase_node(node)


def products_and_sums(graph: Graph) -> None:
    """Rewrite `prims.fma`, which eager computes in Python, as what it computes there. Dynamo writes `addcmul_` and `addcdiv_` with
    a value, and `add_` with a tensor `alpha`, in this way."""
    fma = getattr(torch.ops.prims, "fma", None)
    for node in graph.find_nodes(op="call_function", target=fma.default) if fma is not None else ():
        a, b, c = node.args
        a, b = (a, b) if isinstance(a, Node) else (b, a)  # one of the two is a tensor
        with graph.inserting_before(node):
            product = graph.call_function(torch.ops.aten.mul.Tensor, (a, b))
        product.meta.update(node.meta, val=retrace.infer(product))
        node.target, node.args = torch.ops.aten.add.Tensor, (product, c)


def _single(node: Node) -> Any:
    """The overload for one tensor, or None."""
    target: Any = node.target
    if node.op != "call_function" or not compat.is_overload(target) or not target.name().startswith(PREFIX):
        return None
    found = SINGLE.get(target.__name__.removeprefix("_foreach_"))
    if found is None:
        return None
    packet, overload = found.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _of_element(given: Mapping[str, Any], target: Any, k: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for the k-th tensor: positional, except those that `target` takes by keyword only."""
    named = {a.name for a in target._schema.arguments if a.kwarg_only}
    args, kwargs = [], {}
    for name, v in given.items():
        element = v[k] if isinstance(v, list | tuple) else v
        name = "value" if name == "scalars" and "value" in named else name
        if name in named:
            kwargs[name] = element
        else:
            args.append(element)
    return tuple(args), kwargs
