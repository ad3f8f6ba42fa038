"""Sizes of products in a training step for which libraries have fast kernels: zeros behind rows of odd length, in the joint graph,
so that what the gradients read is saved with its zeros.

The kernel that makes an operand writes them, once for the product and both of its gradients. They are behind both operands, so
that they add nothing whatever these hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fusewright import _torch_compat as compat
from fusewright.graph.retrace import called
from fusewright.graph.view import dependents

aten = torch.ops.aten

Multiple = Callable[[torch.dtype, int, int, int], int]
"""(type, M, K, N) of a product -> what the lengths of rows should be multiples of (see `DevicePolicy.multiple`)."""

_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Products, and the position of their first factor."""

_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)

_MASKED = (aten.hardtanh_backward.default, aten.threshold_backward.default, aten.leaky_relu_backward.default)
_RESHAPES = (aten.view.default, aten.alias.default, aten.detach.default)


def pad_products(graph: Graph, multiple: Multiple) -> None:
    """Rewrite a joint graph in place. Results keep eager's strides."""
    padded: dict[tuple[Node, int, int], Node] = {}
    for target, at in _PRODUCTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            _pad(graph, node, at, multiple, padded)
    if padded:
        _read_padded(graph, padded)


def _pad(graph: Graph, node: Node, at: int, multiple: Multiple, padded: dict[tuple[Node, int, int], Node]) -> None:
    """Let a product read padded operands, and its readers the part of the result that they had."""
    a, b = node.args[at : at + 2]
    bias: Any = node.args[0] if at else None
    if not isinstance(a, Node) or not isinstance(b, Node) or not (_dense(a) and _dense(b)):
        return
    rows, inner, columns = _lacking(a, b, multiple)
    if not (rows or inner or columns) or (bias is not None and (bias.meta["val"].dim() != 1 or bias.meta["val"].shape[0] == 1)):
        return
    given = [_enlarged(graph, a, rows, inner, padded), _enlarged(graph, b, inner, columns, padded)]
    with graph.inserting_before(node):
        if bias is not None:
            given.insert(0, called(graph, node, aten.constant_pad_nd.default, bias, [0, columns], 0) if columns else bias)
        made = called(graph, node, node.target, *given, **node.kwargs)
        if rows:
            made = called(graph, node, aten.slice.Tensor, made, 0, 0, a.meta["val"].shape[0])
        if columns:
            made = called(graph, node, aten.slice.Tensor, made, 1, 0, b.meta["val"].shape[1])
            made = called(graph, node, aten.clone.default, made, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _dense(x: Node) -> bool:
    """Whether the elements of a matrix's rows or columns are next to each other, and these have a fixed length."""
    t = x.meta["val"]
    if t.dim() != 2:
        return False
    fixed = [n for n, s in zip(t.shape, t.stride(), strict=True) if isinstance(s, int) and s == 1]
    return bool(fixed) and isinstance(fixed[-1], int) and fixed[-1] > 0


def _by_rows(x: Node) -> bool:
    stride = x.meta["val"].stride(1)
    return isinstance(stride, int) and stride == 1


def _lacking(a: Node, b: Node, multiple: Multiple) -> tuple[int, int, int]:
    """How many rows, inner elements and columns a product lacks in the dims along which its matrices lie in memory."""
    left, right = a.meta["val"], b.meta["val"]
    (m, k), n = left.shape, right.shape[1]
    traced = [size for size in map(compat.traced_size, (m, k, n)) if size is not None]
    if len(traced) < 3 or not isinstance(n, int):
        return 0, 0, 0
    step = multiple(left.dtype, *traced)
    by_rows, by_columns = _by_rows(a), not _by_rows(b)
    return 0 if by_rows else -m % step, -k % step if by_rows or by_columns else 0, -n % step


def _enlarged(graph: Graph, x: Node, rows: int, columns: int, padded: dict[tuple[Node, int, int], Node]) -> Node:
    """A matrix with rows and columns of zeros behind its own; of a transposed one by padding what it transposes."""
    if not rows and not columns:
        return x
    x = _turned_back(x)
    if not _by_rows(x):
        with graph.inserting_after(x):
            base = x.args[0] if x.target in _TRANSPOSES else called(graph, x, aten.t.default, x)
        whole = _enlarged(graph, base, columns, rows, padded)  # type: ignore[arg-type]
        with graph.inserting_after(whole):
            return called(graph, x, aten.t.default, whole)
    key = x, rows, columns
    if key not in padded:
        with graph.inserting_after(x):
            padded[key] = called(graph, x, aten.constant_pad_nd.default, x, [0, columns, 0, rows], 0)
    return padded[key]


def _turned_back(x: Node) -> Node:
    """What a matrix is the transpose of the transpose of."""
    while x.target in _TRANSPOSES and isinstance(y := x.args[0], Node) and y.target in _TRANSPOSES:
        base: Any = y.args[0]
        if base.meta["val"].shape != x.meta["val"].shape or base.meta["val"].stride() != x.meta["val"].stride():
            break
        x = base
    return x


def _read_padded(graph: Graph, padded: dict[tuple[Node, int, int], Node]) -> None:
    """Let sums, and gradients that read which elements an activation clamped, read padded rows, so that nobody else stores them."""
    gradients = dependents(n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents"))
    for (x, rows, columns), pad in padded.items():
        if rows or not columns:
            continue
        readers = list(_readers(x))
        saved = x not in gradients and not gradients.isdisjoint(pad.users)
        if saved and x.op != "placeholder":  # what is there anyway is padded again
            pad.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        if all(_takes_any_strides(u, source, x) for u, source in readers if u is not pad):
            for reader, source in readers:
                if reader is not pad and (saved or reader.target not in _MASKED):
                    reader.replace_input_with(source, _without_zeros(graph, pad, x, source, reader))


def _readers(x: Node) -> Iterator[tuple[Node, Node]]:
    """The ops that read a matrix, or what it is a view of, or another view of that, each with the one that it reads."""
    while x.target in _RESHAPES and isinstance(x.args[0], Node):
        x = x.args[0]
    todo = [x]
    for source in todo:
        for user in source.users:
            if user.target in _RESHAPES:
                todo.append(user)
            elif user.users or user.op == "output":
                yield user, source


def _takes_any_strides(reader: Node, source: Node, x: Node) -> bool:
    """Whether an op that reads the rows of `x` gives the same values, of the same strides, whatever is between the rows."""
    shape = source.meta["val"].shape
    if shape[-1] != x.meta["val"].shape[1] or not (len(shape) == 2 or all(isinstance(n, int) for n in shape)):
        return False
    return reader.target is aten.sum.dim_IntList or (reader.target in _MASKED and reader.args[1] is source)


def _without_zeros(graph: Graph, pad: Node, x: Node, source: Node, reader: Node) -> Node:
    """The elements of `source`, a tensor whose rows are those of `x`, as a view of `x` with zeros behind its rows."""
    with graph.inserting_before(reader):
        view = called(graph, x, aten.slice.Tensor, pad, 1, 0, x.meta["val"].shape[1])
        shape = list(source.meta["val"].shape)
        return view if len(shape) == 2 else called(graph, source, aten.view.default, view, shape)
