"""Emit the values of a kernel as Metal statements: each is computed once, where it is needed, as `v<id>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.optable import OPS
from fusewright.toolkit.ir.types import TYPES
from fusewright_mps.emit.addressing import Addresses, atom
from fusewright_mps.emit.operators import (
    COMPARISONS,
    DIVISIONS,
    KEEPS_RELATIVE_ERROR,
    METAL,
    NOT_NEGATIVE,
    cast,
    form_of,
    literal,
)
from fusewright_mps.emit.schedule import Config
from fusewright_mps.emit.source import Unsupported, Variant

_TAKEN = re.compile(
    r"(?:[svwoprahtcyzngbkqm]\d*|turn|side|at|lane|tid|simd|grid|base|inside|alive|sizes|reals|integers|errors|fw_.*|[if]n|auto|bool|char|class|"
    r"const|constant|device|do|double|else|enum|false|float|for|half|bfloat|if|inline|int|kernel|long|metal|new|shim|short|signed|"
    r"sizeof|static|struct|template|this|thread|threadgroup|true|typedef|typename|uint|union|unsigned|using|vertex|fragment|void)"
)
"""Names that generated code uses itself, and Metal's keywords."""


class Writer:
    """Emits the lines of one function. `names` holds the current text of each value, `where` that of each axis."""

    def __init__(self, kernel: Kernel, config: Config, variant: Variant) -> None:
        self.kernel, self.config, self.variant = kernel, config, variant
        self.nodes = kernel.node_map()
        self.axes = kernel.axes_of()
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[int, str] = {}
        self.where: dict[int, str] = {}
        self.asked = "true"
        """Condition that this thread's element exists; checks must not report elements that do not."""
        self.integer = "long" if variant.wide else "int"
        self.buffers = buffer_names(kernel)
        self.address = Addresses(variant.wide, self.axis, self._index_value)
        self.soft = softened(kernel)
        self.used = {u for n in kernel.nodes() for u in n.uses()}

    # text

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Emit a block in braces after `head`; names defined inside are dropped at its end."""
        self.put(f"{head} {{".lstrip())
        names, where = dict(self.names), dict(self.where)
        self.depth += 1
        start = len(self.lines)
        yield
        self.lines[start:] = without_unused(self.lines[start:])
        self.depth -= 1
        self.names, self.where = names, where
        self.put("}")

    def axis(self, a: int) -> str:
        return self.where.get(a, "0")

    def axis_name(self, a: int) -> str:
        """Return p0, p1, ..., r0, ..., as in the printed IR."""
        n_p = len(self.kernel.p)
        return f"p{a}" if a < n_p else f"r{a - n_p}"

    def operand(self, i: int) -> str:
        n = self.nodes[i]
        if n.op == "const":
            return literal(n.value if n.value is not None else 0, n.dtype)
        return self.names[i]

    def _index_value(self, i: int) -> str:
        """Return a value as an index. A bounds-checked index fits 32 bits if all offsets do."""
        text = self.operand(i)
        return text if self.variant.wide or self.nodes[i].op != "bound" else f"int({text})"

    def index(self, n: Node) -> str:
        return self.address.index(_present(n.index))

    def place(self, n: Node) -> str:
        """Return the element that a node loads or stores."""
        return f"{self.buffers[n.buffer or 0]}[{self.index(n)}]"

    # values

    def value(self, n: Node) -> None:
        """Emit the value of a node, unless it is already defined here."""
        if n.id in self.names or n.op == "const":
            return
        kind = METAL.get(n.dtype, "float")
        tests = self._load_tests(n) if n.op == "load" else []
        if tests:
            self.put(f"{kind} v{n.id} = {self.operand(n.args[1]) if n.args else literal(0, n.dtype)};")
            self.put(f"if ({' && '.join(tests)}) {{ v{n.id} = {self.place(n)}; }}")
        elif n.op == "bound" and n.id not in self.used:
            self.put(f"{self._expression(n)};")  # emitted though unused: a check is an effect
        else:
            self.put(f"const {kind} v{n.id} = {self._expression(n)};")
        self.names[n.id] = f"v{n.id}"

    def _load_tests(self, n: Node) -> list[str]:
        """Return the conditions for a load. Elements of other threads are not loaded, because those may store them."""
        return [self.operand(n.args[0])] if n.args else []

    def _expression(self, n: Node) -> str:
        if n.op in OPS:
            return self._pointwise(n)
        if n.op == "load":
            return self.place(n)
        if n.op == "cast":
            return cast(self.operand(n.args[0]), self.nodes[n.args[0]].dtype, n.dtype)
        if n.op == "scalar":
            return self._scalar(int(n.value or 0))
        if n.op == "index":
            return f"long({self.index(n)})"
        if n.op == "bound":
            return self._bound(n)
        raise Unsupported(f"there is no Metal for {n.op}")

    def _scalar(self, k: int) -> str:
        dtype = self.kernel.scalars[k].dtype
        real = dtype in ("f32", "f64")
        at = sum((s.dtype in ("f32", "f64")) == real for s in self.kernel.scalars[:k])
        text = f"{'reals' if real else 'integers'}[{at}]"
        return f"{text} != 0l" if dtype == "bool" else text

    def _pointwise(self, n: Node) -> str:
        dtype = self.nodes[n.args[-1]].dtype
        args = [self.operand(a) for a in n.args]
        if n.op in COMPARISONS and n.args[0] == n.args[1]:
            args[1] = f"fw_itself({args[1]})"  # hides the operand: compilers warn of comparisons with itself
        if n.op in DIVISIONS and TYPES[dtype].kind == "int":
            args[1] = self._divisor(args[1])
        text = form_of(n.op, dtype, n.id in self.soft)
        return text.format(*(atom(a) if not _in_call(text, k) else a for k, a in enumerate(args)))

    def _divisor(self, text: str) -> str:
        """Return a divisor that is never zero; zeros are reported where eager raises an error."""
        if not self.variant.check_division:
            return f"fw_nonzero({text})"
        return f"fw_divisor({text}, {self.asked}, errors, {sites(self.kernel)})"

    def _bound(self, n: Node) -> str:
        i, extent = self.operand(n.args[0]), n.extent or 0
        size = f"{extent}l" if isinstance(extent, int) else f"long({self.address.extent(extent)})"
        low = f"-{size}" if n.how == "wrap" else "0l"
        asked = [self.asked] if self.asked != "true" else []
        asked += [self.operand(n.args[1])] if len(n.args) > 1 else []
        site = int(n.value or 1)
        return f"fw_bound({i}, {low}, {size}, {' && '.join(asked) or 'true'}, errors, {site - 1}, {site}u)"


_AXIS = re.compile(r"\s*const \w+ ([pr]\d*) = ")


def without_unused(lines: list[str]) -> list[str]:
    """Return the lines of a block without definitions of unused axes."""
    out: list[str] = []
    words: set[str] = set()
    for line in reversed(lines):
        named = _AXIS.match(line)
        if named is None or named[1] in words:
            out.append(line)
            words.update(re.findall(r"\w+", line))
    return out[::-1]


def _in_call(text: str, k: int) -> bool:
    """Whether the k-th operand is a whole call argument, so that it needs no parentheses."""
    return re.search(rf"[(,] ?\{{{k}\}}[,)]", text) is not None


def _present(index: Index | None) -> Index:
    if index is None:
        raise ValueError("the node lacks an index; verify the kernel first")
    return index


def sites(kernel: Kernel) -> int:
    """Return the number of checks with their own error slot; all divisions share the slot after them."""
    return max((int(n.value or 1) for n in kernel.nodes() if n.op == "bound"), default=0)


def divides(kernel: Kernel) -> bool:
    """Whether the kernel divides integers."""
    nodes = kernel.node_map()
    return any(n.op in DIVISIONS and TYPES[nodes[n.args[0]].dtype].kind == "int" for n in nodes.values())


def buffer_names(kernel: Kernel) -> list[str]:
    """Return parameter names for the buffers that collide with nothing else."""
    out: list[str] = []
    for b in kernel.buffers:
        word = "".join(c if c.isascii() and c.isalnum() else "_" for c in b.name)
        word = word if word[:1].isalpha() and not _TAKEN.fullmatch(word) else f"b_{word}"
        while word in out:
            word += "_"
        out.append(word)
    return out


def softened(kernel: Kernel) -> frozenset[int]:
    """Return the f32 values that are only ever rounded to a half type, directly or after ops that preserve relative error: an
    error of a few f32 units in the last place is negligible next to that rounding."""
    users: dict[int, list[Node]] = {}
    for n in kernel.nodes():
        for u in n.uses():
            users.setdefault(u, []).append(n)
    nodes, found = kernel.node_map(), set[int]()

    def keeps(user: Node, i: int) -> bool:
        if user.op == "cast":
            return user.dtype in ("bf16", "f16")
        if user.op == "reduce":
            return user.how == "sum" and nodes[i].op in NOT_NEGATIVE and user.id in found
        return user.op in KEEPS_RELATIVE_ERROR and user.id in found and (user.op != "where" or i != user.args[0])

    for n in reversed(list(kernel.nodes())):
        if n.dtype == "f32" and n.id in users and all(keeps(user, n.id) for user in users[n.id]):
            found.add(n.id)
    return frozenset(found)


def refuse_f64(kernel: Kernel) -> None:
    """Raise `Unsupported` for f64, which Metal lacks. Constants and scalars that are only cast pass: the host rounds them."""
    users: dict[int, Sequence[Node]] = {}
    for n in kernel.nodes():
        for u in n.uses():
            users[u] = [*users.get(u, ()), n]
    for b in kernel.buffers:
        if b.dtype == "f64":
            raise Unsupported(f"{b.name} is f64, which Metal does not have; use float32")
    for n in kernel.nodes():
        alone = n.op in ("const", "scalar") and all(u.op == "cast" for u in users.get(n.id, ()))
        if n.dtype == "f64" and not alone:
            raise Unsupported(f"{n.op} on f64, which Metal does not have; use float32")
