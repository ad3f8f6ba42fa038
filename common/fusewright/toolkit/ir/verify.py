"""The specification in `ir` as rules: everything that can be checked on a kernel alone. The rules run after every pass over
kernels, and always in `Builder.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, update_wrapper
from typing import Any, ParamSpec, TypeAlias, TypeVar

from fusewright.forms.spec import FormError, Pass, Rule, Spec
from fusewright.toolkit.ir.extent import atoms
from fusewright.toolkit.ir.ir import Kernel, Node, used_symbols
from fusewright.toolkit.ir.optable import ACCUMULATE, OPS, REDUCTIONS, SCANS
from fusewright.toolkit.ir.printer import node_text
from fusewright.toolkit.ir.types import TYPES

X = ParamSpec("X")
R = TypeVar("R")


class KernelError(FormError, ValueError):
    """A kernel that breaks a rule of the IR."""


class Facts:
    """A kernel with the lookups that its rules need."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.nodes = list(kernel.nodes())
        self.by_id = {n.id: n for n in self.nodes}
        self.by_op: dict[str, list[Node]] = {}
        for n in self.nodes:
            self.by_op.setdefault(n.op, []).append(n)

    def of(self, *ops: str) -> Iterator[Node]:
        """The nodes of these ops."""
        return (n for op in ops for n in self.by_op.get(op, ()))

    @cached_property
    def pointwise(self) -> list[Node]:
        return list(self.of(*(op for op in self.by_op if op in OPS)))

    def arg(self, n: Node, i: int) -> Node:
        return self.by_id[n.args[i]]

    def dtypes(self, n: Node) -> list[str]:
        """The types of a node's operands."""
        return [self.by_id[a].dtype for a in n.args]


NodeCheck: TypeAlias = Callable[[Facts, Node], Iterator[str]]

OPERANDS: dict[str, tuple[int, ...]] = {
    "const": (0,), "scalar": (0,), "index": (0,), "load": (0, 2), "store": (1, 2), "bound": (1, 2),
    "cast": (1,), "reduce": (1,), "scan": (1, 2), "state": (1,), **{name: (row.arity,) for name, row in OPS.items()},
}  # fmt: skip
"""The operand counts that each op allows."""


def _each(check: NodeCheck, *ops: str) -> Callable[[Facts], Iterator[str]]:
    """Make a rule that reports `check`'s findings for each node of these ops (all nodes if none are given), with the node's
    text."""

    def run(f: Facts) -> Iterator[str]:
        for n in f.of(*ops) if ops else f.nodes:
            yield from (f"{node_text(f.kernel, n)}: {why}" for why in check(f, n))

    return run


def _parameters(f: Facts) -> Iterator[str]:
    k = f.kernel
    if unknown := set(used_symbols(k)) - set(k.symbols):
        yield f"unknown size symbols {', '.join(sorted(map(str, unknown)))}"
    if any(isinstance(s, int) and s < 0 for s in k.sizes):
        yield f"axes of sizes {', '.join(map(str, k.sizes))}"
    for s in k.scalars:
        if s.dtype not in ("f32", "f64", "i64", "bool"):
            yield f"scalar {s.name} of type {s.dtype}"
    for b in k.buffers:
        if b.dtype not in TYPES:
            yield f"buffer {b.name} of type {b.dtype}"


def _defined(f: Facts) -> Iterator[str]:
    known: set[int] = set()
    for n in f.nodes:
        for u in n.uses():
            if u not in known:
                yield f"{_name(n)} uses %{u} before it is defined"
        if n.id in known:
            yield f"{_name(n)} is defined twice"
        known.add(n.id)


def _nodes(f: Facts) -> Iterator[str]:
    for n in f.nodes:
        if n.op not in OPERANDS:
            yield f"{_name(n)}: unknown op"
        elif len(n.args) not in OPERANDS[n.op]:
            yield f"{_name(n)}: takes {' or '.join(map(str, OPERANDS[n.op]))} operands"
        if n.dtype not in TYPES:
            yield f"{_name(n)}: unknown type {n.dtype}"


def _places(f: Facts) -> Iterator[str]:
    axes = len(f.kernel.sizes)
    for n in f.nodes:
        if n.index is not None and any(not 0 <= a < axes for a in n.index.axes()):
            yield f"{_name(n)}: unknown axis"
        elif n.op in ("load", "store") and not (n.index and n.buffer in range(len(f.kernel.buffers))):
            yield f"{_name(n)}: no such buffer"
        elif n.op == "index" and n.index is None:
            yield f"{_name(n)}: no index"
        elif n.op == "scalar" and n.value not in range(len(f.kernel.scalars)):
            yield f"{_name(n)}: no such scalar"


