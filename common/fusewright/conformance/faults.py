"""C3: inject faults into the backend's claimed regions. Results must stay correct, or the error must name the backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright import report
from fusewright.conformance.settings import Settings, compiler
from fusewright.conformance.verdicts import Check, Verdict
from fusewright.interface import Backend, CompileContext, Compiled, Decline, Fragment, KernelCode, Opaque, Region
from fusewright.reference.faulty import FRAGMENT_FAULTS, broken
from fusewright.reference.interp import Interp

LEVEL = "C3"


class Net(nn.Module):
    """The model for faults: products, a norm, a softmax and loops, with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(48, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.norm(self.a(x)) + 1)
        z = torch.relu(y + y.flip(0)) * x.sum(-1, keepdim=True).exp()
        return self.b(y).softmax(-1), z


@dataclass(frozen=True)
class Fault:
    """`compile` wraps the backend's own. `error`: words that the error must contain; None if results must be correct. `bug`:
    whether the host must report a bug."""

    compile: Callable[[Callable[..., Compiled], Region, CompileContext], Compiled]
    error: str | None = None
    bug: bool = True


def _decline(own: Any, region: Region, ctx: CompileContext) -> Compiled:
    raise Decline("declined on purpose")


def _decline_one(own: Any, region: Region, ctx: CompileContext) -> Compiled:
    """Decline the last op of every region with more than one op."""
    if len(region.ops) > 1:
        raise Decline("declined on purpose", ops=[region.ops[-1].id])
    return own(region, ctx)


def _crash(own: Any, region: Region, ctx: CompileContext) -> Compiled:
    own(region, ctx)
    raise RuntimeError("crashed on purpose")


def _fragment(fault: str) -> Any:
    """Eager's own calls with a fault in the instructions."""
    change = FRAGMENT_FAULTS[fault]
    return lambda own, region, ctx: Fragment(tuple(change(region, ctx, [ctx.aten(op) for op in region.ops])))


def _opaque(fault: str) -> Any:
    """The table's reference with a fault in its results."""

    def compile(own: Any, region: Region, ctx: CompileContext) -> Compiled:
        right = Interp().compile(region, ctx)
        assert isinstance(right, Opaque)
        return Opaque(broken(fault, right.fn))

    return compile


FAULTS: Mapping[str, Fault] = {
    "declines": Fault(_decline, bug=False),
    "declines one op": Fault(_decline_one, bug=False),
    "raises in compile": Fault(_crash),
    "raises when run": Fault(_opaque("raises_at_run_time"), "failed on purpose"),
    "wrong shape": Fault(_opaque("wrong_shape"), "{name}.*has shape"),
    "wrong dtype": Fault(_opaque("wrong_dtype"), "{name}.*has dtype"),
    "wrong dtype in a fragment": Fault(_fragment("fragment_has_another_dtype")),
    "wrong strides in a fragment": Fault(_fragment("fragment_has_other_strides")),
    "returns an input": Fault(_opaque("returns_input"), "{name}.*shares memory with an input"),
    "returns an input in a fragment": Fault(_fragment("fragment_returns_an_input")),
    "changes an input": Fault(_opaque("mutates_input"), "{name}.*changed one of its inputs in place"),
    "changes an input in a fragment": Fault(_fragment("fragment_changes_an_input")),
    "drops a result": Fault(_fragment("fragment_drops_a_result")),
}

LOADING = "kernels that cannot be built"
"""The only fault outside `compile`, for backends with loop kernels."""


def names(settings: Settings) -> list[str]:
    return [*FAULTS, LOADING][:: settings.part]


def check(name: str, settings: Settings) -> Iterator[Check]:
    """Check one fault. If the backend claims nothing of the model, the check says so."""
    cls, taken = _faulty(settings.plugin(), name)
    fault = FAULTS.get(name) or Fault(_decline)
    torch.compiler.reset()
    torch.manual_seed(0)
    net = Net().eval().to(settings.tensors_on())
    x = (torch.arange(16 * 48).view(16, 48) % 29 / 29 - 0.5).to(settings.tensors_on())
    with torch.no_grad(), report.recording() as reports:
        wanted, before = net(x), x.clone()
        try:
            got = torch.compile(net, backend=compiler(settings.make(cls), settings.options()))(x)
        except Exception as e:  # any kind: it is judged below
            got = e
    bugs = [b for r in reports for b in r.bugs]
    verdict, detail = (
        _judge(fault, settings.backend, got, wanted, bugs) if taken else (Verdict.PASSED, "nothing to break here")
    )
    if fault.error is None and not torch.equal(before, x):
        verdict, detail = Verdict.WRONG, "the input of the model was changed"
    yield Check(LEVEL, name, verdict, detail)


def _faulty(cls: type[Backend], name: str) -> tuple[type[Backend], list[str]]:
    """The backend with the fault, and a list that receives the regions in which it was injected."""
    taken: list[str] = []

    def compile(self: Backend, region: Region, ctx: CompileContext) -> Compiled:
        taken.append(region.name)
        return FAULTS[name].compile(lambda r, c: cls.compile(self, r, c), region, ctx)

    def load(self: Backend, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        taken.append("load")
        raise RuntimeError("cannot be built on purpose")

    return type(f"Faulty{cls.__name__}", (cls,), {"load": load} if name == LOADING else {"compile": compile}), taken


def _judge(fault: Fault, backend: str, got: Any, wanted: Sequence[Tensor], bugs: Sequence[str]) -> tuple[Verdict, str]:
    if isinstance(got, Exception):
        text = str(got)
        if fault.error is not None and re.search(fault.error.format(name=re.escape(backend)), text, re.DOTALL):
            return Verdict.PASSED, ""
        return Verdict.ERROR, f"{type(got).__name__}: {text.partition(chr(10))[0]}"
    if fault.error is not None:
        return Verdict.ERROR, "no error was raised"
    for w, g in zip(wanted, got, strict=True):
        if (g.dtype, g.shape, g.stride()) != (w.dtype, w.shape, w.stride()):
            return (
                Verdict.WRONG,
                f"{g.dtype} {tuple(g.shape)} {g.stride()}, eager has {w.dtype} {tuple(w.shape)} {w.stride()}",
            )
        if not torch.allclose(g, w, rtol=1e-4, atol=1e-5):
            return Verdict.WRONG, "values differ from eager's"
    if fault.bug != any(backend in b for b in bugs):
        return Verdict.ERROR, f"reported bugs: {'; '.join(bugs) or 'none'}"
    return Verdict.PASSED, ""
