"""Builds regions and runs fragments without the host, for tests of backends.

g = Sketch()
x, w = g.input(torch.randn(4, 8)), g.input(torch.randn(16, 8), const=True)
y = g.op("gelu", g.op("linear", x, w))
fragment = backend.compile(g.region([y]), Context({"prepack": "always"}, device, specs=g.temporaries))
(ours,) = g.run(fragment, [y])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fusewright import ops
from fusewright.interface import Device, Fragment, OpView, Phase, Region, RuleLog, TensorSpec, Value
from fusewright.plan.build import call_of
from fusewright.plan.ir import Call, Launch, Ref
from fusewright.toolkit.ir import Kernel, interpret
from fusewright_cpu.run.jit import compile_kernels


def spec_of(t: torch.Tensor, const: bool = False) -> TensorSpec:
    """The spec of a tensor."""
    return TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.device.type, const)


def operator(target: str) -> Any:
    """The overload called "aten::add.Tensor"."""
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


class Sketch:
    """A graph built op by op. Every op also runs in eager, which provides specs and expected results."""

    def __init__(self, phase: Phase = "infer") -> None:
        self.phase = phase
        self.inputs: list[Value] = []
        self.ops: list[OpView] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.temporaries: dict[int, TensorSpec] = {}

    def input(self, t: torch.Tensor, const: bool = False) -> Value:
        """Add an input; `const`: a weight."""
        value = self._value(t, const)
        self.inputs.append(value)
        return value

    def _value(self, t: torch.Tensor | None, const: bool = False) -> Value:
        """Make a value; `t` is None for a result that the op does not compute."""
        value = Value(len(self.tensors) + 1, None if t is None else spec_of(t, const))
        self.tensors[value.id] = t  # type: ignore[assignment]
        return value

    def op(self, name: str, *args: Any, **kwargs: Any) -> Value:
        """Append an op of the opset and return its first result."""
        row = ops.OPS[name]
        bound = row.bind(args, kwargs)
        positional = [self._tensor(bound[p.name]) for p in row.params if not p.kwonly]
        named = {p.name: self._tensor(bound[p.name]) for p in row.params if p.kwonly}
        made = row.target(*positional, **named)
        results = tuple(made) if isinstance(made, tuple | list) else (made,)
        given = list(_values(bound.values()))
        const = bool(given) and self.phase == "infer" and all(v.spec is not None and v.spec.const for v in given)
        outs = tuple(self._value(r, const) for r in results)  # marked as by the host
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
        """Return the whole graph as one region."""
        return Region("region0", tuple(self.ops), tuple(self.inputs), tuple(outputs), self.phase)

    def expected(self, outputs: Sequence[Value]) -> list[torch.Tensor]:
        """The results that eager computed."""
        return [self.tensors[v.id] for v in outputs]

    def exact(self, outputs: Sequence[Value]) -> list[torch.Tensor]:
        """The results in fp64, rounded once to eager's types: on some CPUs eager rounds partial sums of half types."""
        wide = Sketch(self.phase)
        made = {v.id: wide.input(_widened(self.tensors[v.id])) for v in self.inputs}
        for op in self.ops:
            wide.op(op.op, **dict(zip(op.argnames, _replaced(op.args, made), strict=True)))
            made.update(zip((v.id for v in op.outs), wide.ops[-1].outs, strict=True))
        return [torch.empty_like(self.tensors[v.id]).copy_(wide.tensors[made[v.id].id]) for v in outputs]

    def run(self, fragment: Fragment, outputs: Sequence[Value]) -> list[torch.Tensor]:
        """Run the fragment on the same inputs, which it must not modify."""
        env: dict[int, Any] = {v.id: self.tensors[v.id] for v in self.inputs}
        before = {v.id: self.tensors[v.id].clone() for v in self.inputs}
        evaluate(fragment, {**self.temporaries, **self._specs()}, env)
        for i, t in before.items():
            assert torch.equal(t.nan_to_num(), self.tensors[i].nan_to_num()), f"input {i} was overwritten"
        return [env[v.id] for v in outputs]

    def _specs(self) -> dict[int, TensorSpec]:
        made = [v for op in self.ops for v in op.outs]
        return {v.id: v.spec for v in (*self.inputs, *made) if v.spec is not None}


def _values(args: Iterable[Any]) -> Iterator[Value]:
    for a in args:
        if isinstance(a, Value):
            yield a
        elif isinstance(a, tuple | list):
            yield from _values(a)


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.is_floating_point() else t


def _replaced(arg: Any, made: Mapping[int, Value]) -> Any:
    if isinstance(arg, Value):
        return made[arg.id]
    return [_replaced(a, made) for a in arg] if isinstance(arg, tuple | list) else arg


