"""Reductions and scans: the variables carried through a loop over the row, the final step, and how partial results combine.

All texts are for one node. `x` is the operand as a block over the row with masked positions replaced by the
identity, except where `keep` says otherwise: `m2` and the arg-reductions skip them with the mask itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.toolkit.ir.ir import Node
from fusewright.toolkit.ir.types import TYPES, DType
from fusewright_triton.emit.operators import TRITON, constant, literal

STEPS = {
    "sum": "{0} + {1}",
    "mean": "{0} + {1}",
    "prod": "{0} * {1}",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
}
"""Update of an accumulator by one more element; max and min depend on the kind, see `step`."""


def identity(how: str, dtype: DType) -> str:
    """Return the literal of the identity element."""
    info = TYPES[dtype]
    if how in ("max", "argmax", "min", "argmin"):
        low = how.endswith("max")
        if info.kind == "float":
            return literal(float("-inf") if low else float("inf"), dtype)
        bits = info.size * 8
        if not info.signed:
            return literal(0 if low else 2**bits - 1, dtype)
        return literal(-(2 ** (bits - 1)) if low else 2 ** (bits - 1) - 1, dtype)
    return {"prod": literal(1, dtype), "any": "False", "all": "True"}.get(how, literal(0, dtype))


def step(how: str, dtype: DType, acc: str, x: str) -> str:
    """Return the accumulator after one more element (or block)."""
    if how in ("max", "min"):
        module = "fw" if TYPES[dtype].kind == "float" else "tl"
        return f"{module}.{how}imum({acc}, {x})"
    return STEPS[how].format(acc, x)


def fold(how: str, x: str, axis: int) -> str:
    """Reduce a block of accumulators to one value per row."""
    return f"fw.reduce_{'sum' if how == 'mean' else how}({x}, {axis})"


@dataclass(frozen=True, slots=True)
class Carry:
    """A variable carried through the loop, with its first value for a block of `shape`."""

    name: str
    value: str
    dtype: DType

    def init(self, shape: str) -> str:
        if shape == "()":
            return f"{self.name} = {constant(_number(self.value), self.dtype)}"
        return f"{self.name} = tl.full({shape}, {self.value}, {TRITON[self.dtype]})"


def _number(text: str) -> int | float | bool:
    """Parse a literal."""
    if text in ("True", "False"):
        return text == "True"
    return float(text[7:-2]) if text.startswith("float") else float(text) if "." in text else int(text)


def carries(n: Node, dtype: DType, counts: bool) -> list[Carry]:
    """Return the loop variables of a reduction of `dtype` values, for m2 with what a lane `counts`. The index of an arg-reduction
    starts at the lane's own position (see `Program`), so only the value is here."""
    if n.how == "m2":
        names = [f"mean{n.id}", f"acc{n.id}", *([f"n{n.id}"] if counts else [])]
        return [Carry(name, literal(0, dtype), dtype) for name in names]
    return [Carry(f"acc{n.id}", identity(n.how, dtype), dtype)]


def parts(n: Node, dtype: DType) -> list[tuple[str, DType]]:
    """Return the partial results that programs sharing a row leave for each other: (suffix of the workspace's name, type)."""
    if n.how == "m2":
        return [(f"{n.id}_mean", dtype), (f"{n.id}", dtype)]
    if n.how.startswith("arg"):
        return [(f"{n.id}", dtype), (f"{n.id}_at", "i64")]
    return [(f"{n.id}", dtype)]
