"""A backend that misbehaves as its option `fault` says. The host must still be correct, or report the fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch

from fusewright.errors import OptionError, nearest
from fusewright.interface import (
    HOST,
    CompileContext,
    Compiled,
    Decline,
    Device,
    Fragment,
    Opaque,
    OpView,
    Region,
    TensorSpec,
    Verdict,
)
from fusewright.plan.ir import Call, Ref
from fusewright.reference.interp import Interp

Fault: TypeAlias = Callable[[Region, CompileContext, list[Call]], Sequence[Call]]


def _with_last(behind: Callable[[Ref, int, TensorSpec], Sequence[Call]]) -> Fault:
    """A fault in the region's last result: the op computes a temporary, and `behind` makes the result from it."""

    def fault(region: Region, ctx: CompileContext, calls: list[Call]) -> list[Call]:
        value = region.outputs[-1]
        assert value.spec is not None
        temporary = ctx.value(value.spec)
        renamed = {value.id: temporary.id}
        moved = [
            replace(
                c, args=_renamed(c.args, renamed), kwargs=_renamed(c.kwargs, renamed),
                outs=tuple(renamed.get(o, o) for o in c.outs),
            )
            for c in calls
        ]  # fmt: skip
        return [*moved, *behind(Ref(temporary.id), value.id, value.spec)]

    return fault


def _renamed(x: Any, names: Mapping[int, int]) -> Any:
    if isinstance(x, Ref):
        return Ref(names.get(x.id, x.id))
    return tuple(_renamed(y, names) for y in x) if isinstance(x, tuple) else x


def _transposed_memory(given: Ref, out: int, spec: TensorSpec) -> list[Call]:
    """The same values with reversed dimension order in memory."""
    order = tuple(reversed(range(spec.rank)))
    a, b = out + 10**6, out + 2 * 10**6
    return [
        Call("aten::permute.default", (given, order), (a,)),
        Call("aten::clone.default", (Ref(a),), (b,), (("memory_format", torch.contiguous_format),)),
        Call("aten::permute.default", (Ref(b), order), (out,)),
    ]


def _changed_input(region: Region, ctx: CompileContext, calls: list[Call]) -> list[Call]:
    given = next(v for v in region.inputs if v.spec is not None and v.spec.dtype.is_floating_point)
    return [Call("aten::add_.Tensor", (Ref(given.id), Ref(given.id)), (ctx.value(given.spec).id,)), *calls]


def _input_as_result(region: Region, ctx: CompileContext, calls: list[Call]) -> list[Call]:
    given = max((v for v in region.inputs if v.spec is not None), key=lambda v: v.spec.numel_hint())  # type: ignore[union-attr]
    value = region.outputs[-1]
    assert value.spec is not None
    rest = [c for c in calls if value.id not in c.outs]
    return [*rest, Call("aten::as_strided.default", (Ref(given.id), value.spec.shape, value.spec.stride), (value.id,))]


def _first(change: Callable[[Call], Call]) -> Fault:
    return lambda region, ctx, calls: [change(calls[0]), *calls[1:]]


FRAGMENT_FAULTS: dict[str, Fault] = {
    "fragment_names_no_op": _first(lambda c: replace(c, target="aten::no_such_op.default")),
    "fragment_reads_what_nobody_makes": _first(lambda c: replace(c, args=(Ref(10**6), *c.args[1:]))),
    "fragment_makes_a_value_twice": lambda region, ctx, calls: [*calls, calls[-1]],
    "fragment_drops_a_result": lambda region, ctx, calls: [c for c in calls if region.outputs[-1].id not in c.outs],
    "fragment_leaves_out_an_argument": _first(lambda c: replace(c, args=())),
    "fragment_changes_an_input": _changed_input,
    "fragment_returns_an_input": _input_as_result,
    "fragment_has_another_dtype": _with_last(
        lambda given, out, spec: [Call("aten::to.dtype", (given, torch.float16), (out,))]
    ),
    "fragment_has_other_strides": _with_last(_transposed_memory),
    "fragment_has_other_values": _with_last(lambda given, out, spec: [Call("aten::mul.Scalar", (given, 1.01), (out,))]),
}
"""Faults by name: functions from the correct calls to faulty ones."""


class Faulty(Interp):
    """Like `interp`, but with one fault of `FAULTS`."""

    name = "fusewright_faulty"
    options: ClassVar = {"fault": "decline"}

    FAULTS: ClassVar[tuple[str, ...]] = (
        "decline", "crash", "supports_raises", "supports_lies", "wrong_shape", "wrong_dtype", "mutates_input", "drops_result",
        "returns_input", "raises_at_run_time", "group_not_convex", *FRAGMENT_FAULTS,
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fault = self.values["fault"]
        if fault not in self.FAULTS:
            raise OptionError(
                f"option 'fault' of {self.name}: there is no fault {fault!r}; {nearest(fault, self.FAULTS)}"
            )

    @classmethod
    def probe(cls) -> Device:
        return Device(HOST, "any")

    def supports(self, op: OpView) -> Verdict:
        if self.values["fault"] == "supports_raises":
            raise KeyError("a bug in supports()")
        if self.values["fault"] == "supports_lies":
            return True  # type: ignore[return-value]
        return super().supports(op)

    def group(self, graph: Any, claimed: frozenset[int]) -> Sequence[frozenset[int]] | None:
        if self.values["fault"] == "group_not_convex" and len(claimed) > 2:
            return [frozenset((min(claimed), max(claimed)))]
        return None

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        fault = self.values["fault"]
        if fault == "decline":
            raise Decline("declined on purpose")
        if fault == "crash":
            raise RuntimeError("crashed on purpose")
        if fault in FRAGMENT_FAULTS:
            return Fragment(tuple(FRAGMENT_FAULTS[fault](region, ctx, [ctx.aten(op) for op in region.ops])))
        right = super().compile(region, ctx)
        assert isinstance(right, Opaque)
        return Opaque(broken(fault, right.fn))


def broken(fault: str, fn: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
    def run(*args: Any) -> Sequence[torch.Tensor]:
        results = tuple(fn(*args))
        if fault == "wrong_shape":
            return (results[0].unsqueeze(0), *results[1:])
        if fault == "wrong_dtype":
            return (results[0].to(torch.float16), *results[1:])
        if fault == "returns_input":
            largest = max((a for a in args if isinstance(a, torch.Tensor)), key=torch.Tensor.numel)
            return (largest.as_strided(results[0].shape, results[0].stride()), *results[1:])
        if fault == "drops_result":
            return results[:-1]
        if fault == "raises_at_run_time":
            raise RuntimeError("failed on purpose")
        if fault == "mutates_input":
            next(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()).add_(1)
        return results

    return run
