"""A region as values and their rules: producers, users, and ops cheap enough to recompute at each use (inlined ops)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from fusewright.interface import OpView, Value
from fusewright.toolkit.rules.kinds import Map, Row, Rule, View
from fusewright.toolkit.rules.space import Shape, factor_groups, shape_of, stride_of

RulesOf = Callable[[OpView], tuple[Rule, ...]]

INLINE_COST = 12
"""A map op of at most this many vector instructions may be recomputed by each of its users ..."""

INLINE_BYTES = 4
"""... if the bytes that it reads are at most 1/INLINE_BYTES of those that it writes, or half of them where the result has no
other reader: reading a value before a cast to a wider type is cheaper than behind it."""

READ_AGAIN = 4
"""How often an element may be recomputed rather than stored."""

INLINE_WORK = 64
"""The most vector instructions, with those of all that is computed there too, for which several readers recompute an element."""

INLINE_WINDOW = 128
"""The same for all elements of a window, which find what they read in a cache: batch norm and a clamp in front of 3x3 elements
are recomputed, a SiLU is not."""

PIECES = 2
"""The most tensors that are joined inside of a window."""

PAD = "constant_pad_nd"
JOINS = frozenset({"cat", "stack"})
PERMUTE = frozenset({"permute", "transpose", "t"})

INLINE_DEPTH = 12
"""The longest chain of inlined ops."""


class Flow:
    """The ops of a region that kernels may compute (`ops`), with their rules. `fixed`: ops computed by calls; `whole`: ops
    whose results are stored, so that all of their indices are checked; `rounds`: whether kernels round what they compute in half
    types and read themselves. In a training step the other graph may read a number from memory, or compute it again, beside
    statistics of it: a bias rounds all numbers of a binade alike, so that those of unrounded ones differ, which adds up in sums
    that nearly cancel (a gradient by the bias in front of a norm was off by 107 times eager's error).
    """

    def __init__(
        self,
        ops: Iterable[OpView],
        rules_of: RulesOf,
        fixed: frozenset[int] = frozenset(),
        needed: frozenset[int] = frozenset(),
        whole: frozenset[int] = frozenset(),
        rounds: bool = False,
    ) -> None:
        self.ops = {op.id: op for op in ops}
        self.needed, self.fixed, self.rounds = needed, fixed, rounds
        self._rules_of = rules_of
        self.producer: dict[int, tuple[OpView, int]] = {}
        self.users: dict[int, list[OpView]] = {}
        self._rules: dict[int, tuple[Rule, ...]] = {}
        self._inline: dict[int, int] = {}
        self._windows: set[int] = set()
        for op in self.ops.values():
            for v in op.inputs():
                self.users.setdefault(v.id, []).append(op)
        for op in self.ops.values():
            if op.id in fixed:
                continue
            rules = rules_of(op)
            if rules and isinstance(rules[0], View) and not is_alias(op):
                rules = (copy_of(rules[0]),)
            if not rules:
                continue
            self._rules[op.id] = rules
            for k, out in enumerate(op.outs):
                self.producer[out.id] = (op, k)
            self._zip(op, whole)
            depth = self._inline_depth(op, rules)
            if depth is not None and op.id not in whole:
                self._inline[op.id] = depth
                if self._has_window(op):
                    self._windows.add(op.id)

    def rules(self, op: OpView) -> tuple[Rule, ...]:
        """The rules by which kernels compute `op`; empty for a fixed op."""
        return self._rules.get(op.id, ())

    def rule(self, op: OpView, k: int) -> Rule:
        """The rule of output `k`."""
        rules = self._rules[op.id]
        if len(rules) == 1:
            return rules[0]
        return next(r for r in rules if isinstance(r, Row) and k in r.outs)

    def is_view(self, op: OpView) -> bool:
        rules = self.rules(op)
        return bool(rules) and isinstance(rules[0], View)

    def is_inline(self, op: OpView) -> bool:
        """Whether each user recomputes `op`."""
        return op.id in self._inline

    def _inline_depth(self, op: OpView, rules: tuple[Rule, ...]) -> int | None:
        rule = rules[0]
        if not isinstance(rule, Map) or len(op.outs) != 1 or op.out.spec is None:
            return None
        tiny = op.out.spec.numel_hint() <= 1
        if rule.cost > INLINE_COST and not tiny and not self._has_one_user(op, 1):
            return None
        depth = max((1 + self._depth(v) for v in op.inputs()), default=1)
        read, size = self._bytes_read(op), op.out.spec.bytes_hint()
        small = read * INLINE_BYTES <= size or (_about(2 * read, size) and op.out.id not in self.needed) or (tiny and read <= 64)
        small = small or (_about(read, size) and self._has_one_user(op))
        small = small or self._is_padded_once(op)
        small = small or (self._is_permuted_once(op) and (_about(read, size) or self._reads_permuted(op)))
        if small and not tiny and (self._has_window(op) or _pieces(op) > PIECES) and self._is_read_by_window(op.out):
            return None  # each window would compute all of those behind it, and each of its elements ask for every piece
        if small and not tiny and self._is_recomputed_at_length(op):
            return None
        return depth if small and depth <= INLINE_DEPTH else None

    def _is_recomputed_at_length(self, op: OpView) -> bool:
        """Whether several readers would compute more than `INLINE_WORK`, or those of a window more than `INLINE_WINDOW`: a sum over
        it has one for each of its elements, all behind one padding."""
        work, again = self._work(op), self._padded_reads(op)
        return (work > INLINE_WORK and not self._has_one_user(op)) or (again > READ_AGAIN and again * work > INLINE_WINDOW)

    def _work(self, op: OpView) -> int:
        """Return the vector instructions that recompute an element, up to INLINE_WORK: what is read behind several views (two
        neighbours in a spline's recursion) is computed for each, also where those are read so in turn."""
        todo: list[tuple[OpView, tuple[int, ...]]] = [(op, ())]
        total, seen = 0, set[tuple[int, tuple[int, ...]]]()
        while todo and total <= INLINE_WORK:
            found, views = todo.pop()
            if (found.id, views) in seen:
                continue
            seen.add((found.id, views))
            rule = self._rules[found.id][0]
            if isinstance(rule, Map):
                total += rule.cost
            else:
                views = (*views, found.id)
            behind = (self.producer[v.id][0] for v in found.inputs() if v.id in self.producer)
            todo += [(x, views) for x in behind if self.is_view(x) or self.is_inline(x)]
        return total

    def _has_window(self, op: OpView) -> bool:
        """Whether an op, or one inlined in it, computes an element from several neighbours."""
        return _is_window(self._rules_of(op)) or any(x.id in self._windows for x in self.inlined(op.inputs(), through=False))

    def _is_read_by_window(self, v: Value) -> bool:
        """Whether an op that computes an element from several neighbours reads a value, or a view of it."""
        users = [u for u in self.users.get(v.id, ()) if u.id not in self.fixed]
        return any(self._is_read_by_window(u.out) if self._views(u) else _is_window(self._rules_of(u)) for u in users)

    def _bytes_read(self, op: OpView) -> int:
        """Return the bytes in memory behind an op: of each input, or of what it is computed from if that is less."""
        found: dict[int, int] = {}
        for v in {v.id: v for v in op.inputs() if v.spec is not None}.values():
            sources = {x.id: x.spec.bytes_hint() for x in self.sources(v) if x.spec is not None}
            whole = v.spec.bytes_hint()  # type: ignore[union-attr]
            found.update(sources if _about(sum(sources.values()), whole) else {v.id: whole})
        return sum(found.values())

    def _has_one_user(self, op: OpView, times: int = READ_AGAIN) -> bool:
        """Whether a single kernel op reads the result, each element at most about `times` times, so that storing it gains
        nothing.
        """
        users = {u.id: u for u in self.users.get(op.out.id, ())}
        if len(users) != 1 or op.out.id in self.needed:
            return False
        (user,) = users.values()
        if user.id in self.fixed or user.out.spec is None:
            return False
        if self._views(user):
            return self._has_one_user(user, times)
        assert op.out.spec is not None
        once = user.op == PAD or user.out.spec.numel_hint() <= times * op.out.spec.numel_hint()  # whatever is added behind it
        return bool(self._rules_of(user)) and once

    def _is_padded_once(self, op: OpView, depth: int = 1, given: int = -1) -> bool:
        """Whether one kernel op pads the result, perhaps after others like `op`: it cannot share a loop with `op` except by
        computing it, and reads each element once. `given`: an operand that is computed there too."""
        if depth > INLINE_DEPTH or not self._has_one_user(op, 1) or self._alone_reads_kernels(op, given):
            return False
        (user,) = {u.id: u for u in self.users[op.out.id]}.values()
        while self._views(user) and self._has_one_user(user, 1):
            (user,) = {u.id: u for u in self.users[user.out.id]}.values()
        rules = self._rules_of(user)
        if user.op == PAD:
            return True
        return isinstance(rules[0], Map) and len(user.outs) == 1 and self._is_padded_once(user, depth + 1, op.out.id)

    def _padded_reads(self, op: OpView) -> int:
        """Return how many kernel ops read the result with zeros around it, as it is or behind views."""
        todo, count = [(u, False) for u in self.users.get(op.out.id, ())], 0
        while todo:
            user, padded = todo.pop()
            if user.op == PAD or self._views(user):
                todo += [(u, padded or user.op == PAD) for u in self.users.get(user.out.id, ())]
            else:
                count += padded and user.id not in self.fixed
        return count

    def _alone_reads_kernels(self, op: OpView, given: int) -> bool:
        """Whether only `op` reads what a kernel makes (`given` apart), which would be stored in place of the result of `op`."""
        made = {x.id for v in op.inputs() for x in self.sources(v) if x.id in self.producer and x.id != given}
        return any(i not in self.needed and len({u.id for u in self.users[i]}) == 1 for i in made)

    def _zip(self, stack: OpView, whole: frozenset[int]) -> None:
        """Inline what a stack along a new last dimension alone reads, if to store and read its tensors would move as many
        bytes as all that they are computed from: the parts of rotated pairs read the same pairs and angles."""
        if stack.op != "stack" or stack.out.spec is None or stack.arg("dim") not in (-1, stack.out.spec.rank - 1):
            return
        made: dict[int, OpView] = {}
        read = self._zipped(stack, made)
        direct = [self.producer[v.id][0].id for v in stack.inputs() if v.id in self.producer]
        if made.keys() & whole or len(made.keys() & set(direct)) < len(stack.arg("tensors")):
            return
        if sum(x.spec.bytes_hint() for x in read.values() if x.spec is not None) > 2 * stack.out.spec.bytes_hint():
            return
        for op in reversed(made.values()):  # operands first
            self._inline[op.id] = max((1 + self._depth(v) for v in op.inputs()), default=1)

    def _zipped(self, op: OpView, made: dict[int, OpView]) -> dict[int, Value]:
        """The values behind `op` after ops that it alone reads, which are added to `made`."""
        read: dict[int, Value] = {}
        for v in op.inputs():
            found = self.producer.get(v.id)
            if found is not None and self._may_zip(found[0]) and len(made) < INLINE_DEPTH:
                made[found[0].id] = found[0]
                read.update(self._zipped(found[0], made))
            elif v.spec is not None:
                read.update((x.id, x) for x in self.sources(v) if x.spec is not None)
        return read

    def _may_zip(self, op: OpView) -> bool:
        rules = self.rules(op)
        plain = bool(rules) and isinstance(rules[0], Map) and rules[0].cost <= INLINE_COST and not self._has_window(op)
        return plain and len(op.outs) == 1 and self._has_one_user(op)

    def _is_permuted_once(self, op: OpView) -> bool:
        """Whether one kernel op reads the result, in another order: it cannot share a loop with `op` except by computing it."""
        users = self.users.get(op.out.id, ())
        return len(users) == 1 and users[0].op in PERMUTE and self._has_one_user(op, 1)

    def _reads_permuted(self, op: OpView) -> bool:
        """Whether all that the op reads lies in another order in memory, so that no other order of its result is worse, and its
        reader takes each element once: rows may be read in several passes."""
        (user,) = self.users[op.out.id]
        while self._views(user) and len(self.users.get(user.out.id, ())) == 1:
            (user,) = self.users[user.out.id]
        rules = self._rules_of(user)
        return bool(rules) and isinstance(rules[0], Map) and self._are_permuted(op.inputs())

    def _are_permuted(self, values: Iterable[Value]) -> bool:
        for v in values:
            op = self.producer[v.id][0] if v.id in self.producer else None
            if v.spec is None or (op is not None and op.op in PERMUTE):
                continue
            if op is None or not (self.is_view(op) or self.is_inline(op)) or not self._are_permuted(op.inputs()):
                return False
        return True

    def _views(self, op: OpView) -> bool:
        rules = self._rules_of(op)
        return bool(rules) and isinstance(rules[0], View) and is_alias(op)

    def _depth(self, v: Value) -> int:
        made = self.producer.get(v.id)
        if made is None:
            return 0
        op = made[0]
        if self.is_view(op):
            return max((self._depth(x) for x in op.inputs()), default=0)
        return self._inline.get(op.id, 0)

    def inlined(self, values: Iterable[Value], through: bool = True) -> list[OpView]:
        """The inlined ops behind values; without `through`, not those behind other inlined ops."""
        found: dict[int, OpView] = {}
        todo, seen = [*values], set[int]()
        while todo:
            made = self.producer.get(todo.pop().id)
            if made is None or made[0].id in seen:
                continue
            op, inline = made[0], self.is_inline(made[0])
            seen.add(op.id)
            if inline:
                found[op.id] = op
            if self.is_view(op) or (inline and through):
                todo.extend(op.inputs())
        return list(found.values())

    def sources(self, v: Value) -> list[Value]:
        """The values behind views and inlined ops that `v` depends on."""
        found: dict[int, Value] = {}
        todo = [v]
        while todo:
            x = todo.pop()
            made = self.producer.get(x.id)
            if made is not None and (self.is_view(made[0]) or self.is_inline(made[0])):
                todo.extend(made[0].inputs())
            else:
                found.setdefault(x.id, x)
        return list(found.values())


def _is_window(rules: tuple[Rule, ...]) -> bool:
    return bool(rules) and isinstance(rules[0], Map) and rules[0].window


def _pieces(op: OpView) -> int:
    return len(op.arg("tensors")) if op.op in JOINS else 1


def _about(read: int, size: int) -> bool:
    """Whether something is no more than a size, apart from small operands (a number for each channel)."""
    return read * 8 <= size * 9


def is_alias(op: OpView) -> bool:
    """Whether a view op shares memory. A reshape may copy instead, depending on the strides of its argument."""
    if op.op != "reshape" or op.out.spec is None:
        return True
    source = op.arg("self").spec
    shape, stride = shape_of(source), stride_of(source)
    return all(_one_stride(shape, stride, a) for a, _ in factor_groups(shape, shape_of(op.out.spec)))


def _one_stride(shape: Shape, stride: Shape, dims: tuple[int, ...]) -> bool:
    """Whether these neighbouring dims can be addressed with a single stride."""
    real = [d for d in dims if shape[d] != 1]
    return all(stride[a] == stride[b] * shape[b] for a, b in pairwise(real))


_COPIES: dict[int, Map] = {}


def copy_of(view: View) -> Map:
    """Turn a view's rule into the rule of an op that copies."""
    found = _COPIES.get(id(view))
    if found is None:
        found = _COPIES[id(view)] = Map(lambda e, op, k, at: e.value(*view.code(op, k, at)), view.check)
    return found
