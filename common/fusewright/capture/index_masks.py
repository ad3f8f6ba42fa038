"""Attention masks of symbolic sizes that compare positions: what they keep, for all sizes.

Every integer tensor is an affine function of its indices, every mask a set of such functions that are at least 0 where it keeps a
position. Nodes of any other kind are unknown, and so is a mask that depends on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Affine:
    """const + the sum of factor * index over `factors`: pairs of a dimension, counted from the last (-1), and its factor."""

    const: int
    factors: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(cls, const: int, factors: Mapping[int, int]) -> Affine:
        return cls(const, frozenset((d, a) for d, a in factors.items() if a))

    def plus(self, other: Affine, times: int = 1) -> Affine:
        total = dict(self.factors)
        for d, a in other.factors:
            total[d] = total.get(d, 0) + times * a
        return Affine.of(self.const + times * other.const, total)

    def moved(self, place: Callable[[int], int]) -> Affine:
        return Affine.of(self.const, {place(d): a for d, a in self.factors})

    def without(self, *dims: int) -> Affine:
        return Affine.of(self.const, {d: a for d, a in self.factors if d not in dims})

    @property
    def never_negative(self) -> bool:
        return self.const >= 0 and all(a > 0 for _, a in self.factors)


@dataclass(frozen=True)
class Mask:
    """Keeps the positions where all `bounds` are at least 0. One of them constant and negative: it keeps nothing."""

    bounds: frozenset[Affine] = frozenset()

    @classmethod
    def where(cls, bound: Affine) -> Mask:
        return cls(frozenset() if bound.never_negative else frozenset([bound]))

    @property
    def empty(self) -> bool:
        return any(not b.factors and b.const < 0 for b in self.bounds)


NOTHING = Mask.where(Affine(-1))
PAST = Mask.where(Affine.of(0, {-2: 1, -1: -1}))
"""Keeps keys (the last dimension) up to the query's position."""

Known = Affine | Mask | None


@dataclass
class Reader:
    """Reads the nodes of a Dynamo graph; `written` tells whether a node's memory may be written to. `read` are all nodes that were
    asked for."""

    written: Callable[[Node], bool]
    read: dict[Node, Known] = field(default_factory=dict)

    def __call__(self, a: Any) -> Known:
        if isinstance(a, bool):
            return Mask() if a else NOTHING
        if isinstance(a, int):
            return Affine(a)
        if not isinstance(a, Node):
            return None
        if a not in self.read:
            self.read[a] = None if self.written(a) else self._read(a)
        return self.read[a]

    def _read(self, node: Node) -> Known:
        rule, shape = RULES.get(name_of(node)), shape_of(node)
        if rule is None or shape is None or not node.args:  # no arguments: all are keywords
            return None
        found = rule(self, node)
        if isinstance(found, Affine):  # the index of a dimension of size one is 0, also once it is expanded
            return found.without(*(d for d, _ in found.factors if _is_one(shape[d])))
        return found


def name_of(node: Node) -> str:
    """The name of torch's function or method, of `__eq__` that of the operator; "" for an operator or function of others,
    whatever its name."""
    if node.op == "call_method":
        return str(getattr(getattr(operator, str(node.target), None), "__name__", node.target))
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if name and any(getattr(m, name, None) is node.target for m in (torch, operator)) else ""


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The sizes of a node's tensor."""
    found = node.meta.get("example_value") if isinstance(node, Node) else None
    return tuple(found.shape) if isinstance(found, torch.Tensor) else None


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _difference(read: Reader, node: Node) -> Affine | None:
    """The first argument less the second, of a function of these alone."""
    left, right = _both(read, node)
    return left.plus(right, -1) if isinstance(left, Affine) and isinstance(right, Affine) else None


def _both(read: Reader, node: Node) -> tuple[Known, Known]:
    if len(node.args) != 2 or node.kwargs:  # e.g. `out` or `alpha`
        return None, None
    left, right = map(read, node.args)
    return left, right


# -- rules: by the name of a function or method


def _arange(read: Reader, node: Node) -> Known:
    start = node.args[0] if len(node.args) == 2 else 0
    plain = len(node.args) in (1, 2) and node.kwargs.keys() <= {"device", "dtype"}
    if not plain or type(start) is not int or node.kwargs.get("dtype") not in (None, torch.int64):
        return None
    return Affine.of(start, {-1: 1})


def _sum(times: int) -> Callable[[Reader, Node], Known]:
    def rule(read: Reader, node: Node) -> Known:
        left, right = _both(read, node)
        return left.plus(right, times) if isinstance(left, Affine) and isinstance(right, Affine) else None

    return rule


