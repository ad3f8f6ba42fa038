"""Evaluate a region as one function of JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusewright.interface import OpView, Region, Value
from fusewright.toolkit.backend.library import LoweringTable
from fusewright_xla_cpu.lowerings import LOWERINGS
from fusewright_xla_cpu.table import Array, Emit, Site, cast


def emit(
    region: Region, given: Mapping[int, Any], device: Any, table: LoweringTable[Emit] = LOWERINGS
) -> tuple[list[Array], list[tuple[Array, Exception]]]:
    """Return the region's outputs and the checks that eager makes, given its inputs by id (arrays; numbers for symbolic sizes)."""
    env = dict(given)
    checks: list[tuple[Array, Exception]] = []
    for op in region.ops:
        row = table.find(op, device)
        if not row:
            raise ValueError(f"{op.op} is in the region, but the table says {row}")
        site = Site(op, checks)
        arguments = {name: _read(arg, env) for name, arg in zip(op.argnames, op.args, strict=True)}
        made = row.code(site, **arguments)  # type: ignore[union-attr]
        _bind(env, op, made if isinstance(made, tuple | list) else (made,))
    return [env[v.id] for v in region.outputs], checks


def _read(arg: Any, env: Mapping[int, Any]) -> Any:
    if isinstance(arg, Value):
        return env[arg.id]
    return [_read(a, env) for a in arg] if isinstance(arg, tuple) else arg


def _bind(env: dict[int, Any], op: OpView, made: Sequence[Array | None]) -> None:
    """Store results by id, rounded to eager's dtype."""
    for value, result in zip(op.outs, made, strict=True):
        if value.spec is not None and result is not None:
            env[value.id] = cast(result, value.spec.dtype)
