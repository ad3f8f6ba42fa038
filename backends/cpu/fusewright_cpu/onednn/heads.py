"""Attention reads queries, keys and values where the projections left them: model code copies them to [B, H, L, D] first, and
its result back to [B, L, H, D]."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusewright.interface import CompileContext, OpView, TensorSpec, Value
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright.toolkit.region.graph import RegionGraph, spec_of
from fusewright.toolkit.region.pattern import Match, chain, maybe
from fusewright.toolkit.region.rewrite import Row, rewrite

OPERANDS = ("query", "key", "value")


@dataclass(frozen=True)
class _Context:
    graph: RegionGraph
    ctx: CompileContext


def read_in_place(graph: RegionGraph, ctx: CompileContext) -> None:
    """Remove copies around the attention of a region."""
    if rewrite(graph, ROWS, _Context(graph, ctx), ctx.rules):
        graph.sweep({"clone"})


def _source(value: Value, graph: RegionGraph) -> Value:
    """What `value` is a copy of, if its heads have dense rows, else `value`."""
    made = graph.producer(value)
    if made is None or made.op != "clone":
        return value
    source: Value = made.arg("self")
    return source if spec_of(source).stride[-1] == 1 else value


def _by_rows(spec: TensorSpec) -> bool:
    """Whether [B, H, L, D] lies as [B, L, H, D]. Eager's result of such queries does, too."""
    batch, heads, rows, _ = spec.stride
    return spec.static and rows >= heads and batch >= rows  # type: ignore[operator]


def _copies(m: Match, c: _Context) -> bool:
    values: list[Value] = [m.anchor.arg(n) for n in OPERANDS]
    four = all(spec_of(v).rank == 4 for v in values)
    return four and any(_source(v, c.graph) is not v for v in values)


def _swaps(op: OpView, m: Match, c: _Context) -> bool:
    dims = {int(op.arg(n)) % 4 for n in ("dim0", "dim1")}
    return dims == {1, 2} and _by_rows(spec_of(_source(m.anchor.arg("query"), c.graph)))


def _to_rows(op: OpView, m: Match, c: _Context) -> bool:
    rows = op.arg("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    return rows and m.get("back") is not None and spec_of(op.out).stride == contiguous_strides(spec_of(op.out).shape)  # type: ignore[arg-type]


def _write(m: Match, c: _Context) -> None:
    sdpa, back, copy = m.anchor, m.get("back"), m.get("copy")
    sources = {n: _source(sdpa.arg(n), c.graph) for n in OPERANDS}
    made = replace(sdpa, args=tuple(sources.get(n, a) for n, a in zip(sdpa.argnames, sdpa.args, strict=True)))
    if copy is None:
        c.graph.replace((sdpa,), (made,))
        return
    batch, rows, heads, width = spec_of(copy.out).stride
    out = c.ctx.value(replace(spec_of(sdpa.out), stride=(batch, heads, rows, width)))
    view = replace(back, args=(out, *back.args[1:]), outs=copy.outs)
    c.graph.replace((sdpa, back, copy), (replace(made, outs=(out,)), view))


ROWS = (
    Row(
        "onednn.attention.copies",
        chain("sdpa", maybe("transpose", _swaps, "back"), maybe("clone", _to_rows, "copy")),
        _write, "attention without copies", when=_copies,
    ),
)  # fmt: skip
