"""Update inputs and other values in place, if nobody needs the old content any more.

A functional graph computes `new = index_copy(x, ...)` and ends with `copy_(x, new)`: it copies all of `x` twice to change a few
elements. Here the kernel writes to `x` itself, as one does that computes all of `x` anew (`copy_` into a buffer). The final copy
becomes one of a tensor to itself; it stays because it counts as a change of `x`, which is all that the plan's text does for it.

A library call that overwrites one of its operands is given a copy of it. If nobody reads the original later, it is given that. An
all-reduce overwrites its operand where nobody reads that later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fusewright.interface import Dim, Size, TensorSpec
from fusewright.plan.build import Plan, shared_by, written_by
from fusewright.plan.ir import Call, Instruction, Launch, Ref, copied, reads, reads_content
from fusewright.plan.memory import held_elsewhere, roots_of
from fusewright.plan.vocabulary import ALL_REDUCE, COPIES, LISTED, OVERWRITING_ALL_REDUCE
from fusewright.toolkit.ir.extent import Extent, distinct

CLONE = "aten::clone.default"


def updated_in_place(plan: Plan) -> Plan:
    """Return a plan with launches that write into its inputs, possibly reordered; `plan` itself if there are none.

    Inputs of a graph share no memory if one of them is written: AOTAutograd ensures it.
    """
    roots = roots_of(plan.instructions)
    seen = {root for r in plan.outputs if isinstance(r, Ref) for root in roots.get(r.id, {r.id})}
    given = {i for i in plan.inputs if i in plan.specs and not plan.specs[i].const} - seen
    found = _Instructions(plan.instructions, roots)
    changed = False
    for c in plan.instructions:
        pair = copied(c)
        if pair is None or pair[0] not in given or pair[1] in seen or not _alike(plan.specs, *pair):
            continue
        if found.touch(*pair) == 1 and _scattered(found, c, *pair, seen, plan.kernels):
            changed = True
        elif found.only_copied(c, *pair):
            changed |= _computed(found, c, *pair) or _stored(found, c, *pair)
    return replace(plan, instructions=found.in_order()) if changed else plan


class _Instructions:
    """Instructions in order, and who makes, reads and writes each value, kept up to date by every edit: a step of an optimizer has
    thousands of copies, and each asks."""

    def __init__(self, given: Sequence[Instruction], roots: Mapping[int, set[int]]) -> None:
        self._roots = roots
        self._order: list[Instruction | None] = list(given)  # None where one was dropped
        self._at = {id(i): k for k, i in enumerate(given)}  # an id is unique while its object lives
        self._makers: dict[int, Instruction] = {}
        self._readers: dict[int, dict[int, Instruction]] = {}
        self._writers: dict[int, dict[int, Instruction]] = {}
        for i in given:
            self._add(i)

    def in_order(self) -> list[Instruction]:
        return [i for i in self._order if i is not None]

    def launch(self, made: int) -> Launch | None:
        """The launch that makes a value, if one does."""
        maker = self._makers.get(made)
        return maker if isinstance(maker, Launch) else None

    def readers(self, value: int) -> Collection[Instruction]:
        return self._readers.get(value, {}).values()

    def position(self, i: Instruction) -> int:
        return self._at[id(i)]

    def between(self, first: int, last: int) -> Iterator[Instruction]:
        """The instructions behind position `first`, up to `last`."""
        return (i for i in self._order[first + 1 : last + 1] if i is not None)

    def touch(self, x: int, new: int) -> int:
        """Count the instructions that write `x` or `new`, or are calls that read `x` (and might make a view of it)."""
        calls = [k for k, i in self._readers.get(x, {}).items() if not isinstance(i, Launch)]
        launches = [k for k, i in self._writers.get(x, {}).items() if isinstance(i, Launch)]
        return len({*calls, *launches, *self._writers.get(new, ())})

    def memory(self, value: int) -> set[int]:
        """The values whose memory a value may share."""
        return self._roots.get(value, {value})

    def only_copied(self, copy: Instruction, x: int, new: int) -> bool:
        """Whether nothing but a copy of `new` to `x` writes one of them."""
        return {*self._writers.get(x, ()), *self._writers.get(new, ())} == {id(copy)}

    def last_reader(self, x: int, copy: Instruction, default: int) -> int:
        """The last position, not before `default`, at which anything but `copy` reads `x` or what may be a view of it."""
        last, views, left = default, {x}, [x]
        while left:
            for i in self.readers(value := left.pop()):
                if i is copy:
                    continue
                last = max(last, self.position(i))
                more = set(i.outs) - views if not isinstance(i, Launch) and value in shared_by(i) else set()
                views |= more
                left += more
        return last

    def before(self, x: int, last: Instruction, apart: Collection[Instruction]) -> bool:
        """Whether all that reads elements of `x`, or of views of it, but the instructions `apart`, precedes `last`."""
        views, left = {x}, [x]
        while left:
            value = left.pop()
            for i in self._readers.get(value, {}).values():
                if any(i is other for other in apart) or value not in reads_content(i):
                    continue
                if i is last or self._at[id(i)] > self._at[id(last)]:
                    return False
                more = set(i.outs) - views if isinstance(i, Call) and value in shared_by(i) else set()
                views |= more
                left += more
        return True

    def put(self, new: Instruction, old: Instruction) -> None:
        """Put `new` in the place of `old`."""
        at = self._at[id(old)]
        self.drop(old)
        self._order[at], self._at[id(new)] = new, at
        self._add(new)

    def drop(self, old: Instruction) -> None:
        self._order[self._at.pop(id(old))] = None
        for value in old.outs:
            self._makers.pop(value, None)
        for kind, values in ((self._readers, reads(old)), (self._writers, self._written(old))):
            for value in values:
                kind[value].pop(id(old), None)

    def move(self, i: Instruction, last: int) -> None:
        """Move an instruction behind the one at position `last`, which follows it."""
        first = self._at[id(i)]
        self._order[first : last + 1] = [*self._order[first + 1 : last + 1], i]
        self._at.update((id(moved), k) for k in range(first, last + 1) if (moved := self._order[k]) is not None)

    def _add(self, i: Instruction) -> None:
        for value in i.outs:
            self._makers.setdefault(value, i)
        for kind, values in ((self._readers, reads(i)), (self._writers, self._written(i))):
            for value in values:
                kind.setdefault(value, {})[id(i)] = i

    def _written(self, i: Instruction) -> Iterable[int]:
        """What an instruction writes: a launch its inputs, a call the memory of its arguments."""
        if isinstance(i, Launch):
            return i.written
        return {root for r in written_by(i) for root in self._roots.get(r, {r})} if isinstance(i, Call) else ()


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
    kept |= {root for r in held_elsewhere(instructions) for root in roots.get(r, {r})}
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
    """Whether a tensor is evidently contiguous, as process groups require of operands that they overwrite."""
    step: Extent = 1
    for n, s in zip(reversed(_extents(spec.shape)), reversed(_extents(spec.stride)), strict=True):
        if n != 1 and s != step:
            return False
        step = step * n
    return True


def _extents(sizes: Iterable[Size]) -> list[Extent]:
    return [n.expr if isinstance(n, Dim) else n for n in sizes]


def copied_together(plan: Plan) -> Plan:
    """Merge consecutive copies into one call per type; return `plan` itself if there are none."""
    roots = roots_of(plan.instructions)
    found: list[Instruction] = []
    for _, run in groupby(plan.instructions, lambda i: copied(i) is not None):
        found += _joined(list(run), plan, roots)
    return plan if len(found) == len(plan.instructions) else replace(plan, instructions=found)


def _joined(run: Sequence[Instruction], plan: Plan, roots: Mapping[int, set[int]]) -> Sequence[Instruction]:
    """Merge copies into fewer calls if none touches what another one writes. Copies of a tensor to itself are free."""
    pairs = [pair for pair in map(copied, run) if pair is not None]
    if len(pairs) < 2:
        return run
    touched = Counter(root for pair in pairs for root in {r for v in pair for r in roots.get(v, {v})})
    if any(touched[root] > 1 for x, _ in pairs for root in roots.get(x, {x})):
        return run
    updated = {o for i in plan.instructions if isinstance(i, Launch) for o in i.written.values()}
    wanted = {r for i in plan.instructions for r in reads(i)} | {r.id for r in plan.outputs if isinstance(r, Ref)}
    kinds: dict[Any, list[int]] = {}
    for k, (x, new) in enumerate(pairs):
        a, b = plan.specs.get(x), plan.specs.get(new)
        plain = a and b and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and a.dtype in LISTED
        alone = not plain or new in updated or wanted.intersection(run[k].outs)
        kinds.setdefault(k if alone or a is None else (a.dtype, a.device), []).append(k)
    return [
        Call(COPIES, tuple([Ref(pairs[k][side]) for k in kind] for side in (0, 1)), ()) if len(kind) > 1 else run[kind[0]]
        for kind in kinds.values()
    ]


def copies_of_kernels(plan: Plan) -> set[int]:
    """The ops of copies into what a kernel has written already, as copies of a tensor to itself."""
    made = {out: x for i in plan.instructions if isinstance(i, Launch) for x, out in i.written.items()}
    found = set()
    for i in plan.instructions:
        x, new = copied(i) or (None, None)
        while new in made and new != x:
            new = made[new]
        if isinstance(i, Call) and i.op_id is not None and x is not None and new == x:
            found.add(i.op_id)
    return found


def _alike(specs: Mapping[int, TensorSpec], x: int, new: int) -> bool:
    """Whether a kernel that makes `new` could write to `x` instead: same type, and no two elements at one address."""
    a, b = specs[x], specs.get(new)
    if b is None or (a.shape, a.stride, a.dtype, a.device) != (b.shape, b.stride, b.dtype, b.device):
        return False
    return distinct(_extents(a.shape), _extents(a.stride))


def _scattered(
    found: _Instructions, copy: Instruction, x: int, new: int, kept: Collection[int], kernels: Mapping[str, Any]
) -> bool:
    """If scatters, each of which starts from a copy of what the one before made, begin with a copy of `x`, make all start from `x`
    and drop the copies."""
    scatters, made = list[tuple[Launch, int, Launch]](), new
    while made != x:
        scatter = _scatter(found, made, kernels)
        if scatter is None:
            return False
        update, position, start = scatter
        made = start.inputs[0].id
        if made in kept or start.inputs[0] in update.inputs or not found.before(made, update, (copy, start)):
            return False
        scatters.append(scatter)
    for update, position, start in scatters:
        given = tuple(start.inputs[0] if k == position else r for k, r in enumerate(update.inputs))
        found.put(replace(update, inputs=given), update)
        found.drop(start)
    return True


def _scatter(found: _Instructions, made: int, kernels: Mapping[str, Any]) -> tuple[Launch, int, Launch] | None:
    """The launch that makes a value by changing a copy that nothing else reads, the copy's place among its inputs, and the launch
    that copies."""
    update = found.launch(made)
    out = update.outs.index(made) if update is not None else None
    position = next((k for o, k in update.updates if o == out), None) if update is not None else None
    if update is None or position is None:
        return None
    begun = update.inputs[position].id
    start = found.launch(begun)
    if start is None or start.outs != (begun,) or len(start.inputs) != 1 or len(found.readers(begun)) != 1:
        return None
    return (update, position, start) if copies(kernels[start.kernel]) else None


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


def _computed(found: _Instructions, copy: Instruction, x: int, new: int) -> bool:
    """If a kernel computes each element of `new` from the same element of `x`, make it overwrite `x`, after all other readers."""
    launch = found.launch(new)
    if launch is None or Ref(x) not in launch.inputs or sum(x in found.memory(r.id) for r in launch.inputs) != 1:
        return False
    pair = (launch.outs.index(new), launch.inputs.index(Ref(x)))
    if pair not in launch.inplace or new in launch.written.values() or x in launch.written:
        return False
    at = found.position(launch)
    last = found.last_reader(x, copy, at)
    if last > at and any(_hinders(i, launch) for i in found.between(at, last)):
        return False
    rest = tuple(p for p in launch.inplace if p[0] != pair[0] and p[1] != pair[1])
    changed = replace(launch, inplace=rest, updates=(*launch.updates, pair))
    found.put(changed, launch)
    if last > at:
        found.move(changed, last)
    return True


def _stored(found: _Instructions, copy: Instruction, x: int, new: int) -> bool:
    """If a kernel computes `new` without `x`, make it there, after all other readers of `x`."""
    launch = found.launch(new)
    if launch is None or any(x in found.memory(r) for r in reads(launch)) or new in launch.written.values():
        return False
    at, out = found.position(launch), launch.outs.index(new)
    last = found.last_reader(x, copy, at)
    if any(_hinders(i, launch) for i in found.between(at, last)):
        return False
    rest = tuple(p for p in launch.inplace if p[0] != out)
    changed = replace(launch, inplace=rest, into=(*launch.into, (out, Ref(x))))
    found.put(changed, launch)
    found.move(changed, last)
    return True


def _hinders(i: Instruction, launch: Launch) -> bool:
    """Whether `launch`, which precedes `i`, cannot be moved behind it."""
    if set(reads(i)) & set(launch.outs):
        return True
    if isinstance(i, Launch):
        return not i.written.keys().isdisjoint(reads(launch))
    return not isinstance(i, Call) or any(True for _ in written_by(i))
