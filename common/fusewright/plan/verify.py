"""The specification of plans, as rules: what a fragment of a backend, every pass over a plan and a plan from the disk are
held to.

A rule is a function from `Facts` to one line per violation. All of them are static: they look at instructions and specs,
never at a tensor. What only a run can show is compared by `firstrun` (metadata) and `contract` (values).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeAlias

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.errors import FusewrightError
from fusewright.interface import Fragment, OpView, Region, TensorSpec
from fusewright.plan.build import Plan, may_alias, operator_of, written_by
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, Ref, reads, refs
from fusewright.plan.memory import Placement, roots_of, storage_bytes
from fusewright.sizes.expr import Atom, SizeExpr, SizeOf, leaves
from fusewright.toolkit.ir.types import TYPES


class PlanError(FusewrightError, AssertionError):
    """A plan breaks the specification: a bug of Fusewright, or of who wrote it to the disk."""


@dataclass
class Facts:
    """A list of instructions and what is given to it. `given` are values that exist before the first instruction, `constant`
    those of them that must stay as they are, `wanted` the values that are read after the last one, `kernels` what launches
    may name (an entry without a signature is not compared)."""

    instructions: Sequence[Instruction]
    given: frozenset[int]
    constant: frozenset[int]
    wanted: Sequence[int]
    specs: Mapping[int, TensorSpec]
    kernels: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def read(self) -> list[list[int]]:
        """What each instruction reads."""
        return list(map(reads, self.instructions))

    @cached_property
    def operators(self) -> dict[str, Any]:
        """The operators that are called, by name: None for functions of Python, an exception for what is no operator."""
        names = {i.target for i in self.instructions if isinstance(i, Call)}
        return {name: _found(name) for name in names}

    def operator(self, i: Instruction) -> Any | None:
        """The operator that an instruction calls; None for other instructions, and where there is none of that name."""
        found = self.operators[i.target] if isinstance(i, Call) else None
        return None if isinstance(found, Exception) else found

    @cached_property
    def roots(self) -> dict[int, set[int]]:
        """Value -> the values whose memory it may be."""
        return roots_of(self.instructions)

    def root(self, value: int) -> set[int]:
        return self.roots.get(value, {value})

    @cached_property
    def last_read(self) -> dict[int, int]:
        """Value -> the last position at which it, or what may be a view of it, is read; behind the end if it is wanted."""
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
    except (AttributeError, RuntimeError) as e:  # RuntimeError: torch's answer to a name that is none
        return e


Rule: TypeAlias = Callable[[Facts], Iterator[str]]


def _defined(f: Facts) -> Iterator[str]:
    """Each value is made once, and before it is read."""
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
    """A call names an operator that exists, and gives it arguments of the kinds that its schema has."""
    for k, i in enumerate(f.instructions):
        if isinstance(i, Call) and f.operators[i.target] is not None:
            for problem in _call_problems(i, f.operators[i.target], f.specs):
                yield f"{_name(k, i)} {problem}"


@dataclass(frozen=True)
class _Signature:
    """What calls of an operator are held to. `kinds` are the types of its arguments as the schema prints them."""

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
        elif kind == "Tensor" and isinstance(x, str):  # a number becomes a tensor
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
    elif not signature.listed and len(i.outs) > max(signature.results, 1):  # what gives nothing gives None
        yield f"takes {len(i.outs)} results of {signature.results}"


def _takes_tensor(kind: str) -> bool:
    return "Tensor" in kind or "number" in kind.lower() or kind == "t"


def _launched(f: Facts) -> Iterator[str]:
    """A launch gives its kernel what that takes, and makes tensors whose memory the host can lay out."""
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
    for what, pairs in (("inplace", i.inplace), ("updates", i.updates)):
        if any(not (0 <= o < len(i.outs) and 0 <= r < len(i.inputs)) for o, r in pairs):
            yield f"has {what} of arguments that it does not have"
            return
    for o, r in i.updates:
        a, b = f.specs.get(i.outs[o]), f.specs.get(i.inputs[r].id)
        if a is None or b is None or (a.shape, a.stride, a.dtype) != (b.shape, b.stride, b.dtype):
            yield f"updates %{i.inputs[r].id} as %{i.outs[o]}, which is another kind of tensor"
    kernel = f.kernels.get(i.kernel)
    if kernel is not None and hasattr(kernel, "buffers"):
        yield from _signature_problems(i, kernel, f.specs)


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
    """What a launch writes over has no later reader: neither itself nor what shares its memory. Nor is it constant."""
    for k, i in enumerate(f.instructions):
        if not isinstance(i, Launch):
            continue
        for o, r in i.updates:
            if not (o < len(i.outs) and r < len(i.inputs)):
                continue  # `_launched` says so
            x, out = i.inputs[r].id, i.outs[o]
            memory = f.root(x)
            if memory & f.constant:
                yield f"{_name(k, i)} writes over the constant %{x}"
            if sum(bool(f.root(a.id) & memory) for a in i.inputs) > 1:
                yield f"{_name(k, i)} writes over %{x}, which it reads twice"
            for later, j in enumerate(f.instructions[k + 1 :], k + 1):
                if any(f.root(r) & memory for r in f.read[later]) and not _copies_back(j, x, out):
                    yield f"{_name(later, j)} reads %{x} after {_name(k, i)} wrote over it"
            if any(f.root(w) & memory for w in f.wanted):
                yield f"a result may be %{x}, which {_name(k, i)} writes over"


def _copies_back(i: Instruction, x: int, out: int) -> bool:
    """Whether the instruction is `copy_(x, out)`, of a tensor to itself by then."""
    return isinstance(i, Call) and i.target == "aten::copy_.default" and i.args[:2] == (Ref(x), Ref(out))


def _constants(f: Facts) -> Iterator[str]:
    """No call writes what must stay as it is."""
    for k, i in enumerate(f.instructions):
        operator = f.operator(i)
        if isinstance(i, Call) and operator is not None and ops.is_mutating(operator):
            for v in written_by(i):
                if f.root(v) & f.constant:
                    yield f"{_name(k, i)} writes the constant %{v}"


RULES: tuple[Rule, ...] = (_defined, _called, _launched, _updates, _constants)
"""What every list of instructions obeys."""


def find_problems(plan: Plan, kernels: Mapping[str, Any] | None = None) -> Iterator[str]:
    """One line per violation. `kernels` are what the plan's launches name, by hash; default: the plan's own."""
    kernels = plan.kernels if kernels is None else kernels
    held = frozenset(plan.attributes)
    weights = frozenset(plan.prepare_inputs)
    prepare = Facts(plan.prepare, weights | held, weights | held, plan.prepare_outputs, plan.specs, kernels)
    fixed = frozenset(i for i in plan.inputs if i in plan.specs and plan.specs[i].const)
    given = frozenset(plan.inputs) | held | frozenset(plan.prepare_outputs)
    wanted = [r for o in plan.outputs for r in refs(o)]
    constant = fixed | frozenset(plan.prepare_outputs)
    main = Facts(plan.instructions, given, constant, wanted, plan.specs, kernels)
    yield from _interface_problems(plan, fixed, prepare)
    for rule in RULES:
        yield from (f"prepare: {p}" for p in rule(prepare))
        yield from rule(main)


def _interface_problems(plan: Plan, fixed: frozenset[int], prepare: Facts) -> Iterator[str]:
    """Inputs and constants: each input is one value, and what is prepared is made of constants alone."""
    if len(set(plan.inputs)) < len(plan.inputs):
        yield "an input is given twice"
    for v in plan.prepare_inputs:
        if v not in fixed:
            yield f"prepare: %{v} is no constant input"
    made = {o for i in plan.prepare for o in i.outs}
    for v in plan.prepare_outputs:
        if v not in made:
            yield f"prepare: %{v} is not made there"
    for k, i in enumerate(plan.prepare):
        if isinstance(i, CallPython):
            yield f"prepare: {_name(k, i)} is an opaque function"
        elif isinstance(i, Call) and _unrepeatable(prepare.operators[i.target]):
            yield f"prepare: {_name(k, i)} does not give the same each time"


def _unrepeatable(operator: Any) -> bool:
    if isinstance(operator, Exception):
        return False  # `_called` says so
    return operator is None or ops.is_random(operator) or ops.is_mutating(operator)


def check(plan: Plan, stage: str, kernels: Mapping[str, Any] | None = None) -> None:
    """Raise `PlanError` with every problem found after `stage`."""
    problems = list(find_problems(plan, kernels))
    if problems:
        raise PlanError(f"the plan is not valid after {stage}:\n  " + "\n  ".join(problems))


def placement_problems(plan: Plan, placement: Placement) -> Iterator[str]:
    """Memory of kernels' results: no slot of the arena and no tensor is taken over while a value in it is still read."""
    wanted = [r for o in plan.outputs for r in refs(o)]
    f = Facts(plan.instructions, frozenset(plan.inputs), frozenset(), wanted, plan.specs)
    born = {o: k for k, i in enumerate(plan.instructions) for o in i.outs}
    forced = {i.outs[o] for i in plan.instructions if isinstance(i, Launch) for o, _ in i.updates}
    end = _ends(f, placement)
    for out, source in placement.onto.items():
        if out not in forced and f.last_read.get(source, -1) > born[out]:
            yield f"%{out} takes over %{source}, which is read after that"
    slots = [(v, at, at + storage_bytes(plan.specs[v])) for v, at in placement.offset.items() if v not in placement.onto]
    for v, low, high in slots:
        if low < 0 or high > placement.arena_bytes:
            yield f"%{v} lies outside of the arena"
        if any(v in f.root(w) for w in wanted):
            yield f"%{v} is a result, but lies in the arena"
    yield from _overlaps(slots, born, end)


