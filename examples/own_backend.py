"""Write your own backend: one op calls a library, everything else becomes loop kernels, run by the reference interpreter.

A package registers a backend with two entry points (docs/interface.md); this example writes the file that pip would create for the
first. docs/interface.md is the full guide, and examples/xla_cpu a backend whose kernels come from another compiler.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from fusewright import registry
from fusewright.dynamo import entry
from fusewright.interface import CompileContext, Device, OpView, Unavailable
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.backend.fused import FusedBackend
from fusewright.toolkit.backend.library import LoweringTable, OpLowering

LIBRARY = torch.library.Library("own_backend", "FRAGMENT")
"""The vendor's library: here a torch op in Python, in practice a binding of C++."""
CALLS: list[tuple[int, ...]] = []
LOWERINGS: LoweringTable[OpLowering] = LoweringTable()


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    CALLS.append(tuple(x.shape))
    return torch.softmax(x, dim)


@LOWERINGS.add("softmax", dtypes={torch.float32})
def lower_softmax(op: OpView, ctx: CompileContext) -> Call:
    return Call("own_backend::softmax.default", (Ref(op.arg("self").id), op.arg("dim")), (op.out.id,), op_id=op.id)


class OwnBackend(FusedBackend):
    name, device_type = "own_backend", "cpu"
    lowerings, namespaces = LOWERINGS, ("own_backend",)

    @classmethod
    def probe(cls) -> Device | Unavailable:
        return Device("cpu", "any")


def install(folder: Path) -> None:
    """Do what `pip install` would do for a package with the entry point."""
    info = folder / "own_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fusewright.backends]\nown_backend = own_backend:OwnBackend\n")
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("own_backend", sys.modules[__name__])
    registry.refresh()


def main() -> None:
    if not hasattr(torch.ops.own_backend, "softmax"):
        LIBRARY.define("softmax(Tensor x, int dim) -> Tensor")
        LIBRARY.impl("softmax", softmax, "CPU")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Softmax(-1)).eval()
    x = torch.randn(4, 8)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        install(Path(folder))
        fast = torch.compile(model, backend=entry("own_backend"), options={"cache": False, "fallback": "allow"})
        torch.testing.assert_close(fast(x), model(x))
        sys.path.remove(folder)
    registry.refresh()
    print(f"the library's softmax was called with {CALLS[-1]}")
    assert CALLS == [(4, 8)] * len(CALLS) and CALLS


if __name__ == "__main__":
    main()
