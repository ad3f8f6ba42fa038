"""Products of few rows with weights that torch or torchao has packed for MPS. Their operators have no row in the opset.

With more rows they stay as they are: torch's own kernels on MPS, or torchao's where its extension is built.
"""

from __future__ import annotations

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_mps.kernels import gemv
from fusewright_mps.kernels.handwritten import METAL
from fusewright_mps.select.calls import SUMS, Calls

TINYGEMM = "aten._weight_int4pack_mm.default"
INT8 = "aten._weight_int8pack_mm.default"
AFFINE = "torchao._linear_fp_act_4bit_weight.default"
OPS = (TINYGEMM, INT8, AFFINE)
NAMES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    TINYGEMM: ("self", "mat2", "qGroupSize", ("qScaleAndZeros",)),
    INT8: ("self", "mat2", "", ("scales",)),
    AFFINE: ("A", "B", "group_size", ("S", "Z")),
}
"""Argument names of the input rows, the weight, the group length and the per-group factors."""
NIBBLES = {TINYGEMM: torch.int32, AFFINE: torch.uint8}
"""Declared dtypes of 4-bit weights; in memory both are [n, k / 2] bytes."""


def reason(op: OpView) -> str | None:
    """Return why a product with packed weights stays torch's own call, or None."""
    x, w, group, per_group = _parts(op)
    if not all(spec_of(v).static for v in (x, w, *per_group, op.out)):
        return "symbolic sizes"
    k, n = (int(s) for s in (spec_of(x).shape[-1], spec_of(op.out).shape[-1]))  # type: ignore[arg-type]
    if 0 in (*spec_of(x).shape, n) or spec_of(x).numel_hint() // k > gemv.MOST_ROWS or n * k < SUMS.weights:
        return f"more than {gemv.MOST_ROWS} rows, or a small weight"
    if not all(_dense(spec_of(v)) for v in (x, w, *per_group, op.out)):
        return "gaps in memory"
    same = all(spec_of(v).dtype == spec_of(x).dtype for v in (*per_group, op.out))
    if not same or spec_of(w).dtype != NIBBLES.get(op.op, torch.int8):
        return "mixed dtypes"
    return None if k % 8 == 0 and (group or k) % 8 == 0 and k % (group or k) == 0 else "groups of odd length"


def _parts(op: OpView) -> tuple[Value, Value, int, tuple[Value, ...]]:
    x, w, group, per_group = NAMES[op.op]
    return op.arg(x), op.arg(w), int(op.arg(group)) if group else 0, tuple(map(op.arg, per_group))


def _dense(spec: TensorSpec) -> bool:
    return spec.stride == contiguous_strides(spec.shape)  # type: ignore[arg-type]


def _of_constants(m: Match, c: Calls) -> Match | None:
    """Match only constant weights, in inference graphs."""
    _, w, _, per_group = _parts(m.anchor)
    return m if c.graph.phase == "infer" and all(map(c.graph.is_const, (w, *per_group))) else None


def _write(m: Match, c: Calls) -> None:
    op = m.anchor
    x, w, group, per_group = _parts(op)
    spec, bits = spec_of(x), 8 if op.op == INT8 else 4
    k, n = (int(s) for s in (spec.shape[-1], spec_of(op.out).shape[-1]))  # type: ignore[arg-type]
    dtype, rows = METAL[spec.dtype], spec.numel_hint() // k
    zeros = dtype if op.op == AFFINE else ""
    packed: gemv.Packed = "" if bits == 8 else "tinygemm" if op.op == TINYGEMM else "affine"
    outputs = gemv.rows_for(n, c.target)
    kernel = gemv.Gemv(dtype, bits, rows, n, k, group or k, zeros, False, outputs, packed)
    c.launch(kernel, [c.b.exact(x), _bytes(w, c), *map(c.b.exact, per_group)], [op.out.id], op)


def _bytes(w: Value, c: Calls) -> Ref:
    """Return a 4-bit weight viewed as bytes."""
    given = c.b.exact(w)
    return c.b.prepare("aten::view.dtype", given, torch.uint8) if spec_of(w).dtype == torch.int32 else given


PACKED = Row(
    "mps.packed.linear", chain(OPS), extend=_of_constants, write=_write,
    note="product of few rows with packed weights",
)  # fmt: skip
"""torch's and torchao's products with packed weights."""
