"""The names that a plan may use. A plan becomes Python source and may come from disk: that source contains only text made or
checked here, and only functions found here.

The code generator uses `text_of_size`, `comment`, `identifier` and `function_of` for plans of any origin. `find_problems`
checks a whole plan; a plan from disk must pass it before it becomes source.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.errors import printable
from fusewright.interface import Dim, TensorSpec
from fusewright.plan.arithmetic import PYTHON
from fusewright.plan.build import Plan, operator_of
from fusewright.plan.ir import DIRECT, Call, CallPython, Instruction, Launch, Ref
from fusewright.sizes.expr import NumberOf, OffsetOf, SizeExpr, SizeOf, leaves
from fusewright.sizes.functions import FUNCTIONS


class Foreign(ValueError):
    """A plan uses a name outside the vocabulary."""


# ---------------------------------------------------------------- functions

_TARGET = re.compile(r"_?[a-zA-Z]\w*::\w+(\.\w+)?", re.ASCII)
"""Torch's own namespaces may begin with one underscore, e.g. that of collectives."""


def function_of(target: str) -> Callable[..., Any]:
    """The function that a call names: a torch operator, or one of `PYTHON`. Raises `Foreign` for anything else."""
    found = PYTHON.get(target)
    if found is not None:
        return found
    operator = overload_of(target)
    direct = DIRECT.get(target)
    return direct() if direct is not None else _UNBOXED.get(target) or compat.bound_op(operator)


_UNBOXED: Mapping[str, Callable[..., Any]] = {"aten::convolution.default": torch.convolution}
"""Functions of torch with the arguments of an operator, where they save more than a microsecond per call: boxing the five lists
of a convolution takes 5 us on Zen 3."""


def overload_of(target: str) -> Any:
    """The torch operator with this name. Raises `Foreign` if there is none."""
    if not _TARGET.fullmatch(target) or target.startswith("py::"):
        raise Foreign(f"{target!r} is no name of an operator")
    try:
        found = operator_of(target)
    except (AttributeError, RuntimeError) as e:
        raise Foreign(f"there is no operator {target!r}") from e
    if not compat.is_overload(found):
        raise Foreign(f"{target!r} is something else than an operator")
    return found


# ---------------------------------------------------------------- text

SIZES: Mapping[str, Callable[..., Any]] = {name: f.call for name, f in FUNCTIONS.items()}
"""The functions that the text of a symbolic size may call."""

TORCH = ModuleType("torch")
"""What generated code sees of torch: dtypes, layouts, memory formats and devices."""
TORCH.__dict__.update(
    {k: v for k, v in vars(torch).items() if isinstance(v, torch.dtype | torch.layout | torch.memory_format)},
    device=torch.device,
)

_OWN_NAMES = frozenset(
    (
        "torch inf nan complex prepared prepare run args frame frames workers count_workers empty_strided sized "
        "without_memory check fail b e crew limited view allocate allocation open_queue close_queue queued"
    ).split()
)
_VALUE = re.compile(r"v\d+|b\d+|p\d+")
_LONGEST = 2000
"""Maximum characters of a formula."""


def is_symbol(name: str) -> bool:
    """Whether a size may have this name: a plain identifier that generated code does not use otherwise."""
    return (
        isinstance(name, str)
        and len(name) <= _LONGEST
        and name.isascii()
        and name.isidentifier()
        and name[0] != "_"
        and name not in _OWN_NAMES
        and name not in SIZES
        and not _VALUE.fullmatch(name)
        and not hasattr(builtins, name)
    )


def has_text(size: SizeExpr) -> bool:
    """Whether `text_of_size` allows a size."""
    try:
        return bool(text_of_size(size))
    except Foreign:
        return False


def text_of_size(size: SizeExpr) -> str:
    """The text of a symbolic size, such as "2*s0 + 1" or "Max(1, s0)". Raises `Foreign` if it is not allowed in plans."""
    if not isinstance(size, SizeExpr) or not all(map(_is_leaf, leaves(size))) or len(text := _text(size)) > _LONGEST:
        raise Foreign(f"{str(size)[:80]!r} is no size")
    return text


