"""Compares everything visible to the caller between an eager and a compiled call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

SEED = 7


def seen(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return the flat outputs of a seeded call followed by the inputs after it, and the pairs that share memory."""
    torch.manual_seed(SEED)
    outputs = tree_flatten(fn(*args))[0]
    everything = [*outputs, *args]
    storages = [
        t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) and t.numel() else None
        for t in everything
    ]
    pairs = [
        (i, j) for i in range(len(outputs)) for j in range(i + 1, len(everything))
        if storages[i] is not None and storages[i] == storages[j]
    ]  # fmt: skip
    return everything, pairs


def differences(wanted: Sequence[Any], got: Sequence[Any], exact: bool) -> list[str]:
    """List differences value by value: type, dtype, shape, strides, requires_grad, values (bitwise, or close)."""
    found = [] if len(wanted) == len(got) else [f"{len(got)} values, not {len(wanted)}"]
    for i, (w, g) in enumerate(zip(wanted, got, strict=False)):
        if not isinstance(w, torch.Tensor) or not isinstance(g, torch.Tensor):
            if type(w) is not type(g) or w != g:
                found.append(f"value {i} is {g!r}, not {w!r}")
            continue
        for what in ("dtype", "shape", "requires_grad", "layout"):
            if getattr(w, what) != getattr(g, what):
                found.append(f"{what} of value {i} is {getattr(g, what)}, not {getattr(w, what)}")
        if w.shape == g.shape and w.layout is torch.strided and w.numel():
            if [s for n, s in zip(w.shape, w.stride(), strict=True) if n > 1] != [
                s for n, s in zip(g.shape, g.stride(), strict=True) if n > 1
            ]:
                found.append(f"strides of value {i} are {g.stride()}, not {w.stride()}")
        if w.shape == g.shape and w.dtype == g.dtype and not _same(w.detach(), g.detach(), exact):
            found.append(f"value {i} differs: {w.flatten()[:4].tolist()} became {g.flatten()[:4].tolist()}")
    return found


def _same(w: torch.Tensor, g: torch.Tensor, exact: bool) -> bool:
    if exact or not w.is_floating_point():
        return torch.equal(w, g) or (w.is_floating_point() and torch.equal(w.nan_to_num(), g.nan_to_num()))
    eps = torch.finfo(w.dtype).eps
    return torch.allclose(w, g, rtol=64 * eps, atol=64 * eps, equal_nan=True)


def against_eager(
    fn: Callable[..., Any], make: Callable[[], Sequence[Any]], backend: str, exact: bool, **how: Any
) -> list[str]:
    """List differences between `fn` and its compiled form on fresh equal inputs. Calls twice, so that one call is warm."""
    torch.compiler.reset()
    compiled = torch.compile(fn, backend=backend, **how)
    found = []
    for call in ("first call", "second call"):
        wanted, shared = seen(fn, make())
        got, ours = seen(compiled, make())
        found += [f"{call}: {d}" for d in differences(wanted, got, exact)]
        if shared != ours:
            found.append(f"{call}: memory shared by {ours}, not {shared}")
    return found


def gradients(fn: Callable[..., torch.Tensor], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output of a seeded call and the gradients of its inputs, as `backward` leaves them."""
    torch.manual_seed(SEED)
    out = fn(*args)
    out.square().sum().backward()
    return [out.detach(), *(a.grad for a in args if a.grad is not None)]
