"""Convert torch's traced metadata (FakeTensor, SymInt) to the interface's value objects."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright.interface import HOST, Dim, Size, TensorSpec
from fusewright.sizes.expr import Atom, Extent, symbol
from fusewright.sizes.traced import from_sympy


def size(s: int | torch.SymInt) -> Size:
    """Convert a size to an int, or to a Dim if it is symbolic."""
    if isinstance(s, int):
        return s
    expr, seen, lo, hi = compat.symbol_of(s)
    found = from_sympy(expr)
    return found if isinstance(found, int) else Dim(found, seen, lo, hi)


def extent(s: int | torch.SymInt) -> Extent:
    """Convert a size to an int or a formula. Without bounds and hint, and so cheaper than `size`."""
    return s if isinstance(s, int) else from_sympy(compat.expression_of(s))


def contiguous_strides(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a contiguous tensor, of numbers, formulas or symbolic sizes. Symbolic sizes are not compared, which could
    add guards."""
    strides: list[Any] = [1]
    for n in reversed(sizes[1:]):
        strides.append(n * strides[-1])
    return tuple(reversed(strides)) if sizes else ()


def by_stride(x: torch.Tensor) -> list[int]:
    """The dims of a tensor, the outermost in memory first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], d))


def tensor_spec(t: torch.Tensor, const: bool = False) -> TensorSpec:
    """The spec of a traced tensor. Layouts without strides (sparse, mkldnn) get empty strides."""
    stride = tuple(map(size, t.stride())) if t.layout is torch.strided else ()
    return TensorSpec(tuple(map(size, t.shape)), stride, t.dtype, device_text(t.device), const)


def device_text(device: torch.device) -> str:
    """A device as specs name it: by type and index. The host has no index."""
    return HOST if device.type == HOST else str(device)


def value_of(node: Node) -> Any:
    """The traced value of a node: a FakeTensor, SymInt, number, tuple of these, or None."""
    return node.meta.get("val")


SizeArgument: TypeAlias = "int | Node"
"""A size as an argument of a call in a traced graph."""


def arguments(graph: Graph, sizes: Sequence[Any]) -> list[SizeArgument]:
    """Sizes as arguments of a new node; symbols are read from the graph's inputs. Raises `SizesAssumed` where they cannot be."""
    return [n if isinstance(n, int) else _computed(graph, extent(n)) for n in sizes]


def _computed(graph: Graph, size: Extent) -> SizeArgument:
    """A polynomial in the symbols of inputs."""
    if isinstance(size, int):
        return size
    terms = [_product(graph, [c] * (c != 1), atoms) for atoms, c in size.terms]
    return reduce(lambda x, y: _call(graph, operator.add, x, y), terms)


def _product(graph: Graph, factors: list[SizeArgument], atoms: Sequence[Atom]) -> SizeArgument:
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


def _call(graph: Graph, function: Any, *args: SizeArgument) -> Node:
    node = graph.call_function(function, args)
    node.meta["val"] = function(*(value_of(x) if isinstance(x, Node) else x for x in args))
    return node


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all values of symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return extent(a) == extent(b) or compat.statically_true(a == b)


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape are laid out alike, whatever their symbolic sizes are."""
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(compat.statically_true(n == 1) or compat.statically_true(x == y) for n, x, y in steps)


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
