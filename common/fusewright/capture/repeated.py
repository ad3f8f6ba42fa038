"""Alike steps of a loop as one call while gradients are traced, so that the gradient of one step is traced once.

`rewrite.loops.repeated` puts a call of `fusewright::repeated` in place of the steps of a training graph. Autograd sees an operator
whose gradient takes the steps in the opposite order. Of each kind of step (which of its results have gradients) one is traced,
between marks. In the joint graph, before the cut, all steps are written out again, each a copy of what was traced. Nothing runs
these operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx import Graph, GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.retrace import downstream, fake_like, infer, same_kind, viewable
from fusewright.graph.spec import value_of
from fusewright.storage import lazy

aten = torch.ops.aten

_ALIASES = (aten.alias.default, aten.detach.default)


@dataclass(eq=False)
class Body:
    """One step: a graph of ATen calls from the states before it, what it alone reads, and what all steps read, to its results, the
    states after it first."""

    graph: Graph
    states: int
    columns: int
    shared: int
    results: int
    steps: int
    key: int = field(default_factory=itertools.count().__next__)
    traced: list[_Traced] = field(default_factory=list)
    """What the gradient of the loop consists of, the last step first."""
    given: list[bool] = field(default_factory=list)
    """Which results of all steps have gradients from outside."""

    def __post_init__(self) -> None:
        BODIES[self.key] = self

    @property
    def inputs(self) -> int:
        return self.states + self.columns + self.shared

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return list(GraphModule({}, self.graph)(*inputs))

    def follow(self, known: Sequence[bool]) -> list[bool]:
        """Which results depend on the inputs that are marked, through values that have gradients."""
        depends: dict[Node, bool] = {}
        placeholders = iter(known)
        for n in self.graph.nodes:
            if n.op == "placeholder":
                depends[n] = next(placeholders)
            elif n.op == "call_function":
                depends[n] = _differentiable(value_of(n)) and any(depends[i] for i in n.all_input_nodes)
        (output,) = self.graph.find_nodes(op="output")
        return [depends[n] for n in output.args[0]]


@dataclass(frozen=True)
class _Traced:
    """One step's gradient: which of its results have one, and the places of the gradients of its inputs among all that was traced
    (None where there is none)."""

    pattern: tuple[bool, ...]
    found: tuple[int | None, ...]


BODIES: WeakValueDictionary[int, Body] = WeakValueDictionary()
"""The steps of the graphs in work, which hold them."""


def _differentiable(v: Any) -> bool:
    if isinstance(v, tuple | list):
        return any(map(_differentiable, v))
    return isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())


# ---- the operators, as autograd and tracing see them


def _results(states: Sequence[Any], columns: Sequence[Any], shared: Sequence[Any], key: int) -> list[Any]:
    """The results of all steps, those of a step side by side."""
    body = BODIES[key]
    (output,) = body.graph.find_nodes(op="output")
    return [_empty(value_of(n)) for _ in range(body.steps) for n in output.args[0]]


def _empty(like: Any) -> Any:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep one step's inputs, of which only the metadata is read, and find out which results have gradients."""
    states, columns, shared, ctx.key = inputs
    body = BODIES[ctx.key]
    ctx.save_for_backward(*states, *columns[: body.columns], *shared, *output[: body.results])
    before, given, without = [t.requires_grad for t in states], [t.requires_grad for t in shared], list[Any]()
    ctx.wanted = list(before)
    for t in range(body.steps):
        own = [c.requires_grad for c in columns[t * body.columns : (t + 1) * body.columns]]
        after = body.follow([*before, *own, *given])
        without += [output[t * body.results + k] for k, a in enumerate(after) if not a]
        before = after[: body.states]
        ctx.wanted = [a or b for a, b in zip(ctx.wanted, before, strict=True)]
    ctx.wanted += [any(c.requires_grad for c in columns[k :: body.columns]) for k in range(body.columns)] + given
    ctx.mark_non_differentiable(*without)


