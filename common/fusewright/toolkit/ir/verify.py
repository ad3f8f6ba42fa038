"""The verifier: every rule of `ir` that can be checked on a kernel alone. It is cheap, and `Builder.build`
always runs it."""

from __future__ import annotations

from collections.abc import Callable

from fusewright.toolkit.ir.extent import symbols
from fusewright.toolkit.ir.ir import Kernel, Node, used_symbols
from fusewright.toolkit.ir.optable import ACCUMULATE, OPS, REDUCTIONS, SCANS
from fusewright.toolkit.ir.printer import node_text
from fusewright.toolkit.ir.types import TYPES


class KernelError(ValueError):
    """A kernel that breaks a rule of the IR."""


def verify(kernel: Kernel) -> None:
    """Raises `KernelError` with the offending line when the kernel is malformed."""
    unknown = used_symbols(kernel) - set(kernel.symbols)
    if unknown:
        raise KernelError(f"{kernel.name}: unknown size symbols {sorted(unknown)}")
    if kernel.hints and len(kernel.hints) != len(kernel.symbols):
        raise KernelError(f"{kernel.name}: {len(kernel.hints)} hints for {len(kernel.symbols)} symbols")
    for s in kernel.scalars:
        if s.dtype not in ("f32", "f64", "i64", "bool"):
            raise KernelError(f"{kernel.name}: scalar {s.name} of type {s.dtype}")
    _Verifier(kernel).run()


