"""What computes each op on MPS: Metal kernels, or torch's own calls between them; and the ops and dtypes that MPS lacks."""

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
"""Ops that are not lowered to torch's own call."""

LOWERINGS.add("linear", dtypes=FLOATS, when=products.reason)(by_rows((quantized.GROUPS, products.SIBLINGS)))
LOWERINGS.add("mm", dtypes=FLOATS)(by_rows((quantized.INT8,)))
LOWERINGS.add(*packed.OPS, dtypes=FLOATS, when=packed.reason)(by_rows((packed.PACKED,)))
LOWERINGS.add("sdpa", when=attention.reason)(by_rows((attention.DECODE,)))

IN_DOUBLES = {"arange": "call, integers: kernel", "linspace": "call"}
"""Ops whose float kernels would compute in fp64, which Metal lacks: torch's own call handles floats."""


def _in_integers(op: OpView) -> str | None:
    """Return why an op of `IN_DOUBLES` is not left to torch, or None if it is."""
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
"""Dtypes that no tensor on the device can have."""

WITHOUT_CALL: dict[str, str] = {
    "int_mm": "torch has no product of int8 matrices on MPS",
    **dict.fromkeys(
        (
            "rms_norm_backward", "channel_shuffle", "adaptive_avg_pool3d", "adaptive_avg_pool3d_backward", "adaptive_max_pool3d",
            "adaptive_max_pool3d_backward",
        ),
        "torch has no kernel of it on MPS",
    ),
    "q_linear": "it is oneDNN's",
    "q_linear_tensor": "it is oneDNN's",
    "q_conv": "it is oneDNN's",
}
"""Rows of the opset that torch itself does not compute on MPS (`tests/backends/mps/test_calls.py` checks this against torch's
dispatch table). Carried between kernels, they would run on the CPU or fail."""

CPU_ATTENTION = frozenset({"sdpa_with_lse", "sdpa_backward"})
"""The CPU's attention ops. No graph of MPS tensors holds them; in simulation they stand in for torch's MPS attention."""


def refused(op: OpView) -> str | None:
    """Return why an op cannot run on the device at all, or None."""
    found = (REFUSED.get(s.dtype) for s in _specs(op))
    return next((why for why in found if why is not None), None)


def carried(op: OpView, verdict: Verdict) -> Verdict:
    """Carry an op that no kernel computes as torch's own call, where MPS has one. `verdict` is the kernel rules' answer."""
    reasons = (Why.NO_LOWERING, Why.ATTR) if op.op in RULES else (Why.NO_LOWERING, Why.ATTR, Why.DTYPE)
    doubles = op.op in IN_DOUBLES and _in_integers(op) is None
    if not doubles and (verdict or verdict.why not in reasons or op.op not in ops.OPS):
        return verdict
    if op.op in WITHOUT_CALL:
        return Verdict(Why.NO_LOWERING, WITHOUT_CALL[op.op])
    return Verdict(Why.CARRIED, "torch's own call on MPS, inside the region")


def computed_by(row: str) -> str:
    """Return what computes a row of the opset on MPS, at best: "kernel" (Metal), "call" (torch's own on MPS, inside a region), or
    "" for neither."""
    if row in IN_DOUBLES:
        return IN_DOUBLES[row]
    if row in RULES:
        return "kernel"
    if row in WITHOUT_CALL or row in CPU_ATTENTION:
        return ""
    return "call, few rows: kernel" if row in LOWERINGS else "call"


def _specs(op: OpView) -> Iterable[TensorSpec]:
    return (v.spec for v in (*op.inputs(), *op.outs) if v.spec is not None)
