"""Sums of products of broadcast operands as matrix products.

`(a[:, :, None] * b[:, None]).sum(-1)` is a batched matrix product. Written so, each of its multiplications reads two elements, in
eager from a tensor that holds all of them. Gradients of such sums are sums of the same kind. Terms are added in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import machine, ops
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.spec import arguments, order_in_memory, same_size, same_strides, size, value_of
from fusewright.graph.verify import UNTRUSTED
from fusewright.interface import RuleLog, hint
from fusewright.ops.strides import strides_of_view
from fusewright.rewrite.engine import Rewriter, is_call
from fusewright.storage import lazy

ID = "sum.contraction"
"""The rule's id in reports, and for `disable_rules`."""

Contracts: TypeAlias = Callable[[torch.dtype, int, int, int, int], bool]

MOST_SUMMED = 1024
"""Longer sums lose fewer digits in eager, which adds up halves, than in a product, which may add one term after the other."""


def contract(graph: Graph, contracts: Contracts | None, log: RuleLog) -> None:
    """Rewrite the sums of a canonical graph that are faster as products (see `DevicePolicy.contracts`)."""
    if contracts is None or ID in log.disabled:
        return
    r = Rewriter(graph, log)
    if any([_contracted(r, n, contracts) for n in list(graph.nodes) if _is(n, "sum")]):
        drop_dead_code(graph)


def _contracted(r: Rewriter, node: Node, contracts: Contracts) -> bool:
    found = None if r.changes_before(node) else _contraction(node)
    val = value_of(node)
    rounded = val.dtype is torch.float32 and machine.matmul_precision(val.device.type) != "ieee"
    if found is None or rounded or not contracts(val.dtype, *found.hints()) or not r.log.allows(ID):
        return False
    return r.substitute(ID, node, _product, r, node, found) is not None


@dataclass(frozen=True)
class Factor:
    """A product of operands of one broadcast product, and the dims of that in which it varies."""

    nodes: tuple[Node, ...]
    dims: frozenset[int]


@dataclass(frozen=True)
class Contraction:
    """What a sum of a broadcast product of these sizes is as a matrix product; dims in ascending order."""

    sizes: Sequence[Any]
    left: Factor
    right: Factor
    summed: frozenset[int]

    @property
    def batch(self) -> list[int]:
        return sorted((self.left.dims & self.right.dims) - self.summed)

    @property
    def inner(self) -> list[int]:
        return sorted(self.summed & self.left.dims)

    @property
    def rows(self) -> list[int]:
        return sorted(self.left.dims - self.right.dims)

    @property
    def columns(self) -> list[int]:
        return sorted(self.right.dims - self.left.dims)

    def turned(self) -> Contraction:
        return Contraction(self.sizes, self.right, self.left, self.summed)

    def hints(self) -> tuple[int, int, int, int]:
        """Numbers of matrices, rows, terms of a sum and columns."""
        b, m, k, n = (hint(size(self.size(dims))) for dims in (self.batch, self.rows, self.inner, self.columns))
        return b, m, k, n

    def size(self, dims: Iterable[int]) -> Any:
        return math.prod(self.sizes[d] for d in dims)


def _is(node: Any, name: str) -> TypeGuard[Node]:
    return is_call(node, name) and UNTRUSTED not in node.meta


def _contraction(node: Node) -> Contraction | None:
    """How a sum is a matrix product; None if it is none."""
    row = ops.find(node.target)
    assert row is not None
    given = row.bind(node.args, node.kwargs)
    product, val = given["self"], value_of(node)
    if not _is(product, "mul") or len(product.users) > 1 or not val.is_floating_point() or value_of(product).dtype != val.dtype:
        return None
    sizes = value_of(product).shape
    varying = frozenset(d for d, n in enumerate(sizes) if not compat.statically_true(n == 1))
    summed = frozenset(_reduced(node, len(sizes))) & varying
    sides = _two_sides(_factors(product, len(sizes), varying))
    if sides is None or not summed or not all(summed <= side.dims for side in sides) or varying > sides[0].dims | sides[1].dims:
        return None  # a dim in which no operand varies, of a gradient that was expanded, is in no product
    found = Contraction(sizes, *sides, summed)
    return found if found.rows and found.columns and hint(size(found.size(found.inner))) <= MOST_SUMMED else None


def _factors(product: Node, rank: int, varying: frozenset[int]) -> list[Factor]:
    """The operands of a product, and of those products in it that broadcast as well and are read only there."""
    out: list[Factor] = []
    for operand in product.args[:2]:
        x = _before_expand(operand)
        val = None if x is None else value_of(x)
        if x is None or not isinstance(val, torch.Tensor) or not val.is_floating_point() or lazy(val):
            return []
        held = _held(val, rank) & varying
        inner = _factors(x, rank, varying) if _is(x, "mul") and len(x.users) == 1 else []
        out += inner if inner and all(f.dims < held for f in inner) else [Factor((x,), held)]
    return out


