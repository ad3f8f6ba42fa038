"""Products with weights: in ACL's blocked layout, through OpenBLAS, as a 1x1 convolution, in bf16, or by eager's own call.

ONEDNN_VERBOSE (see `verbose`) shows what each torch call runs on aarch64: `_linear_pointwise` runs oneDNN's reference gemm if the
weight is not packed, and in bf16 a reference kernel with any weight. The bf16 product that takes a packed weight is a 1x1
convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.builder import Builder, channels_last_strides, contiguous_strides
from fusewright.toolkit.region.pattern import Match
from fusewright_acl import fpmath
from fusewright_acl.int8 import COLUMNS
from fusewright_acl.rows import is_row_major, row_count, row_major, rows_fit
from fusewright_cpu.kernels.by_hand import Bf16Linear
from fusewright_cpu.onednn import own
from fusewright_cpu.onednn.choices import FITTED, Product, few_rows, penalised
from fusewright_cpu.onednn.left_behind import SHAPES
from fusewright_cpu.onednn.lowerings import (
    CONV,
    PACK_CONV,
    PACK_LINEAR,
    emit_linear,
    note_parts,
    operands,
    product_of,
    sdpa,
    spec_of,
    weight_of,
)
from fusewright_cpu.onednn.patterns import posts
from fusewright_cpu.run.jit import compile_kernels
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import host_target

POINT = ((0, 0), (1, 1), (1, 1), 1)
"""Padding, stride, dilation and groups of a 1x1 convolution."""
LEAST = 8
"""Smallest matrix dimension for ACL's blocks; below, they are mostly padding and eager's call stays."""


def lower(m: Match, b: Builder) -> None:
    """Emit input @ weight.T + bias in the fastest form for its shape."""
    op = m.anchor
    form = form_of(op, b)
    note = _WRITE[form](m, b)
    if form == "packed":
        b.close_call(m.ops)
        note_parts(m, b, note)
        return
    for part in posts(m):
        b.leave(part)
    b.notes[op.id] = note


def form_of(op: OpView, b: Builder) -> str:
    """Return the form of a product: "aten", "packed", "blas", "point", "gemv", "bf16" or "bf16_packed"."""
    product, (x, w, _) = product_of(op), operands(op)
    wide = min(product.k, product.n) >= LEAST
    if product.dtype is torch.float32 and b.ctx.options["fpmath"] == "bf16" and wide:
        return _bf16_form(op, product, b)
    few, prepack = own.gemv_of(op, operands(op), b) is not None, b.ctx.options["prepack"]
    packs = spec_of(x).static and b.is_const(w) and prepack != "never" and wide
    packed = "packed" if product.dtype is torch.float32 else "point"
    if packs and prepack == "always":
        return packed
    if packs and not SHAPES.admit(product.key, b.owner):
        b.ctx.provisional()
        packs = False
    blas = packs and product.dtype is torch.float32
    forms = ["aten", *([packed] if packs else []), *(["blas"] if blas else []), *(["gemv"] if few else [])]
    if len(forms) == 1:
        return "aten"
    candidates = {f: _MEASURE[f](product.proxy()) for f in forms}
    return b.ctx.choose(f"acl {product.key} {'/'.join(forms)}", Lazy(candidates))


def _bf16_form(op: OpView, product: Product, b: Builder) -> str:
    """Return "bf16" (ACL, packing the weight at every call) or "bf16_packed" (our kernel, with the weight packed once)."""
    x, w, bias = operands(op)
    if not b.is_const(w) or not b.is_const(bias) or b.ctx.options["prepack"] == "never" or not rows_fit(b.spec(x)):
        return "bf16"
    if Bf16Linear().refused(host_target()) or not is_row_major(spec_of(op.out)):
        return "bf16"
    if b.ctx.options["prepack"] == "always":
        return "bf16_packed"
    candidates = {"bf16": _time_bf16(product.proxy()), "bf16_packed": _time_bf16_packed(product.proxy())}
    return b.ctx.choose(f"acl {product.key} {'/'.join(candidates)}", Lazy(candidates))


# -- writing each form


def _aten(m: Match, b: Builder) -> str:
    b.leave(m.anchor)
    return "ATen: as eager multiplies this shape"


def _packed(m: Match, b: Builder) -> str:
    x, w, bias = operands(m.anchor)
    weight = b.prepare(PACK_LINEAR, weight_of(m.anchor, w, b), product_of(m.anchor).m)
    emit_linear(m, b, x, weight, None if bias is None else b.exact(bias))
    return "ACL product, packed"


def _blas(m: Match, b: Builder) -> str:
    """Give OpenBLAS a weight with dense columns; any other would go to ACL, which copies it at every call."""
    x, w, bias = operands(m.anchor)
    columns = b.prepare("aten::t.default", weight_of(m.anchor, w, b))
    dense = b.prepare("aten::clone.default", columns, memory_format=torch.contiguous_format)
    weight = b.prepare("aten::t.default", dense)
    out = m.anchor.out
    args = (b.any_strides(x), weight, None if bias is None else b.exact(bias))
    b.library("aten::linear.default", *args, out=out, stride=_rows_of(out), op=m.anchor)
    b.close_call((m.anchor,))
    return "OpenBLAS product"


def _point(m: Match, b: Builder) -> str:
    """Emit a 1x1 convolution of x[m, k] viewed as a channels-last image [1, k, 1, m]."""
    op, product = m.anchor, product_of(m.anchor)
    x, w, bias = operands(op)
    shape = (product.n, product.k, 1, 1)
    weight = b.prepare("aten::reshape.default", weight_of(op, w, b), shape)
    packed = b.prepare(PACK_CONV, _laid_out(weight, b), *POINT, (1, product.k, 1, product.m))
    image = _called("aten::reshape.default", b.any_strides(x), (1, 1, product.m, product.k), b=b)
    channels = _called("aten::permute.default", image, (0, 3, 1, 2), b=b)
    made = (1, product.n, 1, product.m)
    spec = TensorSpec(made, channels_last_strides(made), product.dtype)
    args = (channels, packed, None if bias is None else b.exact(bias), *POINT, "none", (), "")
    rows = _called("aten::permute.default", _called(CONV, *args, b=b, spec=spec), (0, 2, 3, 1), b=b)
    b.library("aten::reshape.default", rows, spec_of(op.out).shape, out=op.out, stride=_rows_of(op.out), op=op)
    b.close_call((op,))
    return "ACL product in bf16, packed, as a 1x1 convolution"


def _bf16(m: Match, b: Builder) -> str:
    """Emit the bf16 product without its bias, which a kernel adds in fp32: with a bias, torch's product takes another path."""
    op = m.anchor
    x, w, bias = operands(op)
    weight = weight_of(op, w, b)
    if bias is None:
        b.library(fpmath.LINEAR, b.any_strides(x), weight, out=op.out, stride=_rows_of(op.out), op=op)
        b.close_call((op,))
    else:
        spec = spec_of(op.out)
        product = b.ctx.value(TensorSpec(spec.shape, _rows_of(op.out) or spec.stride, spec.dtype))
        b.call(fpmath.LINEAR, b.any_strides(x), weight, out=product, op=op)
        b.replace(op, product)
        b.append_op("add", product, bias, out=b.with_layout(op.out, _rows_of(op.out)))
    return "ACL product, multiplied in bf16 (fpmath)"


