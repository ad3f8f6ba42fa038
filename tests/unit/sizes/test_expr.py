"""Sizes as values: arithmetic as in Python and sympy, a normal form, JSON and back, and strict parsing of JSON."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy import functions

from fusewright import _torch_compat as compat
from fusewright.sizes.expr import (
    Apply,
    Extent,
    NumberOf,
    OffsetOf,
    SizeExpr,
    SizeOf,
    apply,
    divide,
    evaluate,
    leaves,
    names,
    solve,
    substitute,
    symbol,
    values,
    with_values,
)
from fusewright.sizes.serial import from_data, to_data
from fusewright.sizes.traced import from_sympy

NAMES = ("s0", "s1", "u2")
BINDINGS = st.fixed_dictionaries({n: st.integers(1, 50) for n in NAMES})
SYMPY = {n: sympy.Symbol(n, positive=True, integer=True) for n in NAMES}

Maker = Callable[[Any, Any], Any]
BINARY: dict[str, tuple[Maker, Maker]] = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "//": (lambda a, b: apply("FloorDiv", a, b * b + 1), lambda a, b: functions.FloorDiv(a, b * b + 1)),
    "%": (lambda a, b: apply("Mod", a, b * b + 1), lambda a, b: functions.PythonMod(a, b * b + 1)),
    "max": (lambda a, b: apply("Max", a, b), functions.Max),
    "min": (lambda a, b: apply("Min", a, b), functions.Min),
}
"""The same operation on sizes and in sympy. Divisors are made positive."""


@st.composite
def pairs(draw: st.DrawFn, depth: int = 3) -> tuple[Extent, Any]:
    """Draw a size and its expected sympy expression."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        if draw(st.booleans()):
            n = draw(st.integers(-9, 9))
            return n, sympy.Integer(n)
        name = draw(st.sampled_from(NAMES))
        return symbol(name), SYMPY[name]
    ours, theirs = BINARY[draw(st.sampled_from(sorted(BINARY)))]
    (a, x), (b, y) = draw(pairs(depth - 1)), draw(pairs(depth - 1))
    return ours(a, b), theirs(x, y)


def value(expression: Any, binding: dict[str, int]) -> int:
    return int(expression.xreplace({SYMPY[n]: sympy.Integer(v) for n, v in binding.items()}))


@given(pairs(), BINDINGS)
@settings(deadline=None, max_examples=200)
def test_arithmetic_is_sympys(pair: tuple[Extent, Any], binding: dict[str, int]) -> None:
    size, expression = pair
    assert evaluate(size, binding) == value(expression, binding)


@given(pairs(), BINDINGS)
@settings(deadline=None, max_examples=200)
def test_what_torch_traced_has_the_value_that_it_had_in_sympy(pair: tuple[Extent, Any], binding: dict[str, int]) -> None:
    _, expression = pair
    assert evaluate(from_sympy(expression), binding) == value(expression, binding)


@given(pairs(), BINDINGS)
@settings(deadline=None)
def test_the_text_is_python_of_the_same_value(pair: tuple[Extent, Any], binding: dict[str, int]) -> None:
    from fusewright.plan.vocabulary import SIZES

    size, _ = pair
    assert eval(str(size), dict(SIZES), dict(binding)) == evaluate(size, binding)


@given(pairs(), pairs(), BINDINGS)
@settings(deadline=None)
def test_equal_polynomials_have_one_form(a: tuple[Extent, Any], b: tuple[Extent, Any], binding: dict[str, int]) -> None:
    x, y = a[0], b[0]
    assert x + y == y + x and x * y == y * x and x - x == 0 and (x + y) * 2 - y == x * 2 + y
    assert hash(x + y) == hash(y + x)
    quotient = divide(x * y, y)
    assert y == 0 or quotient is None or quotient * y == x * y


@given(pairs())
@settings(deadline=None)
def test_through_json_and_back(pair: tuple[Extent, Any]) -> None:
    size, _ = pair
    data = json.loads(json.dumps(to_data(size)))
    assert from_data(data) == size
    assert copy.deepcopy(size) == size and pickle.loads(pickle.dumps(size)) == size


def test_the_text_of_a_graph_is_read_back_as_the_same_size() -> None:
    for text in ("s0", "2*s0 + 1", "s0**2", "s0*s1 + s0", "(s0//2)", "4*s0*((s0//2))", "3 - s0", "Max(3, s0)", "-s1 - 3"):
        again = compat.Symbols().size(text)
        assert str(from_sympy(again.node.expr)) == text == str(again.node.expr)


