"""Placement of the outputs of kernels and of calls that are launched: in a dead input, in the arena, or in a fresh tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fusewright.interface import TensorSpec, hint
from fusewright.ops import namespaces
from fusewright.plan.arena import Buffer, layout
from fusewright.plan.build import Plan, may_alias, operator_of, shared_by
from fusewright.plan.ir import BINDS, Bound, Call, CallPython, Instruction, Launch, Ref, reads


@dataclass
class Placement:
    """`onto` maps an output to the input whose tensor it takes over, `offset` to its offset in the arena; the rest are fresh."""

    onto: dict[int, int] = field(default_factory=dict)
    offset: dict[int, int] = field(default_factory=dict)
    arena_bytes: int = 0
    device: str = ""
    """The device of the arena."""
    bound: dict[int, Bound] = field(default_factory=dict)
    """Calls that are launched, by their result."""


def place(plan: Plan) -> Placement:
    """Place every output of a plan's kernels and launched calls."""
    instructions = plan.instructions
    placement = Placement(bound=_bound(plan))
    if not placement.bound and not any(isinstance(i, Launch) for i in instructions):
        return placement
    roots = roots_of(instructions)
    last = _last_use(instructions, roots)
    outputs = {r.id for r in plan.outputs if isinstance(r, Ref)}
    escaping = {root for r in outputs | held_elsewhere(instructions) for root in roots.get(r, {r})}
    last.update(dict.fromkeys(escaping, len(instructions)))  # the caller reads them at the end
    kept: dict[int, int] = {}  # value -> the value whose buffer it lives in
    fresh = {o for i in instructions if not may_alias(i) for o in i.outs}
    for k, i in enumerate(instructions):
        if isinstance(i, Launch):
            _take_over(plan, i, k, roots, last, fresh, placement, kept)
    located = {root for i in instructions for r in _located(i) for root in roots.get(r, {r})}
    if plan.policy.arena:
        placement.device = next(plan.specs[o].device for i in instructions for o in _made(i, placement))
        buffers = _buffers(plan, placement, kept, last, escaping | located)
        placement.offset, placement.arena_bytes = layout(buffers, plan.policy.arena)
    for value, base in kept.items():
        if base in placement.offset:
            placement.offset[value] = placement.offset[base]
    return placement


def held_elsewhere(instructions: Sequence[Instruction]) -> set[int]:
    """Values whose memory may be read after the call: an input adopts it (a parameter that the graph makes), or code of others may
    keep it. That may also return what it keeps."""
    return {v for i in instructions if _may_keep(i) for v in (*reads(i), *i.outs)}


def _may_keep(i: Instruction) -> bool:
    if not isinstance(i, Call):
        return isinstance(i, CallPython)
    operator = operator_of(i.target)
    return i.target.startswith("aten::set_.") or (operator is not None and namespaces.may_keep(operator.namespace))


def _bound(plan: Plan) -> dict[int, Bound]:
    calls = (i for i in plan.instructions if isinstance(i, Call) and i.target in BINDS)
    found = ((i.outs[0], BINDS[i.target](i, plan.specs)) for i in calls)
    return {out: bound for out, bound in found if bound is not None}


def _made(i: Instruction, placement: Placement) -> Sequence[int]:
    """The results of an instruction whose memory the host provides."""
    return i.outs if isinstance(i, Launch) or (i.outs and i.outs[0] in placement.bound) else ()


def roots_of(instructions: Sequence[Instruction]) -> dict[int, set[int]]:
    """Value -> the values whose memory it may share: itself, or the inputs of an aliasing call."""
    roots: dict[int, set[int]] = {}
    for i in instructions:
        shared: set[int] = set()
        for r in shared_by(i):
            shared |= roots.get(r, {r})
        for o in i.outs:
            roots[o] = {o} | shared
    return roots


def _located(i: Instruction) -> set[int]:
    """Values whose storage offset matters to the instruction."""
    if isinstance(i, Launch):
        return i.located
    return set(reads(i)) if isinstance(i, Call) and "as_strided" in i.target else set()


def _last_use(instructions: Sequence[Instruction], roots: dict[int, set[int]]) -> dict[int, int]:
    """Value -> the last instruction that reads it or a possible view of it."""
    last: dict[int, int] = {}
    for k, i in enumerate(instructions):
        for r in (*i.outs, *reads(i)):
            for root in roots.get(r, {r}):
                last[root] = k
    return last


def _take_over(
    plan: Plan, i: Launch, k: int, roots: dict[int, set[int]], last: dict[int, int], fresh: set[int],
    placement: Placement, kept: dict[int, int],
) -> None:  # fmt: skip
    """Let an output reuse an input that dies here and is visible nowhere else."""
    taken: set[int] = set()
    for source, out in i.written.items():
        placement.onto[out] = source
        kept[out] = base = kept.get(source, source)
        last[base] = max(last[base], last[out])
        taken.add(base)
    for out_position, in_position in i.inplace:
        out, source = i.outs[out_position], i.inputs[in_position].id
        base = kept.get(source, source)
        if not {source, base} <= fresh or roots[source] != {source} or last[base] != k or base in taken:
            continue
        readings = sum(source in roots.get(r, {r}) for r in reads(i))  # a view of it may be read at other elements
        if readings != 1 or out in kept or not _same(plan.specs[out], plan.specs[source]):
            continue
        taken.add(base)
        placement.onto[out] = source
        kept[out] = base
        last[base] = max(last[base], last[out])


def _same(a: TensorSpec, b: TensorSpec) -> bool:
    return (a.shape, a.stride, a.dtype, a.device) == (b.shape, b.stride, b.dtype, b.device)


def _buffers(
    plan: Plan, placement: Placement, kept: dict[int, int], last: dict[int, int], apart: set[int]
) -> list[Buffer]:
    """Arena buffers: made by a kernel or launched call, of fixed size, and neither in `apart` (values that need their own storage)
    nor sharing memory with one in it."""
    seen_outside = {kept.get(v, v) for v in apart}
    found = []
    for k, i in enumerate(plan.instructions):
        for o in _made(i, placement):
            spec = plan.specs[o]
            if o not in placement.onto and o not in seen_outside and spec.static and spec.device == placement.device:
                found.append(Buffer(o, storage_bytes(spec), k, last[o]))
    return found


def storage_bytes(spec: TensorSpec) -> int:
    """Bytes between the first and the last element, both included."""
    if any(s == 0 for s in spec.shape):
        return 0
    span = 1 + sum((hint(n) - 1) * hint(s) for n, s in zip(spec.shape, spec.stride, strict=True))
    return span * spec.dtype.itemsize
