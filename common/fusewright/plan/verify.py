"""The specification of plans, as rules. They are checked on a backend's fragment, after every pass over a plan, and on a plan
from disk.

All rules are static: they look at instructions and specs, never at a tensor. Run-time checks are in `firstrun` (metadata) and
`contract` (values).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.errors import BackendContractError
from fusewright.forms.spec import FormError, Pass, Rule, Spec
from fusewright.interface import Fragment, OpView, Region, TensorSpec
from fusewright.plan.build import Plan, generators, may_alias, operator_of, written_by
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, Ref, reads, reads_content, refs
from fusewright.plan.memory import Placement, held_elsewhere, place, roots_of, storage_bytes
from fusewright.sizes.expr import Atom, SizeExpr, SizeOf, leaves
from fusewright.toolkit.ir.types import TYPES


class PlanError(FormError, AssertionError):
    """A plan violates the specification: a bug of Fusewright, or of whoever wrote it to disk."""


class FragmentError(FormError, BackendContractError):
    """A backend's fragment violates the specification: a bug of the backend."""


@dataclass
class Facts:
    """A list of instructions with its context. `given` are values that exist before the first instruction, `constant` those of
    them that must not change, `wanted` the values read after the last one, `kernels` those that launches may name (one without
    a signature is not compared)."""

    instructions: Sequence[Instruction]
    given: frozenset[int]
    constant: frozenset[int]
    wanted: Sequence[int]
    specs: Mapping[int, TensorSpec]
    kernels: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def read(self) -> list[list[int]]:
        """Values read by each instruction."""
        return list(map(reads, self.instructions))

    @cached_property
    def operators(self) -> dict[str, Any]:
        """The operators called, by name: None for Python functions, an exception for an unknown operator."""
        names = {i.target for i in self.instructions if isinstance(i, Call)}
        return {name: _found(name) for name in names}

    def operator(self, i: Instruction) -> Any | None:
        """The operator that an instruction calls; None for other instructions and unknown names."""
        found = self.operators[i.target] if isinstance(i, Call) else None
        return None if isinstance(found, Exception) else found

    @cached_property
    def roots(self) -> dict[int, set[int]]:
        """Value -> the values whose memory it may share."""
        return roots_of(self.instructions)

    def root(self, value: int) -> set[int]:
        return self.roots.get(value, {value})

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Value -> the positions at which elements of it, or of a possible view of it, are read."""
        found: dict[int, list[int]] = {}
        for k, i in enumerate(self.instructions):
            for value in {m for r in reads_content(i) for m in self.root(r)}:
                found.setdefault(value, []).append(k)
        return found

    @cached_property
    def updated(self) -> dict[int, int]:
        """Value -> what a kernel that changes it in place makes of it."""
        launches = (i for i in self.instructions if isinstance(i, Launch) and _in_range(i))
        return {x: out for i in launches for x, out in i.written.items()}

    @cached_property
    def wanted_memory(self) -> set[int]:
        """The values whose memory a wanted value may share."""
        return {m for w in self.wanted for m in self.root(w)}

    @cached_property
    def last_read(self) -> dict[int, int]:
        """Value -> the last position at which it, or a possible view of it, is read; past the end if it is wanted."""
        last: dict[int, int] = {}
        for k, read in enumerate(self.read):
            for r in read:
                last.update(dict.fromkeys(self.root(r), k))
        for r in self.wanted:
            last.update(dict.fromkeys(self.root(r), len(self.instructions)))
        return last


def _found(target: str) -> Any:
    try:
        return operator_of(target)
    except (AttributeError, RuntimeError) as e:  # RuntimeError: torch's answer to an unknown name
        return e


def _defined(f: Facts) -> Iterator[str]:
    known = set(f.given)
    for k, (i, read) in enumerate(zip(f.instructions, f.read, strict=True)):
        for r in read:
            if r not in known:
                yield f"{_name(k, i)} reads %{r} before it is made"
        for o in i.outs:
            if o in known:
                yield f"{_name(k, i)} makes %{o} a second time"
            known.add(o)
    for r in f.wanted:
        if r not in known:
            yield f"nobody makes the result %{r}"


def _called(f: Facts) -> Iterator[str]:
    for k, i in enumerate(f.instructions):
        if isinstance(i, Call) and f.operators[i.target] is not None:
            for problem in _call_problems(i, f.operators[i.target], f.specs):
                yield f"{_name(k, i)} {problem}"


@dataclass(frozen=True)
class _Signature:
    """What calls of an operator are checked against. `kinds` are the argument types as the schema prints them."""

    positional: tuple[str, ...]
    kinds: Mapping[str, str]
    required: tuple[str, ...]
    results: int
    listed: bool


@cache
def _signature(operator: Any) -> _Signature:
    arguments, returns = operator._schema.arguments, operator._schema.returns
    return _Signature(
        tuple(a.name for a in arguments if not a.kwarg_only),
        {a.name: str(a.type) for a in arguments},
        tuple(a.name for a in arguments if not a.has_default_value()),
        len(returns),
        len(returns) == 1 and str(returns[0].type).startswith("List["),
    )


def _call_problems(i: Call, operator: Any, specs: Mapping[int, TensorSpec]) -> Iterator[str]:
    if isinstance(operator, Exception):
        yield f"names an operator that does not exist ({operator})"
        return
    signature = _signature(operator)
    if len(i.args) > len(signature.positional):
        yield f"gives {len(i.args)} arguments, but there are {len(signature.positional)}"
        return
    given = [*zip(signature.positional, i.args, strict=False), *i.kwargs]
    names = {name for name, _ in given}
    for name, x in given:
        kind = signature.kinds.get(name)
        if kind is None:
            yield f"gives {name!r}, which its schema does not have"
        elif kind == "Tensor" and isinstance(x, str):  # numbers are converted to tensors
            yield f"gives a {type(x).__name__} as the tensor {name!r}"
        elif isinstance(x, Ref) and kind != "Tensor" and x.id in specs and specs[x.id].rank and not _takes_tensor(kind):
            yield f"gives a tensor as {name!r}"
    if len(names) < len(given):
        yield "gives an argument twice"
    if missing := [n for n in signature.required if n not in names]:
        yield f"does not give {', '.join(missing)}"
    yield from _result_problems(i, signature)


def _result_problems(i: Call, signature: _Signature) -> Iterator[str]:
    many = signature.listed or signature.results > 1
    if many and not i.packed and len(i.outs) == 1:
        yield "takes several results as one"
    elif i.packed and not many:
        yield "takes one result apart"
    elif not signature.listed and len(i.outs) > max(signature.results, 1):  # an op without results returns None
        yield f"takes {len(i.outs)} results of {signature.results}"


def _takes_tensor(kind: str) -> bool:
    return "Tensor" in kind or "number" in kind.lower() or kind == "t"


def _launched(f: Facts) -> Iterator[str]:
    for k, i in enumerate(f.instructions):
        if not isinstance(i, Launch):
            continue
        if i.kernel not in f.kernels:
            yield f"{_name(k, i)} names a kernel that the plan does not have"
        yield from (f"{_name(k, i)} {p}" for p in _launch_problems(i, f))


def _launch_problems(i: Launch, f: Facts) -> Iterator[str]:
    for o in i.outs:
        if o not in f.specs:
            yield f"makes %{o}, of which nothing is known"
    for x in i.sizes:
        if (why := _wrong_size(x, f.specs)) is not None:
            yield f"is given {x!r} as a size: {why}"
    if not _in_range(i):
        yield "changes arguments that it does not have, or one twice"
        return
    for x, out in i.written.items():
        a, b = f.specs.get(out), f.specs.get(x)
        if a is None or b is None or (a.shape, a.stride, a.dtype) != (b.shape, b.stride, b.dtype):
            yield f"updates %{x} as %{out}, which is another kind of tensor"
    kernel = f.kernels.get(i.kernel)
    if kernel is not None and hasattr(kernel, "buffers"):
        yield from _signature_problems(i, kernel, f.specs)


def _in_range(i: Launch) -> bool:
    """Whether the pairs of a launch are of arguments that it has, and it changes each of them once."""
    outs, inputs = range(len(i.outs)), range(len(i.inputs))
    if not all(o in outs and r in inputs for o, r in (*i.inplace, *i.updates)) or not all(o in outs for o, _ in i.into):
        return False
    return len(i.written) == len({*i.written.values()}) == len(i.updates) + len(i.into)


def _wrong_size(x: Any, specs: Mapping[int, TensorSpec]) -> str | None:
    match x:
        case bool():
            return "a truth value"
        case int():
            return None
        case SizeExpr():
            return next((why for a in leaves(x) if (why := _wrong_leaf(a, specs))), None)
    return "no kind of size"


def _wrong_leaf(a: Atom, specs: Mapping[int, TensorSpec]) -> str | None:
    if isinstance(a, int):
        return "a position among a kernel's symbols"
    if isinstance(a, SizeOf) and a.value in specs and not 0 <= a.dim < specs[a.value].rank:
        return f"%{a.value} has no dimension {a.dim}"
    return None


def _signature_problems(i: Launch, kernel: Any, specs: Mapping[int, TensorSpec]) -> Iterator[str]:
    given = [*(r.id for r in i.inputs), *i.outs]
    if len(given) != len(kernel.buffers):
        yield f"gives {len(given)} tensors to a kernel of {len(kernel.buffers)}"
        return
    for v, b in zip(given, kernel.buffers, strict=True):
        if v in specs and b.dtype in TYPES and specs[v].dtype != TYPES[b.dtype].torch:
            yield f"gives %{v} of {specs[v].dtype} as {b.name}, which is {b.dtype}"
    if len(i.sizes) != len(kernel.symbols):
        yield f"gives {len(i.sizes)} sizes to a kernel of {len(kernel.symbols)}"
    if len(i.scalars) != len(kernel.scalars):
        yield f"gives {len(i.scalars)} scalars to a kernel of {len(kernel.scalars)}"


def _updates(f: Facts) -> Iterator[str]:
    for k, i in enumerate(f.instructions):
        if not isinstance(i, Launch) or not _in_range(i):  # `_launched` reports it
            continue
        apart = {r.id for _, r in i.into}
        for x, out in i.written.items():
            memory = f.root(x)
            if memory & f.constant:
                yield f"{_name(k, i)} writes over the constant %{x}"
            if sum(bool(f.root(a.id) & memory) for a in i.inputs) > (x not in apart):
                yield f"{_name(k, i)} writes over %{x}, which it reads beside that"
            for later in sorted({n for m in memory for n in f.readers.get(m, ()) if n > k}):
                if not _copies_back(j := f.instructions[later], x, out, f):
                    yield f"{_name(later, j)} reads %{x} after {_name(k, i)} wrote over it"
            if f.wanted_memory & memory:
                yield f"a result may be %{x}, which {_name(k, i)} writes over"


def _copies_back(i: Instruction, x: int, out: int, f: Facts) -> bool:
    """Whether the instruction copies to `x` what has become of it, by then a copy of a tensor to itself."""
    if not isinstance(i, Call) or i.target != "aten::copy_.default" or i.args[0] != Ref(x):
        return False
    made = {out}
    while (later := f.updated.get(out)) is not None and later not in made:
        made.add(out := later)
    return i.args[1] in map(Ref, made)


def _constants(f: Facts) -> Iterator[str]:
    for k, i in enumerate(f.instructions):
        operator = f.operator(i)
        if isinstance(i, Call) and operator is not None and ops.is_mutating(operator):
            for v in written_by(i):
                if f.root(v) & f.constant:
                    yield f"{_name(k, i)} writes the constant %{v}"


LIST_RULES: tuple[Rule[Facts], ...] = (
    Rule("defined", "each value is made once, and before it is read", _defined),
    Rule("calls", "a call names an operator that exists, and gives it arguments of the kinds that its schema has", _called),
    Rule("launches", "a launch gives its kernel what that takes, and makes tensors that the host can lay out", _launched),
    Rule("updates", "nobody reads what a launch wrote over, or what shares its memory, and it is no constant", _updates),
    Rule("constants", "no call writes what must stay as it is", _constants),
)
"""The rules for every list of instructions."""


class PlanFacts:
    """A plan as seen by its rules: `fixed` are its constant inputs, `prepare` and `main` its two lists of instructions."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        held, weights = frozenset(plan.attributes), frozenset(plan.prepare_inputs)
        self.fixed = frozenset(i for i in plan.inputs if i in plan.specs and plan.specs[i].const)
        prepared = frozenset(plan.prepare_outputs)
        given, constant = weights | held, self.fixed | prepared
        self.prepare = Facts(plan.prepare, given, given, plan.prepare_outputs, plan.specs, plan.kernels)
        given, wanted = frozenset(plan.inputs) | held | prepared, [r for o in plan.outputs for r in refs(o)]
        self.main = Facts(plan.instructions, given, constant, wanted, plan.specs, plan.kernels)


