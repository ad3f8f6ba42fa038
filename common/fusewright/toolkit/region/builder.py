"""Rewrites one region for the fuser: library calls with their constants, and every op with the strides at hand.

A library call may lay its result out in its own way (channels-last convolutions, slices of a concatenated product).
Such a value lives under an id of its own. Ops that take any strides read it as it is; for all others, and for what
leaves the region, it is copied to the strides of the graph, once. What is not a library call stays an op: the fuser
makes kernels of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.interface import CompileContext, OpView, Region, TensorSpec, Value
from fusewright.plan.ir import Call, Instruction, Launch, Ref
from fusewright.toolkit.fuse.call import LibraryCall
from fusewright.toolkit.region.graph import RegionGraph, made_of
from fusewright.toolkit.region.verify import verify
from fusewright.toolkit.rules.space import layout_of

STRIDE_FREE = frozenset({
    "add", "sub", "mul", "div", "neg", "abs", "exp", "sqrt", "rsqrt", "pow_scalar", "minimum",
    "maximum", "clamp", "relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid",
    "leaky_relu", "elu", "mish", "softplus", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
    "upsample_nearest2d", "upsample_bilinear2d", "batch_norm", "layer_norm", "group_norm", "rms_norm",
    "softmax", "mean", "sum", "cast", "cat", "constant_pad_nd", "permute", "transpose", "view",
    "expand", "unsqueeze", "squeeze", "slice", "select", "split", "split_with_sizes", "reshape", "alias",
    "linear", "conv",
    "matmul", "quantize", "quantize_tensor", "dequantize", "dequantize_tensor",
})  # fmt: skip
"""Rows that give the same values for any strides of their inputs. Their own result may then have other
strides too: torch's metadata functions say which. An op that refuses the strides (a view) reads a copy."""
NORMS = frozenset({"layer_norm", "rms_norm"})
"""Rows of the opset whose kernels go over the innermost dim."""
OWN_STRIDES = frozenset({"sdpa"})
"""Rows that take any strides and give a result whose strides do not depend on them."""


