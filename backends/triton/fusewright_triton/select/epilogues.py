"""Products whose results no library call writes as they are wanted: with an activation behind, a residual, or odd rows.

cuBLASLt's own gelu is the one by tanh, torch's `addmm` copies a residual first, and cuBLAS's kernels for rows that are not
multiples of 16 bytes are three to six times slower. `kernels/hopper.py` and, for odd rows, `kernels/product.py` do it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.lower.tables import RULES
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright_triton.kernels import product_ops
from fusewright_triton.run.graphs import repeated, several
from fusewright_triton.select.calls import Calls, Found, spec_of


def suits(op: OpView, c: Calls) -> bool:
    """Whether the kernels take a linear: large, of a half type, of fixed sizes, on a device with descriptors in hardware."""
    x, w, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))
    bias = op.arg("bias")
    if "tma" not in c.ctx.device.features or x.dtype not in product_ops.DTYPES or not out.static:
        return False
    if w.dtype != x.dtype or (bias is not None and spec_of(bias).dtype != x.dtype) or w.stride[1] != 1:
        return False
    (m, k, n), least = sizes(op), c.target.bounds
    return m >= least.product_rows and m * n >= least.product_results and k % 8 == 0


def sizes(op: OpView) -> tuple[int, int, int]:
    """Rows, inner size and columns of a linear of fixed sizes."""
    x, n = spec_of(op.arg("input")), int(spec_of(op.out).shape[-1])  # type: ignore[arg-type]
    k = int(x.shape[-1])  # type: ignore[arg-type]
    return spec_of(op.out).numel_hint() // n, k, n


def activated(op: OpView, c: Calls) -> Found | None:
    """A linear with the activation that alone reads its result, unless a loop kernel behind takes the activation in."""
    taken, user = _reader(op, c)
    name = activation_of(user) if user is not None else None
    if user is None or name is None or spec_of(user.out).dtype != spec_of(op.out).dtype:
        return None
    if not _stored(user.out, c) or not suits(op, c) or not dense(user.out) or not faster(op, Epilogue(name), c):
        return None
    return Found((*taken, user), user, partial(_write, op, user.out, name, None), f"product with {user.op}")


def added(op: OpView, c: Calls) -> Found | None:
    """A linear with the addition that alone reads its result: a residual, which a kernel would read, as the result itself."""
    taken, user = _reader(op, c)
    if user is None or user.op != "add" or user.arg("alpha") != 1:
        return None
    residual = next((v for v in user.inputs() if v.id != taken[-1].out.id), None)
    if (
        residual is None
        or not _alike(spec_of(residual), spec_of(user.out))
        or not _alike(spec_of(op.out), spec_of(user.out))
    ):
        return None
    if not suits(op, c) or not dense(user.out) or not faster(op, Epilogue("", True), c):
        return None
    return Found((*taken, user), user, partial(_write, op, user.out, "", residual), "product with what is added")


def _alike(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether tensors have as many elements, of one type, in rows of one length."""
    return a.dtype == b.dtype and a.numel_hint() == b.numel_hint() and a.shape[-1:] == b.shape[-1:]


def _reader(op: OpView, c: Calls) -> tuple[list[OpView], OpView | None]:
    """A linear with the views of its rows behind it, and the one op that reads the last of them, unless it is taken."""
    taken, user = [op], c.only_user(op.out)
    while user is not None and _reshapes(user):
        taken.append(user)
        user = c.only_user(user.out)
    return taken, user


def plain(op: OpView, c: Calls) -> Found | None:
    """A linear alone, where our kernel is the faster one: rows so short that a library's kernel waits for its epilogues."""
    if c.ctx.device.simulated or not suits(op, c) or not dense(op.out) or not faster(op, Epilogue(), c):
        return None
    return Found((op,), op, partial(_write, op, op.out, "", None), "product")


def linear(op: OpView, n: int, weight: Ref, bias: Ref | None, out: Value, c: Calls) -> None:
    """A linear of what `op` reads with another weight of `n` rows, by the faster kernel."""
    x = c.b.any_strides(op.arg("input"))
    if not c.ctx.device.simulated and suits(op, c) and faster(op, Epilogue(), c, n):
        c.b.call(product_ops.LINEAR, x, weight, bias, "", c.ctx.device.arch, out=out)
    else:
        c.b.call("aten::linear.default", x, weight, bias, out=out)


def odd(op: OpView, c: Calls) -> Found | None:
    """A linear with rows of odd length whose result leaves the region, so that padded rows would be copied."""
    if not _leaves(op.out, c) or not suits(op, c) or not dense(op.out) or not faster(op, Epilogue(), c):
        return None
    return Found((op,), op, partial(_write, op, op.out, "", None), "product, rows of odd length")


def _reshapes(op: OpView) -> bool:
    """Whether an op gives the same rows in another shape."""
    return op.op in ("view", "reshape", "alias") and spec_of(op.out).shape[-1] == spec_of(op.args[0]).shape[-1]


def _leaves(v: Value, c: Calls) -> bool:
    """Whether a value, or rows of it in another shape, are used outside."""
    views = (u.out for u in c.b.links.users(v) if _reshapes(u))
    return any(o.id == v.id for o in c.region.outputs) or any(_leaves(o, c) for o in views)


def _stored(v: Value, c: Calls) -> bool:
    """Whether somebody reads a value from memory, a library's call or the outside."""
    users = c.b.links.users(v)
    return _leaves(v, c) or any(_stored(u.out, c) if _reshapes(u) else u.op not in RULES for u in users)


def activation_of(op: OpView) -> str | None:
    """The kernel's name of an op, or None."""
    if op.op == "gelu":
        return "gelu_tanh" if op.arg("approximate") == "tanh" else "gelu"
    return op.op if op.op in product_ops.ACTIVATIONS else None


def dense(v: Value) -> bool:
    """Whether the graph wants a dense tensor."""
    spec = spec_of(v)
    return tuple(spec.stride) == contiguous_strides(spec.shape)  # type: ignore[arg-type]


def _write(op: OpView, out: Value, name: str, residual: Value | None, c: Calls) -> None:
    given = c.b.any_strides(op.arg("input")), c.exact(op.arg("weight")), c.exact(op.arg("bias"))
    product, wanted = spec_of(op.out), spec_of(out)
    same = product.shape == wanted.shape
    made = out if same else c.ctx.value(replace(product, stride=contiguous_strides(product.shape)))  # type: ignore[arg-type]
    c.b.call(product_ops.LINEAR, *given, name, c.ctx.device.arch, c.exact(residual), out=made, op=op)
    if not same:
        c.b.call("aten::view.default", Ref(made.id), wanted.shape, out=out)


@dataclass(frozen=True)
class Epilogue:
    """What follows the sums of a product."""

    activation: str = ""
    residual: bool = False

    @property
    def passes(self) -> int:
        """How often a loop kernel would read or write the result for it."""
        return 2 if self.activation else int(self.residual)


def faster(op: OpView, after: Epilogue, c: Calls, n: int = 0) -> bool:
    """Whether a kernel is faster than torch's calls for a linear (or one of `n` columns): by sizes, where they were
    measured, or under the option `autotune` by a short measurement. Simulated it always is."""
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
    """Random ones: the power that zeros save would change the clock."""
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
