"""What may be recorded: why a plan cannot be, decided from the plan alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

import torch

from fusewright import ops
from fusewright.interface import HOST, TensorSpec
from fusewright.ops import namespaces
from fusewright.plan.build import Plan, generators, operator_of, written_values
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, Ref, reads, refs
from fusewright.plan.memory import roots_of
from fusewright.plan.vocabulary import WAIT
from fusewright.sizes.expr import NumberOf, SizeExpr, names, symbol

FEWEST = 3
"""Plans with fewer instructions are not worth recording."""

_FACTORIZATION = re.compile(r"_?linalg_(?!vector_norm|cross|vecdot|solve_triangular)|_?cholesky|geqrf|or(gqr|mqr)|_?lu_with_info")
"""Operators whose libraries read results back from the device, or that call such operators (`linalg_pinv`). A capture that one
of them breaks leaves its library broken."""

_UNSAFE = torch.Tag.cudagraph_unsafe

_ASYNCHRONOUS = ("c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of collectives for which another operator waits."""


def obstacle(plan: Plan, device: str, training: bool = False, numbers: bool = False) -> str | None:
    """Why a plan cannot be recorded on devices of this type, or None, decided from the plan alone. Of `training`, results are
    checked elsewhere, and nothing but arithmetic of numbers runs beside a recording. Recordings draw random numbers from the
    device's own generator, as eager does. `numbers`: they take numbers that are sizes of launches."""
    apart = counted(plan) if training else beside(plan, device)
    instructions = [i for k, i in enumerate(plan.instructions) if k not in apart]
    if len(instructions) < FEWEST:
        return "too few instructions"
    used = {r for i in instructions for r in reads(i)}
    given = generators(plan)
    if given and not training:  # a warm-up or a measurement would draw from them
        return "it draws from a generator that it is given"
    scalars = {i for i in used.intersection(plan.inputs) - given if i in plan.scalars or i not in plan.specs}
    if scalars and not (numbers and not given and only_launched(plan, instructions, scalars)):
        return "an input is a number"
    if any(map(names_sizes, instructions)):
        return "sizes are symbolic"
    if (pending := _pending(plan)) is not None:
        return f"what {pending} returns is read before anybody waits for it"
    if _waits_for_an_input(plan):
        return "it waits for a collective that was started elsewhere"
    made = {o for i in instructions for o in i.outs}
    if any(not s.static for v, s in plan.specs.items() if v in made or v in plan.inputs):
        return "sizes are symbolic"
    roots = roots_of(plan.instructions)
    for i in instructions:
        if (why := unrecordable(i, plan, roots)) is not None:
            return why
    unknown = sorted(r.id for r in plan.outputs if isinstance(r, Ref) and r.id in made and r.id not in plan.specs)
    if unknown:
        return f"it is not known what value {unknown[0]}, a result, is"
    touched = {v for i in instructions for v in (*reads(i), *i.outs)}
    read = touched - host_scalars(plan)
    elsewhere = sorted({plan.specs[v].device for v in read if v in plan.specs} - devices(plan, device))
    if elsewhere:
        return f"a tensor is on {elsewhere[0]}"
    return None if training else result_obstacle(plan)


def only_launched(plan: Plan, instructions: Iterable[Instruction], scalars: Set[int]) -> bool:
    """Whether launches alone read these inputs, each as a size by itself. Recordings of plans that communicate take none."""
    alone = {symbol(NumberOf(v)) for v in scalars}

    def apart(i: Instruction) -> bool:
        others = replace(i, sizes=tuple(s for s in i.sizes if s not in alone)) if isinstance(i, Launch) else i
        return scalars.isdisjoint(reads(others)) and not communicates(i)

    return scalars <= plan.scalars.keys() and all(map(apart, instructions))


def names_sizes(i: Instruction) -> bool:
    """Whether a launch takes a symbol by its name, which a recording would keep as it was."""
    numbers = (*i.sizes, *i.scalars) if isinstance(i, Launch) else ()
    return any(True for x in numbers if isinstance(x, SizeExpr) for _ in names(x))


def passed_on(plan: Plan) -> dict[int, int]:
    """Map positions of results to positions of the inputs that they are, for what is no tensor: a mesh, for example."""
    return {
        k: plan.inputs.index(r.id)
        for k, r in enumerate(plan.outputs)
        if isinstance(r, Ref) and r.id in plan.inputs and r.id not in plan.specs
    }