def _interface(p: PlanFacts) -> Iterator[str]:
    if len(set(p.plan.inputs)) < len(p.plan.inputs):
        yield "an input is given twice"
    for v in p.plan.prepare_inputs:
        if v not in p.fixed:
            yield f"prepare: %{v} is no constant input"
    made = {o for i in p.plan.prepare for o in i.outs}
    for v in p.plan.prepare_outputs:
        if v not in made:
            yield f"prepare: %{v} is not made there"


def _generators(p: PlanFacts) -> Iterator[str]:
    given = generators(p.plan)
    for v in sorted(given):
        if v not in p.plan.inputs or v in p.plan.specs or v in p.plan.scalars:
            yield f"%{v} is no generator, but drawn from"
    for k, i in enumerate(p.plan.instructions if given else ()):
        others = reads(replace(i, generator=None) if isinstance(i, Call) else i)
        yield from (f"{_name(k, i)} reads the generator %{v}" for v in sorted(given.intersection(others)))
    if any(isinstance(i, Call) and i.generator is not None for i in p.plan.prepare):
        yield "prepare: a call draws from a generator"


def _repeatable(p: PlanFacts) -> Iterator[str]:
    for k, i in enumerate(p.plan.prepare):
        if isinstance(i, CallPython):
            yield f"prepare: {_name(k, i)} is an opaque function"
        elif isinstance(i, Call) and _unrepeatable(p.prepare.operators[i.target], i):
            yield f"prepare: {_name(k, i)} does not give the same each time"


