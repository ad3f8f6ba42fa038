"""Find which handwritten kernels the calls of a region need, by running the operators on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fusewright.interface import TensorSpec
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.region.builder import Builder
from fusewright_triton.run.handwritten import OPERATORS, Order, noting


def orders(b: Builder) -> list[Order]:
    """Return the code that the calls of a rewritten region need, each once. Calls on symbolic sizes request theirs at run time."""
    calls = [i for c in b.calls for i in c.instructions if isinstance(i, Call)]
    if not any(c.target in OPERATORS for c in calls):
        return []
    values = (v for op in (*b.graph, *b.ops) for v in (*op.inputs(), *op.outs))
    specs = {v.id: v.spec for v in values if v.spec is not None}
    makers = {out: c for c in calls for out in c.outs}
    metas = _Metas(specs, makers)
    found: list[Order] = []
    with noting(found):
        for c in calls:
            if c.target in OPERATORS:
                metas.run(OPERATORS[c.target], c)
    return list(dict.fromkeys(found))


@dataclass
class _Metas:
    """Meta tensors for the values of a region: from their types, or made as the plan makes them."""

    specs: dict[int, TensorSpec]
    makers: dict[int, Call]
    made: dict[int, Any] = field(default_factory=dict)

    def run(self, function: Any, call: Call) -> Any:
        """Return the result of a call, or None where it is unknown before the call runs."""
        try:
            return function(*self._argument(call.args), **{k: self._argument(a) for k, a in call.kwargs})
        except (_Unknown, RuntimeError):  # torch has no metadata function for everything
            return None

    def _argument(self, a: Any) -> Any:
        if isinstance(a, Ref):
            if a.id not in self.made:
                self.made[a.id] = self._value(a.id)
            if self.made[a.id] is None:
                raise _Unknown
            return self.made[a.id]
        return [self._argument(x) for x in a] if isinstance(a, tuple | list) else a

    def _value(self, id: int) -> Any:
        spec, call = self.specs.get(id), self.makers.get(id)
        if spec is not None and spec.static:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")  # type: ignore[arg-type]
        if spec is not None or call is None:
            return None
        result = self.run(_operator(call.target), call)
        return result[call.outs.index(id)] if isinstance(result, tuple | list) else result


class _Unknown(Exception):
    """A value about which nothing is known."""


def _operator(target: str) -> Any:
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
