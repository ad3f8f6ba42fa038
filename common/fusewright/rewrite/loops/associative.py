"""`associative_scan` of pairs, combined as (a1 * a2, a2 * b1 + b2): a linear recurrence, as one scan.

On GPUs the higher-order op reaches the graph. Elsewhere torch writes it as a tree of slices, products, sums and cats of logarithmic
depth. Which rows of which tensors each node of a tree combines is followed from its leaves, so that no shape of tree is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.effects import drop_dead_code, has_writes
from fusewright.graph.spec import by_stride, value_of
from fusewright.graph.view import is_op
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.loops.unrolled import alike

ID = "loop.associative_scan"
"""The rule's id in reports, and for `disable_rules`."""

LEAST_STEPS = 4
"""Scans of fewer steps stay as they are written."""


def join(graph: Graph, log: RuleLog) -> None:
    """Replace associative scans of such pairs, in place, in a canonical graph."""
    if ID in log.disabled or not any(_is_call(n) or _is_woven(n) for n in graph.nodes) or has_writes(graph):
        return
    r, trees = Rewriter(graph, log), _Trees()
    for node in list(graph.nodes):
        found = _of_call(node) if _is_call(node) else trees.scan(node)
        if found is None or not log.allows(ID):
            continue
        result, a, b = found
        new = r.attempt(node if result is node else node.next, laid_out, r, a, b, value_of(result))
        if new is not None:
            log.hit(ID)
            r.replace(result, new)
    drop_dead_code(graph)


def laid_out(r: Rewriter, a: Node, b: Node, like: torch.Tensor) -> Node | None:
    """The scan of a and b along dim 0 with the strides of `like`, or None if there is none."""
    if not _fits(value_of(a), like) or not _fits(value_of(b), like):
        return None
    order = by_stride(like)
    a, b = (r.call("permute", (x, order)) for x in (a, b))
    scan = r.call("linear_scan", (a, b, None, order.index(0)))
    new = r.call("permute", (scan, [order.index(d) for d in range(like.dim())]))
    return new if alike(value_of(new), like) else None


def _fits(x: Any, like: torch.Tensor) -> bool:
    """Whether an operand has the result's type and sizes, which are known."""
    if not isinstance(x, torch.Tensor) or not isinstance(like, torch.Tensor) or x.layout is not torch.strided:
        return False
    same = (x.dtype, x.device, x.shape) == (like.dtype, like.device, like.shape) and like.is_floating_point()
    return same and all(isinstance(n, int) for n in (*like.shape, *like.stride()))


# ---- the higher-order op ----


def _is_call(node: Node) -> bool:
    return compat.is_higher_order(node.target) and getattr(node.target, "__name__", "") == "associative_scan"


def _of_call(node: Node) -> tuple[Node, Node, Node] | None:
    """The second result of the op, and what it scans, if that is all of it that is read."""
    given: Any = node.args
    body, xs, more = (*given, ())[:3]
    combine = getattr(node.graph.owning_module, str(body.target), None) if isinstance(body, Node) else None
    users = list(node.users)
    alone = len(users) == 1 and users[0].args[1:] == (1,)
    if more or len(xs) != 2 or combine is None or not alone or not _is_pair(combine.graph):
        return None
    return users[0], xs[0], xs[1]


def _is_pair(graph: Graph) -> bool:
    """Whether a graph computes (a1 * a2, a2 * b1 + b2) from a1, b1, a2 and b2."""
    terms: dict[Any, Any] = {n: ("leaf", k) for k, n in enumerate(graph.find_nodes(op="placeholder"))}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found = ops.canonical(node.target, node.args, node.kwargs) if compat.is_overload(node.target) else None
        if found is None or found[0].name not in ("mul", "add") or found[2].get("alpha", 1) != 1:
            return False
        operands = [terms.get(x) if isinstance(x, Node) else None for x in found[1][:2]]
        if None in operands:
            return False
        terms[node] = (found[0].name, frozenset(operands))
    (output,) = graph.find_nodes(op="output")
    a1, b1, a2, b2 = (("leaf", k) for k in range(4))
    wanted = [("mul", frozenset((a1, a2))), ("add", frozenset((("mul", frozenset((a2, b1))), b2)))]
    return len(terms) >= 4 and [terms.get(x) for x in output.args[0]] == wanted


# ---- trees ----


