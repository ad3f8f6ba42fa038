"""Rules of windows over images: pooling, im2col, and their gradients. Windows are unrolled, so that adjacent elements are
vectorized; a gradient is gathered from the windows that hold an element, so that nothing is scattered."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from fusewright.interface import HOST, OpView, TensorSpec
from fusewright.toolkit.ir import Index, Val
from fusewright.toolkit.lower.cells import Cells
from fusewright.toolkit.lower.movement import out_type
from fusewright.toolkit.rules.kinds import Check, Evaluator, Map, Table
from fusewright.toolkit.rules.space import At, Shape, ShapeMismatch, factor_groups, shape_of

MAX_WINDOW = 27
"""Largest window that is unrolled, in elements."""
MAX_UNEVEN = 16
"""Largest cell of an adaptive pool whose cells differ. 256 planes of 28x28 in 3x3 cells take 0.24 ms by gathers and sums,
eager 0.17, and their gradient 1.19, eager 0.23; 2048 of 7x7 in 3x3 cells 0.07, eager 0.36, and 0.24, eager 0.51 (a Zen 5 virtual
machine, one thread, 2026-11-28)."""
MAX_WINDOWS = 25
"""The most windows of an element that are added up."""
MAX_MAXIMA = 4
"""The most windows of an element that are asked whether it is their maximum: eager adds to one element for each window."""


@dataclass(frozen=True)
class Side:
    """The windows along one dimension of an image. `length` is the image's, `count` the number of windows."""

    size: int
    stride: int
    padding: int
    dilation: int
    length: int
    count: int

    @property
    def overlap(self) -> int:
        """How many windows `holding` looks at."""
        return -(-self.size // self.stride) if self.dilation == 1 else self.size

    def start(self, window: Index) -> Index:
        """The position in the image at which a window starts; negative in the padding."""
        return window * self.stride - self.padding

    def element(self, e: Evaluator, window: Index, i: Index | int) -> tuple[Index, Val | None]:
        """The position of a window's element `i` in the image, and whether it is inside; None: always."""
        place = self.start(window) + i * self.dilation
        first, last = (0, self.size - 1) if isinstance(i, Index) else (i, i)
        highest = (self.count - 1) * self.stride + last * self.dilation - self.padding
        return place, _inside(e, place, first * self.dilation - self.padding, highest, self.length)

    def holding(self, e: Evaluator, place: Index) -> Iterator[tuple[Index, Index, Val | None]]:
        """What may hold an element of the image: the number of the element in a window, the window, and whether it does."""
        place = place + self.padding
        for i in range(self.overlap):
            if self.dilation == 1:  # the window of each `stride` numbers has one that fits
                behind, number = i * self.stride, place % self.stride + i * self.stride
            else:
                behind, number = i * self.dilation, place * 0 + i
            window, lowest = (place - behind) // self.stride, (self.padding - behind) // self.stride
            highest = (self.length - 1 + self.padding - behind) // self.stride
            there, fits = _inside(e, window, lowest, highest, self.count), None
            if self.dilation > 1 and self.stride > 1:
                fits = e.position((place - behind) % self.stride).eq(0)
            elif self.dilation == 1 and (i + 1) * self.stride > self.size:  # the window may end before the element
                fits = e.position(place % self.stride) < self.size - i * self.stride
            yield number, window, _both(e, there, fits)

    def extent(self, e: Evaluator, window: Index, padded: bool) -> Val | int:
        """How many elements of a window lie inside the image; `padded`: or inside its padding."""
        low, high = (-self.padding, self.length + self.padding) if padded else (0, self.length)
        before, behind = -self.padding < low, (self.count - 1) * self.stride - self.padding + self.size > high
        if not (before or behind):
            return self.size
        start, end = e.position(self.start(window)), e.position(self.start(window) + self.size)
        end = e.b.op("minimum", end, e.const(high, "i64")) if behind else end
        return e.b.cast(end - (e.b.op("maximum", start, e.const(low, "i64")) if before else start), "i32")


def _inside(e: Evaluator, at: Index, lowest: int, highest: int, size: int) -> Val | None:
    """Whether a position in the range lowest..highest is inside the tensor; None: always."""
    above = e.position(at) >= 0 if lowest < 0 else None
    return _both(e, above, e.position(at) < size if highest >= size else None)


def _both(e: Evaluator, a: Val | None, b: Val | None) -> Val | None:
    """Whether both hold; None: always."""
    return b if a is None else a if b is None else e.b.op("and", a, b)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """A parameter for each dimension."""
    found = tuple(value) if isinstance(value, Sequence) else (value,)
    return found * dims if len(found) == 1 else found


def _parameters(op: OpView, dims: int) -> tuple[tuple[int, ...], ...]:
    """Size, stride, padding and dilation of a window, each for every dimension."""
    size = op.arg("kernel_size")
    dilation = op.arg("dilation") if "dilation" in op.argnames else 1
    return tuple(_each(x, dims) for x in (size, op.arg("stride") or size, op.arg("padding"), dilation))


def _sides(op: OpView, image: Sequence[Any], made: Sequence[Any]) -> tuple[Side, ...]:
    """The dimensions of an image, whose windows have the sizes `made`."""
    lengths = map(int, image[-len(made) :])
    return tuple(itertools.starmap(Side, zip(*_parameters(op, len(made)), lengths, map(int, made), strict=True)))


def _pooled(op: OpView, made: TensorSpec, dims: int = 2) -> tuple[Side | Cells, ...]:
    """The dimensions of an image that is pooled to `made`."""
    if "adaptive" in op.op:
        lengths = shape_of(op.arg("self").spec)[-dims:]
        return tuple(Cells(int(n), int(m)) for n, m in zip(lengths, shape_of(made)[-dims:], strict=True))  # type: ignore[arg-type]
    return _sides(op, shape_of(op.arg("self").spec), shape_of(made)[-dims:])


def _where(e: Evaluator, inside: Val | None) -> contextlib.AbstractContextManager[None]:
    """Evaluate values only where they are inside; None: everywhere."""
    return contextlib.nullcontext() if inside is None else e.masked(inside)


def _read(e: Evaluator, x: Any, at: At, inside: Val | None, dtype: str, factor: Val | None = None) -> Val:
    """An element, times a factor, or zero where it is not inside."""
    with _where(e, inside):
        v = e(x, at, dtype)
    v = v if factor is None else v * factor
    return v if inside is None else e.b.where(inside, v, e.const(0, dtype))


# ---- pooling ----


def _elements(
    e: Evaluator, sides: Sequence[Side | Cells], windows: Sequence[Index], inside: Val | None = None, *chosen: tuple[int, Index]
) -> Iterator[tuple[tuple[int, ...], tuple[Index, ...], Val | None]]:
    """The elements of a window in memory order: the number along each dimension, the place in the image, whether it is inside."""
    if len(chosen) == len(sides):
        yield tuple(i for i, _ in chosen), tuple(p for _, p in chosen), inside
        return
    side, window = sides[len(chosen)], windows[len(chosen)]
    for i in range(side.size):
        place, there = side.element(e, window, i)
        yield from _elements(e, sides, windows, _both(e, inside, there), *chosen, (i, place))


def _max_pool(dims: int) -> Callable[[Evaluator, OpView, int, At], Val]:
    """As in eager: in memory order, a NaN or an element larger than all before replaces the maximum."""

    def rule(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        sides, windows = _pooled(op, op.out.spec, dims), at.dims[-dims:]  # type: ignore[arg-type]
        image, steps, t = shape_of(op.arg("self").spec), _steps(sides), out_type(op)
        best, place = e.const(-math.inf, t), _first(e, windows, sides)
        for numbers, source, here in _elements(e, sides, windows):
            with _where(e, here):
                v = e(op.arg("self"), At(image, (*at.dims[:-dims], *source)), t)
            better = e.b.op("or", v > best, e.b.op("isnan", v))
            better = better if here is None else e.b.op("and", better, here)
            best = e.b.where(better, v, best)
            offset = sum(i * side.dilation * step for i, side, step in zip(numbers, sides, steps, strict=True))
            place = e.b.where(better, e.const(offset, "i32"), place)
        if not k:
            return best
        starts = [side.start(window) * step for side, window, step in zip(sides, windows, steps, strict=True)]
        corner = e.b.cast(e.position(reduce(operator.add, starts)), "i32")
        return e.b.cast(e.b.op("add", corner, place), "i64")

    return rule


def _steps(sides: Sequence[Side | Cells]) -> list[int]:
    """How far neighbours along each dimension are apart in an image, in elements."""
    return [math.prod(s.length for s in sides[d + 1 :]) for d in range(len(sides))]


def _first(e: Evaluator, windows: Sequence[Index], sides: Sequence[Side | Cells]) -> Val:
    """The position in the window of its first element inside, which is the result if all are -inf."""
    zero, skipped = e.const(0, "i64"), []
    for side, window, step in zip(sides, windows, _steps(sides), strict=True):
        n = e.b.op("maximum", e.b.op("neg", e.position(side.start(window))), zero)
        if side.dilation > 1:
            n = e.b.op("floordiv", n + (side.dilation - 1), e.const(side.dilation, "i64")) * side.dilation
        skipped.append(n if step == 1 else n * step)
    return e.b.cast(reduce(lambda a, b: e.b.op("add", a, b), skipped), "i32")


def _max_pool_backward(dims: int) -> Callable[[Evaluator, OpView, int, At], Val]:
    """The sum of the gradients of the windows whose maximum is this element."""

    def rule(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        grad, indices = op.arg("grad_output"), op.arg("indices")
        t, sides = out_type(op), _pooled(op, grad.spec, dims)
        steps = zip(at.dims[-dims:], _steps(sides), strict=True)
        here = e.b.cast(e.position(reduce(operator.add, (d * step for d, step in steps))), "i32")
        total = e.const(0, t)
        for place, inside in _windows(e, sides, at.dims[-dims:]):
            window = At(shape_of(grad.spec), (*at.dims[:-dims], *place))
            with _where(e, inside):
                found, value = e.b.cast(e(indices, window, "i64"), "i32").eq(here), e(grad, window, t)
            found = found if inside is None else e.b.op("and", found, inside)
            total = total + e.b.where(found, value, e.const(0, t))
        return total

    return rule


def _windows(
    e: Evaluator, sides: Sequence[Side | Cells], places: Sequence[Index], inside: Val | None = None, *chosen: Index
) -> Iterator[tuple[tuple[Index, ...], Val | None]]:
    """The windows that may hold an element of an image, and whether they do; None: always."""
    if len(chosen) == len(sides):
        yield chosen, inside
        return
    for _, window, there in sides[len(chosen)].holding(e, places[len(chosen)]):
        yield from _windows(e, sides, places, _both(e, inside, there), *chosen, window)


def _avg_pool(dims: int) -> Callable[[Evaluator, OpView, int, At], Val]:
    """The sum of a window divided by the number of its elements."""

    def rule(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        sides, t = _pooled(op, op.out.spec, dims), out_type(op)  # type: ignore[arg-type]
        total = e.const(0, t)
        image = shape_of(op.arg("self").spec)
        for _, source, here in _elements(e, sides, at.dims[-dims:]):
            total = total + _read(e, op.arg("self"), At(image, (*at.dims[:-dims], *source)), here, t)
        return total / _divisor(e, op, sides, at.dims[-dims:], t)

    return rule


def _avg_pool_backward(dims: int) -> Callable[[Evaluator, OpView, int, At], Val]:
    """The sum of the gradients of the windows that hold an element, each divided as its window's sum was."""

    def rule(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        grad, t = op.arg("grad_output"), out_type(op)
        sides, total = _pooled(op, grad.spec, dims), e.const(0, t)
        divisor: Val | int = 1
        for place, inside in _windows(e, sides, at.dims[-dims:]):
            window, divisor = At(shape_of(grad.spec), (*at.dims[:-dims], *place)), _divisor(e, op, sides, place, t)
            # the elements of a vector mostly share windows: one division for all, as a reciprocal
            total = total + _read(e, grad, window, inside, t, None if isinstance(divisor, int) else e.const(1, t) / divisor)
        return total / divisor if isinstance(divisor, int) else total

    return rule


def _divisor(e: Evaluator, op: OpView, sides: Sequence[Side | Cells], window: Sequence[Index], dtype: str) -> Val | int:
    """What the sum of a window is divided by; a number if it is the same for all."""
    if "divisor_override" in op.argnames and op.arg("divisor_override"):
        return int(op.arg("divisor_override"))
    known, product = 1, None
    for side, place in zip(sides, window, strict=True):
        n = side.extent(e, place, "count_include_pad" in op.argnames and op.arg("count_include_pad"))
        if isinstance(n, int):
            known *= n
        else:
            product = n if product is None else product * n
    if product is None:
        return known
    return e.b.cast(product if known == 1 else product * known, dtype)


# ---- images as columns ----


def _im2col(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """An element of a window; zero in the padding."""
    image = shape_of(op.arg("self").spec)
    down, across = sides = _columns(op, op.arg("self").spec)
    *lead, i, j, row, column = at.reshape(_spread(image, *sides)).dims
    (y, above), (x, beside) = down.element(e, row, i), across.element(e, column, j)
    return _read(e, op.arg("self"), At(image, (*lead, y, x)), _both(e, above, beside), out_type(op))


def _col2im(e: Evaluator, op: OpView, k: int, at: At) -> Val:
    """The sum of a pixel in the windows that hold it."""
    down, across = sides = _columns(op, op.out.spec)  # type: ignore[arg-type]
    cols, t = op.arg("self"), out_type(op)
    spread, total = _spread(at.shape, *sides), e.const(0, t)
    for i, row, above in down.holding(e, at.dims[-2]):
        for j, column, beside in across.holding(e, at.dims[-1]):
            window = At(spread, (*at.dims[:-2], i, j, row, column)).reshape(shape_of(cols.spec))
            total = total + _read(e, cols, window, _both(e, above, beside), t)
    return total


def _columns(op: OpView, image: TensorSpec) -> tuple[Side, ...]:
    """The dimensions of an image whose windows are columns."""
    made = [
        (n + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        for n, size, stride, padding, dilation in zip(map(int, shape_of(image)[-2:]), *_parameters(op, 2), strict=True)  # type: ignore[arg-type]
    ]
    return _sides(op, shape_of(image), made)


def _spread(image: Shape, down: Side, across: Side) -> Shape:
    """The shape of columns with a dimension for each of a window's and each of the windows'."""
    return (*image[:-2], down.size, across.size, down.count, across.count)


# ---- what is left to eager ----


def _floating(op: OpView, dims: int, *specs: TensorSpec | None) -> str | None:
    """Images of known height and width, and of real numbers; other sizes may be symbols."""
    fixed = all(isinstance(n, int) for s in specs if s is not None for n in s.shape[-dims:])
    fixed = fixed and all(isinstance(n, int) for x in _parameters(op, dims) for n in x)
    if not fixed:
        return "a symbolic height or width"
    return None if op.out.spec is not None and op.out.spec.dtype.is_floating_point else "integers"


def _small(dims: int) -> Check:
    def check(op: OpView) -> str | None:
        large = math.prod(_parameters(op, dims)[0]) > MAX_WINDOW
        return _floating(op, dims, op.arg("self").spec, op.out.spec) or ("a large window" if large else None)

    return check


def _of_volumes(check: Check) -> Check:
    """Refuse what eager's average pools of volumes do not take."""

    def refusing(op: OpView) -> str | None:
        spec = op.out.spec
        half = spec is not None and spec.device == HOST and spec.dtype in (torch.bfloat16, torch.float16)
        return "eager refuses half types on the host" if half else check(op)

    return refusing


def _few(most: int, dims: int = 2) -> Check:
    def check(op: OpView) -> str | None:
        image, grad = op.arg("self").spec, op.arg("grad_output").spec
        return _floating(op, dims, image, grad) or _overlapping(_pooled(op, grad, dims), most)

    return check


def _cells(dims: int, most: float = MAX_WINDOW) -> Check:
    """Cells of known sizes and of at most so many elements, fewer if cells differ."""

    def check(op: OpView) -> str | None:
        made = op.arg("grad_output").spec if "grad_output" in op.argnames else op.outs[0].spec
        if (why := _known_cells(op, dims, made)) is not None:
            return why
        cells = _pooled(op, made, dims)  # type: ignore[arg-type]
        limit = most if all(c.length % c.count == 0 for c in cells) else MAX_UNEVEN
        return "a large cell" if math.prod(c.size for c in cells) > limit else _overlapping(cells, MAX_WINDOWS)

    return check


def _known_cells(op: OpView, dims: int, made: TensorSpec | None) -> str | None:
    image = op.arg("self").spec
    if made is None or not all(isinstance(n, int) for s in (image, made) for n in s.shape[-dims:]):
        return "a symbolic height or width"
    return None if image.dtype.is_floating_point else "integers"


def _overlapping(sides: Sequence[Side | Cells], most: int) -> str | None:
    return "elements in many windows" if math.prod(s.overlap for s in sides) > most else None


def _known_image(op: OpView) -> str | None:
    fixed = all(isinstance(n, int) for n in op.arg("self").spec.shape[-2:])
    return None if fixed else "a symbolic height or width"


def _few_columns(op: OpView) -> str | None:
    why = _floating(op, 2, op.out.spec)
    if why is not None or op.out.spec is None:
        return why
    sides = _columns(op, op.out.spec)
    try:
        factor_groups(_spread(shape_of(op.out.spec), *sides), shape_of(op.arg("self").spec))
    except ShapeMismatch:
        return "sizes that are not known to fit together"
    return _overlapping(sides, MAX_WINDOWS)


TABLE: Table = {
    "max_pool2d": (Map(_max_pool(2), _small(2), cost=60, window=True),),
    "max_pool3d": (Map(_max_pool(3), _small(3), cost=60, window=True),),
    "max_pool2d_backward": (Map(_max_pool_backward(2), _few(MAX_MAXIMA), cost=100, window=True),),
    "max_pool3d_backward": (Map(_max_pool_backward(3), _few(2 * MAX_MAXIMA, 3), cost=200, window=True),),
    "avg_pool1d": (Map(_avg_pool(1), _small(1), cost=20, window=True),),
    "avg_pool2d": (Map(_avg_pool(2), _small(2), cost=60, window=True),),
    "avg_pool3d": (Map(_avg_pool(3), _of_volumes(_small(3)), cost=60, window=True),),
    "avg_pool2d_backward": (Map(_avg_pool_backward(2), _few(MAX_WINDOWS), cost=60, window=True),),
    "avg_pool3d_backward": (Map(_avg_pool_backward(3), _of_volumes(_few(MAX_WINDOWS, 3)), cost=60, window=True),),
    **{f"adaptive_avg_pool{n}d": (Map(_avg_pool(n), _cells(n), cost=60, window=True),) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": (Map(_max_pool(n), _cells(n), cost=60, window=True),) for n in (2, 3)},
    **{f"adaptive_avg_pool{n}d_backward": (Map(_avg_pool_backward(n), _cells(n, math.inf), cost=60, window=True),) for n in (2, 3)},
    "im2col": (Map(_im2col, _known_image, cost=12),),
    "col2im": (Map(_col2im, _few_columns, cost=60, window=True),),
}
