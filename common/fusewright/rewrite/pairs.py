"""Complex numbers as pairs of real ones, for which kernels have types: products (rotary embeddings by `view_as_complex`), sums,
conjugates, magnitudes, what moves or sums them, and what is around Fourier transforms. What else reads complex numbers gets a view
of the pairs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.spec import by_stride, tensor_spec, value_of
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter, is_call
from fusewright.storage import lazy

CONJ = "aten._conj.default"
ID = "complex.pairs"
"""The rule's id in reports, and for `disable_rules`."""

MOVES = (
    "cat", "copy", "flip", "mean", "select_backward", "select_scatter", "slice_backward", "slice_scatter", "stack", "sum",
)  # fmt: skip
"""Rows that treat a real and an imaginary part alike."""

VIEWS = ("expand", "permute", "select", "slice", "transpose", "unsqueeze", "view")

NEW_DIM = ("select_backward", "stack", "unsqueeze")
"""Rows whose `dim` is one of the result, which has one more than the operand."""

Parts = tuple[Any, Any]
"""Real and imaginary part: nodes, or numbers."""


def split(graph: Graph, log: RuleLog) -> None:
    """Rewrite a canonical graph in place."""
    if ID in log.disabled or not any(_is_complex(n) for n in graph.nodes):
        return
    pairs = _Pairs(Rewriter(graph, log), log)
    for node in list(graph.nodes):
        if node.op == "call_function" and (node.users or node in pairs.r.returned):
            pairs.rewrite(node)
    drop_dead_code(graph)


def _is_complex(node: Any) -> bool:
    val = value_of(node) if isinstance(node, Node) else None
    return isinstance(val, torch.Tensor) and val.is_complex()


def _behind(x: Node, views: Sequence[str]) -> Node:
    """What a node is views of."""
    while is_call(x, *views) and isinstance(x.args[0], Node):
        x = x.args[0]
    return x


Rule: TypeAlias = "Callable[[_Pairs, Node], Parts | Node | None]"
"""Makes the parts of a node, its pair (of a complex node), or its real result. None leaves it as it is."""