def _ends(f: Facts, placement: Placement) -> dict[int, int]:
    """Value -> the last position at which its memory is read, by whoever took it over too."""
    end = dict(f.last_read)
    for out, source in reversed(placement.onto.items()):
        end[source] = max(end.get(source, -1), end.get(out, -1))
    return end


def _overlaps(slots: Sequence[tuple[int, int, int]], born: Mapping[int, int], end: Mapping[int, int]) -> Iterator[str]:
    """Values that live at the same time in the same bytes. A sweep over the order of birth."""
    alive: list[tuple[int, int, int]] = []
    for v, low, high in sorted(slots, key=lambda s: born[s[0]]):
        alive = [a for a in alive if max(end.get(a[0], -1), born[a[0]]) >= born[v]]
        for other, start, stop in alive:
            if low < stop and start < high:
                yield f"%{v} lies where %{other} still lives"
        alive.append((v, low, high))


def fragment_problems(region: Region, fragment: Fragment, specs: Mapping[int, TensorSpec]) -> Iterator[str]:
    """What is wrong with a backend's fragment. `specs` are of its temporaries; those of the region's values it has itself."""
    known = {v.id: v.spec for op in region.ops for v in (*op.inputs(), *op.outs) if v.spec is not None}
    known.update((v.id, v.spec) for v in region.inputs if v.spec is not None)
    given = frozenset(v.id for v in region.inputs)
    wanted = [v.id for v in region.outputs]
    f = Facts(fragment.instructions, given, given, wanted, {**specs, **known}, fragment.kernels)
    for rule in RULES:
        yield from rule(f)
    yield from _aliases(region, f)


