"""The samples themselves: row name -> calls, and row name -> dtypes under test."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusewright.conformance.ops.samples import (
    ALL,
    ANY,
    BF16,
    BOOL,
    DTYPE,
    F32,
    F64,
    I8,
    I64,
    INTEGERS,
    NUMBERS,
    U8,
    Case,
    T,
    adaptive_max_pool,
    attention,
    batch_norm,
    c,
    given,
    group_norm,
    grown,
    index,
    log_sigmoid,
    mask,
    max_pool,
    nll_loss2d,
    q_conv,
    q_linear,
    saved,
    t,
    weight_norm,
)

Cases = dict[str, tuple[Case, ...]]

X, Y, V = t(3, 4), t(3, 4), t(4)
POS = t(3, 4, low=1, high=4)
SCALES = t(3, low=0.01, high=0.1, dtype=F32)
UNIT = t(3, 4, low=-0.9, high=0.9)
SPECIAL = given(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.5, 2.5)
IMAGE = t(2, 4, 6, 6)
LAST = t(2, 4, 6, 6, channels_last=True)
VOLUME = t(2, 3, 5, 6, 7)
HALF_IMAGE, WEIGHT = t(2, 4, 6, 6, dtype=BF16), t(4, dtype=F32, low=0.5, high=2)
PADDED = {1: (t(2, 4, 6), t(4, 6)), 2: (IMAGE, LAST), 3: (VOLUME,)}
PADS = {1: [2, 3], 2: [1, 2, 0, 1], 3: [2, 1, 0, 2, 1, 3]}
"""Amounts in front and behind, of the last dimension first."""
LABELS = T((2, 3, 2), I64, values=[0, 3, -100, 1, 2, 2, 0, 1, -100, 3, 1, 0])
HEADS = (t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 4, 7, 8))

Q_OUTPUTS: tuple[tuple[Any, ...], ...] = (
    (1.0, 0, F32, "none", [], ""),
    (0.5, 20, U8, "relu", [], ""),
    (1.0, 0, BF16, "relu", [], ""),
)
"""Scale, zero point, dtype and activation of a quantized linear's output."""

_UNARY = """
    abs neg sign sgn ceil floor round trunc frac exp exp2 expm1 sin cos tan asinh atan sinh cosh
    tanh sigmoid erf erfc relu isnan isinf signbit logical_not silu mish hardswish hardsigmoid
    leaky_relu elu softplus alias
"""
_BINARY = "add sub mul eq ne lt le gt ge"
_TWO_TENSORS = """
    maximum minimum fmax fmin atan2 hypot logaddexp logical_and logical_or logical_xor bitwise_and
    bitwise_or bitwise_xor
"""
_REDUCTIONS = "sum mean amax amin"
_ONE_DIM = "max_with_indices min_with_indices argmax argmin prod"
_MOMENTS = "var std var_mean"
_GRADIENTS = """
    gelu_backward silu_backward mish_backward tanh_backward sigmoid_backward hardswish_backward
    hardsigmoid_backward
"""

UNARY: Cases = {name: (c(X), c(SPECIAL), c(t())) for name in _UNARY.split()}
UNARY |= {name: (c(POS),) for name in "sqrt rsqrt reciprocal log log2 log10 log1p acosh lgamma digamma".split()}
UNARY["acosh"] = (c(t(3, 4, low=1.1, high=3)),)
UNARY |= {name: (c(UNIT),) for name in "asin acos atanh erfinv".split()}
UNARY["bitwise_not"] = (c(X),)

PROBABILITY = t(3, 4, low=0.05, high=0.95)
OPENED: Cases = {
    "nan_to_num": (c(X), c(given(math.nan, 1.0, -0.0)), c(SPECIAL, 1.5, 2.5, -3.5), c(t())),
    "logit": (c(PROBABILITY), c(given(0.0, 1.0, 0.25, -1.0, 2.0), 0.125), c(t(low=0.1, high=0.2))),
    "sinc": (c(X), c(given(0.0, -0.0, math.inf, math.nan, 0.5)), c(t())),
    "softshrink": (c(X), c(SPECIAL, 1.0)),
    "hardshrink": (c(X), c(SPECIAL, 1.0)),
    **{name: (c(X), c(SPECIAL), c(t())) for name in ("isposinf", "isneginf")},
    **{
        name: (c(X, POS), c(t(3, 1), t(4, low=1, high=4)), c(given(0.0, 0.0, 1.0), given(0.0, math.nan, 0.5)))
        for name in ("xlogy", "xlog1py")
    },
    "cross": (c(t(4, 3), t(4, 3)), c(t(3, 4), t(3, 1), dim=0)),
    "std_mean": (c(X, [1]), c(t(2, 3, 4), [0, 2], correction=0, keepdim=True), c(X)),
    "aminmax": (c(X), c(t(2, 3, 4), dim=1), c(t(2, 3, 4), dim=-1, keepdim=True), c(t())),
    "euclidean_dist": (c(t(5, 3), t(4, 3)), c(t(2, 5, 3), t(2, 4, 3))),
    "bce": (c(PROBABILITY, t(3, 4, low=0, high=1)), c(PROBABILITY, t(3, 4, low=0, high=1), V, 2),
        c(given(0.0, 1.0, 0.5), given(1.0, 0.5, 0.0), None, 0)),
    "bce_backward": (c(t(), PROBABILITY, t(3, 4, low=0, high=1)), c(X, PROBABILITY, t(3, 4, low=0, high=1), V, 0)),
    "logit_backward": (c(X, PROBABILITY), c(t(5), given(0.0, 1.0, 0.25, -1.0, 2.0), 0.125), c(t(3), given(0.5, -1.0, 2.0))),
    "rot90": tuple(c(t(2, 3, 4), k, dims) for k, dims in ((1, [0, 1]), (2, [1, 2]), (3, [-1, 0]), (4, [0, 1]), (-1, [0, 2]))),
    "diag_embed": (c(X), c(X, -1), c(t(2, 3, 4), 2, 0, -2)),
    "diagonal_copy": (c(X), c(t(2, 3, 4), 1, 0, -1)),
    "diagonal_backward": (c(t(3), [3, 4], 0, 0, 1), c(t(3, 1), [2, 3, 4], -1, 0, -1)),
    "channel_shuffle": (c(t(2, 6, 3, 2), 3), c(LAST, 2)),
}  # fmt: skip
"""Rows of `ops.table.opened`."""

