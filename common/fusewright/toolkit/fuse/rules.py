"""What a rule is: how an op of the opset is computed at an index, in four kinds. The tables themselves are beside this
file.

- `View`: the result is an element of an argument; costs nothing.
- `Map`: one element of the result from elements of the arguments at indices that the rule says.
- `Row`: results over a domain of full rows, from reductions over the dims `dims` of `shape`. A result is "full" (one
  value per element of the domain) or "row" (one per row).
- `Scatter`: a start value, and stores at computed places, over the domain of a source.

Rules compute in the compute type of each dtype (fp32 for the half types): a value inside a kernel is not rounded to
half until it is stored, or cast on purpose. Integers and bool are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from fusewright.interface import OpView, Value
from fusewright.toolkit.fuse.space import At, Shape
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.ir.types import DType

if TYPE_CHECKING:
    from fusewright.toolkit.fuse.evaluate import Evaluator, RowContext

Check: TypeAlias = Callable[[OpView], "str | None"]
"""None when the rule takes this very call, else why not in a few words."""

Level: TypeAlias = Literal["full", "row"]


def always(op: OpView) -> str | None:
    return None


@dataclass(frozen=True)
class View:
    """`code(op, k, at)`: which element of which argument the element `at` of output `k` is."""

    code: Callable[[OpView, int, At], tuple[Value, At]]
    check: Check = always


@dataclass(frozen=True)
class Map:
    """`code(e, op, k, at)`: the element `at` of output `k`. `cost` in vector instructions, roughly."""

    code: Callable[[Evaluator, OpView, int, At], Val]
    check: Check = always
    cost: int = 2


@dataclass(frozen=True)
class Domain:
    """Rows over `dims` (in increasing order) of a tensor of `shape`."""

    shape: Shape
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """`code(row, op)` gives the outputs at positions `outs`, in that order; `levels` says what each of them is.

    `ordered`: positions along the row matter (scans and argmax): the row may not be run in another order.
    """

    domain: Callable[[OpView], Domain]
    code: Callable[[RowContext, OpView], tuple[Val, ...]]
    outs: tuple[int, ...] = (0,)
    levels: tuple[Level, ...] = ("full",)
    check: Check = always
    ordered: bool = False


@dataclass(frozen=True)
class Accumulator:
    """Memory of the result's shape: `init` gives its first content, `how` is the way in which stores combine."""

    how: str
    init: Callable[[Evaluator, OpView, At], Val]
    dtype: DType


@dataclass(frozen=True)
class Address:
    """A place as elements from the result's first one in memory; nothing is stored where `inside` does not hold."""

    index: Index
    inside: Val


@dataclass(frozen=True)
class Scatter:
    """`code(e, op, at)`: where the source element `at` of the domain `shape(op)` goes (an index per dim of the result, or
    an `Address`), and one value per accumulator.

    Without `finish` the only accumulator is the result; else `finish(e, op, at, accumulated)` is.
    """

    shape: Callable[[OpView], Shape]
    accumulators: Callable[[OpView], tuple[Accumulator, ...]]
    code: Callable[[Evaluator, OpView, At], tuple[tuple[Index, ...] | Address, tuple[Val, ...]]]
    finish: Callable[[OpView], Callable[[Evaluator, OpView, At, tuple[Val, ...]], Val] | None] = lambda op: None
    check: Check = always


Rule: TypeAlias = View | Map | Row | Scatter

Rules: TypeAlias = "tuple[Rule, ...] | Callable[[OpView], tuple[Rule, ...]]"
"""The rules of one op. Several compute different outputs of it (each a `Row`). A function chooses by the call's
arguments.
"""

Table: TypeAlias = Mapping[str, Rules]
"""Row name of the opset -> rules."""


def merge(tables: Iterable[Table]) -> dict[str, Rules]:
    """One table of several. ValueError when two have rules for one op."""
    out: dict[str, Rules] = {}
    for t in tables:
        twice = out.keys() & t.keys()
        if twice:
            raise ValueError(f"two tables have rules for {', '.join(sorted(twice))}")
        out.update(t)
    return out
