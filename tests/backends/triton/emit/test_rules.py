"""Every kernel rule against eager, as in `tests/ops/test_kernels_vs_eager.py`, with the source emitted for a GPU.

Triton's interpreter runs the source on CPU tensors; blocks and warps are those of each backend's typical target.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.conformance.ops.calls import arguments
from fusewright.conformance.ops.samples import Case
from fusewright.ops import Op
from fusewright.toolkit.ir import Kernel
from fusewright_triton.backend import NvidiaTriton, RocmTriton
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.runtime import simulate_kernels
from tests.ops.test_kernels_vs_eager import ROWS, check
from tests.ops.test_rows import _params
from tests.unit.fuse.running import LOADERS, Run

BACKENDS = (NvidiaTriton, RocmTriton)


@pytest.fixture(autouse=True)
def _simulated_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        target = backend.targets[backend.typical]

        def load(kernels: Mapping[str, Kernel], target: object = target) -> dict[str, Run]:
            module = simulate_kernels(list(kernels.values()), target)  # type: ignore[arg-type]
            return {h: module.launcher(k) for h, k in kernels.items()}

        monkeypatch.setitem(LOADERS, backend.name, load)


@pytest.mark.parametrize(("op", "dtype", "case"), _params(ROWS))
def test_rule_follows_eager(op: Op, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = arguments(op, case, dtype)
    for backend in BACKENDS:
        try:
            taken = check(op, args, kwargs, backend.name)
        except Unsupported as e:  # `compile` declines such a kernel, and eager runs the op
            assert op.name == "scatter_reduce", e
            taken = False
        if not taken:
            pytest.skip("not claimed")