def _stages(f: Facts) -> Iterator[str]:
    visible: set[int] = set()
    for stage in f.kernel.stages:
        if stage.over == "PR" and not f.kernel.r:
            yield "a row stage, but no row axes"
        reductions: set[int] = set()
        for n in stage.nodes:
            for u in n.uses():
                if u not in visible:
                    yield (
                        f"{node_text(f.kernel, n)}: %{u} is not available in this stage (mark it keep, or recompute it)"
                    )
            (reductions if n.op == "reduce" else visible).add(n.id)
        visible |= reductions
        if stage.over == "PR":
            visible -= {n.id for n in stage.nodes if n.op != "reduce" and not n.keep}


def _points(f: Facts) -> Iterator[str]:
    axes, rows = f.kernel.axes_of(), frozenset(range(len(f.kernel.p), len(f.kernel.sizes)))
    for n in (n for s in f.kernel.stages if s.over == "P" for n in s.nodes):
        if axes[n.id] & rows:
            yield f"{node_text(f.kernel, n)}: a point stage depends on row axes"
        if n.keep or n.op in ("reduce", "scan", "state"):
            yield f"{node_text(f.kernel, n)}: belongs in a row stage"
    for n in f.of("state"):
        if axes[n.args[0]] & rows:
            yield f"{node_text(f.kernel, n)}: its first state depends on row axes"


def _index(f: Facts, n: Node) -> Iterator[str]:
    if n.index is not None and any(f.by_id[i.value].dtype != "i64" for i in n.index.indirect):
        yield "an indirect index must be i64"
    if n.op == "index" and n.dtype != "i64":
        yield "gives an i64"


def _pointwise(f: Facts) -> Iterator[str]:
    for n in f.pointwise:
        if (why := _wrong_types(n, f.dtypes(n))) is not None:
            yield f"{node_text(f.kernel, n)}: {why}"


def _wrong_types(n: Node, types: list[str]) -> str | None:
    row = OPS[n.op]
    if n.op == "where":
        if types[0] != "bool":
            return "the condition must be bool"
        return None if types[1] == types[2] == n.dtype else f"types differ: {types[1:]}"
    if len(set(types)) > 1:
        return f"operand types differ: {types}"
    if TYPES[types[0]].kind not in row.kinds:
        return f"not defined for {types[0]}"
    if not TYPES[types[0]].compute:
        return f"math on {types[0]} needs a cast to f32"
    return None if n.dtype == ("bool" if row.result == "bool" else types[0]) else "wrong result type"


def _load(f: Facts, n: Node) -> Iterator[str]:
    yield from _element(f, n)
    if n.args and f.arg(n, 0).dtype != "bool":
        yield "the mask must be bool"
    if n.args and f.arg(n, 1).dtype != n.dtype:
        yield "`other` has another type"


def _element(f: Facts, n: Node) -> Iterator[str]:
    b = f.kernel.buffers[n.buffer or 0]
    if b.dtype != n.dtype:
        yield f"buffer {b.name} holds {b.dtype}"


def _store(f: Facts, n: Node) -> Iterator[str]:
    yield from _element(f, n)
    if f.kernel.buffers[n.buffer or 0].access == "in":
        yield "store to an input"
    if f.arg(n, 0).dtype != n.dtype:
        yield "the value has another type"
    if len(n.args) == 2 and f.arg(n, 1).dtype != "bool":
        yield "the mask must be bool"


def _accumulating(f: Facts, n: Node) -> Iterator[str]:
    if n.how not in ACCUMULATE:
        yield "unknown way to accumulate"
    elif n.how and f.kernel.buffers[n.buffer or 0].access != "inout":
        yield "accumulation needs an inout buffer"
    elif n.how and TYPES[n.dtype].kind == "bool":
        yield "bool does not accumulate"


def _reduction(f: Facts, n: Node) -> Iterator[str]:
    operand = f.arg(n, 0).dtype
    if n.how not in REDUCTIONS:
        yield "unknown reduction"
    elif TYPES[operand].kind not in REDUCTIONS[n.how]:
        yield f"not defined for {operand}"
    elif not TYPES[operand].compute:
        yield f"reducing {operand} needs a cast to f32"
    elif n.dtype != ("i64" if n.how.startswith("arg") else operand):
        yield "wrong result type"


