"""What goes where on MPS: torch's own calls that may lie between kernels, what they lack, and the types that the device lacks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusewright import ops
from fusewright.interface import OpView, TensorSpec, Verdict, Why
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.lower.tables import RULES
from fusewright.toolkit.region.graph import Claim
from fusewright_mps.select import attention, packed, products, quantized
from fusewright_mps.select.calls import FLOATS, Calls, OpCode, by_rows

LOWERINGS: LoweringTable[OpCode] = LoweringTable()
"""Calls that differ from torch's own."""

LOWERINGS.add("linear", dtypes=FLOATS, when=products.reason)(by_rows((quantized.GROUPS, products.SIBLINGS)))
LOWERINGS.add("mm", dtypes=FLOATS)(by_rows((quantized.INT8,)))
LOWERINGS.add(*packed.OPS, dtypes=FLOATS, when=packed.reason)(by_rows((packed.PACKED,)))
LOWERINGS.add("sdpa", when=attention.reason)(by_rows((attention.DECODE,)))

IN_DOUBLES = {"arange": "call, integers: kernel", "linspace": "call"}
"""Rows whose kernels compute the places of floats in fp64, as eager does elsewhere: of floats they are torch's own call."""


def _in_integers(op: OpView) -> str | None:
    """Why a row of `IN_DOUBLES` is not left to torch."""
    return None if any(s.dtype.is_floating_point for s in _specs(op)) else "integers have kernels"


@LOWERINGS.add(*sorted(IN_DOUBLES), dynamic=True, when=_in_integers)
def _torchs_own(op: OpView, c: Calls) -> Claim:
    return Claim((op,), op, lambda c: c.b.append(c.ctx.aten(op)), "torch's own call on MPS")


REFUSED: dict[torch.dtype, str] = {
    torch.float64: "Metal has no 64-bit floats",
    torch.complex128: "Metal has no 64-bit floats",
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        "MPS has no 8-bit floats",
    ),
}
"""Types of which no tensor can be on the device."""

WITHOUT_CALL: dict[str, str] = {
    "int_mm": "torch has no product of int8 matrices on MPS",
    "rms_norm_backward": "torch has no kernel of it on MPS",
    "q_linear": "it is oneDNN's",
    "q_linear_tensor": "it is oneDNN's",
    "q_conv": "it is oneDNN's",
}
"""Rows of the opset that torch itself does not compute on MPS: `tests/backends/mps/test_calls.py` holds them to torch's table of
kernels. Between kernels they would be computed on the CPU, or not at all."""

CPU_ATTENTION = frozenset({"sdpa_with_lse", "sdpa_backward"})
"""The CPU's own attention is in no graph of MPS tensors; simulated, it stands for torch's attention."""


def refused(op: OpView) -> str | None:
    """Why no part of an op can run on the device, or None."""
    found = (REFUSED.get(s.dtype) for s in _specs(op))
    return next((why for why in found if why is not None), None)


def carried(op: OpView, verdict: Verdict) -> Verdict:
    """A row that no kernel computes as torch's own call, where MPS has one; `verdict` is what rules of kernels say of it."""
    reasons = (Why.NO_LOWERING, Why.ATTR) if op.op in RULES else (Why.NO_LOWERING, Why.ATTR, Why.DTYPE)
    doubles = op.op in IN_DOUBLES and _in_integers(op) is None
    if not doubles and (verdict or verdict.why not in reasons or op.op not in ops.OPS):
        return verdict
    if op.op in WITHOUT_CALL:
        return Verdict(Why.NO_LOWERING, WITHOUT_CALL[op.op])
    return Verdict(Why.CARRIED, "torch's own call on MPS, inside the region")


def computed_by(row: str) -> str:
    """What computes a row of the opset on MPS, at the best: "kernel" (Metal), "call" (torch's own on MPS, inside of regions), or ""
    for what neither does."""
    if row in IN_DOUBLES:
        return IN_DOUBLES[row]
    if row in RULES:
        return "kernel"
    if row in WITHOUT_CALL or row in CPU_ATTENTION:
        return ""
    return "call, few rows: kernel" if row in LOWERINGS else "call"


def _specs(op: OpView) -> Iterable[TensorSpec]:
    return (v.spec for v in (*op.inputs(), *op.outs) if v.spec is not None)
