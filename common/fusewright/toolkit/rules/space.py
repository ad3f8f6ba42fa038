"""Positions of elements: an index per dim of a tensor (`At`), and how views transform it. Sizes become extents here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fusewright.interface import Dim, Size, TensorSpec, hint
from fusewright.sizes.expr import Apply, Atom, SizeExpr, substitute
from fusewright.toolkit.ir.extent import Extent, divide
from fusewright.toolkit.ir.index import Index, IndexTooComplex, axis_index

Shape = tuple[Extent, ...]


class ShapeMismatch(ValueError):
    """Symbolic shapes cannot be proved compatible; the op is left to eager."""


class NotAligned(Exception):
    """A row's result is needed at an element other than the current one, so the tensor must be stored first."""


def extent(size: Size) -> Extent:
    """Convert a size of the interface to an extent of kernels."""
    return size.expr if isinstance(size, Dim) else int(size)


def step_of(stride: Size) -> Extent:
    """Convert a stride to an extent. Torch counts empty dims as one element long in strides, which affects no existing element,
    so the `Max(1, n)` is dropped."""
    return substitute(stride.expr, _without_max) if isinstance(stride, Dim) else int(stride)


def _without_max(atom: Atom) -> Extent | None:
    """Return `n` for `Max(1, n)`, else None."""
    match atom:
        case Apply(function="Max", args=(1, int() | SizeExpr() as n)):
            return substitute(n, _without_max)
    return None


@lru_cache(4096)
def shape_of(spec: TensorSpec) -> Shape:
    return tuple(map(extent, spec.shape))


@lru_cache(4096)
def stride_of(spec: TensorSpec) -> Shape:
    return tuple(map(step_of, spec.stride))


@lru_cache(4096)
def product(shape: Shape) -> Extent:
    out: Extent = 1
    for s in shape:
        out = s * out
    return out


@lru_cache(4096)
def dense_strides(shape: Shape) -> Shape:
    """Row-major strides."""
    out: list[Extent] = []
    step: Extent = 1
    for s in reversed(shape):
        out.append(step)
        step = s * step
    return tuple(reversed(out))


@lru_cache(4096)
def is_contiguous(spec: TensorSpec) -> bool:
    """Row-major and dense. Dims of size one may have any stride."""
    shape, stride = shape_of(spec), stride_of(spec)
    return all(s == 1 or a == b for s, a, b in zip(shape, stride, dense_strides(shape), strict=True))


class At:
    """One element of a tensor of `shape`, as an index per dim; `linear` is its row-major index.

    A reshape preserves `linear`, so tensors accessed at the same element are recognized as such whatever their shapes.
    """

    __slots__ = ("_cache", "_dims", "_from", "_hash", "_linear", "shape")

    def __init__(
        self,
        shape: Shape,
        dims: tuple[Index, ...] | None,
        linear: Index | None = None,
        origin: At | None = None,
    ) -> None:
        self.shape = shape
        self._dims = dims
        self._linear = linear
        self._from = origin
        self._hash: int | None = None
        self._cache: dict[Shape, At] = {}

    @property
    def dims(self) -> tuple[Index, ...]:
        if self._dims is None:
            assert self._from is not None
            self._dims = self._regrouped(self._from)
        return self._dims

    def _regrouped(self, origin: At) -> tuple[Index, ...]:
        """The indices, from those of the shape before; or, where these take a division that does not simplify, from an earlier one,
        whose dims may not need any."""
        try:
            return _regroup(origin.dims, origin.shape, self.shape)
        except IndexTooComplex:
            if origin._from is None:
                raise
            return self._regrouped(origin._from)

    @property
    def linear(self) -> Index:
        if self._linear is None:
            self._linear = self._from.linear if self._from is not None else linearise(self.dims, self.shape)
        return self._linear

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.shape, self.dims))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, At) and self.shape == other.shape and self.dims == other.dims)

    def reshape(self, shape: Shape) -> At:
        """The same element of the tensor in another shape. Raises IndexTooComplex if it cannot be expressed."""
        if shape == self.shape:
            return self
        found = self._cache.get(shape)
        if found is None:
            found = self._cache[shape] = At(shape, None, None, self)
        return found

    def broadcast(self, shape: Shape) -> At:
        """The element of a tensor of `shape` that is broadcast to this one. Raises ShapeMismatch if `shape` does not
        broadcast.
        """
        if shape == self.shape:
            return self
        key = (*shape, -1)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._broadcast(shape)
        return found

    def _broadcast(self, shape: Shape) -> At:
        extra = len(self.shape) - len(shape)
        if extra < 0:
            raise ShapeMismatch(f"a tensor of shape {shape} does not broadcast to {self.shape}")
        dims = []
        for i, s in enumerate(shape):
            outer = self.shape[i + extra]
            if s == outer:
                dims.append(self.dims[i + extra])
            elif s == 1:
                dims.append(zero(self.dims))
            else:
                raise ShapeMismatch(f"a tensor of shape {shape} does not broadcast to {self.shape}")
        same = all(s == 1 for s in self.shape[:extra]) and shape == self.shape[extra:]
        return At(shape, tuple(dims), None, self if same else None)

    def pick(self, dims: Sequence[int]) -> At:
        """Restrict the element to these dims."""
        return At(tuple(self.shape[d] for d in dims), tuple(self.dims[d] for d in dims))

    def with_dim(self, dim: int, index: Index, size: Extent) -> At:
        """Replace the index in one dim, where the tensor has size `size`."""
        dims, shape = list(self.dims), list(self.shape)
        dims[dim], shape[dim] = index, size
        return At(tuple(shape), tuple(dims))