def _gradients(ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of all inputs: traced for one step of each kind, summed over the steps in the opposite order."""
    body, traced, of_states = BODIES[ctx.key], list[Any](), [None] * BODIES[ctx.key].states
    body.traced.clear()
    body.given = [g is not None for g in grads]
    kinds: dict[tuple[bool, ...], _Traced] = {}
    for t in reversed(range(body.steps)):
        given = grads[t * body.results : (t + 1) * body.results]
        later = [*of_states, *[None] * (body.results - body.states)]
        pattern = tuple(g is not None or d is not None for g, d in zip(given, later, strict=True))
        if pattern not in kinds:
            like = [d if g is None else g for g, d in zip(given, later, strict=True)]
            kinds[pattern] = _trace(ctx, body, like, pattern, traced)
        body.traced.append(kinds[pattern])
        of_states = [None if k is None else traced[k] for k in kinds[pattern].found[: body.states]]
    found = list(gradients_op([g for g in grads if g is not None], traced, ctx.key)) if traced else []
    places = _places(body)
    states, columns, shared = ([found[places.index(p)] if p in places else None for p in part] for part in _inputs(body))
    return states, columns, shared, None


def _trace(ctx: Any, body: Body, like: Sequence[Any], pattern: tuple[bool, ...], traced: list[Any]) -> _Traced:
    """Trace the gradient of one step; what is traced joins `traced`."""
    inputs, results = ctx.saved_tensors[: body.inputs], ctx.saved_tensors[body.inputs :]
    if not any(pattern):
        return _Traced(pattern, (None,) * body.inputs)
    leaves = [mark_op(x, k).detach().requires_grad_(w) for k, (x, w) in enumerate(zip(inputs, ctx.wanted, strict=True))]
    with torch.enable_grad():
        after = body.run(leaves)
    pairs = [(n, mark_op(results[k] if g is None else g, body.inputs + k))
             for k, (n, g) in enumerate(zip(after, like, strict=True)) if pattern[k] and n.requires_grad]  # fmt: skip
    wanted = [x for x in leaves if x.requires_grad]
    outs, tangents = zip(*pairs, strict=True) if pairs else ((), ())
    found = iter(torch.autograd.grad(outs, wanted, tangents, allow_unused=True) if pairs and wanted else ())
    places = list[int | None]()
    for x in leaves:
        g = next(found, None) if x.requires_grad else None
        places.append(None if g is None else len(traced))
        traced += [] if g is None else [g]
    traced += [n.detach() for n in after]  # so that a graph holds all of the step
    return _Traced(pattern, tuple(places))


def _inputs(body: Body) -> Iterator[list[tuple[int, int]]]:
    """States, columns and shared inputs: each as a step and the place among the inputs of a step."""
    yield [(0, k) for k in range(body.states)]
    yield [(t, body.states + k) for t in range(body.steps) for k in range(body.columns)]
    yield [(0, body.states + body.columns + k) for k in range(body.shared)]


def _places(body: Body) -> list[tuple[int, int]]:
    """The inputs that have gradients, as in `_inputs`."""
    steps = dict(zip(reversed(range(body.steps)), body.traced, strict=True))
    first = body.states + body.columns

    def has(t: int, k: int) -> bool:
        return any(s.found[k] is not None for s in body.traced) if k >= first else steps[t].found[k] is not None

    return [p for part in _inputs(body) for p in part if has(*p)]


def _of_inputs(grads: Sequence[Any], traced: Sequence[Any], key: int) -> list[Any]:
    """The gradients of the inputs at `_places`."""
    body = BODIES[key]
    steps = list(reversed(body.traced))
    first = body.states + body.columns
    sources = [next(s for s in body.traced if s.found[k] is not None) if k >= first else steps[t] for t, k in _places(body)]
    return [_empty(traced[s.found[k]]) for s, (_, k) in zip(sources, _places(body), strict=True)]  # type: ignore[index]


_library = torch.library.Library("fusewright", "FRAGMENT")
_library.define("repeated(Tensor[] states, Tensor[] columns, Tensor[] shared, int key) -> Tensor[]")
_library.define("repeated_gradients(Tensor[] grads, Tensor[] traced, int key) -> Tensor[]")
_library.define("repeated_mark(Tensor like, int place) -> Tensor")
repeated_op = torch.ops.fusewright.repeated.default
gradients_op = torch.ops.fusewright.repeated_gradients.default
mark_op = torch.ops.fusewright.repeated_mark.default
torch.library.register_fake("fusewright::repeated", _results, lib=_library)
torch.library.register_fake("fusewright::repeated_gradients", _of_inputs, lib=_library)
torch.library.register_fake("fusewright::repeated_mark", lambda like, place: _empty(like), lib=_library)
torch.library.register_autograd("fusewright::repeated", _gradients, setup_context=_keep, lib=_library)


# ---- the steps, written out


def write_out(graph: Graph) -> None:
    """Replace the calls in a joint graph, in place, by copies of what was traced."""
    calls = graph.find_nodes(op="call_function", target=repeated_op)
    if not calls:
        return
    gradients = {n.args[-1]: n for n in graph.find_nodes(op="call_function", target=gradients_op)}
    changed = [n for call in calls for n in _Written(graph, BODIES.pop(call.args[-1]), call, gradients.get(call.args[-1])).all()]
    drop_dead_code(graph)
    downstream(graph, *(n for n in changed if n.users))


@dataclass
class _Written:
    """Writes out one loop."""

    graph: Graph
    body: Body
    call: Node
    gradients: Node | None
    known: dict[Any, Any] = field(default_factory=dict)
    """Metadata of results, by the function and the metadata of its arguments."""
    one: dict[Node, Any] = field(default_factory=dict)
    """The node that stands for all that compute the same of a step's inputs; the place of an input for its mark."""
    forward: dict[Node, None] = field(default_factory=dict)
    """One step without its gradient."""
    same: dict[Any, Node] = field(default_factory=dict)
    behind: dict[Node, list[Node]] = field(default_factory=dict)
    """What the gradient of an input is computed from, besides what a step computes."""
    copies: list[dict[Any, Any]] = field(default_factory=list)
    """By step, the copies of nodes, and what is known at the places of inputs and gradients."""

    def all(self) -> Iterator[Node]:
        """Write all steps; yield the nodes that have other metadata than what they replace."""
        results = self._step()
        with self.graph.inserting_before(self.call):
            found = self._forward(results)
        yield from self._replace(self.call, found)
        if self.gradients is not None:
            with self.graph.inserting_before(self.gradients):
                found = self._backward()
            yield from self._replace(self.gradients, found)

    def _replace(self, call: Node, found: Sequence[Any]) -> Iterator[Node]:
        for item in list(call.users):
            new = found[item.args[1]]  # type: ignore[index]
            if not same_kind(value_of(item), value_of(new)):
                yield new
            item.replace_all_uses_with(new)
            self.graph.erase_node(item)
        self.graph.erase_node(call)

    # -- what was traced

    def _step(self) -> list[Any]:
        """Gather what is computed without gradients; return the results of a step."""
        if self.gradients is None:
            return self._as_recorded()
        traced: Any = self.gradients.args[1]
        steps = {s.pattern: s for s in self.body.traced if any(s.pattern)}
        results: list[Any] = []
        end = 0
        for s in steps.values():  # those of a step lie side by side, its results last
            start, end = end, end + sum(k is not None for k in s.found) + self.body.results
            results = results or list(traced[end - self.body.results : end])
            self._gather(traced[start:end])
        return [self.one[n] for n in results]

    def _as_recorded(self) -> list[Any]:
        (output,) = self.body.graph.find_nodes(op="output")
        for k, n in enumerate(self.body.graph.find_nodes(op="placeholder")):
            self.one[n] = k
        self.forward = {n: None for n in self.body.graph.nodes if n.op == "call_function"}
        self.one |= {n: n for n in self.forward}
        return [self.one[n] for n in output.args[0]]

    def _gather(self, wanted: Sequence[Node]) -> None:
        for n in _ancestors(wanted):
            if n in self.one:
                continue
            if n.target is mark_op:
                self.one[n] = n.args[1]
            elif n.target in _ALIASES:
                self.one[n] = self.one[n.all_input_nodes[0]]
            else:
                self.one[n] = self.same.setdefault(_key(n, self.one), n)
                if self.one[n] is n and not self._of_gradient(n):
                    self.forward[n] = None

    def _of_gradient(self, n: Node) -> bool:
        """Whether a node is computed from gradients of results."""
        read = [self.one[i] for i in n.all_input_nodes]
        return any(x >= self.body.inputs if isinstance(x, int) else x not in self.forward for x in read)

    # -- copies

    def _copy(self, n: Node, copies: dict[Any, Any], like: Node) -> Node:
        args, kwargs = torch.fx.node.map_arg((n.args, dict(n.kwargs)), lambda i: copies[self.one[i]])
        return self._call(n.target, args, kwargs, like)

    def _call(self, target: Any, args: Any, kwargs: Any, like: Node) -> Node:
        new = self.graph.call_function(target, args, kwargs)
        new.meta.update({k: v for k, v in like.meta.items() if k != "val"})
        new.meta["val"] = self._value(new)
        return new

    def _value(self, n: Node) -> Any:
        key = _key(n, {i: _kind(value_of(i)) for i in n.all_input_nodes})
        if key not in self.known:
            if n.target is aten.view.default and not viewable(*n.args):
                n.target = aten.reshape.default
            self.known[key] = n.target, infer(n)
        n.target, val = self.known[key]
        return _fresh(val)

    def _forward(self, results: Sequence[Any]) -> list[Any]:
        states, columns, shared, _ = self.call.args
        found, b = list[Any](), self.body
        for t in range(b.steps):
            inputs = [*states, *columns[t * b.columns : (t + 1) * b.columns], *shared]  # type: ignore
            copies: dict[Any, Any] = dict(enumerate(inputs))
            for n in self.forward:
                copies[n] = self._copy(n, copies, self.call)
            found += (after := [copies[n] for n in results])
            states = after[: b.states]
            self.copies.append(copies)
        return found

    def _backward(self) -> list[Any]:
        assert self.gradients is not None
        given: Any = iter(self.gradients.args[0])  # type: ignore[arg-type]
        grads = [next(given) if g else None for g in self.body.given]
        traced: Any = self.gradients.args[1]
        b = self.body
        found: dict[tuple[int, int], Any] = {}
        of_states: list[Any] = [None] * b.states
        for t, s in zip(reversed(range(b.steps)), b.traced, strict=True):
            copies = self.copies[t]
            later = [*of_states, *[None] * (b.results - b.states)]
            for k, pair in enumerate(zip(grads[t * b.results : (t + 1) * b.results], later, strict=True)):
                copies[b.inputs + k] = self._sum(*pair)
            of_inputs = [None if k is None else self._gradient(traced[k], copies) for k in s.found]
            of_states = of_inputs[: b.states]
            for k, g in enumerate(of_inputs[b.states :], b.states):
                at = (t if k < b.states + b.columns else 0, k)
                found[at] = self._sum(found.get(at), g)
        found |= {(0, k): g for k, g in enumerate(of_states)}
        return [found[p] for p in _places(b)]

    def _gradient(self, n: Node, copies: dict[Any, Any]) -> Any:
        """A copy of the gradient of one input, and of what it needs."""
        assert self.gradients is not None
        if n not in self.behind:
            found = dict.fromkeys(self.one[i] for i in _ancestors([n]))
            self.behind[n] = [i for i in found if isinstance(i, Node) and i not in self.forward]
        for i in self.behind[n]:
            if i not in copies:
                copies[i] = self._copy(i, copies, self.gradients)
        return copies[self.one[n]]

    def _sum(self, a: Any, b: Any) -> Any:
        if a is None or b is None:
            return b if a is None else a
        assert self.gradients is not None
        return self._call(aten.add.Tensor, (a, b), {}, self.gradients)


def _ancestors(nodes: Sequence[Node]) -> list[Node]:
    """The nodes and all that they are computed from, marks the first, in order."""
    found, todo = set[Node](), list(nodes)
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += [] if n.target is mark_op else n.all_input_nodes
    return sorted(found)


def _key(n: Node, of: Any) -> Any:
    """What tells apart calls of other functions or arguments."""

    def known(i: Node) -> Any:
        return "input", id(of[i]) if isinstance(of[i], Node) else of[i]

    args, kwargs = torch.fx.node.map_arg((n.args, dict(n.kwargs)), known)
    return n.target, repr(args), repr(kwargs)


def _kind(val: Any) -> Any:
    if isinstance(val, tuple | list):
        return tuple(map(_kind, val))
    if not isinstance(val, torch.Tensor):
        return val
    return val.dtype, val.device, tuple(val.shape), tuple(val.stride()), lazy(val)


def _fresh(val: Any) -> Any:
    if isinstance(val, tuple | list):
        return type(val)(map(_fresh, val)) if type(val) in (tuple, list) else tuple(map(_fresh, val))
    if not isinstance(val, torch.Tensor):
        return val
    return compat.lazy_view(fake_like(val), state) if (state := lazy(val)) else fake_like(val)

