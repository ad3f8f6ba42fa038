"""Rules of the gradients of softmax, norms and losses. Gradients of weight and bias reduce over other dims than the gradient of
the input, so they are separate rules."""

from __future__ import annotations

from typing import Any

from fusewright.interface import OpView
from fusewright.toolkit.ir import Val
from fusewright.toolkit.ir.types import DType
from fusewright.toolkit.lower.movement import out_type
from fusewright.toolkit.lower.rows import channel_of_group, channels, grouped, normalised, over, plain_groups, value_of
from fusewright.toolkit.rules.evaluate import compute_dtype
from fusewright.toolkit.rules.kinds import Domain, Evaluator, Map, Row, RowContext, Table
from fusewright.toolkit.rules.space import At, Shape, product, shape_of


def _of_output(op: OpView) -> Domain:
    return over(shape_of(op.arg("output").spec), (op.arg("dim"),))


def _softmax(r: RowContext, op: OpView) -> tuple[Val, ...]:
    g, y = r.x(op.arg("grad_output")), r.x(op.arg("output"))
    gy = g * y
    return (gy - y * r.sum(gy),)


def _log_softmax(r: RowContext, op: OpView) -> tuple[Val, ...]:
    g, y = r.x(op.arg("grad_output")), r.x(op.arg("output"))
    return (g - r.b.op("exp", y) * r.sum(g),)


def _type(op: OpView) -> DType:
    return compute_dtype(op.arg("input").spec.dtype)


def _centred(r: RowContext, g: Val, xhat: Val, rstd: Val) -> Val:
    """The gradient of the input of (x - mean) * rstd."""
    return (g - r.mean(g) - xhat * r.mean(g * xhat)) * rstd