def zero(like: Sequence[Index]) -> Index:
    """The index 0, over the axes of `like`."""
    return Index(sizes=like[0].sizes) if like else Index()


def linearise(dims: Sequence[Index], shape: Shape) -> Index:
    out = zero(dims)
    for ix, s, step in zip(dims, shape, dense_strides(shape), strict=True):
        if s != 1:
            out = out + ix * step
    return out


def _regroup(dims: tuple[Index, ...], old: Shape, new: Shape) -> tuple[Index, ...]:
    """Compute indices after a reshape. Runs of dims with equal products are regrouped separately, so few need a division."""
    out: list[Index] = []
    for a, b in factor_groups(old, new):
        if len(a) == len(b) == 1:
            out.append(dims[a[0]])
            continue
        flat = linearise([dims[d] for d in a], tuple(old[d] for d in a)) if a else zero(dims)
        sizes = tuple(new[d] for d in b)
        for k, step in enumerate(dense_strides(sizes)):
            q = flat // step if step != 1 else flat
            out.append(q % sizes[k] if k else q)
    return tuple(ix if s != 1 else zero(dims) for ix, s in zip(out, new, strict=True))


@lru_cache(4096)
def factor_groups(old: Shape, new: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Pair the shortest runs of dims of two shapes, in order, that have equal element counts."""
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = list(range(i, min(i + 1, len(old)))), list(range(j, min(j + 1, len(new))))
        left, right = product(old[i : i + 1]), product(new[j : j + 1])
        while left != right:
            end_a, end_b = i + len(a), j + len(b)
            if end_a < len(old) and (_is_behind(left, right) or end_b == len(new)):
                a.append(end_a)
                left = left * old[end_a]
            elif end_b < len(new):
                b.append(end_b)
                right = right * new[end_b]
            else:
                raise ShapeMismatch(f"{old} and {new} hold different numbers of elements")
        groups.append((tuple(a), tuple(b)))
        i, j = i + len(a), j + len(b)
    return tuple(groups)


def _is_behind(left: Extent, right: Extent) -> bool:
    """Whether `left` must take in another dim to reach `right`."""
    if isinstance(left, int) and isinstance(right, int):
        return left < right
    return divide(left, right) is None


@dataclass(frozen=True)
class Part:
    """The points of a kernel at which an axis lies in [start, start + size)."""

    axis: int
    start: Extent
    size: Extent

    def of(self, index: Index) -> Index | None:
        """Restrict an index to these points, counting the axis from `start`; None if that is not possible."""
        if index.sizes is None:
            return None
        sizes = tuple(self.size if a == self.axis else s for a, s in enumerate(index.sizes))
        axes = [axis_index(a, sizes) for a in range(len(sizes))]
        axes[self.axis] = axes[self.axis] + self.start
        try:
            return index.substitute(axes, sizes)
        except IndexTooComplex:
            return None


def layout_of(spec: TensorSpec) -> str:
    """Return "contiguous", "channels_last" (4-d or 5-d) or "strided". A dim of size 1 may have any stride."""
    if _follows(spec, range(spec.rank - 1, -1, -1)):
        return "contiguous"
    if spec.rank in (4, 5) and _follows(spec, (1, *range(spec.rank - 1, 1, -1), 0)):
        return "channels_last"
    return "strided"


def _follows(spec: TensorSpec, order: Iterable[int]) -> bool:
    """Whether strides are dense in this order of dims, innermost first; symbolic sizes count by their hints."""
    step = 1
    for d in order:
        size = hint(spec.shape[d])
        if size != 1 and hint(spec.stride[d]) != step:
            return False
        step *= size
    return True
