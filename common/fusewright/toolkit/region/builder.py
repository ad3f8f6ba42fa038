"""Rewrites one region for the fuser: library calls with their constants, and every op with the actual strides.

A library call may choose the layout of its result (channels-last convolutions, slices of a concatenated product). Such
a result gets a value id of its own. Ops that accept any strides read it directly; for all other ops, and for outputs of
the region, it is copied once to the graph's strides. Ops that no library call computes are left for the fuser to turn
into kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.interface import CompileContext, OpView, Region, TensorSpec, Value
from fusewright.ops.strides import CHANNELS_LAST, RULES, VIEWS
from fusewright.plan.ir import Call, Instruction, Launch, Ref
from fusewright.toolkit.fuse.call import LibraryCall
from fusewright.toolkit.region.graph import RegionGraph, made_of
from fusewright.toolkit.region.verify import verify
from fusewright.toolkit.rules.space import layout_of

OWN_STRIDES = frozenset({"sdpa", "gather", "index_select"})
"""Rows that accept any strides and whose result's strides do not depend on them."""
_ABOUT_MEMORY = frozenset({"clone", "copy", "as_strided", "as_strided_scatter", "view_dtype", "view_as_real", "view_as_complex"})
"""Rows that make a layout, or depend on it."""
_BY_LIBRARIES = frozenset({"conv_backward", "sdpa_with_lse", "sdpa_backward", "q_linear", "q_linear_tensor", "q_conv"})
"""Rows of libraries that choose the strides of their results, other than by the metadata functions."""


def _is_stride_free(row: ops.Op) -> bool:
    if row.name in OWN_STRIDES | _ABOUT_MEMORY | _BY_LIBRARIES or row.kind in (ops.Kind.RANDOM, ops.Kind.CREATION):
        return False
    by_kernels = row.kind is ops.Kind.POINTWISE or row.activation or row.name == "batch_norm"
    return by_kernels or row.name not in RULES.keys() - VIEWS


STRIDE_FREE = frozenset(row.name for row in ops.ROWS if _is_stride_free(row))
"""Rows that compute the same values for any strides of their inputs. The strides of their results may then change too, as torch's
metadata functions determine: rows for which these differ from eager (`ops.strides`) must be such that kernels compute them. An op
that does not accept the strides (a view) reads a copy."""
NORMS = frozenset({"layer_norm", "rms_norm"})
"""Rows of the opset whose kernels run along the innermost dim."""


def _format(spec: TensorSpec) -> torch.memory_format | None:
    """The memory format that a copy can request for these strides; None if there is none."""
    layout = layout_of(spec)
    return torch.contiguous_format if layout == "contiguous" else CHANNELS_LAST[spec.rank] if layout == "channels_last" else None


