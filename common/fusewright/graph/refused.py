"""Calls that torch traces although eager may refuse them: numbers outside a dtype's range, dims that a tensor does not have,
operands of several dtypes, integers and bools where an operator takes floats, indices of a dtype that it does not take. FakeTensor
accepts them, and a kernel would wrap, saturate or not be valid.

Eager itself is asked, with tensors of two elements per dim (with one element it may skip the check) where it takes such sizes, so
no list of operators and their checks is needed. What eager allows is left to kernels. What it refuses stays as traced, and raises
when called, as in eager.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

from fusewright import _torch_compat as compat
from fusewright.interface import HOST
from fusewright.ops import is_random
from fusewright.ops.core import bind, params_of
from fusewright.ops.rules import tensors

DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2"})
TARGET = "target"
"""Holds classes in some losses, and values in others."""
INDICES = frozenset({"index", "indices", TARGET})
MASKS = frozenset({"mask", "condition"})
ANY_NUMBER = 1 << 40
"""Stands for a number that is not known before the call; for a size, 2 does."""
MOST_ELEMENTS = 1 << 16
"""Results larger than this are not computed for the question; a doubtful call then counts as refused."""
MOST_ANSWERS = 4096

MOST_ASKED = 1 << 22
"""Limit on the elements that eager would make for the question, since a size argument may be any number."""
UNASKED = "a number may not fit in its dtype"

_answers: dict[Any, str | None] = {}


def refusal(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    """Why eager refuses this call of an overload, or None. Tensors are fake; `result` is the traced one."""
    given = bind(params_of(target), args, kwargs)
    doubtful = _doubtful(target, given, result)
    mixed = not doubtful and _mixed(target, given)
    if not doubtful and not mixed and not _of_exact(target, given):
        return None
    key = (target, doubtful, _described(tuple(given.values())))
    if key not in _answers:
        if len(_answers) >= MOST_ANSWERS:
            _answers.clear()
        large = "size" not in given and any(_elements(t) > MOST_ELEMENTS for t in tensors(result))
        asked = not large or any(True for v in given.values() for _ in tensors(v))
        ask = _asked if doubtful else _asked_of_mixed if mixed else _asked_of_exact
        _answers[key] = ask(target, given) if asked else UNASKED if doubtful else None
    return _answers[key]


def _elements(t: Any) -> int:
    n = t.numel()
    return n if isinstance(n, int) else 0


@cache
def _parts(target: Any) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of an overload's arguments: dims, numbers and tensors, and keyword-only ones."""
    arguments = target._schema.arguments
    numbers = (a.name for a in arguments if any(k in str(a.type) for k in ("number", "Tensor")))
    names = frozenset(a.name for a in arguments)
    return DIMS & names, frozenset(numbers), frozenset(a.name for a in arguments if a.kwarg_only)


def _doubtful(target: Any, given: Mapping[str, Any], result: Any) -> bool:
    """Whether a number or 0-dim tensor may not fit a dtype of the call, a dim is out of range, or an index has a dtype that not
    every operator takes."""
    dims, numbers, _ = _parts(target)
    if any(not _is_index(t, name) for name in numbers & INDICES for t in tensors(given[name])):
        return True
    values = [x for name in numbers for x in _each(given[name]) if x is not None]
    ranks = [x.dim() for x in values if isinstance(x, torch.Tensor)]
    ranks += [len(given[name]) for name in ("input_sizes",) if name in given]  # a gradient's dims are those of its result
    if ranks and not all(_is_dim(d, max(ranks)) for name in dims for d in _each(given[name])):
        return True
    numbers_given = [x for x in values if not isinstance(x, torch.Tensor) or not x.dim()]
    if not numbers_given:
        return False
    combined = [t for name in numbers - INDICES - MASKS for t in tensors(given[name])]
    dtypes = {t.dtype for t in (*combined, *tensors(result))}
    return any(isinstance(x, bool) or not all(_fits(x, d) for d in dtypes) for x in numbers_given)