_text = functools.lru_cache(4096)(str)
"""Check the leaves before calling it: its cache cannot tell True from 1."""


def _is_leaf(a: Any) -> bool:
    """Whether a size in a plan may mention this atom. Positions are for kernels only."""
    match a:
        case str():
            return is_symbol(a)
        case SizeOf():
            return _is_id(a.value) and type(a.dim) is int and 0 <= a.dim < 64
    return isinstance(a, OffsetOf | NumberOf) and _is_id(a.value)


def keyword(name: str) -> str:
    """The name of an argument. Raises `Foreign` for an invalid name."""
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
        raise Foreign(f"{name!r} is no name of an argument")
    return name


def comment(text: str) -> str:
    """Arbitrary words as a one-line comment."""
    return printable(text)


def identifier(words: str) -> str:
    """The start of a Python name, derived from `words`."""
    name = re.sub(r"\W", "_", words, flags=re.ASCII) or "obj"
    return name if name[0].isalpha() else f"o_{name}"


# ---------------------------------------------------------------- plans

LARGEST_ID = 1 << 31
_LARGEST_SIZE = 1 << 63
_DEEPEST = 8
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?", re.ASCII)
_HASH = re.compile(r"\w{1,128}", re.ASCII)
_PLAIN = (type(None), bool, str, float, complex, torch.dtype, torch.layout, torch.memory_format, torch.device)


COPIES = "aten::_foreach_copy_.default"
"""An operator outside the opset that a pass over plans introduces (`inplace.copied_together`)."""

LISTED = frozenset((
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
))  # fmt: skip
"""Types of which torch copies lists on every device. On GPUs it refuses, among others, the uint64 seeds of its attention."""

ALL_REDUCE, OVERWRITING_ALL_REDUCE = "_c10d_functional::all_reduce.default", "_c10d_functional::all_reduce_.default"
"""A pass over plans replaces the first by the second (`inplace.reduced_in_place`)."""

WAIT = "_c10d_functional::wait_tensor.default"
"""Returns its operand, when the collective that makes it is done."""


class Words:
    """What plans for one graph may call: the opset's operators and their overloads, those of the graph itself, the
    namespaces that the backend declares, and what passes over plans introduce."""

    def __init__(self, of_graph: frozenset[str] = frozenset(), namespaces: Sequence[str] = ()) -> None:
        self._graph, self._namespaces = of_graph, frozenset(namespaces)

    def has(self, target: str) -> bool:
        return (
            target in PYTHON
            or target == COPIES
            or (target == OVERWRITING_ALL_REDUCE and ALL_REDUCE in self._graph)
            or target in self._graph
            or target.partition(".")[0] in ops.PACKETS
            or target.partition("::")[0] in self._namespaces
        )


def find_problems(plan: Plan, words: Words) -> Iterator[str]:
    """One line for everything in a plan that is outside the vocabulary."""
    ids = (*plan.inputs, *plan.prepare_inputs, *plan.prepare_outputs, *plan.specs, *plan.attributes, *plan.scalars)
    yield from (f"{i!r} is no value" for i in ids if not _is_id(i))
    yield from (f"{s!r} is no name of a size" for s in plan.scalars.values() if not is_symbol(s))
    yield from (f"{k!r} is no kernel" for k in plan.kernels if not (isinstance(k, str) and _HASH.fullmatch(k)))
    for spec in plan.specs.values():
        yield from _spec_problems(spec)
    for i in (*plan.prepare, *plan.instructions):
        yield from _instruction_problems(i, plan, words)
    for o in plan.outputs:
        yield from _argument_problems(o)


