"""The four kinds of rules. A rule says how to compute an op of the opset at an index; the tables of rules are in
`toolkit/lower`.

- `View`: the result is an element of an argument; costs nothing.
- `Map`: one element of the result from elements of the arguments at indices that the rule gives.
- `Row`: results over a domain of full rows, from reductions over the dims `dims` of `shape`. A result is "full" (one
  value per element of the domain) or "row" (one per row).
- `Scatter`: a start value, and stores at computed places, over the domain of a source.

Rules compute in the compute type of each dtype (fp32 for the half types): a value inside a kernel is rounded to half
only when stored or explicitly cast. Integers and bool are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from fusewright.interface import OpView, Value
from fusewright.toolkit.ir import Builder, Index, Val
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.types import DType
from fusewright.toolkit.rules.space import At, Part, Shape

Check: TypeAlias = Callable[[OpView], "str | None"]
"""Returns None if the rule applies to this call, else a short reason."""

Level: TypeAlias = Literal["full", "row"]


Symbols: TypeAlias = tuple[str, ...]
"""Names of number arguments that may be symbols, because the rule computes with them or never reads them. All others must be
known numbers."""


def always(op: OpView) -> str | None:
    return None


class Evaluator(Protocol):
    """A rule's view of the kernel under construction; see `evaluate.KernelEvaluator`."""

    b: Builder

    def __call__(self, arg: Any, at: At, dtype: DType | None = None) -> Val: ...
    def const(self, number: Any, dtype: DType) -> Val: ...
    def cast(self, v: Val, dtype: DType) -> Val: ...
    def value(self, v: Value, at: At) -> Val: ...
    def position(self, index: Index) -> Val: ...
    def lookup(self, indices: Value, at: At, size: Any, says: str, wrap: bool = False) -> Index: ...
    def offset(self, v: Value) -> Extent: ...
    def checked(self, what: Any, at: At) -> None: ...
    def masked(self, condition: Val, part: Part | None = None) -> AbstractContextManager[None]: ...
    def part(self, index: Index, start: Extent, size: Extent) -> Part | None: ...
    @property
    def mask(self) -> Val | None: ...


class RowContext(Protocol):
    """The context of a row rule: elements of its domain, and reductions over its rows; see `evaluate.KernelRow`."""

    b: Builder
    domain: Domain
    full: At
    row: At
    along: At

    @property
    def e(self) -> Evaluator: ...
    def x(self, arg: Any, dtype: DType | None = None) -> Val: ...
    def per_row(self, arg: Any, dtype: DType | None = None) -> Val: ...
    def per_position(self, arg: Any, dtype: DType | None = None) -> Val: ...
    def count(self) -> Any: ...
    def sum(self, v: Val) -> Val: ...
    def mean(self, v: Val) -> Val: ...


@dataclass(frozen=True)
class View:
    """`code(op, k, at)` returns the argument, and the element of it, that element `at` of output `k` is."""

    code: Callable[[OpView, int, At], tuple[Value, At]]
    check: Check = always
    symbols: Symbols = ()


@dataclass(frozen=True)
class Map:
    """`code(e, op, k, at)` computes element `at` of output `k`. `cost` is a rough count of vector instructions. `window`: an
    element is computed from several neighbours."""

    code: Callable[[Evaluator, OpView, int, At], Val]
    check: Check = always
    cost: int = 2
    symbols: Symbols = ()
    window: bool = False


@dataclass(frozen=True)
class Domain:
    """Rows over `dims` (in increasing order) of a tensor of `shape`."""

    shape: Shape
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """`code(row, op)` returns the outputs at positions `outs`, in that order; `levels` is the level of each. Of an op that returns
    a list, these are the most that it may have.

    `ordered`: positions along the row matter (scans and argmax), so the row must run in order.
    """

    domain: Callable[[OpView], Domain]
    code: Callable[[RowContext, OpView], tuple[Val, ...]]
    outs: tuple[int, ...] = (0,)
    levels: tuple[Level, ...] = ("full",)
    check: Check = always
    ordered: bool = False
    symbols: Symbols = ()

    def made(self, op: OpView) -> list[tuple[int, Level]]:
        """The outputs of `op` that the rule computes, and their levels."""
        return [(k, level) for k, level in zip(self.outs, self.levels, strict=True) if k < len(op.outs)]


@dataclass(frozen=True)
class Accumulator:
    """A buffer of the result's shape. `init` computes its initial content; `how` says how stores combine with it."""

    how: str
    init: Callable[[Evaluator, OpView, At], Val]
    dtype: DType


@dataclass(frozen=True)
class Address:
    """A place, counted in elements from the result's first; nothing is stored where `inside` is false."""

    index: Index
    inside: Val


@dataclass(frozen=True)
class Scatter:
    """`code(e, op, at)` returns the place of the source element `at` of the domain `shape(op)` (an index per dim of the
    result, or an `Address`), and one value per accumulator.

    The result is `finish(e, op, at, accumulated)`, or the only accumulator if there is no `finish`.
    """

    shape: Callable[[OpView], Shape]
    accumulators: Callable[[OpView], tuple[Accumulator, ...]]
    code: Callable[[Evaluator, OpView, At], tuple[tuple[Index, ...] | Address, tuple[Val, ...]]]
    finish: Callable[[OpView], Callable[[Evaluator, OpView, At, tuple[Val, ...]], Val] | None] = lambda op: None
    check: Check = always
    symbols: Symbols = ()


Rule: TypeAlias = View | Map | Row | Scatter

Rules: TypeAlias = "tuple[Rule, ...] | Callable[[OpView], tuple[Rule, ...]]"
"""The rules of one op. If there are several, each is a `Row` and computes different outputs. A function chooses by the call's
arguments.
"""

Table: TypeAlias = Mapping[str, Rules]
"""Row name of the opset -> rules."""


def merge(tables: Iterable[Table]) -> dict[str, Rules]:
    """Merge tables. Raises ValueError if two of them have rules for the same op."""
    out: dict[str, Rules] = {}
    for t in tables:
        twice = out.keys() & t.keys()
        if twice:
            raise ValueError(f"two tables have rules for {', '.join(sorted(twice))}")
        out.update(t)
    return out