def _layer_norm_input(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = _type(op)
    mean, rstd = r.per_row(op.arg("mean"), t), r.per_row(op.arg("rstd"), t)
    xhat, g = (r.x(op.arg("input"), t) - mean) * rstd, r.x(op.arg("grad_out"), t)
    if op.arg("weight") is not None:
        g = g * r.per_position(op.arg("weight"), t)
    return (_centred(r, g, xhat, rstd),)


def outer(op: OpView) -> Domain:
    """Rows over the dims that a norm does not reduce."""
    shape = shape_of(op.arg("input").spec)
    return over(shape, range(len(shape) - len(op.arg("normalized_shape"))))


def _layer_norm_affine(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = _type(op)
    mean, rstd = r.per_position(op.arg("mean"), t), r.per_position(op.arg("rstd"), t)
    g = r.x(op.arg("grad_out"), t)
    return r.sum(g * ((r.x(op.arg("input"), t) - mean) * rstd)), r.sum(g)


def _rms_norm_input(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = _type(op)
    rstd = r.per_row(op.arg("rstd"), t)
    xhat, g = r.x(op.arg("input"), t) * rstd, r.x(op.arg("grad_out"), t)
    if op.arg("weight") is not None:
        g = g * r.per_position(op.arg("weight"), t)
    return ((g - xhat * r.mean(g * xhat)) * rstd,)


def _rms_norm_weight(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = _type(op)
    return (r.sum(r.x(op.arg("grad_out"), t) * (r.x(op.arg("input"), t) * r.per_position(op.arg("rstd"), t))),)


def _group_norm_input(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = _type(op)
    mean, rstd = r.per_row(op.arg("mean"), t), r.per_row(op.arg("rstd"), t)
    xhat, g = (r.x(op.arg("input"), t) - mean) * rstd, r.x(op.arg("grad_out"), t)
    w = channel_of_group(r, op.arg("weight"), t)
    return (_centred(r, g if w is None else g * w, xhat, rstd),)


def _over_samples(op: OpView) -> Domain:
    return Domain(grouped(op).shape, (0, 3))


def _group_norm_affine(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = _type(op)
    at = r.full.pick((0, 1))
    mean, rstd = (r.e(op.arg(n), at.reshape(shape_of(op.arg(n).spec)), t) for n in ("mean", "rstd"))
    g = r.x(op.arg("grad_out"), t)
    return r.sum(g * ((r.x(op.arg("input"), t) - mean) * rstd)), r.sum(g)


def _batch_norm(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = _type(op)
    x, g = r.x(op.arg("input"), t), r.x(op.arg("grad_out"), t)
    w = r.b.const(1, t) if op.arg("weight") is None else r.per_row(op.arg("weight"), t)
    if op.arg("train"):
        mean, rstd = r.per_row(op.arg("save_mean"), t), r.per_row(op.arg("save_invstd"), t)
    else:
        mean = r.per_row(op.arg("running_mean"), t)
        rstd = r.b.op("rsqrt", r.per_row(op.arg("running_var"), t) + op.arg("eps"))
    xhat = (x - mean) * rstd
    dx = _centred(r, g, xhat, rstd) * w if op.arg("train") else g * (rstd * w)
    return dx, r.sum(g * xhat), r.sum(g)


def _given_statistics(op: OpView) -> str | None:
    names = ("save_mean", "save_invstd") if op.arg("train") else ("running_mean", "running_var")
    return None if all(op.arg(n) is not None for n in names) else "no statistics"


def _weight_norm_domain(op: OpView) -> Domain:
    shape = shape_of(op.arg("saved_v").spec)
    return over(shape, [d for d in range(len(shape)) if d != op.arg("dim") % len(shape)])


def _weight_norm(r: RowContext, op: OpView) -> tuple[Val, ...]:
    t = out_type(op)
    v, gw = r.x(op.arg("saved_v"), t), r.x(op.arg("grad_w"), t)
    g, norm = r.per_row(op.arg("saved_g"), t), r.per_row(op.arg("saved_norms"), t)
    along = r.sum(gw * v) / norm
    return (gw - v * (along / norm)) * (g / norm), along


# ---- losses ----


def _per_element(e: Evaluator, op: OpView, at: At, t: DType) -> Val:
    """The gradient for one element of a loss, divided by the count if the loss is a mean."""
    g = e(op.arg("grad_output"), at, t)
    return g / _count(e, at.shape, t) if op.arg("reduction") == 1 else g


def _count(e: Evaluator, shape: Shape, t: DType) -> Val:
    n: Any = product(shape)
    return value_of(e, n, t)  # type: ignore[arg-type]


def _mse(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = out_type(op)
    return (e(op.arg("self"), at, t) - e(op.arg("target"), at, t)) * 2 * _per_element(e, op, at, t)


def _smooth_l1(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t, beta = out_type(op), op.arg("beta")
    d = e(op.arg("self"), at, t) - e(op.arg("target"), at, t)
    slope = e.b.op("sign", d)
    if beta:
        slope = e.b.where(e.b.op("abs", d) < beta, d / beta, slope)
    return slope * _per_element(e, op, at, t)


def _huber(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t, delta = out_type(op), op.arg("delta")
    d = e(op.arg("self"), at, t) - e(op.arg("target"), at, t)
    low, high = d <= -delta, d >= delta
    return e.b.where(low, -delta, e.b.where(high, delta, d)) * _per_element(e, op, at, t)


def _soft_margin(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t = out_type(op)
    x, y = e(op.arg("self"), at, t), e(op.arg("target"), at, t)
    return -y * e.b.op("sigmoid", -(x * y)) * _per_element(e, op, at, t)


def _nll(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    t, target, d = out_type(op), op.arg("target"), min(len(at.shape) - 1, 1)
    classes = at.shape[d]
    sample = at.pick([i for i in range(len(at.shape)) if i != d]).reshape(shape_of(target.spec))
    label = e(target, sample, "i64")
    here = e.b.op("and", label.eq(e.position(at.dims[d])), label.ne(op.arg("ignore_index")))
    g = e(op.arg("grad_output"), sample if op.arg("grad_output").spec.rank else At((), ()), t)
    if op.arg("weight") is not None:
        g = g * e(op.arg("weight"), At((classes,), (at.dims[d],)), t)
    if op.arg("reduction") == 1:
        g = g / e(op.arg("total_weight"), At((), ()), t)
    return e.b.where(here, -g, 0)


TABLE: Table = {
    "softmax_backward": (Row(_of_output, _softmax),),
    "log_softmax_backward": (Row(_of_output, _log_softmax),),
    "layer_norm_backward": (
        Row(normalised, _layer_norm_input),
        Row(outer, _layer_norm_affine, (1, 2), ("row", "row")),
    ),
    "rms_norm_backward": (Row(normalised, _rms_norm_input), Row(outer, _rms_norm_weight, (1,), ("row",))),
    "group_norm_backward": (
        Row(grouped, _group_norm_input, check=plain_groups, symbols=("N", "HxW")),
        Row(_over_samples, _group_norm_affine, (1, 2), ("row", "row")),
    ),
    "batch_norm_backward": (Row(channels, _batch_norm, (0, 1, 2), ("full", "row", "row"), _given_statistics),),
    "weight_norm_backward": (Row(_weight_norm_domain, _weight_norm, (0, 1), ("full", "row")),),
    "mse_loss_backward": (Map(_mse, cost=6),),
    "smooth_l1_loss_backward": (Map(_smooth_l1, cost=10),),
    "huber_loss_backward": (Map(_huber, cost=10),),
    "soft_margin_loss_backward": (Map(_soft_margin, cost=30),),
    "nll_loss_backward": (Map(_nll, cost=10),),
    "nll_loss2d_backward": (Map(_nll, cost=10),),
}
