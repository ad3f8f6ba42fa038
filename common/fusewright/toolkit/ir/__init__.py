"""Loop kernels: one small IR that all emitters print. `ir` describes it; start with `Builder`."""

from fusewright.toolkit.ir.builder import Builder, Val
from fusewright.toolkit.ir.extent import Extent, SizeExpr, symbol
from fusewright.toolkit.ir.index import Index, IndexTooComplex
from fusewright.toolkit.ir.interp import interpret
from fusewright.toolkit.ir.ir import Buffer, Kernel, Node, Scalar, Stage, crosses
from fusewright.toolkit.ir.printer import to_text
from fusewright.toolkit.ir.serial import from_json, structural_hash, to_json
from fusewright.toolkit.ir.verify import KernelError, verify

__all__ = [
    "Buffer",
    "Builder",
    "Extent",
    "Index",
    "IndexTooComplex",
    "Kernel",
    "KernelError",
    "Node",
    "Scalar",
    "SizeExpr",
    "Stage",
    "Val",
    "crosses",
    "from_json",
    "interpret",
    "structural_hash",
    "symbol",
    "to_json",
    "to_text",
    "verify",
]
