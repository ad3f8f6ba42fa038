"""Rules of reductions, scans, softmax and norms: what is computed per row, and per element of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from fusewright import _torch_compat as compat
from fusewright.interface import OpView
from fusewright.ops.semantics.coupled import MOST_RESULTS, given, ran, results
from fusewright.ops.semantics.norm import rms_eps
from fusewright.ops.semantics.steps import evaluated, names, parsed
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.ir.types import TYPES, DType
from fusewright.toolkit.lower import messages
from fusewright.toolkit.lower.activation import softplus
from fusewright.toolkit.lower.movement import out_type
from fusewright.toolkit.lower.pointwise import stepped, truth
from fusewright.toolkit.lower.views import number
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import (
    Check,
    Domain,
    Evaluator,
    Level,
    Map,
    Row,
    RowContext,
    Rules,
    Symbols,
    Table,
    always,
)
from fusewright.toolkit.rules.space import At, Shape, product, shape_of

Rows = Callable[[RowContext, OpView], tuple[Val, ...]]


def over(shape: Shape, dims: Any) -> Domain:
    """Rows over `dims` of a tensor of `shape`; a row always has a dim, of size one if needed."""
    found = tuple(sorted({d % max(len(shape), 1) for d in dims})) if shape else ()
    return Domain(shape, found) if found else Domain((*shape, 1), (len(shape),))


def reduced(op: OpView) -> Domain:
    """Rows over `dim` of `self`: an int, a list, or all dims if it is None or empty."""
    shape = shape_of(op.arg("self").spec)
    dim = op.arg("dim") if "dim" in op.argnames else None
    if isinstance(dim, int):
        return over(shape, (dim,))
    return over(shape, dim if dim else range(len(shape)))


def one_dim(op: OpView) -> Domain:
    return over(shape_of(op.arg("self").spec), (op.arg("dim"),))


def some_elements(op: OpView) -> str | None:
    """Eager raises for the maximum of no elements."""
    d = reduced(op)
    return "nothing to choose from" if 0 in [d.shape[i] for i in d.dims] else None


def _reduction(how: str, compute: str = "out", finish: Callable[..., Val] | None = None) -> Rows:
    def run(r: RowContext, op: OpView) -> tuple[Val, ...]:
        x = op.arg("self")
        v = r.x(x, out_type(op)) if compute == "out" else r.x(x)
        out = r.b.reduce(how, v)
        return (finish(r, op, out) if finish else out,)

    return run


def _extreme(how: str) -> Rows:
    def run(r: RowContext, op: OpView) -> tuple[Val, ...]:
        v = r.x(op.arg("self"))
        if v.dtype == "bool":
            return (r.b.reduce("any" if how == "max" else "all", v),)
        return (r.b.reduce(how, v),)

    return run


def _position(how: str) -> Rows:
    def run(r: RowContext, op: OpView) -> tuple[Val, ...]:
        return (r.b.reduce(f"arg{how}", _countable(r, r.x(op.arg("self")))),)

    return run


def _countable(r: RowContext, v: Val) -> Val:
    return r.b.cast(v, "u8") if v.dtype == "bool" else v


def _extreme_and_position(how: str) -> Rows:
    def run(r: RowContext, op: OpView) -> tuple[Val, ...]:
        v = r.x(op.arg("self"))
        return _extreme(how)(r, op)[0], r.b.reduce(f"arg{how}", _countable(r, v))

    return run


def _truth(how: str) -> Rows:
    def run(r: RowContext, op: OpView) -> tuple[Val, ...]:
        return (r.b.reduce(how, truth(r.b, r.x(op.arg("self")))),)

    return run


def _is_true(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    return truth(e.b, e(op.arg("self"), at))


_ELEMENTWISE = (Map(_is_true),)


def with_no_dims(rules: Rules) -> Rules:
    """Rules of any and all, which (unlike sums) reduce nothing if the list of dims is empty."""
    return lambda op: _ELEMENTWISE if op.arg("dim") == () else rules(op) if callable(rules) else rules


def value_of(r: RowContext, size: Any, dtype: DType) -> Val:
    """An extent as a value."""
    if isinstance(size, int):
        return r.b.const(size, dtype)
    return r.b.cast(r.b.index_value(Index(size, sizes=r.b.p + r.b.r)), dtype)


def _variance(r: RowContext, op: OpView, v: Val) -> Val:
    correction = 1 if op.arg("correction") is None else op.arg("correction")
    n = r.count()
    if isinstance(n, int):
        left = max(n - correction, 0)
        return r.b.reduce("m2", v) / r.b.const(left, v.dtype)
    left_v = r.b.op("maximum", value_of(r, n, v.dtype) - correction, r.b.const(0, v.dtype))
    return r.b.reduce("m2", v) / left_v


def _var(r: RowContext, op: OpView) -> tuple[Val, ...]:
    return (_variance(r, op, r.x(op.arg("self"))),)


def _std(r: RowContext, op: OpView) -> tuple[Val, ...]:
    return (r.b.op("sqrt", _variance(r, op, r.x(op.arg("self")))),)


def _var_mean(r: RowContext, op: OpView) -> tuple[Val, ...]:
    v = r.x(op.arg("self"))
    return _variance(r, op, v), r.mean(v)


def _vector_norm(r: RowContext, op: OpView) -> tuple[Val, ...]:
    v, n = r.b.op("abs", r.x(op.arg("self"), out_type(op))), op.arg("ord")
    if n == math.inf:
        return (r.b.reduce("max", v),)
    if n == -math.inf:
        return (r.b.reduce("min", v),)
    if n == 0:
        return (r.sum(r.b.cast(v.ne(0), v.dtype)),)
    if n == 1:
        return (r.sum(v),)
    if n == 2:
        return (r.b.op("sqrt", r.sum(v * v)),)
    p = r.b.const(float(n), v.dtype)
    return (r.b.op("pow", r.sum(r.b.op("pow", v, p)), r.b.const(1 / float(n), v.dtype)),)


def _plain_order(op: OpView) -> str | None:
    n = op.arg("ord")
    if not isinstance(n, int | float):
        return "ord is no plain number"
    return some_elements(op) if math.isinf(n) or n < 0 else None


def _logsumexp(r: RowContext, op: OpView) -> tuple[Val, ...]:
    v = r.x(op.arg("self"), out_type(op))
    top = _finite_top(r, r.b.reduce("max", v))
    return (top + r.b.op("log", r.sum(r.b.op("exp", v - top))),)


def _finite_top(r: RowContext, top: Val) -> Val:
    """The maximum of a row, to subtract; 0 if it is infinite, since inf - inf is NaN."""
    return r.b.where(r.b.op("isinf", top), 0, top)


def _scan(how: str) -> Rows:
    def run(r: RowContext, op: OpView) -> tuple[Val, ...]:
        return (r.b.scan(how, r.x(op.arg("self"), out_type(op))),)

    return run


def _recurrence(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = out_type(op)
    a, b = r.x(op.arg("a"), t), r.x(op.arg("b"), t)
    if op.arg("initial") is not None:
        return (r.b.recurrence(r.e(op.arg("initial"), r.row, t), lambda h: a * h + b),)
    first = r.b.index_value(r.along.dims[0]).eq(0)  # 0 * -0.0 + b is b, whatever a is
    factor = r.b.where(first, 0, a)
    return (r.b.recurrence(r.b.const(-0.0, t), lambda h: factor * h + b),)


def _pointwise_recurrence(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t, step = out_type(op), parsed(op.arg("step"))
    given = {name: r.x(x, t) for name, x in zip(*_operands(op), strict=True)}

    def call(name: str, *args: Val | float) -> Val:
        return stepped(r.b, t, name, *args)

    return (r.b.recurrence(r.e(op.arg("initial"), r.row, t), lambda h: evaluated(step, {**given, "h": h}, call)),)


def _coupled(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = compute_dtype(op.arg("initial")[0].spec.dtype)
    operands = [r.x(x, t) for x in _operands(op)[1]]
    before = [r.e(h, r.row, t) for h in op.arg("initial")]

    def step(states: Sequence[Val]) -> Sequence[Val]:
        return ran(op.arg("step"), given(states, operands), lambda name, *args: stepped(r.b, t, name, *args))

    return r.b.recurrences(before, step)


_FULL: Level = "full"
_WHOLE: tuple[Level, ...] = (_FULL,) * MOST_RESULTS


def _few_results(op: OpView) -> str | None:
    return _computes_floats(op) if results(op.arg("step")) <= MOST_RESULTS else f"more than {MOST_RESULTS} results"


def _operands(op: OpView) -> tuple[list[str], list[Any]]:
    operands = [op.arg("x"), *op.arg("others")]
    return names(operands), operands


def _steps(op: OpView) -> Domain:
    return over(shape_of((op.arg("b") if "b" in op.argnames else op.arg("x")).spec), (op.arg("dim"),))


def _computes_floats(op: OpView) -> str | None:
    specs = [v.spec for v in (*op.outs, *op.inputs()) if v.spec is not None]
    return None if all(s.dtype.is_floating_point for s in specs) else "a step of integers"


def _computes_numbers(op: OpView) -> str | None:
    kinds = {TYPES[compute_dtype(v.spec.dtype)].kind for v in (op.out, *op.inputs()) if v.spec is not None}
    return None if len(kinds) == 1 and "bool" not in kinds else "types that differ in kind"


def _row_op(
    code: Rows,
    domain: Callable[[OpView], Domain] = reduced,
    levels: tuple[Level, ...] = ("row",),
    check: Check = always,
    ordered: bool = False,
    symbols: Symbols = (),
) -> Row:
    return Row(domain, code, tuple(range(len(levels))), levels, check, ordered, symbols)


def _float_in(op: OpView) -> str | None:
    return None if op.arg("self").spec.dtype.is_floating_point else "the variance of integers"


def _number_out(op: OpView) -> str | None:
    """A result that is a number: sums of bool are i64."""
    ok = op.out.spec is not None and TYPES[out_type(op)].kind != "bool"
    return None if ok else "a sum of truth values"


# ---- softmax ----


def _softmax(r: RowContext, op: OpView) -> tuple[Val, ...]:
    x = r.x(op.arg("self"), out_type(op))
    e = r.b.op("exp", x - r.b.reduce("max", x))
    return (e / r.sum(e),)


def _safe_softmax(r: RowContext, op: OpView) -> tuple[Val, ...]:
    x = r.x(op.arg("self"), out_type(op))
    top = r.b.reduce("max", x)
    e = r.b.op("exp", x - top)
    return (r.b.where(top.eq(-math.inf), 0, e / r.sum(e)),)


def _log_softmax(r: RowContext, op: OpView) -> tuple[Val, ...]:
    x = r.x(op.arg("self"), out_type(op))
    shifted = x - r.b.reduce("max", x)
    return (shifted - r.b.op("log", r.sum(r.b.op("exp", shifted))),)


# ---- norms ----


def normalised(op: OpView) -> Domain:
    """Rows over the last dims, as many as `normalized_shape` has."""
    shape = shape_of(op.arg("input").spec)
    n = len(op.arg("normalized_shape"))
    return over(shape, range(len(shape) - n, len(shape)))


def norm_type(op: OpView) -> DType:
    """The compute type of a norm: that of its input."""
    return compute_dtype(op.arg("input").spec.dtype)


def moments(r: RowContext, x: Val, eps: Any) -> tuple[Val, Val, Val]:
    """Mean, biased variance and 1 / sqrt(variance + eps) of each row."""
    n = value_of(r, r.count(), x.dtype)
    mean, var = r.mean(x), r.b.reduce("m2", x) / n
    return mean, var, r.b.op("rsqrt", var + eps)


def affine(v: Val, weight: Val | None, bias: Val | None) -> Val:
    v = v if weight is None else v * weight
    return v if bias is None else v + bias


def _layer_norm(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = norm_type(op)
    x = r.x(op.arg("input"), t)
    mean, _, rstd = moments(r, x, op.arg("eps"))
    w, b = (None if op.arg(n) is None else r.per_position(op.arg(n), t) for n in ("weight", "bias"))
    return affine((x - mean) * rstd, w, b), mean, rstd


def _rms_norm(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = norm_type(op)
    x = r.x(op.arg("input"), t)
    rrms = r.b.op("rsqrt", r.mean(x * x) + rms_eps(op.arg("input").spec.dtype, op.arg("eps")))
    w = None if op.arg("weight") is None else r.per_position(op.arg("weight"), t)
    return affine(x * rrms, w, None), rrms


def grouped(op: OpView) -> Domain:
    """[N, groups, channels per group, pixels], with rows over the last two."""
    n, c, pixels = (number(op.arg(a)) for a in ("N", "C", "HxW"))
    groups = op.arg("group")
    return Domain((n, groups, c // groups, pixels), (2, 3))


def plain_groups(op: OpView) -> str | None:
    return None if isinstance(op.arg("C"), int) and isinstance(op.arg("group"), int) else "symbolic channels"


def channel_of_group(r: RowContext, arg: Any, t: DType) -> Val | None:
    """A value per channel [C], over the domain [N, groups, C / groups, pixels]."""
    if arg is None:
        return None
    at = r.full.pick((1, 2))
    return r.e(arg, at.reshape(shape_of(arg.spec)), t)


def _group_norm(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = norm_type(op)
    x = r.x(op.arg("input"), t)
    mean, _, rstd = moments(r, x, op.arg("eps"))
    w, b = (channel_of_group(r, op.arg(n), t) for n in ("weight", "bias"))
    return affine((x - mean) * rstd, w, b), mean, rstd


def channels(op: OpView) -> Domain:
    """Rows over everything but dim 1 of `input`."""
    shape = shape_of(op.arg("input").spec)
    return over(shape, [d for d in range(len(shape)) if d != 1])


def _batch_norm(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = norm_type(op)
    if k:
        return _inference_stats(e, op, k, at)
    mean, var, w, b = (
        None if op.arg(n) is None else e(op.arg(n), at.pick((1,)), t)
        for n in ("running_mean", "running_var", "weight", "bias")
    )
    assert mean is not None and var is not None
    rstd = e.b.op("rsqrt", var + op.arg("eps"))
    return affine((e(op.arg("input"), at, t) - mean) * rstd, w, b)


def _inference_stats(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """The extra results of devices other than the CPU: the running mean, and 1 / sqrt(running variance + eps)."""
    t, spec = norm_type(op), op.outs[k].spec
    if spec is None or 0 in spec.shape:
        return e.const(0, t)
    if k == 1:
        return e(op.arg("running_mean"), at, t)
    return e.b.op("rsqrt", e(op.arg("running_var"), at, t) + op.arg("eps"))


def _has_statistics(op: OpView) -> str | None:
    ok = op.arg("running_mean") is not None and op.arg("running_var") is not None
    return None if ok else "no running statistics"


def _inverse_deviation(r: RowContext, var: Val, eps: float) -> Val:
    """1 / sqrt(var + eps). Rounding that sum moves all variances of a binade by the same fraction of a step, as eps is the same,
    which adds up in the gradient of a scale in front, where all else cancels (eager's CPU kernel adds in fp64). So where var is
    larger, 1 / sqrt(var) loses its share: with q = eps / var, 1 - 1 / sqrt(1 + q) = q / (1 + q + sqrt(1 + q))."""
    whole, q = r.b.op("rsqrt", var), eps / var
    share = q / (q + 1.0 + r.b.op("sqrt", q + 1.0))
    return r.b.where(var > eps, whole - whole * share, r.b.op("rsqrt", var + eps))


def _by_batch(r: RowContext, op: OpView) -> tuple[tuple[Val, Val, Val], Val]:
    """The results of a batch norm that normalises by the batch, and the variance of each channel."""
    t = norm_type(op)
    x = r.x(op.arg("input"), t)
    mean, var, _ = moments(r, x, op.arg("eps"))
    rstd = _inverse_deviation(r, var, op.arg("eps"))
    w, b = (None if op.arg(n) is None else r.per_row(op.arg(n), t) for n in ("weight", "bias"))
    return (affine((x - mean) * rstd, w, b), mean, rstd), var


def _batch_norm_no_stats(r: RowContext, op: OpView) -> tuple[Val, ...]:
    return _by_batch(r, op)[0]


def _batch_norm_train(r: RowContext, op: OpView) -> tuple[Val, ...]:
    (out, mean, rstd), var = _by_batch(r, op)
    old_mean, old_var = (r.per_row(op.arg(n), norm_type(op)) for n in ("running_mean", "running_var"))
    n, m = r.count(), op.arg("momentum")
    unbiased = var * (n / (n - 1))
    new_mean, new_var = old_mean * (1 - m) + mean * m, old_var * (1 - m) + unbiased * m
    return out, mean, rstd, new_mean, new_var


def _per_channel(op: OpView) -> Any:
    """The number of elements of a channel."""
    return product(tuple(channels(op).shape[d] for d in channels(op).dims))


def _of_batch(op: OpView) -> str | None:
    if _per_channel(op) == 0:
        return "no elements"
    return None if op.arg("training") else "inference mode"


def _trains(op: OpView) -> str | None:
    n = _per_channel(op)
    if not isinstance(n, int) or n < 2:
        return "rows of one element or of a symbolic size"
    if not op.arg("training") or not isinstance(op.arg("momentum"), int | float):
        return "inference mode, or no momentum"
    return _has_statistics(op)


def _but_one(op: OpView) -> Domain:
    shape = shape_of(op.arg("v").spec)
    return over(shape, [d for d in range(len(shape)) if d != op.arg("dim") % len(shape)])


def _weight_norm(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = out_type(op)
    v = r.x(op.arg("v"), t)
    norm = r.b.op("sqrt", r.sum(v * v))
    return v * (r.per_row(op.arg("g"), t) / norm), norm


# ---- losses ----


def _everything(op: OpView) -> Domain:
    a, b = shape_of(op.arg("self").spec), shape_of(op.arg("target").spec)
    shape = a if len(a) >= len(b) else b
    return over(shape, range(len(shape)))


def _same_shapes(op: OpView) -> str | None:
    """Only losses over two tensors of the same shape."""
    a, b = op.arg("self").spec, op.arg("target").spec
    return None if a.shape == b.shape else "shapes that broadcast"


def _loss(code: Callable[[Any, OpView, Val, Val], Val]) -> tuple[Rows, Callable[[Evaluator, OpView, int, At], Val]]:
    """A loss as a reduction over everything, and as a map (reduction 0)."""

    def rows(r: RowContext, op: OpView) -> tuple[Val, ...]:
        t = out_type(op)
        v = code(r.e, op, r.x(op.arg("self"), t), r.x(op.arg("target"), t))
        v = v * r.x(op.arg("weight"), t) if _has_weight(op) else v
        return (r.mean(v) if op.arg("reduction") == 1 else r.sum(v),)

    def each(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        t = out_type(op)
        v = code(e, op, e(op.arg("self"), at, t), e(op.arg("target"), at, t))
        if code is _bce_of_probability:
            e.checked("probability", at)
        return v * e(op.arg("weight"), at, t) if _has_weight(op) else v

    return rows, each


def _has_weight(op: OpView) -> bool:
    return "weight" in op.argnames and op.arg("weight") is not None


def _mse(e: Evaluator, op: OpView, x: Val, y: Val) -> Val:
    return (x - y) * (x - y)


def _smooth_l1(e: Evaluator, op: OpView, x: Val, y: Val) -> Val:
    beta, d = op.arg("beta"), e.b.op("abs", x - y)
    return e.b.where(d < beta, d * d * (0.5 / beta), d - 0.5 * beta) if beta else d


def _huber(e: Evaluator, op: OpView, x: Val, y: Val) -> Val:
    delta, d = op.arg("delta"), e.b.op("abs", x - y)
    return e.b.where(d <= delta, d * d * 0.5, (d - 0.5 * delta) * delta)


def _soft_margin(e: Evaluator, op: OpView, x: Val, y: Val) -> Val:
    return softplus(e.b, -(x * y))


def _bce(e: Evaluator, op: OpView, x: Val, y: Val) -> Val:
    return (1 - y) * x + softplus(e.b, -x)


def _unweighted(op: OpView) -> str | None:
    if op.arg("weight") is not None or op.arg("pos_weight") is not None:
        return "weights"
    return _same_shapes(op)


@cache
def _targets_are_checked() -> bool:
    """Whether this torch refuses targets of `binary_cross_entropy` that are no probabilities."""
    try:
        with torch.no_grad(), compat.real_tensors():
            F.binary_cross_entropy(torch.zeros(1), torch.full((1,), 2.0))
    except RuntimeError:
        return True
    return False


def _bce_of_probability(e: Evaluator, op: OpView, x: Val, y: Val) -> Val:
    """Eager checks that `x` is a probability, and newer releases that `y` is."""
    for v, says in ((x, messages.PROBABILITY), (y, messages.TARGET))[: 1 + _targets_are_checked()]:
        inside = e.b.op("and", v >= 0, v <= 1)  # which a NaN is not
        e.b.bound(e.b.where(inside, e.b.const(0, "i64"), 1), 1, mask=e.mask, says=says)
    least = e.b.const(-100, x.dtype)
    ahead, behind = (e.b.op("maximum", v, least) for v in (e.b.op("log", x), e.b.op("log1p", -x)))
    return (y - 1) * behind - y * ahead


def _weighted(op: OpView) -> str | None:
    """Only weights that broadcast to the loss."""
    weight, x = op.arg("weight"), op.arg("self").spec
    wide = weight is not None and (weight.spec.rank > x.rank or not _broadcast(weight.spec.shape, x.shape))
    return "a weight that the loss broadcasts to" if wide else _same_shapes(op)


def _broadcast(shape: tuple[Any, ...], to: tuple[Any, ...]) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def picked(op: OpView) -> Domain:
    """One row over the samples."""
    shape = shape_of(op.arg("target").spec)
    return over(shape, range(max(len(shape), 1)))


def _nll_loss(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t, x, target = out_type(op), op.arg("self"), op.arg("target")
    classes = shape_of(x.spec)[1 if x.spec.rank > 1 else 0]
    label = r.x(target, "i64")
    counts = label.ne(op.arg("ignore_index"))
    with r.e.masked(counts):
        place = r.b.indirect(r.b.bound(label, classes, mask=r.e.mask, says=messages.LABEL))
        w = r.b.const(1, t) if op.arg("weight") is None else r.e(op.arg("weight"), At((classes,), (place,)), t)
        sample = (r.full.dims[0], place, *r.full.dims[1:]) if x.spec.rank > 1 else (place,)
        v = r.e(x, At(shape_of(x.spec), sample), t)
    w = r.b.where(counts, w, 0)
    total, loss = r.sum(w), r.sum(r.b.where(counts, -v * w, 0))
    return (loss / total if op.arg("reduction") == 1 else loss), total


def _reduces(op: OpView) -> str | None:
    return None if op.arg("reduction") in (1, 2) else "no reduction"


_PAIR: tuple[Level, ...] = ("row", "row")
_NORM: tuple[Level, ...] = ("full", "row", "row")

TABLE: Table = {
    "sum": (_row_op(_reduction("sum"), check=_number_out),),
    "mean": (_row_op(_reduction("mean")),),
    "prod": (_row_op(_reduction("prod"), check=_number_out),),
    "prod_all": (_row_op(_reduction("prod"), check=_number_out),),
    "amax": (_row_op(_extreme("max"), check=some_elements),),
    "amin": (_row_op(_extreme("min"), check=some_elements),),
    "max_with_indices": (_row_op(_extreme_and_position("max"), one_dim, _PAIR, some_elements, ordered=True),),
    "min_with_indices": (_row_op(_extreme_and_position("min"), one_dim, _PAIR, some_elements, ordered=True),),
    "argmax": (_row_op(_position("max"), check=some_elements, ordered=True),),
    "argmin": (_row_op(_position("min"), check=some_elements, ordered=True),),
    "any": (_row_op(_truth("any")),),
    "all": (_row_op(_truth("all")),),
    "var": (_row_op(_var, check=_float_in),),
    "std": (_row_op(_std, check=_float_in),),
    "var_mean": (_row_op(_var_mean, levels=_PAIR, check=_float_in),),
    "vector_norm": (_row_op(_vector_norm, check=_plain_order),),
    "logsumexp": (_row_op(_logsumexp, check=some_elements),),
    "cumsum": (_row_op(_scan("sum"), one_dim, ("full",), _number_out, ordered=True),),
    "linear_scan": (_row_op(_recurrence, _steps, ("full",), _computes_numbers, ordered=True),),
    "pointwise_scan": (_row_op(_pointwise_recurrence, _steps, ("full",), _computes_floats, ordered=True),),
    "coupled_scan": (_row_op(_coupled, _steps, _WHOLE, _few_results, ordered=True),),
    "cumprod": (_row_op(_scan("prod"), one_dim, ("full",), _number_out, ordered=True),),
    "softmax": (_row_op(_softmax, one_dim, ("full",)),),
    "safe_softmax": (_row_op(_safe_softmax, one_dim, ("full",)),),
    "log_softmax": (_row_op(_log_softmax, one_dim, ("full",)),),
    "layer_norm": (_row_op(_layer_norm, normalised, _NORM),),
    "rms_norm": (_row_op(_rms_norm, normalised, ("full", "row")),),
    "group_norm": (_row_op(_group_norm, grouped, _NORM, plain_groups, symbols=("N", "HxW")),),
    "batch_norm": (Map(_batch_norm, _has_statistics, cost=12),),
    "batch_norm_train": (_row_op(_batch_norm_train, channels, (*_NORM, "row", "row"), _trains),),
    "batch_norm_no_stats": (_row_op(_batch_norm_no_stats, channels, _NORM, _of_batch),),
    "weight_norm": (_row_op(_weight_norm, _but_one, ("full", "row")),),
    "nll_loss": (_row_op(_nll_loss, picked, _PAIR, _reduces),),
    "nll_loss2d": (_row_op(_nll_loss, picked, _PAIR, _reduces),),
}

LOSSES: dict[str, tuple[Callable[..., Val], Check]] = {
    "mse_loss": (_mse, _same_shapes),
    "smooth_l1_loss": (_smooth_l1, _same_shapes),
    "huber_loss": (_huber, _same_shapes),
    "soft_margin_loss": (_soft_margin, _same_shapes),
    "bce_with_logits": (_bce, _unweighted),
    "bce": (_bce_of_probability, _weighted),
}


def loss_rules(op: OpView) -> tuple[Row | Map, ...]:
    """A loss is a map without a reduction, and a row op with one."""
    code, check = LOSSES[op.op]
    rows, each = _loss(code)
    if op.arg("reduction") == 0:
        return (Map(each, check, cost=8),)
    return (_row_op(rows, _everything, ("row",), check),)
