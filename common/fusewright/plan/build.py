"""From a partitioned graph to a plan: fragments and ATen calls in one flat list, constants split off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph import constants
from fusewright.graph.effects import asserts, held_in_order, overload_may_share, writes
from fusewright.graph.view import GraphIndex, is_op, is_projection, qualified_name, source_line
from fusewright.interface import Compiled, DevicePolicy, Fragment, OpView, Region, TensorSpec, Value
from fusewright.ops.states import stated
from fusewright.plan.arithmetic import PYTHON
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, Ref, reads, refs
from fusewright.plan.labels import Origin
from fusewright.plan.order import topological


@dataclass
class Plan:
    """A compiled graph. `inputs` are value ids in calling order; `outputs` are Refs or plain values.

    `prepare` runs when a weight is first seen or has changed; it reads `prepare_inputs` and makes `prepare_outputs`.
    `attributes` are the tensors held by the traced graph, with their names. `scalars` names the size symbols that inputs and
    results carry as numbers. `kernels` are the loop kernels of its launches by structural hash. `policy` is that of the
    backend. `alone`: no op is long enough to share with other threads. `trains`: autograd receives its results.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    instructions: list[Instruction]
    prepare: list[Instruction]
    prepare_inputs: tuple[int, ...]
    prepare_outputs: tuple[int, ...]
    specs: dict[int, TensorSpec]
    attributes: dict[int, tuple[str, Any]] = field(default_factory=dict)
    comments: dict[int, str] = field(default_factory=dict)
    scalars: dict[int, str] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    trains: bool = False
    policy: DevicePolicy = field(default=DevicePolicy(), compare=False)
    doubted: frozenset[int] = field(default=frozenset(), compare=False)
    """Values whose metadata was found to be untrue more than once; such plans are not kept on disk."""
    origins: dict[int, Origin] = field(default_factory=dict, compare=False)
    """Labels for profilers, by the first value that an instruction makes."""
    trace: str = field(default="", compare=False)
    """Also for profilers: the stack trace of the first node of the graph."""


@dataclass
class _Item:
    """A unit of the instruction order: one node, or one region."""

    position: int
    nodes: tuple[Node, ...]
    instructions: tuple[Instruction, ...]


def build(index: GraphIndex, members: Sequence[Sequence[Node]], compiled: Sequence[tuple[Region, Compiled]]) -> Plan:
    """Assemble the plan of one graph."""
    ordered = _order(index, _items(index, members, compiled))
    graph = index.graph
    (output,) = graph.find_nodes(op="output")
    outputs = _outputs(index, output.args[0])
    flat = _read([i for item in ordered for i in item.instructions], outputs)
    inputs = tuple(index.id(n) for n in graph.nodes if n.op == "placeholder")
    specs = {v.id: v.spec for n in graph.nodes if n.op != "output" for v in index.values(n) if v.spec is not None}
    specs.update(index.temporaries)
    prepare, main = _split(index, flat, outputs, specs)
    prepare, leaves, kept = _needed(prepare, main, inputs)
    held = graph.find_nodes(op="get_attr")
    attributes = {index.id(n): (str(n.target), attribute(graph.owning_module, str(n.target))) for n in held}
    comments = {view.id: source_line(n) for n, view in index.ops.items()}
    scalars = {
        i: v.dim.expr.name
        for n in graph.nodes
        if n.op != "output" and not is_projection(n)
        for i, v in [(v.id, v) for v in index.values(n)]
        if v.dim and v.dim.expr.name
    }
    kernels = {h: k for _, result in compiled if isinstance(result, Fragment) for h, k in result.kernels.items()}
    trains = index.phase != "infer"
    return Plan(inputs, outputs, main, prepare, leaves, kept, specs, attributes, comments, scalars, kernels, trains=trains)


def attribute(module: Any, target: str) -> Any:
    """The attribute of a traced module under a dotted name."""
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _read(instructions: Sequence[Instruction], outputs: Sequence[Any]) -> list[Instruction]:
    """Drop arithmetic of numbers that nobody reads, because kernels do it themselves."""
    wanted = {r.id for r in outputs if isinstance(r, Ref)}
    kept: list[Instruction] = []
    for i in reversed(instructions):
        if not (isinstance(i, Call) and i.target.startswith("py::") and wanted.isdisjoint(i.outs)):
            kept.append(i)
            wanted.update(reads(i))
    return kept[::-1]


def _outputs(index: GraphIndex, returned: Any) -> tuple[Any, ...]:
    values = returned if isinstance(returned, tuple | list) else (returned,)
    return tuple(Ref(index.id(v)) if isinstance(v, Node) else v for v in values)


