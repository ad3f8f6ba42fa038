"""Update inputs and other values in place, if nobody needs the old content any more.

A functional graph computes `new = index_copy(x, ...)` and ends with `copy_(x, new)`: it copies all of `x` twice to change a few
elements. Here the kernel writes to `x` itself. The final copy becomes one of a tensor to itself, which torch skips; it stays
because it counts as a change of `x`.

A library call that overwrites one of its operands is given a copy of it. If nobody reads the original later, it is given that. An
all-reduce overwrites its operand where nobody reads that later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fusewright.interface import TensorSpec
from fusewright.plan.build import Plan, shared_by, written_by
from fusewright.plan.ir import Call, Instruction, Launch, Ref, reads
from fusewright.plan.memory import roots_of
from fusewright.plan.vocabulary import ALL_REDUCE, COPIES, OVERWRITING_ALL_REDUCE

COPY = "aten::copy_.default"
CLONE = "aten::clone.default"


def updated_in_place(plan: Plan) -> Plan:
    """Return a plan with launches that write into its inputs, possibly reordered; `plan` itself if there are none.

    Inputs of a graph share no memory if one of them is written: AOTAutograd ensures it.
    """
    roots, uses = roots_of(plan.instructions), _Uses()
    seen = {root for r in plan.outputs if isinstance(r, Ref) for root in roots.get(r.id, {r.id})}
    given = {i for i in plan.inputs if i in plan.specs and not plan.specs[i].const} - seen
    found = plan.instructions
    for c in plan.instructions:
        pair = _copied(c)
        if pair is None or pair[0] not in given or pair[1] in seen or not _alike(plan.specs, *pair):
            continue
        if _touched(found, roots, uses, *pair) == 1:
            found = _scattered(found, c, *pair, plan.kernels, uses) or _computed(found, c, *pair, uses) or found
    return plan if found is plan.instructions else replace(plan, instructions=found)


class _Uses:
    """What each instruction reads and which arguments it writes, found once: a training step has hundreds of copies, and each looks
    at all instructions."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Instruction, frozenset[int], frozenset[int]]] = {}

    def _of(self, i: Instruction) -> tuple[Instruction, frozenset[int], frozenset[int]]:
        if id(i) not in self._found:  # an id is unique while its object lives
            written = frozenset(written_by(i)) if isinstance(i, Call) else frozenset()
            self._found[id(i)] = i, frozenset(reads(i)), written
        return self._found[id(i)]

    def reads(self, i: Instruction) -> frozenset[int]:
        return self._of(i)[1]

    def writes(self, i: Instruction) -> frozenset[int]:
        """Arguments that a call writes; a launch has `updates`."""
        return self._of(i)[2]


def without_spare_copies(plan: Plan) -> Plan:
    """Return a plan without copies that nobody reads, and whose calls overwrite values instead of copies made for them where nobody
    reads the values later."""
    found = plan.instructions
    for c in plan.instructions:
        if isinstance(c, Call) and c.target == CLONE and isinstance(c.args[0], Ref):
            found = _without_copy(found, c, plan) or found
    return plan if found is plan.instructions else replace(plan, instructions=found)


def _without_copy(instructions: list[Instruction], copy: Call, plan: Plan) -> list[Instruction] | None:
    x, (y,) = copy.args[0].id, copy.outs
    users = [i for i in instructions if y in reads(i)]
    if len(users) > 1 or y in {r.id for r in plan.outputs if isinstance(r, Ref)}:
        return None
    if not users:  # a lowering restored strides for an op that it then had no need of
        return [i for i in instructions if i is not copy]
    (user,) = users
    if not isinstance(user, Call) or list(written_by(user)) != [y] or list(shared_by(user)) != [y] or reads(user).count(y) != 1:
        return None
    a, b = plan.specs.get(x), plan.specs.get(user.outs[0])
    if a is None or b is None or (a.shape, a.stride, a.dtype, a.device) != (b.shape, b.stride, b.dtype, b.device):
        return None
    if not _dies(x, copy, instructions, plan):
        return None
    changed = replace(user, args=tuple(Ref(x) if a == Ref(y) else a for a in user.args))
    return [changed if i is user else i for i in instructions if i is not copy]


