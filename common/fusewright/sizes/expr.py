"""`SizeExpr`: a size that is known at run time. An `Extent` is one, or an int.

It is a canonical polynomial over atoms: equal polynomials have equal form, so `==` and `hash` decide equality. Nothing else is
solved: what a polynomial cannot express (`n // 2`) is an atom itself, an `Apply`. Other atoms are symbols by name (in specs),
symbols by position (in kernels, which have no names), and what a plan reads from its values (in launches).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from fusewright.sizes.functions import FUNCTIONS


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The size of a plan's tensor along a dim."""

    value: int
    dim: int

    def __str__(self) -> str:
        return f"v{self.value}.shape[{self.dim}]"


@dataclass(frozen=True, slots=True)
class OffsetOf:
    """The storage offset of a plan's tensor, in elements."""

    value: int

    def __str__(self) -> str:
        return f"v{self.value}.storage_offset()"


@dataclass(frozen=True, slots=True)
class NumberOf:
    """A number that is a value of a plan."""

    value: int

    def __str__(self) -> str:
        return f"v{self.value}"


@dataclass(frozen=True, slots=True)
class Apply:
    """A call of one of `FUNCTIONS`. Construct it with `apply`, which simplifies."""

    function: str
    args: tuple[Extent | float, ...]

    def __str__(self) -> str:
        if self.function == "FloorDiv":
            return f"({'//'.join(map(_factor, self.args))})"
        return f"{self.function}({', '.join(map(str, self.args))})"


Atom: TypeAlias = str | int | SizeOf | OffsetOf | NumberOf | Apply
"""The name of a symbol, the position of one, something read from a value, or a function of these."""
Monomial: TypeAlias = tuple[Atom, ...]
"""The atoms of a product, sorted, repeated for powers; () is the constant term."""


@dataclass(frozen=True, slots=True)
class SizeExpr:
    """A sum of `coefficient * monomial`, sorted by monomial, no zero coefficient, at least one atom."""

    terms: tuple[tuple[Monomial, int], ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.terms))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[SizeExpr], tuple[object, ...]]:
        return SizeExpr, (self.terms,)  # a name's hash differs between processes

    def __add__(self, other: Extent) -> Extent:
        return _sum(self, other, 1) if isinstance(other, int | SizeExpr) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Extent) -> Extent:
        return _sum(self, other, -1) if isinstance(other, int | SizeExpr) else NotImplemented

    def __rsub__(self, other: Extent) -> Extent:
        return _sum(other, self, -1)

    def __mul__(self, other: Extent) -> Extent:
        if not isinstance(other, int | SizeExpr):
            return NotImplemented
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in terms_of(other):
                key = sort_monomial(m + n) if n else m
                out[key] = out.get(key, 0) + c * d
        return make(out)

    __rmul__ = __mul__

    def __neg__(self) -> Extent:
        return self * -1

    def __str__(self) -> str:
        return _text(self)

    @property
    def name(self) -> str | None:
        """The name of the symbol that this is; None for anything else."""
        atom = self.atom
        return atom if isinstance(atom, str) else None

    @property
    def atom(self) -> Atom | None:
        """The single atom that this is; None for a formula."""
        (monomial, c), *more = self.terms
        return monomial[0] if not more and c == 1 and len(monomial) == 1 else None


Extent: TypeAlias = int | SizeExpr


# ---------------------------------------------------------------- making


def symbol(atom: Atom) -> SizeExpr:
    """The size that consists of one atom, e.g. a named symbol."""
    return SizeExpr((((atom,), 1),))


def apply(function: str, *args: Extent | float) -> Extent:
    """A function of sizes in its simplest form: constants are folded, exact divisions become polynomials."""
    if function in ("Max", "Min"):
        return _extreme(function, args)
    if all(isinstance(a, int) for a in args) and not FUNCTIONS[function].real:
        try:
            return int(FUNCTIONS[function].call(*args))
        except (ArithmeticError, ValueError):
            pass  # evaluating it raises the error
    match function, args:
        case "FloorDiv", (int() | SizeExpr() as a, int() | SizeExpr() as b):
            if (exact := divide(a, b)) is not None:
                return exact
        case "Mod", (int() | SizeExpr() as a, int() | SizeExpr() as b):
            if divide(a, b) is not None:
                return 0
        case ("CeilToInt" | "FloorToInt" | "TruncToInt" | "RoundToInt"), (int() | SizeExpr() as a,) if not is_real(a):
            return a
    return symbol(Apply(function, args))


