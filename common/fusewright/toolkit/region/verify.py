"""The invariants of regions and region graphs, as rules that run after each pass over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from fusewright import ops
from fusewright.forms.spec import Rule, Spec
from fusewright.interface import OpView, Region, Value
from fusewright.toolkit.region.graph import RegionError, RegionGraph

AnyRegion: TypeAlias = Region | RegionGraph


class Facts:
    """A region with the lookups that its rules share: what each op reads, and the region's inputs."""

    def __init__(self, region: AnyRegion) -> None:
        self.region = region
        self.graphs = [region] if isinstance(region, RegionGraph) else []
        self.ops: tuple[OpView, ...] = region.ops if isinstance(region, Region) else tuple(region)
        self.reads = [(op, tuple(op.inputs())) for op in self.ops]
        self.given = frozenset(v.id for v in region.inputs)
        self.made = {o.id: o for op in self.ops for o in op.outs}


def _unique(f: Facts) -> Iterator[str]:
    seen = set(f.given)
    for op in f.ops:
        for o in op.outs:
            if o.id in seen:
                yield f"value {o.id} is made again by {_word(op)}"
            seen.add(o.id)
        if not op.outs:
            yield f"{_word(op)} makes nothing"


def _closed(f: Facts) -> Iterator[str]:
    for op, read in f.reads:
        yield from (
            f"{_word(op)} reads {v.id}, which nobody makes" for v in read if v.id not in f.made and v.id not in f.given
        )


def _in_order(f: Facts) -> Iterator[str]:
    there = set(f.given)
    for op, read in f.reads:
        yield from (f"{_word(op)} reads {v.id}, which is not made before it" for v in read if v.id not in there)
        there.update(o.id for o in op.outs)


def _outputs(f: Facts) -> Iterator[str]:
    lost = (v for v in f.region.outputs if v.id not in f.made and v.id not in f.given)
    yield from (f"output {v.id} is made by nobody" for v in lost)


def _same_types(f: Facts) -> Iterator[str]:
    known = {v.id: v for v in f.region.inputs} | f.made
    for op, read in f.reads:
        yield from (f"{_word(op)} takes {v.id} for {v.spec}" for v in read if not _alike(known.get(v.id, v), v))
    for v in f.region.outputs:
        if not _alike(known.get(v.id, v), v):
            yield f"the region gives {v.id} as {v.spec}"


def _alike(a: Value, b: Value) -> bool:
    """Whether two views of a value agree in type; readers may differ in whether it is a weight."""
    if a is b or a.spec is b.spec is not None:
        return True
    return _type(a) == _type(b)


def _type(v: Value) -> object:
    return v.dim if v.spec is None else (v.spec.shape, v.spec.stride, v.spec.dtype, v.spec.device)


def _arguments(f: Facts) -> Iterator[str]:
    for op in f.ops:
        row = ops.OPS.get(op.op)
        names = op.argnames if row is None else row.argnames
        if op.argnames != names or len(op.args) != len(op.argnames):
            yield f"{_word(op)} has other arguments than its row"


def _users(f: Facts) -> Iterator[str]:
    found: dict[int, list[int]] = {i: [] for i in (*f.given, *f.made)}
    for op, read in f.reads:
        for v in read:
            found.setdefault(v.id, []).append(op.id)
    for g in f.graphs:
        wrong = (i for i, ids in found.items() if sorted(ids) != sorted(g.user_ids(i)))
        yield from (f"the users of value {i} are untrue" for i in wrong)


def _producers(f: Facts) -> Iterator[str]:
    made = ((g, op, o) for g in f.graphs for op in f.ops for o in op.outs)
    yield from (f"the producer of value {o.id} is untrue" for g, op, o in made if g.producer(o) is not op)


def _claims(f: Facts) -> Iterator[str]:
    for g in f.graphs:
        for c in g.claims:
            if any(op not in g or g.claim_of(op) is not c for op in c.ops):
                yield f"{c.note!r} claims what is not there, or another claim has"
            if c.at not in c.ops:
                yield f"{c.note!r} is written nowhere"


ORDER: Rule[Facts] = Rule("order", "what an op reads is an input of the region or made before it", _in_order)
RULES: tuple[Rule[Facts], ...] = (
    Rule("makers", "a value has one maker, and inputs of the region none", _unique),
    Rule("closed", "what an op reads is an input of the region, or made in it", _closed),
    Rule("outputs", "what the region gives is an input of it, or made in it", _outputs),
    Rule("types", "a value is the same to whoever makes, reads or gives it", _same_types),
    Rule("arguments", "an op has the arguments of its row", _arguments),
    Rule("users", "users of a value are those who read it, once for each argument", _users),
    Rule("producers", "the producer of a value is the op that makes it", _producers),
    Rule("claims", "a claim has ops of the region that no other one has, and is written at one of them", _claims),
    ORDER,
)

REGION: Spec[AnyRegion] = Spec(
    "region",
    RegionError,
    RULES,
    Facts,
    content=lambda region: object(),  # users may have changed even if no op has
    name=lambda region: region.name,
)
UNORDERED = replace(REGION, rules=tuple(rule for rule in RULES if rule is not ORDER))


def problems(region: AnyRegion, ordered: bool = True) -> Iterator[str]:
    """Yield every broken rule. `ordered`: ops must come after the ops that they read."""
    return (v.text for v in (REGION if ordered else UNORDERED).violations(region))


def verify(region: AnyRegion, after: str, ordered: bool = True) -> None:
    """Raise `RegionError` listing every problem; `after` names the pass."""
    (REGION if ordered else UNORDERED).check(region, after)


def _word(op: OpView) -> str:
    return f"{op.op} {op.id}"
