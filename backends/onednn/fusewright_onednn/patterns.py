"""Which neighbours a library call takes in: the patterns of the fusion pass as data, and the matcher over
`OpView`s.

Nothing here knows the host: a pattern is found from ops, their arguments and who uses their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.region.match import Links

Scalars = tuple[float, ...]


@dataclass(frozen=True)
class PostOp:
    """A unary op as oneDNN computes it behind a product: torch's name for it, its numbers and its variant.

    `exact` is False where oneDNN loses a NaN that eager keeps (max(NaN, 0) is 0 there): then only under
    `finite_math`.
    """

    attr: str
    exact: bool = True
    scalars: Callable[[OpView], Scalars | None] = lambda op: ()
    algorithm: Callable[[OpView], str] = lambda op: ""


def _limits(op: OpView) -> Scalars | None:
    low, high = op.arg("min"), op.arg("max")
    return (float(low), float(high)) if isinstance(low, int | float) and isinstance(high, int | float) else None


def _slope(op: OpView) -> Scalars | None:
    slope = op.arg("negative_slope")
    return (float(slope),) if isinstance(slope, int | float) else None


POST_OPS: Mapping[str, PostOp] = {
    "gelu": PostOp("gelu", algorithm=lambda op: str(op.arg("approximate"))),
    "silu": PostOp("swish"),
    "tanh": PostOp("tanh"),
    "sigmoid": PostOp("sigmoid"),
    "hardswish": PostOp("hardswish"),
    "leaky_relu": PostOp("leaky_relu", scalars=_slope),
    "relu": PostOp("relu", exact=False),
    "clamp": PostOp("hardtanh", exact=False, scalars=_limits),
    "hardsigmoid": PostOp("hardsigmoid", exact=False),
}
"""Row of the opset -> post-op. Which ones lose NaN was measured;
tests/backends/onednn/test_special_values.py keeps watch."""

CHAINS: Mapping[str, tuple[str, ...]] = {
    "linear": ("unary",),
    "addmm": ("unary",),
    "mm": ("unary",),
    "conv": ("batch_norm", "add", "unary"),
}
"""What may follow each anchor, in this order, every stage optional. A linear takes no binary post-op: it
measures slower
than a separate addition, and up to nine times slower with a bias (docs/studies/onednn.md)."""

AFTER_ADD = frozenset({"relu"})
"""The unary ops that torch's mkldnn ops take behind a binary one."""


@dataclass(frozen=True)
class Match:
    """An anchor and the ops that its library call takes in. `last` makes the value that the call stores."""

    anchor: OpView
    batch_norm: OpView | None = None
    add: OpView | None = None
    unary: OpView | None = None

    @property
    def ops(self) -> tuple[OpView, ...]:
        """All ops of the match, in order."""
        return tuple(op for op in (self.anchor, self.batch_norm, self.add, self.unary) if op is not None)

    @property
    def posts(self) -> tuple[OpView, ...]:
        """The ops behind the anchor, in order."""
        return self.ops[1:]

    @property
    def last(self) -> OpView:
        return self.ops[-1]

    @property
    def other(self) -> Value | None:
        """What the binary post-op adds."""
        return None if self.add is None else _other(self.add, self._before_add)

    @property
    def _before_add(self) -> Value:
        return (self.batch_norm or self.anchor).out

    def post_op(self) -> tuple[str, Scalars, str]:
        """Attribute, scalars and algorithm as torch's mkldnn ops take them."""
        if self.unary is None:
            return "none", (), ""
        post = POST_OPS[self.unary.op]
        return post.attr, post.scalars(self.unary) or (), post.algorithm(self.unary)


Allowed = Callable[[str, OpView], bool]
"""(stage, op) -> whether the backend takes this op in this place; for what depends on constants and
options."""


def match(anchor: OpView, links: Links, allowed: Allowed = lambda stage, op: True) -> Match:
    """The longest chain behind `anchor` whose values in between nobody else sees."""
    found: dict[str, OpView] = {}
    value = anchor.out
    for stage in CHAINS.get(anchor.op, ()):
        op = links.only_user(value)
        if op is None:
            break
        if stage == "unary" and "add" in found and op.op not in AFTER_ADD:
            break
        if _STAGES[stage](op, value, links) and allowed(stage, op):
            found[stage] = op
            value = op.out
    return Match(anchor, **found)


def _is_unary(op: OpView, value: Value, links: Links) -> bool:
    post = POST_OPS.get(op.op)
    if post is None or op.args[0] != value or not _same_type(op.out, value):
        return False
    return post.scalars(op) is not None


def _is_batch_norm(op: OpView, value: Value, links: Links) -> bool:
    if op.op != "batch_norm" or op.arg("input") != value or not _same_type(op.out, value):
        return False
    return all(links.unused(v) for v in op.outs[1:])


def _is_add(op: OpView, value: Value, links: Links) -> bool:
    if op.op != "add" or op.arg("alpha") != 1 or not _same_type(op.out, value):
        return False
    other = _other(op, value)
    return other is not None and other != value and _same_type(other, value)


def _other(op: OpView, value: Value) -> Value | None:
    a, b = op.args[0], op.args[1]
    found: Any = b if a == value else a
    return found if isinstance(found, Value) else None


def _same_type(a: Value, b: Value) -> bool:
    x, y = a.spec, b.spec
    return isinstance(x, TensorSpec) and isinstance(y, TensorSpec) and (x.shape, x.dtype) == (y.shape, y.dtype)


_STAGES: Mapping[str, Callable[[OpView, Value, Links], bool]] = {
    "unary": _is_unary,
    "batch_norm": _is_batch_norm,
    "add": _is_add,
}