def to_refs(index: GraphIndex, arg: Any) -> Any:
    """Convert an FX argument to an instruction's argument."""
    if isinstance(arg, Node):
        return Ref(index.id(arg))
    if isinstance(arg, tuple | list):
        return tuple(to_refs(index, a) for a in arg)
    return arg


def aten_call(index: GraphIndex, node: Node) -> Call:
    """The instruction that runs an op node exactly as eager does."""
    return _call(index, node, node.target, node.args, node.kwargs, op_id=index.op_id(node))


def _call(
    index: GraphIndex, node: Node, operator: Any, given: Sequence[Any], named: Mapping[str, Any], **more: Any
) -> Call:
    """The call of an operator that makes the values of a node. Trailing defaults are left out, which is faster to parse."""
    target, args = concrete(operator, given), list(given)
    formals = target._schema.arguments
    while args and _is_default(formals[len(args) - 1], args[-1]):
        args.pop()
    required = {f.name for f in formals if not f.has_default_value()}
    outs = index.values(node)
    packed = isinstance(node.meta.get("val"), tuple | list)
    kwargs = tuple((k, to_refs(index, v)) for k, v in named.items() if v is not None or k in required)
    ids = tuple(v.id for v in outs)
    return Call(qualified_name(target), to_refs(index, tuple(args)), ids, kwargs, packed=packed, **more)


def call_of(op: OpView) -> Call:
    """The instruction that runs an op as eager does, from its view alone, whose values a backend may have replaced."""
    operator: Any = concrete(operator_of(op.target), op.args)
    formals = operator._schema.arguments
    given = [_view_ref(a) for a in op.args]
    positional = [a for a, f in zip(given, formals, strict=True) if not f.kwarg_only]
    while positional and _is_default(formals[len(positional) - 1], positional[-1]):
        positional.pop()
    named = tuple((f.name, a) for a, f in zip(given, formals, strict=True) if f.kwarg_only and not _is_default(f, a))
    returns = operator._schema.returns
    packed = len(returns) != 1 or _is_list(returns[0].type)
    outs = tuple(v.id for v in op.outs)
    return Call(qualified_name(operator), tuple(positional), outs, named, packed=packed, op_id=op.id)


def _is_list(kind: Any) -> bool:
    """Whether a schema type is a list, as `chunk` and `unbind` return, even of one tensor."""
    return bool(kind.kind() == "ListType")


def _view_ref(a: Any) -> Any:
    if isinstance(a, Value):
        return Ref(a.id)
    return tuple(_view_ref(x) for x in a) if isinstance(a, tuple) else a


def _is_default(formal: Any, given: Any) -> bool:
    """Whether the argument can be left out. 0, False, 0.0 and -0.0 are equal in Python but not to an op."""
    if isinstance(given, Node | Ref) or not formal.has_default_value():
        return False
    default = formal.default_value
    given = list(given) if isinstance(given, tuple) else given
    return type(default) is type(given) and repr(default) == repr(given)


def concrete(target: Any, args: Sequence[Any]) -> Any:
    """The overload that takes these arguments: canonical rows pass numbers where the schema has tensors (`ge.Tensor(x, 0)`)."""
    formals = target._schema.arguments
    numbers = [_is_number(a) and "Tensor" in str(f.type) for a, f in zip(args, formals, strict=False)]
    if not any(numbers):
        return target
    names = [f.name for f in formals]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        theirs = other._schema.arguments
        fits = [
            n == ("Tensor" not in str(t.type))
            for n, f, t in zip(numbers, formals, theirs, strict=False)
            if "Tensor" in str(f.type)
        ]
        if [t.name for t in theirs] == names and all(fits):
            return other
    return target


def _is_number(a: Any) -> bool:
    return isinstance(a, int | float | bool | complex)


def _python_call(index: GraphIndex, node: Node) -> Instruction:
    """The instruction for a node that is not a torch operator: size arithmetic, or a higher-order op that eager runs."""
    outs = tuple(v.id for v in index.values(node))
    target: Any = node.target
    if (found := stated(node)) is not None:
        generator = to_refs(index, found.generator)
        return _call(index, node, found.operator, found.args, found.kwargs, generator=generator)
    module = getattr(target, "__module__", "")
    module = {"_operator": "operator"}.get(module, module)
    name = f"py::{module}.{getattr(target, '__name__', '')}"
    if name in PYTHON and not node.kwargs:
        return Call(name, to_refs(index, node.args), outs)
    spec_args, tree = torch.utils._pytree.tree_flatten((node.args, dict(node.kwargs)))
    many = isinstance(node.meta.get("val"), tuple | list)

    def run(*flat: Any) -> Sequence[Any]:
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, tree)
        result = target(*args, **kwargs)
        return result if many else (result,)

    return CallPython(run, tuple(to_refs(index, a) for a in spec_args), outs, name=str(target))


