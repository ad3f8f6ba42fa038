"""Loop kernels: one small IR that all emitters print. `ir` describes it; start with `Builder`."""

from fusewright.toolkit.kernel.builder import Builder, Val
from fusewright.toolkit.kernel.extent import Extent, Poly, symbol
from fusewright.toolkit.kernel.index import Index, IndexTooComplex
from fusewright.toolkit.kernel.interp import interpret
from fusewright.toolkit.kernel.ir import Buffer, Kernel, Node, Scalar, Stage, crosses
from fusewright.toolkit.kernel.printer import to_text
from fusewright.toolkit.kernel.serial import from_json, structural_hash, to_json
from fusewright.toolkit.kernel.verify import KernelError, verify

__all__ = [
    "Buffer",
    "Builder",
    "Extent",
    "Index",
    "IndexTooComplex",
    "Kernel",
    "KernelError",
    "Node",
    "Poly",
    "Scalar",
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
