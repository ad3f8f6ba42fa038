"""What every region graph keeps to, as rules. They run after each pass over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fusewright import ops
from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import RegionError, RegionGraph

Rule = Callable[[RegionGraph], Iterator[str]]


def _unique(g: RegionGraph) -> Iterator[str]:
    """An op has one place, a value one maker, and inputs of the region none."""
    given = {v.id for v in g.inputs}
    seen: set[int] = set()
    for op in g:
        for o in op.outs:
            if o.id in seen or o.id in given:
                yield f"value {o.id} is made again by {_word(op)}"
            seen.add(o.id)
        if not op.outs:
            yield f"{_word(op)} makes nothing"


def _closed(g: RegionGraph) -> Iterator[str]:
    """What an op reads is an input of the region, or made in it."""
    there = {v.id for v in g.inputs} | {o.id for op in g for o in op.outs}
    yield from (f"{_word(op)} reads {v.id}, which nobody makes" for op in g for v in op.inputs() if v.id not in there)


def _in_order(g: RegionGraph) -> Iterator[str]:
    """What an op reads is an input of the region or made before it."""
    there = {v.id for v in g.inputs}
    for op in g:
        yield from (f"{_word(op)} reads {v.id}, which is not made before it" for v in op.inputs() if v.id not in there)
        there.update(o.id for o in op.outs)


def _outputs(g: RegionGraph) -> Iterator[str]:
    there = {v.id for v in g.inputs} | {o.id for op in g for o in op.outs}
    yield from (f"output {v.id} is made by nobody" for v in g.outputs if v.id not in there)


def _same_types(g: RegionGraph) -> Iterator[str]:
    """A value is the same to whoever makes, reads or gives it."""
    known = {v.id: v for v in (*g.inputs, *(o for op in g for o in op.outs))}
    readers: list[tuple[str, Iterable[Value]]] = [(_word(op), op.inputs()) for op in g]
    for who, values in (*readers, ("the region", g.outputs)):
        yield from (f"{who} takes {v.id} for {v.spec}" for v in values if _type(known.get(v.id, v)) != _type(v))


def _type(v: Value) -> object:
    """Whether it is a weight is not all readers' business."""
    return v.dim if v.spec is None else (v.spec.shape, v.spec.stride, v.spec.dtype, v.spec.device)


def _arguments(g: RegionGraph) -> Iterator[str]:
    """An op has the arguments of its row."""
    for op in g:
        row = ops.OPS.get(op.op)
        names = op.argnames if row is None else tuple(p.name for p in row.params)
        if op.argnames != names or len(op.args) != len(op.argnames):
            yield f"{_word(op)} has other arguments than its row"


def _users(g: RegionGraph) -> Iterator[str]:
    """Users are those who read, once for each argument."""
    found: dict[int, list[int]] = {}
    for op in g:
        for v in op.inputs():
            found.setdefault(v.id, []).append(op.id)
    for v in {v.id: v for op in g for v in (*op.inputs(), *op.outs)}.values():
        if sorted(found.get(v.id, ())) != sorted(u.id for u in g.users(v)):
            yield f"the users of value {v.id} are untrue"


def _producers(g: RegionGraph) -> Iterator[str]:
    yield from (f"the producer of value {o.id} is untrue" for op in g for o in op.outs if g.producer(o) is not op)


def _claims(g: RegionGraph) -> Iterator[str]:
    """Each claims ops of the region, which no other one has, and is written at one of them."""
    for c in g.claims:
        if any(op not in g or g.claim_of(op) is not c for op in c.ops):
            yield f"{c.note!r} claims what is not there, or another claim has"
        if c.at not in c.ops:
            yield f"{c.note!r} is written nowhere"


RULES: tuple[Rule, ...] = (
    _unique, _closed, _outputs, _same_types, _arguments, _users, _producers, _claims,
)  # fmt: skip


def problems(graph: RegionGraph, ordered: bool = True) -> Iterator[str]:
    """Whatever breaks a rule. `ordered`: ops must stand behind those that they read."""
    for rule in (*RULES, *([_in_order] if ordered else [])):
        yield from rule(graph)


def verify(graph: RegionGraph, after: str = "", ordered: bool = True) -> None:
    """Raises `RegionError` with the first problem; `after` names the pass."""
    found = next(problems(graph, ordered), None)
    if found is not None:
        raise RegionError(f"{graph.name}{f' after {after}' if after else ''}: {found}")


def _word(op: OpView) -> str:
    return f"{op.op} {op.id}"