def _scan(f: Facts, n: Node) -> Iterator[str]:
    operand = f.arg(n, 0).dtype
    if n.how not in SCANS:
        yield "unknown scan"
    if (len(n.args) == 2) != n.recurs or (n.recurs and f.arg(n, 1).op != "state"):
        yield "a recurrence takes a new state and the one before, another scan one operand"
    elif n.recurs and (len(set(f.dtypes(n))) > 1 or TYPES[operand].kind == "bool"):
        yield f"a recurrence of {f.dtypes(n)}"
    if len(f.kernel.r) != 1:
        yield "a scan runs along a single row axis"
    if operand != n.dtype or not TYPES[operand].compute:
        yield "wrong type"


def _states(f: Facts) -> Iterator[str]:
    for stage in f.kernel.stages:
        before = [n.id for n in stage.nodes if n.op == "state"]
        if sorted(u for n in stage.nodes if n.recurs for u in n.args[1:]) != before:
            yield "a state belongs to one recurrence of its stage"
        inside = set(before)
        for n in stage.nodes:
            if n.op not in ("scan", "reduce") and inside.intersection(n.uses()):
                inside.add(n.id)
        yield from (f"{node_text(f.kernel, n)}: a part of a step is kept" for n in stage.nodes if n.keep and n.id in inside)
    for n in f.of("state"):
        if f.arg(n, 0).dtype != n.dtype:
            yield f"{node_text(f.kernel, n)}: the first state has another type"


def _bound(f: Facts, n: Node) -> Iterator[str]:
    if n.dtype != "i64" or f.arg(n, 0).dtype != "i64" or n.extent is None:
        yield "takes an i64"
    if len(n.args) == 2 and f.arg(n, 1).dtype != "bool":
        yield "the mask must be bool"
    if n.extent is not None and not set(atoms(n.extent)) <= set(f.kernel.symbols):
        yield "unknown symbol"


def _literal(f: Facts, n: Node) -> Iterator[str]:
    if n.op == "const" and n.value is None:
        yield "has no value"
    if n.op == "scalar" and f.kernel.scalars[int(n.value or 0)].dtype != n.dtype:
        yield "the scalar has another type"


def _name(n: Node) -> str:
    """A short name for a node that may be too broken to print."""
    return f"%{n.id} ({n.op})"


RULES: tuple[Rule[Facts], ...] = (
    Rule("parameters", "sizes are made of the kernel's own symbols; scalars and buffers have known types", _parameters),
    Rule("defined", "each value is defined once, and before it is used", _defined, basis=True),
    Rule("nodes", "a node is of a known op and type, with as many operands as the op has", _nodes, basis=True),
    Rule("places", "buffers, axes and scalars that a node names are there", _places, basis=True),
    Rule("stages", "a stage uses its own values, those of point stages before it, reductions and what is kept", _stages),
    Rule("points", "what depends on row axes, reduces, scans or is kept stands in a row stage", _points),
    Rule("indices", "an index is an i64, and so is what it is made of", _each(_index)),
    Rule("pointwise", "operands and result have the types of the op table; half types are cast first", _pointwise),
    Rule("loads", "a load gives what its buffer holds, where it is masked too", _each(_load, "load")),
    Rule("stores", "a store puts what its buffer holds into an output", _each(_store, "store")),
    Rule("accumulation", "stores add up numbers, in known ways, in inout buffers", _each(_accumulating, "store")),
    Rule("reductions", "a reduction exists for its operand's type, and gives it or a position", _each(_reduction, "reduce")),
    Rule("scans", "a scan exists, runs along a single row axis and keeps the type", _each(_scan, "scan")),
    Rule("states", "a state is read by one recurrence, and what is computed from it is not kept", _states),
    Rule("bounds", "a check takes an i64, a size of the kernel's symbols and a bool mask", _each(_bound, "bound")),
    Rule("literals", "a constant has a value, a scalar its parameter's type", _each(_literal, "const", "scalar")),
)

KERNEL: Spec[Kernel] = Spec("kernel", KernelError, RULES, Facts, name=lambda kernel: kernel.name)


def verify(kernel: Kernel, after: str = "building it") -> None:
    """Raise `KernelError` with the offending lines if the kernel is malformed."""
    KERNEL.check(kernel, after)


def kernel_pass(
    name: str, takes: str = "kernel", made: Callable[[Any], Iterable[Kernel]] = lambda kernel: (kernel,)
) -> Callable[[Callable[X, R]], Pass[X, R]]:
    """Turn a function into a pass over kernels; `made` extracts the kernels from its result."""

    def wrap(run: Callable[X, R]) -> Pass[X, R]:
        wrapped = Pass(name, takes, KERNEL, run, lambda args, result: made(result))
        update_wrapper(wrapped, run)
        return wrapped

    return wrap
