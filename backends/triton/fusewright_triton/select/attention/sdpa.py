"""Choose which kernel computes torch's attention with a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright.toolkit.region.graph import Claim, spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.kernels import attention_ops as kernel
from fusewright_triton.select.attention import decomposed_bias
from fusewright_triton.select.attention.heads import heads_of, taken_apart
from fusewright_triton.select.calls import Calls

REPEATS = 10


def sdpa_reason(op: OpView) -> str | None:
    """Return why torch's own choice among its kernels is left alone."""
    if op.arg("attn_mask") is None:
        return "torch's own choice among its kernels is the fastest one"
    return None


def _decomposed_mask(m: Match, c: Calls) -> Match | None:
    """Match a mask of decomposed positions that has no other reader; it is never materialized as a matrix."""
    op = m.anchor
    q, k, v = (spec_of(op.arg(n)) for n in ("query", "key", "value"))
    plain = q.rank == 4 and q.shape[:2] == k.shape[:2] and q.shape[-1] == v.shape[-1]
    if not plain or op.arg("dropout_p") or op.arg("is_causal"):
        return None
    found = decomposed_bias.summands(op.arg("attn_mask"), c, decomposed_bias.Sum())
    batch, heads, queries, _ = q.shape
    bias = decomposed_bias.positions(found.terms, batch * heads, queries, k.shape[2])  # type: ignore[arg-type, operator]
    if bias is None or not decomposed_bias.fits(q, c, bias.keys):
        return None
    where = heads_of(op.arg("query"), op.arg("key"), op.arg("value"), op.out, c)
    return m.with_ops(*found.ops, *where.ops, at=op, bias=bias, heads=where)


def slices_elsewhere(m: Match, ops: tuple[OpView, ...], c: Calls) -> tuple[Claim, ...]:
    """Claim the copies that an attention no longer reads."""
    return taken_apart(m["heads"].stack, ops, c)


def _decomposed(m: Match, c: Calls) -> None:
    op, where = m.anchor, m["heads"]
    operands = where.operands([op.arg(n) for n in ("query", "key", "value")], c)
    where.write(op, kernel.DECOMPOSED, [*operands, *decomposed_bias.summed(m["bias"], c), op.arg("scale")], c)


def _has_mask(m: Match, c: Calls) -> bool:
    return m.anchor.arg("attn_mask") is not None


# ---------------------------------------------------------------- masks


def _refused(mask: TensorSpec) -> bool:
    """Return whether a mask's last dimension is not dense: flash, memory-efficient and cuDNN attention all refuse such masks, and
    torch would use fp32 products and a softmax."""
    return mask.rank > 0 and mask.stride[-1] != 1 and mask.shape[-1] != 1


def _shared_mask(op: OpView, c: Calls) -> bool:
    """Return whether batches, heads or queries share a mask, which makes it cheap to read, or keys are few: for narrow heads of
    half types our kernel is then faster."""
    q, k, mask = (spec_of(op.arg(n)) for n in ("query", "key", "attn_mask"))
    read = math.prod(n for n, step in zip(mask.shape, mask.stride, strict=True) if step != 0)  # type: ignore[misc]
    whole = math.prod(q.shape[:3]) * k.shape[2]  # type: ignore[arg-type, operator]
    return _narrow(q, c) and (2 * read <= whole or k.shape[2] <= c.target.bounds.short_sequence)  # type: ignore[operator]


def _narrow(q: TensorSpec, c: Calls) -> bool:
    return q.dtype != torch.float32 and q.shape[3] <= c.target.bounds.narrow_head  # type: ignore[operator]


def _known_to_pay(op: OpView, refused: bool, c: Calls) -> bool:
    """Return whether our kernel was always found faster than torch's first choice, or than that choice after a copy of the mask:
    small strides of a mask cost little."""
    q, mask, fitted = spec_of(op.arg("query")), spec_of(op.arg("attn_mask")), c.target.fitted
    if fitted is None:
        return False
    step = mask.stride[-1] * mask.dtype.itemsize if refused and mask.static else None  # type: ignore[operator]
    return (step is not None and _narrow(q, c) and step <= fitted.mask_step) or _shared_mask(op, c)


def _plain(op: OpView, c: Calls) -> bool:
    """Return whether our kernel supports this attention."""
    q, k, v = (spec_of(op.arg(n)) for n in ("query", "key", "value"))
    if op.arg("dropout_p") or op.arg("is_causal") or not q.rank == k.rank == 4:
        return False
    same = q.dtype == k.dtype == v.dtype and k.shape == v.shape and q.shape[::3] == k.shape[::3] and k.shape[1] > 0  # type: ignore[operator]
    return same and q.shape[1] % k.shape[1] == 0 and decomposed_bias.fits(q, c)  # type: ignore[operator]


