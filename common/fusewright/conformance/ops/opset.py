"""C2, first part: every row of the opset, in every dtype and layout, with static, symbolic and odd sizes, against eager and
fp64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusewright import _torch_compat as compat
from fusewright import ops, pipeline, report
from fusewright.conformance.ops import calls
from fusewright.conformance.ops.calls import arguments, traced, valid
from fusewright.conformance.ops.cases import CASES
from fusewright.conformance.ops.judge import difference
from fusewright.conformance.ops.samples import Case, NotFinite
from fusewright.conformance.ops.variants import VARIANTS, Variant, odd
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Verdict
from fusewright.interface import HOST, Backend, Why
from fusewright.ops import Kind, Op, rules
from fusewright.ops.oracle import evaluate, flat

LEVEL = "C2"

EXACT = frozenset(
    "cast clone copy where masked_fill masked_fill_tensor neg abs sign sgn round floor ceil trunc relu maximum minimum clamp "
    "clamp_tensor threshold fill fill_tensor full full_like new_full amax amin max_with_indices min_with_indices sort topk "
    "cummax max_pool2d max_pool3d copysign copysign_scalar fmax fmin constant_pad_nd".split()
)
"""Rows that do not round, or round once by a rule: their results equal eager's bits."""
EXACT_KINDS = (Kind.VIEW, Kind.GATHER, Kind.RANDOM, Kind.CREATION)
APPROXIMATE = frozenset(("linspace", "logspace"))
CHOOSING = frozenset(
    "relu maximum minimum clamp clamp_tensor threshold amax amin max_with_indices min_with_indices sort topk cummax max_pool2d "
    "max_pool3d fmax fmin".split()
)
"""Exact rows that may return either of two equal zeros."""

FAR = 0.05
"""Maximum error of eager, relative to the largest value, before its result counts as undefined."""


class Undefined(Exception):
    """Eager runs the call, but its result is meaningless: an internal operator with arguments that its callers never pass."""


HALF = (torch.bfloat16, torch.float16)

LARGEST = 1 << 20
"""Maximum elements per tensor of a call, since eager and fp64 compute it too."""

FATAL = frozenset(("weight_norm", "weight_norm_backward"))
"""Rows for which eager divides by zero and kills the process if sizes or strides are zero."""

WEIGHTS = frozenset("weight bias running_mean running_var mat2 w".split())
"""Names of parameters that are constants of a model."""


def names(settings: Settings) -> list[str]:
    compat.register_quantized_decomposed()  # else the table lacks its rows
    return [op.name for op in ops.OPS.values()][:: settings.part] if settings.rows else []


def check(name: str, settings: Settings) -> Iterator[Check]:
    """All calls of one row. A row without calls in any dtype is reported as such."""
    compat.register_quantized_decomposed()  # the process may not have listed the names, which defines the ops
    op, backend = ops.OPS[name], settings.make()
    tried = False
    for title, call in _calls(op, settings):
        found = _checked(op, *call, backend, settings)
        if found is not None:
            tried = True
            yield Check(LEVEL, title, *found)
    if not tried:
        yield Check(LEVEL, name, Verdict.SKIPPED, f"eager runs none of its calls in {', '.join(settings.dtypes)}")


def _calls(op: Op, settings: Settings) -> Iterator[tuple[str, tuple[Case, torch.dtype, Variant]]]:
    """The calls of a row, with the names of their checks."""
    wanted = [d for d in calls.dtypes_of(op) if str(d).removeprefix("torch.") in settings.dtypes]
    for dtype, variant in itertools.product(wanted, VARIANTS):
        for k, case in enumerate(CASES[op.name][:1] if variant.first else CASES[op.name]):
            yield f"{op.name} {str(dtype).removeprefix('torch.')} {variant.name} {k}", (case, dtype, variant)


def _checked(
    op: Op, case: Case, dtype: torch.dtype, variant: Variant, backend: Backend, settings: Settings
) -> tuple[Verdict, str] | None:
    """The verdict on one call with its detail; None if there is nothing to call."""
    if op.name in FATAL and variant.first:
        return None
    try:
        args, kwargs = variant.make(op, case, dtype)
    except (NotFinite, RuntimeError, IndexError):
        return None
    if any(isinstance(v, Tensor) for v in kwargs.values()):  # tracing takes tensors from positional arguments only
        return None
    if any(t.numel() > LARGEST for t in rules.tensors(args)):
        return None
    try:
        trial = _Trial(op, case, dtype, variant, settings, backend, args, kwargs)
    except (TypeError, RuntimeError):  # the device lacks one of the dtypes or layouts
        return None
    if trial.device != HOST and calls.bad_values(op, calls.mapped(args, calls.copied), kwargs):
        return None
    if not valid(op, calls.mapped(trial.args, calls.copied), kwargs):
        return None
    try:
        return _judged(trial)
    except Undefined as e:
        return Verdict.SKIPPED, str(e)
    except Exception as e:
        return Verdict.ERROR, f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"[:300]


