"""Signatures of groups: hashable values, independent of ids, so that equal groups share a kernel and twelve layers build only
one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fusewright.interface import TensorSpec, Value
from fusewright.sizes.expr import values, with_values
from fusewright.toolkit.fuse.build import Built, Root, Unit
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.kinds import Domain

LIMIT = 1024
"""The most kernels kept for groups that may recur."""


class Signature:
    """Numbers the values of a group in the order of first use. Groups with equal `parts` have the same kernel."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.parts: list[Hashable] = []
        self.number: dict[int, int] = {}
        self.ids: list[int] = []

    def of(self, units: Sequence[Unit], domain: Domain, order: Sequence[int], roots: Sequence[Root]) -> Hashable:
        for u in units:
            args = tuple(self.arg(a) for a in u.op.args)
            outs = tuple((self._fresh(v.id), layout(v.spec)) for v in u.op.outs)
            self.parts.append((u.op.op, getattr(u.rule, "outs", ()), args, outs))
        stored = tuple((self.arg(r.value), r.level) for r in roots)
        return tuple(self.parts), domain, tuple(order), stored, self.flow.rounds

    def arg(self, a: Any) -> Hashable:
        if isinstance(a, Value):
            return ("%", self.value(a))
        if isinstance(a, tuple):
            return tuple(self.arg(x) for x in a)
        return repr(a)  # repr distinguishes -0.0 from 0.0 and True from 1

    def value(self, v: Value) -> int:
        """The number of a value. Views and inlined ops behind it become part of the signature."""
        made = self.flow.producer.get(v.id)
        if v.id in self.number:
            return self.number[v.id]
        if made is not None and (self.flow.is_view(made[0]) or self.flow.is_inline(made[0])):
            op, k = made
            self.parts.append((op.op, k, tuple(self.arg(a) for a in op.args), tuple(layout(o.spec) for o in op.outs)))
        else:
            self.parts.append(layout(v.spec) if v.spec is not None else ("size", v.dim))
        return self._fresh(v.id)

    def _fresh(self, i: int) -> int:
        if i not in self.number:
            self.number[i] = len(self.ids)
            self.ids.append(i)
        return self.number[i]


def layout(spec: TensorSpec | None) -> Hashable:
    """The properties of a tensor that a kernel depends on."""
    return None if spec is None else (spec.shape, spec.stride, spec.dtype)


class KernelMemo:
    """An LRU cache of kernels by signature, with values numbered as `Signature` numbers them."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._found: OrderedDict[Hashable, Built] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable, ids: Sequence[int]) -> Built | None:
        with self._lock:
            found = self._found.get(key)
            if found is None:
                return None
            self._found.move_to_end(key)
        return _renumbered(found, ids)

    def put(self, key: Hashable, number: dict[int, int], built: Built) -> None:
        if not number.keys() >= {i for s in built.sizes for i in values(s)}:
            return  # a size comes from a value that the signature does not cover
        with self._lock:
            self._found[key] = _renumbered(built, number)
            while len(self._found) > self._limit:
                self._found.popitem(last=False)


def _renumbered(built: Built, ids: Sequence[int] | Mapping[int, int]) -> Built:
    inputs, outs = (tuple(ids[i] for i in values) for values in (built.inputs, built.outs))
    checked, partly = (frozenset(ids[i] for i in values) for values in (built.checked, built.partly))
    sizes = tuple(with_values(s, ids) for s in built.sizes)
    return Built(built.kernel, built.hash, inputs, outs, built.inplace, sizes, checked, partly)


MEMO = KernelMemo()
"""Shared by all graphs of the process: kernels are plain data and depend only on their signature."""
