"""Whether a tensor's memory is its value: the one place that decides what a kernel may read.

Not every torch tensor lies in memory as it reads: views that are negated or conjugated lazily, zeros without memory, sparse and
quantized layouts, subclasses that wrap other tensors, freed storage. What is known while tracing is asked of the graph's
FakeTensors (`partition`). What only real tensors show is checked on the inputs of a graph at capture, on everything that
autograd passes to a backward graph at every call, and on everything that a kernel reads in the first run of a plan
(`firstrun`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright import _torch_compat as compat


def lazy(t: object) -> str:
    """The lazy state that separates a real or fake tensor's memory from its value: "neg", "conj", "zero" or ""."""
    if not isinstance(t, torch.Tensor):
        return ""
    if t.is_neg():
        return "neg"
    if t.is_conj():
        return "conj"
    return "zero" if compat.is_zero_tensor(t) else ""


_LAZY = {"neg": "a view that negates", "conj": "a view that conjugates", "zero": "zeros without memory"}


NO_MEMORY = "has no memory"


def why_not(t: torch.Tensor) -> str:
    """Why the memory at `data_ptr` of a real tensor is not its value, or ""."""
    if t.layout is not torch.strided:
        return f"has the layout {t.layout}"
    if t.is_nested or t.is_quantized:
        return "is a nested tensor" if t.is_nested else "is quantized"
    if found := lazy(t):
        return f"is {_LAZY[found]}"
    try:
        return "" if t.data_ptr() or not t.numel() else NO_MEMORY
    except RuntimeError as e:  # tensors that only wrap others
        return f"has no pointer: {str(e).splitlines()[0]}"


def has_pointer(t: object) -> bool:
    """Whether this is no tensor that only wraps others, as under a vmap, or has another layout: such tensors have no pointer."""
    try:
        return not isinstance(t, torch.Tensor) or t.data_ptr() is not None
    except RuntimeError:
        return False


UNTRACED = "fusewright_untraced"
"""Key in the `meta` of a graph for which a real tensor differs from its FakeTensor; the value is the reason."""


def untraced(t: object) -> str:
    """Why a real tensor differs from its FakeTensor, or "". Zeros without memory are handled separately."""
    if not isinstance(t, torch.Tensor) or compat.is_fake(t) or compat.is_wrapper(t) or t.is_nested:
        return ""
    return why_not(t) if t.is_mkldnn or t.is_quantized else ""


def overlaps(t: object) -> bool:
    """Whether elements of a tensor share memory, or may: after `expand`, or `as_strided` with small strides."""
    if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.is_nested:
        return False
    return shared_elements(t.shape, t.stride())


def shared_elements(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a tensor of this shape and stride share memory, or may."""
    end = 0
    for step, n in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1 and 0 not in shape):
        if step <= end:
            return True
        end += step * (n - 1)
    return False


def materialized(t: torch.Tensor) -> torch.Tensor:
    """Return `t`, or a copy in memory if it is a lazily negated or conjugated view or zeros without memory."""
    return t.detach().clone() if lazy(t) else t


def as_traced(t: torch.Tensor, state: str) -> torch.Tensor:
    """Return `t`, or a copy of the lazy state that was traced: what a view of a conjugated tensor conjugates again, torch takes for
    one in memory."""
    if lazy(t) == state:
        return t
    t = materialized(t)
    match state:
        case "conj":
            return t.detach().conj_physical().conj()
        case "neg":
            return torch.ops.aten._neg_view.default(t.detach().neg())
    return t


def materializing(run: Callable[[list[Any]], Any], places: Mapping[int, str]) -> Callable[[list[Any]], Any]:
    """Wrap `run` so that lazy tensors among the arguments at `places`, which no guard checks, are materialized first, but for those
    traced with that lazy state."""
    watched = tuple(places.items())
    if not watched:
        return run

    def call(args: list[Any]) -> Any:
        for k, state in watched:
            if lazy(args[k]) != state:
                args[k] = as_traced(args[k], state)
        return run(args)

    return call


def zeros_in_memory(fn: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """Wrap `fn` for inputs that include zeros without memory. Dynamo guards on them, but FakeTensors do not show them."""
    places = [k for k, x in enumerate(examples) if isinstance(x, torch.Tensor) and compat.is_zero_tensor(x)]

    def call(*args: Any) -> Any:
        given = list(args)
        for k in places:
            given[k] = materialized(given[k])
        result = fn(*given)
        if any(not given[k].is_inference() and given[k]._version for k in places):
            raise RuntimeError(_IMMUTABLE)
        return result

    return call if places else fn


_IMMUTABLE = (
    "ZeroTensors are immutable. Please use the materialized zero tensor obtained using .clone() if you want a mutable tensor."
)
"""Eager's message for a write into zeros without memory."""