def _before_expand(x: Any) -> Node | None:
    while _is(x, "expand"):
        x = x.args[0]
    return x if isinstance(x, Node) else None


def _held(val: torch.Tensor, rank: int) -> frozenset[int]:
    """The dims of a product of this rank in which an operand has more than one element."""
    return frozenset(rank - val.dim() + d for d, n in enumerate(val.shape) if not compat.statically_true(n == 1))


def _two_sides(factors: list[Factor]) -> tuple[Factor, Factor] | None:
    """Multiply factors into those that vary in the same dims and more, until two are left."""
    while len(factors) > 2:
        pairs = ((a, b) for a in factors for b in factors if a is not b and a.dims <= b.dims)
        pair = min(pairs, key=lambda p: len(p[1].dims), default=None)
        if pair is None:
            return None
        factors = [f for f in factors if f not in pair] + [Factor(pair[1].nodes + pair[0].nodes, pair[1].dims)]
    return (factors[0], factors[1]) if len(factors) == 2 else None


def _product(r: Rewriter, node: Node, found: Contraction) -> Node:
    """The sum as a product of matrices, with the shape and the strides of eager's result."""
    val, c = value_of(node), found.turned() if _innermost(node, found) in found.rows else found
    left = _matrices(r, c.left, (c.batch, c.rows, c.inner), c, val.dtype)
    right = _matrices(r, c.right, (c.batch, c.inner, c.columns), c, val.dtype)
    made = r.call("bmm", (left, right)) if c.batch else r.call("mm", (left, right))
    order = [*c.batch, *c.rows, *c.columns]
    made = _viewed(r, made, [c.sizes[d] for d in order])
    made = _permuted(r, made, [order.index(d) for d in sorted(order)])
    return _laid_out(r, _viewed(r, made, list(val.shape)), val)


def _innermost(node: Node, c: Contraction) -> int:
    """The dim of the product whose elements are next to each other in the result."""
    strides, rank = [hint(size(n)) for n in value_of(node).stride()], len(c.sizes)
    dropped = _reduced(node, rank) if len(strides) < rank else []
    kept = zip(strides, (d for d in range(rank) if d not in dropped), strict=True)
    return min((step, d) for step, d in kept if d in (c.left.dims | c.right.dims) - c.summed)[1]


def _reduced(node: Node, rank: int) -> list[int]:
    """The dims of its operand that a sum reduces."""
    row = ops.find(node.target)
    assert row is not None
    return [d % rank for d in row.bind(node.args, node.kwargs)["dim"] or range(rank)]


def _matrices(r: Rewriter, factor: Factor, groups: Sequence[Sequence[int]], c: Contraction, dtype: torch.dtype) -> Node:
    """The product of a factor's operands, its dims in groups: a matrix for each element of the first, if there is one."""
    x, *others = (_cast(r, n, dtype) if value_of(n).dtype.itemsize < dtype.itemsize else n for n in factor.nodes)
    for other in others:  # no product is rounded to fewer digits than eager's, which multiplies in another order
        x = r.call("mul", (x, other))
    x = _cast(r, x, dtype)
    missing = len(c.sizes) - value_of(x).dim()
    held = [d - missing for group in groups for d in group]
    x = _permuted(r, x, held + [d for d in range(value_of(x).dim()) if d not in held])
    return _viewed(r, x, [c.size(group) for group in groups if group or group is not groups[0]])


def _cast(r: Rewriter, x: Node, dtype: torch.dtype) -> Node:
    return x if value_of(x).dtype == dtype else r.call("cast", (x,), kwargs={"dtype": dtype})


def _permuted(r: Rewriter, x: Node, dims: list[int]) -> Node:
    return x if dims == sorted(dims) else r.call("permute", (x, dims))


def _viewed(r: Rewriter, x: Node, shape: list[Any]) -> Node:
    """A view of this shape, of a copy where there is none."""
    val = value_of(x)
    if _same(val.shape, shape):
        return x
    seen = None
    if all(isinstance(n, int) for n in (*val.shape, *val.stride(), *shape)):
        seen = strides_of_view(val.shape, val.stride(), shape)
    if seen is None and not _only_units_differ(val.shape, shape) and not val.is_contiguous():
        x = r.call("clone", (x,), kwargs={"memory_format": torch.contiguous_format})
    return r.call("view", (x, arguments(r.graph, shape)))


def _only_units_differ(a: Sequence[Any], b: Sequence[Any]) -> bool:
    a, b = ([n for n in shape if not compat.statically_true(n == 1)] for shape in (a, b))
    return _same(a, b)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def _laid_out(r: Rewriter, x: Node, like: torch.Tensor) -> Node:
    """A copy with the strides of `like`, where those of `x` are others."""
    if same_strides(value_of(x), like):
        return x
    order = order_in_memory(like)
    made = r.call("clone", (_permuted(r, x, order),), kwargs={"memory_format": torch.contiguous_format})
    return _permuted(r, made, [order.index(d) for d in range(like.dim())])
