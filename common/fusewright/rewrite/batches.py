"""Products of many matrices that lie between each other in memory, as einsums over trailing dims have them (modes of a Fourier
layer, capsules, positions with weights of their own). Torch's CPU kernel multiplies such matrices one by one
(`DevicePolicy.batches`); of copies that lie one behind the other, a library multiplies all in one call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.constants import COMPUTED_ONCE
from fusewright.graph.spec import size, value_of
from fusewright.graph.verify import UNTRUSTED
from fusewright.graph.view import is_op
from fusewright.interface import RuleLog, hint
from fusewright.rewrite.engine import Rewriter
from fusewright.storage import lazy

ID = "product.batches"
"""The rule's id in reports, and for `disable_rules`."""

MATRICES = {"bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2")}
"""Row -> its operands."""

DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
"""Half types go to another kernel."""

LEAST_BATCHES = 8
"""Below, there are few calls to save."""

FEWEST_PRODUCTS = 400
"""Of smaller matrices, torch has a kernel that goes along any strides."""


def lay_out(graph: Graph, wanted: bool, log: RuleLog) -> None:
    """Copy operands of batched products, in a canonical graph, whose matrices no library takes as they lie."""
    if not wanted or ID in log.disabled:
        return
    r = Rewriter(graph, log)
    copies: dict[Node, Node] = {}
    for node in list(graph.nodes):
        apart = _apart(node)
        if not apart or not log.allows(ID):
            continue
        log.hit(ID)
        if r.has_writes:
            copies.clear()  # one of before a write may hold something else
        for x in apart:
            with graph.inserting_before(node):
                if x not in copies:
                    copies[x] = _copied(r, x)
            node.replace_input_with(x, copies[x])


def _apart(node: Node) -> list[Node]:
    """The operands to be copied; none where one has to stay as it is."""
    row = ops.find(node.target) if is_op(node) else None
    if row is None or row.name not in MATRICES or UNTRUSTED in node.meta:
        return []
    given = row.bind(node.args, node.kwargs)
    operands = [given[name] for name in MATRICES[row.name]]
    vals = [value_of(x) for x in operands]
    rows, inner, columns = (hint(size(n)) for n in (*vals[0].shape[1:], vals[1].shape[2]))
    if vals[0].dtype not in DTYPES or rows * inner * columns < FEWEST_PRODUCTS or hint(size(vals[0].shape[0])) < LEAST_BATCHES:
        return []
    apart = [x for x, val in zip(operands, vals, strict=True) if _between(val)]
    return apart if all(_copyable(value_of(x)) for x in apart) else []


def _between(x: torch.Tensor) -> bool:
    """Whether rows and columns of each matrix are known to lie apart, so that ATen's `bmm` calls no library for all."""
    return all(_is_true(step > 1) for step in x.stride()[1:]) and all(_is_true(n > 1) for n in x.shape[1:])


def _copyable(x: torch.Tensor) -> bool:
    """Whether a copy holds no more numbers than the original, and they are in memory."""
    return lazy(x) in ("", "conj") and _is_true(x.stride()[0] > 0) and math.prod(x.shape) != 0


def _is_true(condition: Any) -> bool:
    return compat.statically_true(condition)


def _copied(r: Rewriter, x: Node) -> Node:
    """A tensor whose matrices are contiguous, or transposed where that is how their elements follow each other in memory."""
    val = value_of(x)
    turned = _is_true(val.stride()[1] < val.stride()[2])
    source = r.call("transpose", (x, 1, 2)) if turned else x
    made = _pairs(r, source) if val.is_complex() else _contiguous(r, source)
    return r.call("transpose", (made, 1, 2)) if turned else made


def _pairs(r: Rewriter, x: Node) -> Node:
    """A contiguous copy of complex numbers, for which kernels have no types."""
    if not lazy(value_of(x)):
        return r.call("view_as_complex", (_contiguous(r, r.call("view_as_real", (x,))),))
    pair = r.call("view_as_real", (_conjugated(r, x),))
    real, imag = (r.call("select", (pair, -1, k)) for k in (0, 1))
    return r.call("view_as_complex", (r.call("stack", ([real, r.call("neg", (imag,))], -1)),))


def _conjugated(r: Rewriter, x: Node) -> Node:
    """The numbers in memory of which a view is the conjugate."""
    made = r.graph.call_function(torch.ops.aten._conj.default, (x,))
    with compat.fake_mode_of(value_of(x)):
        made.meta["val"] = torch.ops.aten._conj.default(value_of(x))
    return made


def _contiguous(r: Rewriter, x: Node) -> Node:
    made = r.call("clone", (x,), kwargs={"memory_format": torch.contiguous_format})
    made.meta[COMPUTED_ONCE] = True
    return made