def _extreme(function: str, args: Sequence[Extent | float]) -> Extent:
    """Simplify Max or Min: drop duplicates, combine ints, flatten nested calls."""
    flat: dict[Extent | float, None] = {}
    for a in args:
        atom = a.atom if isinstance(a, SizeExpr) else None
        inner = atom.args if isinstance(atom, Apply) and atom.function == function else (a,)
        flat.update(dict.fromkeys(inner))
    numbers = [a for a in flat if isinstance(a, int)]
    rest = sorted((a for a in flat if not isinstance(a, int)), key=repr)
    kept = (*([FUNCTIONS[function].call(numbers)] if numbers else []), *rest)
    if len(kept) > 1:
        return symbol(Apply(function, kept))
    (only,) = kept
    return only if isinstance(only, int | SizeExpr) else symbol(Apply("ToFloat", (only,)))


def is_real(x: Extent | float) -> bool:
    """Whether a number may be a non-integer."""
    if isinstance(x, SizeExpr):
        return any(isinstance(a, Apply) and _is_real_call(a) for a in atoms(x))
    return isinstance(x, float)


def _is_real_call(a: Apply) -> bool:
    if a.function in ("Max", "Min", "Where"):
        return any(is_real(x) for x in a.args)
    return FUNCTIONS[a.function].real


def _rank(atom: Atom) -> tuple[int, int, str]:
    if isinstance(atom, int):
        return 0, atom, ""
    return (1, 0, atom) if isinstance(atom, str) else (2, 0, repr(atom))


def sort_monomial(factors: Iterable[Atom]) -> Monomial:
    """Sort factors into a monomial's order."""
    return tuple(sorted(factors, key=_rank))


def _order(term: tuple[Monomial, int]) -> list[tuple[int, int, str]]:
    return [_rank(a) for a in term[0]]


def make(terms: Mapping[Monomial, int]) -> Extent:
    """The sum of terms with sorted monomials."""
    kept = [(m, c) for m, c in terms.items() if c]
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    if len(kept) > 1:
        kept.sort(key=_order)
    return SizeExpr(tuple(kept))


def terms_of(e: Extent) -> Iterator[tuple[Monomial, int]]:
    """The terms of a size; none for 0."""
    if isinstance(e, SizeExpr):
        yield from e.terms
    elif e:
        yield (), e


def _sum(a: Extent, b: Extent, sign: int) -> Extent:
    out = dict(terms_of(a))
    for m, c in terms_of(b):
        out[m] = out.get(m, 0) + sign * c
    return make(out)


def divide(a: Extent, b: Extent) -> Extent | None:
    """`a / b` if it is exact and `b` has a single term, else None."""
    divisor = list(terms_of(b))
    if len(divisor) != 1:
        return 1 if a == b and divisor else None
    (dm, dc), out = divisor[0], {}
    for m, c in terms_of(a):
        rest = list(m)
        for s in dm:
            if s not in rest:
                return None
            rest.remove(s)
        if c % dc:
            return None
        out[tuple(rest)] = c // dc
    return make(out)


# ---------------------------------------------------------------- asking


def atoms(e: Extent | float) -> Iterator[Atom]:
    """The atoms of a size in order, repeats included."""
    if isinstance(e, SizeExpr):
        for m, _ in e.terms:
            yield from m


def leaves(e: Extent | float) -> Iterator[Atom]:
    """The symbols and values read in a size, including those inside functions."""
    for a in atoms(e):
        if isinstance(a, Apply):
            for x in a.args:
                yield from leaves(x)
        else:
            yield a


def names(e: Extent) -> Iterator[str]:
    """The names of the symbols in a size."""
    return (a for a in leaves(e) if isinstance(a, str))


def values(e: Extent) -> Iterator[int]:
    """Ids of the plan's values that a size is read from."""
    return (a.value for a in leaves(e) if isinstance(a, SizeOf | OffsetOf | NumberOf))


Sizes: TypeAlias = Mapping[Atom, int] | Sequence[int]
"""Values of symbols: by atom, or by position."""


