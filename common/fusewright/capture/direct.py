"""Direct capture: record a Dynamo graph without gradients, mutation or symbolic sizes as an ATen graph in one run.

AOTAutograd would trace such a graph twice, functionalize it and wrap it; here every op runs once on FakeTensors and is
recorded. Anything doubtful raises `UnsupportedCapture`, and AOTAutograd captures the graph instead. An abandoned capture leaves
no trace: steps that cannot be undone (a function that switches a mode, an op with data-dependent sizes) are rejected before
they run.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.capture.masks import writes
from fusewright.graph.spec import arguments

PLACE = ("stack_trace", "nn_module_stack")
"""Node metadata on the origin of a node."""

_PARTS: dict[Any, Any] = {
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.detach.default: None,
}
"""Views of a part of a tensor, and what puts a value there; None for a view of all of it."""

_UNSAFE_PIECES = (torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default)
"""What gives pieces that may be written as if each had memory of its own (gates of `lstm_cell`); the whole is not read again."""


_METADATA_OPS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in "sym_size sym_stride sym_numel sym_storage_offset size stride numel dim is_contiguous".split()
    if hasattr(getattr(torch.ops.aten, name, None), "default")
)
"""Overloads that only read metadata."""


class UnsupportedCapture(Exception):
    """Why the direct capture might be wrong for a graph."""


def capture(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[GraphModule, frozenset[Node]]:
    """Record `gm` as an ATen graph; also return its constant placeholders. Raises `UnsupportedCapture`."""
    _check_inputs(example_inputs)
    _check_graph(gm)
    recorder = _Recorder(gm, example_inputs)
    return recorder.record(), recorder.constants()


def forward(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Record what `gm` computes, before gradients are traced. Raises `UnsupportedCapture` also where the recorded graph might have
    other gradients: where some end, or where an operator outside the opset might have none."""
    with torch.no_grad():
        _check_inputs(x for x in example_inputs if not isinstance(x, torch.SymInt))
        _check_graph(gm, compat.of_vmap, symbols=True)
        aten = _Forward(gm, example_inputs).record()
    for node in aten.graph.nodes:
        if node.op == "get_attr":
            raise UnsupportedCapture("the graph holds tensors")
        if compat.is_overload(node.target) and ops.canonical(node.target, node.args, node.kwargs) is None:
            raise UnsupportedCapture(f"{node.target} may have no gradient")
    return aten


def _check_inputs(example_inputs: Iterable[Any]) -> None:
    grad = torch.is_grad_enabled()
    for x in example_inputs:
        if not isinstance(x, torch.Tensor):
            raise UnsupportedCapture(f"an input is {type(x).__name__}, not a tensor")
        if type(x) not in (torch.Tensor, torch.nn.Parameter) and not compat.is_fake(x):
            raise UnsupportedCapture(f"an input is of the subclass {type(x).__name__}")
        if x.layout is not torch.strided or x.is_conj() or x.is_neg() or x.is_quantized:
            raise UnsupportedCapture("an input is sparse, quantized or lazily conjugated")
        if grad and x.requires_grad:
            raise UnsupportedCapture("gradients are needed")


def _check_graph(gm: GraphModule, undone: Callable[[Any], bool] = lambda target: False, symbols: bool = False) -> None:
    """Reject a graph with a node that may not be run here, before anything runs. `undone` are functions whose effects a failed
    recording undoes."""
    for node in gm.graph.nodes:
        if node.op == "call_module" or compat.is_higher_order(node.target):
            raise UnsupportedCapture(f"the graph calls {node.target}")
        if node.op == "call_function" and not (compat.computes(node.target) or undone(node.target)):
            raise UnsupportedCapture(f"the graph calls {getattr(node.target, '__name__', node.target)}, which may switch a mode")
        if compat.UNBACKED in node.meta or (not symbols and _symbolic(node.meta.get("example_value"))):
            raise UnsupportedCapture("sizes are symbolic")


def _symbolic(val: Any) -> bool:
    """Whether a traced value is or has a symbolic size or number."""
    if isinstance(val, torch.Tensor):
        return val.layout is torch.strided and any(isinstance(s, torch.SymInt) for s in (*val.shape, *val.stride()))
    if isinstance(val, tuple | list):
        return any(map(_symbolic, val))
    return isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool)


