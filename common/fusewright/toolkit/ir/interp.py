"""The reference interpreter: runs a kernel with torch ops over its whole domain at once. It is slow and simple;
emitters are tested against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright.toolkit.ir.checks import out_of_bounds
from fusewright.toolkit.ir.extent import Extent, evaluate
from fusewright.toolkit.ir.index import Coefs, Index
from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright.toolkit.ir.optable import OPS
from fusewright.toolkit.ir.types import is_float, to_torch


def interpret(
    kernel: Kernel,
    buffers: Sequence[torch.Tensor],
    sizes: Sequence[int] = (),
    scalars: Sequence[int | float | bool] = (),
    exact: bool = False,
) -> None:
    """Run `kernel` on CPU tensors, one per buffer, writing its outputs in place.

    `sizes` are the values of `kernel.symbols`. With `exact`, all floating-point math is done in f64 and only
    loads, stores and explicit casts round, which gives the reference for accuracy. A failed `bound` raises its
    error."""
    if len(buffers) != len(kernel.buffers) or len(sizes) != len(kernel.symbols) or len(scalars) != len(kernel.scalars):
        expected = f"{len(kernel.buffers)} tensors, {len(kernel.symbols)} sizes, {len(kernel.scalars)} scalars"
        raise TypeError(f"{kernel.name} takes {expected}")
    for t, b in zip(buffers, kernel.buffers, strict=True):
        if t.dtype != to_torch(b.dtype):
            raise TypeError(f"{kernel.name}: {b.name} is {b.dtype}, not {t.dtype}")
    _Run(kernel, buffers, sizes, scalars, exact).run()


class _Run:
    def __init__(
        self,
        kernel: Kernel,
        buffers: Sequence[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[int | float | bool],
        exact: bool,
    ) -> None:
        self.kernel, self.symbols, self.scalars, self.exact = kernel, sizes, scalars, exact
        self.flat = [_flat(t) for t in buffers]
        self.shape = [self.ext(e) for e in kernel.sizes]
        self.n_p = len(kernel.p)
        self.env: dict[int, torch.Tensor] = {}

    def ext(self, e: Extent) -> int:
        return evaluate(e, self.symbols)

    def run(self) -> None:
        for stage in self.kernel.stages:
            self.domain = (
                self.shape if stage.over == "PR" else self.shape[: self.n_p] + [1] * (len(self.shape) - self.n_p)
            )
            if 0 in self.shape[: self.n_p]:
                return
            inside: list[Node] = []  # parts of a step, from the states before it
            left = 0  # of these states
            for n in stage.nodes:
                if n.op == "state" or {i.id for i in inside}.intersection(n.uses()):
                    inside.append(n)
                    left += (n.op == "state") - n.recurs
                    if not left:
                        self.recurrence(inside)
                        inside = []
                elif n.op == "store":
                    self.store(n)
                else:
                    self.env[n.id] = self.value(n)

    def type(self, dtype: str) -> torch.dtype:
        return torch.float64 if self.exact and is_float(dtype) else to_torch(dtype)

    def axis(self, a: int) -> torch.Tensor:
        view = [1] * len(self.shape)
        view[a] = self.shape[a]
        return torch.arange(self.shape[a]).view(view)

    def affine(self, offset: Extent, coefs: Coefs) -> torch.Tensor:
        out = torch.full([1] * len(self.shape), self.ext(offset), dtype=torch.int64)
        for a, c in coefs:
            out = out + self.axis(a) * self.ext(c)
        return out

    def address(self, ix: Index) -> torch.Tensor:
        out = self.affine(ix.offset, ix.coefs)
        for d in ix.divmods:
            q = torch.div(self.affine(d.offset, d.coefs), self.ext(d.div), rounding_mode="floor")
            q = torch.remainder(q, self.ext(d.mod)) if d.mod is not None else q
            out = out + q * self.ext(d.stride)
        for i in ix.indirect:
            out = out + self.env[i.value] * self.ext(i.stride)
        return out

    def value(self, n: Node) -> torch.Tensor:
        args = [self.env[a] for a in n.args]
        if n.op in OPS:
            return torch.as_tensor(OPS[n.op].ref(*args))
        special: Callable[[Node, list[torch.Tensor]], torch.Tensor] = getattr(self, f"do_{n.op}")
        return special(n, args)

    def do_const(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        value = torch.tensor(n.value, dtype=to_torch(n.dtype)) if n.value is not None else torch.tensor(0)
        return value.to(self.type(n.dtype)).reshape([1] * len(self.shape))

    def do_scalar(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        value = torch.tensor(self.scalars[int(n.value or 0)], dtype=to_torch(n.dtype))
        return value.to(self.type(n.dtype)).reshape([1] * len(self.shape))

    def do_index(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        return self.address(_present(n.index))

    def do_load(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        flat, at = self.flat[_present(n.buffer)], self.address(_present(n.index))
        if not args:
            return self.read(flat, at).to(self.type(n.dtype))
        shape = _broadcast(at, args[0])
        at, mask = at.expand(shape), args[0].expand(shape)
        got = self.read(flat, at.masked_fill(~mask, 0)) if mask.any() else torch.zeros_like(at).to(flat.dtype)
        return torch.where(mask, got.to(self.type(n.dtype)), args[1])

    def read(self, flat: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if at.numel() == 0 or 0 in self.domain:
            return torch.empty(at.shape, dtype=flat.dtype)
        return flat[at]

    def do_bound(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        size, i = self.ext(_present(n.extent)), args[0]
        low = -size if n.how == "wrap" else 0
        bad = (i < low) | (i >= size)
        if len(args) > 1:
            bad = bad & args[1]
        if bool(bad.any()) and 0 not in self.domain:
            index = int(i.expand(bad.shape)[bad].flatten()[0])
            raise out_of_bounds(n.says, index, _present(n.extent), self.symbols)
        i = torch.where(i < 0, i + size, i) if n.how == "wrap" else i
        return torch.where(bad | (i < 0) | (i >= size), 0, i)

    def do_cast(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        return args[0].to(to_torch(n.dtype)).to(self.type(n.dtype))

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Expand `x` over P x R, with R flattened into the last dimension."""
        row = torch.empty([1] * self.n_p + self.shape[self.n_p :], device="meta")
        full = x.expand(_broadcast(x, row))
        lead = list(full.shape[: self.n_p])
        return full.reshape(*lead, _prod(full.shape[self.n_p :]))

    def do_reduce(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        x = self.rows(args[0])
        out = _REDUCE[n.how](x) if x.shape[-1] else _identity(n.how, x)
        return out.to(self.type(n.dtype)).reshape(list(out.shape) + [1] * (len(self.shape) - self.n_p))

    def do_scan(self, n: Node, args: list[torch.Tensor]) -> torch.Tensor:
        x = self.rows(args[0])
        if not x.shape[-1]:
            return x
        return _SCAN[n.how](x).to(self.type(n.dtype))

    def recurrence(self, inside: list[Node]) -> None:
        """Run the steps of states that depend on each other, in order: the nodes `inside` are all that is computed from them."""
        whole, axis = self.env, self.n_p
        states = {n.id: whole[n.args[0]].expand([*self.shape[:axis], 1]) for n in inside if n.op == "state"}
        found: dict[int, list[torch.Tensor]] = {n.id: [] for n in inside if n.recurs}
        for t in range(self.shape[axis]):
            self.env = {i: x.narrow(axis, t, 1) if x.shape[axis] > 1 else x for i, x in whole.items()} | states
            for n in inside:
                if n.recurs:
                    states[n.args[1]] = self.env[n.id] = self.env[n.args[0]].expand(self.env[n.args[1]].shape)
                    found[n.id].append(self.env[n.id])
                elif n.op != "state":
                    self.env[n.id] = self.value(n)
        self.env = whole
        for n in inside:
            if n.recurs:
                steps = found[n.id]
                whole[n.id] = torch.cat(steps, axis) if steps else states[n.args[1]].expand(self.shape)[..., :0]

    def store(self, n: Node) -> None:
        if 0 in self.domain:
            return
        flat = self.flat[_present(n.buffer)]
        parts = [self.address(_present(n.index)), *(self.env[a] for a in n.args)]
        at, value, *mask = (t.expand(self.domain).reshape(-1) for t in parts)
        value = value.to(flat.dtype)
        if mask:
            at, value = at[mask[0]], value[mask[0]]
        if n.how == "add":
            flat.index_add_(0, at, value)
        elif n.how:
            flat.scatter_reduce_(0, at, value, {"mul": "prod", "max": "amax", "min": "amin"}[n.how])
        elif n.index is not None and n.index.indirect:
            for i, v in zip(at.tolist(), value, strict=True):
                flat[i] = v
        else:
            flat[at] = value


def _flat(t: torch.Tensor) -> torch.Tensor:
    """The storage of `t` from its first element on, as a 1-D tensor."""
    n = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided((n,), (1,), t.storage_offset())


def _broadcast(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """The broadcast shape of two tensors of equal rank."""
    return [y if x == 1 else x for x, y in zip(a.shape, b.shape, strict=True)]


def _prod(shape: Sequence[int]) -> int:
    out = 1
    for s in shape:
        out *= s
    return out


def _present(x: Any) -> Any:
    if x is None:
        raise ValueError("the node lacks a field; verify the kernel first")
    return x


def _first_of(x: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Position of the first element equal to `best` (NaN equals NaN here)."""
    same = (x == best.unsqueeze(-1)) | ((x != x) & (best != best).unsqueeze(-1))
    return same.to(torch.int8).argmax(-1)


_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1, dtype=x.dtype),
    "prod": lambda x: x.prod(-1, dtype=x.dtype),
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "argmax": lambda x: _first_of(x, x.amax(-1)),
    "argmin": lambda x: _first_of(x, x.amin(-1)),
    "any": lambda x: x.any(-1),
    "all": lambda x: x.all(-1),
    "mean": lambda x: x.mean(-1),
    "m2": lambda x: (x - x.mean(-1, keepdim=True)).square().sum(-1),
}

_SCAN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.cumsum(-1, dtype=x.dtype),
    "prod": lambda x: x.cumprod(-1, dtype=x.dtype),
    "max": lambda x: x.cummax(-1).values,
    "min": lambda x: x.cummin(-1).values,
}


def _identity(how: str, x: torch.Tensor) -> torch.Tensor:
    """The result of an empty reduction."""
    f = x.dtype.is_floating_point
    least = float("-inf") if f else None if x.dtype == torch.bool else torch.iinfo(x.dtype).min
    most = float("inf") if f else None if x.dtype == torch.bool else torch.iinfo(x.dtype).max
    value = {
        "sum": 0,
        "prod": 1,
        "max": least,
        "min": most,
        "any": False,
        "all": True,
        "mean": float("nan"),
    }.get(how, 0)
    dtype = torch.int64 if how.startswith("arg") else x.dtype
    return torch.full(x.shape[:-1], value if value is not None else 0, dtype=dtype)