def _bf16_packed(m: Match, b: Builder) -> str:
    op = m.anchor
    x, w, bias = operands(op)
    n, k = spec_of(op.out).shape[-1], spec_of(x).shape[-1]
    weight = Value(b.prepare(fpmath.PACK, weight_of(op, w, b)).id, None)
    more = [] if bias is None else [Value(b.prepare(COLUMNS, b.exact(bias), n, torch.float32).id, None)]
    kernel = Bf16Linear(bias is not None)
    sizes = (row_count(spec_of(x).shape[:-1]), n, k)
    b.launch(kernel, hash_of(kernel), [row_major(x, b), weight, *more], sizes, (), out=op.out, op=op)
    b.close_call((op,))
    return "product in one kernel, packed, multiplied in bf16 (fpmath)"


def _gemv(m: Match, b: Builder) -> str:
    op, p = m.anchor, product_of(m.anchor)
    kernel = own.gemv_of(op, operands(op), b)
    assert kernel is not None
    own.emit_few_rows(kernel, operands(op), (p.n, p.k), op.out, op, b)
    b.close_call((op,))
    return "product of few rows in one kernel"


_WRITE: dict[str, Callable[[Match, Builder], str]] = {
    "aten": _aten, "packed": _packed, "blas": _blas, "point": _point, "gemv": _gemv, "bf16": _bf16,
    "bf16_packed": _bf16_packed,
}  # fmt: skip


def _called(target: str, *args: object, b: Builder, spec: TensorSpec | None = None) -> Ref:
    made = b.ctx.value(spec)
    b.call(target, *args, out=made)
    return Ref(made.id)


def _laid_out(weight: Ref, b: Builder) -> Ref:
    return b.prepare("aten::clone.default", weight, memory_format=torch.channels_last)


def _rows_of(out: Value) -> tuple[int, ...] | None:
    """Return row-major strides of a result of static size, else None."""
    spec = spec_of(out)
    return contiguous_strides(spec.shape) if spec.static else None  # type: ignore[arg-type]


# -- measurements


