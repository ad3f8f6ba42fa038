"""Rewrite rows for products with float inputs: quantized dynamically, or with only the weight in 8 bits.

The patterns are those of PT2E and of `fusewright.quantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.pattern import Match
from fusewright.toolkit.region.quantized import (
    Quantized,
    Rows,
    Weight,
    before_views,
    dequantized,
    product,
    residual_of,
    weight_of,
)
from fusewright.toolkit.region.rewrite import Row
from fusewright_int8.engines import ENGINES, Dynamic, Engine, fastest, reading_pays
from fusewright_int8.lowerings import (
    UNARY,
    beside_rows,
    bias_of,
    centered,
    emit_rows,
    epilogue,
    note,
    post_of,
    rows_fit,
    spec_of,
    why_not,
)
from fusewright_int8.operators import name

EPS = {"tensor": 2.0**-23, "row_symmetric": torch.finfo(torch.float32).eps}
"""Smallest scale of each rule for which graphs may specify another one."""
FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class FloatInput:
    """A float tensor and the rule by which it is quantized."""

    value: Value
    rule: str


def _row_rule(rows: Rows, graph: RegionGraph) -> FloatInput | None:
    """Match rows quantized with the scales and zero points chosen for them."""
    quantize, choose = graph.producer(rows.value), graph.producer(rows.scale)
    if quantize is None or quantize.op != "quantize_per_token" or choose is None:
        return None
    rule = {"choose_qparams_per_token": "token_symmetric", "choose_qparams_per_token_asymmetric": "token"}.get(
        choose.op
    )
    same = (quantize.arg("scales"), quantize.arg("zero_points")) == (rows.scale, rows.zero_point) == choose.outs
    covers = quantize.arg("quant_min") <= -127 and quantize.arg("quant_max") == 127
    x = quantize.arg("input")
    return FloatInput(x, rule) if rule and same and covers and choose.arg("input") == x else None


def _tensor_rule(q: Quantized, graph: RegionGraph) -> FloatInput | None:
    """Match a whole tensor quantized to uint8 with the scale and zero point chosen for it, under the core's bound of the scale."""
    quantize, choose = graph.producer(q.value), graph.producer(q.scale) if isinstance(q.scale, Value) else None
    if quantize is None or quantize.op != "quantize_tensor" or choose is None or choose.op != "choose_qparams":
        return None
    limits = tuple(choose.arg(n) for n in ("quant_min", "quant_max", "eps"))
    same = (quantize.arg("scale"), quantize.arg("zero_point")) == (q.scale, q.zero_point) == choose.outs
    x = quantize.arg("input")
    fits = same and limits == (0, 255, EPS["tensor"]) and choose.arg("input") == x
    return FloatInput(x, "tensor") if fits else None


def float_input(op: OpView, graph: RegionGraph) -> FloatInput | None:
    """Return the float input of a dynamically quantized product, or None."""
    found = dequantized(op.arg("input"), graph, views=True)
    rule = _row_rule(found, graph) if isinstance(found, Rows) else _tensor_rule(found, graph) if found else None
    return rule if rule is not None and spec_of(rule.value).dtype in FLOATS else None


# -- linears between dequantized operands


def _weighted(m: Match, b: Builder) -> Weight | None:
    found = weight_of(m.anchor.arg("weight"), b.graph)
    return found if found is not None and why_not(m.anchor, b.graph) is None else None


def dynamic_when(m: Match, b: Builder) -> bool:
    """Whether a linear has an input quantized by a known rule, and can be int8."""
    x = float_input(m.anchor, b.graph)
    return x is not None and _weighted(m, b) is not None and rows_fit(m.out, x.value)


def _dynamic_pays(e: Engine, m: Match, b: Builder) -> bool:
    x, w = float_input(m.anchor, b.graph), weight_of(m.anchor.arg("weight"), b.graph)
    assert x is not None and w is not None
    return fastest_dynamic(e, x, spec_of(w.value).shape, b)


def fastest_dynamic(e: Engine, x: FloatInput, weight: Any, b: Builder) -> bool:
    n, k = weight
    rows = spec_of(x.value).numel_hint() // max(k, 1)
    return fastest(b.ctx, Dynamic(rows, k, n, spec_of(x.value).dtype, x.rule)) == e.name


def _dynamic_write(e: Engine, m: Match, b: Builder) -> None:
    op, x, w = m.anchor, float_input(m.anchor, b.graph), _weighted(m, b)
    assert x is not None and w is not None
    weight, scale = centered(w, b)
    rest = (b.prepare(e.pack_linear, weight), scale, bias_of(op, b), x.rule, *float_epilogue(m, x.value, b))
    emit_rows(e.dynamic, x.value, rest, m, b)
    note(m, b, f"int8 linear, {e.name}, input quantized by {'row' if x.rule != 'tensor' else 'tensor'}")


