"""Sizes that may be symbols, as arguments of calls in a traced graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.graph.spec import extent, value_of
from fusewright.sizes.expr import Atom, Extent, symbol

Size: TypeAlias = "int | Node"
"""A size as an argument."""


def arguments(graph: Graph, sizes: Sequence[Any]) -> list[Size]:
    """Sizes as arguments of a new node; symbols are read from the graph's inputs. Raises `SizesAssumed` where they cannot be."""
    return [n if isinstance(n, int) else _computed(graph, extent(n)) for n in sizes]


def _computed(graph: Graph, size: Extent) -> Size:
    """A polynomial in the symbols of inputs."""
    if isinstance(size, int):
        return size
    terms = [_product(graph, [c] * (c != 1), atoms) for atoms, c in size.terms]
    return reduce(lambda x, y: _call(graph, operator.add, x, y), terms)


def _product(graph: Graph, factors: list[Size], atoms: Sequence[Atom]) -> Size:
    factors = [*factors, *(_symbol(graph, a) for a in atoms)] or [1]
    return reduce(lambda x, y: _call(graph, operator.mul, x, y), factors)


def _symbol(graph: Graph, atom: Atom) -> Node:
    """The input that is a symbol, or the size of one that has it."""
    wanted = symbol(atom)
    inputs = [(n, value_of(n)) for n in graph.find_nodes(op="placeholder")]
    if (found := next((n for n, v in inputs if isinstance(v, torch.SymInt) and extent(v) == wanted), None)) is not None:
        return found
    for n, v in inputs:
        sizes = v.shape if isinstance(v, torch.Tensor) else ()
        if (dim := next((d for d, s in enumerate(sizes) if extent(s) == wanted), None)) is not None:
            return _call(graph, torch.ops.aten.sym_size.int, n, dim)
    raise compat.SizesAssumed(f"no input has the size {atom}")


def _call(graph: Graph, function: Any, *args: Size) -> Node:
    node = graph.call_function(function, args)
    node.meta["val"] = function(*(value_of(x) if isinstance(x, Node) else x for x in args))
    return node


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all values of symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return extent(a) == extent(b) or compat.statically_true(a == b)


def order_in_memory(x: torch.Tensor) -> list[int]:
    """The dims of a tensor, the outermost in memory first. Raises `SizesAssumed` where that depends on sizes."""
    left, strides = list(range(x.dim())), x.stride()
    order = list[int]()
    while left:
        outer = (d for d in left if all(_reaches(strides[d], strides[e]) for e in left))
        order.append(found := next(outer, -1))
        if found < 0:
            raise compat.SizesAssumed(f"the order of strides {strides}")
        left.remove(found)
    return order


def _reaches(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    return extent(a) == extent(b) or compat.statically_true(a >= b)