@dataclass
class _Trial:
    """One call that eager runs, with tensors on the host."""

    op: Op
    case: Case
    dtype: torch.dtype
    variant: Variant
    settings: Settings
    backend: Backend
    args: list[Any]
    kwargs: dict[str, Any]
    device: str = field(init=False)
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Results of calls, and copies of their values when returned."""

    def __post_init__(self) -> None:
        self.device = self.settings.tensors_on()
        self.args = self.moved(self.args)

    def moved(self, args: list[Any]) -> list[Any]:
        """The arguments on the backend's device, with the same strides."""
        return args if self.device == HOST else list(calls.mapped(args, lambda t: calls.placed(t, self.device)))


def _judged(t: _Trial) -> tuple[Verdict, str]:
    try:
        gm = traced(t.op, t.args, t.kwargs, t.variant.symbolic)
    except Exception as e:  # before the backend is involved
        raise Undefined(f"torch does not trace it: {type(e).__name__}: {e}"[:200]) from e
    weights = _weights(t.op, t.args) if t.variant.weights else []
    holders = gm.graph.find_nodes(op="placeholder")
    const: frozenset[Node] = frozenset(holders[i] for i in weights)
    with report.recording() as reports:
        run = pipeline.compile_graph(t.backend, t.settings.options(), gm, "infer", const, "direct")
        wrong = _differs(t, run, t.args) or _again(t, run, gm, weights) or _changed(t)
    found = reports[-1]
    if bugs := [b for r in reports for b in r.bugs]:
        return Verdict.ERROR, "; ".join(bugs)[:300]
    return (Verdict.WRONG, wrong) if wrong else lowered(found)


def lowered(r: report.GraphReport) -> tuple[Verdict, str]:
    """The verdict on a correct call, by what computed it."""
    there = [o for o in r.ops if o.where != "view" and o.verdict.why is not Why.TOO_SMALL]
    if any(o.verdict.why is Why.DECLINED for o in there):
        return Verdict.DECLINED_LATE, next(str(o.verdict) for o in there if o.verdict.why is Why.DECLINED)[:200]
    other = [o for o in there if o.where != "lowered"]
    if there and not other:
        return Verdict.LOWERED_OK, ""
    return Verdict.FALLBACK_OK, f"{other[0].where}: {other[0].op}: {other[0].verdict}"[
        :200
    ] if other else "nothing to compute"


def _weights(op: Op, args: list[Any]) -> list[int]:
    """Which of the tensors are constants of a model."""
    named = [(p.name, a) for p, a in zip((p for p in op.params if not p.kwonly), args, strict=False)]
    owners = [name for name, a in named for _ in rules.tensors(a)]
    return [i for i, name in enumerate(owners) if name in WEIGHTS]


def _again(t: _Trial, run: Any, gm: Any, weights: Sequence[int]) -> str:
    """A second call: with other values, and the weights changed in place; with larger sizes if one graph serves both."""
    if t.variant.symbolic:
        allowed = calls.guards(gm)
        try:
            args, kwargs = arguments(t.op, calls.larger(t.case), t.dtype)
        except (NotFinite, RuntimeError, IndexError):
            return ""
        # Numbers that depend on a size are baked into the graph.
        if allowed is None or not allowed(list(rules.tensors(args))) or not valid(t.op, args, kwargs):
            return ""
        args = t.moved(args)
        if t.device != HOST and not valid(t.op, args, kwargs):  # a device may check what the host does not
            return ""
        if not _means_something(t, args):
            return ""
        return _differs(t, run, args, "larger: ")
    if not t.variant.weights or t.case.finish is not None:
        return ""
    args, kwargs = arguments(t.op, t.case, t.dtype, seed=1)
    kept = list(rules.tensors(t.args))
    for i, new in enumerate(rules.tensors(args)):
        if i in weights:
            kept[i].copy_(new)
    mixed = [kept[i] if i in weights else new for i, new in enumerate(rules.tensors(t.moved(args)))]
    return _differs(t, run, calls.with_tensors(args, iter(mixed)), "second call: ")


def _means_something(t: _Trial, args: list[Any]) -> bool:
    """Whether the reference accepts a call that eager runs: eager reads out of bounds if head counts are not multiples of each
    other."""
    try:
        if t.op.kind is not Kind.RANDOM:
            _exact(t, args)
    except Undefined:
        return False
    return True


def _changed(t: _Trial) -> str:
    """Whether a later call overwrote the results of an earlier one."""
    return "" if all(same(result, then) for result, then in t.given) else "a later call changed an earlier result"


