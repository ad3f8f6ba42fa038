"""Judges later calls of a compiled model, whose plans are replayed, traced or taken over by eager by then: each with numbers of
its own, so that what was kept of an earlier call shows.

A stale value is off by as much as the numbers changed. So a call is wrong if its error exceeds the largest of several draws of
eager's by far (`AMPLIFIED`) and is more than a small part (`SHARE`) of the largest change of that tensor between calls; accuracy
itself is judged by the first calls (`tests.zoo.check`). What the caller keeps must stay as it was.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo

from fusewright import report
from fusewright.bench import accuracy
from fusewright.bench.suite import Built, flatten_outputs
from tests.zoo.calls import (
    APART,
    DRAWS,
    Outputs,
    Verdict,
    beginning,
    floating,
    gradients,
    in_plain_ops,
    layout,
    moved_inputs,
    moved_module,
    said,
    seeded,
    widened,
)
from tests.zoo.catalog import Example

ORDER = (0, 0, 0, 1, 2, 0, 3)
"""The numbers of each call: the same ones until the plan is recorded, others later."""
KEPT = (3, 5)
"""Steps whose gradients are kept during the next: no recording may be replayed then."""
AMPLIFIED = 16
"""The largest error, as a multiple of eager's, and for integers the most places, that is not looked at."""
SHARE = 1 / 64
"""The largest error that is not looked at, as a part of what the numbers change, and of integers."""

Call = Callable[[int], Outputs]
"""Calls with the numbers of this index."""
Draw = Callable[[int, int], Outputs]
"""Calls eager with the numbers of an index moved by one rounding, differently for every seed."""


@dataclass
class Wanted:
    """Eager's and the exact results by the index of the numbers."""

    eager: Mapping[int, Outputs]
    exact: Mapping[int, Outputs]
    draw: Draw
    drawn: dict[int, list[Outputs]] = field(default_factory=dict)

    def draws(self, k: int) -> list[Outputs]:
        if k not in self.drawn:
            self.drawn[k] = [self.draw(k, seed) for seed in range(1, DRAWS)]
        return self.drawn[k]


@dataclass
class Kept:
    """Tensors that the caller keeps, and what they held."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def keep(self, tensors: Sequence[Tensor]) -> None:
        self.pairs += [(t, t.clone()) for t in tensors]

    def changed(self) -> bool:
        return any(not torch.equal(t.nan_to_num(), was.nan_to_num()) for t, was in self.pairs)


@torch.no_grad()
def calls(v: Verdict, example: Example, backend: str) -> Verdict:
    """Calls without gradients, with the same weights and other inputs. All results are kept."""
    module = example.module
    built = [Built(v.model, module, (), given, "fp32") for given in _numbers(example)]

    def compiled(backend: str) -> tuple[Call, Kept]:
        fn, kept = torch.compile(module, backend=backend), Kept()

        def call(k: int) -> Outputs:
            kept.keep(made := flatten_outputs(seeded(built[k], fn)))
            return made

        return call, kept

    def eager(k: int) -> Outputs:
        return flatten_outputs(seeded(built[k], None))

    def exact(k: int) -> Outputs:
        return accuracy.reference(replace(built[k], fn=in_plain_ops(module)))

    def draw(k: int, seed: int) -> Outputs:
        moved = replace(built[k], fn=moved_module(module, seed), kwargs=moved_inputs(built[k].kwargs, seed))
        return flatten_outputs(seeded(moved, None))

    return _judge(v, eager, exact, draw, compiled, backend)


def steps(v: Verdict, example: Example, backend: str) -> Verdict:
    """Training steps; weights are written in place between them, as an optimizer does, and so are statistics."""
    module, given = example.module.train(), _numbers(example)
    moved = [module, *(moved_module(module, k, APART) for k in range(1, len(given)))]

    def eager(k: int) -> Outputs:
        own = copy.deepcopy(moved[k])
        return gradients(own, own, given[k])

    def exact(k: int) -> Outputs:
        with accuracy.wide_arithmetic():
            own = in_plain_ops(moved[k]).double()
            return gradients(own, own, widened(given[k]))

    def draw(k: int, seed: int) -> Outputs:
        own = moved_module(moved[k], seed)
        return gradients(own, own, moved_inputs(given[k], seed))

    def compiled(backend: str) -> tuple[Call, Kept]:
        own, kept, made = copy.deepcopy(module), Kept(), 0
        begin, fn = beginning(own), torch.compile(own, backend=backend)

        def call(k: int) -> Outputs:
            nonlocal made
            if made - 1 not in KEPT:
                kept.pairs.clear()
            begin()
            own.load_state_dict(moved[k].state_dict())
            found = gradients(own, fn, given[k])
            if made in KEPT:
                kept.keep([p.grad for p in own.parameters() if p.grad is not None])
            made += 1
            return found

        return call, kept

    return _judge(v, eager, exact, draw, compiled, backend)


def _numbers(example: Example) -> list[dict[str, Any]]:
    """Inputs of each index: numbers are moved, rows of what is counted or named take each other's place."""
    given = [example.inputs]
    for k in range(1, max(ORDER) + 1):
        rolled = moved_inputs(_rolled(example.inputs, k), k, APART)
        given.append(rolled if _accepted(example, rolled) else moved_inputs(example.inputs, k, APART))
    return given


