"""The reference semantics of a row, run in fp64: the judge of every backend, and the implementation of the `interp` backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusewright.ops.core import Kind, Op
from fusewright.ops.dtype_rules import result_type
from fusewright.ops.rules import is_tensor

COMPARISONS = frozenset({"eq_scalar", "ne_scalar", "lt_scalar", "le_scalar", "gt_scalar", "ge_scalar"})


def evaluate(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Compute the outputs of a canonical call by its reference, with every floating tensor in fp64 (complex128).

    Lists of outputs are flattened. Random rows, bit views and undefined values run unchanged.
    """
    if op.kind is Kind.RANDOM or op.name == "view_dtype":
        return flat(op.reference(*args, **kwargs))
    if op.name in COMPARISONS:
        args = _rounded_scalars(args)
    with default_dtype(torch.float64):
        return flat(op.reference(*widen(args), **widen(dict(kwargs))))


def compute(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Like `evaluate`, rounded to the dtypes of the row's rule."""
    dtypes = op.dtypes(args, kwargs)
    outs = evaluate(op, args, kwargs)
    return tuple(None if o is None or d is None else o.to(d) for o, d in zip(outs, dtypes, strict=True))


def widen(x: Any) -> Any:
    """`x` with every floating tensor in fp64 and every complex one in complex128."""
    if isinstance(x, torch.Tensor):
        if x.is_floating_point():
            return x.to(torch.float64)
        return x.to(torch.complex128) if x.is_complex() else x
    if isinstance(x, list | tuple):
        return [widen(y) for y in x]
    return {k: widen(v) for k, v in x.items()} if isinstance(x, dict) else x


def flat(out: Any) -> tuple[torch.Tensor | None, ...]:
    """The outputs of a call as a flat tuple."""
    return tuple(out) if isinstance(out, list | tuple) else (out,)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The dtype that integers become in true division and the like, within a block."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def _rounded_scalars(args: Sequence[Any]) -> list[Any]:
    # Eager compares in the promoted dtype: 0.1 is rounded to bf16 before it is compared with a bf16 tensor.
    dtype = result_type(args)
    return [a if is_tensor(a) else torch.tensor(a, dtype=dtype).item() for a in args]