_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""Layouts that a copy of any tensor may be asked for by name."""


class Builder:
    """The region under construction: `ops` with the values that they really read and make, `calls` for some of them.

    `owner` lives as long as what is compiled here: the backend, of which each compiled graph has its own. `built` is held
    until the kernels of the plan are loaded: code that was built to be measured. `row_major_norms`: what a norm reads is made
    row-major of copies, where the graph has it by columns; in training each would be copied back, since backward reads it."""

    def __init__(
        self,
        graph: RegionGraph,
        ctx: CompileContext,
        owner: object = None,
        built: list[object] | None = None,
        row_major_norms: bool = False,
    ) -> None:
        self.graph = graph
        self.ctx = ctx
        self.owner = owner
        self.built = [] if built is None else built
        self.row_major_norms = row_major_norms
        self.ops: list[OpView] = []
        self.calls: list[LibraryCall] = []
        self.notes: dict[int, str] = {}
        self.kernels: dict[str, Any] = {}
        """Kernels that are no loop kernels of the fuser, by hash: for the fragment."""
        self._instructions: list[Instruction] = []  # of the call that is being written
        self._constants: dict[Any, Ref] = {}
        self._moved: dict[int, Value] = {}  # id in the graph -> the value with other strides that stands for it
        self._restored: set[int] = set()

    # -- constants

    def is_const(self, value: Value | None) -> bool:
        """Whether a value is made of weights only, so that what is made of it can be kept. None (no bias)
        counts."""
        return self.graph.is_const(value)

    def prepare(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        """Compute something from constants. Equal computations are shared."""
        key = (target, args, tuple(kwargs.items()))
        found = self._constants.get(key)
        if found is None:
            made = self.ctx.value(None)
            self._instructions.append(Call(*key[:2], (made.id,), key[2], prepare=True))
            found = self._constants[key] = Ref(made.id)
        return found

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

    def at_hand(self, value: Value) -> Value:
        """What stands for a value of the graph: itself, or the one with other strides."""
        return self._moved.get(value.id, value)

    def exact(self, value: Value) -> Ref:
        """A value with the graph's strides; copies it when that was not done before."""
        if value.id in self._moved and value.id not in self._restored:
            self._restored.add(value.id)
            self._restore(self._moved[value.id], value)
        return Ref(value.id)

    def row_major(self, value: Value) -> Value:
        """A copy of a value of fixed size, dense and row-major: a kernel may take it in."""
        return self._dense(value, contiguous_strides, torch.contiguous_format)

    def channels_last(self, value: Value) -> Value:
        """A copy of images of fixed size, dense with channels innermost: a kernel may take it in."""
        return self._dense(value, channels_last_strides, torch.channels_last)

    def _dense(self, value: Value, strides: Callable[..., tuple[int, ...]], layout: torch.memory_format) -> Value:
        made = self.ctx.value(replace(self.spec(value), stride=strides(self.spec(value).shape)))
        self._copy(self.at_hand(value), made, layout)
        return made

    def _restore(self, source: Value, value: Value) -> None:
        """An op that copies `source` to the graph's strides."""
        assert value.spec is not None
        layout = layout_of(value.spec) if value.spec.static else ""
        id = self._copy(source, value, _FORMATS.get(layout, torch.preserve_format))
        if layout not in _FORMATS:  # no memory format says it, so eager's clone would not make these strides
            self.calls.append(LibraryCall((id,), _restored(source, value, self.ctx)))

    def _copy(self, source: Value, value: Value, layout: torch.memory_format) -> int:
        id = self.ctx.value(None).id
        args = (source, layout)
        self.ops.append(OpView(id, "clone", "aten::clone.default", ("self", "memory_format"), args, (value,)))
        return id

    # -- instructions

    def call(self, target: str, *args: Any, out: Value, op: OpView | None = None) -> None:
        """A call that makes `out` with the strides that the graph says."""
        self._instructions.append(Call(target, args, (out.id,), op_id=op.id if op else None))

    def library(self, target: str, *args: Any, out: Value, stride: Sequence[int] | None, op: OpView) -> None:
        """A call whose result has these strides; None when the shape is symbolic, and the graph's hold."""
        self.call(target, *args, out=self.with_layout(out, stride), op=op)

    def launch(
        self, kernel: Any, hash: str, inputs: Sequence[Value], sizes: Sequence[Any], scalars: Sequence[float], *,
        out: Value, op: OpView,
    ) -> None:  # fmt: skip
        """A launch of a kernel of the backend's own, which reads its inputs with the strides at hand (see `spec`) and makes
        `out` with those of the graph."""
        self.kernels[hash] = kernel
        refs = tuple(r for v in inputs if (r := self.any_strides(v)) is not None)
        self._instructions.append(Launch(hash, refs, (out.id,), tuple(sizes), tuple(scalars), op_ids=(op.id,)))

    def append(self, instruction: Instruction) -> None:
        """An instruction that was made elsewhere, say by `CompileContext.aten` of an op that `resolved` gave."""
        self._instructions.append(instruction)

    def close_call(self, ops: Sequence[OpView]) -> None:
        """The instructions written since the last call compute these ops, in one call."""
        instructions, self._instructions = tuple(self._instructions), []
        self.calls.append(LibraryCall(tuple(op.id for op in ops), instructions))
        self.ops.extend(self.resolved(op) for op in ops)

    def write_claims(self, context: Any) -> None:
        """Write every claim of the region into a call of its own, in order; leave the other ops to the fuser."""
        for op in self.graph:
            claim = self.graph.claim_of(op)
            if claim is None:
                self.leave(op)
            elif claim.at is op:
                claim.write(context)
                self.close_call(claim.ops)
                self.notes.update(dict.fromkeys((o.id for o in claim.ops), claim.note))

    def replace(self, op: OpView, *made: Value) -> None:
        """The instructions written since the last call make `made` in place of the results of `op`, which ops behind it (see
        `append_op`) are to make of it."""
        instructions, self._instructions = tuple(self._instructions), []
        self.calls.append(LibraryCall((op.id,), instructions))
        self.ops.append(replace(self.resolved(op), outs=made))

    def append_op(self, name: str, *args: Any, out: Value | None = None) -> Value:
        """One more op of the opset, for the fuser, over values of this builder. `out`: what it makes, if not a value of its own
        with the strides that torch's metadata functions say."""
        row = ops.OPS[name]
        given = row.bind(args, {})
        target = row.target.name()
        target = target if "." in target else f"{target}.default"
        if out is None:
            made = metadata(row.target, given, self.spec)
            read = [a for a in given.values() if isinstance(a, Value)]
            device = self.spec(read[0]).device
            out = self.ctx.value(made_of(read, TensorSpec(tuple(made.shape), _usual_strides(made), made.dtype, device)))
        id = self.ctx.value(None).id
        self.ops.append(OpView(id, name, target, tuple(given), tuple(given.values()), (out,)))
        return out

    def resolved(self, op: OpView) -> OpView:
        """An op with the values that stand for the graph's own."""
        outs = tuple(self._moved.get(v.id, v) for v in op.outs)
        return replace(op, args=self._argument(op.args), outs=outs)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return self._moved.get(arg.id, arg)
        return tuple(self._argument(a) for a in arg) if isinstance(arg, tuple) else arg

    def with_layout(self, out: Value, stride: Sequence[int] | None) -> Value:
        """What stands for `out`, a result of the region, when it is made with these strides; None: the graph's."""
        assert out.spec is not None
        if stride is None or _same_strides(out.spec, stride):
            return out
        self._moved[out.id] = self.ctx.value(replace(out.spec, stride=tuple(stride)))
        return self._moved[out.id]

    def leave(self, op: OpView, any_strides: bool = True) -> None:
        """Leave `op` to the fuser, with the strides at hand where it takes them, or always with the graph's."""
        if self.row_major_norms and any_strides:
            self._turn(op)
        moved = [v for v in op.inputs() if v.id in self._moved and op.op not in OWN_STRIDES]
        strides = self._strides_for(op) if moved and any_strides else None
        if moved and strides is None:
            for v in moved:
                self.exact(v)
            self.ops.append(op)
        else:
            for o, s in zip(op.outs, strides or (), strict=False):
                if s is not None:
                    self.with_layout(o, s)
            self.ops.append(self.resolved(op))

    def _turn(self, op: OpView) -> None:
        """Copy what `op` reads by columns, if it is pointwise and a row of its result is read next: else a residual stream behind
        a transposed image stays transposed, as in eager, from its first norm to its last."""
        row, out = ops.OPS.get(op.op), op.outs[0].spec
        if row is None or row.kind is not ops.Kind.POINTWISE or op.op not in STRIDE_FREE or not _by_columns(out):
            return
        if any(user.op in NORMS for user in self.graph.users(op.outs[0])):
            for v in op.inputs():
                if v.id not in self._moved and _by_columns(v.spec) and v.spec.shape == out.shape:  # type: ignore[union-attr]
                    self._moved[v.id] = self.row_major(v)
                    self._restored.add(v.id)  # the value itself stays

    def _strides_for(self, op: OpView) -> list[tuple[int, ...] | None] | None:
        """The strides of every result of `op` for the inputs at hand, by torch's metadata functions; None:
        keep the graph's."""
        if op.op not in STRIDE_FREE or any(v.spec is None or not v.spec.static for v in op.inputs()):
            return None
        # Libraries answer images that are channels-last with such, and the metadata function without a device does not.
        if op.op == "conv" and any(layout_of(self.spec(v)) == "channels_last" for v in op.inputs()):
            return None
        try:
            result = metadata(_operator(op.target), dict(zip(op.argnames, op.args, strict=True)), self.spec)
        except (RuntimeError, ValueError, NotImplementedError):  # a view that these strides do not allow
            return None
        results = result if isinstance(result, tuple | list) else (result,)
        return [_usual_strides(r) if isinstance(r, torch.Tensor) else None for r in results]

    def finish(self) -> Region:
        """The region for the fuser: every output with its strides."""
        for v in self.graph.outputs:
            if v.spec is not None:
                self.exact(v)
        region = replace(self.graph.source, ops=tuple(self.ops))
        verify(region, "calls were written", ordered=False)  # the fuser puts ops in order
        return region


