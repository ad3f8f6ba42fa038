"""Rows of odd length: zeros behind the features of a linear, written by the kernel that makes its input and, for constants, once.

Libraries' fast kernels, and tensor descriptors, read and write vectors of 16 bytes. Others take several times as long. Zeros go
behind the features of both operands, so that they add nothing, whatever the operands hold.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusewright import machine
from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.lower.tables import RULES
from fusewright.toolkit.region.graph import spec_of
from fusewright_triton.select.calls import Calls

PADDED_TO = 8
"""Row lengths in a half type that are multiples of this suit the tensor memory accelerator and 16-byte loads."""

HALF = (torch.bfloat16, torch.float16)

FEW = 8
"""The longest sum of a product that suits a loop kernel better than any library."""


def vector(dtype: torch.dtype) -> int:
    """Return how many elements libraries' fast kernels read at once; 1 where they have none, as for fp32 in full precision."""
    if dtype is torch.float32 and machine.matmul_precision("cuda") != "ieee":
        return PADDED_TO // 2
    return PADDED_TO if dtype in HALF else 1


def lacking(op: OpView, c: Calls) -> tuple[int, int]:
    """Return how many features and results a linear of fixed sizes lacks, where zeros pay: one of its matrices is large, the weight
    only if it is padded once."""
    x, w, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))
    if not (x.static and out.static):
        return 0, 0
    weights = w.numel_hint() if c.is_const(op.arg("weight"), op.arg("bias")) else 0
    if max(x.numel_hint(), out.numel_hint(), weights) < c.target.bounds.padded_results:
        return 0, 0
    step, n = vector(out.dtype), out.shape[-1]
    return -x.shape[-1] % step, -n % step if n != 1 else 0  # type: ignore[operator]


def operands(op: OpView, c: Calls, more: int = 0) -> tuple[Ref | None, Ref, Ref | None]:
    """Return input, weight and bias of a linear, with zeros behind the features it lacks, and for `more` results."""
    w, bias, behind = op.arg("weight"), op.arg("bias"), lacking(op, c)[0]
    make = c.b.prepare if c.is_const(w, bias) else partial(each_call, c)
    weight, added = c.b.exact(w), c.exact(bias)
    if behind or more:
        weight = make("aten::constant_pad_nd.default", weight, (0, behind, 0, more), 0)
    if more and added is not None:
        added = make("aten::constant_pad_nd.default", added, (0, more), 0)
    return rows(op.arg("input"), behind, c), weight, added


def each_call(c: Calls, target: str, *args: Any) -> Ref:
    """Compute at every call what `Builder.prepare` would compute once: weights change in training."""
    return c.made(target, *args)


def rows(x: Value, behind: int, c: Calls) -> Ref | None:
    """Return a tensor with zeros behind its rows. Products of one tensor share it, and kernels read it in place of the tensor."""
    if not behind:
        return c.b.any_strides(x)
    key = x.id, 0, behind
    if key not in c.padded:
        c.padded[key] = c.b.append_op("constant_pad_nd", x, (0, behind), 0)
        if _only_a_kernel_makes(x, c):
            c.b.moved(x, c.b.append_op("slice", c.padded[key], -1, 0, spec_of(x).shape[-1], 1))
    return Ref(c.b.read_instead(x, c.padded[key]).id)


def _only_a_kernel_makes(x: Value, c: Calls) -> bool:
    """Return whether nobody needs a tensor that a kernel makes without those zeros."""
    made = c.graph.producer(x)
    by_kernel = made is not None and made.op in RULES and c.graph.free(made) and not c.graph.escapes(x)
    return by_kernel and all(map(c.b.takes_any_strides, c.graph.users(x)))
