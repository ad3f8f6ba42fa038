"""The opset table's shapes and dtypes for a GPU's calls match traced ones. Tracing needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.conformance.ops.cases import CASES, DTYPES
from fusewright.conformance.ops.samples import FLOATS, NotFinite
from fusewright.ops import Op
from fusewright.ops.oracle import flat

compat.register_quantized_decomposed()

HOSTS = {"q_linear", "q_linear_binary", "q_conv", "q_conv_binary", "sdpa_with_lse", "sdpa_backward"}
"""Rows of CPU libraries."""
UNTRUE = {"choose_qparams_per_token"}
"""Rows whose metadata function and kernel disagree on dtypes, on every device."""


def on_a_gpu(x: Any) -> Any:
    if isinstance(x, list):
        return [on_a_gpu(y) for y in x]
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x


def untrue(op: Op, args: list[Any], kwargs: dict[str, Any]) -> list[str]:
    """List the differences between the table and the trace of a call."""
    with compat.fake_mode():
        args = on_a_gpu(args)
        try:
            traced = [o for o in flat(op.target(*args, **kwargs)) if o is not None]
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return []  # nothing is traced, so nothing is believed
        dtypes, shapes = op.types(args, kwargs)
    wrong = []
    for k, t in enumerate(traced):
        if shapes[k] is not None and tuple(shapes[k]) != tuple(t.shape):
            wrong.append(f"result {k} has shape {tuple(t.shape)}, the table says {tuple(shapes[k])}")
        if dtypes[k] not in (None, t.dtype) and k not in op.fake_differs:
            wrong.append(f"result {k} is {t.dtype}, the table says {dtypes[k]}")
    return wrong


@pytest.mark.parametrize("name", [n for n in ops.OPS if n in CASES and n not in HOSTS | UNTRUE])
def test_shapes_and_dtypes_are_those_of_the_trace(name: str) -> None:
    op, wrong = ops.OPS[name], []
    for dtype in DTYPES.get(name, FLOATS):
        for case in CASES[name]:
            try:
                wrong += untrue(op, *case.make(dtype))
            except NotFinite:
                continue
    assert not wrong


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "wide"), [("group_norm", False), ("layer_norm", True), ("batch_norm", True)])
def test_statistics_of_a_norm_are_as_wide_as_a_gpus(name: str, wide: bool, dtype: torch.dtype) -> None:
    """FakeTensor's dtypes are not trusted for norms; these were observed in eager on an H200."""
    op = ops.OPS[name]
    with compat.fake_mode():
        args, kwargs = CASES[name][0].make(dtype)
        found = op.dtypes(on_a_gpu(args), kwargs)
    assert found[1:] == (torch.promote_types(dtype, torch.float32) if wide else dtype,) * 2