def _restored(made: Value, value: Value, ctx: CompileContext) -> tuple[Instruction, ...]:
    """The calls that copy `made` to the strides of the graph's `value`."""
    assert value.spec is not None
    known = _FORMATS.get(layout_of(value.spec))
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


def _operator(target: str) -> Any:
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _by_columns(spec: TensorSpec | None) -> bool:
    """Whether the elements of a row lie apart."""
    return spec is not None and spec.static and spec.rank > 1 and spec.shape[-1] != 1 and spec.stride[-1] != 1


def _same_strides(spec: TensorSpec, stride: Sequence[Any]) -> bool:
    """Equal where it matters: a dimension of size 1 may have any stride."""
    pairs = zip(spec.shape, spec.stride, stride, strict=True)
    return 0 in spec.shape or all(a == b for size, a, b in pairs if size != 1)


def _usual_strides(t: torch.Tensor) -> tuple[int, ...]:
    """The strides of `t`, with those of channels-last where they differ in dimensions of size 1 alone: torch then calls
    them channels-last as well (its group norm leaves an odd stride for a batch of one)."""
    if t.dim() != 4 or t.is_contiguous():
        return t.stride()
    usual = channels_last_strides(t.shape)
    pairs = zip(t.shape, t.stride(), usual, strict=True)
    return usual if all(a == b for size, a, b in pairs if size != 1) else t.stride()


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


def metadata(operator: Any, given: Mapping[str, Any], spec: Callable[[Value], TensorSpec]) -> Any:
    """What torch's metadata functions say that an operator makes of values of fixed sizes. Raises what they refuse."""

    def on_meta(arg: Any) -> Any:
        if isinstance(arg, Value):
            s = spec(arg)
            return torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta")  # type: ignore[arg-type]
        return [on_meta(a) for a in arg] if isinstance(arg, tuple | list) else arg

    named = {a.name for a in operator._schema.arguments if a.kwarg_only}
    with compat.without_modes():
        meta = {k: on_meta(a) for k, a in given.items()}
        return operator(*(v for k, v in meta.items() if k not in named), **{k: v for k, v in meta.items() if k in named})