def _in_both(rule: Rule[Facts]) -> Rule[PlanFacts]:
    """Apply a rule to both lists of a plan."""

    def check(p: PlanFacts) -> Iterator[str]:
        yield from (f"prepare: {line}" for line in rule.check(p.prepare))
        yield from rule.check(p.main)

    return Rule(rule.id, rule.says, check)


PLAN_RULES: tuple[Rule[PlanFacts], ...] = (
    Rule("interface", "each input is one value, and what is prepared is made of constant inputs", _interface),
    Rule("generators", "calls draw from inputs that are no tensors, and that are read for nothing else", _generators),
    Rule("repeatable", "what is prepared is the same each time", _repeatable),
    *map(_in_both, LIST_RULES),
)


def _content(plan: Plan) -> object:
    return (list(plan.instructions), list(plan.prepare))


PLAN: Spec[Plan] = Spec("plan", PlanError, PLAN_RULES, PlanFacts, _content)


def find_problems(plan: Plan) -> Iterator[str]:
    """One line per violation."""
    return (v.text for v in PLAN.violations(plan))


def _unrepeatable(operator: Any, i: Call) -> bool:
    if isinstance(operator, Exception):
        return False  # `_called` reports it
    return operator is None or ops.is_mutating(operator) or ops.call_draws(operator, i.args, dict(i.kwargs))