def _rolled(given: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Roll integers and masks by rows, all together."""
    named = {k: x for k, x in given.items() if isinstance(x, Tensor) and not floating(x) and x.dim() > 1}
    rows = Counter(len(x) for x in named.values()).most_common(1)
    return {k: x.roll(by, 0) if k in named and len(x) == rows[0][0] else x for k, x in given.items()}


def _accepted(example: Example, given: dict[str, Any]) -> bool:
    try:
        with torch.no_grad():
            copy.deepcopy(example.module)(**given)
    except (RuntimeError, ValueError, IndexError):  # what the model checks of its inputs
        return False
    return True


@dynamo.patch(use_numpy_random_stream=True)  # as the first calls are judged
def _judge(
    v: Verdict, eager: Call, exact: Call, draw: Draw, compiled: Callable[[str], tuple[Call, Kept]], backend: str
) -> Verdict:
    try:
        wanted = Wanted(*({k: make(k) for k in sorted(set(ORDER))} for make in (eager, exact)), draw)
    except Exception as error:  # a model that eager cannot run in this mode proves nothing about us
        return replace(v, status="not run", reason=said(error))
    with report.recording() as reports:
        found = _found(compiled, backend, wanted)
    replayed = sum(r.replay.startswith("replayed") for r in reports)
    v = replace(
        v, graphs=len(reports), lowered=sum(r.count("lowered") for r in reports), eager=sum(r.count("eager") for r in reports),
        bugs=[b for r in reports for b in r.bugs][:3], reason=f"{replayed} replayed" if replayed else "",
    )  # fmt: skip
    if not found:
        return v
    status = "crashed" if found.startswith("crash") else "wrong"
    other = _found(compiled, "aot_eager", wanted)
    return replace(v, status=f"{status} in aot_eager too" if other else status, reason=f"{found} | {other}" if other else found)


def _found(compiled: Callable[[str], tuple[Call, Kept]], backend: str, wanted: Wanted) -> str:
    """Describe what is wrong in the calls by this backend."""
    torch.compiler.reset()
    call, kept = compiled(backend)
    for n, k in enumerate(ORDER):
        try:
            got = call(k)
        except Exception as error:  # reported in the verdict
            return f"crash in call {n}: {said(error)}"
        if why := layout(got, wanted.eager[k]) or _stale(got, k, wanted):
            return f"call {n}: {why}"
        if kept.changed():
            return f"call {n} changed what an earlier one returned"
        del got  # a step's results, kept, would prevent the next replay
    return ""


def _stale(got: Outputs, k: int, wanted: Wanted) -> str:
    """Describe a tensor that is too far from the exact one, if there is one."""
    for n, (g, e, w) in enumerate(zip(got, wanted.eager[k], wanted.exact[k], strict=True)):
        found = accuracy.compare([w], [e], [g], "fp32")
        if found.passed:
            continue
        if not e.is_floating_point():
            if int((g != w).sum()) > AMPLIFIED * int((e != w).sum()) + g.numel() * SHARE:
                return f"tensor {n}: {int((g != e).sum())} of {g.numel()} integers differ from eager's"
            continue
        others = (x[n] for x in wanted.exact.values() if x[n].shape == w.shape)
        change = max(float((w - x).abs().nan_to_num().max()) for x in others)
        if found.err_max <= SHARE * change:
            continue
        eager = max(accuracy.compare([w], [d[n]], [g], "fp32").eager_err_max for d in (wanted.eager[k], *wanted.draws(k)))
        if not found.err_max <= AMPLIFIED * eager:
            return f"tensor {n}: error {found.err_max:.3g}, eager's {eager:.3g}, where calls differ by {change:.3g}"
    return ""
