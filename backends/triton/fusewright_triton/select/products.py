"""Products with weights: siblings that read one input become one product, and widths are padded to suit the fast kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fusewright.interface import OpView
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.products import joined, siblings_of, taken_apart, widths_of
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.select import epilogues
from fusewright_triton.select.aligned import lacking, linear_pays, operands, rows, vector
from fusewright_triton.select.calls import Calls

REPEATS = 10


def reason(op: OpView) -> str | None:
    """Return why a linear stays torch's own call."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if not (x.static and w.static) or w.rank != 2 or x.rank < 2 or 0 in (*x.shape, *w.shape):
        return "symbolic, empty or no matrix"
    return "mixed dtypes" if x.dtype != w.dtype else None


def _odd(m: Match, c: Calls) -> bool:
    return lacking(m.anchor, c)[1] > 0 and epilogues.leaving(m, c)


def _siblings(m: Match, c: Calls) -> Match | None:
    """Bind all linears of constants that read this one's input."""
    group = siblings_of(m.anchor, c.graph, lambda op: reason(op) is None)
    return None if group is None else replace(m, ops=tuple(group), at=group[0])


def _padding_helps(m: Match, c: Calls) -> bool:
    """Match unsuitable widths."""
    return any(lacking(m.anchor, c)) and linear_pays(m.anchor, c)


def _concatenated(m: Match, c: Calls) -> None:
    """Emit all siblings as one product; each result is a slice of it, without a copy."""
    weight, bias = joined(m.ops, c.b)
    behind, more = max(lacking(op, c)[0] for op in m.ops), 0
    if any(any(lacking(op, c)) for op in m.ops):
        more = -sum(widths_of(m.ops)) % vector(spec_of(m.anchor.out).dtype)
        weight = c.b.prepare("aten::constant_pad_nd.default", weight, (0, behind, 0, more), 0)
        bias = bias and c.b.prepare("aten::constant_pad_nd.default", bias, (0, more), 0)
    _sliced(m.ops, c, rows(m.anchor.arg("input"), behind, c), weight, bias, more)


def _sliced(group: Sequence[OpView], c: Calls, x: Ref | None, weight: Ref, bias: Ref | None, more: int = 0) -> None:
    """Emit one product whose columns are the results of `group` in order, and `more` unused ones."""
    whole = c.ctx.value(None)
    epilogues.linear(group[0], sum(widths_of(group)) + more, (x, weight, bias), whole, c)
    taken_apart(group, Ref(whole.id), c.b, more)


def _padding_pays(m: Match, c: Calls) -> bool:
    """Return whether a product of padded rows, with a copy of the wanted part, beats one of unsuitable rows."""
    op = m.anchor
    x, (m_, k, n), biased = spec_of(op.arg("input")), epilogues.sizes(op), op.arg("bias") is not None
    like, lacks = (x.dtype, x.device, biased), lacking(op, c)

    def padded() -> Thunk:
        return _products(m_, k + lacks[0], [n + lacks[1]], *like, wanted=n, given=k)

    key = f"padded {str(x.dtype).removeprefix('torch.')} {m_}x{k}x{n}{' bias' * biased}"
    return c.pays(key, lambda: _products(m_, k, [n], *like), padded)


def _padded(m: Match, c: Calls) -> None:
    """Emit the product of operands padded with zeros. If results were added, the wanted ones are a slice of them."""
    op = m.anchor
    more = lacking(op, c)[1]
    given = operands(op, c, more)
    if more:
        _sliced([op], c, *given, more)
    else:
        epilogues.linear(op, epilogues.sizes(op)[2], given, op.out, c)


def _concat_pays(m: Match, c: Calls) -> bool:
    """Return whether one product for all siblings is faster than one for each, by a short measurement."""
    group, ctx = m.ops, c.ctx
    x, ws = spec_of(group[0].arg("input")), [spec_of(op.arg("weight")) for op in group]
    if ctx.device.simulated:
        return True
    if sum(w.numel_hint() for w in ws) > c.target.bounds.sibling_weights:
        return False
    rows, k, widths = x.numel_hint() // int(x.shape[-1]), int(x.shape[-1]), [int(w.shape[0]) for w in ws]  # type: ignore[arg-type]
    biased = group[0].arg("bias") is not None
    key = f"siblings {str(x.dtype).removeprefix('torch.')} {rows}x{k}x{'+'.join(map(str, widths))}{' bias' * biased}"

    def products(ns: Sequence[int]) -> Callable[[], Thunk]:
        return lambda: _products(rows, k, ns, x.dtype, x.device, biased)

    candidates = Lazy({"separate": products(widths), "together": products([sum(widths)])})
    return ctx.choose(key, candidates) == "together"


def _products(
    m: int, k: int, widths: Sequence[int], dtype: torch.dtype, device: str, biased: bool, wanted: int | None = None,
    given: int | None = None,
) -> Thunk:  # fmt: skip
    """Time products of one tensor. `wanted`: columns that are copied out of each. `given`: features of a tensor that is padded."""
    x = torch.full((m, given or k), 0.5, dtype=dtype, device=device)
    ws = [torch.full((n, k), 0.5, dtype=dtype, device=device) for n in widths]
    bs = [torch.zeros(n, dtype=dtype, device=device) if biased else None for n in widths]

    def run() -> None:
        for _ in range(REPEATS):
            rows = torch.nn.functional.pad(x, (0, k - x.shape[1])) if given else x
            for w, b in zip(ws, bs, strict=True):
                out = torch.nn.functional.linear(rows, w, b)
                if wanted is not None:
                    out[:, :wanted].contiguous()
        torch.cuda.synchronize(device)

    return run


ROWS = (
    epilogues.ACTIVATION,
    epilogues.RESIDUAL,
    Row(
        "triton.product.odd", chain("linear"),
        when=_odd, pays=epilogues.pays, write=epilogues.write, note="product, rows of odd length",
    ),
    Row(
        "triton.product.siblings", chain("linear"), extend=_siblings, pays=_concat_pays,
        write=_concatenated, note=lambda m: f"one product for {len(m.ops)}",
    ),
    Row(
        "triton.product.padded", chain("linear"),
        when=_padding_helps, pays=_padding_pays, write=_padded, note="product, padded",
    ),
    epilogues.PLAIN,
)  # fmt: skip
"""Rows of linears, in matching order."""
