"""Python loops that stack what each step computes: the expression is computed once, with the steps as a leading dimension.

`stack([h[t] @ c[:, t] for t in ...])` arrives as one product per step. Where steps are alike and read consecutive pieces of the
same tensors, their operands are joined instead of their results. The product of many steps may add in another order than eager's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusewright import ops
from fusewright.capture.loops import LEAST_STEPS
from fusewright.graph.effects import may_share
from fusewright.graph.spec import SizeArgument, arguments, extent, same_size, value_of
from fusewright.graph.view import is_op, is_projection
from fusewright.interface import RuleLog
from fusewright.ops.core import Kind, Op, unbind
from fusewright.rewrite.engine import READER, Env, Rewriter, Rule, p

DEEPEST = 64
"""Operations of one step that are followed."""

Bound: TypeAlias = dict[str, Any]
"""A call by argument name; the arguments in `steps` have the steps as their first dimension."""

Rolled: TypeAlias = "Callable[[Loop, Node, Bound, frozenset[str]], Node | None]"


def roll(graph: Graph, log: RuleLog) -> None:
    """Compute once, in place, what a canonical graph computes for each of many steps and then joins."""
    if any(_joins(n) for n in graph.nodes):
        Rewriter(graph, log).run(RULES)


def _joins(node: Node) -> bool:
    return is_op(node) and READER.name(node) in ("stack", "cat") and len(node.args[0]) >= LEAST_STEPS  # type: ignore[arg-type]


def _rolled(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Join the operands of the steps instead of their results."""
    steps = tuple(env["steps"])
    if r.changes_before(node) or len(steps) < LEAST_STEPS or not all(isinstance(n, Node) and READER.name(n) for n in steps):
        return None
    loop, start = Loop(r, len(steps)), node.prev
    found = loop.roll(steps, frozenset({node}))
    if found is None or not (loop.gains or _of_recurrence(steps[1:-1])):
        while node.prev is not start:
            r.graph.erase_node(node.prev)
        loop = Loop(r, len(steps), inside=private({node}, r))  # what is read twice on the way is computed at once if all is
        found = loop.roll(steps, frozenset({node}))
        if found is None or loop.joined or not loop.called:
            return None
    return _laid_out(r, found, node)


def private(own: set[Node], r: Rewriter) -> frozenset[Node]:
    """`own`, and the nodes that nobody but these reads, directly or not."""
    found, todo = set(own), list(own)
    while todo:
        for n in todo.pop().all_input_nodes:
            if n not in found and n.op == "call_function" and n not in r.returned and found.issuperset(n.users):
                found.add(n)
                todo.append(n)
    return frozenset(found)


def _of_recurrence(steps: tuple[Node, ...]) -> bool:
    """Whether the steps are states that a scan has joined already."""
    return all(is_scan(_source(n)) for n in steps)


def is_scan(node: Node) -> bool:
    """Whether a node computes the states of a recurrence."""
    return is_op(node) and READER.name(node) in ("linear_scan", "pointwise_scan", "coupled_scan")


def _laid_out(r: Rewriter, found: Node, node: Node) -> Node | None:
    """Move the leading dimension to where `node`, a stack or a cat, has it."""
    wanted = value_of(node)
    row = ops.find(node.target)
    assert row is not None
    at = row.bind(node.args, node.kwargs)["dim"] % wanted.dim()
    order = [*range(1, at + 1), 0, *range(at + 1, value_of(found).dim())]
    made = r.call("clone", (r.call("permute", (found, order)),), kwargs={"memory_format": torch.contiguous_format})
    if row.name == "cat":
        made = r.call("view", (made, arguments(r.graph, wanted.shape)))
    return made if alike(value_of(made), wanted) else None


def alike(a: Any, b: Any) -> bool:
    """Whether two traced values have the same type, device, sizes and strides, for all sizes."""
    return has(a, b, tuple(b.shape)) and all(map(same_size, a.stride(), b.stride()))


