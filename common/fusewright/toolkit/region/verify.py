"""What every region, and every graph of one, keeps to, as rules. They run after each pass over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from fusewright import ops
from fusewright.interface import OpView, Region, Value
from fusewright.toolkit.region.graph import RegionError, RegionGraph


class Facts:
    """A region, with what rules ask of it again and again: what each op reads, and what there is from the start."""

    def __init__(self, region: Region | RegionGraph) -> None:
        self.region = region
        self.ops: tuple[OpView, ...] = region.ops if isinstance(region, Region) else tuple(region)
        self.reads = [(op, tuple(op.inputs())) for op in self.ops]
        self.given = frozenset(v.id for v in region.inputs)
        self.made = {o.id: o for op in self.ops for o in op.outs}


Rule: TypeAlias = Callable[[Facts], Iterator[str]]
GraphRule: TypeAlias = Callable[[Facts, RegionGraph], Iterator[str]]


def _unique(f: Facts) -> Iterator[str]:
    """A value has one maker, and inputs of the region none."""
    seen = set(f.given)
    for op in f.ops:
        for o in op.outs:
            if o.id in seen:
                yield f"value {o.id} is made again by {_word(op)}"
            seen.add(o.id)
        if not op.outs:
            yield f"{_word(op)} makes nothing"


def _closed(f: Facts) -> Iterator[str]:
    """What an op reads is an input of the region, or made in it."""
    for op, read in f.reads:
        yield from (
            f"{_word(op)} reads {v.id}, which nobody makes" for v in read if v.id not in f.made and v.id not in f.given
        )


def _in_order(f: Facts) -> Iterator[str]:
    """What an op reads is an input of the region or made before it."""
    there = set(f.given)
    for op, read in f.reads:
        yield from (f"{_word(op)} reads {v.id}, which is not made before it" for v in read if v.id not in there)
        there.update(o.id for o in op.outs)


def _outputs(f: Facts) -> Iterator[str]:
    lost = (v for v in f.region.outputs if v.id not in f.made and v.id not in f.given)
    yield from (f"output {v.id} is made by nobody" for v in lost)


def _same_types(f: Facts) -> Iterator[str]:
    """A value is the same to whoever makes, reads or gives it."""
    known = {v.id: v for v in f.region.inputs} | f.made
    for op, read in f.reads:
        yield from (f"{_word(op)} takes {v.id} for {v.spec}" for v in read if not _alike(known.get(v.id, v), v))
    for v in f.region.outputs:
        if not _alike(known.get(v.id, v), v):
            yield f"the region gives {v.id} as {v.spec}"


def _alike(a: Value, b: Value) -> bool:
    """Whether it is a weight is not all readers' business."""
    if a is b or a.spec is b.spec is not None:
        return True
    return _type(a) == _type(b)


def _type(v: Value) -> object:
    return v.dim if v.spec is None else (v.spec.shape, v.spec.stride, v.spec.dtype, v.spec.device)


def _arguments(f: Facts) -> Iterator[str]:
    """An op has the arguments of its row."""
    for op in f.ops:
        row = ops.OPS.get(op.op)
        names = op.argnames if row is None else row.argnames
        if op.argnames != names or len(op.args) != len(op.argnames):
            yield f"{_word(op)} has other arguments than its row"


def _users(f: Facts, g: RegionGraph) -> Iterator[str]:
    """Users are those who read, once for each argument."""
    found: dict[int, list[int]] = {i: [] for i in (*f.given, *f.made)}
    for op, read in f.reads:
        for v in read:
            found.setdefault(v.id, []).append(op.id)
    yield from (f"the users of value {i} are untrue" for i, ids in found.items() if sorted(ids) != sorted(g.user_ids(i)))


def _producers(f: Facts, g: RegionGraph) -> Iterator[str]:
    yield from (f"the producer of value {o.id} is untrue" for op in f.ops for o in op.outs if g.producer(o) is not op)


def _claims(f: Facts, g: RegionGraph) -> Iterator[str]:
    """Each claims ops of the region, which no other one has, and is written at one of them."""
    for c in g.claims:
        if any(op not in g or g.claim_of(op) is not c for op in c.ops):
            yield f"{c.note!r} claims what is not there, or another claim has"
        if c.at not in c.ops:
            yield f"{c.note!r} is written nowhere"


RULES: tuple[Rule, ...] = (_unique, _closed, _outputs, _same_types, _arguments)
GRAPH_RULES: tuple[GraphRule, ...] = (_users, _producers, _claims)


def problems(region: Region | RegionGraph, ordered: bool = True) -> Iterator[str]:
    """Whatever breaks a rule. `ordered`: ops must stand behind those that they read."""
    f = Facts(region)
    for rule in (*RULES, *([_in_order] if ordered else [])):
        yield from rule(f)
    if isinstance(region, RegionGraph):
        for graph_rule in GRAPH_RULES:
            yield from graph_rule(f, region)


def verify(region: Region | RegionGraph, after: str, ordered: bool = True) -> None:
    """Raises `RegionError` with the first problem; `after` names the pass."""
    found = next(problems(region, ordered), None)
    if found is not None:
        raise RegionError(f"{region.name} after {after}: {found}")


def _word(op: OpView) -> str:
    return f"{op.op} {op.id}"
