"""The opset: a closed, versioned table of ops (`OPSET` in `fusewright.interface`), and how ATen overloads
map to its rows.

>>> op, args, kwargs = canonical(torch.ops.aten.sum.default, (x,), {})
>>> op.name, args, kwargs
('sum', (x, None, False), {'dtype': None})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.ops.aliases import ALIASES, Adapter
from fusewright.ops.core import Args, Kind, Op, Overload, Param, Shape, bind, params_of, unbind
from fusewright.ops.table import (
    backward,
    composite,
    contraction,
    creation,
    gather,
    opened,
    pointwise,
    quantized,
    reduction,
    view,
)

__all__ = [
    "OPS",
    "PACKETS",
    "ROWS",
    "Args",
    "Kind",
    "Op",
    "Shape",
    "call_draws",
    "canonical",
    "draws",
    "find",
    "is_batch_norm",
    "is_mutating",
    "is_random",
    "is_view",
    "row_of",
    "saved_dtypes",
    "writes_statistics",
]

ROWS: tuple[Op, ...] = (
    *pointwise.ROWS, *reduction.ROWS, *view.ROWS, *contraction.ROWS,
    *gather.ROWS, *creation.ROWS, *composite.ROWS, *opened.ROWS, *backward.ROWS, *quantized.ROWS,
)  # fmt: skip
"""Every row of this opset version, whether or not this torch has the overload."""


class _Table(Mapping[str, Op]):
    """Rows by name. Iteration skips rows whose overload this torch lacks; a package imported later may define it."""

    def __init__(self, rows: Sequence[Op]) -> None:
        self._rows = {op.name: op for op in rows}
        if len(self._rows) != len(rows):
            raise ValueError("two rows of the opset have one name")

    def __getitem__(self, name: str) -> Op:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, op in self._rows.items() if op.available)

    def __len__(self) -> int:
        return sum(1 for _ in self)


OPS: Mapping[str, Op] = _Table(ROWS)


@dataclass(frozen=True)
class _Entry:
    """What is known of an overload: its schema, and its row, or as an alias the rows that cover its calls, with adapters."""

    params: tuple[Param, ...]
    rows: tuple[tuple[Op, Adapter | None], ...]

    @property
    def op(self) -> Op:
        return self.rows[0][0]


def _key(target: Overload) -> str:
    """ "aten::add.Tensor", "aten::mm"."""
    name = target.name() if isinstance(target, torch._ops.OpOverload) else ""
    return name.removesuffix(".default")


_BY_NAME: dict[str, list[tuple[Op, Adapter | None]]] = {op.qualname: [(op, None)] for op in ROWS}
for _a in ALIASES:
    _BY_NAME.setdefault(_a.qualname, []).append((OPS[_a.op], _a.adapter))
PACKETS: frozenset[str] = frozenset(name.partition(".")[0] for name in _BY_NAME)
"""Operators of the opset without their overloads: "aten::add"."""
_ENTRIES: dict[Overload, _Entry | None] = {}


def _entry(target: Overload) -> _Entry | None:
    if target not in _ENTRIES:
        found = _BY_NAME.get(_key(target))
        if found is not None and not found[0][0].available:
            return None  # for now: a package imported later may define what the row needs
        _ENTRIES[target] = None if found is None else _Entry(params_of(target), tuple(found))
    return _ENTRIES[target]


def find(target: Overload) -> Op | None:
    """The row whose canonical overload is `target`."""
    entry = _entry(target)
    return entry.op if entry is not None and entry.rows[0][1] is None else None


def row_of(target: Overload) -> Op | None:
    """The row that `canonical` returns for a call of `target`, or the first of those, if any."""
    entry = _entry(target)
    return None if entry is None else entry.op


def canonical(
    target: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Op, tuple[Any, ...], dict[str, Any]] | None:
    """Convert a call to its row's canonical overload, with bitwise the same results; None if it is outside the opset.

    All arguments are positional, in schema order, with defaults filled in; keyword-only ones are in the dict, also filled in.
    Arguments may be anything: tensors, fx nodes, symbols. A single int where the schema has `int[N]` becomes a list.
    """
    entry = _entry(target)
    if entry is None:
        return None
    bound = bind(entry.params, args, kwargs)
    for op, adapter in entry.rows:
        if adapter is not None and (adapted := adapter(bound)) is not None:
            return op, *unbind(op.params, bind(op.params, (), adapted))
    return (entry.op, *unbind(entry.op.params, bound)) if entry.rows[0][1] is None else None


def saved_dtypes(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The real dtypes of what a forward norm saved for this backward call; `meta["val"]` may be wrong."""
    if op.name not in backward.SAVED:
        return {}
    names, rule = backward.SAVED[op.name]
    dtypes = rule(op.bind(args, kwargs))
    return {n: d for n, d in zip(names, dtypes, strict=True) if d is not None}


def is_view(target: Overload) -> bool:
    """Whether, by the schema, an output may share memory with an input that this call does not write."""
    infos = [r.alias_info for r in target._schema.returns]
    return any(i is not None and not i.is_write for i in infos)


def is_mutating(target: Overload) -> bool:
    """Whether the call writes to one of its arguments (by the schema)."""
    return bool(target._schema.is_mutable)


_GATHERS = ("aten::batch_norm_update_stats", "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts")
"""Operators that update running statistics, which their schemas do not say."""


def is_batch_norm(target: Overload) -> bool:
    """Whether this is torch's own batch norm or that of a library, whose arguments are the same and in the same order."""
    named = _key(target).startswith("aten::") and _key(target).endswith("_batch_norm")
    return named and target._schema.arguments[-3].name == "training"


def writes_statistics(target: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes the running statistics of a batch norm in place, which `is_mutating` does not know."""
    if not is_batch_norm(target) and _key(target) not in _GATHERS:
        return False
    bound = bind(params_of(target), args, kwargs)
    given = bound["running_mean"] is not None or bound["running_var"] is not None
    return given and bool(bound.get("training", True))


def is_random(target: Overload) -> bool:
    """Whether a call may draw from a random generator. See `draws` for one given call."""
    return torch.Tag.nondeterministic_seeded in target.tags


_CHANCE = ("dropout_p", "p")


def draws(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this canonical call draws random numbers: an attention or dropout of probability 0 does not."""
    if not is_random(op.target):
        return False
    if op.kind is Kind.RANDOM and op.name != "dropout":
        return True
    bound = op.bind(args, kwargs)
    chance = next((bound[n] for n in _CHANCE if n in bound), 1.0)
    return bool(chance) and bound.get("train") is not False


def call_draws(target: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of any operator, of the table or not, draws random numbers. See `draws`."""
    row = find(target)
    if row is not None:
        return draws(row, args, kwargs)
    if not is_random(target):
        return False
    names = [a.name for a in target._schema.arguments]
    return "dropout_p" not in names or {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0) != 0.0