def has(x: torch.Tensor, like: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Whether a value has this shape, and otherwise the type, device and layout of `like`."""
    same = x.dtype == like.dtype and x.device == like.device and x.layout is like.layout and x.dim() == len(shape)
    return same and all(map(same_size, x.shape, shape))


@dataclass
class Loop:
    """The steps of one loop, as far as they are alike."""

    r: Rewriter
    count: int
    called: int = 0
    """Operations that are computed once instead of `count` times."""
    dear: int = 0
    """Products and reductions among them."""
    joined: int = 0
    """Operands that are joined from the values of the steps."""
    inside: frozenset[Node] = frozenset()
    """Nodes that only what is computed at once reads."""
    made: dict[tuple[Node, ...], Node] = field(default_factory=dict)

    @property
    def gains(self) -> bool:
        """Joining operands pays where it saves calls of products."""
        return self.dear > 0 or (self.called > 0 and not self.joined)

    def roll(self, steps: tuple[Node, ...], readers: frozenset[Node], depth: int = 0) -> Node | None:
        """All `steps` as one value with them as its first dimension. `readers` are computed from it instead."""
        if steps not in self.made:
            found = self._pieces(steps) or self._states_beside(steps) or self._projected(steps, readers, depth)
            found = found or self._parts(steps, depth) or self._computed(steps, readers, depth)
            found = found or (self._joined(steps) if depth else None)
            if found is None:
                return None
            self.made[steps] = found
        return self.made[steps]

    def _pieces(self, steps: tuple[Node, ...]) -> Node | None:
        """A view of the tensor whose consecutive pieces the steps read."""
        pieces = [_piece(n) for n in steps]
        if any(x is None for x in pieces):
            return None
        (source, dim, start, width, kept), *_ = found = [x for x in pieces if x is not None]
        ascends = width if found[1][2] > start else -width
        if any(x != (source, dim, start + k * ascends, width, kept) for k, x in enumerate(found)):
            return None
        call, first = self.r.call, min(x[2] for x in found)
        shape, rank = list(value_of(source).shape), value_of(source).dim()
        whole, count = source, len(steps) * width
        if count != extent(shape[dim]) or all(isinstance(n, int) for n in shape):  # with symbols a slice's gradient has no kernel
            whole = call("slice", (source, dim, first, first + count, 1))
        if kept:
            whole = call("reshape", (whole, arguments(self.r.graph, [*shape[:dim], len(steps), width, *shape[dim + 1 :]])))
            rank += 1
        view = call("permute", (whole, [dim, *(d for d in range(rank) if d != dim)]))
        return view if ascends > 0 else call("flip", (view, [0]))

    def _parts(self, steps: tuple[Node, ...], depth: int) -> Node | None:
        """The same piece of what each step splits."""
        pieces = [_piece(n) if is_projection(n) else None for n in steps]
        if pieces[0] is None or any(x is None or x[1:] != pieces[0][1:] for x in pieces):
            return None
        sources = tuple(x[0] for x in pieces if x is not None)
        whole = self.roll(sources, frozenset(n.args[0] for n in steps if isinstance(n.args[0], Node)), depth + 1)
        if whole is None:
            return None
        _, dim, start, width, kept = pieces[0]
        call = self.r.call
        found = call("slice", (whole, dim + 1, start, start + width, 1)) if kept else call("select", (whole, dim + 1, start))
        return found if _is_rolled(found, steps[0], self.count) else None

    def _states_beside(self, steps: tuple[Node, ...]) -> Node | None:
        """The states of a scan, with those before its first and after its last step."""
        for start, end in ((1, None), (0, -1), (1, -1)):
            inner = steps[start:end]
            if not _of_recurrence(inner) or any(not _same_type(n, inner[0]) for n in steps):
                continue
            if (states := self._pieces(inner)) is not None:
                beside = steps[:start], steps[start + len(inner) :]
                first, last = ([self.r.call("unsqueeze", (n, 0)) for n in some] for some in beside)
                return self.r.call("cat", ([*first, states, *last], 0))
        return None

    def _computed(self, steps: tuple[Node, ...], readers: frozenset[Node], depth: int) -> Node | None:
        """The operation that all steps call, called once. Nobody else may read a step: it would be computed twice."""
        first, row, readers = steps[0], ops.find(steps[0].target), readers | self.inside
        code = _code(row) if row is not None and depth < DEEPEST else None
        if row is None or code is None or any(n.target is not first.target or not readers.issuperset(n.users) for n in steps):
            return None
        if any(n in self.r.returned for n in steps) or any(not _same_type(n, first) for n in steps):
            return None
        before = (self.called, self.dear, self.joined)
        arguments = self._arguments(row, steps, depth)
        found = code(self, first, *arguments) if arguments is not None else None
        if found is None or not _is_rolled(found, first, self.count):
            self.called, self.dear, self.joined = before
            return None
        self.called += 1
        self.dear += row.kind in (Kind.CONTRACTION, Kind.REDUCTION, Kind.COMPOSITE) and row.name not in ACTIVATIONS
        return found

    def _projected(self, steps: tuple[Node, ...], readers: frozenset[Node], depth: int) -> Node | None:
        """The first of several results of an activation that all steps call (others are its private memory)."""
        if not all(is_projection(n) and n.args[1] == 0 and readers.issuperset(n.users) for n in steps):
            return None
        makers: Any = tuple(n.args[0] for n in steps)
        row = ops.find(makers[0].target) if is_op(makers[0]) else None
        if row is None or row.name not in ACTIVATIONS or any(m.target is not makers[0].target or len(m.users) > 1 for m in makers):
            return None
        arguments = self._arguments(row, makers, depth)
        made = None if arguments is None else _elementwise(self, makers[0], *arguments)
        if made is None:
            return None
        found = self.r.graph.call_function(operator.getitem, (made, 0))
        found.meta["val"] = value_of(made)[0]
        self.called += 1
        return found if _is_rolled(found, steps[0], self.count) else None

    def _arguments(self, row: Op, steps: tuple[Node, ...], depth: int) -> tuple[Bound, frozenset[str]] | None:
        calls = [row.bind(n.args, n.kwargs) for n in steps]
        bound: Bound = {}
        rolled: set[str] = set()
        for name, value in calls[0].items():
            column = tuple(c[name] for c in calls)
            if all(type(x) is type(value) and repr(x) == repr(value) for x in column):
                bound[name] = value
                continue
            if not all(isinstance(x, Node) and isinstance(value_of(x), torch.Tensor) for x in column):
                return None
            operand = self.roll(column, frozenset(steps), depth + 1)
            if operand is None:
                return None
            bound[name] = operand
            rolled.add(name)
        return (bound, frozenset(rolled)) if rolled else None

    def _joined(self, steps: tuple[Node, ...]) -> Node | None:
        """A stack of what the steps computed. Weights are not copied, nor results that the caller gets as well."""
        sources = [_source(n) for n in steps]
        if len(set(steps)) < self.count or any(n.op != "call_function" for n in sources):
            return None
        if len(self.r.exposed.intersection(sources)) > 1 or any(not _same_type(n, steps[0]) for n in steps):
            return None
        self.joined += 1
        return self.r.call("stack", (list(steps), 0))

    def again(self, node: Node, bound: Bound) -> Node:
        """Call the row of `node` with other arguments."""
        row = ops.find(node.target)
        assert row is not None
        args, kwargs = unbind(row.params, bound)
        return self.r.call(row.name, args, kwargs=kwargs)

    def flat(self, operand: Node) -> list[SizeArgument]:
        """The sizes of an operand without the steps as a dim of their own."""
        first, *others = value_of(operand).shape[1:]
        return arguments(self.r.graph, [first * self.count, *others])

    def aligned(self, operand: Node, rank: int) -> Node | None:
        """Insert dims behind the first, so that `operand` broadcasts as one step does to `rank` dims."""
        missing = rank + 1 - value_of(operand).dim()
        if missing == rank:  # numbers as tensors take no part in type promotion
            return None
        for _ in range(missing):
            operand = self.r.call("unsqueeze", (operand, 1))
        return operand


def _piece(node: Node) -> tuple[Node, int, int, int, bool] | None:
    """The source, dim, start and width of what the node selects of a tensor, and whether it keeps the dim."""
    index: Any = None
    maker: Any = node
    if is_projection(node):
        maker, index = node.args
    row = ops.find(maker.target) if is_op(maker) else None
    if row is None or row.name not in (_SELECTS if maker is node else _DIVIDES):
        return None
    call = row.bind(maker.args, maker.kwargs)
    source, dim, kept = call["self"], call["dim"], row.name in ("slice", "split")
    width: Any = 1
    if row.name == "split":
        width = call["split_size"]
    elif row.name == "slice":
        width = extent(value_of(node).shape[dim]) if call["step"] == 1 else None
    size = extent(value_of(source).shape[dim])
    start: Any = {"select": call.get("index"), "slice": call.get("start") or 0}.get(row.name, index)
    if not all(isinstance(n, int) for n in (dim, start, width, size)):
        return None
    start = start * width if row.name == "split" else start + size if start < 0 else start
    fits = width > 0 and 0 <= start <= size - width and (not kept or extent(value_of(node).shape[dim]) == width)
    return (source, dim % value_of(source).dim(), start, width, kept) if fits else None


_SELECTS, _DIVIDES = ("select", "slice"), ("unbind", "split")


def _source(node: Node) -> Node:
    """The node whose memory `node` shows."""
    while (may_share(node) or is_projection(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _same_type(a: Node, b: Node) -> bool:
    x, y = value_of(a), value_of(b)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.layout is not torch.strided:
        return False
    return has(x, y, tuple(y.shape))


def _is_rolled(found: Node, step: Node, count: int) -> bool:
    return has(value_of(found), value_of(step), (count, *value_of(step).shape))


def _elementwise(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    if {"dim", "axis"} & bound.keys():
        return None
    result = value_of(step)
    rank = (result[0] if isinstance(result, tuple) else result).dim()
    operands = {name: loop.aligned(bound[name], rank) for name in rolled}
    return None if None in operands.values() else loop.again(step, bound | operands)


def _shifted(*names: str, extra: int = 0) -> Rolled:
    """An operation on `self` whose arguments `names` are dims. `extra` is the number of dims that it adds."""

    def code(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
        x = "self" if "self" in bound else "input"
        if rolled != {x}:
            return None
        rank = value_of(bound[x]).dim() - 1
        given = {n: _moved(bound[n], rank, extra) for n in names}
        return loop.again(step, bound | given) if rank else None

    return code


def _moved(dims: Any, rank: int, extra: int) -> Any:
    if isinstance(dims, int):
        return dims % (rank + extra) + 1
    return [d % rank + 1 for d in dims or range(rank)]


def _permuted(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    rank = len(bound["dims"])
    return loop.again(step, bound | {"dims": [0, *(d % rank + 1 for d in bound["dims"])]})


def _reshaped(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    return loop.r.call("reshape", (bound["self"], [loop.count, *arguments(loop.r.graph, value_of(step).shape)]))


def _expanded(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    x = loop.aligned(bound["self"], value_of(step).dim())
    return None if x is None else loop.r.call("expand", (x, [loop.count, *arguments(loop.r.graph, value_of(step).shape)]))


def _copied(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    """What steps write over tensors of theirs, in the type and shape of these."""
    dtype, rank = value_of(step).dtype, value_of(step).dim()
    x = loop.aligned(bound["src"], rank) if "src" in rolled else None
    if x is None:
        return None
    if value_of(x).dtype != dtype:
        x = loop.r.call("cast", (x,), kwargs={"dtype": dtype})
    return loop.r.call("expand", (x, [loop.count, *arguments(loop.r.graph, value_of(step).shape)]))


def _transposed(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    return loop.r.call("transpose", (bound["self"], 1, 2)) if value_of(step).dim() == 2 else None


def _same(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    return bound["self"]


def _product(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    """A product of matrices, or of batches of them, as one batch."""
    call, a, b, shape = loop.r.call, bound["self"], bound["mat2"], value_of(step).shape
    if rolled == {"self"} and len(shape) == 2:
        flat = call("mm", (call("reshape", (a, loop.flat(a))), b))
        return call("view", (flat, [loop.count, *arguments(loop.r.graph, shape)]))
    if rolled != {"self", "mat2"}:
        return None
    if same_size(shape[-1], 1) and value_of(step).dtype is torch.float32:  # a kernel, where libraries compute one vector at a time
        row = call("transpose", (b, -2, -1))
        return call("sum", (call("mul", (a, row)), [-1], True))
    if len(shape) == 2:
        return call("bmm", (a, b))
    flat = call("bmm", tuple(call("reshape", (x, loop.flat(x))) for x in (a, b)))
    return call("view", (flat, [loop.count, *arguments(loop.r.graph, shape)]))


def _linear(loop: Loop, step: Node, bound: Bound, rolled: frozenset[str]) -> Node | None:
    if rolled == {"input", "weight"} and bound["bias"] is None and value_of(step).dim() == 2:
        return loop.r.call("bmm", (bound["input"], loop.r.call("transpose", (bound["weight"], 1, 2))))
    return loop.again(step, bound) if rolled == {"input"} else None


ACTIVATIONS = frozenset(row.name for row in ops.ROWS if row.activation) | {"log_sigmoid"}
"""Composites of one element each; the second result of the last is private."""

CODE: Mapping[str, Rolled] = {
    "sum": _shifted("dim"), "mean": _shifted("dim"), "amax": _shifted("dim"), "amin": _shifted("dim"),
    "softmax": _shifted("dim"), "select": _shifted("dim"), "slice": _shifted("dim"),
    "squeeze": _shifted("dim"), "unsqueeze": _shifted("dim", extra=1), "transpose": _shifted("dim0", "dim1"),
    "permute": _permuted, "t": _transposed, "view": _reshaped, "reshape": _reshaped, "expand": _expanded, "alias": _same,
    "copy": _copied, "mm": _product, "bmm": _product, "linear": _linear, **dict.fromkeys(ACTIVATIONS, _elementwise),
}  # fmt: skip
"""What one call for all steps looks like, by row; other pointwise rows broadcast."""


def _code(row: Op) -> Rolled | None:
    return CODE.get(row.name, _elementwise if row.kind is Kind.POINTWISE else None)


RULES: tuple[Rule, ...] = (
    Rule("loop.rolled", p(("stack", "cat"), "steps"), _rolled, "stack([f(x[0]), f(x[1]), ...]) = f(x), with steps as a dim of x"),
)