class _Verifier:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.seen: dict[int, Node] = {}
        self.visible: set[int] = set()
        self.axes = kernel.axes_of() if self._ids_ordered() else {}
        n_p = len(kernel.p)
        self.rows = frozenset(range(n_p, len(kernel.sizes)))

    def _ids_ordered(self) -> bool:
        known: set[int] = set()
        for n in self.kernel.nodes():
            for u in n.uses():
                if u not in known:
                    raise KernelError(f"{self.kernel.name}: %{n.id} ({n.op}) uses %{u} before it is defined")
            if n.id in known:
                raise KernelError(f"{self.kernel.name}: %{n.id} is defined twice")
            known.add(n.id)
        return True

    def run(self) -> None:
        for stage in self.kernel.stages:
            if stage.over == "PR" and not self.kernel.r:
                raise KernelError(f"{self.kernel.name}: a row stage, but no row axes")
            here: list[Node] = []
            ready_later: set[int] = set()
            for n in stage.nodes:
                for u in n.uses():
                    if u not in self.visible:
                        self.fail(n, f"%{u} is not available in this stage (mark it keep, or recompute it)")
                self.check(n, stage.over)
                self.seen[n.id] = n
                here.append(n)
                (ready_later if n.op == "reduce" else self.visible).add(n.id)
            self.visible |= ready_later
            if stage.over == "PR":
                self.visible -= {n.id for n in here if n.op != "reduce" and not n.keep}

    def fail(self, n: Node, why: str) -> None:
        raise KernelError(f"{self.kernel.name}: {node_text(self.kernel, n)}: {why}")

    def expect(self, ok: bool, n: Node, why: str) -> None:
        if not ok:
            self.fail(n, why)

    def arg(self, n: Node, i: int) -> Node:
        return self.seen[n.args[i]]

    def check(self, n: Node, over: str) -> None:
        self.expect(n.dtype in TYPES, n, "unknown type")
        if over == "P":
            self.expect(not (self.axes[n.id] & self.rows), n, "a point stage depends on row axes")
            self.expect(not n.keep and n.op not in ("reduce", "scan"), n, "belongs in a row stage")
        if n.index is not None:
            self.expect(n.index.axes() <= set(range(len(self.kernel.sizes))), n, "unknown axis")
            for i in n.index.indirect:
                self.expect(self.seen[i.value].dtype == "i64", n, "an indirect index must be i64")
        rule = _RULES.get(n.op)
        if rule is not None:
            rule(self, n)
        elif n.op in OPS:
            self.pointwise(n)
        else:
            self.fail(n, "unknown op")

    def pointwise(self, n: Node) -> None:
        row = OPS[n.op]
        self.expect(len(n.args) == row.arity, n, f"takes {row.arity} operands")
        types = [self.arg(n, i).dtype for i in range(row.arity)]
        if n.op == "where":
            self.expect(types[0] == "bool", n, "the condition must be bool")
            types = types[1:]
            self.expect(types[0] == types[1] == n.dtype, n, f"types differ: {types}")
            return
        self.expect(len(set(types)) == 1, n, f"operand types differ: {types}")
        info = TYPES[types[0]]
        self.expect(info.kind in row.kinds, n, f"not defined for {types[0]}")
        self.expect(info.compute, n, f"math on {types[0]} needs a cast to f32")
        self.expect(n.dtype == ("bool" if row.result == "bool" else types[0]), n, "wrong result type")

    def memory(self, n: Node) -> None:
        buffers = self.kernel.buffers
        if n.buffer is None or n.index is None or not 0 <= n.buffer < len(buffers):
            self.fail(n, "no such buffer")
            return
        b = buffers[n.buffer]
        self.expect(b.dtype == n.dtype, n, f"buffer {b.name} holds {b.dtype}")
        if n.op == "load":
            self.expect(len(n.args) in (0, 2), n, "a load takes () or (mask, other)")
            self.expect(not n.args or self.arg(n, 0).dtype == "bool", n, "the mask must be bool")
            self.expect(not n.args or self.arg(n, 1).dtype == n.dtype, n, "`other` has another type")
        else:
            self.expect(b.access != "in", n, "store to an input")
            self.expect(len(n.args) in (1, 2), n, "a store takes (value) or (value, mask)")
            self.expect(self.arg(n, 0).dtype == n.dtype, n, "the value has another type")
            self.expect(len(n.args) == 1 or self.arg(n, 1).dtype == "bool", n, "the mask must be bool")
            self.expect(n.how in ACCUMULATE, n, "unknown way to accumulate")
            self.expect(not n.how or b.access == "inout", n, "accumulation needs an inout buffer")
            self.expect(n.how == "" or TYPES[n.dtype].kind != "bool", n, "bool does not accumulate")

    def reduction(self, n: Node) -> None:
        src = self.arg(n, 0)
        self.expect(n.how in REDUCTIONS, n, "unknown reduction")
        self.expect(TYPES[src.dtype].kind in REDUCTIONS[n.how], n, f"not defined for {src.dtype}")
        self.expect(TYPES[src.dtype].compute, n, f"reducing {src.dtype} needs a cast to f32")
        self.expect(n.dtype == ("i64" if n.how.startswith("arg") else src.dtype), n, "wrong result type")

    def scanning(self, n: Node) -> None:
        src = self.arg(n, 0)
        self.expect(n.how in SCANS, n, "unknown scan")
        self.expect(len(self.kernel.r) == 1, n, "a scan runs along a single row axis")
        self.expect(src.dtype == n.dtype and TYPES[src.dtype].compute, n, "wrong type")

    def bounded(self, n: Node) -> None:
        self.expect(n.dtype == "i64" and self.arg(n, 0).dtype == "i64" and n.extent is not None, n, "takes an i64")
        self.expect(len(n.args) == 1 or self.arg(n, 1).dtype == "bool", n, "the mask must be bool")
        if n.extent is not None:
            self.expect(symbols(n.extent) <= set(self.kernel.symbols), n, "unknown symbol")

    def scalar(self, n: Node) -> None:
        ok = isinstance(n.value, int) and 0 <= n.value < len(self.kernel.scalars)
        self.expect(ok and self.kernel.scalars[int(n.value or 0)].dtype == n.dtype, n, "no such scalar")

    def unary(self, n: Node) -> None:
        self.expect(len(n.args) == 1, n, "takes one operand")

    def literal(self, n: Node) -> None:
        self.expect(n.value is not None, n, "has no value")

    def index_value(self, n: Node) -> None:
        self.expect(n.index is not None and n.dtype == "i64", n, "gives an i64")


_RULES: dict[str, Callable[[_Verifier, Node], None]] = {
    "load": _Verifier.memory,
    "store": _Verifier.memory,
    "reduce": _Verifier.reduction,
    "scan": _Verifier.scanning,
    "bound": _Verifier.bounded,
    "cast": _Verifier.unary,
    "const": _Verifier.literal,
    "scalar": _Verifier.scalar,
    "index": _Verifier.index_value,
}