def check(plan: Plan, after: str, kernels: Mapping[str, Any] | None = None) -> None:
    """Raise `PlanError` with every problem found. `kernels` are what the plan's launches name, by hash; default: the plan's own."""
    PLAN.check(plan if kernels is None else replace(plan, kernels=dict(kernels)), after)


class PlacementFacts:
    """A plan with the memory of its kernels' results. `born` and `end` delimit the lifetimes of values."""

    def __init__(self, placed: tuple[Plan, Placement]) -> None:
        self.plan, self.placement = plan, placement = placed
        self.wanted = [*(r for o in plan.outputs for r in refs(o)), *held_elsewhere(plan.instructions)]
        self.facts = Facts(plan.instructions, frozenset(plan.inputs), frozenset(), self.wanted, plan.specs)
        self.born = {o: k for k, i in enumerate(plan.instructions) for o in i.outs}
        self.end = _ends(self.facts, placement)
        own = [(v, at) for v, at in placement.offset.items() if v not in placement.onto]
        self.slots = [(v, at, at + storage_bytes(plan.specs[v])) for v, at in own]


def _taken_over(p: PlacementFacts) -> Iterator[str]:
    forced = {o for i in p.plan.instructions if isinstance(i, Launch) for o in i.written.values()}
    for out, source in p.placement.onto.items():
        if out in forced:
            continue  # rule "updates"
        if p.facts.last_read.get(source, -1) > p.born[out]:
            yield f"%{out} takes over %{source}, which is read after that"
        if sum(source in p.facts.root(r) for r in reads(p.plan.instructions[p.born[out]])) > 1:
            yield f"%{out} takes over %{source}, which is read twice while it is made"


def _arena(p: PlacementFacts) -> Iterator[str]:
    results = {v for w in p.wanted for v in p.facts.root(w)}
    for v, low, high in p.slots:
        if low < 0 or high > p.placement.arena_bytes:
            yield f"%{v} lies outside of the arena"
        if v in results:
            yield f"%{v} outlives the call, but lies in the arena"


PLACEMENT: Spec[tuple[Plan, Placement]] = Spec(
    "memory of a plan",
    PlanError,
    (
        Rule("takeover", "no tensor is taken over that is still read", _taken_over),
        Rule("arena", "temporaries lie in the arena, and what outlives the call elsewhere", _arena),
        Rule("slots", "values that live at the same time share no byte", lambda p: _overlaps(p.slots, p.born, p.end)),
    ),
    PlacementFacts,
)