def _items(
    index: GraphIndex, members: Sequence[Sequence[Node]], compiled: Sequence[tuple[Region, Compiled]]
) -> list[_Item]:
    position = {n: i for i, n in enumerate(index.graph.nodes)}
    in_region = {n for m in members for n in m}
    items = [
        _Item(position[nodes[0]], tuple(nodes), _region_instructions(region, result))
        for nodes, (region, result) in zip(members, compiled, strict=True)
    ]
    for node in index.graph.nodes:
        if node.op == "call_function" and node not in in_region and not is_projection(node):
            instruction = aten_call(index, node) if is_op(node) else _python_call(index, node)
            items.append(_Item(position[node], (node,), (instruction,)))
        elif node.op in ("call_module", "call_method"):
            raise NotImplementedError(f"a traced graph holds a {node.op} node: {node.format_node()}")
    return items


def _region_instructions(region: Region, result: Compiled) -> tuple[Instruction, ...]:
    if isinstance(result, Fragment):
        return result.instructions
    ids = tuple(op.id for op in region.ops)
    inputs = tuple(Ref(v.id) for v in region.inputs)
    return (CallPython(result.fn, inputs, tuple(v.id for v in region.outputs), region.name, ids),)


def _order(index: GraphIndex, items: list[_Item]) -> list[_Item]:
    """Topological order of the items, as close to the graph's own order as regions allow; effects keep their order."""
    items.sort(key=lambda i: i.position)
    owner = {n: k for k, item in enumerate(items) for n in item.nodes}
    waits: list[set[int]] = [set() for _ in items]
    effects: list[int] = []
    before = held_in_order(index.graph)
    for k, item in enumerate(items):
        for node in item.nodes:
            waits[k].update(_owners(node.all_input_nodes, owner))
            if writes(node):
                effects.append(k)
            if node in before:
                waits[k].add(owner[before[node]])
        waits[k].discard(k)
    _behind_assertions(index, items, waits)
    for k in effects:  # a write waits for everything before it, and everything after waits for the write
        waits[k].update(j for j in range(len(items)) if items[j].position < items[k].position)
        for j in range(len(items)):
            if items[j].position > items[k].position:
                waits[j].add(k)
    return [items[k] for k in topological(waits)]  # the graph's own assertions come first: their messages are eager's


def _behind_assertions(index: GraphIndex, items: Sequence[_Item], waits: Sequence[set[int]]) -> None:
    """Make items wait for the assertions before them in the graph; a region's position is that of its last op."""
    checks = [(item.position, k) for k, item in enumerate(items) if asserts(item.nodes[0])]
    if not checks:
        return
    position = {n: i for i, n in enumerate(index.graph.nodes)}
    for k, item in enumerate(items):
        last = max(map(position.__getitem__, item.nodes))
        waits[k].update(a for at, a in checks if at < last)


def _owners(nodes: Iterable[Node], owner: Mapping[Node, int]) -> Iterable[int]:
    for n in nodes:
        source = n.args[0] if is_projection(n) else n
        if source in owner:
            yield owner[source]  # type: ignore[index]


@lru_cache(1024)
def _parts(target: str) -> tuple[str, str, str]:
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return namespace, name, overload or "default"


def operator_of(target: str) -> Any | None:
    """The OpOverload of "aten::add.Tensor" or "mkldnn::_linear_pointwise"; None for a Python function. AttributeError for
    anything else: a name reaches no other part of torch."""
    namespace, name, overload = _parts(target)
    if namespace == "py":
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if not compat.is_overload(found):
        raise AttributeError(f"{target!r} is no operator")
    return found


def _split(
    index: GraphIndex, flat: Sequence[Instruction], outputs: tuple[Any, ...], specs: dict[int, TensorSpec]
) -> tuple[list[Instruction], list[Instruction]]:
    """Split off the instructions that make constants or that a backend wants prepared; the others run at each call."""
    if index.phase != "infer":
        return [], [_at_each_call(i) for i in flat]
    held = (index.id(n) for n in index.graph.nodes if n.op in ("placeholder", "get_attr"))
    known = {i for i in held if i in index.constants}  # derived constants are added as they are made
    escapes = escaping(flat, outputs)
    prepare: list[Instruction] = []
    main: list[Instruction] = []
    for i in flat:
        made_of_constants = known.issuperset(reads(i)) and not escapes & set(i.outs)
        if made_of_constants and _makes_constants(i, index, specs):
            prepare.append(i)
            known.update(i.outs)
        else:
            main.append(_at_each_call(i))
    return prepare, main