BINARY: Cases = {name: (c(X, Y), c(X, V), c(t(), Y), c(X, t(3, 4, dtype=F64))) for name in _BINARY.split()}
BINARY["add"] += (c(X, Y, alpha=0),)
for name in ("add", "sub", "mul"):
    BINARY[name] += (c(X, 2), c(X, 2.5, alpha=3) if name != "mul" else c(X, 2.5))
BINARY |= {f"{name}_scalar": (c(X, 2), c(X, 0.1)) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
BINARY |= {name: (c(X, Y), c(X, V)) for name in _TWO_TENSORS.split()}
BINARY |= {f"bitwise_{name}_scalar": (c(X, 5),) for name in ("and", "or", "xor")}
BINARY |= {name: (c(X, POS), c(POS, t(4, low=1, high=5))) for name in ("div", "fmod", "remainder", "copysign")}
BINARY["div"] += (c(X, 2), c(X, 2.5))
BINARY |= {f"{name}_scalar": (c(X, 2), c(X, -3)) for name in ("fmod", "remainder", "copysign")}
BINARY |= {f"bitwise_{d}_shift": (c(t(3, 4, low=0, high=9), t(4, low=0, high=4)),) for d in ("left", "right")}
BINARY |= {f"bitwise_{d}_shift_scalar": (c(t(3, 4, low=0, high=9), 2),) for d in ("left", "right")}

REDUCTIONS: Cases = {
    name: (c(X, [1], False), c(t(2, 3, 4), [0, 2], True), c(X, [], False)) for name in _REDUCTIONS.split()
}
REDUCTIONS["sum"] += (c(X, None), c(X, [0], dtype=F32))
ONE_DIM: Cases = {name: (c(X, 1), c(t(2, 3, 4), -2, True)) for name in _ONE_DIM.split()}
ALONG: Cases = {
    name: (c(X, 1), c(t(2, 3, 4), 0), c(t(), 0)) for name in ("cumsum", "cumprod", "cummax", "logcumsumexp")
}
ALONG["linear_scan"] = (
    c(X, Y, None, 1), c(UNIT, X, V, 0), c(t(2, 1, 4), t(2, 9, 4), t(2, 4), -2), c(t(low=0.5, high=1), V, t(), 0),
    c(t(2, 3, 1), t(2, 3, 4), t(1, 4), 1), c(t(0, 4), t(0, 4), None, 0), c(t(1, 4), t(1, 4), V, 0),
)  # fmt: skip
ALONG["pointwise_scan"] = (
    c(X, [Y], V, 0, "maximum(add(h, x0), x1)"), c(t(2, 9, 4), [t(2, 1, 4), t(1)], t(2, 4), -2, "where(gt(h, x1), x2, sub(h, x0))"),
    c(X, [UNIT], t(), 1, "tanh(add(mul(h, 0.5), mul(x1, x0)))"), c(t(0, 4), [], V, 0, "logaddexp(h, x0)"),
    c(t(1, 4), [], t(1), 0, "relu(sub(h, x0))"), c(X, [], V, 0, "clamp(add(h, x0), float('-inf'), 0.5)"),
    c(X, [], V, 0, "pow_scalar(lerp_scalar(h, x0, 0.25), 2)"), c(UNIT, [], V, 0, "lerp(rsub(h, 1), h, x0)"),
)  # fmt: skip
_ROTATION = "n0=add(sub(mul(h0, x0), mul(h1, x1)), x2);n1=add(mul(h0, x1), mul(h1, x0))"
ALONG["coupled_scan"] = (
    c(X, [Y, t(1)], [V, t()], 0, _ROTATION),
    c(t(2, 9, 4), [t(2, 1, 4)], [t(2, 4), t(4)], -2, "n0=tanh(add(h1, x0));n1=mul(h0, x1)"),
    c(X, [UNIT], [t(3), t()], 1, "t0=where(gt(h0, h1), x0, x1);n1=lerp_scalar(h1, t0, 0.5);n0=sub(n1, h0);n2=mul(t0, h1)"),
    c(t(0, 4), [], [V, V], 0, "n0=add(h1, x0);n1=h0"), c(t(1, 4), [], [t(1)], 0, "n0=relu(sub(h0, x0));n1=exp(n0)"),
)  # fmt: skip
MOMENTS: Cases = {
    name: (c(X), c(t(2, 3, 4), [1, 2], correction=0, keepdim=True), c(X, [0], correction=1))
    for name in _MOMENTS.split()
}

CASES: Cases = {
    # At infinity, eager's fp32 gelu kernel returns NaN, its fp64 kernel infinity: the row allows both.
    "gelu": (c(X), c(X, approximate="tanh"), c(given(0.0, -0.0, math.nan, 9.0, -9.0))),
    **UNARY,
    **BINARY,
    **REDUCTIONS,
    **ONE_DIM,
    **ALONG,
    **MOMENTS,
    # pointwise
    "rsub": (c(X, 2), c(X, 1.5, 2)),
    "div_rounded": (
        c(X, POS, rounding_mode="floor"),
        c(X, 2, rounding_mode="trunc"),
        c(X, POS, rounding_mode="trunc"),
    ),
    "pow": (c(POS, t(4, low=0, high=3)),),
    "pow_scalar": (c(POS, 2), c(POS, 3)),
    "scalar_pow": (c(2, t(3, 4, low=0, high=3)),),
    "clamp": (c(X, -1, 1), c(X, None, 0), c(SPECIAL, -1, 1)),
    "clamp_tensor": (c(X, t(4, low=-2, high=0), t(4, low=0, high=2)), c(X, None, V)),
    "addcmul": (c(X, Y, V), c(X, Y, Y, value=2)),
    "addcdiv": (c(X, Y, POS), c(X, Y, POS, value=2)),
    "lerp": (c(X, Y, t(4, low=0, high=1)),),
    "lerp_scalar": (c(X, Y, 0.3), c(X, Y, 0.7)),
    "where": (c(mask(3, 4), X, V), c(mask(4), X, t(dtype=F64))),
    "masked_fill": (c(X, mask(3, 4), 2), c(V, mask(3, 4), 1)),
    "masked_fill_tensor": (c(X, mask(4), t()),),
    "cast": (
        c(X, dtype=F32),
        c(t(3, 4, low=-9, high=9), dtype=I64),
        c(X, dtype=BOOL),
        c(X, dtype=BF16),
        c(X),
    ),
    "clone": (c(X), c(LAST), c(LAST, memory_format=torch.contiguous_format)),
    "copy": (c(X, V), c(X, t(3, 4, dtype=I64))),
    # reductions and scans
    "prod_all": (c(POS),),
    "any": (c(X), c(t(2, 3, 4), [1], True), c(X, None, True), c(X, [])),
    "all": (c(X), c(t(2, 3, 4), [0, 1]), c(t(2, 3, 4), [1], True), c(X, [])),
    "vector_norm": (c(X), c(t(3, 4, dtype=torch.complex64)), c(X, 1, [1], True), c(X, 2, [0])),
    "logsumexp": (c(X, [1]), c(t(2, 3, 4), [0, 2], True)),
    "sort": (c(X, stable=True), c(X, stable=True, dim=0, descending=True)),
    "topk": (c(X, 2), c(X, 1, 0, False)),
    # views
    "view": (c(X, [2, 6]), c(X, [-1]), c(t(2, 3, 4), [2, -1, 2])),
    "reshape": (c(X, [2, 6]), c(X, [4, -1])),
    "expand": (c(t(3, 1), [2, 3, 4]), c(t(3, 1), [-1, 5])),
    "permute": (c(t(2, 3, 4), [2, 0, 1]), c(t(2, 3, 4), [-1, 0, 1])),
    "transpose": (c(t(2, 3, 4), 0, -1),),
    "t": (c(X), c(V)),
    "squeeze": (c(t(2, 1, 3, 1), [1, 2, -1]), c(t(1, 3), [0])),
    "unsqueeze": (c(X, 0), c(X, -1)),
    "slice": (c(X, 1, 1, 3), c(X, 0, 0, 2**63 - 1, 2), c(X, 1, -3, -1), c(X), c(X, 1, 3, 1), c(X, 0, 1, 99)),
    "select": (c(X, 0, 1), c(t(2, 3, 4), -1, -2)),
    "split": (c(X, 2, 1), c(X, 2)),
    "split_with_sizes": (c(X, [1, 3], 1), c(X, [1, 0, 2])),
    "unbind": (c(X), c(X, 1)),
    "diagonal": (c(X), c(t(2, 3, 4), 1, 0, 2), c(t(3, 5), -1)),
    "unfold": (c(X, 1, 2, 1), c(t(2, 7), -1, 3, 2)),
    "as_strided": (c(X, [2, 2], [4, 1], 1),),
    "view_dtype": (
        c(t(3, 4, dtype=F32), torch.int32),
        c(t(3, 4, dtype=F32), torch.int16),
        c(t(3, 4, dtype=BF16), F32),
    ),
    "view_as_real": (c(t(3, 4, dtype=torch.complex64)),),
    "view_as_complex": (c(t(3, 2, dtype=F32)),),
    # contractions
    "mm": (c(t(3, 5), t(5, 4)),),
    "bmm": (c(t(2, 3, 5), t(2, 5, 4)),),
    "addmm": (
        c(V, t(3, 5), t(5, 4)),
        c(X, t(3, 5), t(5, 4), beta=2, alpha=3),
        c(X, t(3, 5), t(5, 4), beta=0),
    ),
    "baddbmm": (c(t(2, 3, 4), t(2, 3, 5), t(2, 5, 4), beta=2), c(t(1, 3, 4), t(2, 3, 5), t(2, 5, 4))),
    "addbmm": (c(X, t(2, 3, 5), t(2, 5, 4), alpha=2),),
    "mv": (c(X, V),),
    "addmv": (c(t(3), X, V, beta=2),),
    "dot": (c(V, V),),
    "conv": (
        c(IMAGE, t(8, 4, 3, 3), t(8), [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        c(LAST, t(8, 2, 3, 3), None, [1, 1], [1, 1], [2, 2], False, [0, 0], 2),
        c(t(2, 4, 9), t(6, 4, 3), t(6), [1], [0], [1], False, [0], 1),
        c(t(2, 4, 5, 5), t(4, 6, 3, 3), t(6), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ),
    # gather and scatter
    "gather": (c(X, 1, index(3, 2, size=4)), c(X, 0, index(2, 4, size=3))),
    "index": (
        c(X, [index(2, size=3)]),
        c(t(2, 3, 4), [None, index(2, 2, size=3)]),
        c(X, [index(2, 1, size=3), index(5, size=4)]),
        c(t(2, 3, 4), [index(2, size=2), None, index(2, size=4)]),
    ),
    "index_select": (c(X, 1, index(6, size=4)), c(X, 0, index(2, size=3))),
    "cat": (c([X, t(2, 4)]), c([X, t(3, 2)], -1), c([X, t(3, 4, dtype=F64)], 0), c([t(0), X])),
    "stack": (c([X, Y]), c([X, Y], -1)),
    "constant_pad_nd": (c(X, [1, 2]), c(X, [1, -1, 2, 0], 3)),
    **{
        f"{kind}_pad{n}d": tuple(c(x, PADS[n]) for x in PADDED[n])
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    "roll": (c(X, [1], [1]), c(X, [1, 2], [0, 1]), c(X, [3]), c(t(), [3])),
    "flip": (c(X, [0]), c(X, [0, -1])),
    "repeat": (c(X, [2, 1, 3]),),
    "im2col": (
        c(IMAGE, [3, 3], [1, 1], [1, 1], [2, 2]),
        c(LAST, [3, 2], [1, 2], [1, 0], [2, 1]),
        c(IMAGE, [3, 3], [2, 3], [2, 3], [2, 2]),
        c(t(4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
    ),
    "tril": (c(X), c(t(2, 3, 4), 1)),
    "triu": (c(X), c(X, -1)),
    "bucketize": (c(X, given(-1.0, 0.0, 1.0)), c(X, given(-1.0, 0.0, 1.0), out_int32=True, right=True)),
    "scatter": (c(X, 1, T((3, 2), I64, values=[0, 1, 1, 2, 3, 0]), t(3, 2)),),
    "scatter_value": (c(X, 1, index(3, 2, size=4), 2),),
    "scatter_add": (c(X, 1, index(3, 2, size=4), t(3, 2)),),
    "scatter_reduce": tuple(
        c(X, 1, index(3, 5, size=4), t(3, 5), reduce, include_self=own)
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    "col2im": (
        c(t(2, 36, 9), [6, 6], [3, 3], [1, 1], [1, 1], [2, 2]),
        c(t(2, 24, 12), [6, 6], [3, 2], [1, 2], [1, 0], [2, 1]),
        c(t(2, 36, 9), [6, 6], [3, 3], [2, 3], [2, 3], [2, 2]),
        c(t(16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
    ),
    "index_put": (
        c(X, [given(2, 0, dtype=I64)], t(2, 4)),
        c(X, [given(2, 0, 2, dtype=I64)], t(4), True),
        c(t(2, 3, 4), [None, given(2, 0, dtype=I64)], t(2, 2, 4)),
        c(X, [mask(3, 4)], t()),
        c(t(2, 3, 4), [None, mask(3)], t(1), True),
    ),
    "index_add": (
        c(X, 0, given(2, 0, 2, dtype=I64), t(3, 4)),
        c(X, 1, given(1, dtype=I64), t(3, 1), alpha=2),
    ),
    "index_copy": (c(X, 0, given(2, 0, dtype=I64), t(2, 4)),),
    "index_reduce": tuple(
        c(x, dim, given(2, 0, 2, dtype=I64), source, reduce, include_self=own)
        for x, dim, source in ((X, 1, t(3, 3)), (t(4), 0, t(3)))
        for reduce in ("prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    "index_fill": (c(X, 1, given(2, 0, dtype=I64), 1), c(X, 0, given(1, -1, dtype=I64), 1)),
    "slice_scatter": (c(X, t(3, 2), 1, 1, 3), c(X, t(2, 4), 0, 0, 3, 2)),
    "select_scatter": (c(X, t(4), 0, 1),),
    "diagonal_scatter": (c(X, t(3)), c(X, t(2), -1)),
    "as_strided_scatter": (c(X, t(2, 2), [2, 2], [4, 1], 1),),
    "masked_scatter": (c(X, mask(3, 4), t(12)), c(X, mask(4), t(12))),
    # creation and random
    "arange": (c(0, 5), c(1, 9, 3), c(0.0, 2.0, 0.5), c(5, 0, -2), c(0, 4, dtype=F32), c(0.0, -8.5, -4.0, dtype=I64),
               c(0.5, 3.7, dtype=torch.int32)),
    "full": (c([2, 3], 1.5), c([2], 3), c([2], True), c([2], 3, dtype=F32)),
    "full_like": (c(X, 2), c(LAST, 1), c(X, 2, dtype=I64)),
    "fill": (c(X, 2),),
    "fill_tensor": (c(X, t()),),
    "new_full": (c(X, [2, 3], 1), c(X, [2], 2, dtype=F32)),
    "empty": (c([2, 3]), c([2], dtype=I64)),
    "empty_like": (c(X), c(X, dtype=I64)),
    "empty_strided": (c([2, 3], [1, 2]),),
    "new_empty": (c(X, [2, 3]),),
    "new_empty_strided": (c(X, [2, 3], [1, 2]),),
    "scalar_tensor": (c(1.5), c(2, dtype=I64)),
    "linspace": (c(0, 1, 5), c(-1.0, 1.0, 3, dtype=F64)),
    "eye": (c(3, 4),),
    "rand": (c([2, 3]), c([2], dtype=F64)),
    "randn": (c([2, 3]),),
    "rand_like": (c(t(3, 4, dtype=F32)),),
    "randn_like": (c(t(3, 4, dtype=F32)), c(t(3, 4, dtype=F32), dtype=F64)),
    "randint": (c(2, 9, [3]), c(0, 2, [3], dtype=F32)),
    "randperm": (c(5),),
    "bernoulli": (c(t(3, 4, dtype=F32, low=0, high=1)),),
    "bernoulli_p": (c(t(3, 4, dtype=F32), 0.3),),
    "uniform": (c(t(3, 4, dtype=F32)), c(t(3, 4, dtype=BF16), -1.0, 1.0)),
    "normal": (c(t(3, 4, dtype=F32), 1.0, 2.0),),
    "exponential": (c(t(3, 4, dtype=F32)),),
    "multinomial": (c(t(3, 4, dtype=F32, low=0.1, high=1), 2),),
    "dropout": (c(t(3, 4, dtype=F32), 0.3, True), c(t(3, 4, dtype=F32), 0.3, False)),
    # composites
    "linear": (
        c(t(2, 3, 5), t(4, 5), t(4)),
        c(t(3, 5), t(4, 5)),
        c(t(5), t(4, 5), t(4)),
        c(t(2, 3, 5), t(5)),
    ),
    "matmul": (
        c(t(3, 5), t(5, 4)),
        c(t(2, 3, 5), t(5, 4)),
        c(t(2, 1, 3, 5), t(4, 5, 6)),
        c(t(5), t(5)),
        c(t(5), t(2, 5, 3)),
        c(t(2, 3, 5), t(5)),
    ),
    "sdpa": (
        c(*HEADS),
        c(*HEADS, mask(2, 1, 5, 7)),
        c(*HEADS, t(5, 7)),
        c(*HEADS, None, 0.0, True),
        c(*HEADS, scale=0.5),
        c(t(2, 4, 5, 8), t(2, 2, 5, 8), t(2, 2, 5, 8), None, 0.0, True, enable_gqa=True),
        c(*HEADS, T((5, 7), BOOL, values=[[i != 2] * 7 for i in range(5)])),
    ),
    "sdpa_with_lse": (
        c(*HEADS),
        c(*HEADS, 0.0, True),
        c(*HEADS, attn_mask=t(2, 1, 5, 7), scale=0.5),
        c(t(2, 4, 5, 8), t(2, 2, 5, 8), t(2, 2, 5, 8)),
    ),
    "softmax": (c(X, -1, False), c(t(2, 3, 4), 1, False)),
    "safe_softmax": (c(X, -1), c(given(-math.inf, -math.inf), 0)),
    "log_softmax": (c(X, -1, False), c(t(2, 3, 4), 0, False)),
    "layer_norm": (
        c(X, [4], V, t(4), 1e-5),
        c(t(2, 3, 4), [3, 4], None, None, 1e-5),
        c(X, [4], V, None, 1e-5),
        c(t(3, 4, dtype=BF16), [4], t(4, dtype=F32), t(4, dtype=F32), 1e-5),
    ),
    "rms_norm": (
        c(X, [4], V, 1e-6),
        c(t(2, 3, 4), [4], None, 1e-5),
        c(t(3, 4, dtype=BF16), [4], t(4, dtype=F32), 1e-5),
        c(t(3, 4, dtype=BF16, high=0.05), [4], None, None),
    ),
    "group_norm": (
        c(IMAGE, t(4), t(4), 2, 4, 36, 2, 1e-5),
        c(IMAGE, None, None, 2, 4, 36, 4, 1e-5),
        c(HALF_IMAGE, WEIGHT, WEIGHT, 2, 4, 36, 4, 1e-5),
    ),
    "batch_norm": (
        c(IMAGE, t(4), t(4), t(4), t(4, low=0.5, high=2), 0.1, 1e-5),
        c(LAST, t(4), t(4), t(4), t(4, low=0.5, high=2), 0.1, 1e-5),
        c(HALF_IMAGE, WEIGHT, WEIGHT, WEIGHT, WEIGHT, 0.1, 1e-5),
    ),
    "batch_norm_train": (
        c(IMAGE, t(4), t(4), t(4), t(4, low=0.5, high=2), True, 0.1, 1e-5),
        c(HALF_IMAGE, WEIGHT, WEIGHT, WEIGHT, WEIGHT, True, 0.1, 1e-5),
        c(HALF_IMAGE, None, None, WEIGHT, WEIGHT, True, 0.1, 1e-5),
    ),
    "batch_norm_no_stats": (
        c(IMAGE, t(4), t(4), True, 0.1, 1e-5),
        c(t(1, 8, 6, 6), None, None, True, 0.1, 1e-5),
        c(HALF_IMAGE, WEIGHT, WEIGHT, True, 0.1, 1e-5),
    ),
    "weight_norm": (c(t(3, 4, 5), t(3, 1, 1), 0), c(t(3, 4, 5), t(1, 1, 5), 2)),
    "log_sigmoid": (c(X),),
    "threshold": (c(X, 0.5, 2),),
    "prelu": (c(X, t(1, 4)),),
    "glu": (c(X), c(t(4, 3), 0)),
    "embedding": (c(t(7, 4), index(2, 3, size=7)), c(t(7, 4), index(5, size=7), 1)),
    "max_pool2d": (
        c(IMAGE, [2, 2]),
        c(LAST, [3, 3], [2, 2], [1, 1]),
        c(IMAGE, [3, 3], [2, 2], [0, 0], [1, 1], True),
        c(IMAGE, [2, 3], [1, 2], [1, 1], [3, 2], True),
    ),
    "avg_pool2d": (
        c(IMAGE, [2, 2]),
        c(LAST, [3, 3], [2, 2], [1, 1], True, False),
        c(IMAGE, [2, 2], [], [0, 0], False, True, 3),
        c(IMAGE, [3, 3], [1, 1], [1, 1], False, False),
        c(IMAGE, [3, 2], [2, 1], [1, 1], False, True),
        c(IMAGE, [3, 3], [2, 2], [1, 0], False, False, 5),
        c(LAST, [3, 3], [2, 2], [1, 1], True, True),
    ),
    "max_pool3d": (
        c(VOLUME, [2, 2, 2]),
        c(VOLUME, [3, 3, 3], [2, 2, 2], [1, 1, 1]),
        c(VOLUME, [2, 3, 2], [1, 2, 2], [1, 1, 0], [2, 1, 3], True),
    ),
    "avg_pool3d": (
        c(VOLUME, [2, 2, 2]),
        c(VOLUME, [3, 3, 3], [2, 2, 2], [1, 1, 1], True, False),
        c(VOLUME, [2, 3, 2], [1, 2, 2], [1, 1, 0], False, True, 5),
    ),
    "avg_pool1d": (c(t(2, 4, 9), [2]), c(t(2, 4, 9), [3], [2], [1]), c(t(4, 9), [4], [3], [1], True, False)),
    "adaptive_avg_pool2d": (c(IMAGE, [1, 1]), c(IMAGE, [4, 3]), c(LAST, [2, 3]), c(t(2, 3, 20, 19), [3, 2])),
    "adaptive_max_pool2d": (c(IMAGE, [1, 1]), c(IMAGE, [3, 2]), c(LAST, [4, 5]), c(t(3, 5, 9), [2, 9])),
    "adaptive_avg_pool3d": (c(VOLUME, [1, 1, 1]), c(VOLUME, [5, 3, 7]), c(VOLUME, [2, 4, 8])),
    "adaptive_max_pool3d": (c(VOLUME, [1, 1, 1]), c(VOLUME, [5, 3, 7]), c(VOLUME, [2, 4, 8])),
    "upsample_nearest1d": (c(t(2, 4, 6), [9]), c(t(2, 4, 6), [12], 2.0)),
    "upsample_nearest2d": (c(IMAGE, [12, 9]), c(IMAGE, [12, 12], 2.0, 2.0)),
    "upsample_nearest3d": (c(VOLUME, [7, 8, 9]), c(VOLUME, [10, 12, 21], 2.0, 2.0, 3.0)),
    "upsample_nearest_exact1d": (c(t(2, 4, 6), [9]), c(t(2, 4, 6), [12], 2.0)),
    "upsample_nearest_exact2d": (c(IMAGE, [12, 9]), c(LAST, [4, 5]), c(IMAGE, [9, 12], 1.5, 2.0)),
    "upsample_nearest_exact3d": (c(VOLUME, [7, 8, 9]), c(VOLUME, [10, 12, 21], 2.0, 2.0, 3.0)),
    "upsample_linear1d": (c(t(2, 4, 6), [9], False), c(t(2, 4, 6), [4], True), c(t(2, 4, 6), [15], False, 2.5)),
    "upsample_trilinear3d": (
        c(VOLUME, [7, 8, 9], False), c(VOLUME, [3, 6, 1], True), c(VOLUME, [10, 9, 14], False, 2.0, 1.5, 2.0),
    ),
    "upsample_bilinear2d": (
        c(IMAGE, [12, 9], False),
        c(IMAGE, [9, 9], True),
        c(IMAGE, [1, 4], True),
        c(IMAGE, [4, 3], False),
        c(IMAGE, [6, 6], False),
        c(IMAGE, [12, 15], False, 2.0, 2.5),
    ),
    "upsample_bicubic2d": (c(IMAGE, [12, 9], False),),
    "grid_sampler_2d": tuple(
        c(x, t(2, 3, 5, 2, low=-1.3, high=1.3), mode, padding, corners)
        for x, mode, padding, corners in (
            (IMAGE, 0, 0, False), (IMAGE, 0, 1, True), (IMAGE, 1, 0, True), (LAST, 0, 0, False), (IMAGE, 0, 2, False),
            (IMAGE, 2, 0, False),
        )
    ),
    "grid_sampler_3d": tuple(
        c(VOLUME, t(2, 3, 2, 5, 3, low=-1.3, high=1.3), mode, padding, corners)
        for mode, padding, corners in ((0, 0, False), (0, 1, True), (1, 0, True), (0, 2, False))
    ),
    "pixel_shuffle": (c(IMAGE, 2),),
    "pixel_unshuffle": (c(IMAGE, 2), c(t(3, 6, 9), 3)),
    "nll_loss": tuple(
        c(X, given(0, 3, -100, dtype=I64), w, red, -100) for w in (None, t(4, low=0.5, high=1)) for red in (0, 1, 2)
    ),
    "nll_loss2d": tuple(c(t(2, 4, 3, 2), LABELS, w, red, -100) for w in (None, t(4, low=0.5, high=1)) for red in (0, 1, 2)),
    "huber_loss": tuple(c(X, Y, red, 0.5) for red in (0, 1, 2)),
    "soft_margin_loss": tuple(c(X, Y, red) for red in (0, 1, 2)),
    "mse_loss": tuple(c(X, Y, red) for red in (0, 1, 2)),
    "smooth_l1_loss": tuple(c(X, Y, red, 0.5) for red in (0, 1, 2)),
    "bce_with_logits": (
        c(X, t(3, 4, low=0, high=1)),
        c(X, t(3, 4, low=0, high=1), V, t(4, low=0.5, high=2), 0),
    ),
    **OPENED,
    # quantized
    "quantize": (c(t(3, 4, dtype=F32), 0.05, 3, 0, 255, U8), c(t(3, 4, dtype=F32), 0.01, 0, -128, 127, I8)),
    "quantize_tensor": (c(t(3, 4, dtype=F32), given(0.05), given(3, dtype=I64), 0, 255, U8),),
    "quantize_per_channel": (c(t(3, 4, dtype=F32), SCALES, T((3,), I64, 0, 3), 0, -128, 127, I8),),
    "dequantize": (
        c(T((3, 4), U8, 0, 255), 0.05, 3, 0, 255, U8),
        c(T((3, 4), I8), 0.1, 0, -128, 127, I8, out_dtype=BF16),
    ),
    "dequantize_tensor": (c(T((3, 4), U8, 0, 255), given(0.05, dtype=F32), given(3, dtype=I64), 0, 255, U8),),
    "dequantize_per_channel": (c(T((3, 4), I8, -128, 128), SCALES, T((3,), I64, 0, 3), 0, -128, 127, I8),),
    "choose_qparams": (c(t(3, 4, dtype=F32), 0, 255, 1e-5, U8),),
    "choose_qparams_per_token": (c(t(2, 3, 4, dtype=F32), I8),),
    "choose_qparams_per_token_asymmetric": (c(t(2, 3, 4, dtype=F32), I8),),
    "quantize_per_token": (
        c(t(3, 4, dtype=F32), t(3, 1, low=0.01, high=0.1, dtype=F32), t(3, 1, low=0, high=0, dtype=F32), -128, 127, I8),
        c(t(3, 4, dtype=F32), t(3, 1, low=0.01, high=0.1, dtype=F64), T((3, 1), I64, 0, 3), -128, 127, I8),
    ),
    "dequantize_per_token": (
        c(
            T((3, 4), I8, -128, 128),
            t(3, 1, low=0.01, high=0.1, dtype=F32),
            t(3, 1, low=0, high=0, dtype=F32),
            -128,
            127,
            I8,
            F32,
        ),
        c(T((3, 4), I8, -128, 128), t(3, 1, low=0.01, high=0.1, dtype=F64), T((3, 1), I64, 0, 3), -128, 127, I8, F32),
    ),
    "q_linear": tuple(
        saved(
            q_linear,
            T((3, 16), U8, 0, 255),
            T((8, 16), I8, -128, 128),
            0.02,
            100,
            t(8, low=0.01, high=0.1, dtype=F32),
            T((8,), torch.int32, 0, 0, values=[0] * 8),
            t(8, dtype=F32),
            *out,
        )
        for out in Q_OUTPUTS
    ),
    "q_linear_tensor": (
        saved(
            q_linear,
            T((3, 16), U8, 0, 255),
            T((8, 16), I8, -128, 128),
            given(0.02, dtype=F32),
            given(100, dtype=torch.int32),
            t(8, low=0.01, high=0.1, dtype=F32),
            T((8,), torch.int32, values=[0] * 8),
            None,
            1.0,
            0,
            F32,
            "none",
            [],
            "",
        ),
    ),
    "q_conv": (
        saved(
            q_conv,
            T((2, 4, 6, 6), U8, 0, 255),
            T((8, 4, 3, 3), I8, -128, 128),
            t(8, low=0.01, high=0.1, dtype=F32),
            T((8,), torch.int32, values=[0] * 8),
            t(8, dtype=F32),
            [1, 1],
            [1, 1],
            [1, 1],
            1,
            1.0,
            0,
            F32,
            "none",
            [],
            "",
        ),
    ),
    "int_mm": (c(T((32, 16), I8, -128, 128), T((16, 8), I8, -128, 128)),),
    # backward
    **{name: (c(X, Y),) for name in _GRADIENTS.split()},
    "threshold_backward": (c(X, Y, 0),),
    "hardtanh_backward": (c(X, Y, -0.5, 0.5),),
    "leaky_relu_backward": (c(X, Y, 0.1, False),),
    "prelu_backward": (c(X, Y, t(1, 4)), c(t(8), SPECIAL, t(8))),
    "log_sigmoid_backward": (saved(log_sigmoid, X, Y), saved(log_sigmoid, t(8), SPECIAL)),
    "elu_backward": (c(X, 1.0, 1.0, 1.0, False, Y), c(X, 1.0, 1.0, 1.0, True, UNIT)),
    "softplus_backward": (c(X, Y, 1, 20),),
    "glu_backward": (c(t(3, 2), X, -1),),
    "dropout_backward": (c(X, mask(3, 4), 1.5), c(t(3, 4, dtype=I64), mask(3, 4), 1.5)),
    "softmax_backward": (c(X, t(3, 4, low=0, high=1), -1, DTYPE),),
    "log_softmax_backward": (c(X, t(3, 4, low=-3, high=0), -1, DTYPE),),
    "layer_norm_backward": (
        c(X, Y, [4], t(3, 1), t(3, 1, low=0.5, high=2), V, t(4), [True, True, True]),
        c(X, Y, [4], t(3, 1), t(3, 1, low=0.5, high=2), None, None, [True, False, False]),
    ),
    "rms_norm_backward": (c(X, Y, [4], t(3, 1, low=0.5, high=2), V, [True, True]),),
    "group_norm_backward": (saved(group_norm, IMAGE, IMAGE, t(4)),),
    "batch_norm_backward": (
        *(saved(batch_norm(train), IMAGE, IMAGE, t(4), t(4), t(4, low=0.5, high=2)) for train in (True, False)),
        saved(batch_norm(True), IMAGE, IMAGE, t(4), None, None),
        saved(batch_norm(True), IMAGE, IMAGE, None, None, None),
    ),
    "conv_backward": (
        c(
            t(2, 8, 3, 3),
            IMAGE,
            t(8, 4, 3, 3),
            [8],
            [2, 2],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            1,
            [True, True, True],
        ),
        c(
            t(2, 8, 6, 6),
            IMAGE,
            t(8, 2, 3, 3),
            None,
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            2,
            [False, True, False],
        ),
    ),
    "embedding_backward": (
        c(t(2, 3, 4), index(2, 3, size=7), 7, -1, False),
        c(t(5, 4), index(5, size=3), 7, 1, True),
    ),
    "sdpa_backward": tuple(saved(attention, t(2, 4, 5, 8), *HEADS, causal) for causal in (False, True)),
    "nll_loss_backward": (c(t(), X, given(0, 3, -100, dtype=I64), None, 1, -100, T((), values=[2.0])),),
    "nll_loss2d_backward": (
        saved(nll_loss2d, t(), t(2, 4, 3, 2), LABELS, t(4, low=0.5, high=1), 1, -100),
        saved(nll_loss2d, t(2, 3, 2), t(2, 4, 3, 2), LABELS, None, 0, -100),
    ),
    "huber_loss_backward": (c(t(), X, Y, 1, 0.5), c(X, X, Y, 0, 1.0)),
    "soft_margin_loss_backward": (c(t(), X, Y, 1), c(X, X, Y, 0)),
    "mse_loss_backward": (c(t(), X, Y, 1), c(X, X, Y, 0)),
    "smooth_l1_loss_backward": (c(t(), X, Y, 1, 0.5),),
    "weight_norm_backward": (saved(weight_norm, t(3, 4, 5), t(3, 4, 5), t(3, 1, 1, low=0.5, high=2), 0),),
    "max_pool2d_backward": (
        saved(max_pool, t(2, 4, 3, 3), IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], False),
        saved(max_pool, t(2, 4, 3, 3), IMAGE, [2, 2], [2, 3], [1, 1], [3, 1], True),
    ),
    "max_pool3d_backward": (
        saved(max_pool, t(2, 3, 2, 3, 3), VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False),
        saved(max_pool, t(2, 3, 3, 3, 4), VOLUME, [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], False),
    ),
    "avg_pool3d_backward": (
        c(t(2, 3, 2, 3, 3), VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
        c(t(2, 3, 3, 3, 4), VOLUME, [3, 3, 3], [2, 2, 2], [1, 1, 1], False, False, None),
    ),
    "avg_pool2d_backward": (
        c(t(2, 4, 3, 3), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None),
        c(t(2, 4, 4, 4, channels_last=True), LAST, [3, 3], [2, 2], [1, 1], True, False, None),
        c(t(2, 4, 4, 4), IMAGE, [3, 3], [2, 2], [1, 1], True, True, None),
        c(t(2, 4, 3, 7), IMAGE, [3, 2], [2, 1], [1, 1], False, True, 5),
    ),
    "adaptive_avg_pool2d_backward": (c(t(2, 4, 2, 3), LAST), c(t(2, 4, 4, 3), IMAGE), c(t(2, 3, 3, 4), t(2, 3, 1, 1))),
    "adaptive_avg_pool3d_backward": (c(t(2, 3, 5, 3, 1), VOLUME), c(t(2, 3, 2, 4, 8), VOLUME)),
    "adaptive_max_pool2d_backward": (
        saved(adaptive_max_pool, t(2, 4, 1, 1), IMAGE), saved(adaptive_max_pool, t(2, 4, 4, 5), LAST),
    ),
    "adaptive_max_pool3d_backward": (
        saved(adaptive_max_pool, t(2, 3, 1, 1, 1), VOLUME), saved(adaptive_max_pool, t(2, 3, 2, 4, 8), VOLUME),
    ),
    "upsample_nearest1d_backward": (c(t(2, 4, 12), [12], [2, 4, 6], None), c(t(2, 4, 9), [9], [2, 4, 6], None)),
    "upsample_nearest3d_backward": (c(t(2, 3, 10, 12, 21), [10, 12, 21], [2, 3, 5, 6, 7], None, None, None),),
    "upsample_nearest2d_backward": (c(t(2, 4, 12, 12), [12, 12], [2, 4, 6, 6], None, None),),
    "upsample_bilinear2d_backward": (c(t(2, 4, 12, 12), [12, 12], [2, 4, 6, 6], False, None, None),),
    "upsample_bicubic2d_backward": (c(t(2, 4, 12, 12), [12, 12], [2, 4, 6, 6], False, None, None),),
    **{
        f"{kind}_pad{n}d_backward": tuple(c(t(*grown(x.shape, PADS[n])), x, PADS[n]) for x in PADDED[n])
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    "replication_pad2d_backward": (
        c(t(2, 4, 7, 9), IMAGE, [1, 2, 0, 1]),
        c(t(2, 4, 26, 26), IMAGE, [10, 10, 10, 10]),
    ),
    "select_backward": (c(V, [3, 4], 0, 1),),
    "slice_backward": (c(t(3, 2), [3, 4], 1, 0, 4, 2),),
    "unfold_backward": (c(t(3, 3, 2), [3, 4], 1, 2, 1),),
}

_EVERY = """
    add mul eq ne lt le gt ge eq_scalar ne_scalar where masked_fill masked_fill_tensor cast clone
    copy maximum minimum any all cat stack gather index index_select view reshape expand permute
    transpose t squeeze unsqueeze slice select split split_with_sizes unbind diagonal unfold
    as_strided alias constant_pad_nd roll flip repeat tril triu embedding logical_not logical_and
    logical_or logical_xor sum full_like fill new_full empty_like new_empty new_empty_strided
    diag_embed diagonal_copy diagonal_backward rot90
    scatter scatter_value scatter_add index_put index_copy slice_scatter select_scatter
    diagonal_scatter as_strided_scatter masked_scatter div exp sin sqrt tanh sigmoid erf amax amin
    cumsum
"""
_NUMBERS = """
    lt_scalar le_scalar gt_scalar ge_scalar fmod_scalar remainder_scalar copysign_scalar abs sub
    rsub neg sign sgn div_rounded fmod remainder copysign pow_scalar scalar_pow pow clamp
    clamp_tensor relu ceil floor trunc round isnan isinf signbit cumprod linear_scan cummax sort topk prod
    prod_all max_with_indices min_with_indices addcmul mm bmm addmm baddbmm dot mv scatter_reduce
    isposinf isneginf nan_to_num cross aminmax xlogy
    index_add index_reduce index_fill fill_tensor matmul fmax fmin bucketize exp2 expm1 log log2 rsqrt reciprocal
    atan2
"""
_QUANTIZED = """
    quantize quantize_tensor quantize_per_channel dequantize dequantize_tensor
    dequantize_per_channel choose_qparams quantize_per_token dequantize_per_token
    choose_qparams_per_token choose_qparams_per_token_asymmetric
"""
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys((*_QUANTIZED.split(), "q_linear", "q_linear_tensor", "q_conv", "int_mm"), ANY),
    **dict.fromkeys(("avg_pool3d", "avg_pool3d_backward"), (F32, F64)),  # eager has no other on a CPU
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), (F32, F64)),  # eager's places are rounded to half types on a CPU
    "hardsigmoid_backward": (F32, BF16),  # eager's 1/6 is an fp32 constant, in fp64 too
    **dict.fromkeys(_EVERY.split(), ALL),
    **dict.fromkeys(_NUMBERS.split(), NUMBERS),
    **dict.fromkeys(
        [f"bitwise_{n}" for n in ("not", "and", "or", "xor", "and_scalar", "or_scalar", "xor_scalar")],
        INTEGERS,
    ),
    **dict.fromkeys([f"bitwise_{d}_shift{s}" for d in ("left", "right") for s in ("", "_scalar")], (I64,)),
}
"""Dtypes under test by row; the floating ones for every other row."""
