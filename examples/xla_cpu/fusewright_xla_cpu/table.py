"""The table that the modules of `rows` fill: a row of the opset -> a function of JAX arrays.

A function takes the op's arguments by their names in the schema: arrays for tensors, Python numbers for the rest, None for
absent ones. It returns one array, or a tuple in the order of the op's outputs. The emitter rounds to the output's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.backend.library import LoweringTable
from fusewright_xla_cpu.target import DTYPES

Array: TypeAlias = Any


@dataclass
class Site:
    """One op while its region is traced. `checks` collects what eager would reject, as pairs of flag and error."""

    op: OpView
    checks: list[tuple[Array, Exception]] = field(default_factory=list)

    @property
    def spec(self) -> TensorSpec:
        """The spec of the first output."""
        spec = self.op.out.spec
        assert spec is not None
        return spec

    def refuse(self, flag: Array, error: Exception) -> None:
        """Raise `error` after the program has run if an element of `flag` is true."""
        self.checks.append((jnp.any(flag), error))


Emit: TypeAlias = Callable[..., Any]
"""`emit(site, **arguments)`."""

LOWERINGS: LoweringTable[Emit] = LoweringTable()


def dtype_name(dtype: torch.dtype) -> str:
    """Return JAX's name for a dtype."""
    return DTYPES[dtype]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that eager computes in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def promoted(op: OpView) -> torch.dtype:
    """Return the dtype to which torch promotes the operands of a comparison; numbers and 0-d tensors have lower priority."""
    operands = [_sample(op.arg(n)) for n in op.argnames if n in ("self", "other")]
    return torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype


def _sample(arg: Any) -> Any:
    if isinstance(arg, Value) and arg.spec is not None:
        return torch.empty((1,) * min(arg.spec.rank, 1), dtype=arg.spec.dtype, device="meta")
    return 0 if isinstance(arg, Value) else arg


def cast(x: Array, dtype: torch.dtype) -> Array:
    """Convert `x` to `dtype` as torch does on CPUs: integers wrap. A bool becomes a float through an integer, because XLA turns a
    product with a bool into a selection, where zero times NaN or infinity would be zero."""
    if not isinstance(x, jnp.ndarray):
        return jnp.asarray(x, dtype_name(dtype))
    to = dtype_name(dtype)
    if jnp.issubdtype(x.dtype, jnp.floating) and not dtype.is_floating_point and dtype is not torch.bool:
        fits = jnp.abs(x.astype("float64")) < 2.0**63
        return jnp.where(fits, jnp.where(fits, x, 0).astype("int64"), jnp.iinfo("int64").min).astype(to)
    if x.dtype == bool and dtype.is_floating_point:
        x = x.astype("int32")
    return x.astype(to)


def pointwise(fn: Callable[..., Array], computed: Callable[[OpView], torch.dtype] | None = None) -> Emit:
    """Return an emitter of an elementwise function: operands are cast to the dtype that eager computes in."""

    def emit(site: Site, **arguments: Any) -> Array:
        dtype = wide(computed(site.op) if computed else site.spec.dtype)
        return fn(**{n: _operand(a, dtype) for n, a in arguments.items()})

    return emit


def _operand(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, jnp.ndarray) or (isinstance(arg, int | float) and not isinstance(arg, bool)):
        return cast(arg, dtype)
    return arg if not isinstance(arg, bool) else jnp.asarray(arg, dtype_name(dtype))


def add_pointwise(rows: Mapping[str, Callable[..., Array]], **how: Any) -> None:
    """Register elementwise functions by row name."""
    computed = how.pop("computed", None)
    for name, fn in rows.items():
        LOWERINGS.add(name, dynamic=True, **how)(pointwise(fn, computed))


def add(*names: str, **how: Any) -> Callable[[Emit], Emit]:
    """Register an emitter that uses its site. Every row takes any sizes, because each shape gets its own program."""
    return LOWERINGS.add(*names, dynamic=True, **how)
