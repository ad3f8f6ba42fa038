"""Implement the names of `device` and `libdevice` for Triton's interpreter, which runs kernels on CPU tensors with NumPy.

Pointwise functions are the references of the kernel IR's own op table; reductions work on whole blocks
(the interpreter's own generic reduction takes elements one by one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from fusewright.toolkit.ir.checks import ZERO_DIVISION, word
from fusewright.toolkit.ir.optable import OPS


def to_torch(x: Any) -> torch.Tensor:
    """Return the data of an interpreted value. The interpreter represents bf16 by its bits."""
    data = torch.from_numpy(np.ascontiguousarray(x.handle.data))
    return data.view(torch.bfloat16) if x.dtype == tl.bfloat16 else data


def from_torch(t: torch.Tensor, dtype: tl.dtype, block: bool) -> Any:
    """Return an interpreted value of `dtype`, a block or a number."""
    data = (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if block else dtype)


def _broadcast(args: tuple[Any, ...]) -> tuple[list[torch.Tensor], bool]:
    return [to_torch(a) for a in args], any(a.type.is_block() for a in args)


def _pointwise(ref: Callable[..., torch.Tensor], result: tl.dtype | None = None) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        tensors, block = _broadcast(args)
        return from_torch(ref(*tensors), result or args[-1].dtype, block)

    return run


def _reduce(ref: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Any, int], Any]:
    def run(x: Any, axis: int) -> Any:
        given = to_torch(x)
        return _shaped(ref(given, axis).to(given.dtype), axis, x.dtype)  # torch sums small integers as 64 bits

    return run


def _shaped(out: torch.Tensor, axis: int, dtype: tl.dtype) -> Any:
    """Shape a reduced block: axis 1 stays, a one-dimensional block becomes a number (an array of one element)."""
    return from_torch(out.unsqueeze(1), dtype, True) if axis == 1 else from_torch(out.reshape(1), dtype, False)


def _arg(largest: bool) -> Callable[..., Any]:
    def run(x: Any, position: Any, axis: int) -> Any:
        values, places = to_torch(x), to_torch(position)
        best = values.amax(axis, keepdim=True) if largest else values.amin(axis, keepdim=True)
        same = (values == best) | ((values != values) & (best != best))
        at = torch.where(same, places, torch.iinfo(places.dtype).max).amin(axis)
        return _shaped(best.squeeze(axis), axis, x.dtype), _shaped(at, axis, position.dtype)

    return run


def reduce_m2(mean: Any, m2: Any, count: Any, axis: int) -> Any:
    m, d, n = to_torch(mean), to_torch(m2), to_torch(count)
    total = n.sum(axis, keepdim=True)
    centre = (m * n).sum(axis, keepdim=True) / total.clamp(min=1)
    spread = (d + (m - centre).square() * n).sum(axis, keepdim=True)
    return tuple(_shaped(t.squeeze(axis), axis, mean.dtype) for t in (centre, spread, total))


def online(top: Any, total: Any, x: Any) -> Any:
    t, s, v = to_torch(top), to_torch(total), to_torch(x)
    up = (v > t) | ((v != v) & (t == t))
    e = torch.where(v == t, 0.0, -(v - t).abs()).exp()
    new = torch.where(up, v, t), torch.where(up, s * e + 1, s + e)
    return tuple(from_torch(n, x.dtype, True) for n in new)


def _lanes(x: Any, each: int) -> torch.Tensor:
    return to_torch(x).view(-1, each)


def online_lanes(top: Any, total: Any, x: Any, each: int) -> Any:
    t, s, v = to_torch(top), to_torch(total), _lanes(x, each)
    most = torch.maximum(t, v.amax(1))
    none = most == -torch.inf
    by = torch.where(none, 0.0, most)
    whole = torch.where(none, 1.0, s * (t - by).exp() + (v - by[:, None]).exp().sum(1))
    return tuple(from_torch(n, x.dtype, True) for n in (most, whole))


def welford_lanes(mean: Any, m2: Any, n: Any, x: Any, each: int) -> Any:
    return welford_rest(mean, m2, n, x, None, each)


def welford_rest(mean: Any, m2: Any, n: Any, x: Any, mask: Any, each: int) -> Any:
    m, s, count, v = to_torch(mean), to_torch(m2), to_torch(n), _lanes(x, each)
    counted = torch.ones_like(v, dtype=torch.bool) if mask is None else _lanes(mask, each).bool()
    more = counted.sum(1).to(v.dtype)
    own = v.sum(1) / more.clamp(min=1)
    d = torch.where(counted, v - own[:, None], 0)
    count = count + more
    apart = torch.where(more == 0, 0, own - m)
    new = m + apart * (more / count.clamp(min=1))
    s = s + d.square().sum(1) + apart * torch.where(more == 0, 0, own - new) * more
    return tuple(from_torch(t, x.dtype, True) for t in (new, s, count))


SCANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.cumsum(0, dtype=t.dtype),
    "prod": lambda t: t.cumprod(0, dtype=t.dtype),
    "max": lambda t: t.cummax(0).values,
    "min": lambda t: t.cummin(0).values,
}


def scan_lanes(x: Any, carry: Any, how: str, each: int) -> Any:
    given, before = to_torch(x), to_torch(carry)
    out = SCANS[how](torch.cat((before[:1], given)))[1:]
    return from_torch(out, x.dtype, True), from_torch(out[-1:].expand_as(before).contiguous(), x.dtype, True)


def guarded(top: Any, total: Any) -> Any:
    (t, s), block = _broadcast((top, total))
    whole = torch.where(t == torch.inf, t, s)
    return from_torch(torch.where(t == -torch.inf, 0.0, whole), total.dtype, block)


def reduce_online(top: Any, total: Any, axis: int, last: bool) -> Any:
    t, s = to_torch(top), to_torch(total)
    most = t.amax(axis, keepdim=True)
    whole = (s * torch.where(t == most, 0.0, t - most).exp()).sum(axis, keepdim=True)
    if last:
        whole = torch.where(most.isinf() & (whole != 0), torch.nan, whole)
    return tuple(_shaped(x.squeeze(axis), axis, top.dtype) for x in (most, whole))


def _scan(ref: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Any, int], Any]:
    return lambda x, axis: from_torch(ref(to_torch(x), axis), x.dtype, True)


def report(error_ptr: Any, bad: Any, code: int, site: int = ZERO_DIVISION, index: Any = 0) -> None:
    """Write the error word of CPU kernels (see `kernel.checks`), unless an earlier check has already failed."""
    where = to_torch(bad)
    if not bool(where.any()):
        return
    before = int(to_torch(tl.load(error_ptr))) & 0xFF
    if not before or site < before:
        given = torch.as_tensor(to_torch(index) if isinstance(index, tl.tensor) else index).expand(where.shape)
        tl.store(error_ptr, word(site, int(given[where][0])) if site != ZERO_DIVISION else ZERO_DIVISION)


def floor_index(a: Any, b: Any) -> Any:
    return a // b - ((a % b) < 0).to(tl.int32)


def _compare(ref: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return _pointwise(ref, tl.int1)


def _sums(*args: Any) -> tuple[Any, ...]:
    return tuple(Device.reduce_sum(x, args[-1]) for x in args[:-1])


class Device:
    """Stands for `fw` in interpreted kernels."""

    maximum = staticmethod(_pointwise(torch.maximum))
    minimum = staticmethod(_pointwise(torch.minimum))
    sign = staticmethod(_pointwise(torch.sign))
    signbit = staticmethod(_compare(torch.signbit))
    reciprocal = staticmethod(_pointwise(torch.reciprocal))
    divide = staticmethod(_pointwise(torch.div))
    divide_by = staticmethod(_pointwise(lambda a, b, inverse: a / b))
    sigmoid = staticmethod(_pointwise(torch.sigmoid))
    remainder = staticmethod(_pointwise(torch.remainder))
    floordiv = staticmethod(_pointwise(OPS["floordiv"].ref))
    int_floordiv = staticmethod(_pointwise(OPS["floordiv"].ref))
    int_remainder = staticmethod(_pointwise(torch.remainder))
    int_pow = staticmethod(_pointwise(torch.pow))
    shl = staticmethod(_pointwise(torch.bitwise_left_shift))
    shr = staticmethod(_pointwise(torch.bitwise_right_shift))
    reduce_sum = staticmethod(_reduce(lambda t, a: t.sum(a, dtype=t.dtype)))
    reduce_sum2 = staticmethod(_sums)
    reduce_sum3 = staticmethod(_sums)
    reduce_prod = staticmethod(_reduce(lambda t, a: t.prod(a, dtype=t.dtype)))
    reduce_any = staticmethod(_reduce(lambda t, a: t.any(a)))
    reduce_all = staticmethod(_reduce(lambda t, a: t.all(a)))
    reduce_max = staticmethod(_reduce(lambda t, a: t.amax(a)))
    reduce_min = staticmethod(_reduce(lambda t, a: t.amin(a)))
    reduce_argmax = staticmethod(_arg(True))
    reduce_argmin = staticmethod(_arg(False))
    reduce_m2 = staticmethod(reduce_m2)
    beats_max = staticmethod(_compare(lambda b, a: (b > a) | ((b != b) & (a == a))))
    beats_min = staticmethod(_compare(lambda b, a: (b < a) | ((b != b) & (a == a))))
    online = staticmethod(online)
    online_lanes = staticmethod(online_lanes)
    welford_lanes = staticmethod(welford_lanes)
    welford_rest = staticmethod(welford_rest)
    scan_lanes = staticmethod(scan_lanes)
    guarded = staticmethod(guarded)
    lanes_sum = staticmethod(lambda x, each: from_torch(_lanes(x, each).sum(1), x.dtype, True))
    reduce_online = staticmethod(reduce_online)
    scan_sum = staticmethod(_scan(lambda t, a: t.cumsum(a, dtype=t.dtype)))
    scan_prod = staticmethod(_scan(lambda t, a: t.cumprod(a, dtype=t.dtype)))
    scan_max = staticmethod(_scan(lambda t, a: t.cummax(a).values))
    scan_min = staticmethod(_scan(lambda t, a: t.cummin(a).values))
    report = staticmethod(report)
    floor_index = staticmethod(floor_index)


class Libdevice:
    """Stands for `libdevice` in interpreted kernels: torch's functions under the libraries' names."""

    nearbyint = staticmethod(_pointwise(torch.round))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _pointwise(OPS[name].ref)