def _differs(t: _Trial, run: Any, args: list[Any], where: str = "") -> str:
    """What is wrong with one call of the compiled graph, or ""."""
    torch.manual_seed(0)
    given = calls.mapped(args, calls.copied)
    eager = [o for o in flat(t.op.target(*given, **t.kwargs)) if o is not None]
    ours = list(rules.tensors(args))
    seen = [x for x in ours if x.layout is torch.strided]
    before = [x.clone() for x in seen]
    torch.manual_seed(0)
    got = list(run(list(ours)))
    t.given += [(g, calls.copied(g)) for g in got if g.layout is torch.strided]
    if any(not same(a, b) for a, b in zip(seen, before, strict=True)):
        return f"{where}an input was changed"
    aliases = {x.untyped_storage().data_ptr() for x in seen if x.numel()}
    if t.op.kind is Kind.VIEW:
        eager = [calls.read(o) for o in eager]
    elif any(g.numel() and g.untyped_storage().data_ptr() in aliases for g in got) and not _shares(t, args):
        return f"{where}a result is memory of an input"
    return next((f"{where}result {k}: {why}" for k, why in _results(t, args, eager, got) if why), "")


def _shares(t: _Trial, args: list[Any]) -> bool:
    """Whether eager's result shares memory with an input."""
    given = calls.mapped(args, calls.copied)
    memory = {x.untyped_storage().data_ptr() for x in rules.tensors(given) if x.layout is torch.strided}
    return any(
        o is not None and o.untyped_storage().data_ptr() in memory for o in flat(t.op.target(*given, **t.kwargs))
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal, including NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _results(t: _Trial, args: list[Any], eager: Sequence[Tensor], got: Sequence[Tensor]) -> Iterator[tuple[int, str]]:
    if len(eager) != len(got):
        yield 0, f"{len(got)} results, eager has {len(eager)}"
        return
    exact = [o.to(HOST) for o in eager] if t.op.kind is Kind.RANDOM else _exact(t, args) if eager else []
    bits = t.op.name in EXACT or (t.op.kind in EXACT_KINDS and t.op.name not in APPROXIMATE)
    home = [[calls.placed(o, HOST) for o in found] for found in (got, eager)]
    for k, (g, e, x) in enumerate(zip(*home, exact, strict=True)):
        if k not in calls.UNDEFINED.get(t.op.name, ()):
            _defined(t, e, x)
            wanted = _trusted(t, args, k, e, x)
            # Results that exist only on the device have no reference; compare with eager's own.
            unknown = t.device != HOST and x.shape != e.shape
            exactly = x.double() if e.is_floating_point() and not unknown else wanted
            signs = bits and t.op.name not in CHOOSING
            wide = functools.partial(_in_fp32, t, args, k)
            yield k, difference(g, wanted, exactly, bits, signs, t.variant.relative, wide)


def _in_fp32(t: _Trial, args: list[Any], k: int) -> Tensor | None:
    """Eager's result for the same numbers in fp32, if the call has a half type and eager supports it."""
    if not any(x.dtype in HALF for x in rules.tensors(args)):
        return None
    wide = calls.mapped(args, lambda x: x.float() if x.dtype in HALF else calls.copied(x))
    try:
        found = [o for o in flat(t.op.target(*wide, **t.kwargs)) if o is not None]
    except RuntimeError:
        return None
    return found[k].to(HOST)


def _trusted(t: _Trial, args: list[Any], k: int, eager: Tensor, exact: Tensor) -> Tensor:
    """Eager's result, or its result for dense copies if the two differ and only the latter is exact: some of its kernels
    misread memory of unusual strides. For integers only, since floats that are far off prove nothing (`_defined`)."""
    if eager.is_floating_point() or t.op.kind in (Kind.RANDOM, Kind.VIEW) or eager.shape != exact.shape:
        return eager
    if same(eager, exact) or any(a.name == "storage_offset" for a in t.op.target._schema.arguments):
        return eager  # the op takes storage positions, so strides are part of its meaning
    dense = calls.mapped(args, lambda x: x.contiguous() if x.layout is torch.strided else x)
    again = [o for o in flat(t.op.target(*dense, **t.kwargs)) if o is not None][k].to(HOST)
    return calls.copied(eager).copy_(again) if same(again, exact) else eager


def _defined(t: _Trial, eager: Tensor, exact: Tensor) -> None:
    """Raise `Undefined` if eager is far from the exact result."""
    if not eager.is_floating_point() or eager.shape != exact.shape or t.variant.make is odd:
        return
    fine = exact.isfinite() & (exact.abs() < torch.finfo(eager.dtype).max)
    off, size = (eager.double() - exact)[fine].abs(), exact[fine].abs()
    if off.numel() and not float(off.max()) <= FAR * max(1.0, float(size.max())):
        raise Undefined("eager is far from the exact result")


def _exact(t: _Trial, args: list[Any]) -> Sequence[Tensor]:
    """The results in fp64, on the host."""
    torch.manual_seed(0)
    try:
        results = evaluate(t.op, calls.mapped(args, lambda x: calls.placed(x, HOST)), t.kwargs)
    except (RuntimeError, ZeroDivisionError) as e:
        raise Undefined(f"the row's reference does not take it: {e}") from e
    found = [o for o in results if o is not None]
    return [calls.read(o) for o in found] if t.op.kind is Kind.VIEW else found
