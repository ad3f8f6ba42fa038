"""Rules of empty tensors, which log-step scans and the edges of windows leave: a call that makes one is a fill, which waits for
nothing, and what reads one does without it. Sizes may be symbols; what is empty must be so for all of their values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.effects import draws
from fusewright.graph.fills import SCALARS
from fusewright.graph.spec import arguments, contiguous_strides, same_size, same_strides, value_of
from fusewright.graph.verify import UNTRUSTED
from fusewright.graph.view import is_projection
from fusewright.ops import Kind
from fusewright.rewrite.engine import ANY, Env, Rewriter, Rule, p

_PLAIN = (Kind.POINTWISE, Kind.REDUCTION, Kind.SCAN, Kind.CONTRACTION)
_CHECKED = ("conv", "int_mm", "topk")
"""Of these kinds, rows whose sizes eager may refuse without an element to compute."""
_MOVES = (
    "cat", "stack", "constant_pad_nd", "flip", "repeat", "roll", "tril", "triu", "index_select", "gather", "index", "slice_scatter",
    "select_scatter", "index_add", "index_copy", "scatter", "scatter_add", "slice_backward", "select_backward", "embedding",
)  # fmt: skip
"""Others that may check indices even if they return nothing, and nothing else. Images, for example, are refused without pixels."""
_ROWS = (
    "linear", "matmul", "softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "silu", "mish", "hardswish", "hardsigmoid",
    "leaky_relu", "elu", "softplus", "log_sigmoid", "threshold", "glu", "nan_to_num", "xlogy",
    "gelu_backward", "silu_backward", "mish_backward", "tanh_backward", "sigmoid_backward", "threshold_backward",
    "softplus_backward", "softmax_backward", "log_softmax_backward",
)  # fmt: skip
COMPUTES = (*(n for n, row in ops.OPS.items() if row.kind in _PLAIN and n not in _CHECKED), *_MOVES, *_ROWS)

ZEROS = ("slice_backward", "mm", "bmm", "sum")
"""Rows that are all zeros where their first operand is empty."""


def _empty(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and any(map(_zero, val.shape))


def _zero(n: Any) -> bool:
    return n == 0 if isinstance(n, int) else compat.statically_true(n == 0)


def _droppable(x: Any) -> bool:
    """Whether a tensor is empty, and no check of an index is lost without it: an input, a fill, or a view of one or of more."""
    if not _empty(value_of(x)):
        return False
    while x.op == "call_function" and (is_projection(x) or _empty(value_of(x))):
        row = ops.find(x.target)
        if row is not None and row.kind is Kind.CREATION:
            return True
        if not is_projection(x) and (row is None or row.kind is not Kind.VIEW):
            return False
        x = x.args[0]
    return True


def _fill(r: Rewriter, node: Node, number: Any) -> Node | None:
    """A fill in place of a node, where it has the node's strides."""
    val = value_of(node)
    if val.dtype not in SCALARS or val.layout is not torch.strided or UNTRUSTED in node.meta:
        return None
    if not all(map(same_size, val.stride(), contiguous_strides([_one_or_more(n) for n in val.shape]))):
        return None
    options = {"dtype": val.dtype, "layout": val.layout, "device": val.device, "pin_memory": False}
    return r.call("full", (arguments(r.graph, val.shape), number), like=node, kwargs=options)


def _one_or_more(n: Any) -> Any:
    return 1 if _zero(n) else n


def _result(r: Rewriter, node: Node, env: Env) -> Node | None:
    row = ops.find(node.target)
    if not _empty(value_of(node)) or row is None or draws(node):
        return None
    tensors = [n for n in node.all_input_nodes if isinstance(value_of(n), torch.Tensor)]
    if row.name in _MOVES and any(map(_indexes, tensors)):
        return None
    return _fill(r, node, 0) if all(_droppable(n) for n in tensors if _empty(value_of(n))) else None


def _indexes(node: Node) -> bool:
    """Whether a tensor may be an index that eager checks."""
    return not (value_of(node).dtype.is_floating_point or _empty(value_of(node)))


def _joined(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Other operands may decide the type and the order of dims in memory."""
    tensors, val = env["tensors"], value_of(node)
    full = [x for x in tensors if not _droppable(x)]
    if not full or len(full) == len(tensors) or any(value_of(x).dtype != val.dtype for x in full) or UNTRUSTED in node.meta:
        return None
    made = r.call("cat", (full, *node.args[1:]))
    fits = same_strides(value_of(made), val)
    made.meta.update(node.meta)
    return made if fits else None


def _of_nothing(r: Rewriter, node: Node, env: Env) -> Node | None:
    if not _droppable(env["x"]) or _empty(value_of(node)):
        return None
    return _fill(r, node, env.get("number", 0))


def _nothing_written(r: Rewriter, node: Node, env: Env) -> Node | None:
    """A copy of the tensor, which other rules drop."""
    x, val = env["x"], value_of(node)
    if not _droppable(env["source"]) or _empty(val) or value_of(x).dtype != val.dtype or UNTRUSTED in node.meta:
        return None
    return r.call("clone", (x,), like=node, kwargs={"memory_format": None}) if same_strides(value_of(x), val) else None


RULES: tuple[Rule, ...] = (
    Rule("empty.result", p(COMPUTES), _result, "f(x) = full(shape, 0) where it has no elements"),
    Rule("empty.joined", p("cat", "tensors"), _joined, "cat([x, y]) = cat([x]) where y has no elements"),
    Rule("empty.sum", p(ZEROS, "x"), _of_nothing, "f(x) = full(shape, 0) where x has no elements: sums, products, gradients"),
    Rule(
        "empty.padded", p("constant_pad_nd", "x", ANY, "number"), _of_nothing,
        "constant_pad_nd(x, pad, c) = full(shape, c) where x has no elements",
    ),
    Rule("empty.written", p("slice_scatter", "x", "source"), _nothing_written, "slice_scatter(x, y) = x where y has no elements"),
)