def _dies(x: int, at: Call, instructions: Sequence[Instruction], plan: Plan) -> bool:
    """Whether a call may overwrite the memory of `x`: it is the plan's own, and nobody reads it later but through the call's
    results."""
    roots = roots_of(instructions)
    memory = roots.get(x, {x})
    later = [r for i in instructions[instructions.index(at) + 1 :] for r in reads(i)]
    later += [r.id for r in plan.outputs if isinstance(r, Ref)]
    others = (roots.get(r, {r}) for r in later)
    kept = {*plan.inputs, *plan.attributes, *plan.prepare_outputs}
    return not memory & kept and not any(memory & other and not other & set(at.outs) for other in others)


def reduced_in_place(plan: Plan) -> Plan:
    """Return a plan whose all-reduces overwrite their operands where nobody reads these later; `plan` itself if there are none."""
    changed = [_overwriting(i, plan) if isinstance(i, Call) and i.target == ALL_REDUCE else i for i in plan.instructions]
    return plan if changed == plan.instructions else replace(plan, instructions=changed)


def _overwriting(i: Call, plan: Plan) -> Call:
    x, out = i.args[0].id, i.outs[0]
    fine = x in plan.specs and _alike(plan.specs, x, out) and _row_major(plan.specs[x]) and _dies(x, i, plan.instructions, plan)
    return replace(i, target=OVERWRITING_ALL_REDUCE) if fine else i


def _row_major(spec: TensorSpec) -> bool:
    """Whether a tensor of fixed sizes is contiguous, as process groups require of operands that they overwrite."""
    step = 1
    for n, s in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if n != 1 and s != step:
            return False
        step *= int(n)  # type: ignore[arg-type]
    return True


def copied_together(plan: Plan) -> Plan:
    """Merge consecutive copies into one call per type; return `plan` itself if there are none."""
    roots = roots_of(plan.instructions)
    found: list[Instruction] = []
    for _, run in groupby(plan.instructions, lambda i: _copied(i) is not None):
        found += _joined(list(run), plan, roots)
    return plan if len(found) == len(plan.instructions) else replace(plan, instructions=found)


def _joined(run: Sequence[Instruction], plan: Plan, roots: Mapping[int, set[int]]) -> Sequence[Instruction]:
    """Merge copies into fewer calls if none touches what another one writes. Copies of a tensor to itself are free."""
    pairs = [pair for pair in map(_copied, run) if pair is not None]
    if len(pairs) < 2:
        return run
    touched = Counter(root for pair in pairs for root in {r for v in pair for r in roots.get(v, {v})})
    if any(touched[root] > 1 for x, _ in pairs for root in roots.get(x, {x})):
        return run
    updated = {i.outs[o] for i in plan.instructions if isinstance(i, Launch) for o, _ in i.updates}
    wanted = {r for i in plan.instructions for r in reads(i)} | {r.id for r in plan.outputs if isinstance(r, Ref)}
    kinds: dict[Any, list[int]] = {}
    for k, (x, new) in enumerate(pairs):
        a, b = plan.specs.get(x), plan.specs.get(new)
        plain = a and b and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        alone = not plain or new in updated or wanted.intersection(run[k].outs)
        kinds.setdefault(k if alone or a is None else (a.dtype, a.device), []).append(k)
    return [
        Call(COPIES, tuple([Ref(pairs[k][side]) for k in kind] for side in (0, 1)), ()) if len(kind) > 1 else run[kind[0]]
        for kind in kinds.values()
    ]


def _copied(i: Instruction) -> tuple[int, int] | None:
    """The (target, source) of a copy into a tensor, or None."""
    if isinstance(i, Call) and i.target == COPY and all(isinstance(a, Ref) for a in i.args[:2]):
        return i.args[0].id, i.args[1].id
    return None


def _alike(specs: Mapping[int, TensorSpec], x: int, new: int) -> bool:
    """Whether a kernel that makes `new` could write to `x` instead: same type, and no two elements at one address."""
    a, b = specs[x], specs.get(new)
    if b is None or not a.static or (a.shape, a.stride, a.dtype, a.device) != (b.shape, b.stride, b.dtype, b.device):
        return False
    real = sorted((int(step), int(n)) for step, n in zip(a.stride, a.shape, strict=True) if n != 1)  # type: ignore[arg-type]
    end = 0
    for step, n in real:
        if step <= end:
            return False
        end += step * (n - 1)
    return True