def _ours_takes(m: Match, c: Calls) -> bool:
    """Return whether our kernel may be the faster one."""
    op = m.anchor
    return _has_mask(m, c) and _plain(op, c) and (_refused(spec_of(op.arg("attn_mask"))) or _shared_mask(op, c))


def _ours_pays(m: Match, c: Calls) -> bool:
    refused = _refused(spec_of(m.anchor.arg("attn_mask")))
    return _known_to_pay(m.anchor, refused, c) or _pays(m.anchor, refused, c)


def _copy_helps(m: Match, c: Calls) -> bool:
    """Return whether torch's kernels take the mask only after a copy."""
    out = spec_of(m.out)
    dense = out.stride == contiguous_strides(out.shape)  # type: ignore[arg-type]
    return _has_mask(m, c) and dense and _refused(spec_of(m.anchor.arg("attn_mask")))


def _masked(m: Match, c: Calls) -> None:
    op = m.anchor
    q, k, v, mask = (c.b.any_strides(op.arg(n)) for n in ("query", "key", "value", "attn_mask"))
    stride, arch = spec_of(op.out).stride, c.ctx.device.arch
    c.b.call(kernel.ATTENTION, q, k, v, mask, None, False, op.arg("scale"), True, stride, arch, out=op.out, op=op)


def _with_dense_mask(m: Match, c: Calls) -> None:
    """Copy the mask; one made of constants is copied once, when the plan first runs."""
    op = m.anchor
    mask: Value = op.arg("attn_mask")
    spec = spec_of(mask)
    dense = c.ctx.value(replace(spec, stride=contiguous_strides(spec.shape), const=False))  # type: ignore[arg-type]
    clone = Call("aten::clone.default", (c.exact(mask),), (dense.id,), (("memory_format", torch.contiguous_format),))
    c.b.append(clone)
    given = c.b.resolved(op)
    place = op.argnames.index("attn_mask")
    # torch's choice among its kernels decides the strides, and it differs from the choice for the original mask
    made = c.ctx.value(None)
    args = (*given.args[:place], dense, *given.args[place + 1 :])
    c.b.append(c.ctx.aten(replace(given, args=args, outs=(made, *given.outs[1:]))))
    c.b.append(Call("aten::contiguous.default", (Ref(made.id),), (op.out.id,)))


def _pays(op: OpView, refused: bool, c: Calls) -> bool:
    """Return whether our kernel beats torch's (with a dense copy of a mask that it refuses), by a short measurement."""
    if c.ctx.device.simulated:
        return True
    specs = [spec_of(op.arg(n)) for n in ("query", "key", "value", "attn_mask")]
    arch, scale, stride = c.ctx.device.arch, op.arg("scale"), spec_of(op.out).stride
    candidates = Lazy({
        "torch": partial(_torchs, specs, scale, refused),
        "kernel": partial(_ours, specs, scale, stride, arch),
    })  # fmt: skip
    sizes = " ".join(f"{str(s.dtype).removeprefix('torch.')}{list(s.shape)}{list(s.stride)}" for s in (specs[0], *specs[1::2]))
    return c.ctx.choose(f"attention {sizes}", candidates) == "kernel"


def samples(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return tensors of these types to measure with."""
    return [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device).fill_(1) for s in specs]  # type: ignore[arg-type]


def _torchs(specs: Sequence[TensorSpec], scale: float | None, refused: bool) -> Thunk:
    q, k, v, mask = samples(specs)
    gqa = q.shape[1] != k.shape[1]

    def run() -> None:
        for _ in range(REPEATS):
            given = mask.contiguous() if refused else mask
            torch.nn.functional.scaled_dot_product_attention(q, k, v, given, scale=scale, enable_gqa=gqa)
        torch.cuda.synchronize(q.device)

    return run


def _ours(specs: Sequence[TensorSpec], scale: float | None, stride: Any, arch: str) -> Thunk:
    q, k, v, mask = samples(specs)

    def run() -> None:
        for _ in range(REPEATS):
            kernel.attention(q, k, v, mask, None, False, scale, True, stride, arch)
        torch.cuda.synchronize(q.device)

    return run


ROWS = (
    Row(
        "triton.attention.decomposed_mask", chain("sdpa"), when=_has_mask, extend=_decomposed_mask, also=slices_elsewhere,
        write=_decomposed, note="attention with decomposed positions",
    ),
    Row(
        "triton.attention.masked", chain("sdpa"), when=_ours_takes, pays=_ours_pays, write=_masked,
        note="attention, by our kernel",
    ),
    Row(
        "triton.attention.dense_mask", chain("sdpa"), when=_copy_helps, write=_with_dense_mask,
        note="attention with a dense mask",
    ),
)  # fmt: skip
"""Rows of attention with a mask: our kernel where it is faster; otherwise a mask that torch's kernels refuse is copied."""