PLACE = Pass("place", "plan", PLACEMENT, place, lambda args, placement: [(args[0], placement)])


def placement_problems(plan: Plan, placement: Placement) -> Iterator[str]:
    """One line per violation."""
    return (v.text for v in PLACEMENT.violations((plan, placement)))


def _ends(f: Facts, placement: Placement) -> dict[int, int]:
    """Value -> the last position at which its memory is read, including by values that took it over."""
    end = dict(f.last_read)
    for out, source in reversed(placement.onto.items()):
        end[source] = max(end.get(source, -1), end.get(out, -1))
    return end


def _overlaps(slots: Sequence[tuple[int, int, int]], born: Mapping[int, int], end: Mapping[int, int]) -> Iterator[str]:
    """Find values that are live at the same time in the same bytes, by a sweep in order of birth."""
    alive: list[tuple[int, int, int]] = []
    for v, low, high in sorted(slots, key=lambda s: born[s[0]]):
        alive = [a for a in alive if max(end.get(a[0], -1), born[a[0]]) >= born[v]]
        for other, start, stop in alive:
            if low < stop and start < high:
                yield f"%{v} lies where %{other} still lives"
        alive.append((v, low, high))


Answer: TypeAlias = tuple[Region, Fragment, Mapping[int, TensorSpec]]
"""A region, a backend's fragment for it, and the specs of the fragment's temporaries."""


class FragmentFacts:
    """A backend's answer as seen by its rules."""

    def __init__(self, answer: Answer) -> None:
        self.region, fragment, temporaries = answer
        values = [v for op in self.region.ops for v in (*op.inputs(), *op.outs)]
        own = {v.id: v.spec for v in (*values, *self.region.inputs) if v.spec is not None}
        given = frozenset(v.id for v in self.region.inputs)
        wanted = [v.id for v in self.region.outputs]
        self.facts = Facts(fragment.instructions, given, given, wanted, {**temporaries, **own}, fragment.kernels)


def _of_list(rule: Rule[Facts]) -> Rule[FragmentFacts]:
    return Rule(rule.id, rule.says, lambda answer: rule.check(answer.facts))


def _aliases(answer: FragmentFacts) -> Iterator[str]:
    region, f = answer.region, answer.facts
    certain: dict[int, set[int]] = {}
    for i in f.instructions:
        operator = f.operator(i)
        viewed = _viewed(operator) if operator is not None else ()
        source = {r for v in _given(i, viewed) for r in certain.get(v, {v})}
        certain.update(dict.fromkeys(i.outs, source))
    shared = {v.id: found for v in region.outputs if (found := certain.get(v.id, {v.id}) & f.given)}
    eager = _views(region) if shared else {}
    for v, inputs in shared.items():
        for wrong in inputs - eager.get(v, set()):
            yield f"the result %{v} is memory of the input %{wrong}"


FRAGMENT: Spec[Answer] = Spec(
    "fragment",
    FragmentError,
    (*map(_of_list, LIST_RULES), Rule("aliases", "a result is memory of an input only where it may be in eager too", _aliases)),
    FragmentFacts,
    name=lambda answer: f"of {answer[0].name} ({answer[0].op_names})",
)


def _views(region: Region) -> dict[int, set[int]]:
    """Values of a region -> the inputs whose memory they may share in eager."""
    found: dict[int, set[int]] = {}
    for op in region.ops:
        shared = set().union(*(found.get(v.id, {v.id}) for v in op.inputs())) if _is_view(op) else set()
        found.update((v.id, shared) for v in op.outs)
    return found


def _is_view(op: OpView) -> bool:
    return may_alias(Call(op.target, (), ()))


@cache
def _viewed(operator: Any) -> tuple[tuple[int, str], ...]:
    """Arguments, by position and name, that the operator's results always alias, according to its schema."""
    if compat.is_composite(operator):
        return ()  # their schemas claim aliasing too, but they often copy
    schema = operator._schema
    shared: set[str] = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    return tuple(
        (k, a.name) for k, a in enumerate(schema.arguments)
        if a.alias_info is not None and shared & set(a.alias_info.before_set)
    )  # fmt: skip


def _given(i: Instruction, arguments: Sequence[tuple[int, str]]) -> Iterator[int]:
    """The values passed as these arguments."""
    for k, name in arguments:
        assert isinstance(i, Call)
        yield from refs(i.args[k] if k < len(i.args) else dict(i.kwargs).get(name))


def _name(k: int, i: Instruction) -> str:
    what = i.target if isinstance(i, Call) else f"kernel {i.kernel[:8]}" if isinstance(i, Launch) else i.name
    return f"instruction {k} ({what})"
