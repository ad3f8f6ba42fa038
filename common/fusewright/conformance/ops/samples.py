"""How a sample call of an op is described: tensors by `T`, calls by `Case`. The samples are in `cases`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten
F64, F32, BF16, I64, BOOL = torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool
U8, I8 = torch.uint8, torch.int8
FLOATS = (F64, F32, BF16)
NUMBERS = (*FLOATS, I64)
ALL = (*NUMBERS, BOOL)
INTEGERS = (I64, BOOL)
ANY = (F32,)  # for ops whose values depend on no input


class NotFinite(Exception):
    """The dtype under test cannot represent the values of a sample."""


@dataclass(frozen=True)
class T:
    """A tensor to create. `dtype` None means the dtype under test; `low`, `high`: range of uniform values."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    low: float | None = None
    high: float | None = None
    values: Sequence[Any] | None = None
    channels_last: bool = False

    def make(self, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
        d = self.dtype or dtype
        if self.values is not None:
            if not d.is_floating_point and any(v in (math.inf, -math.inf) or v != v for v in self.values):
                raise NotFinite
            return torch.tensor(self.values, dtype=d).reshape(self.shape)
        if d == torch.bool:
            return torch.rand(self.shape, generator=g) > 0.5
        if not d.is_floating_point and not d.is_complex:
            low, high = (-5, 6) if self.low is None else (int(self.low), int(self.high or 6))
            return torch.randint(low, max(high, low + 1), self.shape, generator=g).to(d)
        if self.low is not None and self.high is not None:
            x = torch.rand(self.shape, generator=g, dtype=F64) * (self.high - self.low) + self.low
        else:
            x = torch.randn(self.shape, generator=g, dtype=F64)
        x = x.to(d)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x


def t(*shape: int, low: float | None = None, high: float | None = None, **kw: Any) -> T:
    return T(shape, low=low, high=high, **kw)


def index(*shape: int, size: int) -> T:
    """Indices below `size`."""
    return T(shape, I64, 0, size)


def grown(shape: Sequence[int], pads: Sequence[int]) -> tuple[int, ...]:
    """The shape after a padding by amounts in front and behind, of the last dimension first."""
    pairs = [sum(pads[k : k + 2]) for k in range(0, len(pads), 2)]
    return tuple(n + more for n, more in zip(shape, (*[0] * (len(shape) - len(pairs)), *reversed(pairs)), strict=True))


def mask(*shape: int) -> T:
    return T(shape, BOOL)


def given(*values: Any, dtype: torch.dtype | None = None) -> T:
    return T((len(values),), dtype, values=values)


DTYPE = object()
"""Placeholder for the dtype under test among the arguments of a call."""


@dataclass(frozen=True)
class Case:
    """One call. `finish` converts the created arguments into the final ones, e.g. what a forward saved."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    finish: Callable[..., list[Any]] | None = None

    def make(self, dtype: torch.dtype, seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
        g = torch.Generator().manual_seed(seed)
        args, kwargs = (
            [_made(a, dtype, g) for a in self.args],
            {k: _made(v, dtype, g) for k, v in self.kwargs.items()},
        )
        return (args if self.finish is None else self.finish(*args)), kwargs


def _made(x: Any, dtype: torch.dtype, g: torch.Generator) -> Any:
    if isinstance(x, T):
        return x.make(dtype, g)
    if x is DTYPE:
        return dtype
    return [_made(y, dtype, g) for y in x] if isinstance(x, list) else x


def c(*args: Any, **kwargs: Any) -> Case:
    return Case(args, kwargs)


def saved(finish: Callable[..., list[Any]], *args: Any) -> Case:
    return Case(args, {}, finish)


def group_norm(grad: Any, x: Any, w: Any) -> list[Any]:
    _, mean, rstd = aten.native_group_norm(x, w, None, 2, 4, 36, 2, 1e-5)
    return [grad, x, mean, rstd, w, 2, 4, 36, 2, [True, True, True]]


def batch_norm(train: bool) -> Callable[..., list[Any]]:
    def finish(grad: Any, x: Any, w: Any, mean: Any, var: Any) -> list[Any]:
        _, m, r, *_ = aten.native_batch_norm(x, w, None, mean, var, train, 0.1, 1e-5)
        return [grad, x, w, mean, var, m, r, train, 1e-5, [True, True, True]]

    return finish


def attention(grad: Any, q: Any, k: Any, v: Any, causal: bool) -> list[Any]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return [grad, q, k, v, out, lse, 0.0, causal]


def weight_norm(grad: Any, v: Any, g: Any, dim: int) -> list[Any]:
    return [grad, v, g, aten._weight_norm_interface(v, g, dim)[1], dim]


@cache
def _saturates() -> bool:
    """Whether sums of oneDNN's int8 calls saturate at 16 bits here, as on CPUs without instructions for sums of bytes
    (https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html)."""
    ops = torch.ops.onednn
    x, w, zero = torch.full((1, 16), 255, dtype=U8), torch.full((8, 16), 127, dtype=I8), torch.zeros(8, dtype=torch.int32)
    packed = ops.qlinear_prepack(w, [1, 16])
    y = ops.qlinear_pointwise(x, 1.0, 0, packed, torch.ones(8), zero, None, 1.0, 0, F32, "none", [], "")
    return bool((y != 16 * 255 * 127).any())


def _exact(w: Any) -> Any:
    """A weight of oneDNN's int8 calls whose sums are exact: of 7 bits where others saturate."""
    return w // 2 if _saturates() else w


def q_linear(qx: Any, w: Any, *rest: Any) -> list[Any]:
    packed = torch.ops.onednn.qlinear_prepack(_exact(w), list(qx.shape))
    return [qx, *rest[:2], packed, *rest[2:]]


def q_conv(qx: Any, w: Any, scales: Any, *rest: Any) -> list[Any]:
    packed = torch.ops.onednn.qconv_prepack(_exact(w), scales, 0.02, 100, [1, 1], [1, 1], [1, 1], 1, list(qx.shape))
    return [qx, 0.02, 100, packed, scales, *rest]


def log_sigmoid(grad: Any, x: Any) -> list[Any]:
    return [grad, x, aten.log_sigmoid_forward(x)[1]]


def nll_loss2d(grad: Any, *given: Any) -> list[Any]:
    return [grad, *given, aten.nll_loss2d_forward(*given)[1]]


def adaptive_max_pool(grad: Any, x: Any) -> list[Any]:
    size = grad.shape[2:]
    return [grad, x, getattr(aten, f"adaptive_max_pool{len(size)}d")(x, size)[1]]


def max_pool(grad: Any, x: Any, *window: Any) -> list[Any]:
    pool = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    return [grad, x, *window, pool(x, *window)[1]]