@dataclass
class _Pairs:
    r: Rewriter
    log: RuleLog
    parts: dict[Node, Parts] = field(default_factory=dict)
    """Complex nodes whose parts are computed, also those that remain for other readers."""

    def rewrite(self, node: Node) -> None:
        name = READER.name(node)
        make = RULES.get(name)
        if make is None or not self._known(node) or not self.log.allows(ID):
            return
        made = self.r.attempt(node, self._made, node, make)
        if made is not None:
            self.log.hit(ID)
            self.r.replace(node, made)

    def _known(self, node: Node) -> bool:
        """Whether a call of tensors has complex ones, whose pairs a view can show."""
        given = node.all_input_nodes
        tensors = [value_of(n) for n in (node, *given)]
        if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in tensors):
            return False
        plain = all(n in self.parts or not lazy(value_of(n)) for n in given) and not compat.is_wrapper(value_of(node))
        return plain and any(map(_is_complex, (node, *given))) and bool(node.kwargs.get("alpha", 1) == 1)

    def _made(self, node: Node, make: Rule) -> Node | None:
        found = make(self, node)
        if found is None:
            return None
        if not isinstance(found, tuple):
            return (self._joined if _is_complex(node) else self._in_order)(found, node)
        self.parts[node] = found
        if READER.name(node) == CONJ or lazy(value_of(node)):
            return None  # other readers see the view, which costs nothing, and its memory is that of the operand
        made = self._joined(self.call("stack", (list(found), -1)), node)
        if made is None:
            del self.parts[node]
            return None
        self.parts[made] = found
        return made

    def _joined(self, pair: Node, node: Node) -> Node | None:
        """The complex numbers of a pair, laid out as `node`."""
        ordered = self._in_order(pair, node)
        if ordered is None or not compat.statically_true(value_of(ordered).stride(-1) == 1):  # torch 2.10 stacks images by channels
            return None
        made = self.call("view_as_complex", (ordered,))
        return made if _alike(value_of(made), value_of(node)) else None

    def _in_order(self, made: Node, node: Node) -> Node | None:
        """Give a result the strides of the original, where that is a matter of order."""
        val, got = value_of(node), value_of(made)
        if not tensor_spec(val).static:
            return made if got.dim() > val.dim() or _alike(got, val) else None
        order = by_stride(val) + list(range(val.dim(), got.dim()))
        if order == sorted(order):
            return made
        back = [order.index(d) for d in range(len(order))]
        copy = self.call("clone", (self.call("permute", (made, order)),), memory_format=torch.contiguous_format)
        return self.call("permute", (copy, back))

    def call(self, name: str, args: tuple[Any, ...], **kwargs: Any) -> Node:
        return self.r.call(name, args, kwargs=kwargs)

    def of(self, x: Any, like: Node) -> Parts:
        """The parts of an operand, in the type of the result's. A real one has the imaginary part 0, as in eager's products."""
        wanted = value_of(like).dtype.to_real() if _is_complex(like) else value_of(like).dtype
        if not isinstance(x, Node):
            return (x.real, x.imag) if isinstance(x, complex) else (x, 0.0)
        if _is_complex(x):
            real, imag = self._parts(x)
            return self._cast(real, wanted), self._cast(imag, wanted)
        return self._cast(x, wanted), 0.0

    def _parts(self, x: Node) -> Parts:
        if x not in self.parts:
            self.parts[x] = tuple(self.call("select", (self.pair(x), -1, k)) for k in (0, 1))  # type: ignore[assignment]
        return self.parts[x]

    def pair(self, x: Node) -> Any:
        """A complex tensor with its parts as the last dim. Views of what is written as a pair are views of the pair: kernels see
        through them."""
        if is_call(x, "view_as_complex"):
            return x.args[0]
        if lazy(value_of(x)):
            return self.call("stack", (list(self.parts[x]), -1))
        return self.moved(x) if self._of_pair(x) else self.call("view_as_real", (self._in_memory(x),))

    def _of_pair(self, x: Node) -> bool:
        return is_call(_behind(x, VIEWS), "view_as_complex")

    def _in_memory(self, x: Node) -> Node:
        """Resolve what an operator outside the opset returns, but for Fourier transforms: on GPUs, an SVD's is a lazy conjugate,
        which is not traced as one."""
        source = _behind(x, (*VIEWS, "alias", "reshape", "squeeze", "t"))
        source = source.args[0] if source.target is operator.getitem else source  # type: ignore[assignment]
        made = source.op == "call_function" and ops.find(source.target) is None
        if not made or str(source.target).startswith("aten._fft"):
            return x
        resolved = self.r.graph.call_function(torch.ops.aten.resolve_conj.default, (x,))
        resolved.meta.update(x.meta)
        return resolved

    def moved(self, node: Node) -> Node:
        """A call of complex tensors, made of their pairs: dims count from the left."""
        row = ops.find(node.target)
        assert row is not None
        given = row.bind(node.args, node.kwargs)
        rank = value_of(node.all_input_nodes[0]).dim()
        args = tuple(self._argument(row.name, name, arg, rank) for name, arg in zip(given, node.args, strict=False))
        return self.call(row.name, args, **{name: self._argument(row.name, name, arg, rank) for name, arg in node.kwargs.items()})

    def _argument(self, row: str, name: str, arg: Any, rank: int) -> Any:
        match name:
            case "dim" | "dims" | "dim0" | "dim1":
                found = _from_left(arg, rank + (row in NEW_DIM))
                return [*found, rank] if row == "permute" else found
            case "size" | "input_sizes":
                return [*arg, 2]
            case "dtype":
                return None
        return map_arg(arg, self.pair)

    def _cast(self, x: Any, dtype: torch.dtype) -> Any:
        return self.call("cast", (x,), dtype=dtype) if isinstance(x, Node) and value_of(x).dtype != dtype else x

    # -- arithmetic of parts, in which numbers fold

    def mul(self, x: Any, y: Any) -> Any:
        if not isinstance(x, Node):
            return x * y if not isinstance(y, Node) else self.call("mul", (y, x))
        return self.call("mul", (x, y))

    def add(self, x: Any, y: Any, sign: int = 1) -> Any:
        if not isinstance(x, Node) and not isinstance(y, Node):
            return x + sign * y
        if not isinstance(x, Node):
            return self.call("add", (y, x)) if sign > 0 else self.call("rsub", (y, x))
        return self.call("add" if sign > 0 else "sub", (x, y))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=False)
    ones = [compat.statically_true(n == 1) for n in b.shape]
    return a.dtype == b.dtype and a.dim() == b.dim() and all(
        compat.statically_true(x == y) or (k >= b.dim() and ones[k - b.dim()]) for k, (x, y) in enumerate(pairs)
    )