def _aliases(region: Region, f: Facts) -> Iterator[str]:
    """A result is memory of an input only where it may be in eager too."""
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


def _views(region: Region) -> dict[int, set[int]]:
    """Values of a region -> the inputs whose memory they may be in eager."""
    found: dict[int, set[int]] = {}
    for op in region.ops:
        shared = set().union(*(found.get(v.id, {v.id}) for v in op.inputs())) if _is_view(op) else set()
        found.update((v.id, shared) for v in op.outs)
    return found


def _is_view(op: OpView) -> bool:
    return may_alias(Call(op.target, (), ()))


@cache
def _viewed(operator: Any) -> tuple[tuple[int, str], ...]:
    """Arguments whose memory the results of an operator certainly are, by its schema: positions and names."""
    if compat.is_composite(operator):
        return ()  # `contiguous`, `reshape`, `to` say so too, and often copy
    schema = operator._schema
    shared: set[str] = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    return tuple(
        (k, a.name) for k, a in enumerate(schema.arguments)
        if a.alias_info is not None and shared & set(a.alias_info.before_set)
    )  # fmt: skip


def _given(i: Instruction, arguments: Sequence[tuple[int, str]]) -> Iterator[int]:
    """The values that a call gives as these arguments."""
    for k, name in arguments:
        assert isinstance(i, Call)
        yield from refs(i.args[k] if k < len(i.args) else dict(i.kwargs).get(name))


def _name(k: int, i: Instruction) -> str:
    what = i.target if isinstance(i, Call) else f"kernel {i.kernel[:8]}" if isinstance(i, Launch) else i.name
    return f"instruction {k} ({what})"