def _doubt_behind(error: BaseException | None) -> UnsupportedCapture | None:
    """The `UnsupportedCapture` behind an error, if torch's code caught it and raised its own."""
    while error is not None and not isinstance(error, UnsupportedCapture):
        error = error.__cause__ or error.__context__
    return error


class _Recorder(Interpreter):
    """Run Dynamo's graph on its own FakeTensors under a dispatch mode that appends each ATen call to a new graph."""

    symbols = False
    """Whether sizes may be symbols."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.out = Graph()
        self.root = torch.nn.Module()
        self.node_of: dict[int, Node] = {}
        self.alive: list[torch.Tensor] = []  # ids are unique only while their objects live
        self.sharers: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Tensors by the memory that they show."""
        self.moved: dict[int, tuple[list[Node], torch.Tensor]] = {}
        """Tensors, by id, that are views of a tensor which was written since: the views that lead there, and the tensor."""
        self.stale: set[int] = set()
        """Tensors, by id, whose memory was changed through a view."""
        self.whole_of: dict[int, int] = {}
        """The memory of pieces that count as tensors of their own, and that of the tensor they are pieces of."""
        self.dense: set[int] = set()
        """The memory of such pieces that were written: it has no gaps, eager's has."""
        self.here: Node | None = None
        self.entered: list[Any] = []
        """The autocast regions entered and not yet left."""
        self.paused = False
        self.inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.examples = list(example_inputs)
        self.fake_mode = self._mode()

    def _mode(self) -> Any:
        for n in self.inputs:
            val = n.meta.get("example_value")
            if compat.is_fake(val):
                return compat.fake_mode_of(val)
        raise UnsupportedCapture("no input has traced metadata")

    def record(self) -> GraphModule:
        torch.clear_autocast_cache()  # holds casts of weights that Dynamo's run made, which this run would read and not record
        fakes = [self._input(n, x) for n, x in zip(self.inputs, self.examples, strict=True)]
        with self.fake_mode, compat.dispatch_mode(self._dispatch), compat.leaving_transforms():
            try:
                returned = self.run(*fakes)
            except Exception as error:
                raise _doubt_behind(error) or error from None
            finally:
                while self.entered:
                    compat.leave_autocast(self.entered.pop())
        flat = returned if isinstance(returned, tuple | list) else (returned,)
        self.out.output(tuple(self._result(v) for v in flat))
        return GraphModule(self.root, self.out)

    def constants(self) -> frozenset[Node]:
        """Parameters and module buffers, whose values last from call to call."""
        nodes = self.out.find_nodes(op="placeholder")
        return frozenset(
            new for new, old, x in zip(nodes, self.inputs, self.examples, strict=True)
            if compat.is_module_state(old, x) and not x.is_inference()
        )  # fmt: skip

    def _input(self, node: Node, example: torch.Tensor) -> torch.Tensor:
        val: Any = node.meta.get("example_value")
        if not compat.is_fake(val):
            val = self.fake_mode.from_tensor(example, static_shapes=True)
        if _symbolic(val) and not self.symbols:
            raise UnsupportedCapture("sizes are symbolic")
        if id(val) in self.node_of:
            raise UnsupportedCapture("two inputs are one tensor")
        new = self.out.placeholder(node.name)
        new.meta.update(val=val, stack_trace=node.meta.get("stack_trace"))
        self._know(val, new)
        found: torch.Tensor = val
        return found

    def _know(self, t: torch.Tensor, node: Node) -> None:
        if id(t) not in self.node_of:
            self.sharers[_storage(t)].append(t)
            self.alive.append(t)
        self.node_of[id(t)] = node

    def _result(self, v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            if _storage(v) in self.dense:
                raise UnsupportedCapture("a piece that was written is returned")
            return self._node(v)
        if v is None or isinstance(v, int | float | bool | str):
            return v
        raise UnsupportedCapture(f"the graph returns {type(v).__name__}")

    def _node(self, t: torch.Tensor) -> Node:
        node = self.node_of.get(id(t))
        if node is None:
            raise UnsupportedCapture("a tensor comes from outside the graph")
        if id(t) in self.stale:
            raise UnsupportedCapture("a tensor is read after its memory was written through another one")
        if id(t) in self.moved:
            way, whole = self.moved.pop(id(t))
            node = self._node(whole)
            for view in reversed(way):
                node = self._made(view.target, node, *view.args[1:])
            self.node_of[id(t)] = node
        return node

    def run_node(self, n: Node) -> Any:
        self.here = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Keep attention whole: torch may select another kernel for FakeTensors than eager does for real tensors."""
        if compat.enters_autocast(target):
            self.entered.append(super().call_function(target, args, kwargs))
            return self.entered[-1]
        if compat.leaves_autocast(target):
            self.entered.remove(args[0])
        if target in compat.CHECKED_IN_PYTHON:
            with compat.python_dispatcher():
                return super().call_function(target, args, kwargs)
        overload = compat.WHOLE.get(target)
        if overload is None or compat.autocast_enabled() or _dropout(args, kwargs):
            return super().call_function(target, args, kwargs)
        self.paused = True
        try:
            result = super().call_function(target, args, kwargs)
        finally:
            self.paused = False
        node = self.out.call_function(overload, *torch.fx.node.map_aggregate((args, dict(kwargs)), self._as_argument))
        node.meta.update(val=result, **self._place())
        self._remember(result, node)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor held by the traced module an attribute of the new graph's root."""
        real = super().get_attr(target, args, kwargs)
        if not isinstance(real, torch.Tensor):
            return real
        if real.requires_grad and torch.is_grad_enabled():
            raise UnsupportedCapture("gradients are needed")
        return self._hold(real, f"constant{len(self.alive)}")

    def _hold(self, real: torch.Tensor, name: str) -> torch.Tensor:
        """Make a tensor an attribute of the new graph's root."""
        if isinstance(real, torch.nn.Parameter):
            self.root.register_parameter(name, real)
        else:
            self.root.register_buffer(name, real, persistent=False)
        fake: torch.Tensor = self.fake_mode.from_tensor(real, static_shapes=True)
        node = self.out.get_attr(name)
        node.meta["val"] = fake
        self._know(fake, node)
        return fake

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused:
            return func(*args, **kwargs)
        if not compat.is_overload(func):
            raise UnsupportedCapture(f"the graph calls {func}")
        if compat.depends_on_data(func, args):
            raise UnsupportedCapture(f"what {func} gives depends on data")
        if ops.writes_statistics(func, args, kwargs):
            raise UnsupportedCapture(f"{func} writes running statistics")
        if func is torch.ops.aten.as_strided_.default:
            return self._restrided(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not compat.is_fake(args[0]):  # torch.tensor of literals
            func, args = torch.ops.aten.lift_fresh_copy.default, (self._hold(args[0], f"{compat.LITERAL}{len(self.alive)}"),)
        written = args[0] if ops.is_mutating(func) else None
        whole = self._whole(written) if isinstance(written, torch.Tensor) else None
        if written is not None:
            func = self._functional(func, written, whole)
        result = func(*args, **kwargs)
        if func in _UNSAFE_PIECES:
            result = [self._apart(r, args[0]) for r in result]
        elif written is not None and _storage(written) in self.whole_of:
            self._densify(written, result)
        if written is not None and not _same_type(result, written, strides=whole is None):
            raise UnsupportedCapture(f"{func} in place would change a type")
        if func.namespace == "prim" or func in _METADATA_OPS:
            return result
        new_args, new_kwargs = torch.fx.node.map_aggregate((args, kwargs), self._as_argument)
        node = self.out.call_function(func, new_args, new_kwargs)
        node.meta["val"] = result
        node.meta.update(self._place())
        if written is not None and whole is not None:
            self._put(node, written, whole)
        elif written is not None:
            self.node_of[id(written)] = node
        if written is not None:
            return written
        self._remember(result, node)
        return result

    def _apart(self, piece: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """A piece as a tensor with memory of its own."""
        before, self.paused = self.paused, True
        try:
            made = torch.empty_strided(piece.shape, piece.stride(), dtype=piece.dtype, device=piece.device)
        finally:
            self.paused = before
        self.whole_of[_storage(made)] = _storage(whole)
        return made

    def _densify(self, piece: torch.Tensor, result: torch.Tensor) -> None:
        """Lay out a piece that is written as its new value is, and let nobody read the tensor that it is a piece of."""
        wholes, node = self.sharers[self.whole_of[_storage(piece)]], self._node(piece)
        if any(self.node_of[id(t)].op != "call_function" for t in wholes):
            raise UnsupportedCapture("a piece of an input is written")
        self.stale.update(map(id, wholes))
        if piece.shape == result.shape and piece.stride() != result.stride():
            before, self.paused = self.paused, True
            try:
                node.meta["val"] = piece.as_strided(piece.shape, piece.stride())  # before the object changes
                piece.as_strided_(result.shape, result.stride())
            finally:
                self.paused = before
            self.dense.add(_storage(piece))

    def _whole(self, written: torch.Tensor) -> torch.Tensor | None:
        """The tensor that `written` is a part of, if the graph made it and `written` is a view of its present value."""
        first = next(iter(self.sharers[_storage(written)]), written)
        made = self._node(first).op == "call_function" and first.is_contiguous()
        return first if made and self._views(written, first) else None

    def _views(self, part: torch.Tensor, whole: torch.Tensor) -> list[Node]:
        """The views that lead from `whole` to `part`, the last one first; none if there is another way."""
        found, node, goal = [], self._node(part), self._node(whole)
        while node is not goal:
            if node.target not in _PARTS or node.kwargs:
                return []
            found.append(node)
            node = node.args[0]  # type: ignore[assignment]
        return found

    def _put(self, value: Node, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write a value into a part of a tensor: `whole` gets a new value, of which its views are made again when they are read."""
        for view in self._views(part, whole):
            scatter = _PARTS[view.target]
            value = value if scatter is None else self._made(scatter, view.args[0], value, *view.args[1:])
        for t in self.sharers[_storage(whole)]:
            if t is whole or id(t) in self.stale or id(t) in self.moved:
                continue
            if way := self._views(t, whole):
                self.moved[id(t)] = way, whole
            else:
                self.stale.add(id(t))
        self.node_of[id(whole)] = value

    def _made(self, target: Any, *args: Any) -> Node:
        node = self.out.call_function(target, args)
        before, self.paused = self.paused, True  # a view may be made again wherever it is read
        try:
            node.meta.update(val=target(*(a.meta["val"] if isinstance(a, Node) else a for a in args)), **self._place())
        finally:
            self.paused = before
        return node

    def _place(self) -> dict[str, Any]:
        """The location in the user's model of the call being recorded."""
        meta = self.here.meta if self.here is not None else {}
        return {k: meta[k] for k in PLACE if meta.get(k) is not None}

    def _functional(self, func: Any, written: Any, whole: torch.Tensor | None) -> Any:
        """The out-of-place form of `add_` and the like, if nobody else can see the write, or all who can are known."""
        op = _out_of_place(func)
        if whole is not None and func is torch.ops.aten.copy_.default:
            return torch.ops.aten.copy.default
        if op is None:
            raise UnsupportedCapture(f"{func} writes in place")
        if whole is None:
            self._check_private(func, written)
        return op

    def _check_private(self, func: Any, written: Any) -> None:
        """Require that the graph made this tensor and nothing shares its memory, so that a write is invisible outside."""
        if not isinstance(written, torch.Tensor) or self._node(written).op != "call_function":
            raise UnsupportedCapture(f"{func} writes in place")
        if len(self.sharers[_storage(written)]) != 1:
            raise UnsupportedCapture(f"{func} writes into a tensor that has views")

    def _restrided(self, tensor: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> torch.Tensor:
        """Handle `as_strided_`, which moves no data: the tensor continues as a view of its old value (torch's pooling to one
        point)."""
        overload = torch.ops.aten.as_strided.default
        self._check_private(torch.ops.aten.as_strided_.default, tensor)
        before = self._node(tensor)
        before.meta["val"] = tensor.as_strided(tensor.shape, tensor.stride())  # before the object changes
        result = overload(before.meta["val"], size, stride, offset)
        tensor.as_strided_(size, stride, offset)
        node = self.out.call_function(overload, (before, *(self._as_argument(a) for a in (size, stride, offset))))
        node.meta.update(val=result, stack_trace=before.meta.get("stack_trace"))
        self.node_of[id(tensor)] = node
        return tensor

    def _as_argument(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return self._node(a)
        if isinstance(a, torch.SymInt) and self.symbols:
            return arguments(self.out, [a])[0]
        if isinstance(a, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnsupportedCapture("sizes are symbolic")
        return a

    def _remember(self, result: Any, node: Node) -> None:
        if isinstance(result, torch.Tensor):
            self._know(result, node)
        elif isinstance(result, tuple | list):
            for k, r in enumerate(result):
                if isinstance(r, torch.Tensor):
                    item = self.out.call_function(operator.getitem, (node, k))
                    item.meta.update(val=r, stack_trace=node.meta.get("stack_trace"))
                    self._know(r, item)
        elif result is not None:
            raise UnsupportedCapture(f"{node.target} gives {type(result).__name__}, which depends on data")


class _Forward(_Recorder):
    """Records what a training step computes before gradients are traced."""

    symbols = True

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        super().__init__(gm, example_inputs)
        self.sized = any(_symbolic(n.meta.get("example_value")) for n in self.inputs)

    def _input(self, node: Node, example: Any) -> Any:
        if not isinstance(example, torch.SymInt):
            return super()._input(node, example)
        new = self.out.placeholder(node.name)
        new.meta["val"] = node.meta["example_value"]
        return new.meta["val"]

    def run_node(self, n: Node) -> Any:
        """Record what AOTAutograd would: dropout as one operator, which draws the same numbers, and with symbolic sizes torch's
        Python forms. C++ forms may ask for sizes as numbers, which fixes them (`matmul` before torch 2.11)."""
        if not self.sized and "dropout" not in getattr(n.target, "__name__", ""):
            return super().run_node(n)
        with compat.python_dispatcher():
            return super().run_node(n)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return self._rewrapped(args[0], func(args[0]))
        if compat.is_overload(func) and ops.is_mutating(func) and not self._writes_here():
            raise UnsupportedCapture(f"{func} in a call that writes nothing itself may be hidden from gradients")
        return super()._dispatch(func, args, kwargs)

    def _rewrapped(self, made: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """What torch's factories return: another object for the tensor that an operator has just made."""
        node = self._node(made)
        found = ops.canonical(node.target, node.args, node.kwargs) if compat.is_overload(node.target) else None
        if found is None or found[0].kind is not ops.Kind.CREATION or len(self.sharers[_storage(made)]) != 1:
            raise UnsupportedCapture("gradients end at a detached tensor")
        del self.node_of[id(made)]
        self.alive.append(result)
        self.sharers[_storage(made)] = [result]
        self.node_of[id(result)] = node
        return result

    def _writes_here(self) -> bool:
        """Whether the call that is being recorded says that it writes."""
        return self.here is not None and writes(self.here)


def _dropout(args: Any, kwargs: Any) -> bool:
    """Whether an attention call uses dropout."""
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def _storage(t: torch.Tensor) -> int:
    """An identity of the memory behind a (fake) tensor."""
    return compat.storage_id(t)


def _same_type(a: Any, b: torch.Tensor, strides: bool = True) -> bool:
    same = isinstance(a, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
    return same and (not strides or a.stride() == b.stride())


_NOT_ELEMENTWISE = frozenset(
    "copy_ set_ as_strided_ resize_ resize_as_ detach_ requires_grad_ t_ transpose_ unsqueeze_ squeeze_".split()
)
"""In-place ops that change more than values: their out-of-place form means something else."""


def _out_of_place(op: Any) -> Any | None:
    """`aten.add.Tensor` for `aten.add_.Tensor`; None for other kinds of mutating ops (out=, copy_, set_, random ones)."""
    base, _, overload = op._schema.name.partition("::")[2], "", op._overloadname
    if op.namespace != "aten" or not base.endswith("_") or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if base in _NOT_ELEMENTWISE:
        return None
    packet = getattr(torch.ops.aten, base[:-1], None)
    names = [] if packet is None else sorted(packet.overloads(), key=lambda name: name != overload)
    # `pow_.Scalar` corresponds to `pow.Tensor_Scalar`: `pow.Scalar` has the same argument names, but a number as its base
    return next((f for f in (getattr(packet, n) for n in names) if _taken(f) == _taken(op)), None)


def _taken(op: Any) -> list[tuple[str, str]]:
    """Names and types of an operator's arguments."""
    return [(a.name, str(a.type)) for a in op._schema.arguments]
