"""Rows that are left with other strides than the graph's: torch's metadata functions give those that eager gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import ops
from fusewright.ops import Kind
from fusewright.toolkit.region.builder import STRIDE_FREE
from tests.ops.test_strides import PLAIN_INDICES, calls, flat, steps, variants

BY_METADATA = sorted(
    name for name in STRIDE_FREE - PLAIN_INDICES
    if name in ops.OPS and ops.OPS[name].kind is not Kind.POINTWISE and not ops.OPS[name].activation
    and name not in ("batch_norm", "conv")  # kernels compute the first; the builder asks nothing of the second
)  # fmt: skip


def _on_meta(x: Any) -> Any:
    if isinstance(x, list):
        return [_on_meta(y) for y in x]
    plain = isinstance(x, torch.Tensor) and x.layout is torch.strided
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if plain else x


@pytest.mark.parametrize("name", BY_METADATA)
def test_metadata_functions_give_eagers_strides(name: str) -> None:
    op = ops.OPS[name]
    for args, kwargs in calls(op):
        for label, given in variants(args):
            if "gaps" in label or "expanded" in label:  # values that calls made are dense
                continue
            try:
                want, got = (flat(op.target(*a, **k)) for a, k in ((given, kwargs), (_on_meta(given), kwargs)))
            except (RuntimeError, NotImplementedError):
                continue  # refused, or without a metadata function: then the builder copies
            for g, w in zip(got, want, strict=True):
                if isinstance(w, torch.Tensor) and w.layout is torch.strided and w.numel() and g.shape == w.shape:
                    assert steps(g) == steps(w), label


@pytest.mark.parametrize("name", ["log_softmax", "amax", "prelu", "glu", "sort", "mm", "upsample_trilinear3d", "cumsum"])
def test_what_reads_any_strides_is_found_in_the_table(name: str) -> None:
    assert name in STRIDE_FREE


@pytest.mark.parametrize("name", ["sdpa", "as_strided", "clone", "conv_backward", "roll", "layer_norm_backward", "rand", "full"])
def test_what_depends_on_strides_is_not(name: str) -> None:
    assert name not in STRIDE_FREE
