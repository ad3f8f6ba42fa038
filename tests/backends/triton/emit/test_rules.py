"""Every kernel rule against eager, as in `tests/ops/test_kernels_vs_eager.py`, with the source emitted for a GPU.

Triton's interpreter runs the source on CPU tensors; blocks and warps are those of each backend's typical target. Kernels of
small samples are often the same source for both targets, which then runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.conformance.ops.calls import arguments
from fusewright.conformance.ops.samples import Case
from fusewright.ops import Op
from fusewright.toolkit.ir import Kernel
from fusewright_triton.backend import NvidiaTriton, RocmTriton
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.runtime import CompiledModule, simulate_kernels
from tests.ops.test_kernels_vs_eager import ROWS, check
from tests.ops.test_rows import _params
from tests.unit.fuse.running import Loader, Run

TARGETS = [backend.targets[backend.typical] for backend in (NvidiaTriton, RocmTriton)]


def simulated(kernels: Mapping[str, Kernel]) -> Iterator[Loader]:
    """Return a loader for each distinct source that the kernels have on the targets."""
    modules = [simulate_kernels(list(kernels.values()), target) for target in TARGETS]
    for k, module in enumerate(modules):
        if all(module.sources != before.sources for before in modules[:k]):
            yield lambda _, module=module: launchers(module)  # type: ignore[misc]


def launchers(module: CompiledModule) -> dict[str, Run]:
    return {h: module.by_hash(h) for h in module.kernels}


@pytest.mark.parametrize(("op", "dtype", "case"), _params(ROWS))
def test_rule_follows_eager(op: Op, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = arguments(op, case, dtype)
    try:
        taken = check(op, args, kwargs, simulated)
    except Unsupported as e:  # `compile` declines such a kernel, and eager runs the op
        assert "with mul where points meet" in str(e), op
        taken = False
    if not taken:
        pytest.skip("kernels do not claim this row with these types; runs once a rule computes it")
