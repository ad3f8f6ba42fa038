"""Rewrite rows for products of two activations: attention's matrix products where a graph quantizes both operands."""

from __future__ import annotations

import torch

from fusewright.interface import hint
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match
from fusewright.toolkit.region.quantized import PRODUCTS, factors, product
from fusewright.toolkit.region.rewrite import Row
from fusewright_int8.lowerings import FLOATS, UNARY, dense, epilogue, note, post_of, reshaped, result_strides
from fusewright_int8.operators import as_planned, name
from fusewright_int8.run import native


def _when(m: Match, b: Builder) -> bool:
    if factors(m.anchor, b.graph) is None or spec_of(m.anchor.out).dtype not in FLOATS:
        return False
    x, y = (spec_of(value) for value in m.anchor.args[:2])
    alike = x.rank == y.rank >= 2 and x.shape[:-2] == y.shape[:-2]
    inner = x.shape[-1]
    return (
        alike
        and isinstance(inner, int)
        and 0 < inner <= native.MOST_INNER
        and 0 not in x.shape + y.shape
        and dense(m.out)
    )


def _pays(m: Match, b: Builder) -> bool:
    """Whether packing one operand per call for an int8 product is faster than widening both for a float product."""
    wanted = b.ctx.options.get("engine", "auto")
    if wanted != "auto":
        return wanted == "core"
    xs, ys = (tuple(map(hint, spec_of(value).shape)) for value in m.anchor.args[:2])
    dtype = spec_of(m.anchor.out).dtype

    def core() -> Thunk:
        x, y = torch.full(xs, 3, dtype=torch.uint8), torch.full(ys, 5, dtype=torch.uint8)
        return as_planned(name("matmul"), x, y, 0.1, 3, 0.1, 3, None, 1.0, 0, "none", (), dtype, 1.0, 0, 0, 0)

    def floats() -> Thunk:
        x, y = torch.full(xs, 3, dtype=torch.uint8), torch.full(ys, 5, dtype=torch.uint8)
        return lambda: torch.matmul(x.to(dtype), y.to(dtype))

    key = f"int8 matmul {str(dtype).removeprefix('torch.')} {'x'.join(map(str, xs))} {'x'.join(map(str, ys))}"
    return b.ctx.choose(key, Lazy({"core": core, "float": floats})) == "core"


def _write(m: Match, b: Builder) -> None:
    found = factors(m.anchor, b.graph)
    assert found is not None
    x, y = found
    points = float(x.scale), x.zero_point, float(y.scale), y.zero_point
    bytes_of = (reshaped(q.value, spec_of(value).shape, m.anchor, b) for q, value in zip(found, m.anchor.args[:2], strict=True))
    args = *bytes_of, *points, *epilogue(m, x.value, b)
    b.library(name("matmul"), *args, out=m.out, stride=result_strides(m.out), op=m.anchor)
    b.close_call(m.ops)
    note(m, b, f"int8 {m.anchor.op}, core")


ROWS: tuple[Row, ...] = () if native.absent() else (
    Row(
        "int8.matmul.core", product(PRODUCTS, "int8.matmul.core", post_of, UNARY, residual=False), when=_when, pays=_pays,
        write=_write, note="int8 matmul",
    ),
)  # fmt: skip