def _at_each_call(i: Instruction) -> Instruction:
    return replace(i, prepare=False) if isinstance(i, Call) and i.prepare else i


def _makes_constants(i: Instruction, index: GraphIndex, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether an instruction belongs in `prepare`: it makes constants of the graph, a backend asks for it, or it makes small
    temporaries."""
    if isinstance(i, CallPython) or not i.outs:
        return False
    if isinstance(i, Call) and i.prepare:
        return _repeatable(i, known=True)
    values = [o for o in i.outs if index.node_by_value(o) is not None]
    if values:
        return index.constants.issuperset(values)
    made, given = ([specs[v] for v in ids if v in specs] for ids in (i.outs, set(reads(i))))
    again = not isinstance(i, Call) or _repeatable(i, known=False)
    return again and constants.fits(made, given)


def _repeatable(i: Call, known: bool) -> bool:
    return constants.repeatable(operator_of(i.target), i.args, dict(i.kwargs), known)


def escaping(flat: Sequence[Instruction], outputs: tuple[Any, ...]) -> set[int]:
    """Ids whose memory the caller receives or the plan writes: outputs, values written in place, and all that these may be
    views of."""
    escapes = {r.id for r in outputs if isinstance(r, Ref)}
    for i in flat:
        if isinstance(i, Call):
            escapes.update(written_by(i))
        elif isinstance(i, Launch):
            escapes.update(i.written)
    for i in reversed(flat):
        if escapes & set(i.outs):
            escapes.update(shared_by(i))
    return escapes


def generators(plan: Plan) -> frozenset[int]:
    """Ids of the inputs that calls draw random numbers from."""
    calls = (i for i in plan.instructions if isinstance(i, Call))
    return frozenset(i.generator.id for i in calls if i.generator is not None)


def written_values(plan: Plan) -> set[int]:
    """Ids of the values that a run of the plan writes in place, and of all that these may be views of."""
    found = {v for i in plan.instructions if isinstance(i, Call) for v in written_by(i)}
    for i in reversed(plan.instructions):
        if found & set(i.outs):
            found.update(shared_by(i))
    return found


def written_by(call: Call) -> Iterable[int]:
    """Ids of the arguments that an op writes in place."""
    operator = operator_of(call.target)
    if operator is None or not ops.is_mutating(operator):
        return
    given = dict(call.kwargs)
    for k, formal in enumerate(operator._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            yield from refs(call.args[k] if k < len(call.args) else given.get(formal.name))


def may_alias(i: Instruction) -> bool:
    """Whether a result of the instruction may share memory with an input. Unknown ops may."""
    if isinstance(i, Launch):
        return False  # an output takes over an input's memory only when that input is dead: see memory.place
    if isinstance(i, CallPython):
        return True
    operator = operator_of(i.target)
    if operator is None:
        return False
    if operator.namespace in ("mkldnn", "mkl"):
        return bool(operator._schema.is_mutable)
    return overload_may_share(operator)


def shared_by(i: Instruction) -> Sequence[int]:
    """Ids of the inputs whose memory a result of the instruction may share."""
    if not may_alias(i):
        return ()
    operator = operator_of(i.target) if isinstance(i, Call) else None
    if isinstance(i, Call) and operator is not None and ops.is_mutating(operator):
        written, returns = set(written_by(i)), operator._schema.returns
        if len(written) == len(returns) == 1 and returns[0].alias_info is not None:
            return tuple(written)  # it returns what it writes
    return tuple(reads(i))


def _needed(
    prepare: list[Instruction], main: Sequence[Instruction], inputs: tuple[int, ...]
) -> tuple[list[Instruction], tuple[int, ...], tuple[int, ...]]:
    """Drop instructions of `prepare` whose results are unused; return the rest, their input weights, and the results that the
    plan reads."""
    wanted = {r for i in main for r in reads(i)}
    kept: list[Instruction] = []
    for i in reversed(prepare):
        if wanted & set(i.outs):
            kept.append(i)
            wanted.update(reads(i))
    kept.reverse()
    made = {o for i in kept for o in i.outs}
    used_by_main = {r for i in main for r in reads(i)}
    read_there = {r for i in kept for r in reads(i)}
    leaves = tuple(i for i in inputs if i in read_there)
    return kept, leaves, tuple(sorted(made & used_by_main))