def _touched(instructions: Sequence[Instruction], roots: Mapping[int, set[int]], uses: _Uses, x: int, new: int) -> int:
    """Count the instructions that write `x` or `new`, or are calls that read `x` (and might make a view of it)."""
    count = 0
    for i in instructions:
        if isinstance(i, Launch):
            count += any(i.inputs[k].id in (x, new) for _, k in i.updates)
        else:
            count += x in uses.reads(i) or any(new in roots.get(r, {r}) for r in uses.writes(i))
    return count


def _scattered(
    instructions: list[Instruction], copy: Instruction, x: int, new: int, kernels: Mapping[str, Any], uses: _Uses
) -> list[Instruction] | None:
    """If a scatter starts from a copy of `x`, make it start from `x` and drop the copy."""
    update = next((i for i in instructions if isinstance(i, Launch) and new in i.outs), None)
    if update is None:
        return None
    out = update.outs.index(new)
    position = next((k for o, k in update.updates if o == out), None)
    if position is None or Ref(x) in update.inputs:
        return None
    begun = update.inputs[position].id
    start = next((i for i in instructions if begun in i.outs), None)
    if not isinstance(start, Launch) or start.outs != (begun,) or start.inputs != (Ref(x),):
        return None
    if not copies(kernels[start.kernel]) or sum(begun in uses.reads(i) for i in instructions) != 1:
        return None
    at = instructions.index(update)
    if any(x in uses.reads(i) for i in instructions[at:] if i is not copy):
        return None
    given = tuple(Ref(x) if k == position else r for k, r in enumerate(update.inputs))
    return [replace(update, inputs=given) if i is update else i for i in instructions if i is not start]


def copies(kernel: Any) -> bool:
    """Whether a kernel only copies: it stores every element that it loads, unchanged and at the same index."""
    nodes = list(kernel.nodes())
    loads, stores = ([n for n in nodes if n.op == op] for op in ("load", "store"))
    if len(loads) != 1 or len(stores) != 1 or kernel.r or any(n.op not in ("load", "cast", "store") for n in nodes):
        return False
    (load,), (store,) = loads, stores
    types = kernel.buffers[load.buffer].dtype, kernel.buffers[store.buffer].dtype
    plain = not load.args and len(store.args) == 1 and not store.how
    return plain and types[0] == types[1] and load.index == store.index


def _computed(
    instructions: list[Instruction], copy: Instruction, x: int, new: int, uses: _Uses
) -> list[Instruction] | None:
    """If a kernel computes each element of `new` from the same element of `x`, make it overwrite `x`, after all other readers."""
    launch = next((i for i in instructions if isinstance(i, Launch) and new in i.outs), None)
    if launch is None or launch.inputs.count(Ref(x)) != 1:
        return None
    pair = (launch.outs.index(new), launch.inputs.index(Ref(x)))
    if pair not in launch.inplace or any(pair[0] == o or pair[1] == k for o, k in launch.updates):
        return None
    at = instructions.index(launch)
    after = [k for k, i in enumerate(instructions) if k > at and i is not copy and x in uses.reads(i)]
    rest = tuple(p for p in launch.inplace if p[0] != pair[0] and p[1] != pair[1])
    changed = replace(launch, inplace=rest, updates=(*launch.updates, pair))
    if not after:
        return [changed if i is launch else i for i in instructions]
    between = instructions[at + 1 : after[-1] + 1]
    if any(_hinders(i, launch) for i in between):
        return None
    return [*instructions[:at], *between, changed, *instructions[after[-1] + 1 :]]


def _hinders(i: Instruction, launch: Launch) -> bool:
    """Whether `launch`, which precedes `i`, cannot be moved behind it."""
    if set(reads(i)) & set(launch.outs):
        return True
    if isinstance(i, Launch):
        return any(i.inputs[k] in launch.inputs for _, k in i.updates)
    return not isinstance(i, Call) or any(True for _ in written_by(i))
