"""Which f32 values may be approximate: those that reach memory only after they were rounded to a half type.

Eager rounds the result of each op to the half type, so a relative error of 2^-17 in what a kernel holds in fp32 disappears in it.
The correctly rounded forms cost up to twenty instructions an element, which a kernel of one silu cannot hide behind its loads."""

from __future__ import annotations

from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright_triton.emit.operators import FORMS

HALVES = ("bf16", "f16")
PASSES_ON = frozenset({"add", "sub", "mul", "div", "neg", "abs", "minimum", "maximum", "fmin", "fmax", "where", "sqrt", "rsqrt"})
"""Ops that do not enlarge an error by more than eager's own rounding of their operands."""
REDUCES = frozenset({"sum", "mean", "m2", "max", "min"})

APPROXIMATE: dict[str, str] = {
    **{op: FORMS[op].floats for op in ("div", "reciprocal", "sqrt")},  # which `EXACT_F32` replaces
    "exp": "tl.exp({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
}
"""The Triton text of approximate forms: 2 ulp, for exponentials 2^-17 at the ends of their range."""


def approximable(kernel: Kernel, first: int = 0) -> frozenset[int]:
    """Return the f32 values all of whose uses end in a cast to a half type, without a comparison, an integer or a store in between:
    uses in a function that begins with stage `first` and computes again what it needs of earlier stages, but for reductions."""
    users: dict[int, list[Node]] = {}
    nodes = _computed(kernel, first)
    for n in nodes:
        for u in n.uses():
            users.setdefault(u, []).append(n)
    found = set[int]()
    for n in reversed(nodes):
        if n.dtype == "f32" and n.id in users and all(_forgives(u, n.id, found) for u in users[n.id]):
            found.add(n.id)
    return frozenset(found)


def _computed(kernel: Kernel, first: int) -> list[Node]:
    """Return the nodes of stages from `first` on and those of earlier ones behind them, in order."""
    earlier = {n.id: n for s in kernel.stages[:first] for n in s.nodes}
    wanted, todo = set[int](), [u for s in kernel.stages[first:] for n in s.nodes for u in n.uses()]
    while todo:
        n = earlier.get(todo.pop())
        if n is not None and n.id not in wanted and n.op != "reduce":
            wanted.add(n.id)
            todo.extend(n.uses())
    return [n for k, s in enumerate(kernel.stages) for n in s.nodes if k >= first or n.id in wanted]


def _forgives(user: Node, value: int, found: set[int]) -> bool:
    """Return whether an error of `value` is invisible in what this use makes of it."""
    if user.op == "cast":
        return user.dtype in HALVES
    if user.op == "where" and user.args[0] == value:
        return False
    passes = user.op in PASSES_ON or (user.op == "reduce" and user.how in REDUCES)
    return passes and user.id in found
