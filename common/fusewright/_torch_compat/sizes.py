"""Symbolic sizes: what is known of them, and work that may not assume more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule

from fusewright._torch_compat.fake import fake_mode_of, is_fake

UNBACKED = "unbacked_bindings"
"""Torch's key in `node.meta` for symbols whose values depend on the node's data."""


def shape_env_of(gm: GraphModule) -> Any | None:
    """The ShapeEnv of a traced graph, or None if all sizes are static."""
    for node in gm.graph.nodes:
        val = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(val, torch.SymInt):
            return val.node.shape_env
        if isinstance(val, torch.Tensor) and is_fake(val):
            env = fake_mode_of(val).shape_env
            if env is not None:
                return env
    return None


def assumed_sizes(gm: GraphModule) -> str:
    """What tracing knows of symbolic sizes, as text: ranges and guards. Code may rely on all of it; "" for static graphs."""
    if (env := shape_env_of(gm)) is None:
        return ""
    ranges = sorted(f"{symbol} in {r.lower}..{r.upper}" for symbol, r in env.var_to_range.items())
    guards = sorted(str(g.expr) for g in env.guards)
    later = sorted(str(a.expr) for found in env.deferred_runtime_asserts.values() for a in found)
    return "\n".join([*ranges, *guards, *later])


_BOUNDS: WeakKeyDictionary[Any, dict[Any, tuple[Any, ...]]] = WeakKeyDictionary()
"""By ShapeEnv and expression: the bounds, and the symbol ranges that they were derived from."""


def symbol_of(size: torch.SymInt) -> tuple[Any, int, int, int | None]:
    """(sympy expression, hint, lower bound, upper bound or None) of a symbolic size."""
    node = size.node
    size_hint = node.hint
    env = node.shape_env
    if isinstance(size_hint, torch.SymInt) or (env is None and type(size_hint) is not int):
        size_hint = None  # a nested tensor's ragged dimension stands only for itself; its hint is not a number
    lo, hi = (0, None) if env is None else _bounds(env, node.expr)
    return node.expr, int(size_hint) if size_hint is not None else max(lo, 2), lo, hi


def _bounds(env: Any, expr: Any) -> tuple[int, int | None]:
    """Cached bounds of an expression. Torch walks the whole expression each time, which is slow where sizes derive from sizes,
    and a graph mentions each many times."""
    known, ranges = _BOUNDS.setdefault(env, {}), env.var_to_range
    if (found := known.get(expr)) is not None and all(ranges.get(s) is r for s, r in found[2]):
        return found[:2]
    bounds = env.bound_sympy(expr)  # None for a ragged dimension in torch 2.11
    lo = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
    # Not is_integer, which is true of torch's integer infinity.
    hi = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    known[expr] = (lo, hi, [(s, ranges.get(s)) for s in expr.free_symbols])
    return lo, hi


def traced_size(size: Any) -> int | None:
    """The number that a size was during tracing, without adding a guard; None if it depends on data."""
    found = size.node.hint if isinstance(size, torch.SymInt) else size
    return found if isinstance(found, int) else None


def settled_size(size: Any) -> Any:
    """A size, as a number if guards have fixed its symbol."""
    if not isinstance(size, torch.SymInt):
        return size
    number = size.node.maybe_as_int()
    return size if number is None else number


def statically_true(condition: Any) -> bool:
    """Whether a (symbolic) condition holds for every size, without adding a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def guards_hold(shape_env: Any, fakes: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what tracing assumed of the sizes of `fakes` holds for `tensors`."""
    return bool(shape_env.evaluate_guards_for_args(list(fakes), list(tensors), ignore_static=False))


@contextlib.contextmanager
def sizes_settled(gm: GraphModule) -> Iterator[list[str]]:
    """A context for work on a graph whose guards are fixed: yields a list of assumptions made about its sizes nonetheless.

    Symbols created while metadata is recomputed are hidden from an enclosing torch tracing, which would look for them among its
    own results.
    """
    env = shape_env_of(gm)
    assumed: list[str] = []
    if env is None:
        yield assumed
        return
    before = len(env.guards)
    with env.ignore_fresh_unbacked_symbols():
        yield assumed
    assumed += [str(g.expr) for g in env.guards[before:]]


class SizesAssumed(Exception):
    """Work on a graph with fixed guards would hold only for some of its sizes."""


def _refused_guard(record: logging.LogRecord) -> bool:
    """A filter for torch's log messages about guards that are refused on purpose."""
    return not str(record.msg).startswith("failed during evaluate_expr")


@contextlib.contextmanager
def assuming_nothing(fake: Any) -> Iterator[None]:
    """A context for tracing with FakeTensors of a graph whose guards are fixed. Raises `SizesAssumed` if that would add a
    guard."""
    env = fake_mode_of(fake).shape_env
    if env is None:
        yield
        return
    before = len(env.guards)
    held = getattr(env, "error_on_new_guards", contextlib.nullcontext)  # older torch detects it only afterwards
    told = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    told.addFilter(_refused_guard)
    try:
        with held():
            yield
    except RuntimeError as e:
        if type(e).__name__ != "_ShapeEnvGuardError":
            raise
        raise SizesAssumed(str(e)) from e
    finally:
        told.removeFilter(_refused_guard)
    if env.guards[before:]:
        raise SizesAssumed(", ".join(str(g.expr) for g in env.guards[before:]))


class Symbols:
    """Symbolic sizes by name: `Symbols().size("2*s0 + 1")`. Symbols are positive, with distinct hints."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self._known: dict[str, Any] = {}
        self._hints: dict[Any, int] = {}

    def size(self, text: str) -> Any:
        """The SymInt of an expression; an int if it has no symbol. ValueError if it cannot be parsed."""
        import ast

        try:
            expr = self._expr(ast.parse(text.strip(), mode="eval").body)
        except SyntaxError as e:
            raise ValueError(f"{text!r} is no size") from e
        if expr.is_number:
            return int(expr)
        return self.env.create_symintnode(expr, hint=int(expr.xreplace(self._hints)))

    def _symbol(self, name: str) -> Any:
        import sympy  # type: ignore[import-untyped]
        from torch.fx.experimental.symbolic_shapes import ValueRangesSLoc
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        if name not in self._known:
            symbol = sympy.Symbol(name, positive=True, integer=True)
            add = getattr(self.env, "add_backed_var_to_val", None) or self.env.add_var_to_val
            self._hints[symbol] = sympy.Integer(7 + 6 * len(self._known))  # torch 2.10 asks a symbol's replacement for is_Add
            add(symbol, int(self._hints[symbol]))
            self.env.var_to_range[symbol] = ValueRanges(0, int_oo)
            self.env.var_to_range_sloc[symbol] = ValueRangesSLoc(None, None)  # type: ignore[arg-type]
            self._known[name] = symbol
        return self._known[name]

    def _expr(self, node: Any) -> Any:
        import ast

        import sympy
        from torch.utils._sympy import functions

        binary: dict[type, Callable[[Any, Any], Any]] = {
            ast.Add: lambda a, b: a + b,
            ast.Sub: lambda a, b: a - b,
            ast.Mult: lambda a, b: a * b,
            ast.Pow: lambda a, b: a**b,
            ast.Mod: functions.PythonMod,
            ast.FloorDiv: functions.FloorDiv,
        }
        match node:
            case ast.Constant(value=int()):
                return sympy.Integer(node.value)
            case ast.Name(id=name):
                return self._symbol(name)
            case ast.UnaryOp(op=ast.USub()):
                return -self._expr(node.operand)
            case ast.BinOp() if type(node.op) in binary:
                return binary[type(node.op)](self._expr(node.left), self._expr(node.right))
            case ast.Call(func=ast.Name(id=name), keywords=[]) if hasattr(functions, name):
                return getattr(functions, name)(*map(self._expr, node.args))
        raise ValueError(f"{ast.unparse(node)!r} is no size")
