"""Rules of pooling: windows are unrolled, so that adjacent elements are vectorized."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusewright.interface import OpView
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.lower.movement import out_type
from fusewright.toolkit.rules.kinds import Evaluator, Map, Table
from fusewright.toolkit.rules.space import At, shape_of

MAX_WINDOW = 25
"""Largest window that is unrolled, in elements."""
MAX_WINDOWS = 4
"""The most windows of an element whose gradients are gathered."""


def _two(value: Any) -> tuple[int, int]:
    """A parameter for height and width."""
    found = tuple(value) if isinstance(value, Sequence) else (value,)
    return (found[0], found[-1])


def _window(op: OpView) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(size, stride, padding)."""
    size = _two(op.arg("kernel_size"))
    return size, _two(op.arg("stride") or size), _two(op.arg("padding"))


def _inside(e: Evaluator, at: Index, lowest: int, highest: int, size: int) -> Val | None:
    """Whether a position in the range lowest..highest is inside the tensor; None: always."""
    tests = []
    if lowest < 0:
        tests.append(e.position(at) >= 0)
    if highest >= size:
        tests.append(e.position(at) < size)
    return e.b.op("and", *tests) if len(tests) == 2 else tests[0] if tests else None


@dataclass
class _Windows:
    """Windows of an image: the origin of one, and its elements in memory order."""

    e: Evaluator
    op: OpView
    at: At

    def __post_init__(self) -> None:
        self.shape = shape_of(self.op.arg("self").spec)
        self.size, self.stride, self.padding = _window(self.op)
        self.top, self.left = (
            self.at.dims[d] * s - p for d, s, p in zip((-2, -1), self.stride, self.padding, strict=True)
        )
        self.limits = int(self.shape[-2]), int(self.shape[-1])  # type: ignore[arg-type]

    def elements(self) -> Iterator[tuple[int, int, Val, Val | None]]:
        """(row, column, element, whether it is inside; None: always)."""
        e, x, t = self.e, self.op.arg("self"), out_type(self.op)
        (sh, sw), (ph, pw) = self.stride, self.padding
        rows, columns = (int(s) for s in self.at.shape[-2:])  # type: ignore[arg-type]
        for i in range(self.size[0]):
            above = _inside(e, self.top + i, i - ph, (rows - 1) * sh + i - ph, self.limits[0])
            for j in range(self.size[1]):
                beside = _inside(e, self.left + j, j - pw, (columns - 1) * sw + j - pw, self.limits[1])
                here = above if beside is None else beside if above is None else e.b.op("and", above, beside)
                source = At(self.shape, (*self.at.dims[:-2], self.top + i, self.left + j))
                if here is None:
                    v = e(x, source, t)
                else:
                    with e.masked(here):
                        v = e(x, source, t)
                yield i, j, v, here


def _max_pool(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """As in eager: in memory order, a NaN or an element larger than all before replaces the maximum."""
    w = _Windows(e, op, at)
    width = w.limits[1]
    best, place = e.const(-math.inf, out_type(op)), _first(e, w.top, w.left, width)
    for i, j, v, here in w.elements():
        better = e.b.op("or", v > best, e.b.op("isnan", v))
        better = better if here is None else e.b.op("and", better, here)
        best = e.b.where(better, v, best)
        place = e.b.where(better, e.const(i * width + j, "i32"), place)
    if not k:
        return best
    corner = e.b.cast(e.position(w.top * width + w.left), "i32")
    return e.b.cast(e.b.op("add", corner, place), "i64")


def _first(e: Evaluator, top: Index, left: Index, width: int) -> Val:
    """The position in the window of its first element, which is the result if all are -inf."""
    zero = e.const(0, "i64")
    down, right = (e.b.op("maximum", e.b.op("neg", e.position(p)), zero) for p in (top, left))
    return e.b.cast(e.b.op("add", down * width, right), "i32")


def _max_pool_backward(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """The sum of the gradients of the windows whose maximum is this element, so that nothing is scattered."""
    grad, indices = op.arg("grad_output"), op.arg("indices")
    shape, t = shape_of(grad.spec), out_type(op)
    here = e.b.cast(e.position(at.dims[-2] * at.shape[-1] + at.dims[-1]), "i32")
    total = e.const(0, t)
    for row, above in _windows_over(e, op, at, 0):
        for column, beside in _windows_over(e, op, at, 1):
            inside = above if beside is None else beside if above is None else e.b.op("and", above, beside)
            window = At(shape, (*at.dims[:-2], row, column))
            with contextlib.nullcontext() if inside is None else e.masked(inside):
                found, value = e.b.cast(e(indices, window, "i64"), "i32").eq(here), e(grad, window, t)
            found = found if inside is None else e.b.op("and", found, inside)
            total = total + e.b.where(found, value, e.const(0, t))
    return total


def _windows_over(e: Evaluator, op: OpView, at: At, d: int) -> Iterator[tuple[Index, Val | None]]:
    """The windows that may hold an element, along one dimension, and whether they do; None: always."""
    size, stride, padding = (x[d] for x in _window(op))
    place, made = at.dims[d - 2] + padding, int(shape_of(op.arg("grad_output").spec)[d - 2])  # type: ignore[arg-type]
    last = int(at.shape[d - 2]) - 1 + padding  # type: ignore[arg-type]
    for i in range(-(-size // stride)):
        there = _inside(e, place // stride - i, padding // stride - i, last // stride - i, made)
        if (i + 1) * stride > size:  # the window may end before the element
            reaches = e.position(place % stride) < size - i * stride
            there = reaches if there is None else e.b.op("and", there, reaches)
        yield place // stride - i, there


def _avg_pool(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """The sum of a window divided by its size, or by the size of the part inside."""
    w, t = _Windows(e, op, at), out_type(op)
    total = e.const(0, t)
    for _, _, v, here in w.elements():
        total = total + (v if here is None else e.b.where(here, v, e.const(0, t)))
    if op.arg("divisor_override") or op.arg("count_include_pad") or not any(w.padding):
        return total / (op.arg("divisor_override") or math.prod(w.size))
    down, across = (
        _extent(e, first, n, limit) for first, n, limit in zip((w.top, w.left), w.size, w.limits, strict=True)
    )
    return total / e.b.cast(down * across, t)


def _extent(e: Evaluator, first: Index, size: int, limit: int) -> Val:
    """The length of a window's side that is inside."""
    start = e.b.op("maximum", e.position(first), e.const(0, "i64"))
    end = e.b.op("minimum", e.position(first + size), e.const(limit, "i64"))
    return end - start


def _plain(op: OpView) -> str | None:
    spec = op.arg("self").spec
    if not spec.static or not spec.dtype.is_floating_point:
        return "a symbolic size, or integers"
    dilated = op.op.startswith("max_pool2d") and _two(op.arg("dilation")) != (1, 1)
    if dilated or op.arg("ceil_mode"):
        return "a dilated window, or one that ends outside"
    return "a large window" if math.prod(_window(op)[0]) > MAX_WINDOW else None


def _few_windows(op: OpView) -> str | None:
    size, stride, _ = _window(op)
    many = math.prod(-(-z // s) for z, s in zip(size, stride, strict=True)) > MAX_WINDOWS
    dense = op.arg("grad_output").spec.static and not many
    return _plain(op) if dense else "a symbolic size, or elements in many windows"


TABLE: Table = {
    "max_pool2d": (Map(_max_pool, _plain, cost=60),),
    "max_pool2d_backward": (Map(_max_pool_backward, _few_windows, cost=100),),
    "avg_pool2d": (Map(_avg_pool, _plain, cost=60),),
}