def written_inputs(plan: Plan) -> set[int]:
    """Inputs (and tensors of the graph) that a run writes; writes to its own values do not count."""
    return written_values(plan) & {*plan.inputs, *plan.attributes}


def host_scalars(plan: Plan) -> set[int]:
    """Single-element host values that are the same in every call and that a device's operators take as numbers: made from
    nothing or from constants, without random numbers. A recording keeps them as they were; changed constants mean another
    recording. Excluded are values read by kernels and copies, which take addresses, results, which belong to the caller, and
    values written to."""
    taken = {r for i in plan.instructions if _takes_address(i) for r in (*reads(i), *i.outs)}
    taken |= written_values(plan) | {o.id for o in plan.outputs if isinstance(o, Ref)}

    def single(v: int) -> bool:
        found = plan.specs.get(v)
        return found is not None and found.shape == () and found.device == HOST and v not in taken

    scalars = {v for v in (*plan.prepare_outputs, *plan.attributes) if single(v)}
    for i in plan.instructions:
        if isinstance(i, Call) and i.outs and set(reads(i)) <= scalars and all(map(single, i.outs)):
            operator = operator_of(i.target)
            if operator is not None and not ops.call_draws(operator, i.args, dict(i.kwargs)):
                scalars.update(i.outs)
    return scalars


def beside(plan: Plan, device: str) -> frozenset[int]:
    """Positions of what runs at each call, beside a recording, since nothing recorded reads it."""
    return drawn_on_host(plan, device) | counted(plan)


def counted(plan: Plan) -> frozenset[int]:
    """Positions of arithmetic with inputs that are numbers, if nothing else reads them: caches of sliding windows count tokens."""
    calls = {k: i for k, i in enumerate(plan.instructions) if isinstance(i, Call) and i.target.startswith("py::")}
    return frozenset(_unread(calls, plan))


def drawn_on_host(plan: Plan, device: str) -> frozenset[int]:
    """Positions of calls that draw random numbers on the host, and of what is computed from them there, if no device of this type
    reads it: LayerDrop draws a number for each layer also where nothing is dropped. They run at each call, beside a recording."""
    if device == HOST:
        return frozenset()
    calls = {k: i for k, i in enumerate(plan.instructions) if isinstance(i, Call) and _on_host(i, plan)}
    found = _unread(calls, plan) if any(map(says_it_draws, calls.values())) else {}
    return frozenset(found) if any(map(says_it_draws, found.values())) else frozenset()


def _unread(calls: dict[int, Call], plan: Plan) -> dict[int, Call]:
    """The calls, by position, whose results only each other read, and that read nothing but those and inputs that are numbers."""
    while calls:
        made = {o for i in calls.values() for o in i.outs} | plan.scalars.keys()
        others = {r for k, i in enumerate(plan.instructions) if k not in calls for r in reads(i)}
        kept = {k: i for k, i in calls.items() if made.issuperset(reads(i)) and others.isdisjoint(i.outs)}
        if len(kept) == len(calls):
            break
        calls = kept
    return calls


def _on_host(i: Call, plan: Plan) -> bool:
    """Whether a call does nothing but make tensors of fixed sizes on the host."""
    operator = operator_of(i.target)
    specs = [plan.specs.get(o) for o in i.outs]
    pure = operator is not None and not ops.is_mutating(operator) and not foreign(i) and not communicates(i)
    return pure and bool(specs) and all(s is not None and s.static and s.device == HOST for s in specs)


def says_it_draws(i: Instruction) -> bool:
    """Whether an instruction draws random numbers and is tagged so."""
    operator = operator_of(i.target) if isinstance(i, Call) else None
    return isinstance(i, Call) and operator is not None and ops.call_draws(operator, i.args, dict(i.kwargs))


def _takes_address(i: Instruction) -> bool:
    """Whether a replayed instruction may read host memory: kernels, and copies between devices."""
    operator = operator_of(i.target) if isinstance(i, Call) else None
    return operator is None or any(a.name == "non_blocking" for a in operator._schema.arguments)


def plan_device(plan: Plan, device: str) -> str:
    """The one device of this type that the plan is on."""
    return next(iter(devices(plan, device)))


def devices(plan: Plan, device: str) -> set[str]:
    """The devices of this type that the plan uses."""
    found = sorted({s.device for s in plan.specs.values() if s.device.partition(":")[0] == device})
    return set(found[:1])


def unrecordable(i: Instruction, plan: Plan, roots: Mapping[int, set[int]]) -> str | None:
    """Why an instruction cannot be recorded, whatever the sizes and places of its values, or None."""
    why = _misplaced(i, plan, roots)
    return why if why is not None or communicates(i) else _varying(i, plan.specs)  # a collective is called, never recorded


