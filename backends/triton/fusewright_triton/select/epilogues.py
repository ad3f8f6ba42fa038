"""Products with an epilogue that no library call offers: an activation, a residual, or rows of odd length.

cuBLASLt's own gelu is the tanh approximation, torch's `addmm` copies a residual first, and cuBLAS's kernels for rows that are not
multiples of 16 bytes are three to six times slower. `kernels/hopper.py` and, for odd rows, `kernels/product.py` handle these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.lower.tables import RULES
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain, many, one
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.kernels import product_ops
from fusewright_triton.run.graphs import repeated, several
from fusewright_triton.select import aligned
from fusewright_triton.select.calls import Calls

RESHAPES = frozenset({"view", "reshape", "alias"})

ACTIVATIONS = frozenset(product_ops.ACTIVATIONS) | {"gelu"}


def suits(op: OpView, c: Calls) -> bool:
    """Return whether the kernels take a linear: large, of a half type, of fixed sizes, on a device with descriptors in hardware."""
    x, w, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))
    bias = op.arg("bias")
    if "tma" not in c.ctx.device.features or x.dtype not in product_ops.DTYPES or not out.static:
        return False
    if w.dtype != x.dtype or (bias is not None and spec_of(bias).dtype != x.dtype) or w.stride[1] != 1:
        return False
    (m, k, n), least = sizes(op), c.target.bounds
    fits = k % aligned.PADDED_TO == 0 or aligned.lacking(op, c)[0] > 0
    return m >= least.product_rows and m * n >= least.product_results and fits


def sizes(op: OpView) -> tuple[int, int, int]:
    """Return rows, inner size and columns of a linear of fixed sizes."""
    x, n = spec_of(op.arg("input")), int(spec_of(op.out).shape[-1])  # type: ignore[arg-type]
    k = int(x.shape[-1])  # type: ignore[arg-type]
    return spec_of(op.out).numel_hint() // n, k, n


def _same_rows(op: OpView, m: Match, c: Calls) -> bool:
    """Return whether an op gives the same rows in another shape."""
    return _reshapes(op)


def _activated(m: Match, c: Calls) -> bool:
    """Match an activation of the product's type that no later loop kernel would fuse."""
    op, out = m.anchor, m.out
    if spec_of(out).dtype != spec_of(op.out).dtype or activation_of(m.last) is None:
        return False
    return stored(out, c) and suits(op, c) and dense(out) and not _padded_behind(op, out, c)


def _padded_behind(op: OpView, out: Value, c: Calls) -> bool:
    """Whether only products read rows of odd length, for which a kernel writes zeros behind them and can activate too."""
    if not aligned.lacking(op, c)[1] or c.graph.escapes(out):
        return False
    return all(
        aligned.lacking(u, c)[0] if u.op == "linear" else _reshapes(u) and _padded_behind(op, u.out, c)
        for u in c.graph.users(out)
    )


def _unscaled(op: OpView, m: Match, c: Calls) -> bool:
    return bool(op.arg("alpha") == 1)


def _with_residual(m: Match, c: Calls) -> Match | None:
    """Bind the other summand, which has the product's form."""
    op, made = m.anchor, spec_of(m.out)
    residual = next((v for v in m.last.inputs() if v.id != m.ops[-2].out.id), None)
    if residual is None or not _alike(spec_of(residual), made) or not _alike(spec_of(op.out), made):
        return None
    return m.with_ops(residual=residual) if suits(op, c) and dense(m.out) else None


def _alike(a: TensorSpec, b: TensorSpec) -> bool:
    """Return whether tensors have equally many elements, of one type, in rows of one length."""
    return a.dtype == b.dtype and a.numel_hint() == b.numel_hint() and a.shape[-1:] == b.shape[-1:]


def leaving(m: Match, c: Calls) -> bool:
    """Match a result that leaves the region in the layout that our kernel writes."""
    return _leaves(m.out, c) and suits(m.anchor, c) and dense(m.out)


def _plain(m: Match, c: Calls) -> bool:
    return not c.ctx.device.simulated and suits(m.anchor, c) and dense(m.out)


def write(m: Match, c: Calls) -> None:
    """Emit the product and its matched epilogue as one call of our kernel."""
    op, out, residual = m.anchor, m.out, m.get("residual")
    name = "" if residual is not None else activation_of(m.last) or ""
    given = aligned.operands(op, c)
    product, wanted = spec_of(op.out), spec_of(out)
    same = product.shape == wanted.shape
    made = out if same else c.ctx.value(replace(product, stride=contiguous_strides(product.shape)))  # type: ignore[arg-type]
    c.b.call(product_ops.LINEAR, *given, name, c.ctx.device.arch, c.exact(residual), out=made, op=op)
    if not same:
        c.b.call("aten::view.default", Ref(made.id), wanted.shape, out=out)


def pays(m: Match, c: Calls) -> bool:
    """Return whether our kernel is faster than the library's product and its epilogue."""
    residual = m.get("residual") is not None
    return faster(m.anchor, Epilogue("" if residual else activation_of(m.last) or "", residual), c)


_VIEWS = many(RESHAPES, _same_rows)

