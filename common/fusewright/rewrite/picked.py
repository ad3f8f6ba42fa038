"""Log probabilities of a few classes, as losses of sequences read them: `log_softmax(x, -1).gather(-1, index)`.

Of all classes (32,000 to 250,000 tokens of a vocabulary) one is read. Picked before the normalization, it needs each row's maximum
and sum, and nobody writes the others' probabilities. Terms and their order are those of eager.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.spec import same_strides, value_of
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import Rewriter, is_call

ID = "log_softmax.picked"
"""The rule's id in reports, and for `disable_rules`."""

MOST, LEAST = 8, 64
"""Classes that are picked of a row, and the least that a row has for each of them."""

DTYPES = (torch.float32, torch.float64)
"""Eager rounds all of a half type's log probabilities."""


def pick(graph: Graph, log: RuleLog) -> None:
    """Rewrite log softmaxes of a canonical graph that only picks read."""
    if ID in log.disabled:
        return
    found = [n for n in graph.nodes if is_call(n, "log_softmax") and _only_picked(n)]
    if not found:
        return
    r = Rewriter(graph, log)
    users = [user for n in found for user in n.users]
    if any([r.log.allows(ID) and r.substitute(ID, user, _picked, r, user) is not None for user in users]):
        drop_dead_code(graph)


def _only_picked(node: Node) -> bool:
    x, dim, widened = node.args
    val = value_of(x)  # type: ignore[arg-type]
    if widened or val.dtype not in DTYPES or not val.dim() or not node.users:
        return False
    return all(is_call(u, "gather") and u.args[0] is node and _is_pick(u, val, dim) for u in node.users)  # type: ignore[arg-type]


def _is_pick(user: Node, val: torch.Tensor, dim: int) -> bool:
    if user.args[1] % val.dim() != dim % val.dim():  # type: ignore[operator]
        return False
    index = value_of(user.args[2])  # type: ignore[arg-type]
    if index.dim() != val.dim():
        return False
    picked, classes = index.shape[dim], val.shape[dim]
    if not isinstance(picked, int) or not isinstance(classes, int) or not 0 < picked <= MOST or classes < LEAST * picked:
        return False
    # a gather may leave rows out, which a sum of parts would have to follow
    others = [d for d in range(val.dim()) if d != dim % val.dim()]
    return all(compat.statically_true(index.shape[d] == val.shape[d]) for d in others)


def _picked(r: Rewriter, user: Node) -> Node | None:
    x, dim, _ = user.args[0].args  # type: ignore[union-attr]
    most = r.call("amax", (x, [dim], True))
    total = r.call("log", (r.call("sum", (r.call("exp", (r.call("sub", (x, most)),)), [dim], True)),))
    made = r.call("sub", (r.call("sub", (r.call("gather", (x, *user.args[1:])), most)), total))
    return made if same_strides(value_of(made), value_of(user)) else None