def _tensors(p: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x, w = torch.full((p.m, p.k), 0.5, dtype=p.dtype), torch.full((p.n, p.k), 0.5, dtype=p.dtype)
    return x, w, torch.full((p.n,), 0.5, dtype=p.dtype) if p.bias else None


def _time_aten(p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x, w, bias = _tensors(p)
        return lambda: torch.nn.functional.linear(x, w, bias)

    return make


def _time_packed(p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x, w, bias = _tensors(p)
        packed = torch.ops.mkldnn._reorder_linear_weight(w, p.m)
        return penalised(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""), FITTED.packed_gain)

    return make


def _time_blas(p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x, w, bias = _tensors(p)
        columns = w.t().contiguous().t()
        return penalised(lambda: torch.nn.functional.linear(x, columns, bias), FITTED.packed_gain)

    return make


def _time_point(p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x, w, bias = _tensors(p)
        image = x.view(1, 1, p.m, p.k).permute(0, 3, 1, 2)
        laid_out = w.view(p.n, p.k, 1, 1).contiguous(memory_format=torch.channels_last)
        packed = torch.ops.mkldnn._reorder_convolution_weight(laid_out, *POINT, image.shape)
        run = torch.ops.mkldnn._convolution_pointwise
        return penalised(lambda: run(image, packed, bias, *POINT, "none", [], ""), FITTED.packed_gain)

    return make


def _time_gemv(p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        given, run = _tensors(p), few_rows(p)
        return lambda: run(*given)

    return make


def _time_bf16(p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x, w, _ = _tensors(p)
        return lambda: fpmath.linear_bf16(x, w)

    return make


def _time_bf16_packed(p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x, w, _ = _tensors(p)
        launcher = compile_kernels([Bf16Linear()]).launcher(Bf16Linear())
        given = [x, fpmath.pack_bf16(w), torch.empty(p.m, p.n)]
        return penalised(lambda: launcher(given, (p.m, p.n, p.k)), FITTED.packed_gain)

    return make


_MEASURE: dict[str, Callable[[Product], Callable[[], Thunk]]] = {
    "aten": _time_aten, "packed": _time_packed, "blas": _time_blas, "point": _time_point, "gemv": _time_gemv,
}  # fmt: skip


# -- batched products


def batched(m: Match, b: Builder) -> None:
    """Emit a batched product: in bf16 under `fpmath`, else eager's call, which runs ACL."""
    op = m.anchor
    sizes: Sequence[object] = (*spec_of(op.arg("self")).shape[1:], spec_of(op.arg("mat2")).shape[2])
    wide = all(isinstance(n, int) and n >= LEAST for n in sizes)
    if b.ctx.options["fpmath"] != "bf16" or spec_of(op.out).dtype is not torch.float32 or not wide:
        b.leave(op)
        return
    b.library(fpmath.BMM, b.any_strides(op.arg("self")), b.any_strides(op.arg("mat2")), out=op.out, stride=_rows_of(op.out), op=op)
    b.close_call((op,))
    b.notes[op.id] = "ACL product, multiplied in bf16 (fpmath)"


# -- attention


def attention(m: Match, b: Builder) -> None:
    """Emit attention: under `fpmath`, torch's kernel with bf16 products if faster than ours in fp32; else the CPU backends' own."""
    op = m.anchor
    if b.ctx.options["fpmath"] != "bf16" or not _sdpa_in_bf16(op, b):
        return sdpa(m, b)
    values = [op.arg(n) for n in ("query", "key", "value", "attn_mask")]
    args = (*map(b.any_strides, values), bool(op.arg("is_causal")), op.arg("scale"))
    b.call(fpmath.SDPA, *args, out=op.out, op=op)
    b.close_call((op,))
    b.notes[op.id] = "torch's attention, multiplied in bf16 (fpmath)"
    return None


def _sdpa_in_bf16(op: OpView, b: Builder) -> bool:
    q, k, v = (b.spec(op.arg(n)) for n in ("query", "key", "value"))
    if op.op != "sdpa" or q.dtype is not torch.float32 or not all(s.static for s in (q, k, v)):
        return False
    mask, scale = op.arg("attn_mask"), op.arg("scale")
    specs = [q, k, v, *([b.spec(mask)] if mask is not None else [])]

    def timed(run: Callable[..., torch.Tensor]) -> Callable[[], Thunk]:
        def make() -> Thunk:
            made = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype) for s in specs]  # type: ignore[arg-type]
            q, k, v, *more = [t.fill_(1 if t.dtype is torch.bool else 0.5) for t in made]
            return lambda: run(q, k, v, more[0] if more else None, bool(op.arg("is_causal")), scale)

        return make

    def fp32(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    shapes = " ".join("x".join(map(str, s.shape)) for s in specs)
    candidates = {"bf16": timed(fpmath.sdpa_bf16), "fp32": timed(fp32)}
    return b.ctx.choose(f"acl attention fpmath {shapes}", Lazy(candidates)) == "bf16"
