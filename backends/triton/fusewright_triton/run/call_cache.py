"""Repeated calls of handwritten operators without Python, by `fusewright-native`.

The second call with arguments of some layout (types, sizes, strides, alignment, numbers) is traced: which memory it allocates,
which kernels it launches, and which arguments the addresses come from. Later calls with that layout do the same from C++. In
Python an operator takes 40 to 120 us, of which a launch is 4.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright.plan import native
from fusewright_triton.run.bound import Bound, TensorDescriptor
from fusewright_triton.run.driver import DESCRIPTOR, driver, encoding

ALLOCATING = frozenset({
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
})  # fmt: skip

_tracing = threading.local()


def active() -> Trace | None:
    """Return the trace of the operator that this thread is running."""
    found: Trace | None = getattr(_tracing, "trace", None)
    return found


def cached(run: Callable[..., Any], told: bool = False) -> Callable[..., Any]:
    """Return `run`, or what computes the same without Python where that is possible. `told`: `run` allocates by `allocated` alone
    and tells the views that it makes (`same`), so its first call can be traced, at little cost: for layouts that come once a call
    of a model."""
    if native.extension() is None or not torch.cuda.is_available():
        return run
    return _cached(run, told)


@functools.cache
def _cached(run: Callable[..., Any], told: bool) -> Callable[..., Any]:
    d = driver("cuda" if torch.version.hip is None else "hip")
    trace = functools.partial(_told if told else traced, run)
    return native.call_cache(run, trace, d.launch_functions(), d.encode_address(), told) or run


def allocated(out: torch.Tensor) -> torch.Tensor:
    """Return a new tensor, and tell the trace of the operator about it."""
    if (trace := active()) is not None:
        trace.allocated(out)
    return out


def same(view: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a view that begins where its source does, and tell the trace of the operator about it."""
    if (trace := active()) is not None and id(source) in trace.sources:
        trace.hold(view, trace.sources[id(source)])
    return view


def _told(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """Like `traced`, for a function that tells what it allocates."""
    _tracing.trace = trace = Trace([*args, *kwargs.values()])
    try:
        result = run(*args, **kwargs)
    finally:
        _tracing.trace = None
    return result, trace.program(result)


def traced(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """Return the result of a call, and what it did in the form of `call_cache.h` of the extension; None for what cannot be done
    again from addresses alone, e.g. a copy of an argument."""
    trace = Trace([*args, *kwargs.values()])
    _tracing.trace = trace
    try:
        with native.dispatch_mode(trace.dispatched):
            result = run(*args, **kwargs)
    finally:
        _tracing.trace = None
    return result, trace.program(result)


class Trace:
    """What an operator does: `sources` maps the id of a tensor to where its address comes from, argument k or, as -1 - k, the k-th
    allocation, and to its offset from there in bytes."""

    def __init__(self, args: Sequence[Any]) -> None:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.device = tensors[0].get_device()
        self.sources = {id(t): (k, 0) for k, t in enumerate(tensors)}
        self.made: list[torch.Tensor] = []
        self.launches: list[tuple[Any, ...]] = []
        self.repeatable = len(self.sources) == len(tensors)  # of a tensor given twice, the next call may give two
        self._held: list[Any] = tensors  # an id may be reused once its object is gone

    def dispatched(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator of torch, and note what it gives."""
        out = func(*args, **kwargs)
        self._held.append(out)
        if func in ALLOCATING and out.get_device() == self.device:
            self.allocated(out)
        elif func.is_view and id(args[0]) in self.sources and isinstance(out, torch.Tensor):
            source, offset = self.sources[id(args[0])]
            self.sources[id(out)] = source, offset + out.data_ptr() - args[0].data_ptr()
        else:
            self.repeatable = False
        return out

    def allocated(self, out: torch.Tensor) -> None:
        """Note an allocation, once."""
        if id(out) not in self.sources:
            self.hold(out, (-1 - len(self.made), 0))
            self.made.append(out)

    def hold(self, t: torch.Tensor, source: tuple[int, int]) -> None:
        """Note where a tensor's address comes from."""
        self._held.append(t)
        self.sources[id(t)] = source

    def launched(self, bound: Bound, blocks: int, args: Sequence[Any]) -> None:
        """Note a launch of `bound` with these arguments."""
        base = ctypes.addressof(bound.memory)
        start = base + -base % DESCRIPTOR
        pointers = [(*self._source(args[k]), base + at - start) for k, at in bound.pointers]
        descriptors = [
            ((*self._source(args[d.argument]), d.at - start), *encoding(t.shape, t.stride(), d.how))
            for d in bound.descriptors
            for t in [args[d.argument].tensor]
        ]
        filled = bound.memory.raw[start - base :]
        places = [(p or 0) - start for p in bound.params]
        step = (bound.function, blocks, bound.threads, bound.shared, filled, places, pointers, descriptors)
        self.launches.append(step)

    def _source(self, a: torch.Tensor | TensorDescriptor) -> tuple[int, int]:
        found = self.sources.get(id(a.tensor if isinstance(a, TensorDescriptor) else a))
        self.repeatable &= found is not None
        return found or (0, 0)

    def program(self, result: Any) -> tuple[Any, ...] | None:
        """Return all that was noted, if it gives the result: an allocation as it was made."""
        which, offset = self.sources.get(id(result), (0, 0))
        made = [_layout(t) for t in self.made]
        if not self.repeatable or which >= 0 or offset or _layout(result) != made[-1 - which]:
            return None
        return self.device, made, self.launches, -1 - which


def _layout(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(t.shape), t.stride(), t.dtype
