"""Runs fragments with kernels without the host: allocate, launch, compare. Loaders: the interpreter and LLVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright.interface import Device, DevicePolicy, Fragment, Region, TensorSpec, Value
from fusewright.plan.ir import Call, Launch, Ref
from fusewright.sizes.expr import Atom, Extent, NumberOf, OffsetOf, SizeOf, evaluate, leaves
from fusewright.toolkit.fuse.fuser import fuse
from fusewright.toolkit.fuse.signature import KernelMemo
from fusewright.toolkit.ir import Kernel, interpret
from fusewright_cpu.policy import CPU
from fusewright_cpu.run.jit import compile_kernels
from tests.fragments import Context, Sketch, operator

Run = Callable[[Sequence[torch.Tensor], Sequence[int], Sequence[Any]], None]
Loader = Callable[[Mapping[str, Kernel]], dict[str, Run]]


def by_interpreter(kernels: Mapping[str, Kernel]) -> dict[str, Run]:
    return {h: lambda t, s, c, k=k: interpret(k, t, s, c) for h, k in kernels.items()}  # type: ignore[misc]


def by_llvm(kernels: Mapping[str, Kernel]) -> dict[str, Run]:
    module = compile_kernels(list(kernels.values()))
    return {h: module.launcher(k).checked for h, k in kernels.items()}


LOADERS: dict[str, Loader] = {"interpreter": by_interpreter, "llvm": by_llvm}


class Temporaries(Context):
    """A context that records the specs of temporary values."""

    def __init__(self) -> None:
        super().__init__({}, Device("cpu", "test"))
        self.specs: dict[int, TensorSpec] = {}

    def value(self, spec: TensorSpec | None) -> Value:
        v = super().value(spec)
        if spec is not None:
            self.specs[v.id] = spec
        return v


def fused(region: Region, memo: KernelMemo | None = None, **kw: Any) -> tuple[Fragment, dict[int, TensorSpec]]:
    """Fuse a region; return the fragment and the specs of all its values."""
    ctx = Temporaries()
    fragment = fuse(region, ctx, memo=KernelMemo() if memo is None else memo, **{"policy": CPU, **kw})
    specs = {v.id: v.spec for op in region.ops for v in (*op.inputs(), *op.outs) if v.spec is not None}
    return fragment, {**ctx.specs, **specs}


def execute(fragment: Fragment, specs: Mapping[int, TensorSpec], env: dict[int, Any], loader: Loader) -> None:
    """Run the instructions over `env`, which receives the results."""
    code = loader(fragment.kernels)
    for i in fragment.instructions:
        if isinstance(i, Launch):
            _launch(i, fragment.kernels[i.kernel], code[i.kernel], specs, env)
        else:
            assert isinstance(i, Call)
            args = _resolved(i.args, env)
            made = operator(i.target)(*args, **{k: _resolved(v, env) for k, v in i.kwargs})
            results = made if i.packed or len(i.outs) > 1 else (made,)
            env.update(zip(i.outs, results, strict=True))


def _launch(i: Launch, kernel: Kernel, run: Run, specs: Mapping[int, TensorSpec], env: dict[int, Any]) -> None:
    shared = dict(i.updates)
    sizes = [_size(s, env) for s in i.sizes]
    for k, o in enumerate(i.outs):
        env[o] = env[i.inputs[shared[k]].id] if k in shared else _empty(specs[o])
    run([env[v] for v in (*(r.id for r in i.inputs), *i.outs)], sizes, i.scalars)


def _empty(spec: TensorSpec) -> torch.Tensor:
    assert spec.static
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).fill_(77 if spec.dtype != torch.bool else 1)  # type: ignore[arg-type]


def _size(s: Extent, env: Mapping[int, Any]) -> int:
    return evaluate(s, {a: _read(a, env) for a in leaves(s)})


def _read(a: Atom, env: Mapping[int, Any]) -> int:
    match a:
        case SizeOf():
            return int(env[a.value].shape[a.dim])
        case OffsetOf():
            return int(env[a.value].storage_offset())
        case NumberOf():
            return int(env[a.value])
    raise AssertionError(f"{a!r} is read off no value")


def _resolved(arg: Any, env: Mapping[int, Any]) -> Any:
    if isinstance(arg, tuple | list):
        return [_resolved(a, env) for a in arg]
    return env[arg.id] if isinstance(arg, Ref) else arg


def run_sketch(
    g: Sketch, outputs: Sequence[Value], loader: Loader = by_interpreter, policy: DevicePolicy = CPU
) -> tuple[Fragment, list[Any]]:
    """Fuse the sketch and run it; return the fragment and the outputs."""
    fragment, specs = fused(g.region(outputs), policy=policy)
    env = {v.id: g.tensors[v.id] for v in g.inputs}
    before = {i: t.clone() for i, t in env.items()}
    execute(fragment, specs, env, loader)
    for i, t in before.items():
        assert torch.equal(t.nan_to_num(), g.tensors[i].nan_to_num()), f"input {i} was overwritten"
    return fragment, [env[v.id] for v in outputs]


def kernel_count(fragment: Fragment) -> int:
    """Count the launches in a fragment."""
    return sum(isinstance(i, Launch) for i in fragment.instructions)
