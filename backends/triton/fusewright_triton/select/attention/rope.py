"""Find rotary embeddings in a graph: heads rotated by an angle that depends on their position (Su et al., RoFormer, 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import OPS, Env, RegionReader, matches, p
from fusewright_triton.select.attention.decomposed_bias import made_for_one, shape_of
from fusewright_triton.select.calls import Calls


@dataclass(frozen=True)
class Turned:
    """`source` * `cos` + (its halves exchanged, the second one negated) * `sin`, all of one type. `ops` compute it; their
    intermediate values have no other reader."""

    source: Value
    cos: Value
    sin: Value
    ops: tuple[OpView, ...]


_HALVES = (
    p("neg", p("slice", "x", capture="second", alone=True), alone=True), p("slice", "x", capture="first", alone=True),
)  # fmt: skip
_TURNED = p(
    "add",
    p("mul", "x", "cos", either=True, alone=True),
    p("mul", p("cat", _HALVES, capture="joined", alone=True), "sin", either=True, alone=True),
    capture="total", either=True,
)  # fmt: skip
"""As transformers writes it."""


def turned(value: Value, c: Calls) -> Turned | None:
    """Return a value [B, H, L, D] as a rotary embedding, if it is one."""
    total = made_for_one(value, c)
    if total is None or spec_of(value).rank != 4:
        return None
    for found in matches(_TURNED, total, {}, RegionReader(c.graph)):
        x, cos, sin = (found[n] for n in ("x", "cos", "sin"))
        if total.arg("alpha") == 1 and _in_halves(found) and all(_suits(v, value) for v in (x, cos, sin)):
            return Turned(x, cos, sin, found[OPS])
    return None


def _in_halves(found: Env) -> bool:
    """Return whether the slices are the halves of the last dimension."""
    joined = found["joined"]
    dim = shape_of(joined.out)[-1]
    halves = dim % 2 == 0 and _is_slice(found["first"], 0, dim // 2) and _is_slice(found["second"], dim // 2, dim)
    return halves and joined.arg("dim") in (-1, 3)


def _is_slice(op: OpView, start: int, end: int) -> bool:
    """Return whether an op takes these columns."""
    if op.op != "slice" or op.arg("dim") not in (-1, 3) or op.arg("step") != 1:
        return False
    columns = shape_of(op.arg("self"))[-1]
    last = columns if op.arg("end") is None else min(op.arg("end"), columns)
    return (op.arg("start") or 0, last) == (start, end)


def _suits(v: object, whole: Value) -> bool:
    """Return whether `v` has the whole's type and broadcasts to it without its last dimension."""
    if not isinstance(v, Value):
        return False
    a, b = spec_of(v), spec_of(whole)
    return (
        a.dtype == b.dtype
        and a.rank == 4
        and a.shape[3] == b.shape[3]
        and all(n in (1, m) for n, m in zip(a.shape, b.shape, strict=True))
    )
