"""Constant fills: rewrite `full_like(x, v)`, `fill(x, v)` and `x.new_full(size, v)` to `full(size, v)`, which neither waits for
`x` nor keeps it alive, compute the host's scalars ahead, and turn numbers into tensors for ops that have no other tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.constants import is_repeatable
from fusewright.graph.effects import exposed
from fusewright.graph.refused import refusal
from fusewright.graph.retrace import fake_like
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_op
from fusewright.interface import HOST

LIKE = {"full_like": 1, "new_full": 2, "fill": 1}
"""Row of the opset -> position of the value."""


def size_fills(graph: Graph) -> None:
    """Rewrite an ATen graph in place, where sizes are static and the result is contiguous.

    This matters most before a joint graph is cut in two: a fill need not be saved for backward.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and compat.is_overload(node.target):
            _size_fill(graph, node)


def _size_fill(graph: Graph, node: Node) -> None:
    row, val = ops.row_of(node.target), node.meta.get("val")
    if row is None or row.name not in LIKE or not isinstance(val, torch.Tensor):
        return
    found = ops.canonical(node.target, node.args, node.kwargs)
    if found is None:
        return
    if not all(isinstance(s, int) for s in val.shape) or val.layout != torch.strided or not val.is_contiguous():
        return
    if refusal(node.target, *torch.fx.node.map_arg((node.args, dict(node.kwargs)), value_of), val) is not None:
        return
    _, args, _ = found
    _fill(graph, node, args[LIKE[row.name]])


def _fill(graph: Graph, node: Node, number: Any) -> None:
    """Replace a node by a fill of its shape and dtype."""
    full = full_before(graph, node, number, node.meta["val"])
    full.meta.update(node.meta)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def full_before(graph: Graph, before: Node, number: Any, like: torch.Tensor, device: torch.device | None = None) -> Node:
    """Insert a fill of the shape and dtype of `like`, on its device unless another is given; the caller adds the metadata."""
    options: dict[str, Any] = {
        "dtype": like.dtype, "layout": like.layout, "device": device or like.device, "pin_memory": False,
    }  # fmt: skip
    with graph.inserting_before(before):
        return graph.call_function(torch.ops.aten.full.default, (list(like.shape), number), options)