def evaluate(fragment: Fragment, specs: Mapping[int, TensorSpec], env: dict[int, Any]) -> None:
    """Run instructions in order over a dictionary of values, which receives the results. Every tensor must match its
    spec; loop kernels run in the interpreter."""
    for i in fragment.instructions:
        assert not set(i.outs) & set(env), f"one of the values {i.outs} is made twice"
        if isinstance(i, Launch):
            _launch(i, fragment.kernels[i.kernel], specs, env)
        else:
            assert isinstance(i, Call), f"no evaluator for {type(i).__name__}"
            args = _resolved(i.args, env)
            result = operator(i.target)(*args, **{k: _resolved(v, env) for k, v in i.kwargs})
            env.update(zip(i.outs, result if i.packed or len(i.outs) > 1 else (result,), strict=True))
        for o in i.outs:
            if o in specs:
                _assert_is(env[o], specs[o], o)


def _assert_is(t: torch.Tensor, spec: TensorSpec, id: int) -> None:
    """Check a tensor against its spec, which the host relies on: kernels that read it are built for these strides."""
    made, wanted = ([s for n, s in zip(t.shape, x, strict=True) if n > 1] for x in (t.stride(), spec.stride))
    assert (tuple(t.shape), t.dtype, made) == (spec.shape, spec.dtype, wanted), f"value {id} is not what its spec says"


def _launch(i: Launch, kernel: Any, specs: Mapping[int, TensorSpec], env: dict[int, Any]) -> None:
    onto = dict(i.updates)
    for k, o in enumerate(i.outs):
        s = specs[o]
        fresh = torch.empty_strided(s.shape, s.stride, dtype=s.dtype)  # type: ignore[arg-type]
        env[o] = env[i.inputs[onto[k]].id] if k in onto else fresh.fill_(1)
    sizes = [int(env[s[1].id].shape[s[2]]) if isinstance(s, tuple) else int(_resolved(s, env)) for s in i.sizes]
    tensors = [env[v] for v in (*(r.id for r in i.inputs), *i.outs)]
    run = partial(interpret, kernel) if isinstance(kernel, Kernel) else compile_kernels([kernel]).launcher(kernel)
    run(tensors, sizes, _resolved(i.scalars, env))


def _resolved(arg: Any, env: Mapping[int, Any]) -> Any:
    if isinstance(arg, tuple | list):
        return [_resolved(a, env) for a in arg]
    return env[arg.id] if isinstance(arg, Ref) else arg


def by_preference(*names: str) -> Callable[[str, Sequence[str]], str]:
    """A `choose` for `Context` that takes the first of `names` among the candidates."""
    return lambda key, candidates: next(n for n in names if n in candidates)


def first(key: str, candidates: Sequence[str]) -> str:
    """A `choose` for `Context` that takes the first candidate."""
    return candidates[0]


@dataclass
class Context:
    """A `CompileContext` without a host; choices are given instead of measured."""

    options: Mapping[str, Any]
    device: Device
    pick: Callable[[str, Sequence[str]], str] = first
    asked: list[str] = field(default_factory=list)
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    """Specs of temporary values, which a fragment does not contain."""
    rules: RuleLog = field(default_factory=RuleLog)
    _next: int = 1000

    def value(self, spec: TensorSpec | None) -> Value:
        self._next += 1
        if spec is not None:
            self.specs[self._next] = spec
        return Value(self._next, spec)

    def aten(self, op: OpView) -> Call:
        return call_of(op)

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Any]]) -> str:
        self.asked.append(key)
        return self.pick(key, list(candidates))

    def provisional(self) -> None:
        self.asked.append("provisional")


def targets(fragment: Fragment, prepare: bool = False) -> list[str]:
    """List what runs, for goldens: "mkldnn::_linear_pointwise", or "kernel add_silu" for a loop kernel with these ops.
    `prepare`: list what runs once for constants."""
    found = []
    for i in fragment.instructions:
        if isinstance(i, Launch):
            found += [] if prepare else [f"kernel {fragment.kernels[i.kernel].name}"]
        elif isinstance(i, Call) and i.prepare is prepare:
            found.append(i.target.removesuffix(".default"))
    return found


def symbolic(op: OpView, **shapes: tuple[Any, ...]) -> OpView:
    """Copy `op` with other (symbolic) shapes of the named tensor arguments."""
    args = tuple(
        replace(a, spec=replace(a.spec, shape=shapes[n])) if n in shapes else a
        for n, a in zip(op.argnames, op.args, strict=True)
    )
    return replace(op, args=args)
