"""Helpers shared by dtype rules and shape rules: naming, and access to a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def named(rule: F, name: str) -> F:
    """Set the name of a generated rule, as the docs page shows it."""
    rule.__name__ = rule.__qualname__ = name
    return rule


def is_tensor(x: Any) -> bool:
    """Whether `x` describes a tensor (see `core.Args`)."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def tensors(x: Any) -> Iterator[Any]:
    """Every tensor in `x`, in order."""
    if is_tensor(x):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from tensors(y)


def device_type(t: Any) -> str:
    """The device type of a tensor or a spec, by torch's name."""
    return str(t.device).partition(":")[0]


def wrap(dim: int, rank: int) -> int:
    """Normalize a dimension to count from the front."""
    return dim + max(rank, 1) if dim < 0 else dim


def is_one(size: Any) -> bool:
    """Whether a size is known to be one, without a guard on a symbol."""
    return isinstance(size, int) and size == 1


def times(n: int) -> str:
    """The name suffix of a rule for several outputs."""
    return f" x{n}" if n > 1 else ""


def masked_by(outs: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    """`outs` with None for those that `mask` switches off."""
    return tuple(o if m else None for o, m in zip(outs, mask, strict=True))