def test_functions_in_their_simplest_form() -> None:
    s, n = symbol("s0"), symbol("s1")
    assert apply("FloorDiv", s * n * 6, s * 2) == n * 3 and apply("FloorDiv", 7, 2) == 3
    assert apply("Mod", s * 4, s) == 0 and apply("Mod", -7, 4) == 1
    assert apply("Max", 1, s, 3, apply("Max", s, 2)) == apply("Max", 3, s) and apply("Min", s, s) == s
    assert apply("CeilToInt", s) == s
    assert isinstance(apply("FloorDiv", s, 0), SizeExpr), "whoever runs it gets the error"


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (lambda s: functions.IntTrueDiv(s, 4), None),  # a float is not a size
        (lambda s: functions.CeilToInt(functions.IntTrueDiv(s, 4)), 3),
        (lambda s: functions.FloorToInt(functions.ToFloat(s) * 1.5), 15),
        (lambda s: functions.TruncToInt(functions.FloatTrueDiv(functions.ToFloat(s), 3.0) + 0.5), 3),
        (lambda s: functions.RoundToInt(functions.FloatPow(functions.ToFloat(s), 2.0)), 100),
        (lambda s: functions.ModularIndexing(s, 3, 2), 1),
        (lambda s: functions.CleanDiv(s, 2), 5),
        (lambda s: functions.LShift(s, 2), 40),
        (lambda s: functions.PowByNatural(s, 2), 100),
        (lambda s: functions.Where(sympy.Gt(s, 3), s, 1), 10),
        (lambda s: functions.Identity(s) + 1, 11),
        (lambda s: s**2 * 3 + 1, 301),
        (lambda s: s**20, 10**20),
        (lambda s: sympy.Rational(1, 2) * s, None),
    ],
)  # fmt: skip
def test_words_of_torch(made: Callable[[Any], Any], want: int | None) -> None:
    found = from_sympy(made(SYMPY["s0"]))
    assert want is None or evaluate(found, {"s0": 10}) == want
    assert set(names(found)) == {"s0"}


def test_what_sizes_have_no_words_for_is_a_symbol_that_nobody_gives_a_value() -> None:
    expression = functions.OpaqueUnaryFn_sin(SYMPY["s0"]) + 1
    assert from_sympy(expression) == symbol(str(expression))


def test_atoms_of_all_kinds() -> None:
    size = symbol(SizeOf(3, 1)) * symbol("s0") + apply("FloorDiv", symbol(OffsetOf(4)) + symbol(NumberOf(5)), symbol(0) + 1)
    assert sorted(values(size)) == [3, 4, 5] and set(leaves(size)) == {"s0", 0, SizeOf(3, 1), OffsetOf(4), NumberOf(5)}
    assert from_data(json.loads(json.dumps(to_data(size)))) == size
    moved = with_values(size, {3: 30, 4: 40, 5: 50})
    assert sorted(values(moved)) == [30, 40, 50] and with_values(moved, {30: 3, 40: 4, 50: 5}) == size
    given: dict[Any, int] = {"s0": 2, 0: 1, SizeOf(3, 1): 7, OffsetOf(4): 9, NumberOf(5): 2}
    assert evaluate(size, given) == evaluate(substitute(size, given.get), {}) == 19


def test_positions_take_their_values_from_a_sequence() -> None:
    assert evaluate(symbol(0) * symbol(1) + apply("FloorDiv", symbol(1), 2), (3, 5)) == 17


@pytest.mark.parametrize(
    "data",
    [
        None, "s0", True, 1.5, 1 << 70, [], {}, [["s0", 1]], [[["s0"], 1.0]], [[["s0"], True]], [[["s0"], 0]], [[["s0"]]],
        [[[], 3]], [[["s1"], 1], [["s0"], 1]], [[["s0"], 1], [["s0"], 1]], [[["s1", "s0"], 1]], [[[-1], 1]], [[[None], 1]],
        [[[1.5], 1]], [[[True], 1]],
        [[["s0"], 1 << 70]], [[[{"size": [1]}], 1]], [[[{"size": [1, "0"]}], 1]],
        [[[{"size": [1, 0], "offset": 1}], 1]], [[[{"number": "1"}], 1]], [[[{"number": True}], 1]], [[[{"eval": ["s0"]}], 1]],
        [[[{"__import__": [1]}], 1]],
        [[[{"FloorDiv": [[[["s0"], 1]]]}], 1]], [[[{"FloorDiv": [8, 2]}], 1]], [[[{"Max": [[[["s0"], 1]], 1]}], 1]],
        [[[{"Max": "s0"}], 1]], [[[{"ToFloat": [float("nan")]}], 1]], [[["s0"] * 2000, 1]],
    ],
)  # fmt: skip
def test_json_that_no_size_is_written_as_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        from_data(data)


def test_nests_without_end_are_refused() -> None:
    data: Any = [[["s0"], 1]]
    for _ in range(10_000):
        data = [[[{"CeilToInt": [data]}], 1]]
    with pytest.raises(ValueError):
        from_data(data)


def test_a_call_that_is_none_cannot_be_read() -> None:
    with pytest.raises(KeyError):
        str(evaluate(symbol(Apply("exec", (1,))), {}))


@pytest.mark.parametrize("n", [3, 8, 9])
def test_the_atom_of_a_formula_follows_from_its_value(n: int) -> None:
    x, whole = symbol("x"), symbol(SizeOf(0, 1))
    for made in (x, x + 5, 3 * x - 2, apply("FloorDiv", x - 3, 2) + 1, 2 * apply("FloorDiv", x, 2)):
        assert isinstance(made, SizeExpr)
        found = solve(made, whole)
        assert found is not None
        atom, value = found
        assert evaluate(value, {SizeOf(0, 1): evaluate(made, {"x": n})}) == evaluate(symbol(atom), {"x": n})


def test_other_formulas_have_no_solution() -> None:
    x, y = symbol("x"), symbol("y")
    for made in (x * x, x + y, x * y + 1, 2 - x, x * x + x):
        assert isinstance(made, SizeExpr)
        assert solve(made, symbol(SizeOf(0, 0))) is None