def _compare(swapped: bool, strict: bool) -> Callable[[Reader, Node], Known]:
    def rule(read: Reader, node: Node) -> Known:
        found = _difference(read, node)
        if found is None:
            return None
        bound = Affine(0).plus(found, -1) if swapped else found
        return Mask.where(bound.plus(Affine(-int(strict))))

    return rule


def _equal(wanted: bool) -> Callable[[Reader, Node], Known]:
    def rule(read: Reader, node: Node) -> Known:
        found = _difference(read, node)
        if found is None or found.factors:
            return None
        return Mask() if (found.const == 0) is wanted else NOTHING

    return rule


def _and(read: Reader, node: Node) -> Known:
    left, right = _both(read, node)
    return Mask(left.bounds | right.bounds) if isinstance(left, Mask) and isinstance(right, Mask) else None


def _ones(read: Reader, node: Node) -> Known:
    return Mask() if node.kwargs.get("dtype") is torch.bool else None


def _to(read: Reader, node: Node) -> Known:
    only_moved = not node.kwargs and all(isinstance(a, torch.device) for a in node.args[1:])
    return read(node.args[0]) if only_moved else None


def _expand(read: Reader, node: Node) -> Known:
    return read(node.args[0])


def _unsqueeze(read: Reader, node: Node) -> Known:
    found, shape, dim = read(node.args[0]), shape_of(node), node.args[1] if len(node.args) > 1 else None
    if not isinstance(found, Affine) or shape is None or not isinstance(dim, int):
        return None
    return _inserted(found, dim - len(shape) if dim >= 0 else dim)


def _inserted(found: Affine, at: int) -> Affine:
    """The form of a tensor with a new dimension at `at` (counted from the last of the result)."""
    return found.moved(lambda d: d if d > at else d - 1)


def _getitem(read: Reader, node: Node) -> Known:
    found, shape = read(node.args[0]), shape_of(node.args[0])
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not isinstance(found, Affine) or shape is None:
        return None
    if all(isinstance(i, Node) for i in index):
        return _gathered(read, found, shape, index)
    return _sliced(found, shape, index)


def _gathered(read: Reader, found: Affine, shape: tuple[Any, ...], index: tuple[Any, ...]) -> Known:
    """One index tensor for each dimension."""
    at = [read(i) for i in index]
    if len(at) != len(shape):
        return None
    factors, total = dict(found.factors), Affine(found.const)
    for d, i in zip(range(-len(shape), 0), at, strict=True):
        if not isinstance(i, Affine) or not i.never_negative:  # a negative index counts from the end
            return None
        total = total.plus(i, factors.get(d, 0))
    return total


def _sliced(found: Affine, shape: tuple[Any, ...], index: tuple[Any, ...]) -> Known:
    """New dimensions, and slices from the start."""
    kept = sum(i is not None for i in index)
    if kept > len(shape):
        return None
    index = (*index, *(slice(None),) * (len(shape) - kept))
    for place, i in enumerate(reversed(index)):
        if i is None:
            found = _inserted(found, -1 - place)
        elif not isinstance(i, slice) or i.start not in (None, 0) or i.step not in (None, 1):
            return None
    return found


def _diff(read: Reader, node: Node) -> Known:
    """The differences of neighbours, if all are equal."""
    found, shape = read(node.args[0]), shape_of(node.args[0])
    dim, before = node.kwargs.get("dim", -1), node.kwargs.get("prepend")
    if not isinstance(found, Affine) or shape is None or len(node.args) > 1 or not node.kwargs.keys() <= {"dim", "prepend"}:
        return None
    if not isinstance(dim, int):
        return None
    dim = dim - len(shape) if dim >= 0 else dim
    step = Affine(dict(found.factors).get(dim, 0))
    if before is None:
        return step
    first, ahead = read(before), shape_of(before)
    if not isinstance(first, Affine) or ahead is None or len(ahead) != len(shape) or not _is_one(ahead[dim]):
        return None
    return step if found.without(dim).plus(first, -1) == step else None


def _cumsum(read: Reader, node: Node) -> Known:
    found = read(node.args[0])
    return Affine(0) if isinstance(found, Mask) and found.empty else None


RULES: Mapping[str, Callable[[Reader, Node], Known]] = {
    "arange": _arange, "add": _sum(1), "sub": _sum(-1), "ge": _compare(False, False), "gt": _compare(False, True),
    "le": _compare(True, False), "lt": _compare(True, True), "eq": _equal(True), "ne": _equal(False), "and_": _and,
    "logical_and": _and, "bitwise_and": _and, "ones": _ones, "new_ones": _ones, "to": _to, "expand": _expand,
    "unsqueeze": _unsqueeze, operator.getitem.__name__: _getitem, "diff": _diff, "cumsum": _cumsum,
}  # fmt: skip