def _varying(i: Instruction, specs: Mapping[int, TensorSpec]) -> str | None:
    """Why an instruction may act differently from replay to replay, or waits for the device."""
    if isinstance(i, CallPython):
        return f"{i.name} is an opaque function"
    if isinstance(i, Launch):
        return None
    operator = operator_of(i.target)
    if operator is None:
        return "sizes are computed at run time"
    if _UNSAFE in operator.tags:
        return f"{i.target} is tagged as unsafe to record"
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(operator.tags) and not _by_positions(i, specs):
        return f"the result of {i.target} depends on data"
    if operator.namespace == "aten" and _FACTORIZATION.match(operator._opname):
        return f"{i.target} may wait for the device"
    return None


def draws(plan: Plan) -> bool:
    """Whether a plan draws random numbers, or may: operators of extensions often do without a tag that says so."""
    return any(foreign(i) or says_it_draws(i) for i in plan.instructions)


def _by_positions(i: Call, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether this is an `index` by positions alone, with one element each; a mask selects a data-dependent number."""
    if i.target != "aten::index.Tensor":
        return False
    indices = [specs.get(r.id) for r in i.args[1] if isinstance(r, Ref)]
    return all(s is not None and s.dtype in (torch.int64, torch.int32) for s in indices)


def communicates(i: Instruction) -> bool:
    """Whether an instruction is a collective or, among several processes, an unknown operator. It is never repeated to warm up,
    measured or recorded, because the other processes would have to do the same at the same call."""
    operator = operator_of(i.target) if isinstance(i, Call) else None
    return operator is not None and namespaces.communicates(operator.namespace)


def foreign(i: Instruction) -> bool:
    """Whether an instruction runs code that may have effects besides those that it declares: draw random numbers, for example."""
    operator = operator_of(i.target) if isinstance(i, Call) else None
    return operator is not None and not namespaces.only_computes(operator.namespace)


def _pending(plan: Plan) -> str | None:
    """The first collective whose result something other than a collective (`wait_tensor` is one) reads, if there is one."""
    ready = {r for i in plan.instructions if not communicates(i) for r in reads(i)}
    ready |= {r.id for r in plan.outputs if isinstance(r, Ref)}
    starts = (i for i in plan.instructions if isinstance(i, Call) and _starts(i.target))
    return next((i.target for i in starts if ready.intersection(i.outs)), None)


def _waits_for_an_input(plan: Plan) -> bool:
    """Whether a plan waits for one of its inputs, of which a recording has a copy that nobody waits for."""
    waits = [i for i in plan.instructions if isinstance(i, Call) and i.target == WAIT]
    roots = roots_of([i for i in plan.instructions if i in waits or not communicates(i)])
    return any(roots.get(r, {r}) & set(plan.inputs) for i in waits for r in reads(i))


def _starts(target: str) -> bool:
    """Whether a collective returns before its result is there: `wait_tensor` must be called on that."""
    return target.partition("::")[0] in _ASYNCHRONOUS and "wait_tensor" not in target


def _misplaced(i: Instruction, plan: Plan, roots: Mapping[int, set[int]]) -> str | None:
    """Why an instruction would read something else from a copy of an input: it depends on the input's storage offset."""
    found = {r for v in located(i) for r in roots.get(v, {v})} & set(plan.inputs)
    return "it matters where an input begins in its storage" if found else None


def located(i: Instruction) -> set[int]:
    """Values of which it matters to an instruction where they begin in their storage."""
    if isinstance(i, Launch):
        return i.located
    return set(refs(i.args)) if isinstance(i, Call) and _given_offset(i) else set()


def _given_offset(call: Call) -> bool:
    """Whether a call (`as_strided` and the like) takes a storage offset."""
    operator = operator_of(call.target)
    names = [a.name for a in operator._schema.arguments] if operator is not None else []
    return {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}.get("storage_offset") is not None


def result_obstacle(plan: Plan) -> str | None:
    """Results that are inputs or views of them, which a recording would return as copies."""
    made = {o for i in plan.instructions for o in i.outs}
    roots = roots_of(plan.instructions)
    passed = passed_on(plan)
    results = [r.id for k, r in enumerate(plan.outputs) if isinstance(r, Ref) and k not in passed]
    if not results and not written_inputs(plan):
        return "there are no results"
    if any(not roots.get(r, {r}) <= made for r in results):
        return "a result may share memory with an input"
    return None
