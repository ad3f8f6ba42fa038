"""Regions built by hand and fragments run by hand: what a test of a backend needs, without the host.

g = Sketch()
x, w = g.input(torch.randn(4, 8)), g.input(torch.randn(16, 8), const=True)
y = g.op("gelu", g.op("linear", x, w))
fragment = backend.compile(g.region([y]), Context({"prepack": "always"}))
(ours,) = g.run(fragment, [y])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusewright import ops
from fusewright.interface import Device, Fragment, OpView, Phase, Region, TensorSpec, Value
from fusewright.plan.ir import Call, Instruction
from fusewright.toolkit.library import ref


def spec_of(t: torch.Tensor, const: bool = False) -> TensorSpec:
    """The spec of a tensor."""
    return TensorSpec(tuple(t.shape), t.stride(), t.dtype, "cpu", const)


def operator(target: str) -> Any:
    """The overload called "aten::add.Tensor"."""
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


class Sketch:
    """A graph drawn op by op. Every op also runs in eager, so that specs and expected results are there."""

    def __init__(self, phase: Phase = "infer") -> None:
        self.phase = phase
        self.inputs: list[Value] = []
        self.ops: list[OpView] = []
        self.tensors: dict[int, torch.Tensor] = {}

    def input(self, t: torch.Tensor, const: bool = False) -> Value:
        """A tensor that comes from outside; `const`: a weight."""
        value = self._value(t, const)
        self.inputs.append(value)
        return value

    def _value(self, t: torch.Tensor | None, const: bool = False) -> Value:
        """A result that an op does not compute is None."""
        value = Value(len(self.tensors) + 1, None if t is None else spec_of(t, const))
        self.tensors[value.id] = t  # type: ignore[assignment]
        return value

    def op(self, name: str, *args: Any, **kwargs: Any) -> Value:
        """Append one op of the opset; its first result."""
        row = ops.OPS[name]
        bound = row.bind(args, kwargs)
        positional = [self._tensor(bound[p.name]) for p in row.params if not p.kwonly]
        named = {p.name: self._tensor(bound[p.name]) for p in row.params if p.kwonly}
        made = row.target(*positional, **named)
        results = tuple(made) if isinstance(made, tuple | list) else (made,)
        outs = tuple(self._value(r) for r in results)
        target = row.target.name()
        target = target if "." in target.split("::")[1] else f"{target}.default"
        frozen = tuple(tuple(a) if isinstance(a, list) else a for a in bound.values())
        self.ops.append(OpView(outs[0].id, name, target, tuple(bound), frozen, outs))
        return outs[0]

    def _tensor(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return self.tensors[arg.id]
        if isinstance(arg, tuple | list):
            return [self._tensor(a) for a in arg]
        return arg

    def region(self, outputs: Sequence[Value]) -> Region:
        """Everything drawn, as one region."""
        return Region("region0", tuple(self.ops), tuple(self.inputs), tuple(outputs), self.phase)

    def expected(self, outputs: Sequence[Value]) -> list[torch.Tensor]:
        """What eager computed."""
        return [self.tensors[v.id] for v in outputs]

    def run(self, fragment: Fragment, outputs: Sequence[Value]) -> list[torch.Tensor]:
        """What the fragment computes from the same inputs, which must stay as they are."""
        env: dict[int, Any] = {v.id: self.tensors[v.id] for v in self.inputs}
        before = {v.id: self.tensors[v.id].clone() for v in self.inputs}
        evaluate(fragment.instructions, env)
        for i, t in before.items():
            assert torch.equal(t.nan_to_num(), self.tensors[i].nan_to_num()), f"input {i} was overwritten"
        return [env[v.id] for v in outputs]


def evaluate(instructions: Sequence[Instruction], env: dict[int, Any]) -> None:
    """Run calls in order over a dictionary of values, which receives the results."""
    for i in instructions:
        assert isinstance(i, Call), f"no evaluator for {type(i).__name__}"
        args = _resolved(i.args, env)
        result = operator(i.target)(*args, **{k: _resolved(v, env) for k, v in i.kwargs})
        results = result if i.packed or len(i.outs) > 1 else (result,)
        for o, r in zip(i.outs, results, strict=True):
            assert o not in env, f"value {o} is made twice"
            env[o] = r


def _resolved(arg: Any, env: Mapping[int, Any]) -> Any:
    if isinstance(arg, tuple | list):
        return [_resolved(a, env) for a in arg]
    return env[arg.id] if hasattr(arg, "id") else arg


def by_preference(*names: str) -> Callable[[str, Sequence[str]], str]:
    """A choice for `Context`: the first of `names` that is a candidate."""
    return lambda key, candidates: next(n for n in names if n in candidates)


def first(key: str, candidates: Sequence[str]) -> str:
    """A choice for `Context`: the first candidate."""
    return candidates[0]


@dataclass
class Context:
    """A `CompileContext` without a host: choices are given, not measured."""

    options: Mapping[str, Any]
    device: Device
    pick: Callable[[str, Sequence[str]], str] = first
    asked: list[str] = field(default_factory=list)
    _next: int = 1000

    def value(self, spec: TensorSpec | None) -> Value:
        self._next += 1
        return Value(self._next, spec)

    def aten(self, op: OpView) -> Call:
        row = ops.OPS[op.op]
        positional = tuple(ref(op.arg(p.name)) for p in row.params if not p.kwonly)
        named = tuple((p.name, ref(op.arg(p.name))) for p in row.params if p.kwonly)
        packed = len(row.target._schema.returns) > 1
        return Call(op.target, positional, tuple(o.id for o in op.outs), named, packed=packed, op_id=op.id)

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Any]]) -> str:
        self.asked.append(key)
        return self.pick(key, list(candidates))


def targets(fragment: Fragment, once: bool = False) -> list[str]:
    """Names of the calls for goldens, "mkldnn::_linear_pointwise": those made once, or those of each run."""
    calls = [i for i in fragment.instructions if isinstance(i, Call) and i.once is once]
    return [i.target.removesuffix(".default") for i in calls]


def symbolic(op: OpView, **shapes: tuple[Any, ...]) -> OpView:
    """A copy of `op` whose named tensor arguments have other (symbolic) shapes."""
    args = tuple(
        replace(a, spec=replace(a.spec, shape=shapes[n])) if n in shapes else a
        for n, a in zip(op.argnames, op.args, strict=True)
    )
    return replace(op, args=args)
