"""1x1 convolutions of channels-last images as linears of our own (see `own`), with the batch norm, the addition and the activation
that follow.

oneDNN's relu and additions lose NaN, so each is a pass over memory behind its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value, hint
from fusewright.toolkit.region.builder import Builder, channels_last_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Chain, Match, chain, maybe
from fusewright.toolkit.region.rewrite import Row
from fusewright_cpu.onednn import choices, own, sums
from fusewright_cpu.onednn.folding import folded
from fusewright_cpu.onednn.patterns import (
    POST_OPS,
    folds_batch_norm,
    is_packed,
    other_of,
    post_op,
    reads,
    rides,
    same_type,
)
from fusewright_cpu.target import host_target


def _adds(op: OpView, m: Match, b: Builder) -> bool:
    """Match the addition of another image."""
    other = next((v for v in op.args[:2] if v != m.out), None)
    return op.arg("alpha") == 1 and isinstance(other, Value) and same_type(op.out, m.out) and same_type(other, m.out)


def conv_chain(id: str) -> Chain:
    """Return the pattern of a row: a convolution with the batch norm, the addition and the activation that follow."""
    return chain(
        "conv",
        maybe("batch_norm", folds_batch_norm, "batch_norm", rule=f"{id}.batch_norm"),
        maybe("add", _adds, "add", rule=f"{id}.add"),
        maybe(frozenset(POST_OPS), lambda op, m, b: reads(op, m), "unary", rule=f"{id}.unary"),
    )


def _fits(m: Match, b: Builder) -> bool:
    """Match a convolution of images of fixed size whose pixels do not mix."""
    op = m.anchor
    x, weight = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank != 4 or not (x.static and weight.static) or not is_packed(op, b) or b.ctx.options["prepack"] != "auto":
        return False
    one = all(set(sizes) == {1} for sizes in (weight.shape[2:], op.arg("stride"), (op.arg("groups"),)))
    plain = one and set(op.arg("padding")) == {0}
    typed = all(v.spec is not None and v.spec.dtype == x.dtype for v in op.inputs()) and b.is_const(op.arg("bias"))
    return plain and typed and covers(x)


def covers(x: TensorSpec) -> bool:
    """Whether a linear computes 1x1 convolutions of such images; with AVX2 `direct_conv` does, which has more tiles."""
    wide = x.dtype is not torch.float32 or host_target().vector_bytes == 64
    return wide and own.fits(_rows(x), hint(x.shape[1]), x.dtype)


def _rows(x: TensorSpec) -> int:
    return x.numel_hint() // hint(x.shape[1])


def _pixels(x: TensorSpec) -> TensorSpec:
    """Return an image as rows of channels."""
    return replace(x, shape=(x.shape[0], *x.shape[2:], x.shape[1]), stride=(x.stride[0], *x.stride[2:], x.stride[1]))


def after(m: Match) -> tuple[str, tuple[float, ...]]:
    """Return the name and the scalars of the activation, as our kernels take them."""
    unary = m.get("unary")
    return (own.activation(unary), POST_OPS[unary.op].scalars(unary) or ()) if unary is not None else ("", ())


def _pays(m: Match, b: Builder) -> bool:
    x, out = spec_of(m.anchor.arg("input")), spec_of(m.anchor.out)
    name, scalars = after(m)
    kernel = own.kernel_of(x.dtype, True, m.get("add") is not None, name, _rows(x), hint(out.shape[1]))
    unary = m.get("unary")
    apart = unary is not None and (not POST_OPS[unary.op].exact and not b.ctx.options["finite_math"])
    image = tuple(map(hint, x.shape))
    parts = sums.parts_of(m.anchor)
    post = riding(m, parts, b)
    return choices.pointwise_form(b.ctx, kernel, image, hint(out.shape[1]), scalars, post, apart, b.built, parts) == own.FORM


def riding(m: Match, parts: int, b: Builder) -> choices.Post:
    """Return the activation that oneDNN's call would compute: the next op behind a sum that is not split."""
    unary = m.get("unary")
    there = unary is not None and rides(unary, b) and m.get("add") is None and parts == 1
    return post_op(m) if there else choices.NOTHING.post


def _write(m: Match, b: Builder) -> None:
    op = m.anchor
    weight, bias = folded(m, b)
    x, other = op.arg("input"), other_of(m)
    step = own.row_step(_pixels(b.spec(x)))
    if step is None:
        x = channels_last(x, b)
    given = spec_of(op.arg("weight")).shape
    n, k = hint(given[0]), hint(given[1])
    rows = b.prepare("aten::reshape.default", weight, (n, k))
    out = b.with_layout(m.out, _strides(spec_of(m.out).shape))
    own.launch(
        x, rows, bias, None if other is None else channels_last(other, b), after(m), (_rows(b.spec(x)), n, k, step or k), out, op, b
    )
    b.close_call(m.ops)
    b.notes[op.id] = " + ".join(["1x1 convolution in one kernel", *(p.op for p in m.ops[1:])])
    for part in m.ops[1:]:
        b.notes[part.id] = "in the kernel of conv"


def _strides(shape: Sequence[Any]) -> tuple[int, ...]:
    return channels_last_strides(tuple(map(hint, shape)))


def channels_last(image: Value, b: Builder) -> Value:
    """Return the image with dense channels-last strides, copied if it has others."""
    spec = b.spec(image)
    same = all(n == 1 or a == s for n, a, s in zip(spec.shape, spec.stride, _strides(spec.shape), strict=True))
    return image if same else b.channels_last(image)


ROW = Row("onednn.pointwise", conv_chain("onednn.pointwise"), when=_fits, pays=_pays, write=_write, note="1x1 convolution")
