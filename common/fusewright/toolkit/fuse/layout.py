"""Values in another layout than eager's: what a library call makes channels-last stays so through the kernels behind it,
and is put back only for those who rely on eager's strides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fusewright.interface import CompileContext, Size, TensorSpec, Value, hint
from fusewright.plan.ir import Call, Instruction, Launch, Ref
from fusewright.toolkit.fuse.group import Group
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.space import layout_of

Strides = tuple[Size, ...]


def choose_layouts(flow: Flow, groups: Iterable[Group], free: set[int], ctx: CompileContext) -> None:
    """Lay out the values in `free` (stored by kernels, read by nobody who relies on strides) like most of what their
    kernel reads. Groups come in topological order, so that a layout is handed on."""
    for group in groups:
        if group.scatters:
            continue
        for unit in group.units:
            for v, level in unit.outs():
                if v.id in free and level == "full" and v.spec is not None and v.spec.static:
                    stride = _favourite(flow, group, v.spec)
                    if stride is not None:
                        flow.places[v.id] = ctx.value(replace(v.spec, stride=stride))


def _favourite(flow: Flow, group: Group, spec: TensorSpec) -> Strides | None:
    """The layout of most bytes that the group reads in this shape; None when it is the tensor's own."""
    votes: dict[Strides, int] = {}
    seen: set[int] = set()
    for unit in group.units:
        for v in (x for i in unit.op.inputs() for x in _read_for(flow, i)):
            if v.id in group.levels or v.id in seen or v.spec is None or v.spec.shape != spec.shape:
                continue
            seen.add(v.id)
            stride = _stride_in_memory(flow, v)
            if stride is not None:
                votes[stride] = votes.get(stride, 0) + v.spec.dtype.itemsize
    if not votes:
        return None
    best = max(votes, key=lambda s: (votes[s], s == spec.stride))
    return None if best == spec.stride or not _dense(spec.shape, best) else best


def _read_for(flow: Flow, v: Value) -> Iterable[Value]:
    """What is read where `v` is wanted: itself, or what its inlined op reads."""
    made = flow.producer.get(v.id)
    if made is None or not flow.is_inline(made[0]):
        return (v,)
    return tuple(x for i in made[0].inputs() for x in _read_for(flow, i))


def _stride_in_memory(flow: Flow, v: Value) -> Strides | None:
    """The strides with which a kernel reads a value; None for a view of what has been moved."""
    if v.id in flow.places:
        placed = flow.places[v.id].spec
        return None if placed is None else placed.stride
    made = flow.producer.get(v.id)
    if made is not None and flow.is_view(made[0]) and any(s.id in flow.places for s in flow.sources(v)):
        return None
    return None if v.spec is None else v.spec.stride


def _dense(shape: tuple[Size, ...], stride: Strides) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for size, step in sorted(
        ((hint(n), hint(s)) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda d: d[1]
    ):
        if step != expected:
            return False
        expected *= size
    return True


def restored(made: Value, value: Value, ctx: CompileContext) -> tuple[Instruction, ...]:
    """The calls that copy `made` to the strides of the graph's `value`."""
    assert value.spec is not None
    known = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}.get(layout_of(value.spec))
    if known is not None:
        return (Call("aten::clone.default", (Ref(made.id),), (value.id,), (("memory_format", known),)),)
    shape, stride = value.spec.shape, value.spec.stride
    repeated = [d for d, step in enumerate(stride) if step == 0 and shape[d] != 1]
    calls: list[Instruction] = []

    def then(target: str, *args: Any) -> Ref:
        calls.append(Call(target, args, (ctx.value(None).id,)))
        return Ref(calls[-1].outs[0])

    source = Ref(made.id)
    for d in repeated:  # elements that share their memory are written once
        source = then("aten::slice.Tensor", source, d, 0, 1)
    narrow = tuple(1 if d in repeated else n for d, n in enumerate(shape))
    empty = then("aten::new_empty_strided.default", source, narrow, tuple(stride))
    copy = then("aten::copy_.default", empty, source)
    if repeated:
        then("aten::expand.default", copy, tuple(shape))
    last = calls.pop()
    return (*calls, replace(last, outs=(value.id,)))


def renamed(i: Instruction, names: Mapping[int, int]) -> Instruction:
    """The instruction with what it reads under other ids."""
    if not names:
        return i
    if isinstance(i, Call):
        return replace(i, args=_renamed(i.args, names), kwargs=_renamed(i.kwargs, names))
    if isinstance(i, Launch):
        return replace(i, inputs=_renamed(i.inputs, names), sizes=_renamed(i.sizes, names))
    return replace(i, args=_renamed(i.args, names))


def _renamed(a: Any, names: Mapping[int, int]) -> Any:
    if isinstance(a, Ref):
        return Ref(names.get(a.id, a.id))
    return tuple(_renamed(x, names) for x in a) if isinstance(a, tuple | list) else a