def _operands(target: Any, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that hold values, as a loss's target may."""
    return [t for name in (_parts(target)[1] & {TARGET}) | (_parts(target)[1] - INDICES - MASKS) for t in tensors(given[name])]


def _promoted(target: Any, given: Mapping[str, Any]) -> list[torch.dtype]:
    """Dtypes of the operands that the operator may have to promote: classes are integers beside any dtype."""
    classes = [t for t in tensors(given.get(TARGET)) if _is_exact(t.dtype)]
    return [t.dtype for t in _operands(target, given) if not any(t is c for c in classes)]


def _of_exact(target: Any, given: Mapping[str, Any]) -> bool:
    """Whether an operand is of integers or bools, which not all of eager's kernels take. Asking must not draw a number."""
    return not is_random(target) and any(_is_exact(t.dtype) for t in _operands(target, given))


def _is_exact(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _mixed(target: Any, given: Mapping[str, Any]) -> bool:
    """Whether operands on the host differ in dtype and the operator, unlike pointwise ones, may not promote them. Autograd calls
    backwards, with what eager takes: the traced dtype of statistics may be wrong."""
    promoted = torch.Tag.pointwise in target.tags or "_backward" in target._schema.name
    if promoted or len(set(_promoted(target, given))) < 2:
        return False
    return all(t.device.type == HOST for t in _operands(target, given))


def _each(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _is_index(t: torch.Tensor, name: str) -> bool:
    """Whether every operator takes this dtype for an index. Some targets are no indices but values, which are floats."""
    return t.dtype == torch.int64 or (name == "target" and t.dtype.is_floating_point)


def _is_dim(d: Any, rank: int) -> bool:
    return not isinstance(d, int) or -max(rank, 1) <= d < max(rank, 1)


def _fits(x: Any, dtype: torch.dtype) -> bool:
    """Whether every possible value of a number (or 0-dim tensor, or size) fits in `dtype`."""
    if isinstance(x, torch.Tensor):
        return bool(x.dim()) or x.dtype == dtype or all(_fits(v, dtype) for v in _limits(x.dtype))
    if isinstance(x, torch.SymInt | torch.SymFloat):
        return _fits(ANY_NUMBER, dtype)
    if isinstance(x, complex):
        return dtype.is_complex and _fits(x.real, dtype) and _fits(x.imag, dtype)
    limits = _limits(dtype)
    if isinstance(x, bool) or not isinstance(x, int | float) or not limits:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(x) or limits[0] <= x <= limits[1]
    return float(x).is_integer() and limits[0] <= x <= limits[1]


@cache
def _limits(dtype: torch.dtype) -> tuple[Any, ...]:
    """The minimum and maximum of a dtype; () for an unknown one."""
    if dtype == torch.bool:
        return (0, 1)
    try:
        info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    except TypeError:
        return ()
    return (info.min, info.max)


# ---- asking ----


Sizing: TypeAlias = Callable[[torch.Tensor], Sequence[int]]
"""The shape of the stand-in for a tensor."""


def _two_each(t: torch.Tensor) -> Sequence[int]:
    return (2,) * t.dim()


def _asked(target: Any, given: Mapping[str, Any], sizing: Sizing = _two_each) -> str | None:
    """Eager's error for the call with small tensors in place of the given ones; None if it accepts."""
    with torch.no_grad(), compat.real_tensors():
        try:
            if _largest(target, given, sizing) > MOST_ASKED:
                return UNASKED
            _call(target, given, HOST, sizing)
        except Exception as e:  # of any kind: eager will raise it
            return f"eager refuses this call: {' '.join(str(e).split())[:120]}"
    return None


def _asked_of_exact(target: Any, given: Mapping[str, Any]) -> str | None:
    """Eager's error for integers or bools. A call that it refuses with bytes and floats too is refused for the stand-ins' sizes."""
    why = _asked(target, given)
    if why is None:
        return None
    dtypes = [t.dtype for t in _operands(target, given)]
    exact = [d for d in dtypes if _is_exact(d)]
    beside = [d for d in dtypes if not _is_exact(d)][:1]
    others = (_swapped(target, given, to, exact) for to in (torch.uint8, torch.float32, *beside))
    return why if any(_asked(target, other) is None for other in others) else None


def _asked_of_mixed(target: Any, given: Mapping[str, Any]) -> str | None:
    """Eager's error for operands of several dtypes. One dtype shows whether stand-ins of some sizes can be asked about: a norm's
    weight, say, has the sizes that another argument names."""
    dtypes = _promoted(target, given)
    wide = next((d for d in dtypes if d.is_floating_point or d.is_complex), dtypes[0])
    alike = _swapped(target, given, wide, dtypes)
    for sizing in (_two_each, _shared_sizes(target, given), _traced_sizes):
        if sum(math.prod(sizing(t)) for t in _operands(target, given)) > MOST_ASKED:
            continue
        why = _asked(target, given, sizing)
        if why is None or _asked(target, alike, sizing) is None:
            return why
    return None


def _traced_sizes(t: torch.Tensor) -> Sequence[int]:
    return [compat.traced_size(n) or 2 for n in t.shape]


def _shared_sizes(target: Any, given: Mapping[str, Any]) -> Sizing:
    """Sizes of one operand alone, which no argument names, are small: those of batches."""
    named = Counter(n for t in _operands(target, given) for n in set(_traced_sizes(t)))
    named.update(2 * [x for v in given.values() for x in _each(v) if isinstance(x, int)])
    return lambda t: [n if named[n] > 1 else 2 for n in _traced_sizes(t)]


def _swapped(target: Any, given: Mapping[str, Any], to: torch.dtype, dtypes: Sequence[torch.dtype]) -> Mapping[str, Any]:
    """The arguments with the operands of these dtypes in another."""
    operands = [t for t in _operands(target, given) if t.dtype in dtypes]
    others = {t: t.new_empty(t.shape, dtype=to) for t in operands}  # empty_like would compare symbolic strides

    def swap(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [swap(v) for v in value]
        return others.get(value, value) if isinstance(value, torch.Tensor) else value

    return {name: swap(v) for name, v in given.items()}


def _largest(target: Any, given: Mapping[str, Any], sizing: Sizing) -> int:
    """How many elements the call would make, given that size arguments are kept."""
    try:
        return max((t.numel() for t in tensors(_call(target, given, "meta", sizing))), default=0)
    except NotImplementedError:  # an operator without a meta kernel
        return max((abs(x) for v in given.values() for x in _each(v) if isinstance(x, int)), default=0)


def _call(target: Any, given: Mapping[str, Any], device: str, sizing: Sizing) -> Any:
    named, numbers = _parts(target)[2], _scalars(target)
    made = {name: _stand_in(name, v, ANY_NUMBER if name in numbers else 2, device, sizing) for name, v in given.items()}
    return target(*(v for n, v in made.items() if n not in named), **{n: v for n, v in made.items() if n in named})


@cache
def _scalars(target: Any) -> frozenset[str]:
    """Names of an overload's arguments that are numeric operands; its other numbers are sizes and positions."""
    return frozenset(a.name for a in target._schema.arguments if "number" in str(a.type))


def _stand_in(name: str, value: Any, symbol: int, device: str, sizing: Sizing) -> Any:
    if isinstance(value, torch.Tensor):
        return _small(name, value, sizing).to(device)
    if isinstance(value, tuple | list):
        return [2 if name == "size" else _stand_in(name, v, symbol, device, sizing) for v in value]
    if isinstance(value, torch.SymInt) and sizing is not _two_each:
        return compat.traced_size(value) or 2
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return symbol if isinstance(value, torch.SymInt) else float(symbol)
    return torch.device(device) if isinstance(value, torch.device) else value


def _small(name: str, t: torch.Tensor, sizing: Sizing) -> torch.Tensor:
    """Make a small stand-in for a tensor. A 0-dim tensor may have any value, so it gets the maximum; an index must be valid, and a
    mask among indices selects as many elements as other stand-ins have in each dim."""
    value: Any = 0 if name in INDICES else 1
    if not t.dim() and name not in (*INDICES, *MASKS, "self"):
        value = (*_limits(t.dtype), 1)[1]
    with compat.real_tensors():
        made = torch.full(tuple(sizing(t)), value, dtype=t.dtype)
        if name == "indices" and t.dtype in (torch.bool, torch.uint8):
            made.view(-1)[:2] = 1
        return made


def _described(value: Any) -> Any:
    """A hashable key of everything that the answer depends on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    return "size" if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else (type(value), repr(value))