def _instruction_problems(i: Instruction, plan: Plan, words: Words) -> Iterator[str]:
    yield from (f"{o!r} is no value" for o in i.outs if not _is_id(o))
    match i:
        case Call():
            yield from _call_problems(i, words)
        case Launch():
            if i.kernel not in plan.kernels:
                yield f"there is no kernel {i.kernel!r}"
            yield from (f"{r!r} is no value" for r in i.inputs if not (isinstance(r, Ref) and _is_id(r.id)))
            for x in (*i.sizes, *i.scalars):
                yield from _number_problems(x)
            for pair in (*i.inplace, *i.updates):
                if len(pair) != 2 or not all(_is_id(k) for k in pair):
                    yield f"{pair!r} are no positions"
            for place in i.into:
                if len(place) != 2 or not (_is_id(place[0]) and isinstance(place[1], Ref) and _is_id(place[1].id)):
                    yield f"{place!r} are no position and value"
        case CallPython():
            yield f"{i.name} is no data"


def _call_problems(i: Call, words: Words) -> Iterator[str]:
    if not isinstance(i.target, str):
        yield f"{i.target!r} is no name"
        return
    try:
        names = _ANY if i.target in PYTHON else _formals(overload_of(i.target))
    except Foreign as e:
        yield str(e)
        return
    if not words.has(i.target):
        yield f"{i.target} is neither in the opset, nor in the graph, nor declared by the backend"
    named = [k for k, _ in i.kwargs]
    if named and (len(set(named)) != len(named) or not names.issuperset(named)):
        yield f"{i.target} takes no {named!r}"
    if names is not _ANY and len(i.args) > len(names):
        yield f"{i.target} takes {len(names)} arguments, not {len(i.args)}"
    if not isinstance(i.packed, bool) or not isinstance(i.prepare, bool):
        yield f"{i.target}: a flag that is none"
    if not isinstance(i.generator, Ref | None):
        yield f"{i.target}: {i.generator!r} is no generator"
    for a in (*i.args, *(v for _, v in i.kwargs), i.generator):
        yield from _argument_problems(a)


_ANY: frozenset[str] = frozenset()
"""Arithmetic takes any number of positional arguments and no keyword arguments."""


@functools.lru_cache(4096)
def _formals(operator: Any) -> frozenset[str]:
    """Names of an operator's arguments."""
    return frozenset(a.name for a in operator._schema.arguments)


def _argument_problems(x: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(x, tuple | list) and depth < _DEEPEST:
        for a in x:
            yield from _argument_problems(a, depth + 1)
    elif isinstance(x, Ref):
        if not _is_id(x.id):
            yield f"{x.id!r} is no value"
    elif type(x) is int:
        if abs(x) >= 1 << 64:
            yield "a number of more than 64 bits"
    elif not isinstance(x, _PLAIN):
        yield f"an argument of type {type(x).__name__}"


def _number_problems(x: Any) -> Iterator[str]:
    """Check a launch's non-tensor arguments."""
    match x:
        case Ref():
            fine = _is_id(x.id)
        case SizeExpr():
            fine = is_size(x)
        case bool() | float():
            fine = True
        case _:
            fine = type(x) is int and abs(x) < 1 << 64
    if not fine:
        yield f"{x!r} is no number for a kernel"


def _spec_problems(s: TensorSpec) -> Iterator[str]:
    if not isinstance(s.dtype, torch.dtype) or not isinstance(s.const, bool):
        yield f"{s.dtype!r}, {s.const!r}: no type of a tensor"
    if not isinstance(s.device, str) or not _DEVICE.fullmatch(s.device):
        yield f"{s.device!r} is no device"
    for d in (*s.shape, *s.stride):
        if type(d) is int:
            fine = -_LARGEST_SIZE < d < _LARGEST_SIZE
        else:
            fine = isinstance(d, Dim) and is_size(d.expr) and all(map(_is_bound, (d.hint, d.lo, d.hi or 0)))
        if not fine:
            yield f"{d!r} is no size"


def _is_bound(n: Any) -> bool:
    return type(n) is int and -_LARGEST_SIZE < n < _LARGEST_SIZE


def _is_id(i: Any) -> bool:
    return type(i) is int and 0 <= i < LARGEST_ID


def is_size(size: Any) -> bool:
    """Whether a symbolic size has a text allowed in plans."""
    try:
        text_of_size(size)
    except (Foreign, TypeError):
        return False
    return True
