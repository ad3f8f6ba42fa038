"""Gradients of a tensor that is taken apart.

The gradient of each piece has the size of the whole tensor, with zeros elsewhere, and all of these are added up: n pieces cost n
passes over the tensor. Where the pieces do not overlap, the sum is the pieces side by side. Adding zeros changes at most the sign
of a zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright.graph.effects import drop_dead_code
from fusewright.graph.retrace import called
from fusewright.graph.spec import value_of

aten = torch.ops.aten

LEAST = 4
"""Fewer pieces stay a sum, which kernels compute in one pass."""

_SELECT, _SLICE = aten.select_backward.default, aten.slice_backward.default


@dataclass(frozen=True, slots=True)
class Piece:
    """The gradient of the elements `start` to `end` of a dim."""

    start: int
    end: int
    node: Node
    """`select_backward` or `slice_backward` of it."""


def side_by_side(graph: Graph) -> None:
    """Join in place, in a joint graph, the gradients of pieces of a tensor."""
    seen, joined = set[Node](), False
    for node in reversed(list(graph.nodes)):
        if _adds(node) and node not in seen:
            terms = list(_terms(node, node, seen))
            new = _joined(graph, node, terms)
            if new is not None:
                node.replace_all_uses_with(new)
                joined = True
    if joined:
        drop_dead_code(graph)


def _adds(node: Any) -> bool:
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or "alpha" in node.kwargs:
        return False
    return all(isinstance(x, Node) for x in node.args)


def _terms(node: Node, root: Node, seen: set[Node]) -> Iterator[Node]:
    """What a sum adds up, in order. Sums on the way, which nobody else reads, are added to `seen`."""
    todo = [node]
    while todo:
        term = todo.pop()
        if _adds(term) and (term is root or len(term.users) == 1) and value_of(term).shape == value_of(root).shape:
            seen.add(term)
            todo.extend(reversed(term.all_input_nodes if term.args[0] is not term.args[1] else [term.args[0]] * 2))  # type: ignore[list-item]
        else:
            yield term


def _joined(graph: Graph, node: Node, terms: list[Node]) -> Node | None:
    """The sum of the terms with their pieces joined; None if there are few, or another order of additions would round otherwise."""
    like = value_of(node)
    pieces = [t for t in terms if t.target in (_SELECT, _SLICE) and len(t.users) == 1]
    others = [t for t in terms if t.target not in (_SELECT, _SLICE) or len(t.users) > 1]
    if len(pieces) < LEAST or len(others) > 1 or not isinstance(like, torch.Tensor) or not like.is_contiguous():
        return None
    found = _in_order(pieces, like)
    if found is None or any(not isinstance(n, int) for n in like.shape):
        return None
    dim: Any = pieces[0].args[2]
    with graph.inserting_before(node):
        new = _side_by_side(graph, found, dim % like.dim(), like)
        if others:
            new = called(graph, node, aten.add.Tensor, new, others[0])
    return new


def _in_order(nodes: list[Node], like: torch.Tensor) -> list[Piece] | None:
    """The pieces by position; None if they are of other dims or types, or overlap."""
    pieces, dims = [], {n.args[2] for n in nodes}
    for n in nodes:
        piece, grad = _piece(n), value_of(n.all_input_nodes[0])
        if piece is None or grad.dtype != like.dtype or value_of(n).shape != like.shape:
            return None
        pieces.append(piece)
    pieces.sort(key=lambda p: p.start)
    apart = all(a.end <= b.start for a, b in itertools.pairwise(pieces))
    return pieces if apart and len(dims) == 1 else None


def _piece(n: Node) -> Piece | None:
    args: Any = n.args
    _, sizes, dim, start, *rest = args
    size = sizes[dim]
    if not all(isinstance(x, int) for x in (size, start, *rest)) or (n.target is _SLICE and rest[1] != 1):
        return None
    first = start + size if start < 0 else start
    if n.target is _SELECT:
        return Piece(first, first + 1, n)
    end = min(rest[0] + size if rest[0] < 0 else rest[0], size)
    return Piece(first, end, n) if 0 <= first < end else None


def _side_by_side(graph: Graph, pieces: list[Piece], dim: int, like: torch.Tensor) -> Node:
    """The pieces in a row, with zeros between them where none is."""
    node, size = pieces[0].node, like.shape[dim]
    if [(p.start, p.node.target) for p in pieces] == [(k, _SELECT) for k in range(size)]:
        return called(graph, node, aten.stack.default, [p.node.args[0] for p in pieces], dim)
    parts, at = [], 0
    for p in (*pieces, None):
        start = size if p is None else p.start
        if start > at:
            shape = [start - at if d == dim else n for d, n in enumerate(like.shape)]
            options = {"dtype": like.dtype, "layout": like.layout, "device": like.device, "pin_memory": False}
            parts.append(called(graph, node, aten.full.default, shape, 0, **options))
        if p is not None:
            grad: Any = p.node.args[0]
            parts.append(called(graph, p.node, aten.unsqueeze.default, grad, dim) if p.node.target is _SELECT else grad)
            at = p.end
    return called(graph, node, aten.cat.default, parts, dim)
