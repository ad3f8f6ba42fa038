"""Addresses of elements: `offset + sum(stride * axis) + sum(stride * ((affine // div) % mod)) + sum(stride *
value)`.

All terms count elements, relative to the data pointer of the buffer. Axes are numbered P first, then R. Rounding
is Python's: `//` is floor, `%` is never negative. Build indices with operators from `Builder.axes`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusewright.toolkit.ir.extent import Atom, Extent, divide, nonnegative, rename


class IndexTooComplex(ValueError):
    """The index needs a nested division that does not simplify; the caller stores the tensor instead."""


Coefs = tuple[tuple[int, Extent], ...]


@dataclass(frozen=True, slots=True)
class DivMod:
    """`stride * ((offset + sum(coef * axis)) // div) % mod`; `mod` None means no modulo."""

    stride: Extent
    offset: Extent
    coefs: Coefs
    div: Extent = 1
    mod: Extent | None = None


@dataclass(frozen=True, slots=True)
class Indirect:
    """`stride * value`, where `value` is the id of an i64 SSA value (see the op `bound` for checks)."""

    stride: Extent
    value: int


@dataclass(frozen=True, slots=True)
class Index:
    """An address; see the module docstring. `sizes` are the sizes of all axes where known; they only help to
    simplify divisions."""

    offset: Extent = 0
    coefs: Coefs = ()
    divmods: tuple[DivMod, ...] = ()
    indirect: tuple[Indirect, ...] = ()
    sizes: tuple[Extent, ...] | None = field(default=None, compare=False, repr=False)

    def __add__(self, other: Index | Extent) -> Index:
        if not isinstance(other, Index):
            return replace(self, offset=self.offset + other)
        return Index(
            self.offset + other.offset,
            _merge(self.coefs + other.coefs),
            _merge_divmods(self.divmods + other.divmods),
            _merge_indirect(self.indirect + other.indirect),
            self.sizes if self.sizes is not None else other.sizes,
        )

    __radd__ = __add__

    def __sub__(self, other: Index | Extent) -> Index:
        return self + other * -1

    def __rsub__(self, other: Index | Extent) -> Index:
        return self * -1 + other

    def __neg__(self) -> Index:
        return self * -1

    def __mul__(self, k: Extent) -> Index:
        if k == 0:
            return Index(sizes=self.sizes)
        return Index(
            self.offset * k,
            tuple((a, c * k) for a, c in self.coefs),
            tuple(replace(d, stride=d.stride * k) for d in self.divmods),
            tuple(replace(i, stride=i.stride * k) for i in self.indirect),
            self.sizes,
        )

    __rmul__ = __mul__

    def __floordiv__(self, d: Extent) -> Index:
        return _divided(self, d, want_mod=False)

    def __mod__(self, m: Extent) -> Index:
        return _divided(self, m, want_mod=True)

    def axes(self) -> frozenset[int]:
        """The axes that the address depends on, apart from indirect values."""
        out = {a for a, _ in self.coefs}
        for d in self.divmods:
            out.update(a for a, _ in d.coefs)
        return frozenset(out)

    def stride_of(self, axis: int) -> Extent | None:
        """The stride along `axis`, or None when the address is not affine in it."""
        if any(a == axis for d in self.divmods for a, _ in d.coefs):
            return None
        return dict(self.coefs).get(axis, 0)

    def extents(self) -> Iterator[Extent]:
        """Yield every extent in the index, for collecting symbols."""
        yield self.offset
        yield from (c for _, c in self.coefs)
        for d in self.divmods:
            yield from (d.stride, d.offset, d.div, *(c for _, c in d.coefs))
            if d.mod is not None:
                yield d.mod
        yield from (i.stride for i in self.indirect)

    def with_values(self, ids: Mapping[int, int]) -> Index:
        """The index with its indirect values renumbered."""
        if not self.indirect:
            return self
        return replace(self, indirect=tuple(replace(i, value=ids[i.value]) for i in self.indirect))

    def renamed(self, names: dict[Atom, Atom], sizes: tuple[Extent, ...]) -> Index:
        """Return the index with its symbols renamed, over axes of these sizes."""
        divmods = [
            DivMod(
                rename(d.stride, names), rename(d.offset, names), _renamed(d.coefs, names), rename(d.div, names),
                None if d.mod is None else rename(d.mod, names),
            )
            for d in self.divmods
        ]  # fmt: skip
        return Index(
            rename(self.offset, names),
            _renamed(self.coefs, names),
            tuple(sorted(divmods, key=repr)),
            tuple(Indirect(rename(i.stride, names), i.value) for i in self.indirect),
            sizes,
        )

    def substitute(self, axes: Sequence[Index], sizes: tuple[Extent, ...]) -> Index:
        """Replace every axis `a` by `axes[a]` (over new axes with `sizes`)."""
        out = Index(self.offset, (), (), self.indirect, sizes)
        for a, c in self.coefs:
            out = out + axes[a] * c
        for d in self.divmods:
            base = Index(d.offset, sizes=sizes)
            for a, c in d.coefs:
                base = base + axes[a] * c
            q = base // d.div
            out = out + (q % d.mod if d.mod is not None else q) * d.stride
        return out


def axis_index(axis: int, sizes: tuple[Extent, ...]) -> Index:
    """The index that is `axis` itself; 0 for an axis of size 1."""
    return Index(sizes=sizes) if sizes[axis] == 1 else Index(coefs=((axis, 1),), sizes=sizes)


def _renamed(coefs: Coefs, names: dict[Atom, Atom]) -> Coefs:
    return tuple((a, rename(c, names)) for a, c in coefs)


def _merge(coefs: Coefs) -> Coefs:
    out: dict[int, Extent] = {}
    for a, c in coefs:
        out[a] = out.get(a, 0) + c
    return tuple(sorted(((a, c) for a, c in out.items() if c != 0), key=lambda t: t[0]))


def _merge_divmods(terms: tuple[DivMod, ...]) -> tuple[DivMod, ...]:
    out: dict[DivMod, Extent] = {}
    for t in terms:
        key = replace(t, stride=1)
        out[key] = out.get(key, 0) + t.stride
    merged = [replace(k, stride=s) for k, s in out.items() if s != 0]
    return tuple(sorted(merged, key=repr))


def _merge_indirect(terms: tuple[Indirect, ...]) -> tuple[Indirect, ...]:
    out: dict[int, Extent] = {}
    for t in terms:
        out[t.value] = out.get(t.value, 0) + t.stride
    return tuple(Indirect(s, v) for v, s in sorted(out.items()) if s != 0)


def bounds(offset: Extent, coefs: Coefs, sizes: tuple[Extent, ...] | None) -> tuple[Extent, Extent] | None:
    """(least, greatest) value of an affine form over the axes, or None when a coefficient may be negative."""
    if sizes is None or not all(nonnegative(c) for _, c in coefs):
        return None
    top: Extent = offset
    for a, c in coefs:
        top = top + c * (sizes[a] - 1)
    return offset, top


def _divided(ix: Index, d: Extent, want_mod: bool) -> Index:
    """Return `ix // d` or `ix % d`, splitting off the part divisible by `d` first."""
    if ix.indirect:
        raise IndexTooComplex("division of an indirect index: compute it with integer ops and use it as an index")
    if d == 1:
        return Index(sizes=ix.sizes) if want_mod else ix
    whole, rest = _split_multiples(ix, d)
    if rest.divmods:
        inner = _nested(rest, d, want_mod)
    elif _below(rest, d):
        inner = rest if want_mod else Index(sizes=ix.sizes)
    elif not rest.coefs and isinstance(rest.offset, int) and isinstance(d, int):
        inner = Index(rest.offset % d if want_mod else rest.offset // d, sizes=ix.sizes)
    else:
        term = DivMod(1, rest.offset, rest.coefs, 1 if want_mod else d, d if want_mod else None)
        inner = Index(divmods=(term,), sizes=ix.sizes)
    return inner if want_mod else inner + whole


def _split_multiples(ix: Index, d: Extent) -> tuple[Index, Index]:
    """Return (q, rest) with `ix == d * q + rest`, where `q` takes every term whose stride is a multiple of `d`."""
    whole, rest = Index(sizes=ix.sizes), Index(sizes=ix.sizes)
    q = divide(ix.offset, d)
    if q is not None:
        whole = replace(whole, offset=q)
    elif isinstance(ix.offset, int) and isinstance(d, int):
        whole, rest = replace(whole, offset=ix.offset // d), replace(rest, offset=ix.offset % d)
    else:
        rest = replace(rest, offset=ix.offset)
    for a, c in ix.coefs:
        q = divide(c, d)
        part = Index(coefs=((a, c if q is None else q),))
        whole, rest = (whole, rest + part) if q is None else (whole + part, rest)
    for t in ix.divmods:
        q = divide(t.stride, d)
        part = Index(divmods=(replace(t, stride=t.stride if q is None else q),))
        whole, rest = (whole, rest + part) if q is None else (whole + part, rest)
    return whole, rest


def _below(ix: Index, d: Extent) -> bool:
    b = bounds(ix.offset, ix.coefs, ix.sizes)
    return b is not None and nonnegative(b[0]) and nonnegative(d - 1 - b[1])


def _nested(ix: Index, d: Extent, want_mod: bool) -> Index:
    """Divide `(base // div) % mod + offset` where the divisors fit, else raise `IndexTooComplex`."""
    if len(ix.divmods) == 1 and not ix.coefs and ix.divmods[0].stride == 1:
        t = ix.divmods[0]
        fits = None if t.mod is None else divide(t.mod, d)
        if t.mod is None or (want_mod and fits is not None):  # what is added to a quotient may be added to the dividend
            t, ix = replace(t, offset=t.offset + ix.offset * t.div), replace(ix, offset=0)
        if ix.offset != 0:
            raise IndexTooComplex(f"a division by {d} of {ix}")
        if want_mod and (t.mod is None or fits is not None):
            return Index(divmods=(replace(t, mod=d),), sizes=ix.sizes)
        if want_mod and t.mod is not None and nonnegative(d - t.mod):
            return ix
        if not want_mod and (t.mod is None or fits is not None):
            base = Index(t.offset, t.coefs, sizes=ix.sizes) // (t.div * d)
            return base if fits is None else base % fits
    raise IndexTooComplex(f"a division by {d} of {ix.divmods}")
