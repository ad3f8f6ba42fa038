"""Rewrite rows that make one product of the linears of one input: weights side by side, results as columns of one result.

In a transformer these are query, key and value, gate and up. The input is read once and, where the graph quantizes it as it comes,
quantized once. Linears are joined if an engine would be called for each with the same arguments but for weight, scales and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.builder import Builder, contiguous_strides
from fusewright.toolkit.region.pattern import Chain, Match, chain, find
from fusewright.toolkit.region.quantized import product, weight_of
from fusewright.toolkit.region.rewrite import Row
from fusewright_int8.engines import (
    ENGINES,
    FLOAT_MAKERS,
    MAKERS,
    MOST_MEASURED,
    Dynamic,
    Engine,
    Product,
    Reading,
    present,
)
from fusewright_int8.floats import dynamic_when, float_epilogue, float_input, plain_input, posts, weight_only_when
from fusewright_int8.lowerings import (
    UNARY,
    bias_of,
    centered,
    epilogue,
    note,
    shape_of,
    spec_of,
    static_input,
    static_when,
    takes,
)
from fusewright_int8.operators import name

Given: TypeAlias = tuple[Value, tuple[Any, ...]]
"""An input, and the arguments that say how it is or becomes quantized."""
Shape: TypeAlias = Product | Dynamic | Reading


# -- kinds of products


@dataclass(frozen=True)
class Kind:
    """A kind of product. `call`: the operator of an engine. `posts`: which unary ops it computes. `quantizes`: it can end in
    8 bits. `after`: the arguments behind those of `given`. `floats`: a float product is a candidate. `engines`: who computes it."""

    id: str
    call: Callable[[Engine], str]
    posts: Callable[[Engine], Callable[[OpView], Any]]
    when: Callable[[Match, Builder], bool]
    given: Callable[[Match, Builder], Given]
    after: Callable[[Match, Value, Builder], tuple[Any, ...]]
    shape: Callable[[Match, Builder], Shape]
    quantizes: bool
    floats: bool
    engines: tuple[Engine, ...] = ENGINES


def _static_given(m: Match, b: Builder) -> Given:
    x = static_input(m.anchor, b.graph)
    assert x is not None
    return x.value, (float(x.scale), x.zero_point)


def _static_shape(m: Match, b: Builder) -> Product:
    shape = shape_of(m, b)
    assert isinstance(shape, Product)
    return shape


def _dynamic_given(m: Match, b: Builder) -> Given:
    x = float_input(m.anchor, b.graph)
    assert x is not None
    return x.value, (x.rule,)


def _sizes(m: Match, b: Builder) -> tuple[int, int]:
    """Return the output and input sizes of a linear's weight."""
    n, k = spec_of(_weight(m, b).value).shape
    return int(n), int(k)  # type: ignore[arg-type]


