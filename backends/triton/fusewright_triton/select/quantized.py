"""Linears with weights of 8 bits, as torchao's tensors leave them in a graph.

Weight-only: `mm(x, cast(t(w)))`, then a factor for each column and a bias. For a few rows this becomes a loop kernel of dot
products fused with its neighbours, for more rows a tiled kernel that reads the weight directly; for many rows, eager's own cast
before the library's product is faster. Dynamic: `_int_mm` of quantized rows, between loop kernels; shapes that cuBLAS refuses
have their own kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.region.gemv import transposed
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.region.weight_only import behind, widened, widened_linear
from fusewright_triton.kernels.int8_ops import LEAST_ROWS, LINEAR, MULTIPLE, int8_linear, int8_mm, linear_by_torch
from fusewright_triton.kernels.int8_ops import MM as PRODUCT
from fusewright_triton.select import aligned
from fusewright_triton.select.calls import Calls

REPEATS = 20
"""Products per timing."""


def mm_reason(op: OpView) -> str | None:
    """Return why a product stays torch's own call. The rows of the table look at its sizes and at what makes its weight."""
    x, out = spec_of(op.arg("self")), spec_of(op.out)
    return "symbolic or empty" if not (x.static and out.static) or 0 in (*x.shape, *out.shape) else None


def _widened(m: Match, c: Calls) -> Match | None:
    """Bind an 8-bit weight that the region widens to the type of the product, and its cast if the cast has no other reader."""
    return widened(m, c.graph, c.target.bounds.int8_rows)


def _reading_pays(match: Match, c: Calls) -> bool:
    """Return whether the kernel that reads 8-bit weights is faster than the library's product of widened ones."""
    op = match.anchor
    x, (k, n) = spec_of(op.arg("self")), (int(s) for s in spec_of(op.arg("mat2")).shape)  # type: ignore[arg-type]
    m, arch = int(x.shape[0]), c.ctx.device.arch  # type: ignore[arg-type]

    def products(run: Callable[..., Any]) -> Callable[[], Thunk]:
        def make() -> Thunk:
            given = torch.ones(m, k, dtype=x.dtype, device=x.device), torch.ones(n, k, dtype=torch.int8, device=x.device)
            return lambda: _repeated(lambda x, w: run(x, w, None, None, arch), *given)

        return make

    key = f"int8 weights {str(x.dtype).removeprefix('torch.')} {m}x{k}x{n}"
    return c.pays(key, products(linear_by_torch), products(int8_linear))


def _linear(m: Match, c: Calls) -> None:
    found = behind(m)
    args = (c.exact(m.anchor.arg("self")), _rows_of(m["weight"], c), c.exact(found.get("scale")), c.exact(found.get("bias")))
    c.b.call(LINEAR, *args, _target(c), out=m.out, op=m.last)


def int_mm_reason(op: OpView) -> str | None:
    """Return why an integer product stays torch's own call."""
    a, b = spec_of(op.arg("self")), spec_of(op.arg("mat2"))
    if not (a.static and b.static) or 0 in (*a.shape, *b.shape):
        return "symbolic or empty"
    return None if a.dtype == b.dtype == torch.int8 else "not int8 on both sides"


def _int_mm_pays(m: Match, c: Calls) -> bool:
    """Match an integer product that cuBLAS refuses, or that a kernel computes faster."""
    op = m.anchor
    rows, k, n = (int(s) for s in (*spec_of(op.arg("self")).shape, spec_of(op.arg("mat2")).shape[1]))  # type: ignore[arg-type]
    if rows < LEAST_ROWS or k % MULTIPLE or n % MULTIPLE:
        return True
    return not c.ctx.device.simulated and transposed(op.arg("mat2")) and _kernel_pays(rows, n, k, op, c)


def _kernel_pays(m: int, n: int, k: int, op: OpView, c: Calls) -> bool:
    """Return whether the kernel is faster than the library, by a short measurement."""
    device, target = spec_of(op.out).device, _target(c)

    def products(run: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[], Thunk]:
        def make() -> Thunk:
            x, w = (torch.ones(rows, k, dtype=torch.int8, device=device) for rows in (m, n))
            return lambda: _repeated(run, x, w)

        return make

    library = products(lambda x, w: torch.ops.aten._int_mm(x, w.t()))
    kernel = products(lambda x, w: int8_mm(x, w, target))
    return c.ctx.choose(f"int8 product {m}x{n}x{k}", Lazy({"library": library, "kernel": kernel})) == "kernel"


def _repeated(run: Callable[[torch.Tensor, torch.Tensor], Any], x: torch.Tensor, w: torch.Tensor) -> None:
    for _ in range(REPEATS):
        run(x, w)
    torch.cuda.synchronize(x.device)


def _int_mm(m: Match, c: Calls) -> None:
    op = m.anchor
    args = (c.exact(op.arg("self")), _rows_of(op.arg("mat2"), c), _target(c))
    c.b.call(PRODUCT, *args, out=op.out, op=op)


def _target(c: Calls) -> str:
    return c.ctx.device.arch


def _rows_of(value: Value, c: Calls) -> Ref:
    """Return the transpose of a matrix; the operators copy a transpose that is not dense."""
    if c.is_const(value):
        return c.b.prepare("aten::t.default", c.b.exact(value))
    made = c.ctx.value(None)
    c.b.call("aten::t.default", c.b.exact(value), out=made)
    return Ref(made.id)


LINEAR8 = Row(
    "triton.int8.linear", widened_linear("triton.int8"),
    extend=_widened, pays=_reading_pays, write=_linear, note="product with int8 weights",
)  # fmt: skip
"""A product with an 8-bit weight that the region widens, and the factor and bias of its epilogue."""

MM = (LINEAR8, aligned.ROWS)
"""Matched first by what makes the weight, then by its rows."""

INT_MM = (Row("triton.int8.int_mm", chain("int_mm"), pays=_int_mm_pays, write=_int_mm, note="int8 product"),)
