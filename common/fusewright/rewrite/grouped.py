"""Grouped products of few rows as products of single rows with gathered matrices.

Mixtures of experts sort rows by expert and multiply each group with its expert's matrix (`torch.nn.functional.grouped_mm`). A
library's blocks hold 64 rows and more. Of the few rows of decoded tokens, hardly two have the same expert, and time goes into
reading matrices: a kernel that reads the matrix of each row in its place is faster (`DevicePolicy.gathers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusewright.graph.effects import drop_dead_code
from fusewright.graph.spec import same_strides, value_of
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter

ID = "product.gathered"
"""The rule's id in reports, and for `disable_rules`."""

OPERATOR = "aten._grouped_mm.default"

ALIGNED = 16
"""Eager starts each row of a result at a multiple of so many bytes, which FakeTensor leaves out in builds without its devices."""

Gathers: TypeAlias = Callable[[torch.dtype, int, int, int, int], bool]


def gather(graph: Graph, gathers: Gathers | None, log: RuleLog) -> None:
    """Rewrite the grouped products of a canonical graph of inference that are faster with gathered matrices."""
    if gathers is None or ID in log.disabled:
        return
    found = [n for n in graph.nodes if n.op == "call_function" and READER.name(n) == OPERATOR]
    if not found:
        return
    r = Rewriter(graph, log)
    if any([_gathered(r, n, gathers) for n in found]):
        drop_dead_code(graph)


def _gathered(r: Rewriter, node: Node, gathers: Gathers) -> bool:
    rows, matrices, ends = _operands(node)
    if ends is None or not _fits(node, rows, matrices, gathers) or not r.log.allows(ID):
        return False
    return r.substitute(ID, node, _product, r, node, rows, matrices, ends) is not None


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """Rows [M, K], matrices [E, K, N] and the ends of the groups [E]; no ends where the call has anything else."""
    rows, matrices, *rest = node.args
    given = dict(zip(("offs", "bias", "out_dtype"), rest, strict=False)) | dict(node.kwargs)
    plain = given.get("bias") is None and given.get("out_dtype") in (None, value_of(node).dtype)
    return rows, matrices, given.get("offs") if plain else None


def _fits(node: Node, rows: Node, matrices: Node, gathers: Gathers) -> bool:
    x, w = value_of(rows), value_of(matrices)
    if x.dim() != 2 or w.dim() != 3 or not all(isinstance(n, int) and n for n in (*x.shape, *w.shape)):
        return False
    alike = x.dtype == w.dtype == value_of(node).dtype
    dense = not w.shape[2] * w.dtype.itemsize % ALIGNED
    return alike and dense and gathers(x.dtype, x.shape[0], *w.shape)


def _product(r: Rewriter, node: Node, rows: Node, matrices: Node, ends: Node) -> Node | None:
    """Number each row's group by the groups that end before it. Rows behind the last group, whose result is undefined, are counted
    to that one."""
    val, count = value_of(node), value_of(matrices).shape[0]
    order = r.call("arange", (0, val.shape[0], 1), kwargs={"dtype": value_of(ends).dtype, "device": val.device})
    ended = r.call("ge", (r.call("unsqueeze", (order, 1)), ends))
    group = r.call("clamp", (r.call("sum", (ended, [1])), None, count - 1))
    each = r.call("index", (matrices, [group]))
    made = r.call("view", (r.call("bmm", (r.call("unsqueeze", (rows, 1)), each)), list(val.shape)))
    return made if same_strides(value_of(made), val) else None
