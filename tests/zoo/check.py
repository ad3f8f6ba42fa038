"""Judges one model in one mode: whether a compiled call's results and strides are right, and how they were computed.

Right means the fp64 rule (`fusewright.accuracy`): at most twice eager's error. One run of eager is one draw of that error, and
where a model amplifies rounding (batch norms over eight values, vanishing gradients), draws differ by far more than a factor of
two. An error above the first draw is compared with the largest of several draws, with weights and inputs moved by one rounding.
If it exceeds them all, it is drawn several times itself, with other numbers each time, and is suspect if it exceeds twice eager's
error on the same numbers in all draws but one. Behind many kinks one of a model's hundred gradients is so by chance, and another
one each time: wrong is what is suspect in as many fresh draws too. Integers equal eager's, unless eager's own differ from fp64's
by rounding: then ours may differ at twice as many places, and at no place always. What is wrong is excused if it is right beside
`aot_eager`, which shares everything but our lowerings, in eager's place: if that has the same error. A crash is excused by a crash.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from fusewright import report
from fusewright.accuracy import LIMIT
from fusewright.bench import accuracy
from fusewright.bench.suite import Built, flatten_outputs
from tests.zoo import catalog, later
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

TOKENS = 4
"""The number of tokens that `generate` produces."""
MOST_FLIPPED = 1 / 4
"""The largest share of eager's integers that differ from fp64's by rounding: random numbers differ in more."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Calls = list[Outputs]
Run = Callable[[str], Calls]
Draw = Callable[[int], Calls]
"""Returns the outputs of eager's calls with everything moved by one rounding, differently for every seed."""
Draws = Callable[[str], Iterator[tuple[Calls, Calls, Calls]]]
"""Yields our, eager's and the exact outputs of such calls, compiled by the named backend, without end."""


def check(model: str, mode: str, backend: str, device: str = "cpu") -> Verdict:
    """Judge a model. An error in eager means "not run"; an error of ours means "crashed"."""
    try:
        example = catalog.build(model)
    except catalog.NotBuilt as error:
        return Verdict(model, mode, "not built", str(error))
    if device != "cpu":
        example = _without_dropout(_on(device, example))
    return MODES[mode](Verdict(model, mode, "right"), example, backend)


def _on(device: str, example: catalog.Example) -> catalog.Example:
    def moved(given: Mapping[str, Any]) -> dict[str, Any]:
        return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in given.items()}

    resized = example.resized
    other = None if resized is None else lambda k: moved(resized(k))
    return catalog.Example(example.module.to(device), moved(example.inputs), other)


