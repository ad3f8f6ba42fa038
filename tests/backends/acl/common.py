"""Shared by the tests of graviton_acl. Fragments run with the oneDNN of this machine's torch, which uses ACL on aarch64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusewright import accuracy, machine
from fusewright.interface import Device, Fragment, Value
from fusewright_acl import verbose
from fusewright_acl.backend import GravitonAcl
from tests.fragments import Context, Sketch, by_preference

HERE = machine.arch() == "aarch64"
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = {F32: "fp32", BF16: "bf16"}


def core(name: str = "neoverse-v1") -> Device:
    """A core of the table as a real device, not marked as simulated, with the products of its own oneDNN."""
    found = GravitonAcl.simulated({"target": name})
    assert isinstance(found, Device)
    products = {"mkldnn_bf16"} if "bf16" in found.features else set[str]()
    return Device(found.type, found.arch, found.features | products)


def compiled(g: Sketch, outputs: list[Value], *prefer: str, on: str = "neoverse-v1", **options: Any) -> Fragment:
    """Lower the whole sketch, choosing the first available form of `prefer`."""
    g.temporaries.clear()  # those of an earlier fragment
    pick = by_preference(*prefer, "packed", "point", "blas", "bf16", "aten", "eager", "kernel")
    device = core(on)
    ctx = Context({**GravitonAcl.options, **options}, device, pick, specs=g.temporaries)
    result = GravitonAcl(device).compile(g.region(outputs), ctx)
    assert isinstance(result, Fragment)
    return result


def check(g: Sketch, outputs: list[Value], *prefer: str, on: str = "neoverse-v1", **options: Any) -> Fragment:
    """Lower, run, and judge by fp64 and eager's error; return the fragment for further checks."""
    fragment = compiled(g, outputs, *prefer, on=on, **options)
    wide = exact(g, outputs)
    found, _ = without_references(lambda: g.run(fragment, outputs))
    for ours, eager, w in zip(found, g.expected(outputs), wide, strict=True):
        assert [s for n, s in zip(ours.shape, ours.stride(), strict=True) if n > 1] == [
            s for n, s in zip(eager.shape, eager.stride(), strict=True) if n > 1
        ]
        verdict = accuracy.compare([w], [eager], [ours], DTYPES[eager.dtype])
        assert verdict.passed, verdict
    return fragment


def without_references(run: Callable[[], Any]) -> tuple[Any, list[verbose.Execution]]:
    """Return the result of `run` and what oneDNN executed; on aarch64, fail if a reference kernel did heavy work."""
    kept: list[Any] = []
    seen = verbose.executed(lambda: kept.append(run()))
    assert not HERE or not verbose.references(seen), verbose.references(seen)
    return kept[0], seen


def exact(g: Sketch, outputs: list[Value]) -> list[torch.Tensor]:
    """The sketch's outputs computed in fp64."""
    wide = Sketch(g.phase)
    values: dict[int, Value] = {}
    for v in g.inputs:
        t = g.tensors[v.id]
        values[v.id] = wide.input(t.double() if t.is_floating_point() else t, const=bool(v.spec and v.spec.const))
    for op in g.ops:
        first = wide.op(op.op, *(_moved(a, values) for a in op.args))
        made = next(o for o in wide.ops if o.outs[0] is first)
        values.update({old.id: new for old, new in zip(op.outs, made.outs, strict=True)})
    return [wide.tensors[values[v.id].id] for v in outputs]


def _moved(arg: Any, values: dict[int, Value]) -> Any:
    if isinstance(arg, Value):
        return values[arg.id]
    return tuple(_moved(a, values) for a in arg) if isinstance(arg, tuple) else arg


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def judged(fn: Callable[..., Any], wide: Callable[..., Any], eager: Callable[..., Any], *args: torch.Tensor) -> accuracy.Accuracy:
    """Judge `fn` against `eager` and against `wide` in fp64, on the same arguments."""
    w, e, o = (f(*args) for f in (lambda *a: wide(*(t.double() for t in a)), eager, fn))
    return accuracy.compare([w], [e], [o], DTYPES[e.dtype])
