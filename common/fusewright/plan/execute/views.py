"""Views without torch's dispatcher: a tensor over the memory of another, at 1 us instead of 2 to 5 for each view of a chain."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from fusewright.interface import Dim, TensorSpec
from fusewright.plan.build import Plan, escaping, written_by
from fusewright.plan.ir import Call, Instruction, Launch, Ref, reads
from fusewright.plan.memory import roots_of
from fusewright.plan.vocabulary import has_text, is_symbol
from fusewright.sizes.expr import names

VIEW = "view of memory"
"""The target of a call that makes its result from its first argument's memory, at an offset in elements."""

Offsets = Callable[[TensorSpec | None, Sequence[TensorSpec], Sequence[Any]], Sequence[int] | None]
"""Offsets of a view's results, given its operand (if the plan says what that is), its results and its other arguments; None if
they are not known."""


def with_views(plan: Plan) -> list[Instruction]:
    """The instructions of a plan whose metadata is true, with calls of views replaced by calls of `VIEW` where the result is
    neither written nor returned: it does not count writes with the other memory, and is no view to autograd. A result of training
    that is all that is returned of a value's memory need be no view. Each is of the first memory of a chain, and those that nobody
    else reads are left out."""
    stay = escaping(plan.instructions, plan.outputs) - _given_away(plan) | plan.doubted
    specs = {v: s for v, s in plan.specs.items() if v not in plan.doubted}
    known = _known_names(plan)
    bases: dict[int, tuple[int, int]] = {}
    found: list[Instruction] = []
    for i in plan.instructions:
        if not isinstance(i, Call) or (offsets := _offsets(i, specs, stay, known)) is None:
            found.append(i)
            continue
        given = i.args[0].id
        base, start = bases.get(given, (given, 0))
        for out, offset in zip(i.outs, offsets, strict=True):
            bases[out] = base, start + offset
            found.append(replace(i, target=VIEW, args=(Ref(base), start + offset), kwargs=(), outs=(out,), packed=False))
    return list(_read(found, {o.id for o in plan.outputs if isinstance(o, Ref)}))


def _given_away(plan: Plan) -> set[int]:
    """Values of memory that a plan of training makes, never writes again, and returns as one tensor."""
    if not plan.trains:
        return set()
    roots = roots_of(plan.instructions)
    made = {o for i in plan.instructions for o in i.outs}
    kept = [v for i in plan.instructions for v in (written_by(i) if isinstance(i, Call) else _updated(i))]
    written = {root for v in kept for root in roots.get(v, {v})}
    returned = Counter(root for o in {o.id for o in plan.outputs if isinstance(o, Ref)} for root in roots.get(o, {o}))
    return {
        v for v, shared in roots.items()
        if shared <= made and shared.isdisjoint(written) and all(returned[root] <= 1 for root in shared)
    }  # fmt: skip


def _updated(i: Instruction) -> Iterator[int]:
    """The results of a launch that are inputs which it changes, and these inputs."""
    for given, out in i.written.items() if isinstance(i, Launch) else ():
        yield from (out, given)


def is_whole(i: Call, plan: Plan) -> bool:
    """Whether a view, made as `VIEW`, is the tensor that it is a view of: a transpose of a transpose, or a result's last form."""
    (base, offset), (out,) = i.args, i.outs
    same = plan.specs.get(base.id) == plan.specs[out] and not offset
    return plan.trains and same and base.id not in plan.doubted and base.id not in plan.inputs and base.id not in plan.attributes


def _read(instructions: Sequence[Instruction], returned: Set[int]) -> Iterator[Instruction]:
    """Drop views that nobody reads."""
    wanted = {r for i in instructions if not is_view(i) for r in reads(i)} | returned
    return (i for i in instructions if not is_view(i) or i.outs[0] in wanted)


def is_view(i: Instruction) -> bool:
    return isinstance(i, Call) and i.target == VIEW


