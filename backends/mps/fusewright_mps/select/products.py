"""Products with weights: one product for all siblings that read the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fusewright.interface import OpView, TensorSpec
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Thunk
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.products import joined, siblings_of, taken_apart, widths_of
from fusewright.toolkit.region.rewrite import Row
from fusewright_mps.select.calls import Calls

REPEATS = 10
"""Repetitions per measurement."""


def reason(op: OpView) -> str | None:
    """Return why a linear stays torch's own call, or None."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if not x.static or w.rank != 2 or x.rank < 2 or 0 in (*x.shape, *w.shape):
        return "symbolic, empty or no matrix"
    return "mixed dtypes" if x.dtype != w.dtype else None


def _siblings(m: Match, c: Calls) -> Match | None:
    """Find all linears with constant weights that read the same input as this one."""
    group = siblings_of(m.anchor, c.graph, lambda op: reason(op) is None)
    return None if group is None else replace(m, ops=tuple(group), at=group[0])


def _joining_pays(m: Match, c: Calls) -> bool:
    """Whether one joint product is faster than one product per sibling."""
    x, widths, biased = spec_of(m.anchor.arg("input")), widths_of(m.ops), m.anchor.arg("bias") is not None
    k = int(x.shape[-1])  # type: ignore[arg-type]
    rows = x.numel_hint() // k

    def products(ns: Sequence[int]) -> Callable[[], Thunk]:
        return lambda: _products(rows, k, ns, x, biased, c.synchronize)

    key = f"siblings {str(x.dtype).removeprefix('torch.')} {rows}x{k}x{'+'.join(map(str, widths))}{' bias' * biased}"
    return c.faster(key, products(widths), products([sum(widths)]))


def _products(
    rows: int, k: int, widths: Sequence[int], like: TensorSpec, biased: bool, synchronize: Callable[[], None]
) -> Thunk:
    x = torch.full((rows, k), 0.5, dtype=like.dtype, device=like.device)
    ws = [torch.full((n, k), 0.5, dtype=like.dtype, device=like.device) for n in widths]
    bs = [torch.zeros(n, dtype=like.dtype, device=like.device) if biased else None for n in widths]

    def run() -> None:
        for _ in range(REPEATS):
            for w, b in zip(ws, bs, strict=True):
                torch.nn.functional.linear(x, w, b)
        synchronize()

    return run


def _write_joined(m: Match, c: Calls) -> None:
    weight, bias = joined(m.ops, c.b)
    whole = c.ctx.value(None)
    c.b.call("aten::linear.default", c.b.any_strides(m.anchor.arg("input")), weight, bias, out=whole)
    taken_apart(m.ops, Ref(whole.id), c.b)


SIBLINGS = Row(
    "mps.product.siblings", chain("linear"), extend=_siblings, pays=_joining_pays, write=_write_joined,
    note=lambda m: f"one product for {len(m.ops)}",
)  # fmt: skip
