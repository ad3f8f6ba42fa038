"""Patterns: a tree of ops by name and arguments (`P`), or an op followed by successive readers of its result (`Chain`).

The host's own rules (`fusewright.rewrite`) use the same trees; a `Reader` adapts them to each kind of graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import RegionGraph


class _Any:
    def __repr__(self) -> str:
        return "ANY"


ANY = _Any()
"""Matches every argument."""

Env: TypeAlias = Mapping[str, Any]
"""Captures by name."""


@dataclass(frozen=True)
class P:
    """A pattern: the row names that match ("aten.name.overload" for an op outside the opset), and patterns for the leading
    arguments.

    An argument pattern is a nested `P`, a `str` that captures (equal names must match equal arguments), a tuple of
    patterns, `ANY`, or a literal that must be equal. Missing trailing patterns match everything. `either`: the first two
    arguments may come in either order. `alone`: the result has no other reader.
    """

    op: str | tuple[str, ...]
    args: tuple[Any, ...] = ()
    capture: str = ""
    either: bool = False
    alone: bool = False

    def names(self) -> tuple[str, ...]:
        return (self.op,) if isinstance(self.op, str) else self.op


def p(op: str | tuple[str, ...], *args: Any, capture: str = "", either: bool = False, alone: bool = False) -> P:
    """Shorthand: `p("mm", "x", p("t", "w"))`."""
    return P(op, args, capture, either, alone)


class Reader(Protocol):
    """Adapts patterns to a kind of graph."""

    def name(self, op: Any) -> str: ...

    def args(self, op: Any) -> Sequence[Any]: ...

    def producer(self, arg: Any) -> Any | None:
        """The op that makes an argument, or None."""
        ...

    def same(self, a: Any, b: Any) -> bool: ...

    def alone(self, arg: Any) -> bool:
        """Whether an argument has a single reader, which reads it once."""
        ...


OPS = ""
"""The name under which captures hold the matched ops, from the root on."""


def matches(pattern: P, op: Any, env: Env, reader: Reader) -> Iterator[Env]:
    """Yield the captures, added to `env`, of every way in which `op` matches."""
    if op is None or reader.name(op) not in pattern.names():
        return
    args = tuple(reader.args(op))
    if len(pattern.args) > len(args):
        return
    env = {**env, OPS: (*env.get(OPS, ()), op)}
    if pattern.capture:
        env = {**env, pattern.capture: op}
    yield from _all(pattern.args, args, env, reader)
    if pattern.either:
        yield from _all(pattern.args, (args[1], args[0], *args[2:]), env, reader)


def _all(patterns: Sequence[Any], args: Sequence[Any], env: Env, reader: Reader) -> Iterator[Env]:
    if not patterns:
        yield env
        return
    for found in _one(patterns[0], args[0], env, reader):
        yield from _all(patterns[1:], args[1:], found, reader)


def _one(pattern: Any, arg: Any, env: Env, reader: Reader) -> Iterator[Env]:
    if pattern is ANY:
        yield env
    elif isinstance(pattern, P):
        if not pattern.alone or reader.alone(arg):
            yield from matches(pattern, reader.producer(arg), env, reader)
    elif isinstance(pattern, str):
        if pattern not in env or reader.same(env[pattern], arg):
            yield {**env, pattern: arg}
    elif isinstance(pattern, tuple):
        if isinstance(arg, tuple | list) and len(arg) == len(pattern):
            yield from _all(pattern, arg, env, reader)
    elif type(arg) is type(pattern) and arg == pattern:
        yield env


# ---------------------------------------------------------------- in a region


@dataclass(frozen=True)
class RegionReader:
    """Patterns over the `OpView`s of a region."""

    graph: RegionGraph

    def name(self, op: OpView) -> str:
        return op.op

    def args(self, op: OpView) -> Sequence[Any]:
        return op.args

    def producer(self, arg: Any) -> OpView | None:
        return self.graph.producer(arg) if isinstance(arg, Value) else None

    def same(self, a: Any, b: Any) -> bool:
        return bool(a == b)

    def alone(self, arg: Any) -> bool:
        return isinstance(arg, Value) and self.graph.only_user(arg) is not None


@dataclass(frozen=True)
class Match:
    """A match: `ops` are the ops found, namely producers of `anchor`'s arguments, `anchor` and its readers. `captures` are the
    named ones, `rules` the ids of the optional steps that matched. The call is written `at` that op; None means the last found."""

    anchor: OpView
    ops: tuple[OpView, ...]
    captures: Env = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    at: OpView | None = None

    def __getitem__(self, name: str) -> Any:
        return self.captures[name]

    def get(self, name: str) -> Any:
        """The capture of a name, or None for an optional step that did not match."""
        return self.captures.get(name)

    @property
    def last(self) -> OpView:
        """The op at which the call is written."""
        return self.at or self.ops[-1]

    @property
    def out(self) -> Value:
        """The result of the call."""
        return self.last.out

    def with_ops(self, *ops: OpView, at: OpView | None = None, **captures: Any) -> Match:
        """Return the match with additional ops and captures."""
        return replace(self, ops=(*self.ops, *ops), captures={**self.captures, **captures}, at=at or self.at)


Fits: TypeAlias = Callable[[OpView, Match, Any], bool]
"""(op, the match so far, context) -> whether the op joins the match. The op reads `match.out`."""


def always(op: OpView, match: Match, context: Any) -> bool:
    """No condition."""
    return True


RULES: set[str] = set()
"""Ids of all rewrite rows and steps, which the option `disable_rules` may name."""


@dataclass(frozen=True)
class Step:
    """An op that is the only reader of the preceding result, repeated `least` to `most` times (None: without limit). An optional
    step may have a `rule` id, by which it is switched off and counted."""

    ops: frozenset[str]
    fits: Fits = always
    capture: str = ""
    least: int = 1
    most: int | None = 1
    rule: str = ""

    def __post_init__(self) -> None:
        RULES.update({self.rule} - {""})


@dataclass(frozen=True)
class Chain:
    """An op and the successive readers of its result. None of the ops may be claimed already."""

    anchor: P
    steps: tuple[Step, ...] = ()


def _names(op: str | Sequence[str] | frozenset[str]) -> frozenset[str]:
    return frozenset((op,) if isinstance(op, str) else op)


def one(op: str | Sequence[str] | frozenset[str], fits: Fits = always, capture: str = "") -> Step:
    """A required step."""
    return Step(_names(op), fits, capture)


def maybe(op: str | Sequence[str] | frozenset[str], fits: Fits = always, capture: str = "", rule: str = "") -> Step:
    """An optional step."""
    return Step(_names(op), fits, capture, least=0, rule=rule)


def many(op: str | Sequence[str] | frozenset[str], fits: Fits = always) -> Step:
    """Any number of such steps, e.g. views."""
    return Step(_names(op), fits, least=0, most=None)


def chain(anchor: str | tuple[str, ...] | P, *steps: Step) -> Chain:
    """Shorthand: `chain("conv", maybe("batch_norm"), one("relu"))`."""
    return Chain(anchor if isinstance(anchor, P) else p(anchor), steps)


def find(
    pattern: P | Chain, op: OpView, graph: RegionGraph, context: Any, allowed: Callable[[str], bool] = lambda rule: True
) -> Match | None:
    """Return the first match with `op` as its anchor."""
    root = pattern.anchor if isinstance(pattern, Chain) else pattern
    found = next(matches(root, op, {}, RegionReader(graph)), None)
    if found is None:
        return None
    match: Match | None = Match(op, found[OPS][::-1], {k: v for k, v in found.items() if k != OPS})
    for step in pattern.steps if isinstance(pattern, Chain) else ():
        match = _stepped(step, match, graph, context, allowed) if match is not None else None
    return match


def _stepped(
    step: Step, match: Match, graph: RegionGraph, context: Any, allowed: Callable[[str], bool]
) -> Match | None:
    """Extend the match by a step as often as it fits; None if a required step does not."""
    count = 0
    while (step.most is None or count < step.most) and (not step.rule or allowed(step.rule)):
        user = graph.free_user(match.out)
        if user is None or user.op not in step.ops or not step.fits(user, match, context):
            break
        captures = {step.capture: user} if step.capture else {}
        match = replace(match.with_ops(user, **captures), rules=(*match.rules, *([step.rule] if step.rule else [])))
        count += 1
    return match if count >= step.least else None


def siblings(
    ops: Iterable[OpView], eligible: Callable[[OpView], bool], any_bias: bool = False
) -> list[tuple[OpView, ...]]:
    """Group linears that read the same value, so that one product with concatenated weights can compute a whole group.

    Weights of a group agree in input size and dtype, and all or none have a bias unless `any_bias`. Groups are in the order of the
    region.
    """
    groups: dict[Any, list[OpView]] = {}
    for op in ops:
        if op.op == "linear" and eligible(op):
            x, w = op.arg("input"), op.arg("weight")
            biased = any_bias or op.arg("bias") is not None
            groups.setdefault((x.id, w.spec.shape[1], w.spec.dtype, biased), []).append(op)
    return [tuple(g) for g in groups.values() if len(g) > 1]