def evaluate(e: Extent, sizes: Sizes) -> int:
    """The value of `e`; KeyError or IndexError if a symbol has none. `sizes` may also contain values of functions."""
    if isinstance(e, int):
        return e
    total = 0
    for m, c in e.terms:
        for a in m:
            c *= _value(a, sizes)
        total += c
    return total


def _value(atom: Atom, sizes: Sizes) -> int:
    if isinstance(atom, Apply) and not (isinstance(sizes, Mapping) and atom in sizes):
        args = (evaluate(a, sizes) if isinstance(a, SizeExpr) else a for a in atom.args)
        return FUNCTIONS[atom.function].call(*args)
    return sizes[atom]  # type: ignore[index]


def substitute(e: Extent, given: Callable[[Atom], Extent | None]) -> Extent:
    """Replace atoms of `e`; atoms for which `given` returns None stay. Functions are looked up before their arguments."""
    if isinstance(e, int):
        return e
    out: Extent = 0
    for m, c in e.terms:
        term: Extent = c
        for a in m:
            term = _replaced(a, given) * term
        out = term + out
    return out


def _replaced(atom: Atom, given: Callable[[Atom], Extent | None]) -> Extent:
    found = given(atom)
    if found is not None:
        return found
    if not isinstance(atom, Apply):
        return symbol(atom)
    return apply(atom.function, *(substitute(a, given) if isinstance(a, SizeExpr) else a for a in atom.args))


def solve(e: SizeExpr, value: SizeExpr) -> tuple[Atom, Extent] | None:
    """The single atom of `c * atom + d`, and what it is where the whole is `value`: of `n - 2` and `n // 2 + 1`, for instance. None
    for other formulas."""
    *constant, (monomial, c) = e.terms  # a constant comes first
    if len(monomial) != 1 or c < 1 or [m for m, _ in constant] not in ([], [()]):
        return None
    return monomial[0], apply("FloorDiv", value - sum(d for _, d in constant), c)


def with_values(e: Extent, ids: Mapping[int, int] | Sequence[int]) -> Extent:
    """`e` with the ids of its values replaced; `ids` must contain all of them."""

    def renumbered(a: Atom) -> Extent | None:
        return symbol(replace(a, value=ids[a.value])) if isinstance(a, SizeOf | OffsetOf | NumberOf) else None

    return substitute(e, renumbered)


def product(sizes: Iterable[Extent]) -> Extent:
    """The product; 1 for none."""
    out: Extent = 1
    for s in sizes:
        out = s * out
    return out


# ---------------------------------------------------------------- text


@lru_cache(4096)
def _text(e: SizeExpr) -> str:
    """Format as torch does: higher powers first, numbers last."""
    if e.atom is not None:
        return _atom_text(e.atom)
    order = {a: k for k, a in enumerate(sorted(set(atoms(e)), key=_rank))}
    terms = sorted(e.terms, key=lambda t: _powers(t[0], order))
    if len(terms) == 2 and terms[0][1] < 0 < terms[1][1] and len(terms[0][0]) == 1 and not terms[1][0]:
        terms.reverse()  # 3 - n
    parts = [_term_text(m, c) for m, c in terms]
    return " + ".join(parts).replace("+ -", "- ")


def _powers(m: Monomial, order: Mapping[Atom, int]) -> tuple[int, ...]:
    out = [0] * len(order)
    for a in m:
        out[order[a]] -= 1
    return tuple(out)


def _term_text(m: Monomial, c: int) -> str:
    if not m:
        return str(c)
    factors = [_factor(symbol(a)) + (f"**{m.count(a)}" if m.count(a) > 1 else "") for a in dict.fromkeys(m)]
    return "*".join([str(c)] * (abs(c) != 1) + factors) if c != -1 else "-" + "*".join(factors)


def _atom_text(a: Atom) -> str:
    return f"s{a}" if isinstance(a, int) else str(a)


def _factor(x: Extent | float) -> str:
    """The text of an operand, in parentheses unless it is a single word or call."""
    atom = x.atom if isinstance(x, SizeExpr) else None
    plain = atom is not None and not (isinstance(atom, Apply) and atom.function == "FloorDiv")
    return str(x) if plain or (isinstance(x, int | float) and x >= 0) else f"({x})"
