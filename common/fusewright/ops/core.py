"""The row type of the opset table, and how a row is bound to a call.

A row is data: names, rules and plain functions. Rules and references see a call as `Args`, a mapping from argument name to
value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch

Args: TypeAlias = Mapping[str, Any]
"""One call by argument name. A tensor is anything with `shape` and `dtype`: a Tensor, a FakeTensor or a `TensorSpec`."""

Shape: TypeAlias = tuple[Any, ...]
"""Sizes: ints or SymInts."""

DtypeRule: TypeAlias = Callable[[Args], tuple[torch.dtype | None, ...]]
ShapeRule: TypeAlias = Callable[[Args], tuple[Shape | None, ...]]
"""A rule returns one entry per output, lists of outputs flattened; None stands for an output that is not computed."""

Overload: TypeAlias = Any
"""A torch operator overload, such as `torch.ops.aten.add.Tensor`."""


class Kind(enum.Enum):
    """What an op does with memory; the first question in any lowering."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    SCAN = "scan"
    VIEW = "view"
    CONTRACTION = "contraction"
    GATHER = "gather"
    SCATTER = "scatter"
    CREATION = "creation"
    RANDOM = "random"
    COMPOSITE = "composite"


@dataclass(frozen=True)
class Param:
    """One argument of an overload's schema. `size` is the N of an `int[N]`, which also accepts a single int."""

    name: str
    kwonly: bool
    required: bool
    default: Any = None
    size: int | None = None

    def value(self, given: Any) -> Any:
        """Convert `given` to the schema's form: a single int becomes a list of N."""
        lone = self.size is not None and isinstance(given, int | torch.SymInt) and not isinstance(given, bool)
        return [given] * self.size if lone and self.size else given


@dataclass(frozen=True)
class Op:
    """One row of the opset. Equality is by name, which is unique in the table.

    `reference` takes the canonical arguments with every floating tensor in fp64 and returns fp64 (see `oracle.evaluate`);
    `decompose` takes the canonical arguments and computes in primitives, in eager's compute dtype. The overload is looked up on
    first use, so that the table is cheap to import and may name ops that are registered later.
    """

    name: str
    kind: Kind = field(compare=False)
    qualname: str = field(compare=False)
    dtype_rule: DtypeRule = field(compare=False, repr=False)
    shape_rule: ShapeRule = field(compare=False, repr=False)
    reference: Callable[..., Any] = field(compare=False, repr=False)
    doc: str = field(compare=False, repr=False)
    source: str = field(compare=False, repr=False)
    decompose: Callable[..., Any] | None = field(compare=False, repr=False, default=None)
    fake_differs: tuple[int, ...] = field(compare=False, repr=False, default=())
    """Outputs whose dtype FakeTensor may get wrong; trust the rule, not `meta["val"]`."""
    activation: bool = field(compare=False, repr=False, default=False)
    """Whether it is a composite whose elements each depend on one element of its only tensor."""
    opened: bool = field(compare=False, repr=False, default=False)
    """Whether it is a composite whose primitives, as kernels, are as fast as eager's own call or faster, so that a backend with no
    kernel for the whole takes them and does not carry it."""

    @cached_property
    def target(self) -> Overload:
        """The canonical overload. LookupError if this torch has none."""
        found = resolve(self.qualname)
        if found is None:
            raise LookupError(f"{self.name}: this torch has no {self.qualname}")
        return found

    @property
    def available(self) -> bool:
        """Whether this torch has the canonical overload."""
        return "target" in self.__dict__ or resolve(self.qualname) is not None

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The arguments of the canonical overload, in schema order."""
        return params_of(self.target)

    @cached_property
    def argnames(self) -> tuple[str, ...]:
        """The names of all arguments, in schema order, keyword-only ones included."""
        return tuple(p.name for p in self.params)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The call by argument name, in schema order, with defaults filled in. TypeError if it does not fit the schema."""
        return bind(self.params, args, kwargs or {})

    def dtypes(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[torch.dtype | None, ...]:
        """The dtype of every output."""
        return self.dtype_rule(self.bind(args, kwargs))

    def shapes(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Shape | None, ...]:
        """The shape of every output. Symbolic sizes may come out unsimplified."""
        return self.shape_rule(self.bind(args, kwargs))

    def types(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[tuple[torch.dtype | None, ...], tuple[Shape | None, ...]]:
        """`dtypes` and `shapes` of one call."""
        bound = self.bind(args, kwargs)
        return self.dtype_rule(bound), self.shape_rule(bound)


def resolve(qualname: str) -> Overload | None:
    """The overload called e.g. "aten::add.Tensor", or None when this torch has no such op."""
    namespace, _, rest = qualname.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)


@cache
def params_of(target: Overload) -> tuple[Param, ...]:
    """The arguments of an overload, in schema order."""
    return tuple(_param(a) for a in target._schema.arguments)


def _param(a: Any) -> Param:
    required = not a.has_default_value()
    default = None if required else a.default_value
    if a.name == "dtype" and default is not None:
        # A schema stores a dtype as its number in c10::ScalarType; the only default in ATen is 4.
        default = {4: torch.int64}[default]
    return Param(a.name, a.kwarg_only, required, default, a.N)


def bind(params: tuple[Param, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, in schema order, with defaults filled in. TypeError if they do not fit."""
    if len(args) > len(params):
        raise TypeError(f"{len(args)} arguments given, {len(params)} taken")
    out: dict[str, Any] = {}
    for i, p in enumerate(params):
        if i < len(args):
            out[p.name] = p.value(args[i])
        elif p.name in kwargs:
            out[p.name] = p.value(kwargs[p.name])
        elif p.required:
            raise TypeError(f"argument {p.name!r} is missing")
        else:
            out[p.name] = list(p.default) if isinstance(p.default, list) else p.default
    unknown = kwargs.keys() - out.keys()
    if unknown:
        raise TypeError(f"no argument is called {', '.join(sorted(unknown))}")
    return out


def unbind(params: tuple[Param, ...], bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert names back to a call: positional arguments in schema order, keyword-only ones by name."""
    args = tuple(bound[p.name] for p in params if not p.kwonly)
    return args, {p.name: bound[p.name] for p in params if p.kwonly}


def row(
    kind: Kind,
    name: str,
    qualname: str,
    dtype_rule: DtypeRule,
    shape_rule: ShapeRule,
    reference: Callable[..., Any],
    doc: str,
    source: str = "",
    decompose: Callable[..., Any] | None = None,
    fake_differs: tuple[int, ...] = (),
    activation: bool = False,
    opened: bool = False,
) -> Op:
    """Declare a row. Unless given, the source of its definition is ATen's own documentation of the op."""
    source = source or f"ATen {qualname.partition('::')[2].partition('.')[0]}"
    return Op(name, kind, qualname, dtype_rule, shape_rule, reference, doc, source, decompose, fake_differs, activation, opened)