def _dynamic_shape(m: Match, b: Builder) -> Dynamic:
    (x, (rule,)), (n, k) = _dynamic_given(m, b), _sizes(m, b)
    return Dynamic(spec_of(x).numel_hint() // max(k, 1), k, n, spec_of(x).dtype, rule)


def _plain_given(m: Match, b: Builder) -> Given:
    return plain_input(m, b), ()


def _reading_shape(m: Match, b: Builder) -> Reading:
    x, (n, k) = plain_input(m, b), _sizes(m, b)
    return Reading(spec_of(x).numel_hint() // max(k, 1), k, n, spec_of(x).dtype)


KINDS = (
    Kind(
        "static", lambda e: e.linear, posts, static_when, _static_given, epilogue, _static_shape, quantizes=True, floats=True
    ),
    Kind(
        "dynamic", lambda e: e.dynamic, lambda e: posts(None), dynamic_when, _dynamic_given, float_epilogue, _dynamic_shape,
        quantizes=False, floats=False,
    ),
    Kind(
        "weight_only", lambda e: name("weight_linear"), lambda e: posts(None), weight_only_when, _plain_given, float_epilogue,
        _reading_shape, quantizes=False, floats=True, engines=ENGINES[:1],
    ),
)  # fmt: skip


# -- which linears


def _patterns(kind: Kind, e: Engine, rule: str) -> tuple[Chain, Chain]:
    """Return a product with what follows it, and one alone."""
    whole = product("linear", rule, kind.posts(e), UNARY, views=True)
    steps = whole.steps if kind.quantizes else whole.steps[:-1]
    return Chain(whole.anchor, steps), Chain(whole.anchor, whole.steps[:2])


def _same(kind: Kind, m: Match, b: Builder) -> Any:
    """Return what linears of one product have in common."""
    x, quantized = kind.given(m, b)
    return x.id, quantized, spec_of(m.out).shape[:-1], kind.after(m, x, b)


def _joins(kind: Kind, m: Match, b: Builder) -> bool:
    """Whether columns of a larger result can stand for this one. What leaves the region or has a symbolic size would be copied."""
    if not kind.when(m, b) or not spec_of(m.out).static or b.graph.escapes(m.out):
        return False
    return spec_of(kind.given(m, b)[0]).shape[:-1] == spec_of(m.out).shape[:-1]


def _candidates(kind: Kind, whole: Chain, alone: Chain, m: Match, b: Builder) -> Iterator[Iterable[Match]]:
    """Yield the linears beside a match with what follows each; then those alone whose end is not 8 bits and adds no residual, as a
    loop kernel computes the rest."""
    x = m.anchor.arg("input")
    ops = [op for op in b.graph.ordered(b.graph.users(x)) if op.op == "linear" and op.arg("input") == x]
    allowed = b.ctx.rules.allows
    found = [part for op in ops if (part := find(whole, op, b.graph, b, allowed)) is not None and part.get("add") is None]
    yield found
    rest = [part.anchor for part in found if part.get("quantize") is None]
    yield [part for op in rest if (part := find(alone, op, b.graph, b, allowed)) is not None]


def _siblings(kind: Kind, whole: Chain, alone: Chain, m: Match, b: Builder) -> Match | None:
    """Match, from the first of them, the linears that one product can compute. If it does not pay, it is not asked for the rest."""
    for found in _candidates(kind, whole, alone, m, b):
        groups: dict[Any, list[Match]] = {}
        for part in found:
            if _joins(kind, part, b):
                groups.setdefault(_same(kind, part, b), []).append(part)
        group = next((g for g in groups.values() if len(g) > 1 and g[0].anchor is m.anchor), None)
        ops = b.graph.ordered(op for part in group or () for op in part.ops)
        if group is not None and all(map(b.graph.free, ops)):
            rules = tuple(rule for part in group for rule in part.rules)
            return replace(m, ops=ops, at=m.anchor, captures={"parts": tuple(group)}, rules=rules)
    return None


# -- whether it pays


def _width(part: Match) -> int:
    return int(spec_of(part.out).shape[-1])  # type: ignore[arg-type]


def _pays(kind: Kind, e: Engine, m: Match, b: Builder) -> bool:
    """Whether this engine takes the linears as one. The last able engine takes what the others declined."""
    first = m["parts"][0]
    able = [o for o in present(kind.engines) if takes(o, first)]
    if e not in able:
        return False
    wanted = str(b.ctx.options.get("engine", "auto"))
    if any(o.name == wanted for o in able):
        return e.name == wanted
    floats = spec_of(first.anchor.out).dtype if kind.floats else None
    found = _fastest(b, kind.shape(first, b), [*map(_width, m["parts"])], able, floats)
    return found == e.name or (found in [o.name for o in able] and e == able[-1])


def _fastest(
    b: Builder, shape: Shape, widths: Sequence[int], among: Sequence[Engine], floats: torch.dtype | None
) -> str:
    """Return the engine that is fastest with one product of these widths, or another name if a product each is faster, or floats
    are."""
    share = min(1.0, MOST_MEASURED / (shape.k * sum(widths)))
    narrow = [max(1, int(n * share)) for n in widths]  # of all alike, so that a measured part is the same of either
    candidates: dict[str, Callable[[], Thunk]] = {}
    for e in among:
        candidates[e.name] = partial(_together, e, shape, narrow)
        candidates[f"{e.name}, apart"] = partial(_apart, e, shape, narrow)
    if floats is not None and torch.backends.mkldnn.is_available():
        makers = FLOAT_MAKERS[type(shape)]
        candidates.update(makers(replace(shape, n=sum(narrow)), floats, b.ctx.options["prepack"] == "auto"))
    key = replace(shape, n=sum(widths)).key
    around = "" if floats is None else f" {floats}".replace("torch.", "")
    return b.ctx.choose(f"{key} of {'+'.join(map(str, widths))} {'/'.join(candidates)}{around}", Lazy(candidates))


def _together(e: Engine, shape: Shape, widths: Sequence[int]) -> Thunk:
    run = MAKERS[type(shape)](e, replace(shape, n=sum(widths)))()
    return lambda: run().split(widths, -1)


def _apart(e: Engine, shape: Shape, widths: Sequence[int]) -> Thunk:
    runs = [MAKERS[type(shape)](e, replace(shape, n=n))() for n in widths]
    return lambda: [run() for run in runs]


# -- the call


def _write(kind: Kind, e: Engine, m: Match, b: Builder) -> None:
    parts: Sequence[Match] = m["parts"]
    first, widths = parts[0], [*map(_width, m["parts"])]
    x, quantized = kind.given(first, b)
    packed, scale, bias = _constants(e, parts, b)
    shape = (*spec_of(first.out).shape[:-1], sum(widths))
    stride = contiguous_strides(shape)  # type: ignore[arg-type]
    whole = b.ctx.value(TensorSpec(shape, stride, spec_of(first.out).dtype))
    after = kind.after(first, x, b)
    b.call(kind.call(e), b.any_strides(x), packed, scale, bias, *quantized, *after, out=whole, op=first.anchor)
    start = 0
    for part, n in zip(parts, widths, strict=True):
        columns = (Ref(whole.id), len(shape) - 1, start, start + n)
        b.library("aten::slice.Tensor", *columns, out=part.out, stride=stride, op=part.anchor)
        start += n
    b.close_call(m.ops)
    for part in parts:
        note(part, b, f"int8 linear, {e.name}, one product for {len(parts)}")


def _constants(e: Engine, parts: Sequence[Match], b: Builder) -> tuple[Ref, Ref, Ref | None]:
    """Return the packed weight, scales and bias of all parts."""
    weights, scales = zip(*(centered(_weight(part, b), b) for part in parts), strict=True)
    packed = b.prepare(e.pack_linear, b.prepare("aten::cat.default", weights, 0))
    scale = b.prepare("aten::cat.default", scales, 0)
    if all(part.anchor.arg("bias") is None for part in parts):
        return packed, scale, None
    return packed, scale, b.prepare("aten::cat.default", tuple(_bias(part, b) for part in parts), 0)


def _weight(part: Match, b: Builder) -> Any:
    found = weight_of(part.anchor.arg("weight"), b.graph)
    assert found is not None
    return found


def _bias(part: Match, b: Builder) -> Ref:
    """Return the bias in fp32, or what adds nothing: of 0.0, -0.0 would become 0.0."""
    given = bias_of(part.anchor, b)
    return b.prepare("aten::full.default", (_width(part),), -0.0, dtype=torch.float32) if given is None else given


def _row(kind: Kind, e: Engine) -> Row:
    rule = f"int8.siblings.{kind.id}.{e.name}"
    return Row(
        rule, chain("linear"), extend=partial(_siblings, kind, *_patterns(kind, e, rule)), pays=partial(_pays, kind, e),
        write=partial(_write, kind, e), note="one int8 product for several",
    )  # fmt: skip


ROWS: tuple[Row, ...] = tuple(_row(kind, e) for kind in KINDS for e in present(kind.engines))
"""The rewrite rows, in the order in which they are tried: before those of single products."""