SCALARS = (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of scalars that are computed ahead."""
ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
"""Rows that take a number in place of the second operand. Eager's kernels read a 0-dim tensor of the host as they read a number,
in the precision in which they compute: on a GPU, a division by either multiplies by its reciprocal."""
SELECTIONS = frozenset({"where", "maximum", "minimum"})
"""Rows that round a 0-dim operand to their own dtype, so that its device does not matter."""


def host_scalars(graph: Graph) -> None:
    """Rewrite an ATen graph in place: 0-dim tensors that the host computes from literals alone, as in
    `x / torch.tensor(64.0).sqrt()`, become numbers of the ops that read them, where eager computes the same, or else fills.

    A graph of another device cannot be replayed with a tensor of the host, and in training it would be saved for backward.
    """
    with torch.no_grad(), compat.without_modes(), compat.disable_autocast():
        _host_scalars(graph)


def _host_scalars(graph: Graph) -> None:
    seen = exposed(graph)
    known: dict[Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        value = None if node in seen else _computed(node, known)
        if value is not None:
            known[node] = value
        elif is_op(node) and any(n in known for n in node.all_input_nodes):
            _take_scalars(graph, node, known)
    for node, value in reversed(known.items()):
        if not node.users:
            graph.erase_node(node)
        elif node.all_input_nodes:
            _fill(graph, node, value.item())


def _computed(node: Node, known: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a 0-dim tensor of the host, by eager's own call, if it depends on known ones alone and is a number."""
    val = value_of(node)
    if not isinstance(val, torch.Tensor) or val.dim() or val.device.type != HOST or val.dtype not in SCALARS:
        return None
    if compat.is_literal(node):
        value = getattr(node.graph.owning_module, str(node.target))
    elif is_op(node) and is_repeatable(node) and all(n in known for n in node.all_input_nodes):
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
        try:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError:  # an integer division by zero: eager raises it at the call
            return None
    else:
        return None
    real = not compat.is_fake(value) and value.dtype == val.dtype and value.device.type == HOST
    return value if real and not math.isnan(value) else None


def _take_scalars(graph: Graph, node: Node, known: Mapping[Node, torch.Tensor]) -> None:
    """Replace known operands of a node by numbers, or on another device by fills, where eager computes the same."""
    row, val = ops.find(node.target), value_of(node)
    if row is None or row.target is not node.target or not isinstance(val, torch.Tensor):
        return
    if row.name == "cast" and not val.dim():
        source = known[node.all_input_nodes[0]]
        if val.dtype in SCALARS and (val.dtype.is_floating_point or not source.is_floating_point()):
            _fill(graph, node, source.to(val.dtype).item())
    elif row.name in ARITHMETIC:
        x, other = node.args[:2]
        if x in known and (row.name == "mul" or (row.name == "add" and node.kwargs.get("alpha", 1) == 1)):
            x, other = other, x
        if isinstance(x, Node) and isinstance(other, Node) and x not in known and other in known:
            number = known[other].item()
            node.args = (x, number) if _promotes_alike(x, other, number) else node.args
    elif row.name == "masked_fill_tensor":  # eager, too, reads the value as a number
        x, mask, value = node.args
        if isinstance(value, Node) and value in known:
            node.target, node.args = ops.OPS["masked_fill"].target, (x, mask, known[value].item())
    elif row.name in SELECTIONS:
        for scalar in [n for n in node.all_input_nodes if n in known and known[n].device != val.device]:
            full = full_before(graph, node, known[scalar].item(), known[scalar], val.device)
            full.meta.update(node.meta, val=fake_like(value_of(scalar), device=val.device))
            node.replace_input_with(scalar, full)


def _promotes_alike(x: Node, scalar: Node, number: bool | int | float) -> bool:
    """Whether an op computes in the same dtype with a number as with a 0-dim tensor, and an integer fits in it."""
    dtype = torch.result_type(value_of(x), value_of(scalar))
    if isinstance(number, bool) or dtype != torch.result_type(value_of(x), number):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The types of numbers that operators take for tensors: all of their digits are kept, unless the operator promotes them."""


def _number_type(given: bool | int | float | complex, result: torch.Tensor, node: Node) -> torch.dtype:
    """Eager promotes operands that all are numbers to the default float, in which its result then is."""
    kept = _NUMBERS[type(given)]
    if not isinstance(given, float | complex) or "dtype" in node.kwargs or result.dtype == kept:
        return kept
    if result.dtype.is_complex and isinstance(given, float):
        return result.dtype.to_real()
    return result.dtype if result.dtype.is_floating_point or result.dtype.is_complex else kept


def number_fills(graph: Graph) -> None:
    """Rewrite `_to_copy(2, dtype=...)`, as torch.func's vmap emits for a number, to take a 0-dim tensor; `_conj(0.8j)`, as the
    gradient of a complex product has, to be one, which is traced without the mark of a conjugate that eager's has."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not compat.is_overload(node.target) or not isinstance(val, torch.Tensor):
            continue
        if not any(isinstance(n.meta.get("val"), torch.Tensor | tuple | list) for n in node.all_input_nodes):
            formals = node.target._schema.arguments
            if node.target is torch.ops.aten._conj.default and isinstance(node.args[0], complex):
                node.replace_all_uses_with(_filled(graph, node, formals[0], node.args[0].conjugate()))
                graph.erase_node(node)
                continue
            node.args = tuple(_filled(graph, node, f, a) for f, a in zip(formals, node.args, strict=False))


def _filled(graph: Graph, node: Node, formal: Any, given: Any) -> Any:
    if str(formal.type) != "Tensor" or not isinstance(given, bool | int | float | complex):
        return given
    val = node.meta["val"]
    options: dict[str, Any] = {"dtype": _number_type(given, val, node), "device": torch.device(HOST), "pin_memory": False}
    with graph.inserting_before(node):
        full = graph.call_function(torch.ops.aten.full.default, ([], given), options)
    with compat.fake_mode_of(val):
        full.meta.update(node.meta, val=torch.full([], given, dtype=options["dtype"]))
    return full
