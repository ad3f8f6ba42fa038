"""Writes the fragment of one region: instructions, constants, and values whose strides differ from the
graph's.

A library call may lay its result out in its own way (channels-last convolutions, slices of a concatenated
product).
Such a value lives under an id of its own. Ops that take any strides read it as it is; for all others, and
for what
leaves the region, it is copied to the strides of the graph, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusewright.interface import CompileContext, OpView, Region, TensorSpec, Value
from fusewright.plan.ir import Call, Instruction, Ref, refs
from fusewright.toolkit.library import layout_of
from fusewright_onednn.patterns import Links

STRIDE_FREE = frozenset({
    "add", "sub", "mul", "div", "neg", "abs", "exp", "sqrt", "rsqrt", "pow_scalar", "minimum",
    "maximum", "clamp", "relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid",
    "leaky_relu", "elu", "mish", "softplus", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
    "upsample_nearest2d", "upsample_bilinear2d", "batch_norm", "layer_norm", "group_norm", "rms_norm",
    "softmax", "mean", "sum", "cast", "cat", "constant_pad_nd", "permute", "transpose", "view",
    "expand", "unsqueeze", "squeeze", "slice", "select", "split", "split_with_sizes", "linear", "conv",
    "matmul", "sdpa",
})  # fmt: skip
"""Rows that give the same values for any strides of their inputs. Their own result may then have other
strides too: torch's metadata functions say which. An op that refuses the strides (a view) reads a copy."""

IN_PLACE: Mapping[str, str] = {
    "relu": "aten::relu_.default",
    "clamp": "aten::clamp_.default",
    "hardsigmoid": "aten::hardsigmoid_.default",
    "add": "aten::add_.Tensor",
    "mul": "aten::mul_.Tensor",
}
"""Ops that may overwrite the result of a library call that nobody else reads: less memory traffic."""


