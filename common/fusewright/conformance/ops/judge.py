"""Judge a result, given eager's and the exact one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FLOOR = {torch.float64: 64, torch.float32: 16, torch.bfloat16: 1.01, torch.float16: 1.01}
"""Tolerance in addition to twice eager's error, in units in the last place of the largest value."""


def difference(
    got: Tensor, eager: Tensor, exact: Tensor, bits: bool = False, signs: bool = False, relative: bool = False,
    wide: Callable[[], Tensor | None] = lambda: None,
) -> str:  # fmt: skip
    """Why `got` is wrong, or "". Floats may differ by twice eager's error (against `exact`, fp64) plus a few units in the last
    place, of the largest value or, with `relative`, of each; NaN and Inf must be where eager has them, or the exact result, or
    `wide`, eager's fp32 result for half-type numbers. Everything else must be equal; with `bits` floats too, with `signs` also
    the signs of zeros."""
    if (got.dtype, got.shape, strides(got)) != (eager.dtype, eager.shape, strides(eager)):
        return f"{told(got)}, eager has {told(eager)}"
    if got.numel() == 0 or _equal(got, eager):
        return "a zero of the other sign than eager's" if signs and _other_zeros(got, eager) else ""
    if bits or not got.is_floating_point():
        return f"{int((got != eager).sum())} of {got.numel()} elements differ from eager's, which are exact"
    return _odd(got, eager, exact, wide) or (_off_each if relative else _off)(got, eager, exact)


def _other_zeros(got: Tensor, eager: Tensor) -> bool:
    return got.is_floating_point() and bool(((got.signbit() != eager.signbit()) & (eager == 0)).any())


def told(t: Tensor) -> str:
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}"


def strides(t: Tensor) -> Sequence[int]:
    """The strides that matter: those of dimensions with more than one element."""
    return () if t.numel() == 0 else [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]


def _equal(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _odd(got: Tensor, eager: Tensor, exact: Tensor, wide: Callable[[], Tensor | None]) -> str:
    """Check NaN and Inf: `got` must agree with one of the others. Eager's half-type kernels may differ from its fp32 ones: one
    multiplies an infinity by the zeros of a padding, the other skips them."""
    if _follows(got, eager, exact):
        return ""
    other = wide()
    if other is not None and other.shape == got.shape and _follows(got, eager, exact, other.to(got.dtype)):
        return ""
    return "NaN or Inf where eager has none, or the other way round"


def _follows(got: Tensor, *wanted: Tensor) -> bool:
    """Whether every element equals one of the wanted ones where any of these is not finite, and is finite elsewhere."""
    odd = torch.stack([~torch.isfinite(w) for w in wanted]).any(0)
    same = torch.stack([(got.double() == w) | (got.isnan() & w.isnan()) for w in wanted]).any(0)
    return bool(same[odd].all()) and bool(torch.isfinite(got[~odd]).all())


def _off(got: Tensor, eager: Tensor, exact: Tensor) -> str:
    fine = torch.isfinite(exact) & torch.isfinite(eager)
    if not fine.any():
        return ""
    size = max(1.0, float(exact[fine].abs().max()))
    allowed = 2 * (eager.double() - exact)[fine].abs().max() + FLOOR[got.dtype] * torch.finfo(got.dtype).eps * size
    worst = (got.double() - exact)[fine].abs().max()
    return "" if worst <= allowed else f"off by {float(worst):.3g}, allowed is {float(allowed):.3g}"


def _off_each(got: Tensor, eager: Tensor, exact: Tensor) -> str:
    """Like `_off`, relative to each element's own size."""
    fine = torch.isfinite(exact) & torch.isfinite(eager)
    info, size = torch.finfo(got.dtype), exact[fine].abs().clamp(min=torch.finfo(got.dtype).tiny)
    eagers, ours = ((t.double() - exact)[fine].abs() / size for t in (eager, got))
    if not ours.numel():
        return ""
    allowed, worst = 2 * eagers.max() + FLOOR[got.dtype] * info.eps, ours.max()
    return "" if worst <= allowed else f"off by {float(worst):.3g} of a value, allowed is {float(allowed):.3g}"
