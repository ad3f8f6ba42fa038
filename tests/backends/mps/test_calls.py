"""Torch's own calls on MPS: the rows that torch has no MPS kernel for, and the types that the device lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops, report
from fusewright_mps.lowerings import CPU_ATTENTION, WITHOUT_CALL
from tests.backends.mps.native import COMPOSITE, kernels

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_rows_that_torch_does_not_compute_on_mps_are_known() -> None:
    known = {op.name: kernels().get(op.qualname.removeprefix("aten::")) for op in ops.ROWS}
    missing = {name for name, keys in known.items() if keys is not None and not keys & {"MPS", *COMPOSITE}}
    onednn = {op.name for op in ops.ROWS if op.qualname.startswith("onednn::")}
    assert missing - CPU_ATTENTION | onednn == set(WITHOUT_CALL)


def run(fn: Any, *args: Tensor) -> tuple[Any, report.GraphReport]:
    compiled = torch.compile(fn, backend="apple_mps", options={"simulate": True, "strict": True})
    with report.recording() as reports:
        return compiled(*args), reports[-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_64_bit_floats_are_refused_with_the_reason(dtype: torch.dtype) -> None:
    x = torch.ones(4, dtype=dtype)
    result, seen = run(lambda x: x * 2 + 1, x)
    assert torch.equal(result, x * 2 + 1) and seen.count("lowered") == seen.count("carried") == 0
    assert all("Metal has no 64-bit floats" in str(op.verdict) for op in seen.by_eager)


def test_a_product_of_int8_is_no_call_on_mps() -> None:
    a, b = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    result, seen = run(lambda a, b: torch._int_mm(a, b) + 1, a, b)
    assert torch.equal(result, torch._int_mm(a, b) + 1)
    assert [op.op for op in seen.by_eager] == ["int_mm"] and seen.count("carried") == 0