def float_epilogue(m: Match, x: Value, b: Builder) -> tuple[Any, ...]:
    """Return residual, post-op and type of a float result computed from `x`."""
    found, post = residual_of(m), post_of(m.get("unary"))
    assert post is not None
    return (None if found is None else beside_rows(found, x, m, b), *post, spec_of(m.out).dtype)


def _computed(op: OpView, graph: RegionGraph) -> Quantized | None:
    """Return the input of a product if its scale and zero point are tensors, else None."""
    found = dequantized(op.arg("input"), graph, views=True)
    fits = isinstance(found, Quantized) and isinstance(found.scale, Value) and isinstance(found.zero_point, Value)
    return found if fits else None  # type: ignore[return-value]


def _computed_when(m: Match, b: Builder) -> bool:
    x = _computed(m.anchor, b.graph)
    return x is not None and _weighted(m, b) is not None and rows_fit(m.out, x.value)


def _computed_pays(e: Engine, m: Match, b: Builder) -> bool:
    wanted = b.ctx.options.get("engine", "auto")
    return e.absent() is None and wanted in ("auto", e.name)


def _computed_write(e: Engine, m: Match, b: Builder) -> None:
    op, x, w = m.anchor, _computed(m.anchor, b.graph), _weighted(m, b)
    assert x is not None and w is not None
    weight, scale = centered(w, b)
    given = (b.prepare(e.pack_linear, weight), scale, bias_of(op, b), b.exact(x.scale), b.exact(x.zero_point))
    emit_rows(e.linear_tensor, x.value, (*given, *epilogue(m, x.value, b)), m, b)
    note(m, b, f"int8 linear, {e.name}, input quantized by tensor")


def weight_only_when(m: Match, b: Builder) -> bool:
    """Whether a linear has an int8 weight and an input in floats."""
    op, w = m.anchor, _weighted(m, b)
    if w is None or dequantized(op.arg("input"), b.graph, views=True) is not None:
        return False
    x = plain_input(m, b)
    return spec_of(x).dtype in FLOATS and rows_fit(m.out, x) and not b.graph.is_const(op.arg("input")) and m.get("quantize") is None


def plain_input(m: Match, b: Builder) -> Value:
    """Return the float input, before any views if it had the result's leading shape there."""
    x: Value = m.anchor.arg("input")
    earlier: Value = before_views(x, b.graph)
    return earlier if spec_of(earlier).shape[:-1] == spec_of(m.out).shape[:-1] else x


def _weight_only_pays(m: Match, b: Builder) -> bool:
    w = weight_of(m.anchor.arg("weight"), b.graph)
    assert w is not None
    return reads(m.anchor.arg("input"), spec_of(w.value).shape, b)


def reads(x: Value, weight: Any, b: Builder) -> bool:
    n, k = weight
    return reading_pays(b.ctx, spec_of(x).numel_hint() // max(k, 1), k, n, spec_of(x).dtype)


def _weight_only_write(m: Match, b: Builder) -> None:
    op, w = m.anchor, _weighted(m, b)
    assert w is not None
    weight, scale = centered(w, b)
    packed, x = b.prepare(name("pack_linear"), weight), plain_input(m, b)
    emit_rows(name("weight_linear"), x, (packed, scale, bias_of(op, b), *float_epilogue(m, x, b)), m, b)
    note(m, b, "int8 weight, core")


# -- rewrite rows


def posts(e: Engine | None) -> Callable[[OpView], Any]:
    """Return which unary ops an engine computes, as a predicate; of None, our core's."""
    def found(op: OpView) -> Any:
        post = post_of(op)
        return post if post is not None and (e is None or post[0] in e.posts) else None

    return found


def _of_engine(e: Engine) -> tuple[Row, ...]:
    dynamic = product("linear", f"int8.dynamic.{e.name}", posts(None), UNARY, views=True)
    computed = product("linear", f"int8.computed.{e.name}", posts(e), UNARY, residual=e.adds is None, views=True)
    dynamic = type(dynamic)(dynamic.anchor, dynamic.steps[:-1])  # without the quantize step: the result stays in floats
    return (
        Row(
            f"int8.dynamic.{e.name}", dynamic, when=dynamic_when, pays=partial(_dynamic_pays, e), write=partial(_dynamic_write, e),
            note="int8 linear",
        ),
        Row(
            f"int8.computed.{e.name}", computed, when=_computed_when, pays=partial(_computed_pays, e),
            write=partial(_computed_write, e), note="int8 linear",
        ),
    )  # fmt: skip


_PLAIN = product("linear", "int8.weight_only", posts(None), UNARY, views=True)
ROWS: tuple[Row, ...] = (
    *(row for e in ENGINES if e.absent() is None for row in _of_engine(e)),
    Row(
        "int8.weight_only", type(_PLAIN)(_PLAIN.anchor, _PLAIN.steps[:-1]), when=weight_only_when, pays=_weight_only_pays,
        write=_weight_only_write, note="int8 weight",
    ),
)  # fmt: skip
"""The rewrite rows, in the order in which they are tried."""