def _mul(c: _Pairs, node: Node) -> Parts:
    (a, b), (x, y) = (c.of(arg, node) for arg in node.args)
    return c.add(c.mul(a, x), c.mul(b, y), -1), c.add(c.mul(a, y), c.mul(b, x))


def _sum(sign: int) -> Callable[[_Pairs, Node], Parts | None]:
    """Eager multiplies the second operand by `sign`, a complex number: what is infinite or NaN in one part is NaN in the other."""

    def rule(c: _Pairs, node: Node) -> Parts | None:
        (a, b), (x, y) = (c.of(arg, node) for arg in node.args)
        real, imag = c.add(a, c.add(x, c.mul(y, 0.0), -1), sign), c.add(b, c.add(y, c.mul(x, 0.0)), sign)
        shape = value_of(node).shape
        alike = all(isinstance(p, Node) and _sizes(value_of(p).shape, shape) for p in (real, imag))
        return (real, imag) if alike else None  # what only one part broadcasts to cannot be stacked

    return rule


def _sizes(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(compat.statically_true(x == y) for x, y in zip(a, b, strict=True))


def _neg(c: _Pairs, node: Node) -> Parts:
    return tuple(c.call("neg", (p,)) for p in c.of(node.args[0], node))  # type: ignore[return-value]


def _conj(c: _Pairs, node: Node) -> Parts:
    real, imag = c.of(node.args[0], node)
    return real, c.call("neg", (imag,))


def _copied(c: _Pairs, node: Node) -> Parts | Node:
    """A copy of what is known as parts, or of their pair: kernels copy transposed tensors faster."""
    (x, *_) = node.args
    return c.of(x, node) if x in c.parts else c.call("clone", (c.pair(x),), memory_format=torch.contiguous_format)  # type: ignore[arg-type]


def _complex(c: _Pairs, node: Node) -> Parts | None:
    parts: list[Any] = [*node.args]
    shape = value_of(node).shape
    alike = all(_sizes(value_of(x).shape, shape) for x in parts) and _of_one_dtype(parts)
    return (parts[0], parts[1]) if alike else None


def _of_one_dtype(parts: Sequence[Any]) -> bool:
    """Whether both are of one dtype: eager refuses others."""
    return value_of(parts[0]).dtype == value_of(parts[1]).dtype


def _polar(c: _Pairs, node: Node) -> Parts | None:
    size, angle = parts = list[Any](node.args)
    if not _of_one_dtype(parts) or value_of(size).dtype == torch.float16:
        return None  # eager has no polar of half types
    return c.call("mul", (size, c.call("cos", (angle,)))), c.call("mul", (size, c.call("sin", (angle,))))


def _exp(c: _Pairs, node: Node) -> Parts:
    real, imag = c.of(node.args[0], node)
    size = c.call("exp", (real,))
    turned = c.call("mul", (size, c.call("sin", (imag,))))
    no_turn = c.call("eq_scalar", (imag, 0))  # infinite sizes too
    return c.call("mul", (size, c.call("cos", (imag,)))), c.call("where", (no_turn, imag, turned))


def _abs(c: _Pairs, node: Node) -> Node:
    return c.call("hypot", c.of(node.args[0], node))


def _angle(c: _Pairs, node: Node) -> Node:
    real, imag = c.of(node.args[0], node)
    return c.call("atan2", (imag, real))


def _sgn(c: _Pairs, node: Node) -> Parts:
    real, imag = c.of(node.args[0], node)
    size = c.call("hypot", (real, imag))
    zero = c.call("eq_scalar", (size, 0))
    return tuple(c.call("masked_fill", (c.call("div", (p, size)), zero, 0)) for p in (real, imag))  # type: ignore[return-value]


def _cast(c: _Pairs, node: Node) -> Parts | None:
    """Of another complex type: a real tensor has no second part to be stacked."""
    (x,) = node.args
    return c.of(x, node) if _is_complex(x) and _is_complex(node) else None


def _as_real(c: _Pairs, node: Node) -> Node | None:
    """The pairs, where they are in memory as the view shows them."""
    x = node.args[0]
    pair = x.args[0] if is_call(x, "view_as_complex") else None
    return pair if isinstance(pair, Node) and node not in c.r.returned and _alike(value_of(pair), value_of(node)) else None


def _moved(c: _Pairs, node: Node) -> Node | None:
    """What moves numbers, or sums them, does so with pairs."""
    like, wanted = _alike_operands(node), node.kwargs.get("dtype")
    return None if like is None or wanted not in (None, like.dtype) else c.moved(node)


def _alike_operands(node: Node) -> torch.Tensor | None:
    """The first operand of a call whose operands all have dims and are complex numbers of the result's type. Others are rare:
    what is cast while it moves, and empty ones that a cat skips."""
    vals = [value_of(n) for n in node.all_input_nodes]
    ranks = {v.dim() for v in vals} if READER.name(node) == "cat" else {1}
    alike = all(v.dtype == value_of(node).dtype for v in vals)
    return vals[0] if alike and len(ranks) == 1 and vals[0].dim() else None


def _from_left(dims: Any, rank: int) -> Any:
    """Dims without those that count from the right; all for none."""
    return dims % rank if isinstance(dims, int) else [d % rank for d in dims or range(rank)]


def _rolled(c: _Pairs, node: Node) -> Node | None:
    """Without dims, eager rolls what is flattened."""
    return _moved(c, node) if node.args[2:] and node.args[2] else None


def _full(c: _Pairs, node: Node) -> Parts | Node | None:
    size, number, *rest = node.args
    if isinstance(number, Node):
        return None
    kwargs = {**node.kwargs, "dtype": value_of(node).dtype.to_real()}
    real, imag = complex(number).real, complex(number).imag  # type: ignore[arg-type]
    if real == imag:
        return c.call("full", ([*size, 2], real, *rest), **kwargs)  # type: ignore[misc]
    return c.call("full", (size, real, *rest), **kwargs), c.call("full", (size, imag, *rest), **kwargs)


def _padded(c: _Pairs, node: Node) -> Node | None:
    x, pad, number = node.args
    return c.call("constant_pad_nd", (c.pair(x), [0, 0, *pad], 0.0)) if number == 0 else None  # type: ignore[misc,arg-type]


RULES: dict[str, Rule] = {
    "mul": _mul, "add": _sum(1), "sub": _sum(-1), "neg": _neg, CONJ: _conj, "clone": _copied,
    "aten.complex.default": _complex, "aten.polar.default": _polar, "exp": _exp, "sgn": _sgn, "cast": _cast,
    "abs": _abs, "aten.angle.default": _angle, "view_as_real": _as_real, "full": _full, "constant_pad_nd": _padded, "roll": _rolled,
    **dict.fromkeys(MOVES, _moved),
}  # fmt: skip
"""Row, or operator without a row -> how it is computed."""

assert all("." in name or name in ops.OPS for name in RULES)
