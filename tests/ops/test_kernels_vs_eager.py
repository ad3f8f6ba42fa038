"""Every kernel rule against eager: the samples of all rows, through the interpreter and the LLVM emitter.

Floating results are judged against fp64: at most twice eager's own error at that dtype, plus a few units in the last
place. Everything else is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from fusewright import ops
from fusewright.conformance.ops.calls import UNDEFINED, arguments
from fusewright.conformance.ops.cases import CASES
from fusewright.conformance.ops.judge import difference
from fusewright.conformance.ops.samples import Case
from fusewright.interface import Value
from fusewright.ops import Op
from fusewright.ops.oracle import evaluate
from fusewright.plan.ir import Launch
from fusewright.toolkit.ir import Kernel
from fusewright.toolkit.lower.tables import RULES, rules_of, verdict
from fusewright.toolkit.rules.kinds import View
from tests.fragments import Sketch
from tests.ops.test_rows import _params
from tests.unit.fuse.running import LOADERS, Loader, execute, fused

NOT_HERE = {"rms_norm_backward": "eager has no CPU kernel for it"}

ROWS = [op for op in ops.OPS.values() if op.name in RULES and op.name not in NOT_HERE]


def drawn(op: Op, args: list[Any], kwargs: dict[str, Any]) -> tuple[Sketch, tuple[Value, ...]]:
    """Make a sketch of this one call, and its results."""
    g = Sketch()

    def value(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return g.input(a)
        return [value(x) for x in a] if isinstance(a, list | tuple) else a

    g.op(op.name, *(value(a) for a in args), **{k: value(v) for k, v in kwargs.items()})
    return g, g.ops[-1].outs


def judge(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Check the accuracy contract; see the module docstring."""
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    assert not (why := difference(got, eager, exact)), why


def every_loader(kernels: Mapping[str, Kernel]) -> Iterable[Loader]:
    return LOADERS.values()


Loaders = Callable[[Mapping[str, Kernel]], Iterable[Loader]]
"""The ways to run the kernels of a fragment."""


def check(op: Op, args: list[Any], kwargs: dict[str, Any], loaders: Loaders = every_loader) -> bool:
    """Fuse one call and compare what each loader's code computes. Returns False if no kernel takes it."""
    g, outs = drawn(op, args, kwargs)
    view = g.ops[-1]
    if not verdict(view):
        return False
    real = [o for o in outs if o.spec is not None and 0 not in o.spec.shape]
    fragment, specs = fused(g.region(real))
    launched = any(isinstance(i, Launch) for i in fragment.instructions)
    assert launched or isinstance(rules_of(view)[0], View), "a claimed op went back to eager"
    with torch.no_grad():
        exact = evaluate(op, args, kwargs)
    for loader in loaders(fragment.kernels):
        env = {v.id: g.tensors[v.id] for v in g.inputs}
        execute(fragment, specs, env, loader)
        for k, (o, want) in enumerate(zip(outs, exact, strict=True)):
            if o in real and k not in UNDEFINED.get(op.name, ()):
                assert want is not None
                judge(env[o.id], g.tensors[o.id], want.to(torch.float64) if want.is_floating_point() else want)
    return True


@pytest.mark.parametrize(("op", "dtype", "case"), _params(ROWS))
def test_rule_follows_eager(op: Op, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = arguments(op, case, dtype)
    if not check(op, args, kwargs):
        pytest.skip("not claimed")


def test_every_rule_takes_one_of_its_samples() -> None:
    idle = []
    for op in ROWS:
        calls = [arguments(op, case, torch.float32) for case in CASES[op.name] if op.name not in INTEGER]
        calls += [arguments(op, case, torch.int64) for case in CASES[op.name] if op.name in INTEGER]
        if not any(verdict(drawn(op, *call)[0].ops[-1]) for call in calls):
            idle.append(op.name)
    assert not idle


INTEGER = {op.name for op in ROWS if op.name.startswith("bitwise_")}