def _offsets(i: Call, specs: Mapping[int, TensorSpec], stay: Set[int], known: Set[str]) -> Sequence[int] | None:
    of = VIEWS.get(i.target)
    if of is None or i.kwargs or not i.args or not isinstance(i.args[0], Ref) or not stay.isdisjoint(i.outs):
        return None
    given, results = specs.get(i.args[0].id), [specs[o] for o in i.outs if o in specs]
    if not results or len(results) < len(i.outs) or (given is not None and given.dtype != results[0].dtype):
        return None
    sizes = [size.expr for s in results for size in (*s.shape, *s.stride) if isinstance(size, Dim)]
    printable = all(map(has_text, sizes)) and {n for size in sizes for n in names(size)} <= known
    return of(given, results, i.args[1:]) if printable else None


def _known_names(plan: Plan) -> set[str]:
    """Symbols that a call knows when it begins."""
    specs = [plan.specs[v] for v in plan.inputs if v in plan.specs]
    sizes = {s.expr.name for spec in specs for s in (*spec.shape, *spec.stride) if isinstance(s, Dim)}
    return {n for n in (*sizes, *(plan.scalars[v] for v in plan.inputs if v in plan.scalars)) if n is not None and is_symbol(n)}


def _none(given: TensorSpec | None, results: Sequence[TensorSpec], args: Sequence[Any]) -> Sequence[int]:
    return [0]


def _slice(given: TensorSpec | None, results: Sequence[TensorSpec], args: Sequence[Any]) -> Sequence[int] | None:
    default: tuple[Any, ...] = 0, None, None, 1
    dim, start, _, step = (*args, *default[len(args) :])
    if step == 1 and given is None and isinstance(dim, int) and isinstance(start, int) and start >= 0:
        size, stride = results[0].shape[dim], results[0].stride[dim]
        return [start * stride] if isinstance(size, int) and size > 0 and isinstance(stride, int) else None
    return _at(given, dim, 0 if start is None else start, last=0)


def _select(given: TensorSpec | None, results: Sequence[TensorSpec], args: Sequence[Any]) -> Sequence[int] | None:
    return _at(given, args[0], args[1], last=1)


def _at(given: TensorSpec | None, dim: Any, index: Any, last: int) -> Sequence[int] | None:
    """The offset of an index, which counts from the end if it is negative, and is cut to the size less `last`."""
    if index == 0 and isinstance(index, int):
        return [0]
    if given is None or not isinstance(dim, int) or not isinstance(index, int):
        return None
    size, stride = given.shape[dim], given.stride[dim]
    if not isinstance(size, int) or not isinstance(stride, int):
        return None
    return [min(max(index + size if index < 0 else index, 0), size - last) * stride]


def _parts(given: TensorSpec | None, results: Sequence[TensorSpec], args: Sequence[Any]) -> Sequence[int] | None:
    """Parts side by side."""
    dim = args[1] if len(args) > 1 else 0
    if given is None or not isinstance(dim, int):
        return None
    sizes, stride = [s for part in results if isinstance(s := part.shape[dim], int)], given.stride[dim]
    if not isinstance(stride, int) or len(sizes) < len(results):
        return None
    return [stride * start for start in itertools.accumulate(sizes[:-1], initial=0)]


def _rows(given: TensorSpec | None, results: Sequence[TensorSpec], args: Sequence[Any]) -> Sequence[int] | None:
    if given is None:
        return None
    stride = given.stride[args[0] if args else 0]
    return [k * stride for k in range(len(results))] if isinstance(stride, int) else None


VIEWS: Mapping[str, Offsets] = {
    **dict.fromkeys(
        (
            "aten::view.default", "aten::_unsafe_view.default", "aten::transpose.int", "aten::t.default", "aten::permute.default",
            "aten::expand.default", "aten::unsqueeze.default", "aten::squeeze.default", "aten::squeeze.dim", "aten::squeeze.dims",
            "aten::alias.default", "aten::detach.default",
        ),
        _none,
    ),
    "aten::slice.Tensor": _slice,
    "aten::select.int": _select,
    "aten::split.Tensor": _parts,
    "aten::split_with_sizes.default": _parts,
    "aten::unbind.int": _rows,
}  # fmt: skip
"""Operators whose results have their operand's memory. The sizes and strides of results are in the plan."""