class Builder:
    """The region under construction: `ops` with the values that they actually read and write, and `calls` for some of them.

    `owner` lives as long as the compiled code: it is the backend, and each compiled graph has its own. `built` holds code built
    for measuring until the plan's kernels are loaded. `row_major_norms`: copy column-major inputs of norms to row-major, and keep
    images of norms of groups and instances channels-last; not used in training, where each would have to be copied back for
    backward."""

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
        """Kernels other than the fuser's loop kernels, by hash, for the fragment."""
        self._instructions: list[Instruction] = []  # of the call being written
        self._constants: dict[Any, Ref] = {}
        self._moved: dict[int, Value] = {}  # id in the graph -> the value with other strides that replaces it
        self._restored: set[int] = set()
        self._replaced: set[int] = set()  # ops of calls that are closed
        self._shared: dict[Any, Value] = {}
        self._copies: dict[int, Value] = {}  # id in the graph -> its copy with other strides for the call being written

    # -- constants

    def is_const(self, value: Value | None) -> bool:
        """Whether a value depends only on weights, so that results derived from it can be cached. True for None
        (no bias)."""
        return self.graph.is_const(value)

    def prepare(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        """Compute a value from constants when weights are prepared. Equal computations are shared."""
        key = (target, args, tuple(kwargs.items()))
        found = self._constants.get(key)
        if found is None:
            made = self.ctx.value(None)
            self._instructions.append(Call(*key[:2], (made.id,), key[2], prepare=True))
            found = self._constants[key] = Ref(made.id)
        return found

    # -- values

    def any_strides(self, value: Value | None) -> Ref | None:
        """Refer to a value with its actual strides, for instructions that accept any."""
        if value is None:
            return None
        return Ref(self._moved[value.id].id if value.id in self._moved else value.id)

    def spec(self, value: Value) -> TensorSpec:
        """The spec of the value that `any_strides` refers to."""
        found = self._moved.get(value.id, value).spec
        assert found is not None
        return found

    def at_hand(self, value: Value) -> Value:
        """The value that holds a graph value: itself, or its replacement with other strides."""
        return self._moved.get(value.id, value)

    def exact(self, value: Value) -> Ref:
        """Refer to a value with the graph's strides, copying it on first use if necessary."""
        if value.id in self._moved and value.id not in self._restored:
            self._restored.add(value.id)
            self._restore(self._moved[value.id], value)
        return Ref(value.id)

    def row_major(self, value: Value) -> Value:
        """Copy a value of fixed size to a dense row-major tensor. The copy may be fused into a kernel."""
        return self._dense(value, contiguous_strides, torch.contiguous_format)

    def channels_last(self, value: Value) -> Value:
        """Copy images of fixed size to a dense channels-last tensor. The copy may be fused into a kernel."""
        return self._dense(value, channels_last_strides, CHANNELS_LAST[self.spec(value).rank])

    def _dense(self, value: Value, strides: Callable[..., tuple[int, ...]], layout: torch.memory_format) -> Value:
        def make() -> Value:
            made = self.ctx.value(replace(self.spec(value), stride=strides(self.spec(value).shape)))
            self._copy(self.at_hand(value), made, layout)
            return made

        return self.read_instead(value, self.once((value.id, layout), make))

    def moved(self, value: Value, made: Value) -> None:
        """Let ops behind read `made`, which holds the elements of a value with other strides."""
        self._moved[value.id] = made

    def read_instead(self, value: Value, made: Value) -> Value:
        """Let the op that is being written read `made`, of whatever shape, in place of `value`."""
        self._copies[value.id] = made
        return made

    def _restore(self, source: Value, value: Value) -> None:
        """Add an op that copies `source` to the graph's strides."""
        assert value.spec is not None
        layout = _format(value.spec) if value.spec.static else None
        id = self._copy(source, value, layout or torch.preserve_format)
        if layout is None:  # no memory format describes these strides, so eager's clone would not produce them
            self.calls.append(LibraryCall((id,), _restored(source, value, self.ctx)))

    def _copy(self, source: Value, value: Value, layout: torch.memory_format) -> int:
        id = self.ctx.value(None).id
        args = (source, layout)
        self.ops.append(OpView(id, "clone", "aten::clone.default", ("self", "memory_format"), args, (value,)))
        return id

    # -- instructions

    def call(self, target: str, *args: Any, out: Value, more: Sequence[Value] = (), op: OpView | None = None) -> None:
        """Add a call that makes `out`, and `more` results, with the graph's strides. Numbers among `args` may be symbols."""
        outs = tuple(v.id for v in (out, *more))
        self._instructions.append(Call(target, _numbers(args), outs, op_id=op.id if op else None))

    def library(self, target: str, *args: Any, out: Value, stride: Sequence[int] | None, op: OpView) -> None:
        """Add a call whose result has these strides; None keeps the graph's, for symbolic shapes."""
        self.call(target, *args, out=self.with_layout(out, stride), op=op)

    def launch(
        self, kernel: Any, hash: str, inputs: Sequence[Value], sizes: Sequence[Any], scalars: Sequence[float], *,
        out: Value, op: OpView,
    ) -> None:  # fmt: skip
        """Add a launch of a backend's own kernel, which reads its inputs with their actual strides (see `spec`) and makes `out`
        with the graph's."""
        self.kernels[hash] = kernel
        refs = tuple(r for v in inputs if (r := self.any_strides(v)) is not None)
        self._instructions.append(Launch(hash, refs, (out.id,), tuple(sizes), tuple(scalars), op_ids=(op.id,)))

    def append(self, instruction: Instruction) -> None:
        """Add an instruction that was made elsewhere, e.g. by `CompileContext.aten` for an op from `resolved`."""
        self._instructions.append(instruction)

    def close_call(self, ops: Sequence[OpView]) -> None:
        """Make the instructions written since the last call into one library call that computes these ops."""
        instructions, self._instructions = tuple(self._instructions), []
        self.calls.append(LibraryCall(tuple(op.id for op in ops), instructions))
        self.ops.extend(self.resolved(op) for op in ops)
        self._copies.clear()

    def write_claims(self, context: Any) -> None:
        """Write every claim of the region as a library call, in order; leave the other ops to the fuser."""
        for op in self.graph:
            claim = self.graph.claim_of(op)
            if claim is None:
                self.leave(op)
            elif claim.at is op:
                claim.write(context)
                if op.id not in self._replaced:
                    self.close_call(claim.ops)
                self.notes.update(dict.fromkeys((o.id for o in claim.ops), claim.note))

    def replace(self, op: OpView, *made: Value) -> None:
        """Make the instructions written since the last call into a library call that makes `made` in place of the results of
        `op`. Ops added afterwards (see `append_op`) must compute those results from `made`."""
        instructions, self._instructions = tuple(self._instructions), []
        self.calls.append(LibraryCall((op.id,), instructions))
        self.ops.append(replace(self.resolved(op), outs=made))
        self._replaced.add(op.id)
        self._copies.clear()

    def without(self, op: OpView) -> None:
        """Leave out an op whose first result ops added afterwards compute; the others have no reader."""
        self._replaced.add(op.id)

    def append_op(self, name: str, *args: Any, out: Value | None = None) -> Value:
        """Add an op of the opset, for the fuser, over values with their actual strides. `out`: its result; by default a new value
        with the strides that torch's metadata functions determine."""
        row = ops.OPS[name]
        given = row.bind(tuple(self.at_hand(a) if isinstance(a, Value) else a for a in args), {})
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

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """A value that several ops read, written before the first of them."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def resolved(self, op: OpView) -> OpView:
        """Return an op with its values replaced by those that hold them."""
        outs = tuple(self._moved.get(v.id, v) for v in op.outs)
        return replace(op, args=self._argument(op.args), outs=outs)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return self._copies.get(arg.id) or self._moved.get(arg.id, arg)
        return tuple(self._argument(a) for a in arg) if isinstance(arg, tuple) else arg

    def with_layout(self, out: Value, stride: Sequence[int] | None) -> Value:
        """Return the value that holds `out` if it is made with these strides; None keeps the graph's."""
        assert out.spec is not None
        if stride is None or same_strides(out.spec, stride):
            return out
        self._moved[out.id] = self.ctx.value(replace(out.spec, stride=tuple(stride)))
        return self._moved[out.id]

    def leave(self, op: OpView, any_strides: bool = True) -> None:
        """Leave `op` to the fuser, with the actual strides if it accepts them, else with the graph's; without `any_strides`
        always with the graph's."""
        if self.row_major_norms and any_strides:
            self._turn(op)
        if any_strides and (stride := self._like_images(op)) is not None:
            self.leave_with(op, stride)
            return
        own = _own_strides(op) and self._laid_alike(op)
        moved = [v for v in op.inputs() if v.id in self._moved and not own]
        strides = self._strides_for(op) if moved and any_strides and not self._returned_with_others(op) else None
        if moved and strides is None:
            for v in moved:
                self.exact(v)
            self.ops.append(op)
        else:
            for o, s in zip(op.outs, strides or (), strict=False):
                if s is not None:
                    self.with_layout(o, s)
            self.ops.append(self.resolved(op))
        if self.row_major_norms and any_strides:
            self._lay_instances(op)

    def takes_any_strides(self, op: OpView) -> bool:
        """Whether an op that is left to the fuser reads values of fixed sizes with whatever strides they have."""
        return op.op in STRIDE_FREE | OWN_STRIDES and all(v.spec is not None and v.spec.static for v in op.inputs())

    def leave_with(self, op: OpView, *strides: Sequence[int]) -> None:
        """Leave `op` to the fuser with its actual operands, of which its first results have these strides."""
        for out, stride in zip(op.outs, strides, strict=False):
            self.with_layout(out, stride)
        self.ops.append(self.resolved(op))

    def _laid_alike(self, op: OpView) -> bool:
        """Whether an op that accepts any strides is given such that it makes its result as in the graph: libraries choose by dense
        rows, and order a result's dimensions like an operand's."""
        pairs = ((v.spec, self.spec(v)) for v in op.inputs() if v.id in self._moved)
        return op.op != "sdpa" or all(a is not None and _order(a) == _order(b) is not None for a, b in pairs)

    def _returned_with_others(self, op: OpView) -> bool:
        """Whether `op` is a view of memory of which several values leave the region: copied to the graph's strides one by one,
        they would no longer share it."""
        if not _is_view(op) or not any(map(self.graph.escapes, self._views(op))):
            return False
        base = next(op.inputs())
        while (made := self.graph.producer(base)) is not None and _is_view(made):
            base = next(made.inputs())
        views = [v for user in self.graph.users(base) if _is_view(user) for v in self._views(user)]
        return sum(map(self.graph.escapes, [base, *views])) > 1

    def _views(self, op: OpView) -> list[Value]:
        """The results of a view, and the views of those."""
        found = [*op.outs]
        for out in op.outs:
            for user in self.graph.users(out):
                found += self._views(user) if _is_view(user) else []
        return found

    def _turn(self, op: OpView) -> None:
        """Copy column-major inputs of `op` to row-major if it is pointwise and a norm reads its result. Otherwise a residual
        stream that starts from a transposed image would stay transposed, as in eager, from its first norm to its last."""
        row, out = ops.OPS.get(op.op), op.outs[0].spec
        if row is None or row.kind is not ops.Kind.POINTWISE or op.op not in STRIDE_FREE or not _by_columns(out):
            return
        if any(user.op in NORMS for user in self.graph.users(op.outs[0])):
            for v in op.inputs():
                if v.id not in self._moved and _by_columns(v.spec) and v.spec.shape == out.shape:  # type: ignore[union-attr]
                    self._moved[v.id] = self.row_major(v)
                    self._restored.add(v.id)  # the graph's value remains available

    def _like_images(self, op: OpView) -> tuple[int, ...] | None:
        """Return channels-last strides for a group norm of such images, or its gradient. On GPUs eager copies them to planes in
        front of it: what adds the result to other images would read across memory."""
        if op.op not in ("group_norm", "group_norm_backward") or self.graph.escapes(op.outs[0]):
            return None
        copy = self.graph.producer(op.arg("input"))
        x = self.spec(copy.arg("self") if copy is not None and copy.op == "clone" else op.arg("input"))
        out = op.outs[0].spec
        if out is None:  # the gradient of images that need none
            return None
        alike = out.static and x.shape == out.shape and layout_of(out) == "contiguous" and layout_of(x) == "channels_last"
        return channels_last_strides(out.shape) if alike else None  # type: ignore[arg-type]

    def _lay_instances(self, op: OpView) -> None:
        """Let what reads a norm of the instances of channels-last images, which is computed on a view of them in planes, read it in
        channels-last: the copy is part of the kernel."""
        norm = self.graph.producer(op.arg("self")) if op.op in ("view", "reshape") else None
        given = self.graph.producer(norm.arg("input")) if norm is not None and norm.op == "batch_norm_no_stats" else None
        if given is None or given.op not in ("view", "reshape") or self.graph.escapes(op.out):
            return
        copy = self.graph.producer(given.arg("self"))
        x, out = self.spec(copy.arg("self") if copy is not None and copy.op == "clone" else given.arg("self")), op.out.spec
        if out is not None and out.static and x.shape == out.shape and layout_of(x) == "channels_last":
            self._moved[op.out.id] = self.channels_last(op.out)
            self._restored.add(op.out.id)  # the graph's value remains available

    def _strides_for(self, op: OpView) -> list[tuple[int, ...] | None] | None:
        """The strides of every result of `op` for its actual inputs, by torch's metadata functions. None keeps the
        graph's."""
        if op.op not in STRIDE_FREE or any(v.spec is None or not v.spec.static for v in op.inputs()):
            return None
        # Libraries return channels-last results for channels-last images; the metadata function without a device does not.
        if op.op == "conv" and any(layout_of(self.spec(v)) == "channels_last" for v in op.inputs()):
            return None
        try:
            result = metadata(_operator(op.target), dict(zip(op.argnames, op.args, strict=True)), self.spec)
        except (RuntimeError, ValueError, NotImplementedError):  # a view that is impossible for these strides
            return None
        results = result if isinstance(result, tuple | list) else (result,)
        return [_usual_strides(r) if isinstance(r, torch.Tensor) else None for r in results]

    def finish(self) -> Region:
        """Return the region for the fuser, with every output in the graph's strides."""
        for v in self.graph.outputs:
            if v.spec is not None:
                self.exact(v)
        region = replace(self.graph.source, ops=tuple(self.ops))
        verify(region, "calls were written", ordered=False)  # the fuser puts ops in order
        return region


def _numbers(arg: Any) -> Any:
    """Refer to symbolic numbers by their values."""
    if isinstance(arg, Value) and arg.spec is None:
        return Ref(arg.id)
    return tuple(map(_numbers, arg)) if isinstance(arg, tuple) else arg


def _is_view(op: OpView) -> bool:
    row = ops.OPS.get(op.op)
    return row is not None and row.kind is ops.Kind.VIEW and any(True for _ in op.inputs())


def _own_strides(op: OpView) -> bool:
    """Whether an op accepts any strides and makes its result with the graph's."""
    return op.op in OWN_STRIDES or (op.op == "clone" and op.arg("memory_format") is torch.contiguous_format)


def _restored(made: Value, value: Value, ctx: CompileContext) -> tuple[Instruction, ...]:
    """Return the calls that copy `made` to the graph's strides of `value`."""
    assert value.spec is not None
    known = _format(value.spec)
    if known is not None:
        return (Call("aten::clone.default", (Ref(made.id),), (value.id,), (("memory_format", known),)),)
    shape, stride = value.spec.shape, value.spec.stride
    repeated = [d for d, step in enumerate(stride) if step == 0 and shape[d] != 1]
    calls: list[Instruction] = []

    def then(target: str, *args: Any) -> Ref:
        calls.append(Call(target, args, (ctx.value(None).id,)))
        return Ref(calls[-1].outs[0])

    source = Ref(made.id)
    for d in repeated:  # write elements that share memory only once
        source = then("aten::slice.Tensor", source, d, 0, 1)
    narrow = tuple(1 if d in repeated else n for d, n in enumerate(shape))
    empty = then("aten::new_empty_strided.default", source, narrow, tuple(stride))
    copy = then("aten::copy_.default", empty, source)
    if repeated:
        then("aten::expand.default", copy, tuple(shape))
    last = calls.pop()
    return (*calls, replace(last, outs=(value.id,)))


def _order(spec: TensorSpec) -> tuple[bool, list[int]] | None:
    """Whether rows are dense, and the dimensions from the largest stride to the smallest; None for symbolic sizes."""
    if not spec.static:
        return None
    dims = [d for d, size in enumerate(spec.shape) if size != 1]
    order: list[int] = sorted(dims, key=lambda d: -spec.stride[d])  # type: ignore[operator]
    return not dims or dims[-1] != spec.rank - 1 or spec.stride[-1] == 1, order


def _operator(target: str) -> Any:
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _by_columns(spec: TensorSpec | None) -> bool:
    """Whether the elements of a row are not contiguous."""
    return spec is not None and spec.static and spec.rank > 1 and spec.shape[-1] != 1 and spec.stride[-1] != 1


def same_strides(spec: TensorSpec, stride: Sequence[Any]) -> bool:
    """Whether strides are equal, apart from those of dimensions of size 1."""
    pairs = zip(spec.shape, spec.stride, stride, strict=True)
    return 0 in spec.shape or all(a == b for size, a, b in pairs if size != 1)


def _usual_strides(t: torch.Tensor) -> tuple[int, ...]:
    """The strides of `t`, normalized to channels-last if they differ from it only in dimensions of size 1: torch treats
    such tensors as channels-last too (its group norm leaves an odd stride for a batch of one)."""
    if t.dim() not in CHANNELS_LAST or t.is_contiguous():
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
    """Strides of a dense [N, C, H, W] or [N, C, D, H, W] tensor with C innermost."""
    n, c, *points = shape
    batch, *steps, _ = contiguous_strides((n, *points, c))
    return (batch, 1, *steps)


def metadata(operator: Any, given: Mapping[str, Any], spec: Callable[[Value], TensorSpec]) -> Any:
    """Run an operator on meta tensors of the values' specs, which have fixed sizes. Passes on torch's errors."""

    def on_meta(arg: Any) -> Any:
        if isinstance(arg, Value):
            s = spec(arg)
            return torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta")  # type: ignore[arg-type]
        return [on_meta(a) for a in arg] if isinstance(arg, tuple | list) else arg

    named = {a.name for a in operator._schema.arguments if a.kwarg_only}
    with compat.without_modes():
        meta = {k: on_meta(a) for k, a in given.items()}
        return operator(*(v for k, v in meta.items() if k not in named), **{k: v for k, v in meta.items() if k in named})