def _without_dropout(example: catalog.Example) -> catalog.Example:
    """Remove dropout: a GPU draws different random numbers for fp64 and fp32, so the reference would drop other elements."""
    for part in example.module.modules():
        for owner in (part, getattr(part, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)
        if isinstance(part, DROPOUTS):
            part.p = 0.0
    return example


def _inference(v: Verdict, example: catalog.Example, backend: str) -> Verdict:
    return _forward(v, example, [example.inputs], backend, "fp32")


def _bf16(v: Verdict, example: catalog.Example, backend: str) -> Verdict:
    example.module.bfloat16()
    given = {k: x.bfloat16() if floating(x) else x for k, x in example.inputs.items()}
    return _forward(v, example, [given], backend, "bf16")


def _dynamic(v: Verdict, example: catalog.Example, backend: str) -> Verdict:
    if example.resized is None:
        return replace(v, status="not run", reason="its sizes are fixed")
    sizes = [example.inputs, *(example.resized(k) for k in (1, 2, 3))]
    return _forward(v, example, sizes, backend, "fp32", dynamic=True)


@torch.no_grad()
def _forward(
    v: Verdict, example: catalog.Example, sizes: Sequence[dict[str, Any]], backend: str, dtype: str, dynamic: bool | None = None
) -> Verdict:
    """Make calls without gradients, each size twice: the second call represents the steady state."""
    built = [Built(v.model, example.module, (), given, dtype) for given in sizes]
    try:
        eager = [flatten_outputs(seeded(b, None)) for b in built]
        wide = [accuracy.reference(replace(b, fn=in_plain_ops(b.fn))) for b in built]
    except Exception as error:  # a model that eager cannot run in this mode proves nothing about us
        return replace(v, status="not run", reason=said(error))

    def run(backend: str) -> Calls:
        torch.compiler.reset()
        compiled = torch.compile(example.module, backend=backend, dynamic=dynamic)
        return [flatten_outputs(seeded(b, compiled)) for b in built for _ in (1, 2)]

    def draw(k: int) -> Calls:
        moved = [replace(b, fn=moved_module(example.module, k), kwargs=moved_inputs(b.kwargs, k)) for b in built]
        return [flatten_outputs(seeded(b, None)) for b in moved for _ in (1, 2)]

    def draws(backend: str) -> Iterator[tuple[Calls, Calls, Calls]]:
        torch.compiler.reset()
        own = copy.deepcopy(example.module)
        compiled = torch.compile(own, backend=backend, dynamic=dynamic)
        for k in itertools.count(1):
            own.load_state_dict(moved_module(example.module, k, APART).state_dict())
            moved = [replace(b, fn=own, kwargs=moved_inputs(b.kwargs, k, APART)) for b in built]
            exact = [accuracy.reference(replace(b, fn=in_plain_ops(own))) for b in moved]
            yield [flatten_outputs(seeded(b, compiled)) for b in moved], [flatten_outputs(seeded(b, None)) for b in moved], exact

    return _judge(v, run, backend, [e for e in eager for _ in (1, 2)], [w for w in wide for _ in (1, 2)], dtype, draw, draws)


def _training(v: Verdict, example: catalog.Example, backend: str) -> Verdict:
    """Compare the mean of squares of all outputs, and the gradients of all parameters, in training mode."""
    module = example.module.train()

    try:
        own = copy.deepcopy(module)
        eager = gradients(own, own, example.inputs)
        with accuracy.wide_arithmetic():
            own = in_plain_ops(module).double()
            wide = gradients(own, own, widened(example.inputs))
    except Exception as error:  # as above
        return replace(v, status="not run", reason=said(error))

    def run(backend: str) -> Calls:
        torch.compiler.reset()
        own = copy.deepcopy(module)
        begin = beginning(own)
        compiled = torch.compile(own, backend=backend)
        out = []
        for _ in (1, 2):
            begin()
            out.append(gradients(own, compiled, example.inputs))
        return out

    def draw(k: int) -> Calls:
        own = moved_module(module, k)
        return [gradients(own, own, moved_inputs(example.inputs, k))] * 2

    def draws(backend: str) -> Iterator[tuple[Calls, Calls, Calls]]:
        torch.compiler.reset()
        own = copy.deepcopy(module)
        begin = beginning(own)
        compiled = torch.compile(own, backend=backend)
        for k in itertools.count(1):
            moved, given = moved_module(module, k, APART), moved_inputs(example.inputs, k, APART)
            begin()
            own.load_state_dict(moved.state_dict())
            ours = gradients(own, compiled, given)
            with accuracy.wide_arithmetic():
                plain = in_plain_ops(moved).double()
                exact = gradients(plain, plain, widened(given))
            yield [ours], [gradients(moved, moved, given)], [exact]

    return _judge(v, run, backend, [eager] * 2, [wide] * 2, "fp32", draw, draws)


def _generate(v: Verdict, example: catalog.Example, backend: str) -> Verdict:
    """Compare greedy tokens, which must equal eager's."""
    module: Any = example.module
    if not hasattr(module, "generate") or "input_ids" not in example.inputs:
        return replace(v, status="not run", reason="it does not generate")
    given = {"input_ids": example.inputs["input_ids"], "max_new_tokens": TOKENS, "do_sample": False, "use_cache": True}
    try:
        wanted = module.generate(**given)
    except Exception as error:  # as above
        return replace(v, status="not run", reason=said(error))
    plain = module.forward

    def run(backend: str) -> Calls:
        torch.compiler.reset()
        module.forward = torch.compile(plain, backend=backend)
        try:
            return [[module.generate(**given)]]
        finally:
            module.forward = plain

    return _judge(v, run, backend, [[wanted]], [[wanted]], "fp32", lambda _: [[wanted]], None)


MODES: dict[str, Callable[[Verdict, catalog.Example, str], Verdict]] = {
    "inference": _inference, "training": _training, "dynamic": _dynamic, "bf16": _bf16, "generate": _generate,
    "calls": later.calls, "steps": later.steps,
}  # fmt: skip


# ---------------------------------------------------------------- judging


@dynamo.patch(use_numpy_random_stream=True)  # torch's generator instead draws other masks than eager's, which hide all else
def _judge(
    v: Verdict, run: Run, backend: str, eager: Calls, wide: Calls, dtype: str, draw: Draw, draws: Draws | None
) -> Verdict:
    if [t.shape for call in eager for t in call] != [t.shape for call in wide for t in call]:
        return replace(v, status="not run", reason="in fp64 it draws other random numbers: other layers or lengths")
    start = time.perf_counter()
    crash = ""
    with report.recording() as reports:
        try:
            got = run(backend)
        except Exception as error:  # reported in the verdict
            crash = said(error)
    v = replace(
        v, first_s=time.perf_counter() - start, graphs=len(reports), lowered=sum(r.count("lowered") for r in reports),
        eager=sum(r.count("eager") for r in reports), bugs=[b for r in reports for b in r.bugs][:3],
    )  # fmt: skip
    if crash:
        return _crashed(replace(v, status="crashed", reason=crash), run)
    why, ratio = _worst(got, [eager], wide, dtype)
    if not why:
        return replace(v, ratio=ratio)
    several = [eager, *(draw(k) for k in range(1, DRAWS))]
    why, ratio = _worst(got, several, wide, dtype)
    v = replace(v, ratio=ratio)
    if not why or (draws is not None and not (why := _typical(draws(backend), dtype))):
        return v
    v = replace(v, status="wrong", reason=why)
    try:
        other = run("aot_eager")
    except Exception as error:  # it proves nothing about our results
        return replace(v, reason=f"{why} | aot_eager crashes: {said(error)}")
    beside = None if draws is None else _draws_beside(draws(backend), draws("aot_eager"))
    if worse := _worse(got, other, several, wide, dtype, beside):
        return replace(v, reason=f"{why} | beside aot_eager: {worse}")
    return replace(v, status=f"{v.status} in aot_eager too", reason=f"{why} | {_worst(other, several, wide, dtype)[0]}")


def _worse(
    got: Calls, other: Calls, several: Sequence[Calls], wide: Calls, dtype: str, draws: Iterator[tuple[Calls, Calls, Calls]] | None
) -> str:
    """Describe what is wrong with ours beside `aot_eager`'s. Where eager has fewer results (no gradient, rather than one of zeros),
    layouts alone are judged."""
    if any(len(g) != len(e) for g, e in zip(got, several[0], strict=True)):
        return next((why for g, o in zip(got, other, strict=True) if (why := layout(g, o))), "")
    why, _ = _worst(got, [_beside(got, other, several[0]), *several], wide, dtype)
    return why if draws is None or not why else _typical(draws, dtype)


def _beside(ours: Calls, other: Calls, eager: Calls) -> Calls:
    """Return what ours may be as wrong as: `aot_eager`'s tensors, or eager's where ours do not have the layout of `aot_eager`'s."""
    beside = []
    for g, o, e in zip(ours, other, eager, strict=True):
        own = zip(g, o, e, strict=True) if len(o) == len(g) else ()
        beside.append([x if layout([t], [y]) else y for t, y, x in own] or e)
    return beside


def _draws_beside(
    ours: Iterator[tuple[Calls, Calls, Calls]], others: Iterator[tuple[Calls, Calls, Calls]]
) -> Iterator[tuple[Calls, Calls, Calls]]:
    """Draw our results with those of `aot_eager` in place of eager's."""
    for (got, eager, exact), (other, _, _) in zip(ours, others, strict=False):
        yield got, _beside(got, other, eager), exact


def _typical(draws: Iterator[tuple[Calls, Calls, Calls]], dtype: str) -> str:
    """Describe a tensor whose error is too large in all draws but one, and so in fresh draws, if there is one."""
    suspects: dict[tuple[int, int], str] = {}
    for _ in ("drawn", "confirmed"):
        drawn = [*itertools.islice(draws, DRAWS - 1)]
        if why := next((f"call {k}: {why}" for g, e, _ in drawn for k in range(len(g)) if (why := layout(g[k], e[k]))), ""):
            return why
        places = suspects or [(k, n) for k, call in enumerate(drawn[0][0]) for n in range(len(call))]
        suspects = {place: why for place in places if (why := _suspected(drawn, place, dtype))}
        if not suspects:
            return ""
    return next(iter(suspects.values()))


def _suspected(drawn: Sequence[tuple[Calls, Calls, Calls]], place: tuple[int, int], dtype: str) -> str:
    k, n = place
    found = [accuracy.compare([w[k][n]], [e[k][n]], [g[k][n]], dtype) for g, e, w in drawn]
    _, second, *_ = sorted(found, key=lambda a: (not a.passed, a.ratio_max))
    why = "" if second.passed else second.reason
    if why and not drawn[0][1][k][n].is_floating_point():
        why = _misplaced([(g[k][n], e[k][n], w[k][n]) for g, e, w in drawn])
    return f"call {k}, tensor {n}, in {len(found) - 1} of {len(found)} draws: {why}" if why else ""


def _misplaced(drawn: Sequence[tuple[Tensor, Tensor, Tensor]]) -> str:
    """Describe integers that differ from fp64's by more than rounding. An index of the nearest code flips, in eager too, where two
    codes are closer than that; every draw moves those places. A wrong index stays at its place."""
    ours, own = (torch.stack([made[side] != made[2] for made in drawn]) for side in (0, 1))
    wrong, usual, total = int(ours.sum()), int(own.sum()), own.numel()
    if not usual or usual > MOST_FLIPPED * total:
        return f"{drawn[0][1].dtype} values differ from eager's"
    if stuck := int((ours.all(0) & (2 * own.sum(0) < len(drawn))).sum()):
        return f"{stuck} integers are wrong in every draw, eager's in few"
    return f"{wrong} of {total} integers are wrong, {usual} of eager's" if wrong > LIMIT * usual else ""


def _crashed(v: Verdict, run: Run) -> Verdict:
    """Excuse a crash if `aot_eager` crashes too."""
    try:
        run("aot_eager")
    except Exception as error:  # torch's own failure
        return replace(v, status=f"{v.status} in aot_eager too", reason=f"{v.reason} | {said(error)}")
    return v


def _worst(got: Calls, draws: Sequence[Calls], wide: Calls, dtype: str) -> tuple[str, float]:
    """Return what is wrong with any of the calls, and the ratio of the largest error to eager's largest."""
    ratio = 0.0
    for k, (g, w) in enumerate(zip(got, wide, strict=True)):
        eager = [d[k] for d in draws]
        if why := layout(g, eager[0]):
            return f"call {k}: {why}", ratio
        for n in range(len(g)):
            found = [accuracy.compare([w[n]], [e[n]], [g[n]], dtype) for e in eager]
            best = min(found, key=lambda a: (not a.passed, a.ratio_max))
            ratio = max(ratio, best.ratio_max)
            if not best.passed:
                return f"call {k}, tensor {n}: {best.reason}", ratio
    return "", ratio