ACTIVATION = Row(
    "triton.product.activation", chain("linear", _VIEWS, one(ACTIVATIONS)),
    when=_activated, pays=pays, write=write, note=lambda m: f"product with {m.last.op}",
)  # fmt: skip
"""A linear with the activation that is the only reader of its result, unless a later loop kernel fuses the activation."""

RESIDUAL = Row(
    "triton.product.residual", chain("linear", _VIEWS, one("add", _unscaled)),
    extend=_with_residual, pays=pays, write=write, note="product with what is added",
)  # fmt: skip
"""A linear with the addition that is the only reader of its result: a kernel would read the residual as well as the result."""

PLAIN = Row("triton.product.plain", chain("linear"), when=_plain, pays=pays, write=write, note="product")
"""A linear alone, where our kernel is faster: rows so short that a library's kernel stalls on its epilogues."""


def linear(op: OpView, n: int, given: Sequence[Ref | None], out: Value, c: Calls) -> None:
    """Emit a linear of these operands, which replace those of `op`, with `n` results, by the faster kernel."""
    if not c.ctx.device.simulated and suits(op, c) and faster(op, Epilogue(), c, n):
        c.b.call(product_ops.LINEAR, *given, "", c.ctx.device.arch, out=out)
    else:
        c.b.call("aten::linear.default", *given, out=out)


def _reshapes(op: OpView) -> bool:
    """Return whether an op gives the same rows in another shape."""
    return op.op in RESHAPES and spec_of(op.out).shape[-1] == spec_of(op.args[0]).shape[-1]


def _leaves(v: Value, c: Calls) -> bool:
    """Return whether a value, or its rows in another shape, are used outside the region."""
    views = (u.out for u in c.graph.users(v) if _reshapes(u))
    return c.graph.escapes(v) or any(_leaves(o, c) for o in views)


def stored(v: Value, c: Calls) -> bool:
    """Return whether a library call, or code outside the region, reads a value from memory."""
    users = c.graph.users(v)
    return _leaves(v, c) or any(stored(u.out, c) if _reshapes(u) else u.op not in RULES for u in users)


def activation_of(op: OpView) -> str | None:
    """Return the kernel's name for an op, or None."""
    if op.op == "gelu":
        return "gelu_tanh" if op.arg("approximate") == "tanh" else "gelu"
    return op.op if op.op in product_ops.ACTIVATIONS else None


def dense(v: Value) -> bool:
    """Return whether the graph wants a dense tensor."""
    spec = spec_of(v)
    return tuple(spec.stride) == contiguous_strides(spec.shape)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a product."""

    activation: str = ""
    residual: bool = False

    @property
    def passes(self) -> int:
        """Return how often a loop kernel would read or write the result for it."""
        return 2 if self.activation else int(self.residual)


def faster(op: OpView, after: Epilogue, c: Calls, n: int = 0) -> bool:
    """Return whether a kernel is faster than torch's calls for a linear (or one of `n` columns): by sizes where they were
    measured, or with the option `autotune` by a short measurement. In simulation it always is."""
    device, (m, k, own) = c.ctx.device, sizes(op)
    n = n or own
    if device.simulated:
        return True
    if not c.ctx.options.get("autotune"):
        t = c.target
        saved = after.passes * m * n * spec_of(op.out).dtype.itemsize
        return t.fitted is not None and (n % 8 != 0 or product_ops.gain(t, m, k, n, saved) > 0)
    x, biased = spec_of(op.arg("input")), op.arg("bias") is not None
    words = f"{after.activation}{' residual' * after.residual}{' bias' * biased}"
    key = f"product {str(x.dtype).removeprefix('torch.')} {m}x{k}x{n} {words}"
    like = (m, k, n, x.dtype, x.device, biased)
    made = repeated if c.ctx.options.get("graphs") else several
    candidates = {
        "library": lambda: made(_library(after, *like), x.device),
        "kernel": lambda: made(_kernel(after, device.arch, *like), x.device),
    }
    return c.ctx.choose(f"{key}{' replayed' if made is repeated else ''}", Lazy(candidates)) == "kernel"


def _tensors(
    m: int, k: int, n: int, dtype: torch.dtype, device: str, biased: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return random tensors: zeros draw less power, which would change the clock."""
    x, w = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    return x, w, torch.zeros(n, dtype=dtype, device=device) if biased else None


def _library(after: Epilogue, m: int, k: int, n: int, dtype: torch.dtype, device: str, biased: bool) -> Thunk:
    more = -n % 8
    x, w, bias = _tensors(m, k, n + more, dtype, device, biased)
    residual = torch.zeros(m, n + more, dtype=dtype, device=device) if after.residual else None

    def run() -> None:
        out = product_ops.ACTIVATIONS[after.activation](torch.nn.functional.linear(x, w, bias))
        if residual is not None:
            out = out + residual
        if more:
            out[:, :n].contiguous()

    return run


def _kernel(after: Epilogue, arch: str, m: int, k: int, n: int, dtype: torch.dtype, device: str, biased: bool) -> Thunk:
    x, w, bias = _tensors(m, k, n, dtype, device, biased)
    residual = torch.zeros(m, n, dtype=dtype, device=device) if after.residual else None
    return lambda: product_ops.linear_activation(x, w, bias, after.activation, arch, residual)