class Builder:
    """The fragment under construction."""

    def __init__(self, region: Region, ctx: CompileContext) -> None:
        self.region = region
        self.ctx = ctx
        self.links = Links(region.ops, frozenset(v.id for v in region.outputs))
        self.instructions: list[Instruction] = []
        self.notes: dict[int, str] = {}
        self._const = (
            {v.id for v in region.inputs if v.spec and v.spec.const} if region.phase == "infer" else set()
        )
        self._moved: dict[
            int, Value
        ] = {}  # id in the graph -> the value with other strides that stands for it
        self._restored: set[int] = set()
        self._fresh: set[int] = set()  # results of library calls: own memory, not a constant

    # -- constants

    def is_const(self, value: Value | None) -> bool:
        """Whether a value is made of weights only, so that what is made of it can be kept. None (no bias)
        counts."""
        return value is None or value.id in self._const

    def once(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        """Compute something from constants. Equal computations are shared."""
        made = Call(target, args, (self.ctx.value(None).id,), tuple(kwargs.items()), once=True)
        for i in self.instructions:
            if (
                isinstance(i, Call)
                and i.once
                and (i.target, i.args, i.kwargs) == (made.target, made.args, made.kwargs)
            ):
                return Ref(i.outs[0])
        self.instructions.append(made)
        self._const.add(made.outs[0])
        return Ref(made.outs[0])

    # -- values

    def any_strides(self, value: Value | None) -> Ref | None:
        """A value as it is, for instructions that take any strides."""
        if value is None:
            return None
        return Ref(self._moved[value.id].id if value.id in self._moved else value.id)

    def spec(self, value: Value) -> TensorSpec:
        """What `any_strides` refers to: the graph's spec, or that of the value that stands for it."""
        found = self._moved.get(value.id, value).spec
        assert found is not None
        return found

    def exact(self, value: Value) -> Ref:
        """A value with the graph's strides; copies it when that was not done before."""
        if value.id in self._moved and value.id not in self._restored:
            self._restored.add(value.id)
            self._restore(self._moved[value.id], value)
        return Ref(value.id)

    def _restore(self, source: Value, value: Value) -> None:
        assert value.spec is not None
        formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
        layout = formats.get(layout_of(value.spec))
        if layout is not None:
            clone = Call("aten::clone.default", (Ref(source.id),), (value.id,), (("memory_format", layout),))
            self.instructions.append(clone)
            return
        empty = self.ctx.value(value.spec)
        shape, stride = list(value.spec.shape), list(value.spec.stride)
        self.call("aten::new_empty_strided.default", Ref(source.id), shape, stride, out=empty)
        self.call("aten::copy_.default", Ref(empty.id), Ref(source.id), out=value)

    # -- instructions

    def call(self, target: str, *args: Any, out: Value, op: OpView | None = None) -> None:
        """A call that makes `out` with the strides that the graph says."""
        self.instructions.append(Call(target, args, (out.id,), op_id=op.id if op else None))

    def library(self, target: str, *args: Any, out: Value, stride: Sequence[int] | None, op: OpView) -> None:
        """A library call into memory of its own. `stride` is what it really makes, None when the shape is
        symbolic."""
        place = self._place(out, stride)
        self.call(target, *args, out=place, op=op)
        if any(r not in self._const for r in refs(args)):
            self._fresh.add(out.id)

    def put(self, target: str, *args: Any, out: Value, stride: Sequence[int], op: OpView) -> None:
        """A call whose result is a view of something else, with these strides."""
        self.call(target, *args, out=self._place(out, stride), op=op)

    def _place(self, out: Value, stride: Sequence[int] | None) -> Value:
        assert out.spec is not None
        if stride is None or _same_strides(out.spec, stride):
            return out
        self._moved[out.id] = self.ctx.value(replace(out.spec, stride=tuple(stride)))
        return self._moved[out.id]

    def aten(self, op: OpView) -> None:
        """Run `op` as eager does, with the strides at hand where it takes them and in place where nobody
        sees it."""
        call = self.ctx.aten(op)
        moved = [v for v in op.inputs() if v.id in self._moved]
        strides = self._strides_for(op) if moved else None
        if strides is None:
            for v in moved:
                self.exact(v)
            names = {v.id: v.id for v in moved}
            places = op.outs
        else:
            names = {v.id: self._moved[v.id].id for v in moved}
            places = tuple(
                self._place(o, s) if s is not None else o for o, s in zip(op.outs, strides, strict=True)
            )
        if isinstance(call, Call):
            args, kwargs = _renamed(call.args, names), _renamed(call.kwargs, names)
            call = replace(call, args=args, kwargs=kwargs, outs=tuple(p.id for p in places))
            call = self._in_place(op, call)
        self.instructions.append(call)
        if self.region.phase == "infer" and all(self.is_const(v) for v in op.inputs()):
            self._const.update(o.id for o in op.outs)

    def _in_place(self, op: OpView, call: Call) -> Call:
        """The call that overwrites an input which nobody else reads, or `call` when there is none."""
        target = IN_PLACE.get(op.op)
        if target is None:
            return call
        if self._may_overwrite(op, op.args[0]):
            self._fresh.add(op.out.id)
            return replace(call, target=target)
        commutes = op.op == "mul" or (op.op == "add" and op.arg("alpha") == 1)
        if commutes and self._may_overwrite(op, op.args[1]) and isinstance(op.args[0], Value):
            self._fresh.add(op.out.id)
            first, second, *rest = call.args
            return replace(call, target=target, args=(second, first, *rest))
        return call

    def _may_overwrite(self, op: OpView, value: Any) -> bool:
        if not isinstance(value, Value) or value.id not in self._fresh or value.id in self._restored:
            return False
        if self.links.only_user(value) is not op:
            return False
        have, want = self.spec(value), self.spec(op.out)
        return (have.shape, have.dtype) == (want.shape, want.dtype) and _same_strides(want, have.stride)

    def _strides_for(self, op: OpView) -> list[tuple[int, ...] | None] | None:
        """The strides of every result of `op` for the inputs at hand, by torch's metadata functions; None:
        keep the graph's."""
        if op.op not in STRIDE_FREE or any(v.spec is None or not v.spec.static for v in op.inputs()):
            return None
        operator = _operator(op.target)
        given = dict(zip(op.argnames, (self._on_meta(a) for a in op.args), strict=True))
        named = {a.name for a in operator._schema.arguments if a.kwarg_only}
        try:
            result = operator(
                *(v for k, v in given.items() if k not in named),
                **{k: v for k, v in given.items() if k in named},
            )
        except (RuntimeError, NotImplementedError):  # a view that these strides do not allow
            return None
        results = result if isinstance(result, tuple | list) else (result,)
        return [r.stride() if isinstance(r, torch.Tensor) else None for r in results]

    def _on_meta(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            spec = self.spec(arg)
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")  # type: ignore[arg-type]
        if isinstance(arg, tuple):
            return [self._on_meta(a) for a in arg]
        return arg

    def finish(self) -> tuple[Instruction, ...]:
        """Give every output of the region its strides, and return what was written."""
        for v in self.region.outputs:
            if v.spec is not None:
                self.exact(v)
        return tuple(self.instructions)


def _operator(target: str) -> Any:
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _renamed(arg: Any, names: Mapping[int, int]) -> Any:
    if isinstance(arg, Ref):
        return Ref(names.get(arg.id, arg.id))
    if isinstance(arg, tuple | list):
        return tuple(_renamed(a, names) for a in arg)
    return arg


def _same_strides(spec: TensorSpec, stride: Sequence[Any]) -> bool:
    """Equal where it matters: a dimension of size 1 may have any stride."""
    pairs = zip(spec.shape, spec.stride, stride, strict=True)
    return 0 in spec.shape or all(a == b for size, a, b in pairs if size != 1)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense row-major tensor."""
    out: list[int] = []
    step = 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense [N, C, H, W] tensor with C innermost."""
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c)
