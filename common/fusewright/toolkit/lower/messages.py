"""Eager's messages for out-of-bounds indices, op by op, for `Builder.bound`. Measured on CPUs with torch 2.13."""

from __future__ import annotations

import torch

from fusewright.interface import OpView
from fusewright.toolkit.lower.views import dim_of

_IN_SELF = "IndexError: index out of range in self"
_PLACE = "index {index} is out of bounds for dimension %d with size {size}"
_WORDS = {
    "gather": "RuntimeError: " + _PLACE,
    "scatter": "RuntimeError: " + _PLACE,
    "scatter_value": "RuntimeError: " + _PLACE,
    "scatter_add": "RuntimeError: " + _PLACE,
    "scatter_reduce": "RuntimeError: " + _PLACE,
    "index_add": "RuntimeError: " + _PLACE,
    "index_copy": "IndexError: index_copy_(): " + _PLACE,
    "index_fill": "IndexError: " + _PLACE,
}
LABEL = "IndexError: Target {index} is out of bounds."
PROBABILITY = "RuntimeError: all elements of input should be between 0 and 1"
TARGET = "RuntimeError: all elements of target should be between 0 and 1"
TOO_FEW = "RuntimeError: Number of elements of source < number of ones in mask"


def along(op: OpView) -> str:
    """For an op with one index along one dim."""
    rank, d = op.arg("self").spec.rank, dim_of(op)
    if op.op == "index_select":  # eager has a separate loop for the second dim
        second = d == 1 and rank > 1
        return "RuntimeError: INDICES element is out of DATA bounds, id={index} axis_dim={size}" if second else _IN_SELF
    if op.op == "index_reduce" or (op.op == "index_add" and not _by_scatter_add(op, rank, d)):
        return _IN_SELF
    return _WORDS[op.op] % d


def _by_scatter_add(op: OpView, rank: int, d: int) -> bool:
    """Whether eager implements this `index_add` as a `scatter_add`."""
    return rank > 1 and d in (0, rank - 1) and op.arg("alpha") == 1 and op.arg("index").spec.dtype == torch.int64


def row(op: OpView) -> str:
    """For a row of a table."""
    return _IN_SELF


def tensor(position: int) -> str:
    """For the tensor at `position` among those of an advanced indexing: eager counts tensors, not dims."""
    return "IndexError: " + _PLACE % position
