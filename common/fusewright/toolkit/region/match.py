"""Who uses which value in a region, and ops that read the same: what library calls with neighbours are found by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fusewright.interface import OpView, TensorSpec, Value


class Links:
    """Who uses which value, over the ops of one region. `escaping` are the ids of values that are used
    outside."""

    def __init__(self, ops: Iterable[OpView], escaping: frozenset[int]) -> None:
        self._users: dict[int, list[OpView]] = {}
        self._escaping = escaping
        for op in ops:
            for v in op.inputs():
                self._users.setdefault(v.id, []).append(op)

    def users(self, value: Value) -> Sequence[OpView]:
        """The ops that read `value`, one entry per argument that does."""
        return self._users.get(value.id, ())

    def only_user(self, value: Value) -> OpView | None:
        """The op that alone uses `value`, once; None when there are others, or it is used outside."""
        users = self.users(value)
        return users[0] if len(users) == 1 and value.id not in self._escaping else None

    def unused(self, value: Value) -> bool:
        """Whether nobody reads `value`."""
        return not self.users(value) and value.id not in self._escaping


def siblings(ops: Sequence[OpView], eligible: Callable[[OpView], bool]) -> list[tuple[OpView, ...]]:
    """Linears that read the same value, so that one product with concatenated weights computes all of them.

    Their weights agree in input size and dtype, and all have a bias or none has. Found groups are in graph
    order.
    """
    groups: dict[Any, list[OpView]] = {}
    for op in ops:
        if op.op == "linear" and eligible(op):
            x, w = op.arg("input"), op.arg("weight")
            groups.setdefault((x.id, w.spec.shape[1], w.spec.dtype, op.arg("bias") is None), []).append(op)
    return [tuple(g) for g in groups.values() if len(g) > 1]


def made_of(inputs: Iterable[Value], spec: TensorSpec) -> TensorSpec:
    """The spec of what a rewrite makes of `inputs`: a constant where they are, unless it has more elements than they."""
    given = [v.spec for v in inputs if v.spec is not None]
    const = all(s.const for s in given) and spec.numel_hint() <= sum(s.numel_hint() for s in given)
    return replace(spec, const=const)