@dataclass(frozen=True, slots=True)
class Product:
    """Factors `low` to `high` of `a`, multiplied; a row of any tensor is one of length 1."""

    a: Node
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class State:
    """The state after the steps `low` to `high`, from nothing: the recurrence of the rows of `a` and `b`."""

    a: Node
    b: Node
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A state, times the factors of the steps after it up to `high`."""

    state: State
    high: int


Term: TypeAlias = "Product | State | Moved | None"
"""What a row holds; None if it is not followed."""
Rows: TypeAlias = tuple[Term, ...]


@dataclass
class _Trees:
    """What the rows, along the first dimension, of nodes hold."""

    known: dict[Node, Rows] = field(default_factory=dict)

    def scan(self, node: Node) -> tuple[Node, Node, Node] | None:
        """The node and what it scans, if its rows are all states of a recurrence in order."""
        if not (_is_woven(node) or (is_op(node) and READER.name(node) == "slice")) or not node.users:
            return None
        rows = self.rows(node)
        last = rows[-1] if len(rows) >= LEAST_STEPS else None
        if not isinstance(last, State) or value_of(last.a).shape[0] != len(rows) or value_of(last.b).shape[0] != len(rows):
            return None
        first, *rest = rows
        right = first == Product(last.b, 0, 1) and rest == [State(last.a, last.b, 0, k + 2) for k in range(len(rest))]
        return (node, last.a, last.b) if right and self._alone(node) else None

    def _alone(self, root: Node) -> bool:
        """Whether nobody reads states on the way to `root`, which would still be computed (training saves them)."""
        inside, todo = {root}, [root]
        while todo:
            for n in todo.pop().all_input_nodes:
                if n not in inside and any(isinstance(t, State | Moved) for t in self.known.get(n, ())):
                    inside.add(n)
                    todo.append(n)
        return all(inside.issuperset(n.users) for n in inside - {root})

    def rows(self, node: Node) -> Rows:
        if node not in self.known:
            name = READER.name(node) if is_op(node) else ""
            found = _FOLLOWED[name](self, node) if name in _FOLLOWED else None
            leaf = _leaf(node)  # empty if the number of rows is a symbol: of a cat with such a tensor, not all rows are known
            self.known[node] = found if found is not None and len(found) == len(leaf) else leaf
        return self.known[node]

    def _slice(self, node: Node) -> Rows | None:
        row = ops.find(node.target)
        assert row is not None
        x, dim, start, end, step = row.bind(node.args, node.kwargs).values()
        known = all(isinstance(n, int | None) for n in (start, end, step)) and dim == 0
        return self.rows(x)[start:end:step] if known else None

    def _mul(self, node: Node) -> Rows | None:
        return self._paired(node, lambda x, y: _multiplied(x, y) or _multiplied(y, x))

    def _add(self, node: Node) -> Rows | None:
        if node.kwargs.get("alpha", 1) != 1:
            return None
        return self._paired(node, lambda x, y: _added(x, y) or _added(y, x))

    def _paired(self, node: Node, term: Callable[[Term, Term], Term]) -> Rows | None:
        """The rows of two tensors combined; None if one row cannot be."""
        x, y = node.args[:2]
        if not isinstance(x, Node) or not isinstance(y, Node) or not _same_shape(x, node) or not _same_shape(y, node):
            return None
        rows = self._of_both(x, y)
        found = None if rows is None else tuple(term(a, b) for a, b in rows)
        return None if found is None or None in found else found

    def _cat(self, node: Node) -> Rows | None:
        given: Any = node.args
        parts, dim = (*given, 0)[:2]
        return tuple(t for p in parts for t in self.rows(p)) if dim == 0 else None

    def _padded(self, node: Node) -> Rows | None:
        given: Any = node.args
        x, pad = given[:2]
        *others, before, after = pad
        whole = not any(others) and before == 0 and len(pad) == 2 * value_of(x).dim()
        return (*self.rows(x), *[None] * after) if whole else None

    def _woven(self, node: Node) -> Rows | None:
        """The rows of two tensors in turns."""
        if not _is_woven(node):
            return None
        stack: Any = node.args[0]
        rows = self._of_both(*stack.args[0])
        return None if rows is None else tuple(t for pair in rows for t in pair)

    def _of_both(self, x: Node, y: Node) -> list[tuple[Term, Term]] | None:
        """The rows of two tensors of one shape in pairs; None if one's are unknown (torch may have its number as a symbol)."""
        return list(zip(self.rows(x), self.rows(y), strict=True)) if len(self.rows(x)) == len(self.rows(y)) else None


_FOLLOWED: dict[str, Callable[[_Trees, Node], Rows | None]] = {
    "slice": _Trees._slice, "mul": _Trees._mul, "add": _Trees._add, "cat": _Trees._cat,
    "constant_pad_nd": _Trees._padded, "view": _Trees._woven, "reshape": _Trees._woven,
}  # fmt: skip


def _is_woven(node: Node) -> bool:
    """Whether a node joins two tensors row by row, as a view of their stack."""
    if not is_op(node) or READER.name(node) not in ("view", "reshape"):
        return False
    stack = node.args[0]
    if not isinstance(stack, Node) or not is_op(stack) or READER.name(stack) != "stack" or (*stack.args, 0)[1] != 1:
        return False
    shape = tuple(value_of(stack).shape)
    return shape[1] == 2 and tuple(value_of(node).shape) == (shape[0] * 2, *shape[2:])


def _leaf(node: Node) -> Rows:
    v = value_of(node)
    known = isinstance(v, torch.Tensor) and v.dim() > 0 and isinstance(v.shape[0], int)
    return tuple(Product(node, k, k + 1) for k in range(v.shape[0])) if known else ()


def _same_shape(x: Node, node: Node) -> bool:
    return isinstance(value_of(x), torch.Tensor) and value_of(x).shape == value_of(node).shape


def _begun(x: Term, a: Node) -> Iterator[State]:
    """A row as a state of a recurrence with the factors `a`."""
    if isinstance(x, State) and x.a is a:
        yield x
    elif isinstance(x, Product) and x.high == x.low + 1 and x.a is not a:
        yield State(a, x.a, x.low, x.high)


def _multiplied(x: Term, y: Term) -> Term:
    """The product of `x` and what comes before it, `y`."""
    if not isinstance(x, Product):
        return None
    if isinstance(y, Product) and y.a is x.a:
        return Product(x.a, y.low, x.high) if y.high == x.low else None
    return next((Moved(s, x.high) for s in _begun(y, x.a) if s.high == x.low), None)


def _added(x: Term, y: Term) -> Term:
    """What came before, moved by the steps of `y`, and what these give from nothing."""
    if not isinstance(x, Moved):
        return None
    a, b = x.state.a, x.state.b
    found = (State(a, b, x.state.low, s.high) for s in _begun(y, a) if s.b is b and (s.low, s.high) == (x.state.high, x.high))
    return next(found, None)
